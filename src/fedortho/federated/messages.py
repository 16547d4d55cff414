"""Every message between server and clients: what the server asks, what a client replies.

A message is a frozen dataclass with a schema version. `storage.records` writes it as JSON and validates it where it is
read. Tensors travel beside the message; `wire` packs both into one Flower record.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import TrainingPlan
from fedortho.engines.query import Query
from fedortho.errors import BadRecord
from fedortho.models.patch import PATCH_SCHEMA
from fedortho.storage.records import Scalar
from fedortho.storage.settings import kebab
from fedortho.training.recipe import Recipe

LARGEST = 1e24  # of any number in a reply


@dataclass(frozen=True)
class WireMessage:
    """What all messages share."""

    schema: ClassVar[int] = 3


@dataclass(frozen=True)
class Order(WireMessage):
    """What the server asks of a client."""

    action: ClassVar[str]  # the type of the Flower message


def check_numbers(record: Any) -> None:
    """Refuse a record with a number that is not finite, too large, or negative where it is no loss."""
    for each in fields(record):
        value = getattr(record, each.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not math.isfinite(value) or abs(value) > LARGEST or (value < 0 and each.name != "loss"):
            raise BadRecord(f"{kebab(each.name)} is {value}; expected a number from 0 to {LARGEST:g}")


@dataclass(frozen=True)
class Reply(WireMessage):
    """What a client replies; its numbers are finite."""

    carries_tensors: ClassVar[bool] = False

    client: int

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True)
class TaskInfo:
    """The common task: class names, image shape and normalisation."""

    names: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Hello(Order):
    """Asks a client who it is; None: the clients say what the task is."""

    action: ClassVar[str] = "query.hello"

    task: TaskInfo | None


@dataclass(frozen=True)
class HelloReply(Reply):
    """Who a client is, how many images it has, which model it has and what it has forgotten."""

    images: int  # that it trains on
    has_own_images: bool  # not a share of the common dataset
    model: str  # digest; "": none
    has_left: bool
    forgotten: tuple[ForgetRequest, ...] = ()
    valid: int = 0  # its images for validation
    identity: str = ""  # of its store, drawn at random when it was first greeted
    data: str = ""  # digest of its images, keyed by the identity: it tells whether they are others than before
    version: str = ""  # of fedortho
    task: TaskInfo | None = None  # of its images, if the server named none


@dataclass(frozen=True)
class TrainLocal(Order):
    """Asks a client to train the model that is sent for one round."""

    action: ClassVar[str] = "train.local"

    task: TaskInfo
    recipe: Recipe  # of this client in this round: its learning rate and seed
    plan: TrainingPlan  # its generated images and teachers travel as tensors
    teachers: Mapping[str, str]  # name → digest; a teacher is sent once to each client
    align: bool  # penalise the distance from the model that is sent
    frozen: tuple[str, ...]  # tensors that do not change and are not sent back
    base: str  # digest of the client's own model, which has the frozen tensors; "": all tensors are sent
    num_clients: int  # clients with images that are asked in this round; they share the limits of selections


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

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True)
class TrainReply(Reply):
    """The trained tensors, and how training went; None if the client has fewer than two images for it."""

    carries_tensors: ClassVar[bool] = True

    result: LocalResult | None


@dataclass(frozen=True)
class KeepModel(Order):
    """Asks a client to keep the model that later requests are about."""

    action: ClassVar[str] = "train.keep"

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
class ApplyPatch(Order):
    """Asks a client to apply a patch and to stop using the forgotten images."""

    action: ClassVar[str] = "train.patch"

    patch: PatchInfo
    request: ForgetRequest | None


@dataclass(frozen=True)
class ModelReply(Reply):
    """The model that a client has now, in reply to a model or a patch."""

    model: str  # digest
    status: Literal["done", "left", "patched-away", "uncovered", "other-model"] = "done"


@dataclass(frozen=True)
class ShareKey(Order):
    """Asks a client for a key for one exchange of masked sums."""

    action: ClassVar[str] = "query.key"

    exchange: str  # its name, drawn at random


@dataclass(frozen=True)
class KeyReply(Reply):
    """The public key of a client for one exchange, X25519, hexadecimal."""

    key: str


@dataclass(frozen=True)
class Observe(Order):
    """Asks a client for sums over its images."""

    action: ClassVar[str] = "query.observe"

    task: TaskInfo
    model: str  # digest of the model to measure: the client's own, unless one is sent
    queries: tuple[Query, ...]
    candidates: tuple[int, ...]  # of each query how many candidate patches travel as tensors
    num_clients: int  # clients with images that are asked; they share the limits of selections
    least_group: int  # sums over fewer images are withheld; a node may have a larger minimum
    exchange: str = ""  # of masked sums: its name; "": open sums
    keys: Mapping[int, str] = field(default_factory=dict)  # of masked sums: the public key of every client in it


@dataclass(frozen=True)
class ObserveReply(Reply):
    """The cost of the sums that are sent along; no sums unless the status is `done`."""

    carries_tensors: ClassVar[bool] = True

    status: Literal["done", "left", "other-model", "refused"]
    empty: tuple[tuple[int, int], ...]  # query and place of sums over no images; they are not sent
    withheld: int  # selections with too few images, or too few others than an earlier one
    images_read: int
    images_trained: int
    flops: float  # of which what made the client's ledger, if it was used
    kept_flops: float  # of which not dependent on the request


NO_SUMS = ObserveReply(0, "done", (), 0, 0, 0, 0.0, 0.0)
ORDERS: Mapping[str, type[Order]] = {
    order.action: order for order in (Hello, TrainLocal, KeepModel, ShareKey, Observe, ApplyPatch)
}


@dataclass(frozen=True)
class WorkerOrder(WireMessage):
    """A frame to a worker process: a message to one client, and the configuration of its node and of the run."""

    action: str
    node: Mapping[str, Scalar]
    config: Mapping[str, Scalar]
    message: Mapping[str, Any]  # as JSON; the client validates it
