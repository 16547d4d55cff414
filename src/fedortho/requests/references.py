"""Retrained models, what forgetting is measured by: found by what they were made from, or trained and kept."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest, union_of
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.evaluation.case import Case
from fedortho.federated.messages import TrainLocal
from fedortho.federated.transport import read_wire_log, total_bytes
from fedortho.runs.federation import held_rows
from fedortho.runs.record import RunRecord, read_run_record
from fedortho.runs.run import Run, open_run
from fedortho.runs.served import excluded_besides, excluded_by
from fedortho.runs.settings import FREE, FederateSettings, TrainSettings, relocated
from fedortho.runs.training import train_run
from fedortho.statistics.cost import Cost, training_cost
from fedortho.statistics.engine import Tally
from fedortho.storage.settings import as_mapping
from fedortho.training.loop import Watch
from fedortho.training.recipe import Recipe

logger = logging.getLogger(__name__)
# another value of these is no other reference
IRRELEVANT = (*FREE, "data", "threads", "device", "evaluate-every", "keep-updates")


def reference_settings(
    run: Run, request: ForgetRequest, *, seed: int | None = None, plain: bool = False, data_dir: str = ""
) -> TrainSettings:
    """How to train a model that never met what the request names, nor what the run had forgotten before.

    By the recipe of the run, on images split as the run's; `plain` leaves orthogonality and alignment out. Another
    `seed` gives a second reference: how far two models that never met it differ tells what a difference is worth.
    """
    settings = relocated(run.settings, data_dir)
    gone = union_of([part for part in (excluded_by(run), request) if part is not None])
    assert gone is not None, "the request is one of them"
    if isinstance(settings, FederateSettings):
        settings = replace(settings, start="", keep_updates=False)  # the weights it went on from knew what must go
    return replace(
        settings,
        without=str(gone.settled(run.record.data.class_names)),
        seed=settings.seed if seed is None else seed,
        split_seed=settings.partition_seed,
        ortho=0.0 if plain else settings.ortho,
        align=0.0 if plain else settings.align,
    )


def find_reference(directory: Path, settings: TrainSettings, data_digest: str) -> Run | None:
    """The finished run in a directory of runs that was trained by these settings on this data."""
    for run in finished_runs(directory):
        names = run.record.data.class_names
        is_same = run.record.data.digest == data_digest and _key(run.settings, names) == _key(settings, names)
        if is_same and _is_whole(run):
            return run
    return None


def _is_whole(run: Run) -> bool:
    """Whether a run's model came out of training as it is: what was edited afterwards is no reference."""
    return not run.record.is_edited


