"""Compare methods on one run: each starts from the same model; its gap to retraining and its cost are measured."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest, as_request
from fedortho.devices import using_threads
from fedortho.engines.cost import Cost
from fedortho.engines.query import Selection
from fedortho.errors import BadRecord, FedOrthoError, unknown
from fedortho.methods import find_method, known_methods, unlearn
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import CannotServe, Method, Schedule
from fedortho.methods.retrain import Retrain
from fedortho.requests.references import find_reference, reference_cost, reference_settings, train_references
from fedortho.requests.run_context import RunContext, method_for_run, open_context
from fedortho.requests.search import is_tunable
from fedortho.runs.derived import build_derived, building
from fedortho.runs.record import Accuracies, ResultRecord, ServedRecord, read_run_record
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.files import tensors_digest
from fedortho.storage.provenance import Environment, environment
from fedortho.storage.records import Scalar, read_record, write_record
from fedortho.storage.settings import as_mapping
from fedortho.training.loop import Watch
from fedortho.unlearning.calibrate import Refused

logger = logging.getLogger(__name__)
CONTROLS = ("retrain", "logit-mask")  # measured, never marked as best
PASSES = ("settings", "one", "published")  # how often methods that train see the images
HEADER = ("method", "forget", "retain", "test", "gap", "seconds", "GFLOPs", "if kept", "MB up", "MB down")
NOTES = (
    "gap: mean distance of forget and retain accuracy to retrain, above or below it; * the smallest, without controls "
    "and unchanged models",
    "GFLOPs: everything counted; if kept: without what any method could have kept since training (statistics over all "
    "images)",
    "×N: passes over the images, in a federation rounds, where there is more than one",
    "hide and directions choose their ratio on validation images of this very request; the settings of the others "
    "come from elsewhere (tuned: another request)",
)
R = TypeVar("R")
Settings = str | Path | Mapping[str, Mapping[str, Any]]
Outcome = tuple[nn.Module, Cost | None]  # the edited model and the cost of making it; None: it was trained elsewhere


class Failed(FedOrthoError):
    """A method that could not end: its loss is not finite, or the network or the images do not suit it."""


@dataclass(frozen=True)
class Row:
    """The outcome of one method; `refused` says why it has none."""

    schema: ClassVar[int] = 2
    original: str  # digest of the model that it starts from
    request: str
    method: str
    settings: Mapping[str, Scalar]
    accuracies: Accuracies | None = None
    cost: Cost | None = None
    weights: str = ""  # digest of the edited model
    refused: str = ""
    environment: Environment | None = None

    @property
    def label(self) -> str:
        """The method, and its passes over the images if it trains with more than one."""
        passes = self.settings.get("epochs", 1) if issubclass(find_method(self.method), Schedule) else 1
        return self.method if passes == 1 else f"{self.method} ×{passes}"

    @property
    def is_unchanged(self) -> bool:
        """Whether the method ended with the model that it started from."""
        return self.weights == self.original


def compare(
    run: Run | Path | str,
    request: ForgetRequest | str,
    methods: str | Sequence[str] = "all",
    *,
    out: Path | str | None = None,
    settings: Settings = "published",
    passes: str | Sequence[str] = "settings",
    references: Path | None = None,
    data: Dataset | None = None,
    watch: Callable[[str, int, int], None] | None = None,
    on_training: Watch | None = None,
) -> list[Row]:
    """Run methods from the same model and measure accuracies, cost and the gap to retraining of each.

    Every method writes a JSON file and a run with its model into `out` (default: RUN-compared-REQUEST), and is not run
    again while the file exists. One that refuses or fails has its reason in place of numbers; what failed is tried
    again by the next call. `settings` are hyper-parameters: `published`, `short`, `tuned`, a JSON file, or a
    mapping by method. `passes` say how often methods that train see the images (in a federation: rounds): as `settings`
    say, `one`, as many as `published`, or several with commas between, each a row of its own. Reference models come
    from the directory `references` (default: beside the run); missing ones are trained into it, which `on_training`
    shows. `data` is the run's data if it is loaded. `watch` receives each method's name, its number and how many.
    """
    run, names, wanted = open_run(run), chosen_methods(methods), _words(passes)
    chosen = settings_by_method(run, settings)
    for word in wanted or [""]:
        if word not in PASSES:
            raise unknown("passes", word, PASSES)
    data = data or run.load_data()
    request = as_request(request, data)
    directory = compared_path(run, request) if out is None else Path(out)
    context, rows = open_context(run, data), []
    known = Selection(exclude=context.forgotten).select(data.train, context.clients)
    request.split(known, context.clients, gone=data.gone)  # refuses what no method could serve
    _tell_untuned(run, request, settings, [name for name in names if is_tunable(name) and name not in chosen])
    unlearned = partial(_outcome, context, request, references, on_training)
    with using_threads(run.settings.threads):
        for number, name in enumerate(names):
            if watch is not None:
                watch(name, number, len(names))
            for file, method in _variants(run, name, chosen.get(name, {}), wanted).items():
                rows.append(_row(context, request, method, directory / f"{file}.json", partial(unlearned, method)))
    return rows


def _variants(run: Run, name: str, settings: Mapping[str, Any], passes: Sequence[str]) -> dict[str, Method]:
    """The method with each number of passes, by the name of its file: `salun`, then `salun-x10`."""
    kind, found = find_method(name), dict[int, Method]()
    if not issubclass(kind, Schedule):
        return {name: method_for_run(run, name, settings)}
    for word in passes:
        epochs = {"settings": {}, "one": {"epochs": 1}, "published": {"epochs": kind().epochs}}[word]
        method = method_for_run(run, name, settings, epochs)
        found.setdefault(as_mapping(method)["epochs"], method)
    return {name if not at else f"{name}-x{number}": found[number] for at, number in enumerate(found)}


def compared_path(run: Run, request: ForgetRequest) -> Path:
    """Where a comparison on a run is written by default."""
    return run.path.with_name(f"{run.path.name}-compared-{request.word}")


def chosen_methods(methods: str | Sequence[str]) -> list[str]:
    """The names of methods, in the order of the table; `methods` is `all`, names with commas between, or a sequence.

    >>> chosen_methods("ssd,retrain")
    ['retrain', 'ssd']
    """
    known = known_methods()
    names = list(known) if methods == "all" else _words(methods)
    if not names:
        raise unknown("method", ",".join(methods), known)
    for name in names:
        find_method(name)  # refuses an unknown one
    return [name for name in known if name in names]


def _words(text: str | Sequence[str]) -> list[str]:
    words = text.split(",") if isinstance(text, str) else text
    return [word.strip() for word in words if word.strip()]


def settings_by_method(run: Run, settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """Hyper-parameters by method, from a name, a file or a mapping."""
    if isinstance(settings, Mapping):
        return settings
    return read_settings(run.settings.data, run.settings.model, str(settings))


def _tell_untuned(run: Run, request: ForgetRequest, settings: Settings, missing: Sequence[str]) -> None:
    """Warn where settings that were tuned lack methods, or were tuned for another kind of request or engine."""
    if isinstance(settings, Mapping) or settings in ("published", "short"):
        return
    if missing:
        advice = f"tune them: fedortho tune {','.join(missing)} RUN REQUEST --out FILE.json"
        logger.warning(
            "%s has no settings of %s, which keep the published ones; %s", settings, ", ".join(missing), advice
        )
    if settings == "tuned" and (request.kind != "class" or isinstance(run.settings, FederateSettings)):
        advice = "for this request: fedortho tune all RUN REQUEST --out FILE.json"
        logger.warning("the tuned settings were found for a class and all images in one place; %s", advice)


def _row(
    context: RunContext, request: ForgetRequest, method: Method, path: Path, unlearned: Callable[[], Outcome]
) -> Row:
    planned = Row(context.run.record.model.digest, str(request), method.name, as_mapping(method))
    place = path.with_suffix("")
    if path.exists():
        row = read_result(Row, path)
        if replace(row, accuracies=None, cost=None, weights="", refused="", environment=None) == planned:
            if row.refused or _is_told_by(place, row):
                return row
            logger.warning(
                "%s has other numbers than the run %s, or that is gone; %s runs again", path, place, row.label
            )
    if place.exists() and not ((place / "run.json").is_file() and open_run(place).record.parent):
        raise FedOrthoError(f"{place} exists and is no result of a comparison; choose another --out")
    planned = replace(planned, environment=environment(context.device))
    try:
        model, cost = unlearned()
    except Failed as error:
        return replace(planned, refused=str(error))  # not written: it may be mended
    except (CannotServe, Refused) as error:
        row = replace(planned, refused=str(error))
    else:
        digest = tensors_digest(model.state_dict())
        row = replace(planned, accuracies=context.accuracies(model, request), cost=cost, weights=digest)
        _write_outcome(context, request, row, model, place)
    write_record(path, row)
    return row


def _is_told_by(place: Path, row: Row) -> bool:
    """Whether the run of an outcome has the numbers of its row; a file that was edited by hand has others."""
    record = read_run_record(place)
    served = record.requests[-1] if record is not None and record.requests else None
    told = (row.accuracies, row.cost, row.weights)
    return served is not None and (served.after, served.cost, served.model_after) == told


def read_result(kind: type[R], path: Path) -> R:
    """The record in a file that an earlier call wrote; any other file is refused."""
    try:
        return read_record(kind, path)
    except BadRecord as error:
        raise BadRecord(f"{error}; move it away or choose another --out") from error


def _outcome(
    context: RunContext, request: ForgetRequest, references: Path | None, on_training: Watch | None, method: Method
) -> Outcome:
    run, data = context.run, context.data
    if not isinstance(method, Retrain):
        with context.engine() as engine:
            try:
                result = unlearn(run.load_model(), engine, request, method)
            except (CannotServe, Refused):
                raise
            except FedOrthoError as error:
                raise Failed(str(error)) from error
        return result.model, result.cost
    settings, beside = reference_settings(run, request), run.path.resolve().parent
    places = [references] if references else [beside / "references", beside]
    found = next(filter(None, (find_reference(place, settings, data.digest) for place in places)), None)
    found = found or next(train_references(run, request, (), places[0], data, on_training))
    return found.load_model(), None if found.record.imported_from else reference_cost(found, data)


def _write_outcome(context: RunContext, request: ForgetRequest, row: Row, model: nn.Module, path: Path) -> None:
    """Write a method's model as a run of its own."""
    assert row.accuracies is not None, "it was measured"
    before, after, record = context.accuracies(context.run.load_model(), request), row.accuracies, context.run.record
    outcome = (before, after, before.retain - after.retain, row.cost)
    served = ServedRecord(str(request), row.method, row.settings, *outcome, row.original, row.weights)
    changed = replace(record, requests=(*record.requests, served), result=ResultRecord(after.test))
    with building(path, may_replace=True) as place:
        build_derived(place.run, context.run, model, changed, patch=None, ledger=None)
        path.with_suffix(".json").unlink(missing_ok=True)  # it tells of the run that goes
        place.place()


