"""Unlearning methods: their table, and the functions that run one."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
from torch import nn

from fedortho.data.images import Dataset, Images, make_dataset
from fedortho.data.loaders import ImageSource
from fedortho.data.request import Clients, ForgetRequest, as_request
from fedortho.data.sources import load_images
from fedortho.engines.central import central_engine
from fedortho.engines.cost import Meter
from fedortho.engines.engine import Engine
from fedortho.engines.query import Selection
from fedortho.errors import BadCheckpoint, BadData, BadSetting, FedOrthoError, unknown
from fedortho.methods.bad_teacher import BadTeacher
from fedortho.methods.class_pruning import ClassPruning
from fedortho.methods.ct import ConvolutionTranspose
from fedortho.methods.directions import Directions
from fedortho.methods.eu_k import CFk, EUk
from fedortho.methods.federaser import FedEraser
from fedortho.methods.finetune import FineTune
from fedortho.methods.fused import FUSED
from fedortho.methods.hide import Hide
from fedortho.methods.logit_mask import LogitMask
from fedortho.methods.method import CannotServe, ForgetResult, Method, PlanningMethod, refusal, serves
from fedortho.methods.msg import MaskedSmallGradients
from fedortho.methods.neggrad import NegGrad
from fedortho.methods.not_ import NoT
from fedortho.methods.paper import Paper
from fedortho.methods.r2d import R2D
from fedortho.methods.regrow import Regrow, passes_after
from fedortho.methods.retrain import Retrain
from fedortho.methods.salun import SalUn
from fedortho.methods.scrub import SCRUB
from fedortho.methods.ssd import SSD
from fedortho.methods.subspace import Subspace
from fedortho.methods.unsir import UNSIR
from fedortho.models.patch import edit_model, patch_between
from fedortho.models.predictions import accuracy
from fedortho.models.prepare import prepare_model, released
from fedortho.models.zoo import check_output
from fedortho.statistics.observe import Observation
from fedortho.storage.settings import as_mapping, make_settings
from fedortho.unlearning.plan import ForgetPlan

logger = logging.getLogger(__name__)
MUCH_LOST = 0.03  # retain accuracy, by one request or several; above it the user is told
ENTRY_POINTS = "fedortho.methods"  # the group in which other packages name their methods
METHODS: Mapping[str, type[Method]] = {
    method.name: method
    for method in (
        *(Retrain, Hide, Directions, Regrow, Paper, FineTune, NoT, FUSED, SSD, SalUn, UNSIR, BadTeacher),
        *(ClassPruning, FedEraser, NegGrad, SCRUB, EUk, CFk, ConvolutionTranspose, MaskedSmallGradients),
        *(R2D, Subspace, LogitMask),
    )
}
LEVELS: Mapping[str, str] = {"hide": Hide.name, "erase": Regrow.name, "exact": Retrain.name}  # the method of each level
MEANINGS = {
    "hide": "forward passes only: the answers change, what was learnt can still be found",
    "erase": "all stages but the first, at least two, are reset, and the network is trained on the retain set",
    "exact": "retraining without the forget set",
}


def meaning_of(level: str, settings: Mapping[str, Any]) -> str:
    """What a level does with these hyper-parameters of its method.

    >>> meaning_of("erase", {"stages": 1, "frozen": True})
    'the last stage is reset, and it alone is trained on the retain set'
    """
    stages, frozen = settings.get("stages"), settings.get("frozen")
    if level != "erase" or not (stages or frozen):
        return MEANINGS[level]
    reset = "all stages but the first, at least two,"
    reset = f"the last {stages} stages (all if there are no more)" if stages else reset
    reset, alone = ("the last stage is", "it alone is") if stages == 1 else (f"{reset} are", "they alone are")
    return f"{reset} reset, and {alone if frozen else 'the network is'} trained on the retain set"


def level_of_method(name: str) -> str:
    """The level that a method serves; empty if it is none of them."""
    return next((level for level, method in LEVELS.items() if method == name), "")


def level_of(
    request: ForgetRequest, level: str = "", method: Method | str = "", costs: Sequence[str] = ("", "")
) -> str:
    """The level at which a request is served: the given one, `erase` for classes; empty if a method is named instead.

    Clients and samples have no default and are not erased; the refusal names what there is, `hide` and `exact`, and
    what each costs. A level may come with its own method, which then has other hyper-parameters.
    """
    if level and level not in LEVELS:
        raise unknown("level", level, LEVELS)
    name = method if isinstance(method, str) else method.name
    if level and name and (isinstance(method, str) or name != LEVELS[level]):
        raise BadSetting(f"level {level} and method {name} are both given; give one of them")
    if name and not level:
        return ""
    level = level or ("erase" if request.kind == "class" else "")
    if level in ("hide", "exact") or (level and request.kind == "class"):
        return level
    problem = "cannot be erased yet" if level else "has no level by default"
    ways = [f"{name} ({MEANINGS[name]}{cost})" for name, cost in zip(("hide", "exact"), costs, strict=True)]
    raise CannotServe(f"{request} {problem}; choose the level {' or '.join(ways)}")


def known_methods() -> tuple[str, ...]:
    """The names of all methods: those of the table, then those that installed packages add."""
    return (*METHODS, *_added())


def find_method(name: str) -> type[Method]:
    """The class of a method, by its name."""
    if name in METHODS:
        return METHODS[name]
    if name not in (added := _added()):
        raise unknown("method", name, known_methods())
    try:
        kind: type[Method] = added[name].load()
    except (ImportError, AttributeError) as error:
        raise FedOrthoError(f"the method {name!r} ({added[name].value}) cannot be imported: {error}") from error
    if getattr(kind, "name", None) != name:
        raise FedOrthoError(f"{added[name].value} is added as the method {name!r}; its class variable name must say so")
    return kind


def _added() -> dict[str, EntryPoint]:
    """Methods of installed packages; a name that is taken already is refused."""
    added: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in METHODS or point.name in added:
            raise FedOrthoError(f"{point.value} adds a method {point.name!r}, a name that is taken; rename it there")
        added[point.name] = point
    return added


def make_method(name: str, *settings: Mapping[str, Any]) -> Method:
    """A method with its hyper-parameters; those not given keep their published values, later mappings win."""
    return make_settings(find_method(name), *settings)


def unlearn(
    model: nn.Module,
    engine: Engine,
    request: ForgetRequest | str,
    method: Method | str,
    *,
    forgotten: ForgetRequest | None = None,
) -> ForgetResult:
    """Run a method on an engine: the model that has forgotten, its patch and its cost; the given model stays as it was.

    `forgotten` is what earlier requests have removed: it is no longer part of the retain set. A request that the
    method does not serve is refused with the names of those that do.
    """
    request, method = _checked(request, method)
    with Meter(engine, forgotten) as meter:
        found = method.plan(model, meter, request, forgotten) if isinstance(method, PlanningMethod) else None
        # a patch was bound to this model just now
        edited = edit_model(model, found.patch) if found else method(model, meter, request)
        cost = meter.cost()
    patch = found.patch if found else patch_between(model, edited, request=str(request), method=method.name)
    return ForgetResult(request, method.name, as_mapping(method), edited, patch, cost, found)


def _checked(request: ForgetRequest | str, method: Method | str) -> tuple[ForgetRequest, Method]:
    request = ForgetRequest.parse(request) if isinstance(request, str) else request
    method = make_method(method) if isinstance(method, str) else method
    if not serves(method, request):
        raise refusal(method, request, [name for name in known_methods() if serves(find_method(name), request)])
    if getattr(method, "epochs", 1) < 1:
        raise BadSetting(f"epochs of {method.name} is 0; expected at least 1: nothing would be trained")
    return request, method


Data = Dataset | Images | ImageSource | Mapping[str, Images | ImageSource] | str
SPLITS = {"train": "train", "test": "test", "valid": "valid", "validation": "valid"}  # in a mapping


def forget(
    model: nn.Module,
    data: Data,
    request: ForgetRequest | str,
    method: Method | str = "",
    *,
    level: str = "",
    clients: Clients | None = None,
    ledger: Observation | None = None,
    trained_epochs: int = 0,
    device: torch.device | str = "cpu",
) -> ForgetResult:
    """Make a model forget what the request names; the given model stays as it was.

    The model may be wrapped, compiled, in half precision or answer with more than logits; the result's is a plain
    float32 copy whose answers have the form of the given one's. `data` is what the model was trained on: a dataset
    or its name, images, a `DataLoader`, a dataset of PyTorch or Hugging Face, or a mapping of those with the keys
    train, test and valid. `level` is `hide` or `erase`, the default for classes; `method` is instead a name
    (`directions`, `ssd`, …) or a method with its hyper-parameters. `erase` takes 5 % of `trained_epochs`, the epochs
    that the model was trained for, and at least two passes; ten if they are not known. The level `exact` needs the
    recipe of a run: `forget_run`, or `make_method("retrain", …)`. `clients` are the rows that each client holds, for
    requests that name clients; a `ledger` of the model saves the forward pass over all images.
    """
    dataset = as_dataset(data)
    request = as_request(request, dataset)
    level = level_of(request, level, method)
    if level == "exact" and not method:
        raise BadSetting('the recipe of a model in memory is not known; give method=make_method("retrain", {…})')
    known = as_model(model, dataset)
    engine = central_engine(known, dataset, ledger, clients, device)
    result = unlearn(known, engine, request, method or method_of_level(level, trained_epochs))
    if level == "erase":
        _tell_loss(known, result.model, Selection(exclude=request).select(dataset.valid), device)
    return replace(result, model=released(result.model))


def method_of_level(level: str, trained: int, unit: str = "epochs") -> Method:
    """The method of a level, for a model that was trained for so many epochs, or rounds; 0: not known."""
    name = LEVELS[level]
    return make_method(name, {"epochs": passes_after(trained, unit)} if name == Regrow.name else {})


def _tell_loss(before: nn.Module, after: nn.Module, retained: Images, device: torch.device | str) -> None:
    """Warn where much retain accuracy was lost, by validation images."""
    if not len(retained):
        return
    lost = accuracy(before, retained, device=device) - accuracy(after, retained, device=device)
    if lost > MUCH_LOST:
        more = 'more passes keep more: method=make_method("regrow", {"epochs": …})'
        logger.warning("erasing lost %.1f points of retain accuracy on validation images; %s", 100 * lost, more)


def plan(
    model: nn.Module,
    data: Data,
    request: ForgetRequest | str,
    method: Method | str = "hide",
    *,
    clients: Clients | None = None,
    ledger: Observation | None = None,
    device: torch.device | str = "cpu",
) -> ForgetPlan:
    """The patch that `forget` would apply and the trials that led to it; nothing is changed."""
    dataset = as_dataset(data)
    request, method = _checked(as_request(request, dataset), method)
    if not isinstance(method, PlanningMethod):
        planning = [name for name, kind in METHODS.items() if hasattr(kind, "plan")]
        raise CannotServe(f"{method.name} trains and makes no plan; choose from {', '.join(planning)}")
    known = as_model(model, dataset)
    return method.plan(known, central_engine(known, dataset, ledger, clients, device), request)


def as_model(model: nn.Module, data: Dataset) -> nn.Module:
    """A copy of whatever network a user has, one that reads these images and answers with a logit for each class."""
    known = prepare_model(model, data.train.classes)
    for name, tensor in known.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise BadCheckpoint(f"the model: {name} has values that are NaN or infinite; give an earlier one")
    check_output(known, data.train.shape, data.train.classes)
    return known


def as_dataset(data: Data) -> Dataset:
    """A dataset from whatever a user has: the name of one, images, a loader or dataset of them, or several by split."""
    if isinstance(data, str):
        return load_images(data)
    if isinstance(data, Mapping):
        if strange := [split for split in data if split not in SPLITS]:
            raise unknown("split", strange[0], SPLITS)
        if "train" not in data:
            raise BadData(f"the data has only {', '.join(data)}; expected train, what the model was trained on")
        parts: dict[str, Any] = {SPLITS[split]: images for split, images in data.items()}
        return make_dataset(**parts)
    return data if isinstance(data, Dataset) else make_dataset(data)
