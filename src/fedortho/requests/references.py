"""Reference models, retrained without the forget set: found by their settings, or trained and kept."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count
from pathlib import Path

import torch

from fedortho.data.cache import without_forgotten
from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest
from fedortho.engines.cost import Cost, training_cost
from fedortho.engines.engine import Tally
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.evaluation.case import Case
from fedortho.federated.messages import TrainLocal
from fedortho.federated.server import train_federation
from fedortho.federated.transport import read_wire_log, total_bytes
from fedortho.methods.method import CannotServe
from fedortho.methods.retrain import NO_RECIPE
from fedortho.runs.continuing import is_new
from fedortho.runs.record import RunRecord, ServedRecord, read_run_record
from fedortho.runs.rows import read_rows
from fedortho.runs.run import Run, excluded_besides, open_run
from fedortho.runs.settings import FREE, FederateSettings, TrainSettings, held_rows
from fedortho.runs.training import train_run
from fedortho.storage.records import Scalar
from fedortho.storage.settings import as_mapping, kebab
from fedortho.training.loop import Epoch, Watch
from fedortho.training.recipe import Recipe

logger = logging.getLogger(__name__)
KEPT = ("keep-updates", "keep-rounds", "keep-epochs")
# settings that do not make another reference model
IRRELEVANT = (*KEPT, "data", "threads", "device", "evaluate-every", "mean", "std", "transform")
# those that are not known of a model that was trained elsewhere
UNKNOWN = (*(kebab(field.name) for field in fields(Recipe)), "valid", "valid-dir", "valid-from-test", "split-seed")


def reference_settings(run: Run, request: ForgetRequest, *, seed: int | None = None) -> TrainSettings:
    """Settings that train a reference model: without the request and without what the run has forgotten before.

    Recipe and validation split are the run's; another `seed` gives a second reference, which shows what chance does.
    """
    settings = run.settings
    if isinstance(settings, FederateSettings):
        settings = replace(settings, start="", keep_updates=False, keep_rounds="")  # those weights knew the forget set
    elif settings.start and not is_new(run, request, run.load_data()):
        raise CannotServe(
            f"{request} was in the data of {settings.start}, which {run.path} continued; the reference is what "
            "forget --level exact gives: all of these trainings without it"
        )
    return replace(
        settings,
        keep_epochs="",
        without=str(_forgotten_with(run, request).settled(run.record.data.class_names)),
        seed=settings.seed if seed is None else seed,
        split_seed=settings.partition_seed,
    )


def _forgotten_with(run: Run, request: ForgetRequest) -> ForgetRequest:
    return request if run.excluded is None else run.excluded + request


def find_reference(directory: Path, settings: TrainSettings, data_digest: str) -> Run | None:
    """The finished run of a directory that was trained with these settings on this data; None: there is none."""
    same = (run for run in finished_runs(directory) if run.record.data.digest == data_digest)
    return next((run for run in same if _is_trained_as(run, settings)), None)


def finished_runs(directory: Path, *, strict: bool = False) -> Iterator[Run]:
    """The finished runs in a directory; a damaged one is skipped with a warning, or with `strict` an error.

    A checkpoint that a killed training left in a finished run is removed: nobody else would.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not (path / "run.json").is_file():
            continue
        try:
            if isinstance(read_run_record(path), RunRecord):
                with suppress(OSError):  # its training was killed just before it removed this
                    (path / "checkpoint.safetensors").unlink(missing_ok=True)
                yield open_run(path)
        except FedOrthoError as error:
            if strict:
                raise
            logger.warning("skipped: %s", error)


def _is_trained_as(run: Run, wanted: TrainSettings, *, any_seed: bool = False) -> bool:
    """Whether a run is a reference model of these settings; of an imported model the recipe is not known."""
    is_known = run.record.imported_from is None and bool(wanted.epochs)
    ignored = (*FREE, *IRRELEVANT, *([] if is_known else UNKNOWN), *(["seed"] if any_seed else []))
    mine, theirs = (_key(each, run.record.data.class_names) for each in (run.settings, wanted))
    relevant = {*mine, *theirs} - {*ignored}
    return not run.record.is_edited and all(mine.get(key) == theirs.get(key) for key in relevant)


def _key(settings: TrainSettings, names: Sequence[str]) -> dict[str, object]:
    """The settings that identify a reference model, its request and its preprocessing in one spelling."""
    known = as_mapping(settings) | {"split-seed": settings.partition_seed, "scale": settings.preprocessing.key}
    if settings.without:
        known["without"] = str(ForgetRequest.parse(settings.without).settled(names))
    return known


