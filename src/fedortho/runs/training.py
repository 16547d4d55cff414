"""Train into a run directory, resumable after an interruption; or import weights that were trained elsewhere."""

import logging
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.data.cache import without_forgotten
from fedortho.data.decoding import Report
from fedortho.data.images import Dataset, Images
from fedortho.data.preprocessing import SCALES, Preprocessing
from fedortho.data.request import ForgetRequest, as_request
from fedortho.data.sources import DATASETS
from fedortho.devices import choose_device, using_threads
from fedortho.engines.query import draw
from fedortho.errors import BadSetting, FedOrthoError
from fedortho.models.predictions import accuracy, evaluate
from fedortho.models.prepare import prepare_model
from fedortho.models.zoo import build_model, check_output
from fedortho.runs import record as records
from fedortho.runs.continuing import start_of, store_size
from fedortho.runs.derived import building, tidy
from fedortho.runs.rounds import keep_round
from fedortho.runs.rows import ROWS_FILE, rows_of
from fedortho.runs.run import Run, load_run_data, open_run, settings_of
from fedortho.runs.settings import FREE, FederateSettings, ImportSettings, TrainSettings
from fedortho.statistics.ledger import write_ledger
from fedortho.storage import files
from fedortho.storage.checkpoints import fitted_weights, load_weights, read_weights
from fedortho.storage.provenance import environment
from fedortho.storage.records import write_record
from fedortho.storage.settings import as_mapping
from fedortho.storage.trusted_code import remember_code
from fedortho.training.loop import Epoch, Progress, Watch, fit
from fedortho.training.objectives import TrainingSet, check_training_sets
from fedortho.training.penalties import ortho_layers
from fedortho.training.recipe import Recipe

logger = logging.getLogger(__name__)
MEASURED = 3000  # images, at most, on which usual preprocessings are compared
GUESSING = 1.5  # times the accuracy of a guess; below it the model has learnt nothing
Trainer = Callable[[nn.Module, Dataset, Path], tuple[nn.Module, Sequence[Epoch]]]


def train_run(
    path: Path | str,
    settings: TrainSettings,
    *,
    watch: Watch | None = None,
    progress: Report | None = None,
    observing: Report | None = None,
    trainer: Trainer | None = None,
    requests: tuple[records.ServedRecord, ...] = (),
    data: Dataset | None = None,
    has_ledger: bool = True,
) -> Run:
    """Train into a directory; continue an interrupted run, return a finished one.

    A `trainer` replaces `fit`: it receives the new model, the data and the path of a checkpoint (a federation).
    `requests` are those that the run which training starts from has served. `data` is the data if it is already loaded,
    by `Run.load_data` for a reference model. Images that were forgotten and purged are never trained on.
    A training that continues a run (`continued_settings`) starts with its model, and has its own schedule. With
    `has_ledger` activation sums of the training images are kept, which `hide` reads.
    """
    path = Path(path)
    remember_code(*settings.code)
    with files.locked(path), using_threads(settings.threads):
        record, start = records.read_run_record(path), start_of(settings, data)
        whole = data or load_run_data(settings, progress=progress, forgotten=True)
        data = without_forgotten(whole)
        if settings.without:
            settings = replace(settings, without=str(as_request(settings.without, whole)))
        _refuse_foreign(path, record, settings, data)
        if isinstance(record, records.RunRecord):
            (path / "checkpoint.safetensors").unlink(missing_ok=True)  # interrupted just before it was removed
            return open_run(path)
        if not settings.epochs or (isinstance(settings, FederateSettings) and not settings.rounds):
            raise BadSetting("epochs and rounds must be at least 1: the network would stay untrained")
        device = choose_device(settings.device)
        model = _fresh_model(settings, data) if start is None else start.load_model()
        if trainer is None and settings.without:
            data = replace(data, train=ForgetRequest.parse(settings.without).split(data.train, gone=data.gone)[1])
        # this and the next line refuse before anything is written
        check_training_sets(model, [TrainingSet(data.train)], settings.batch_size)
        ortho_layers(model, data.train.shape, settings)
        if record is None:
            record = replace(_begun(path, settings, data, device), requests=requests)
            if start is not None:
                known = replace(record.data, first_new=store_size(start))
                record = replace(record, data=known, began_with=start.record.model.digest)
            _write_rows(path, settings, whole, data.gone)
            write_record(path / "run.json", record)
        elif (began := record.environment.threads) != (now := torch.get_num_threads()):
            logger.warning(
                "training began with %s threads, now %d: weights may differ; the setting threads fixes it", began, now
            )
        checkpoint = path / "checkpoint.safetensors"
        train = trainer or partial(_train_centrally, path, settings, device, watch)
        trained, history = train(model, data, checkpoint)
        files.write_json(path / "history.json", [asdict(entry) for entry in history])
        run = _finish(path, record, trained, data, device, observing, has_ledger=has_ledger and trainer is None)
        checkpoint.unlink(missing_ok=True)
        return run


