"""Methods side by side on one run: each from the same model, resumable, with its cost and its gap to retraining."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest
from fedortho.devices import choose_device, using_threads
from fedortho.engines.central import CentralEngine
from fedortho.errors import FedOrthoError, unknown
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.federated.server import federated_engine, local_grid, patches_of
from fedortho.methods import find_method, known_methods, make_method, unlearn
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import CannotServe, Method
from fedortho.methods.retrain import Retrain, RetrainPlain
from fedortho.models.zoo import build_model
from fedortho.requests.references import (
    find_reference,
    reference_cost,
    reference_name,
    reference_settings,
    train_reference,
)
from fedortho.runs.derived import write_derived
from fedortho.runs.federation import held_rows
from fedortho.runs.record import Accuracies, ResultRecord, ServedRecord
from fedortho.runs.run import Run, open_run
from fedortho.runs.served import excluded_by, served_requests
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.cost import Cost
from fedortho.statistics.engine import Engine
from fedortho.statistics.ledger import load_ledger
from fedortho.statistics.query import Selection
from fedortho.storage.files import read_json, tensors_digest, write_json
from fedortho.storage.provenance import SCHEMA, environment
from fedortho.storage.records import to_json
from fedortho.storage.settings import as_mapping, field_types
from fedortho.training.recipe import Recipe
from fedortho.unlearning.calibrate import Refused

CONTROLS = ("retrain", "retrain-plain", "logit-mask")  # measured, never marked as best


@dataclass(frozen=True)
class RunContext:
    """Where a comparison happens: the run's model, its images, and an engine over them."""

    run: Run
    data: Dataset
    clients: Clients | None
    forgotten: ForgetRequest | None
    device: torch.device

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """A new engine for each method, so that none profits from what another has computed or sent."""
        settings, model = self.run.settings, self.run.load_model()
        if not isinstance(settings, FederateSettings):
            known = load_ledger(self.run.path / "ledger.safetensors", model)
            train, valid = (
                Selection(exclude=self.forgotten).select(part) for part in (self.data.train, self.data.valid)
            )
            shape = self.data.train.shape
            build = partial(build_model, settings.model, num_classes=self.data.train.classes, channels=shape[0])
            data = replace(self.data, train=train, valid=valid)
            yield CentralEngine(data, known, None, self.device, build=lambda seed: build(seed=seed))
            return
        if settings.without:
            raise FedOrthoError(
                f"{self.run.path} was trained --without {settings.without}, which its clients still hold and methods "
                "would learn; compare the federation that was trained with everything"
            )
        with tempfile.TemporaryDirectory(prefix="fedortho-compare-") as place:
            store = Path(place) / "clients"
            shutil.copytree(self.run.path / "clients", store)
            with local_grid(settings, store) as grid:
                engine = federated_engine(grid, settings, self.data, served_requests(self.run))
                engine.bring_up_to_date(model, patches_of(self.run))
                yield engine


def context_of(run: Run, data: Dataset) -> RunContext:
    """A run opened for comparison; what it has forgotten before is no longer part of what is kept."""
    settings = run.settings
    clients = held_rows(data, settings, settings.partition_seed) if isinstance(settings, FederateSettings) else None
    return RunContext(run, data, clients, excluded_by(run), choose_device(settings.device))


def chosen_methods(methods: str | Sequence[str]) -> list[str]:
    """The names of methods, in the order of the table; `methods` is `all`, names with commas between, or a sequence.

    >>> chosen_methods("ssd,retrain")
    ['retrain', 'ssd']
    """
    known = known_methods()
    words = methods.split(",") if isinstance(methods, str) else methods
    names = list(known) if methods == "all" else [word.strip() for word in words if word.strip()]
    if not names:
        raise unknown("method", ",".join(words), known)
    for name in names:
        find_method(name)  # refuses an unknown one
    return [name for name in known if name in names]


