"""Continue the training of a run with images that came later: its settings, and what must stay as it was."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadCheckpoint, BadData, FedOrthoError
from fedortho.runs.rows import read_rows
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.settings import FederateSettings, Subject, TrainSettings
from fedortho.storage.settings import as_mapping, kebab, make_settings

# what images and labels the model knows follows from these, so that a continued run has them from its start
FIXED = (*(name for name in asdict(Subject()) if name not in ("data", "data_dir", "device")), "valid_dir")


def continued_settings(run: Run | Path | str, changes: Mapping[str, Any]) -> TrainSettings:
    """The settings of a training that goes on from a run: those of the run, and `changes`, such as epochs and lr.

    `new_images` of the changes join those that joined before; what the run was trained without stays left out.
    """
    run = _checked(open_run(run))
    mine = as_mapping(run.settings) | {"split-seed": run.settings.partition_seed, "keep-epochs": "", "new-images": ""}
    settings = make_settings(TrainSettings, mine, {"start": os.path.abspath(run.path)}, changes)
    sources = [*run.settings.new_sources, *(os.path.abspath(each) for each in settings.new_sources)]
    without = run.settings.excluded + settings.excluded
    return replace(settings, new_images=os.pathsep.join(sources), without=str(without) if without.kinds else "")


def start_of(settings: TrainSettings, data: Dataset | None = None) -> Run | None:
    """The run that a training on one machine goes on from; None: it begins with new weights.

    A run of other images, classes or preprocessing is refused; `data` that a run has recorded need not be compared.
    """
    if not settings.start or isinstance(settings, FederateSettings):
        return None
    run = _checked(open_run(settings.start))
    given, expected = as_mapping(settings), as_mapping(run.settings)
    given["split-seed"], expected["split-seed"] = settings.partition_seed, run.settings.partition_seed
    for key in (*map(kebab, FIXED), "split-seed"):
        if given[key] != expected[key]:
            raise FedOrthoError(f"{key} is {given[key]!r}; {run.path}, which is continued, has {expected[key]!r}")
    if settings.new_sources[: len(run.settings.new_sources)] != run.settings.new_sources:
        raise FedOrthoError(f"new images are {settings.new_images}; {run.path} begins with {run.settings.new_images}")
    names, without = run.record.data.class_names, settings.excluded
    if not without.settled(names).covers(run.settings.excluded.settled(names)):
        raise FedOrthoError(f"{run.path} was trained without {run.settings.without}, which would come back; leave it")
    if data is None:
        before = load_run_data(replace(settings, new_images=run.settings.new_images), forgotten=True, names=names)
        if before.digest != run.record.data.digest:
            raise BadData(f"{settings.data} here is not the data that {run.path} was trained on (its digest differs)")
    return run


def _checked(run: Run) -> Run:
    """Refuse what cannot be continued."""
    if isinstance(run.settings, FederateSettings):
        raise FedOrthoError(f"{run.path} is a federation; fedortho federate --start {run.path} goes on with it")
    if run.record.is_edited:
        told = f" {run.record.requests[-1].request}" if run.record.requests else ""
        raise FedOrthoError(
            f"{run.path} has forgotten{told}, and training could bring it back; continue the run that was trained, or "
            "one of forget --level exact"
        )
    if run.record.imported_from:
        raise FedOrthoError(f"{run.path} was imported; what it was trained on is not known, so it is not continued")
    return run


def store_size(run: Run) -> int:
    """How many rows the store of a run's training images has: images that join it later have rows from there on."""
    rows = read_rows(run.path, run.settings)
    return len(load_run_data(run.settings).train.store_labels if rows is None else rows.stores["train"].labels)


def stages_of(run: Run) -> list[Run]:
    """The trainings that led to a run, oldest first: each continued the one before it, found at its path or beside."""
    if not run.settings.start:
        return [run]
    given = Path(run.settings.start)
    places = [each for each in (given, run.path.absolute().parent / given.name) if (each / "run.json").exists()]
    if not places:
        raise BadCheckpoint(f"{run.path} continued {given}, whose model is needed, and it is not there; restore it")
    before = open_run(places[0])
    if before.record.model.digest != run.record.began_with:
        raise BadCheckpoint(f"{before.path} is not the run that {run.path} continued: it has another model; restore it")
    return [*stages_of(before), replace(run, settings=replace(run.settings, start=str(before.path)))]


def first_row(request: ForgetRequest, data: Dataset) -> int:
    """The first row of the training images that a request names, deleted ones too; rows of later images are higher."""
    named = data.with_gone()
    return int(named.rows[request.mask(named)].min())


def is_new(run: Run, request: ForgetRequest, data: Dataset) -> bool:
    """Whether all images that a request names joined with this run, so that the run it continued never had them."""
    first = run.record.data.first_new
    return first is not None and first_row(request, data) >= first