def _train_centrally(
    path: Path,
    settings: TrainSettings,
    device: torch.device,
    watch: Watch | None,
    model: nn.Module,
    data: Dataset,
    at: Path,
) -> tuple[nn.Module, Sequence[Epoch]]:
    history: Sequence[Epoch] = ()

    def remember(news: Progress) -> None:
        nonlocal history
        history = news.history
        if watch is not None:
            watch(news)

    how: dict[str, Any] = {"watch": remember, "keep": partial(keep_round, path, settings)}
    trained = fit(model, data.train, settings.recipe, valid=data.valid, device=device, checkpoint=at, **how)
    if not history and at.exists():  # interrupted after the last epoch
        with files.damage_named(at):
            history = [Epoch(**entry) for entry in files.read_tensors(at)[1]["progress"]["history"]]
    return trained, history


def _fresh_model(settings: TrainSettings, data: Dataset, fold: bool = True) -> nn.Module:
    sizes = {"num_classes": data.train.classes, "channels": data.train.shape[0]}
    model = build_model(settings.model, **sizes, seed=settings.seed, fold=fold)
    check_output(model, data.train.shape, data.train.classes)
    return model


def _refuse_foreign(path: Path, record: records.TrainingRecord | None, settings: TrainSettings, data: Dataset) -> None:
    """Refuse a path with something else than this run, finished or interrupted."""
    if record is None:
        if path.exists() and not path.is_dir():
            raise FedOrthoError(f"{path} is a file; choose a directory for --out")
        begun = {"split.json", ROWS_FILE, "history.json", "ledger.safetensors", "clients", "updates", "epochs"}
        # these may have been written before run.json
        if path.is_dir() and not {file.name for file in path.iterdir() if not _is_left_over(file)} <= begun:
            raise FedOrthoError(f"{path} has other files in it; choose a new directory for --out")
        return
    if record.imported_from is not None:
        raise FedOrthoError(f"{path} was imported from {record.imported_from}; choose another --out")
    if isinstance(record, records.RunRecord) and record.parent is not None:
        raise FedOrthoError(f"{path} was made from the model {record.parent[:12]}; choose another --out")
    mine, theirs = as_mapping(settings), as_mapping(settings_of(record, path))
    if other := [key for key in {**mine, **theirs} if key not in FREE and mine.get(key) != theirs.get(key)]:
        difference = ", ".join(f"{key} is {theirs.get(key)!r}, not {mine.get(key)!r}" for key in other)
        if not isinstance(record, records.RunRecord) and not (path / "checkpoint.safetensors").exists():
            told = f"a training with other settings ({difference}) began in {path} and kept nothing so far"
            raise FedOrthoError(f"{told}; delete that directory, or choose another --out")
        raise FedOrthoError(f"{path} was trained with other settings ({difference}); choose another --out")
    if record.data.digest != data.digest:
        raise FedOrthoError(f"{path} was trained on other data of the same name; choose another --out")


def _is_left_over(file: Path) -> bool:
    """Whether this is the temporary directory of an interrupted write."""
    return re.fullmatch(rf"\.[a-z]+\.(json|safetensors)({files.TEMPORARY}|\.)\w{{8}}", file.name) is not None


def _begun(
    path: Path, settings: TrainSettings, data: Dataset, device: torch.device, imported_from: str | None = None
) -> records.TrainingRecord:
    """The record of a run that begins, after its validation split was written."""
    rows = tuple(data.valid.rows.tolist())
    write_record(path / "split.json", records.SplitRecord(settings.partition_seed, settings.valid, rows))
    is_seen = imported_from and not (settings.valid_dir or settings.valid_from_test)
    source = settings.valid_source + (", probably seen in training" if is_seen else "")
    sizes = (len(data.train), len(data.valid), len(data.test))
    known = records.DataRecord(data.name, data.digest, data.train.names, *sizes, source, data.valid_digest)
    told, about = as_mapping(settings), environment(device)
    return records.TrainingRecord(settings=told, data=known, environment=about, imported_from=imported_from)


def _write_rows(path: Path, settings: TrainSettings, data: Dataset, left_out: Tensor) -> None:
    """Write what the images of the run are known by; a dataset that everybody has needs none unless it lacks images."""
    rows = rows_of(data, left_out)
    if rows is not None and (settings.data not in DATASETS or len(left_out) or settings.new_images):
        rows.save(path)