def settings_for(run: Run, name: str, *more: Mapping[str, Any]) -> Method:
    """A method as it is compared on this run: what retrains by the run's recipe, all with the run's augmentation."""
    kind, settings = find_method(name), run.settings
    own: dict[str, Any] = {key: getattr(settings, key) for key in ("crop", "flip", "seed") if key in field_types(kind)}
    if issubclass(kind, Recipe):  # it trains as the run did
        own = {field.name: getattr(settings, field.name) for field in fields(Recipe)}
        if isinstance(settings, FederateSettings):
            own["epochs"] = settings.rounds
    if "updates" in field_types(kind):
        own["updates"] = str(run.path / "updates")
    if issubclass(kind, Retrain):
        if name == "retrain-plain":
            own |= {"ortho": 0.0, "align": 0.0}
        more = ()  # nothing is chosen here: it is the standard
    return make_method(name, own, *more)


@dataclass(frozen=True)
class Row:
    """What one method came to; `refused` says why it was not run."""

    method: str
    settings: Mapping[str, Any]
    identity: Mapping[str, str]  # of model and request: a result of others is not reused
    verdict: Mapping[str, float] | None = None
    cost: Mapping[str, float] | None = None
    weights: str = ""  # digest of the outcome
    refused: str = ""

    def save(self, path: Path, device: torch.device) -> None:
        write_json(path, {"schema": SCHEMA, "environment": to_json(environment(device))} | as_mapping(self))


Watch = Callable[[str, int, int], None]