def gaps(rows: Sequence[Row]) -> dict[str, float]:
    """By label: mean distance of forget and retain accuracy to retraining, which is not compared with itself."""
    measured = [(row, row.accuracies) for row in rows if row.accuracies is not None]
    goal = next((found for row, found in measured if row.method == "retrain"), None)
    if goal is None:
        return {}
    others = {row.label: found for row, found in measured if found is not goal}
    return {name: (abs(a.forget - goal.forget) + abs(a.retain - goal.retain)) / 2 for name, a in others.items()}


def best(rows: Sequence[Row]) -> str | None:
    """The label that is nearest to retraining, controls and unchanged models aside; None without a retrained model."""
    distance = gaps(rows)
    changed = [row for row in rows if row.method not in CONTROLS and not row.is_unchanged]
    competing = [row.label for row in changed if row.label in distance]
    return min(competing, key=distance.__getitem__, default=None)


def comparison_notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know, and which methods did without sums that clients withheld."""
    small = [f"{row.label} {row.cost.withheld}" for row in rows if row.cost is not None and row.cost.withheld]
    told = f"groups of few images for which clients withheld sums (--least-group of the federation): {', '.join(small)}"
    return [*NOTES, *([told] if small else [])]


def comparison_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Header and rows; `*` marks the nearest to retraining, a refused method has its reason, megabytes only if sent."""
    nearest, distance = best(rows), gaps(rows)
    columns = len(HEADER) if any(row.cost is not None and row.cost.exchanges for row in rows) else len(HEADER) - 2
    lines: list[tuple[str, ...]] = [HEADER[:columns]]
    for row in rows:
        if row.accuracies is None:
            lines.append((row.label, row.refused))
            continue
        label = f"{row.label} (model unchanged)" if row.is_unchanged else row.label
        shares = [f"{share:.1%}" for share in (row.accuracies.forget, row.accuracies.retain, row.accuracies.test)]
        gap = f"{distance[row.label]:.1%}{' *' if row.label == nearest else ''}" if row.label in distance else ""
        costs = ["–"] * len(HEADER)
        if (cost := row.cost) is not None:
            numbers = (cost.seconds, cost.flops / 1e9, cost.request_flops / 1e9, cost.bytes_up / 1e6)
            costs = [f"{number:.1f}" for number in (*numbers, cost.bytes_down / 1e6)]
        lines.append((label, *shares, gap, *costs)[:columns])
    return lines