def _finish(
    path: Path,
    record: records.TrainingRecord,
    model: nn.Module,
    data: Dataset,
    device: torch.device,
    observing: Report | None,
    *,
    has_ledger: bool = True,  # clients of a federation keep their own
) -> Run:
    model = model.to(device)
    splits = {"valid": data.valid, "test": data.test}
    found = {name: evaluate(model, part, device=device).accuracy for name, part in splits.items() if len(part)}
    if has_ledger:
        ledger = path / "ledger.safetensors"
        write_ledger(ledger, model, data.train, valid=data.valid, device=device, progress=observing)
    state = model.cpu().state_dict()
    files.write_tensors(path / "model.safetensors", state)
    weights = sum(parameter.numel() for parameter in model.parameters())
    about = records.ModelRecord(files.tensors_digest(state), data.train.classes, data.train.shape[0], weights)
    result = records.ResultRecord(**{f"{name}_accuracy": share for name, share in found.items()})
    if found and max(found.values()) < GUESSING / data.train.classes:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
        imported = "check the preprocessing, --model and the order of the classes"
        advice = imported if record.imported_from else "train longer, or with a lower learning rate"
        logger.warning("the model is no better than guessing (%s); %s", shares, advice)
    known = {each.name: getattr(record, each.name) for each in fields(record) if each.name != "status"}
    write_record(path / "run.json", records.RunRecord(**known, model=about, result=result))
    for left in filter(_is_left_over, list(path.iterdir())):
        shutil.rmtree(left) if left.is_dir() else left.unlink()  # files: of earlier versions
    return open_run(path)


def import_run(
    path: Path | str,
    weights: Path | str,
    settings: ImportSettings,
    recipe: Recipe | None = None,
    *,
    progress: Report | None = None,
    observing: Report | None = None,
) -> Run:
    """Make a run of weights that were trained elsewhere; unless given, preprocessing that matters is asked for.

    They have probably seen all training images, so validation images of their own are needed (`settings.valid`, a
    directory, or `settings.valid_from_test`). Reference models can be trained with the `recipe` of the weights.
    """
    path, weights = Path(path), Path(weights)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        tidy(path)
        raise FedOrthoError(f"{path} exists already; choose a new directory for --out")
    remember_code(*settings.code)
    state, known, device = read_weights(weights), settings.as_training(recipe), choose_device(settings.device)
    data = load_run_data(known, progress=progress, forgotten=True)  # weights from elsewhere may know them
    model = _fresh_model(known, data, fold=False)  # weights may have been saved as they are computed
    load_weights(model, fitted_weights(model, state, weights), weights)
    model = prepare_model(model, data.train.classes).eval().to(device)
    is_held_out = bool(known.valid_dir or known.valid_from_test)
    if not known.preprocessing.is_given:
        _measure_scales(model, data.valid if is_held_out else data.test, device, weights)
        known = replace(known, scale="data")
    if not is_held_out:
        logger.warning(
            "%s has probably seen all training images, the validation images among them; give images that it has not "
            "seen: --valid DIR or --valid-from-test 0.5",
            weights.name,
        )
    whole = data
    if known.without:
        without = as_request(known.without, data)
        known, data = replace(known, without=str(without)), replace(data, train=without.split(data.train)[1])
    with suppress(OSError):
        path.rmdir()  # if it is empty
    with building(path) as place:
        record = _begun(place.run, known, data, device, weights.name)
        _write_rows(place.run, known, whole, whole.gone)
        files.write_json(place.run / "history.json", [])
        _finish(place.run, record, model, data, device, observing)
        return place.place()


def _measure_scales(model: nn.Module, images: Images, device: torch.device, weights: Path) -> None:
    """Refuse to guess a preprocessing if the accuracy on labelled images depends on it; the usual ones are measured."""
    some = draw(images, MEASURED, seed=0)
    scales = [name for name, own in SCALES.items() if own is None or len(own[0]) in (1, len(some.mean))]
    made = {name: some.preprocessed(Preprocessing(scale=name)) for name in scales}
    found = {name: accuracy(model, inputs, device=device) for name, inputs in made.items()}
    best = max(found, key=found.__getitem__)
    shares = ", ".join(f"{name} {share:.1%}" for name, share in sorted(found.items(), key=lambda pair: -pair[1]))
    told = f"{weights.name}: accuracy on {len(some):,} held-out images by preprocessing: {shares}"
    noise = 3 * (2 * found[best] * (1 - found[best]) / len(some)) ** 0.5  # of a difference of two accuracies
    if found[best] - min(found.values()) <= noise:
        logger.info("%s; no measurable difference, so data is taken", told)
        return
    alike = " or ".join(f"--scale {name}" for name in found if found[best] - found[name] <= noise)
    raise BadSetting(f"{told}; give the one that it was trained with: {alike} (else --mean and --std, or --transform)")
