"""Run an experiment: train what is missing, forget, measure; every step is on disk and is not done twice."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest, union_of
from fedortho.data.sources import DATASETS
from fedortho.devices import using_threads
from fedortho.errors import FedOrthoError
from fedortho.experiments.experiment import (
    Experiment,
    Treatment,
    check_relations,
    network_key,
    request_for,
    request_kind,
)
from fedortho.experiments.relations import Row, word
from fedortho.federated.server import train_federation
from fedortho.requests.comparing import compare
from fedortho.requests.federated_forgetting import forget_federated_run
from fedortho.requests.forgetting import forget_run
from fedortho.requests.references import find_reference, reference_name, reference_settings, train_reference
from fedortho.requests.run_context import method_for_run, open_context
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.settings import FREE, FederateSettings, TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import canonical_json
from fedortho.storage.provenance import write_results
from fedortho.storage.settings import as_mapping
from fedortho.unlearning.calibrate import Refused
from fedortho.unlearning.plan import ForgetSettings

Watch = Callable[[Any], None]


@dataclass(frozen=True)
class Show:
    """Who is told of progress: what is done now, and, by a new watcher for each, the news of trainings."""

    step: Callable[[str, int, int], None] = lambda *_: None  # what, networks done, networks in all
    training: Callable[[], Watch | None] = lambda: None
    federation: Callable[[], Watch | None] = lambda: None
    decoding: Callable[[int, int], None] | None = None


SILENT = Show()


def reproduce(
    experiment: Experiment, place: Path, *, data_dir: str = "", show: Show = SILENT, results: Path | None = None
) -> list[Row]:
    """All rows of an experiment, one for each seed; networks and outcomes are kept under `place`.

    All experiments of that directory share its networks and retrained models. `results` is written after each row.
    """
    networks = [_located(settings, data_dir) for settings in experiment.networks]
    for settings in {network.data: network for network in networks}.values():
        load_run_data(settings, progress=show.decoding)  # refuses before anything is trained
    rows: list[Row] = []
    order = [replace(settings, seed=seed) for seed in experiment.seeds for settings in networks]
    for number, settings in enumerate(order):
        key = {"seed": settings.seed, **network_key(settings)}
        name = " ".join(map(str, key.values()))

        def tell(text: str, done: int = number, name: str = name) -> None:
            show.step(f"{name}: {text}", done, len(order))

        tell("training")
        run = trained(place / "networks", settings, show)
        serve = _sequence if experiment.is_sequence else _requests
        for row in serve(experiment, run, run.load_data(), place, replace(show, step=lambda text, *_: tell(text))):
            rows.append(key | row)
            if results is not None:
                command = f"fedortho reproduce {experiment.name} --scale {experiment.scale}"
                more = {"scale": experiment.scale, "relations": check_relations(experiment, rows)}
                write_results(results, f"{experiment.name}: {experiment.what}", command, rows, **more)
    return rows


def _located(settings: TrainSettings, data_dir: str) -> TrainSettings:
    known = DATASETS.get(settings.data)
    return replace(settings, data_dir=data_dir) if data_dir and known is not None and known.folders else settings


def trained(directory: Path, settings: TrainSettings, show: Show = SILENT) -> Run:
    """A network of these settings from a directory of runs, trained unless it is there."""
    known = {key: value for key, value in as_mapping(settings).items() if key not in FREE}
    digest = hashlib.sha256(canonical_json(known).encode()).hexdigest()[:8]
    path = directory / f"{settings.data}-{settings.model}-seed{settings.seed}-{digest}".replace(":", "-")
    if isinstance(settings, FederateSettings):
        run = train_federation(path, settings, watch=show.federation())
    else:
        run = train_run(path, settings, watch=show.training(), progress=show.decoding)
    return replace(run, settings=settings)  # its data may lie elsewhere than when it was trained


def _requests(experiment: Experiment, run: Run, data: Dataset, place: Path, show: Show) -> Iterator[Row]:
    """Every request of the same network, by every method: `compare` does the work."""
    references = place / "references"
    for words in experiment.requests:
        request, kind = request_for(words, data), request_kind(words)
        yield {"request": kind, "method": "original"} | _accuracies(run, data, request)
        for treatment in experiment.treatments:
            name = treatment.method
            show.step(f"{name} {kind}", 0, 0)
            if name == "retrain":  # compare would do it too, unseen
                wanted = reference_settings(run, request)
                if find_reference(references, wanted, data.digest) is None:
                    train_reference(references, reference_name(run, request, wanted), wanted, watch=show.training())
            out = place / "outcomes" / run.path.name / words.replace(":", "-").replace(" ", "-") / _word(treatment)
            settings = {name: treatment.settings}
            (found,) = compare(run, request, [name], out=out, data=data, settings=settings, references=references)
            outcome: Row = {"refused": found.refused} if found.accuracies is None else asdict(found.accuracies)
            yield {"request": kind, "method": name, **treatment.swept, **outcome}


def _accuracies(run: Run, data: Dataset, request: ForgetRequest) -> dict[str, float]:
    context = replace(open_context(run, data), forgotten=None)
    return asdict(context.accuracies(run.load_model(), request))


def _word(treatment: Treatment) -> str:
    return "-".join(f"{key}-{word(value)}" for key, value in treatment.swept.items()) or "as-set"


def _sequence(experiment: Experiment, run: Run, data: Dataset, place: Path, show: Show) -> Iterator[Row]:
    """One request after the other, each served by the model that has served those before; stops at a refusal."""
    requests = [request_for(words, data) for words in experiment.requests]
    everything = union_of(requests)
    assert everything is not None, "a sequence has requests"
    yield {"request": everything.kind, "method": "original", "step": 0} | _accuracies(run, data, everything)
    for treatment in experiment.treatments:
        now = run
        for step, request in enumerate(requests, 1):
            show.step(f"{treatment.method}, request {step}", 0, 0)
            row = {"request": request.kind, "method": treatment.method, "step": step, **treatment.swept}
            out = place / "outcomes" / run.path.name / f"{treatment.method}-{_word(treatment)}-step{step}"
            try:
                now = _served(now, data, request, treatment, out)
            except Refused as refusal:
                yield row | {"refused": str(refusal)}
                break
            served = now.record.requests[-1]
            yield row | asdict(served.after) | {"forgotten": dict(served.all_forgotten)}


def _served(run: Run, data: Dataset, request: ForgetRequest, treatment: Treatment, out: Path) -> Run:
    settings = method_for_run(run, treatment.method, treatment.settings)
    if not isinstance(settings, ForgetSettings):
        raise FedOrthoError(f"{treatment.method} serves no sequence: its outcome cannot be edited again; leave it out")
    if not out.exists():
        with using_threads(run.settings.threads):
            if isinstance(run.settings, FederateSettings):
                forget_federated_run(run, request, settings, out=out, data=data, data_dir=run.settings.data_dir)
            else:
                forget_run(run, data, request, settings, out=out, device=open_context(run, data).device)
    found = replace(open_run(out), settings=run.settings)
    served = found.record.requests[-1]
    made = (found.record.parent, served.request, served.settings)
    if made != (run.record.model.digest, str(request), as_mapping(settings)):
        raise FedOrthoError(f"{out} was made from another model, request or settings; choose another --out")
    return found