def compare(
    run: Run | Path | str,
    request: ForgetRequest | str,
    methods: str | Sequence[str] = "all",
    *,
    out: Path | str | None = None,
    settings: str | Mapping[str, Mapping[str, Any]] = "published",
    references: Path | None = None,
    data: Dataset | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    """Run methods from the same model and measure accuracies, cost and the gap to retraining of each.

    Every method writes a JSON file and a run directory with its model into `out` (default: RUN-compared-REQUEST); a
    method whose file is there is not run again. `settings` are hyper-parameters: `published`, `short`, `tuned`, a JSON
    file, or a mapping by method. Reference models come from the directory `references` (default: beside the run) and
    are trained into it if they are missing. `data` is the run's data if it is already loaded.
    """
    run, request = open_run(run), ForgetRequest.parse(request) if isinstance(request, str) else request
    names = chosen_methods(methods)
    chosen = read_settings(run.settings.data, run.settings.model, settings) if isinstance(settings, str) else settings
    directory = compared_path(run, request) if out is None else Path(out)
    context = context_of(run, data or run.load_data())
    rows = []
    with using_threads(run.settings.threads):
        for number, name in enumerate(names):
            if watch is not None:
                watch(name, number, len(names))
            method = settings_for(run, name, chosen.get(name, {}))
            rows.append(_row(context, request, method, directory / f"{name}.json", references))
    return rows


def compared_path(run: Run, request: ForgetRequest) -> Path:
    """Where a comparison on a run is written by default."""
    return run.path.with_name(f"{run.path.name}-compared-{request.word}")


def _row(place: RunContext, request: ForgetRequest, method: Method, path: Path, references: Path | None) -> Row:
    chosen = as_mapping(method)
    identity = {"model": place.run.record.model.digest, "request": str(request)}
    planned = Row(method.name, chosen, identity)
    row = _read_row(path) if path.exists() else None
    if row is not None and replace(row, verdict=None, cost=None, weights="", refused="") == planned:
        return row
    _refuse_others(path.with_suffix(""))
    try:
        forgot, cost = _outcome(place, request, method, references)
    except (CannotServe, Refused) as error:
        row = replace(planned, refused=str(error))
    else:
        digest = tensors_digest(forgot.state_dict())
        after = _judged(place, forgot, request)
        row = replace(planned, verdict=asdict(after), cost=asdict(cost), weights=digest)
        _keep(place, request, row, forgot, path.with_suffix(""), after, cost)
    row.save(path, place.device)
    return row


def _read_row(path: Path) -> Row:
    found = read_json(path)
    try:
        return Row(**{k.replace("-", "_"): v for k, v in found.items() if k not in ("schema", "environment")})
    except (AttributeError, TypeError) as error:
        raise FedOrthoError(f"{path} is no result of a comparison; move it away or choose another --out") from error


def _refuse_others(path: Path) -> None:
    """Refuse to replace a directory that is not an earlier outcome: it would be deleted."""
    if path.exists() and not ((path / "run.json").is_file() and open_run(path).record.parent):
        raise FedOrthoError(f"{path} is there already and no result of a comparison; choose another --out")


def _outcome(
    place: RunContext, request: ForgetRequest, method: Method, references: Path | None
) -> tuple[nn.Module, Cost]:
    """The model that has forgotten, and what that cost, before anything is measured."""
    if isinstance(method, Retrain):
        settings = reference_settings(place.run, request, plain=isinstance(method, RetrainPlain))
        beside = place.run.path.resolve().parent
        into = references or beside / "references"
        found = find_reference(into, settings, place.data.digest)
        if found is None and references is None:
            found = find_reference(beside, settings, place.data.digest)
        run = found or train_reference(into, reference_name(place.run, request, settings), settings)
        return run.load_model(), reference_cost(run, place.data)
    model = place.run.load_model()
    with place.engine() as engine:
        forgot = unlearn(model, engine, request, method)
        return forgot.model, forgot.cost


def _keep(
    place: RunContext, request: ForgetRequest, row: Row, model: nn.Module, path: Path, after: Accuracies, cost: Cost
) -> None:
    """Write a method's model as a run of its own."""
    before = _judged(place, place.run.load_model(), request)
    record = place.run.record
    served = ServedRecord(
        request=str(request),
        method=row.method,
        settings=row.settings,
        before=before,
        after=after,
        retain_paid=before.retain - after.retain,
        cost=cost,
        model_before=record.model.digest,
        model_after=row.weights,
    )
    changed = replace(record, requests=(*record.requests, served), result=ResultRecord(after.test))
    if path.exists():
        shutil.rmtree(path)
    write_derived(path, place.run, model, changed, patch=None, ledger=None)


def _judged(place: RunContext, model: nn.Module, request: ForgetRequest) -> Accuracies:
    model = model.to(place.device)
    return accuracies_of(
        model, place.data, request, forgotten=place.forgotten, clients=place.clients, device=place.device
    )


def gaps(rows: Sequence[Row]) -> dict[str, float]:
    """Mean distance of forget and retain accuracy to retraining; below it is as far from it as above."""
    standard = next((row.verdict for row in rows if row.method == "retrain"), None)
    if standard is None:
        return {}
    keys = ("forget", "retain")
    return {
        row.method: sum(abs(row.verdict[key] - standard[key]) for key in keys) / len(keys)
        for row in rows
        if row.verdict is not None
    }


def best(rows: Sequence[Row]) -> str | None:
    """The method nearest to retraining; controls do not compete."""
    honest = {name: gap for name, gap in gaps(rows).items() if name not in CONTROLS}
    return min(honest, key=lambda name: honest[name]) if honest else None


HEADER = ("method", "forget", "retain", "test", "gap", "seconds", "GFLOPs", "MB up", "MB down")


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Header and one line of words per method; `*` marks the nearest to retraining, refusals come as one long word."""
    near, distance = best(rows), gaps(rows)
    lines: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        if row.verdict is None or row.cost is None:
            lines.append((row.method, row.refused))
            continue
        shares = [f"{row.verdict[key]:.1%}" for key in ("forget", "retain", "test")]
        gap = f"{distance[row.method]:.1%}{' *' if row.method == near else ''}" if row.method in distance else ""
        cost = row.cost
        numbers = (cost["seconds"], cost["flops"] / 1e9, cost["bytes_up"] / 1e6, cost["bytes_down"] / 1e6)
        lines.append((row.method, *shares, gap, *(f"{number:.1f}" for number in numbers)))
    return lines
