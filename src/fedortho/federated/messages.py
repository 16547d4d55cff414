"""Every message between server and clients: what the server asks, what a client replies.

A message is a frozen dataclass with a schema version. `storage.records` writes it as JSON and validates it where it is
read. Tensors travel beside the message; `wire` packs both into one Flower record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fedortho.data.request import ForgetRequest
from fedortho.engines.query import Selection, Statistic
from fedortho.models.patch import PATCH_SCHEMA
from fedortho.storage.records import Scalar
from fedortho.training.adapters import Adapters
from fedortho.training.objectives import FitOptions, Target
from fedortho.training.recipe import Recipe

WIRE_SCHEMA = 2


@dataclass(frozen=True)
class TaskInfo:
    """The common task: class names, image shape and normalisation."""

    names: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class HelloReply:
    """Who a client is, how many images it trains on, and which model it has."""

    schema: ClassVar[int] = WIRE_SCHEMA

    client: int
    images: int
    has_own_images: bool  # not a share of the common dataset
    model: str  # digest; "": none
    has_left: bool


@dataclass(frozen=True)
class Hello:
    """Asks a client who it is."""

    action: ClassVar[str] = "query.hello"
    schema: ClassVar[int] = WIRE_SCHEMA

    task: TaskInfo


@dataclass(frozen=True)
class PartInfo:
    """A part of a training plan; generated images travel as tensors."""

    selection: Selection
    target: Target
    fraction: float


@dataclass(frozen=True)
class PlanInfo:
    """A training plan; the weights of a teacher travel as tensors, once to each client."""

    parts: tuple[PartInfo, ...]
    options: FitOptions
    adapters: Adapters | None
    teachers: Mapping[str, str]  # name → digest


@dataclass(frozen=True)
class TrainLocal:
    """Asks a client to train the model that is sent for one round."""

    action: ClassVar[str] = "train.local"
    schema: ClassVar[int] = WIRE_SCHEMA

    task: TaskInfo
    recipe: Recipe  # of this client in this round: its learning rate and seed
    plan: PlanInfo
    align: bool  # penalise the distance from the model that is sent
    frozen: tuple[str, ...]  # tensors that do not change and are not sent back
    base: str  # digest of the client's own model, which has the frozen tensors; "": all tensors are sent
    num_clients: int  # clients asked in this round; they share the limits of selections


@dataclass(frozen=True)
class LocalResult:
    """What a client's training in one round came to."""

    images: int  # of its own; its weight in the average
    loss: float
    accuracy: float
    ortho: float | None
    drift: float  # distance of its weights from those received
    images_read: int
    images_trained: int
    flops: float


@dataclass(frozen=True)
class TrainReply:
    """The trained tensors, and how training went; None if the client has fewer than two images for it."""

    schema: ClassVar[int] = WIRE_SCHEMA

    client: int
    result: LocalResult | None


@dataclass(frozen=True)
class KeepModel:
    """Asks a client to keep the model that later requests are about."""

    action: ClassVar[str] = "train.keep"
    schema: ClassVar[int] = WIRE_SCHEMA

    task: TaskInfo
    write_ledger: bool
    forgotten: ForgetRequest | None  # by this model


@dataclass(frozen=True)
class PatchInfo:
    """The digests that a patch is bound to; its edits travel as tensors, its list of kernels stays with the server."""

    schema: ClassVar[int] = PATCH_SCHEMA

    before: str
    after: str
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ApplyPatch:
    """Asks a client to apply a patch and to stop using the forgotten images."""

    action: ClassVar[str] = "train.patch"
    schema: ClassVar[int] = WIRE_SCHEMA

    patch: PatchInfo
    request: ForgetRequest | None


@dataclass(frozen=True)
class ModelReply:
    """The model that a client has now, in reply to a model or a patch."""

    schema: ClassVar[int] = WIRE_SCHEMA

    client: int
    model: str  # digest
    status: Literal["done", "left", "patched-away", "other-model"] = "done"


@dataclass(frozen=True)
class QueryInfo:
    """A query; its candidate patches travel as tensors."""

    selections: tuple[Selection, ...]
    statistic: Statistic  # without patches
    patches: tuple[PatchInfo, ...]


@dataclass(frozen=True)
class Observe:
    """Asks a client for sums over its images."""

    action: ClassVar[str] = "query.observe"
    schema: ClassVar[int] = WIRE_SCHEMA

    task: TaskInfo
    model: str  # digest of the model to measure: the client's own, unless one is sent
    queries: tuple[QueryInfo, ...]
    num_clients: int  # clients asked; they share the limits of selections
    least_group: int  # sums over fewer images are withheld


@dataclass(frozen=True)
class ObserveReply:
    """The cost of the sums that are sent along; no sums unless the status is `done`."""

    schema: ClassVar[int] = WIRE_SCHEMA

    client: int
    status: Literal["done", "left", "other-model"]
    empty: tuple[tuple[int, int], ...]  # query and place of sums over no images; they are not sent
    withheld: int  # selections with fewer than `least_group` images
    images_read: int
    images_trained: int
    flops: float  # of which what made the client's ledger, if it was used
    kept_flops: float  # of which not dependent on the request


Order = Hello | TrainLocal | KeepModel | Observe | ApplyPatch
Reply = HelloReply | TrainReply | ModelReply | ObserveReply
ORDERS: Mapping[str, type[Order]] = {
    order.action: order for order in (Hello, TrainLocal, KeepModel, Observe, ApplyPatch)
}


@dataclass(frozen=True)
class WorkerSetup:
    """The first frame to a worker process: the configuration of the run and of its nodes."""

    schema: ClassVar[int] = WIRE_SCHEMA

    config: Mapping[str, Scalar]
    node: Mapping[str, Scalar]


@dataclass(frozen=True)
class WorkerOrder:
    """A frame to a worker process: a message to one client."""

    schema: ClassVar[int] = WIRE_SCHEMA

    client: int
    num_clients: int
    action: str
    message: Mapping[str, Any]  # as JSON; the client validates it


@dataclass(frozen=True)
class WorkerReply:
    """A frame from a worker process: the client's reply, or None if it failed."""

    schema: ClassVar[int] = WIRE_SCHEMA

    message: Mapping[str, Any] | None  # as JSON; the server validates it
