"""The Method protocol: hyper-parameters, one call, and what a method says of itself."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.engines.cost import Cost
from fedortho.engines.engine import Engine, withheld_hint
from fedortho.engines.query import Selection
from fedortho.errors import BadData, FedOrthoError
from fedortho.models.patch import Patch
from fedortho.statistics.observe import Observation
from fedortho.storage.settings import check_settings
from fedortho.training.recipe import Recipe
from fedortho.unlearning.plan import ForgetPlan
from fedortho.unlearning.trials import Trial


class Method(Protocol):
    """A frozen dataclass of hyper-parameters that is called with a model, an engine and a request."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]  # of requests that it serves: class, client, samples
    needs: ClassVar[str]  # which images, and what for
    norms: ClassVar[str]  # what becomes of batch-norm statistics

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        """A new model that has forgotten; the given one stays as it was."""
        ...


@runtime_checkable
class PlanningMethod(Method, Protocol):
    """A method that finds a patch before it changes anything, as those of ours do."""

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        return self.plan(model, engine, request).patch.apply(model)

    def plan(
        self, model: nn.Module, engine: Engine, request: ForgetRequest, forgotten: ForgetRequest | None = None
    ) -> ForgetPlan:
        """The patch and how it was found; `forgotten` is what earlier requests have removed."""
        ...


@dataclass(frozen=True)
class ForgetResult:
    """What forgetting returns: the edited model, the patch that makes it, how it was found, and its cost."""

    request: ForgetRequest
    method: str  # its name
    settings: Mapping[str, Any]  # its hyper-parameters
    model: nn.Module
    patch: Patch  # applying it to the original reproduces the model bit for bit
    cost: Cost
    plan: ForgetPlan | None = None  # None: the method makes no plan

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Empty where nothing was tried."""
        return self.plan.trials if self.plan else ()

    @property
    def chosen(self) -> Trial | None:
        """The trial whose edit was applied; None if the method tried none."""
        return self.plan.chosen if self.plan else None


class CannotServe(FedOrthoError):
    """A request of a kind that the method has no answer to."""


@dataclass(frozen=True)
class Schedule:
    """How a method trains after, or instead of, an edit: at a constant rate by default, with no penalty of ours."""

    epochs: Annotated[int, "passes over the images; in a federation rounds"] = 5
    lr: Annotated[float, "learning rate"] = 0.01
    batch_size: Annotated[int, "images per step"] = 64
    momentum: Annotated[float, "momentum of SGD"] = 0.9
    weight_decay: Annotated[float, "weight decay"] = 5e-4
    crop: Annotated[int, "pixels of padding before a random crop; 0: none"] = 2
    flip: Annotated[float, "probability of a left-right flip"] = 0.5
    precision: Annotated[str, "float32, or bfloat16 for mixed precision"] = "float32"
    seed: Annotated[int, "of everything that is drawn"] = 0
    kinds: ClassVar[tuple[str, ...]] = KINDS
    norms: ClassVar[str] = "updated by training"
    schedule: ClassVar[str] = "constant"  # of lr
    has_counterfactual: ClassVar[bool] = False  # starts from the model and reads no image of the forget set

    def __post_init__(self) -> None:
        check_settings(self)
        _ = self.recipe  # its ranges are ours

    @property
    def recipe(self) -> Recipe:
        given = {field.name: getattr(self, field.name) for field in fields(Schedule)}
        return Recipe(**given, schedule=self.schedule, ortho=0.0, align=0.0)


def serves(method: Method | type[Method], request: ForgetRequest) -> bool:
    return set(request.kinds) <= set(method.kinds)


def refusal(method: Method, request: ForgetRequest, able: Iterable[str] = ()) -> CannotServe:
    """The error that names the kinds of request that a method serves, and methods that serve this one."""
    others = f"; {', '.join(able)} can" if able else ""
    return CannotServe(f"{method.name} serves {' and '.join(method.kinds)} requests only, not {request}{others}")


def forget_and_retain(method: Method, engine: Engine, request: ForgetRequest) -> tuple[Selection, Selection]:
    """Refuse what cannot be served; otherwise the images to forget and those to keep."""
    if not serves(method, request):
        raise refusal(method, request)
    engine.check(request, None)
    seed = int(getattr(method, "seed", 0))
    return Selection("train", request, seed=seed), Selection("train", None, request, seed=seed)


def check_gradient(method: Method, engine: Engine, request: ForgetRequest, forget: Observation) -> None:
    """Refuse a forget set whose gradient nobody sent: weights chosen by it would mean nothing."""
    if not forget.images:
        raise BadData(f"{request} selects no image{withheld_hint(engine)}; {method.name} needs its gradient")