def train_reference(
    directory: Path, name: str, settings: TrainSettings, *, data: Dataset | None = None, watch: Watch | None = None
) -> Run:
    """Train a reference model into a directory of runs; an interrupted one is continued.

    `data` are the run's, whose rows keep their numbers where images were deleted. If images of it that the reference
    would need were purged for another request, there can be none: they are never trained on again.
    """
    check_reference_settings(name, settings, data)
    known = read_run_record(directory / name)
    if isinstance(known, RunRecord) and not _is_trained_as(open_run(directory / name), settings):
        raise FedOrthoError(
            f"{directory / name} was trained with other settings, for another recipe or an earlier run of that name; "
            "move it away, or give another directory (--references DIR)"
        )
    if isinstance(settings, FederateSettings):
        return train_federation(directory / name, settings, data=data)
    return train_run(directory / name, settings, watch=watch, data=data, has_ledger=False)  # nothing is forgotten of it


def check_reference_settings(name: str, settings: TrainSettings, data: Dataset | None = None) -> None:
    """Refuse a reference model without a recipe, or one that would lack images of `data` which were purged."""
    if not settings.epochs:
        raise CannotServe(f"{name}: {NO_RECIPE}")
    if data is None:
        return
    clients = held_rows(data, settings, settings.partition_seed) if isinstance(settings, FederateSettings) else None
    if lost := purged_images(data, ForgetRequest.parse(settings.without), clients):
        raise FedOrthoError(
            f"{name} would lack {lost} images that were forgotten and purged for another request; give a reference "
            "that was trained before (--reference RUN)"
        )


def purged_images(data: Dataset, without: ForgetRequest, clients: Clients | None) -> int:
    """How many images a training without these would lack, because they were purged for another request."""
    rest = without.split(data.train, clients, gone=data.gone)[1]
    return len(rest) - int(torch.isin(rest.rows, without_forgotten(data).train.rows).sum())


def train_references(
    run: Run, request: ForgetRequest, found: Sequence[Run], directory: Path, data: Dataset, watch: Watch | None
) -> Iterator[Run]:
    """Reference models of a run, one after the other, each with a seed that none of those `found` has."""
    taken = {reference.settings.seed for reference in found}
    for seed in count(run.settings.seed):
        if seed not in taken:
            settings = reference_settings(run, request, seed=seed)
            yield train_reference(directory, reference_name(run, request, settings), settings, data=data, watch=watch)


def reference_name(run: Run, request: ForgetRequest, settings: TrainSettings) -> str:
    """A readable directory name, another for each reference model of a run."""
    return f"{run.path.name}-without-{request.word}-seed{settings.seed}"


def check_reference(run: Run, reference: Run, request: ForgetRequest) -> None:
    """Refuse a reference that was trained on the forget set, on other data, or with another network."""
    if reference.record.data.digest != run.record.data.digest:
        raise BadCheckpoint(f"{reference.path} was trained on other data than {run.path}; retrain on the same")
    if reference.settings.model != run.settings.model:
        raise BadCheckpoint(f"{reference.path} is a {reference.settings.model}, {run.path} a {run.settings.model}")
    if reference.settings.preprocessing.key != run.settings.preprocessing.key:
        raise BadCheckpoint(
            f"{reference.path} reads images by another preprocessing than {run.path}; give both the same"
        )
    is_same_start = run.record.began_with is not None and run.record.began_with == reference.record.began_with
    began = reference.settings.start and not (is_same_start and is_new(run, request, run.load_data()))
    served = next((each for each in run.record.requests if each.request == str(request)), None)
    is_treated = served is not None and is_treated_by(served, reference)
    if began or (reference.record.is_edited and not is_treated):
        raise FedOrthoError(f"{reference.path} was edited or began with another model; train one --without {request}")
    names, out = run.record.data.class_names, reference.settings.excluded
    if not out.kinds or not out.settled(names).covers(request.settled(names)):
        raise FedOrthoError(f"{reference.path} was trained with {request}; give a run trained --without it")
    forget = _forgotten_with(run, request)
    if not forget.settled(names).covers(out.settled(names)):
        raise FedOrthoError(f"{reference.path} was trained without {out}; expected {forget}: it is no valid reference")
    known, own = (read_rows(each.path, each.settings) for each in (reference, run))
    if known is not None and len(missing := known.left_out_besides(forget, names, own)):
        raise FedOrthoError(
            f"{reference.path} was trained without {len(missing)} images that {run.path} knows, because they were "
            "forgotten and purged; give a reference that was trained before"
        )
    if not run.settings.epochs or not reference.settings.epochs:
        logger.warning(
            "%s or %s was trained elsewhere by a recipe that is not known: compare with care", reference.path, run.path
        )
        return
    mine, theirs = as_mapping(run.settings), as_mapping(reference.settings)
    recipe = [kebab(field.name) for field in fields(Recipe) if field.name != "seed"]
    if other := [f"{key} {theirs[key]}, not {mine[key]}" for key in recipe if theirs[key] != mine[key]]:
        logger.warning("%s was trained with another recipe (%s): compare with care", reference.path, ", ".join(other))


