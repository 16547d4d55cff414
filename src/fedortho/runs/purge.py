"""Copies of the images that a run has forgotten: which are known, and removing those among the decoded images."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedortho.data.cache import DataCopy, decoded_copies, purge_images
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.runs.record import RunRecord, read_run_record
from fedortho.runs.rows import read_rows
from fedortho.runs.run import Run, open_run
from fedortho.statistics.ledger import drop_activations


def purge_run(
    run: Run | Path | str,
    *,
    data: Dataset | None = None,
    data_dir: str = "",
    original: Run | Path | str | None = None,
) -> list[DataCopy]:
    """Remove what a run has forgotten from the decoded images on this machine, and keep later trainings from using it.

    The ledgers of runs beside it, or beside `original`, and of references on the same data lose the activations of
    these images. Returns the copies that were found. The files of the images are their owner's to delete; the run stays
    usable. While they are there, runs that were trained on them can still read them; new trainings leave them out.
    """
    run = open_run(run)
    if run.excluded is None:
        raise FedOrthoError(f"{run.path} has forgotten nothing; give the run that fedortho forget wrote")
    data = data or run.load_data(data_dir)
    digests, source = _forget_set(run, run.excluded, data)
    beside = [each.path.resolve().parent for each in (run, *([open_run(original)] if original else []))]
    return [source, *purge_images(digests), *_purge_ledgers(run, run.excluded, data, dict.fromkeys(beside))]


def _purge_ledgers(run: Run, request: ForgetRequest, data: Dataset, places: Iterable[Path]) -> list[DataCopy]:
    """Remove activations of the forget set from the ledgers of runs, and of their simulated clients, on this data."""
    known = replace(data.train, rows=data.known_rows)
    rows, labels = known.rows[request.mask(known, run.clients(data))], request.labels(data.train.names)
    copies, depths = [], ("*/run.json", "*/*/run.json")  # references and comparisons, too
    for path in sorted(path for place in places for depth in depths for path in place.glob(depth)):
        record = read_run_record(path.parent)
        if not isinstance(record, RunRecord) or record.data.digest != run.record.data.digest:
            continue
        for ledger in sorted(path.parent.glob("**/ledger.safetensors")):
            if removed := drop_activations(ledger, rows, labels):
                copies.append(DataCopy("activations", str(ledger), 0, removed))
    return copies


def known_copies(run: Run, request: ForgetRequest, data: Dataset) -> list[DataCopy]:
    """The source and the decoded images that have, or had, images of a request's forget set."""
    digests, source = _forget_set(run, request, data)
    return [source, *decoded_copies(digests)]


def _forget_set(run: Run, request: ForgetRequest, data: Dataset) -> tuple[Tensor, DataCopy]:
    """The digests of the images that a request names, all images of its classes too, and how many the source has."""
    rows, known = data.known_rows, read_rows(run.path, run.settings)
    if known is not None:  # the run never had what was left out of its training
        rows = rows[~torch.isin(rows, known.left_out)]
    train = replace(data.train, rows=rows)
    groups = [(train, request.mask(train, run.clients(data)), rows[~torch.isin(rows, data.gone)])]
    held_out = [] if data.is_one_store else [data.valid]  # their rows count from the end of their store
    for store in [data.test, *(held_out if data.valid_digest else [])]:
        whole = replace(store, rows=torch.arange(len(store.store_labels)))
        alike = [part for part in (store, *held_out) if part.pixels.data_ptr() == store.pixels.data_ptr()]
        present = torch.cat([part.rows % len(whole) for part in alike])
        groups.append((whole, ForgetRequest(request.classes).mask(whole), present))
    digests, left = [], 0
    for images, mask, present in groups:
        assert images.ids is not None, "data of a run has digests"
        digests.append(images.ids.digests[images.rows[mask]])
        left += int(torch.isin(images.rows[mask], present).sum())
    every = torch.cat(digests)
    return every, DataCopy("source", data.name, left, len(every) - left)