def finished_runs(directory: Path, *, strict: bool = False) -> Iterator[Run]:
    """The finished runs in a directory; a damaged one is told of and passed over, or an error."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not (path / "run.json").is_file():
            continue
        try:
            if isinstance(read_run_record(path), RunRecord):
                yield open_run(path)
        except FedOrthoError as error:
            if strict:
                raise
            logger.warning("passed over: %s", error)


def _key(settings: TrainSettings, names: Sequence[str], seed: int | None = None) -> dict[str, object]:
    """What makes a reference the same, however its request is spelled; with a `seed`, as if trained by that one."""
    known = as_mapping(settings) | {"split-seed": settings.partition_seed}
    if settings.without:
        known["without"] = str(ForgetRequest.parse(settings.without).settled(names))
    known |= {} if seed is None else {"seed": seed}
    return {name: value for name, value in known.items() if name not in IRRELEVANT}


def train_reference(directory: Path, name: str, settings: TrainSettings, *, watch: Watch | None = None) -> Run:
    """Train a reference into a directory of runs; a killed one goes on where it stopped."""
    if isinstance(settings, FederateSettings):
        from fedortho.federated.server import train_federation

        return train_federation(directory / name, settings)
    return train_run(directory / name, settings, watch=watch)


def reference_name(run: Run, request: ForgetRequest, settings: TrainSettings) -> str:
    """A readable directory name; two references of one run differ in it."""
    return f"{run.path.name}-without-{request.word}{'-plain' if settings.ortho == 0 else ''}-seed{settings.seed}"


def check_reference(run: Run, reference: Run, request: ForgetRequest) -> None:
    """Refuse a reference that saw what must go, or that knows other data or another network."""
    if reference.record.data.digest != run.record.data.digest:
        raise BadCheckpoint(f"{reference.path} was trained on other data than {run.path}; retrain on the same")
    if reference.settings.model != run.settings.model:
        raise BadCheckpoint(f"{reference.path} is a {reference.settings.model}, {run.path} a {run.settings.model}")
    began = reference.settings.start if isinstance(reference.settings, FederateSettings) else ""
    if began or not _is_whole(reference):
        raise FedOrthoError(f"{reference.path} was edited or began with another model; give one trained --without it")
    names, out = run.record.data.class_names, excluded_by(reference)
    if out is None or not out.settled(names).covers(request.settled(names)):
        raise FedOrthoError(f"{reference.path} was trained with what {request} names; give one trained --without it")
    gone = union_of([part for part in (excluded_by(run), request) if part is not None])
    assert gone is not None, "the request is one of them"
    if not gone.settled(names).covers(out.settled(names)):
        raise FedOrthoError(f"{reference.path} was trained without {out}, which is more than {gone}; it is no standard")
    mine, theirs = as_mapping(run.settings), as_mapping(reference.settings)
    recipe = [f.name.replace("_", "-") for f in fields(Recipe) if f.name != "seed"]
    if other := [f"{key} {theirs[key]}, not {mine[key]}" for key in recipe if theirs[key] != mine[key]]:
        logger.warning("%s was trained by another recipe (%s): read it with care", reference.path, ", ".join(other))


def reference_cost(reference: Run, data: Dataset) -> Cost:
    """What training a reference took, from its own history and its log of exchanges."""
    log = read_wire_log(reference.path / "wire.json")
    rounds = [exchange for exchange in log if exchange.kind == TrainLocal.action]
    up, down = total_bytes(rounds)
    tally = Tally(exchanges=len(rounds), bytes_up=up, bytes_down=down)
    history = reference.history()
    if not isinstance(reference.settings, FederateSettings):  # older ones did not count: each image once an epoch
        history = [replace(entry, images=entry.images or reference.record.data.train) for entry in history]
    return training_cost(history, reference.load_model(), data.train.shape, tally)


def case_of(
    run: Run,
    request: ForgetRequest,
    data: Dataset,
    original: Run,
    reference: Run | None = None,
    second: Run | None = None,
    device: torch.device | str = "cpu",
) -> Case:
    """The models of these runs as a case for audits; runs that do not belong together are refused."""
    for found in (reference, second):
        if found is not None:
            check_reference(run, found, request)
    if original.record.data.digest != run.record.data.digest:
        raise BadCheckpoint(f"{original.path} was trained on other data than {run.path}")
    names = run.record.data.class_names
    before = excluded_by(original)
    if before is not None and before.settled(names).covers(request.settled(names)):
        raise FedOrthoError(f"{original.path} has forgotten {request} before; give the run that had not (--original)")
    others = excluded_besides(run, request)
    settings = run.settings
    clients = held_rows(data, settings, settings.partition_seed) if isinstance(settings, FederateSettings) else None
    retrained, again = (None if found is None else found.load_model() for found in (reference, second))
    return Case(run.load_model(), original.load_model(), retrained, again, data, request, others, clients, device)


def find_original(run: Run) -> Run | None:
    """The run that this one was made from, if it lies beside it; of several with its weights the one set as this is.

    One that was trained on after forgetting was made from what the run that it began with was made from.
    """
    parent = run.record.parent
    start = run.settings.start if isinstance(run.settings, FederateSettings) else ""
    if parent is None and start and (Path(start) / "run.json").is_file():
        return find_original(open_run(start))
    beside = finished_runs(run.path.resolve().parent) if parent else iter(())
    found = [other for other in beside if other.record.model.digest == parent]
    return min(found, key=lambda other: as_mapping(other.settings) != as_mapping(run.settings), default=None)


def original_of(run: Run, given: Path | None = None) -> Run:
    """The run before forgetting: the one that is given, or the one it was made from."""
    found = open_run(given) if given is not None else find_original(run)
    if found is None:
        raise FedOrthoError(f"the run that {run.path} was made from is not beside it; give it with --original RUN")
    return found


def find_references(original: Run, request: ForgetRequest, place: Path | None = None, data_dir: str = "") -> list[Run]:
    """Retrained models in a directory of runs, one of each seed: of the original's seed first, then of others.

    By default those beside the original, and in the directory `references` there.
    """
    beside = original.path.resolve().parent
    found = [run for where in ([place] if place else [beside, beside / "references"]) for run in finished_runs(where)]
    names = original.record.data.class_names
    wanted = _key(reference_settings(original, request, data_dir=data_dir), names)
    digest, seed = original.record.data.digest, original.settings.seed
    mine = [run for run in found if run.record.data.digest == digest and _is_whole(run)]
    by_seed = {run.settings.seed: run for run in reversed(mine) if _key(run.settings, names, seed) == wanted}
    return sorted(by_seed.values(), key=lambda run: (run.settings.seed != seed, run.settings.seed))