def is_treated_by(served: ServedRecord, reference: Run) -> bool:
    """Whether a run is what the method of a served request made of a reference model, with the same settings."""

    def treatment(each: ServedRecord) -> tuple[str, str, dict[str, Scalar]]:
        return each.request, each.method, dict(each.settings)

    return [treatment(each) for each in reference.record.requests] == [treatment(served)]


def reference_cost(reference: Run, data: Dataset, history: Sequence[Epoch] | None = None) -> Cost:
    """The cost of training a model, or of these epochs or rounds, from its history and its log of exchanges."""
    log = read_wire_log(reference.path / "wire.json")
    rounds = [exchange for exchange in log if exchange.kind == TrainLocal.action]
    up, down = total_bytes(rounds)
    tally = Tally(exchanges=len(rounds), bytes_up=up, bytes_down=down)
    history = reference.history() if history is None else history
    if not isinstance(reference.settings, FederateSettings):  # early runs did not count images: each once per epoch
        history = [replace(entry, images=entry.images or reference.record.data.train) for entry in history]
    return training_cost(history, reference.load_model(), data.train.shape, reference.settings, tally)


def case_of(
    run: Run,
    request: ForgetRequest,
    data: Dataset,
    original: Run,
    references: Sequence[Run] = (),
    device: torch.device | str = "cpu",
) -> Case:
    """The models of these runs as a case for audits; runs on other data or networks are refused.

    `references` are retrained models, and beside each what the method of `run` made of it, or none of these.
    """
    for found in references:
        check_reference(run, found, request)
    if original.record.data.digest != run.record.data.digest:
        raise BadCheckpoint(f"{original.path} was trained on other data than {run.path}")
    names, before = run.record.data.class_names, original.excluded
    if before is not None and before.settled(names).covers(request.settled(names)):
        raise FedOrthoError(f"{original.path} has forgotten {request} before; give an earlier run (--original)")
    retrained, treated = (
        tuple(each.load_model() for each in references if each.record.is_edited == is_treated)
        for is_treated in (False, True)
    )
    models, before = (run.load_model(), original.load_model(), retrained), excluded_besides(run, request)
    return Case(*models, data, request, before, run.clients(data), device, counterfactuals=treated)


def find_original(run: Run) -> Run | None:
    """The run that this one was derived from, if it is in the same directory or in the one above; None: it is not.

    Of several with the same weights it is the one with the same settings, and never one that has served as many
    requests: an edit may have changed nothing. A continued run has that of its start.
    """
    parent = run.record.parent
    start = run.settings.start if isinstance(run.settings, FederateSettings) else ""
    if parent is None and start and (Path(start) / "run.json").is_file():
        return find_original(open_run(start))
    for place in list(run.path.resolve().parents)[:2] if parent else ():  # compare writes one directory deeper
        found = [other for other in finished_runs(place) if other.record.model.digest == parent]
        found = [other for other in found if len(other.record.requests) < max(len(run.record.requests), 1)]
        if found:
            return min(found, key=lambda other: as_mapping(other.settings) != as_mapping(run.settings))
    return None


def original_of(run: Run, given: Run | Path | str | None = None) -> Run:
    """The run before forgetting: the given one, or the one that this run was derived from."""
    found = open_run(given) if given is not None else find_original(run)
    if found is None:
        raise FedOrthoError(f"the run that {run.path} was derived from is not beside it; give --original RUN")
    return found


def runs_beside(run: Run) -> list[Run]:
    """The finished runs in the directory of a run, and in `references` there."""
    beside = run.path.resolve().parent
    return [found for where in (beside, beside / "references") for found in finished_runs(where)]


def find_references(original: Run, request: ForgetRequest, place: Path | None = None) -> list[Run]:
    """One reference model per seed, the original's first, of a directory (default: beside it, and `references`)."""
    found = list(finished_runs(place)) if place else runs_beside(original)
    try:
        wanted, seed = reference_settings(original, request), original.settings.seed
    except CannotServe as error:
        logger.info("no reference: %s", error)
        return []
    mine = [run for run in found if run.record.data.digest == original.record.data.digest]
    mine = [run for run in reversed(mine) if _is_trained_as(run, wanted, any_seed=True)]
    by_seed = {(run.settings.seed, run.record.imported_from and run.record.model.digest): run for run in mine}
    return sorted(by_seed.values(), key=lambda run: (run.settings.seed != seed, run.settings.seed))
