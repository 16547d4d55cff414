"""Run an experiment: train missing networks, forget, measure; every step is on disk and is not repeated."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest, union_of
from fedortho.data.sources import DATASETS
from fedortho.devices import using_threads
from fedortho.engines.cost import Cost
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.experiments.experiment import (
    DataSummary,
    Experiment,
    ExperimentResults,
    MethodVariant,
    check_claims,
    load_experiment,
    network_key,
    request_for,
    request_kind,
    summarise_data,
)
from fedortho.experiments.measuring import OutcomeMeasures, measure_outcome
from fedortho.experiments.relations import SeedRow, as_text
from fedortho.federated.server import train_federation
from fedortho.methods.method import PlanningMethod
from fedortho.requests.comparing import compare
from fedortho.requests.forgetting import forget_run
from fedortho.requests.references import find_reference, reference_name, reference_settings
from fedortho.requests.run_context import method_for_run, open_context
from fedortho.runs.record import Accuracies
from fedortho.runs.run import Run, load_run_data
from fedortho.runs.settings import FREE, FederateSettings, TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import canonical_json, locked
from fedortho.storage.provenance import environment
from fedortho.storage.records import Scalar, read_record, write_record
from fedortho.storage.settings import as_mapping
from fedortho.unlearning.calibrate import Refused

Watch = Callable[[Any], None]
LONGEST_COPY = 600.0  # seconds to wait for another process that copies the same run


@dataclass(frozen=True)
class ProgressHooks:
    """Called with progress: the step, networks done and in all; factories of a watcher for each training."""

    step: Callable[[str, int, int], None] = lambda *_: None
    training: Callable[[], Watch | None] = lambda: None
    federation: Callable[[], Watch | None] = lambda: None
    decoding: Callable[[int, int], None] | None = None


SILENT = ProgressHooks()


def reproduce(
    experiment: Experiment | str,
    out: Path | str = "runs/reproduce",
    *,
    data_dir: str = "",
    networks: Path | str | None = None,
    device: str = "auto",
    hooks: ProgressHooks = SILENT,
) -> ExperimentResults:
    """Run an experiment, given by its name or as `load_experiment` returns it; all rows and checked claims.

    Networks, reference models and outcomes are kept in the directory `out`, and all experiments there share them. Runs
    in the directory `networks` that were trained by the same settings on the same images are copied, not trained again.
    OUT/NAME-SCALE.json holds the results, that of a narrowed table also names its limits; written after each row,
    once there are as many as in the file of an earlier call.
    """
    experiment = load_experiment(experiment) if isinstance(experiment, str) else experiment
    out, rows, before = Path(out), list[SeedRow](), known_networks(networks)
    located = located_networks(experiment, data_dir, device)
    used = dict[str, DataSummary]()  # missing data, and other data than the paper's, are refused before any training
    digests, path = dict[str, str](), out / experiment.file_name
    known = _number_of_rows(path)
    for settings in {network.data: network for network in located}.values():
        data = load_run_data(settings, progress=hooks.decoding)
        used[settings.data], digests[settings.data] = summarise_data(experiment, settings.data, data), data.digest
    order = [replace(settings, seed=seed) for seed in experiment.seeds for settings in located]
    for number, settings in enumerate(order):
        name = " ".join([str(settings.seed), *map(as_text, network_key(settings).values())])

        def on_step(text: str, *_: int, done: int = number, name: str = name) -> None:
            hooks.step(f"{name}: {text}", done, len(order))

        on_step("training")
        if before is not None:
            take_over(before, settings, digests[settings.data], network_path(out / "networks", settings))
        run = trained(out / "networks", settings, hooks)
        data = run.load_data()
        if before is not None:
            for request in [request_for(words, data) for words in experiment.requests]:
                wanted = reference_settings(run, request)
                place = out / "references" / reference_name(run, request, wanted)
                take_over(before, wanted, digests[settings.data], place)
        serve = _sequence if experiment.is_sequence else _requests
        for row in serve(experiment, run, data, out, replace(hooks, step=on_step)):
            rows.append(replace(row, key={**network_key(settings), **row.key}))
            if len(rows) >= known:
                write_record(path, _results(experiment, rows, used))
    results = _results(experiment, rows, used)
    write_record(path, results)
    return results


def _number_of_rows(path: Path) -> int:
    """Of a result file; 0 if there is none that can be read."""
    try:
        return len(read_record(ExperimentResults, path).rows) if path.is_file() else 0
    except BadCheckpoint:
        return 0


def known_networks(networks: Path | str | None) -> Path | None:
    """The directory of networks that were trained before; what is none is refused."""
    if networks is not None and not Path(networks).is_dir():
        raise FedOrthoError(f"{networks} is no directory of trained networks; give another one, or none")
    return None if networks is None else Path(networks)


def located_networks(experiment: Experiment, data_dir: str, device: str) -> list[TrainSettings]:
    """The networks on a device, with the data that is not part of the package in a directory."""
    networks = [replace(settings, device=device) for settings in experiment.networks]
    if not data_dir:
        return networks
    named = {name for name, source in DATASETS.items() if source.folders}
    return [replace(each, data_dir=data_dir) if each.data in named else each for each in networks]


def _results(experiment: Experiment, rows: list[SeedRow], used: dict[str, DataSummary]) -> ExperimentResults:
    return ExperimentResults(
        f"{experiment.name}: {experiment.what}",
        experiment.command,
        experiment.scale,
        tuple(rows),
        check_claims(experiment, rows),
        environment(),
        used,
    )


def network_path(directory: Path, settings: TrainSettings) -> Path:
    """Where the network with these settings is kept in a directory of runs."""
    known = {key: value for key, value in as_mapping(settings).items() if key not in FREE}
    return directory / f"{settings.data}-{settings.model}-seed{settings.seed}-{_digest(known)}".replace(":", "-")


def take_over(networks: Path, settings: TrainSettings, digest: str, path: Path) -> None:
    """Copy a run that was trained by these settings on images with this digest to `path`, if there is one."""
    with locked(path, timeout=LONGEST_COPY):  # another process may copy it too
        found = None if path.exists() else find_reference(networks, settings, digest)
        if found is not None:  # copied outside of the directory of runs: half of a run is none
            part = path.parent.with_name(f"{path.parent.name}.part") / path.name
            shutil.copytree(found.path, part, dirs_exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            part.rename(path)


def trained(directory: Path, settings: TrainSettings, hooks: ProgressHooks = SILENT) -> Run:
    """The network with these settings in a directory of runs, trained if it is missing."""
    path = network_path(directory, settings)
    if isinstance(settings, FederateSettings):
        run = train_federation(path, settings, watch=hooks.federation())
    else:
        run = train_run(path, settings, watch=hooks.training(), progress=hooks.decoding)
    return replace(run, settings=settings)  # its data may lie elsewhere than during training


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:8]


def _requests(experiment: Experiment, run: Run, data: Dataset, out: Path, hooks: ProgressHooks) -> Iterator[SeedRow]:
    """Every request on the same network by every method."""
    seed = run.settings.seed
    for words in experiment.requests:
        request, kind = request_for(words, data), request_kind(words)
        folder = out / "outcomes" / run.path.name / words.replace(":", "-").replace(" ", "-")
        yield _original(run, data, request, {"request": kind}, folder)
        for variant in experiment.variants:
            name, on_training = variant.method, hooks.training() if variant.method == "retrain" else None
            hooks.step(f"{name} {kind}", 0, 0)
            place = folder / _name(run, variant, [request])
            where: dict[str, Any] = {"out": place, "references": out / "references", "on_training": on_training}
            settings = {name: variant.on(run.settings)}
            (found,) = compare(_with_fraction(run, variant), request, [name], settings=settings, data=data, **where)
            key: dict[str, Scalar] = {"request": kind, "method": name, **variant.varied}
            row = SeedRow(seed, key, found.accuracies, found.refused, seconds=_seconds(found.cost))
            row = replace(row, is_unchanged=found.is_unchanged and not found.refused)
            measured = (place / f"{name}-measures.json", place / name, run, data, request)
            yield row if found.refused else _measured(row, measure_outcome(*measured, None))


def _measured(row: SeedRow, measures: OutcomeMeasures) -> SeedRow:
    return replace(row, membership=measures.membership, images=measures.images)


def _seconds(cost: Cost | None) -> float | None:
    return None if cost is None else cost.seconds


def _original(run: Run, data: Dataset, request: ForgetRequest, key: dict[str, Scalar], folder: Path) -> SeedRow:
    """The row of the model as it was trained."""
    path = folder / f"original-{_digest(str(request))}-measures.json"
    row = SeedRow(run.settings.seed, {**key, "method": "original"}, _original_accuracies(run, data, request))
    return _measured(row, measure_outcome(path, run, run, data, request, None))


def _with_fraction(run: Run, variant: MethodVariant) -> Run:
    """The run, with as many clients in a round as the variant wants."""
    if not variant.fraction or not isinstance(run.settings, FederateSettings):
        return run
    return replace(run, settings=replace(run.settings, fraction=variant.fraction))


def _original_accuracies(run: Run, data: Dataset, request: ForgetRequest) -> Accuracies:
    return replace(open_context(run, data), forgotten=None).accuracies(run.load_model(), request)


def _name(run: Run, variant: MethodVariant, requests: Sequence[ForgetRequest]) -> str:
    """What varies, and a digest of all settings and requests: with another setting it is another outcome."""
    settings = as_mapping(method_for_run(run, variant.method, variant.on(run.settings)))
    words = [f"{key}-{as_text(value)}" for key, value in variant.varied.items()] or ["as-set"]
    return "-".join([*words, _digest([settings, variant.fraction, *map(str, requests)])])


def _sequence(experiment: Experiment, run: Run, data: Dataset, out: Path, hooks: ProgressHooks) -> Iterator[SeedRow]:
    """One request after the other, each on the model that has served those before; stops at a refusal."""
    seed, requests = run.settings.seed, [request_for(words, data) for words in experiment.requests]
    everything = sum(requests, ForgetRequest())
    folder = out / "outcomes" / run.path.name
    before = _original(run, data, everything, {"request": everything.kind, "step": 0}, folder)
    assert before.accuracies is not None, "it was measured"
    nothing_forgotten = replace(before.accuracies, retain=before.accuracies.test)  # as printed: all classes
    yield replace(before, accuracies=nothing_forgotten, images={**before.images, "retain": len(data.test)})
    for variant in experiment.variants:
        current = run
        for step, request in enumerate(requests, 1):
            hooks.step(f"{variant.method}, request {step}", 0, 0)
            key: dict[str, Scalar] = {"request": request.kind, "method": variant.method, "step": step, **variant.varied}
            place = folder / f"{variant.method}-{_name(run, variant, requests[:step])}-step{step}"
            try:
                current = _served(current, data, request, variant, place)
            except Refused as refusal:
                yield SeedRow(seed, key, refused=str(refusal))
                break
            served = current.record.requests[-1]
            row = SeedRow(seed, key, served.after, forgotten=served.all_forgotten, seconds=_seconds(served.cost))
            measured = (place.with_name(f"{place.name}-measures.json"), current, run, data, request)
            yield _measured(row, measure_outcome(*measured, union_of(requests[: step - 1])))


def _served(run: Run, data: Dataset, request: ForgetRequest, variant: MethodVariant, out: Path) -> Run:
    method = method_for_run(run, variant.method, variant.on(run.settings))
    if not isinstance(method, PlanningMethod):
        raise FedOrthoError(f"{method.name} serves no sequence: its model cannot be edited again; leave it out")
    with using_threads(run.settings.threads):
        served = forget_run(run, request, method, out=out, data=data, device=run.settings.device).run
    assert served is not None, "it has an out"
    return replace(served, settings=run.settings)
