"""Settings of a training run: the data, the model, the recipe, the federation and who trains in its rounds."""

import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from fedortho.data.images import Dataset
from fedortho.data.partition import partition
from fedortho.data.preprocessing import Preprocessing
from fedortho.data.request import ForgetRequest
from fedortho.data.sources import DATASETS
from fedortho.devices import DEVICES, MOST_THREADS
from fedortho.errors import BadSetting, FedOrthoError, unknown
from fedortho.storage.settings import Count, Number, SomeShare, check_settings
from fedortho.training.recipe import Recipe

S = TypeVar("S", bound="Subject")
FREE = ("data-dir", "timeout", "quorum", "sums", "pooling")  # settings that may differ when a run is continued


@dataclass(frozen=True)
class Subject:
    """Which model, on which data."""

    data: Annotated[str, "a dataset's name, a Parquet file or folder, or an image folder"] = "fashion-mini"
    data_dir: Annotated[str, "the directory that holds the named dataset's Parquet files"] = ""
    image_size: Annotated[int, "resize all images to this; 0: keep"] = 0
    valid: Annotated[float, "share of the training images used for validation"] = 0.1
    model: Annotated[str, "a model's name, or package.module:function"] = "vgg-mini"
    device: Annotated[str, "auto, cpu, cuda or mps"] = "auto"
    mean: Annotated[str, "mean of each channel that inputs are normalised by, of pixels / 255, such as 0.5,0.5,0.5"] = (
        ""
    )
    std: Annotated[str, "deviation of each channel, with --mean"] = ""
    scale: Annotated[str, "usual inputs: 0-1, -1-1, imagenet, 0-255, or data (statistics of the training split)"] = ""
    transform: Annotated[str, "function of uint8 images that makes the inputs, as package.module:function"] = ""
    valid_from_test: Annotated[float, "share of the test split used for validation in place of training images"] = 0.0

    def __post_init__(self) -> None:
        _ = self.preprocessing  # refuses what contradicts itself
        if not 0 <= self.valid_from_test < 1:
            raise BadSetting(f"valid-from-test must be at least 0 and below 1, not {self.valid_from_test}")
        if self.device.partition(":")[0] not in DEVICES:
            raise unknown("device", self.device, DEVICES)
        if self.image_size < 0:
            raise BadSetting(f"image-size must not be negative, not {self.image_size}")

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing.parse(self.mean, self.std, self.scale, self.transform)

    @property
    def code(self) -> tuple[str, ...]:
        """Names that may be those of functions of others."""
        return self.model, self.transform


@dataclass(frozen=True)
class ImportSettings(Subject):
    """The architecture of a model that was trained elsewhere, and its data."""

    valid: Annotated[str, "directory of images that training has not seen, or a share of the training images"] = ""  # type: ignore[assignment]  # here also a path
    seed: Annotated[int, "seed of the validation split"] = 0
    without: Annotated[str, "request whose images it was trained without, such as class:3: a reference model"] = ""

    def as_training(self, recipe: Recipe | None) -> "TrainSettings":
        """The settings of a run with this model; without a recipe it cannot be retrained, so epochs are 0."""
        values = asdict(self) | ({"epochs": 0} if recipe is None else {**asdict(recipe), "split_seed": self.seed})
        if self.valid and self.valid_from_test:
            raise BadSetting(f"--valid {self.valid} and --valid-from-test contradict each other; give one")
        try:
            values["valid"] = float(self.valid or (0.0 if self.valid_from_test else Subject.valid))
        except ValueError:
            values |= {"valid": 0.0, "valid_dir": self.valid}
        return TrainSettings(**values)


class Passes(NamedTuple):
    """The steps that a training counts: epochs, or rounds of a federation."""

    unit: str  # epochs or rounds
    planned: int
    keep: str  # after which of them the model is kept; see `is_kept`


@dataclass(frozen=True)
class TrainSettings(Recipe, Subject):
    """A recipe, the data and the network."""

    valid_dir: Annotated[str, "directory of validation images, in place of training images"] = ""
    without: Annotated[str, "request whose images are left out, such as class:3: a reference model"] = ""
    split_seed: Annotated[int, "seed of the validation split and of the client partition; -1: the seed"] = -1
    threads: Annotated[int, "CPU threads; 0: torch's own choice"] = 0
    start: Annotated[str, "run whose model training starts from; its forgotten images stay excluded"] = ""
    new_images: Annotated[str, "folder or Parquet file of images that join the data of the run that is continued"] = ""
    keep_epochs: Annotated[str, "models of epochs to keep: all, powers (1, 2, 4, …) or every N-th"] = ""

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        Subject.__post_init__(self)
        if not 0 <= self.threads <= MOST_THREADS:
            raise BadSetting(f"threads must be 0 to {MOST_THREADS}, not {self.threads}")
        if self.split_seed < -1:
            raise BadSetting(f"split-seed must be at least 0, or -1 for the seed, not {self.split_seed}")
        if self.valid_dir and self.valid_from_test:
            raise BadSetting("--valid-dir and --valid-from-test contradict each other; give one")
        if self.new_images and not self.start:
            raise BadSetting("--new-images are those of a run that is continued; give --continue RUN")
        unit, _, kept = self.passes
        if kept not in ("", "all", "powers") and not (kept.isdecimal() and int(kept)):
            raise BadSetting(f"keep-{unit} is {kept!r}; expected all, powers or a number N to keep every N-th")
        _ = self.excluded

    @property
    def passes(self) -> Passes:
        """What is counted, how many there are, and after which of them the model is kept."""
        return Passes("epochs", self.epochs, self.keep_epochs)

    @property
    def image_passes(self) -> float:
        """How often training passes over the images; 0: not known."""
        return float(self.epochs)

    @property
    def new_sources(self) -> list[str]:
        """The sources of images that joined, oldest first."""
        return self.new_images.split(os.pathsep) if self.new_images else []

    @property
    def excluded(self) -> ForgetRequest:
        """The request whose images are left out; it may be empty."""
        return ForgetRequest.parse(self.without) if self.without else ForgetRequest()

    @property
    def partition_seed(self) -> int:
        """The seed of the validation split and of the client partition."""
        return self.seed if self.split_seed < 0 else self.split_seed

    @property
    def valid_source(self) -> str:
        """What the validation images are."""
        share = f"{self.valid_from_test:.0%} of the test split, which is without them" if self.valid_from_test else ""
        return share or (f"images of {self.valid_dir}" if self.valid_dir else "part of the training split")

    @property
    def recipe(self) -> Recipe:
        """The part of the settings that is about training."""
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})


@dataclass(frozen=True)
class Federation:
    """Federated averaging: every field is a number or a word."""

    clients: Annotated[Number, "number of clients"] = 100
    rounds: Annotated[Count, "rounds of federated averaging"] = 100
    fraction: Annotated[SomeShare, "share of the clients that train in a round, at least one client"] = 0.1
    draw: Annotated[
        int, "clients of a round: 2: the first present of a permutation of all; 1: a draw among those present"
    ] = 2
    split: Annotated[str, "partition of the images: iid, dirichlet:BETA or shards:NUMBER"] = "iid"
    least_images: Annotated[Number, "minimum number of images per client"] = 10
    norms: Annotated[
        str,
        ("fedavg", "local", "recalibrate"),
        "batch-norm statistics: fedavg, local (never sent, pooled at the end), recalibrate (fedavg, pooled at the end)",
    ] = "fedavg"
    warmup_contacts: Annotated[Count, "rounds of a client before alignment begins"] = 1
    evaluate_every: Annotated[Count, "rounds between two evaluations; 0: only at the end"] = 5
    timeout: Annotated[float, "seconds to wait for clients in one exchange"] = 600.0
    quorum: Annotated[float, "share of clients that must answer: of all at the start, then of those asked"] = 0.5
    least_group: Annotated[Number, "minimum images of a sum that a client sends; 1: it sends all sums"] = 5
    sums: Annotated[
        str, ("open", "masked"), "sums that clients send: open, or masked, of which the server sees only the total"
    ] = "open"
    pooling: Annotated[
        str,
        ("bounded", "trimmed", "sum"),
        "sums of clients: bounded (by the model and the median client), trimmed (without extremes), or sum",
    ] = "bounded"
    strategy: Annotated[
        str, "strategy of Flower for training, such as flwr.serverapp.strategy:FedMedian; empty: the weighted mean"
    ] = ""

    def __post_init__(self) -> None:
        check_settings(self)
        if not 0 <= self.quorum <= 1:
            raise BadSetting(f"quorum must be between 0 and 1, not {self.quorum}")
        if self.draw not in (1, 2):
            raise BadSetting(f"draw must be 1 or 2, not {self.draw}")
        if not 0 < self.timeout < float("inf"):
            raise BadSetting(f"timeout must be a number of seconds above 0, not {self.timeout}")


@dataclass(frozen=True)
class FederateSettings(TrainSettings, Federation):
    """A recipe, the data, the network and the federation."""

    epochs: Annotated[Count, "local epochs of a client in a round"] = 1
    keep_updates: Annotated[bool, "keep the update of every client in every round, which FedEraser needs"] = False
    keep_rounds: Annotated[
        str, "models of rounds to keep, for exact forgetting: all, powers (1, 2, 4, …) or every N-th"
    ] = ""
    threads: Annotated[int, "CPU threads of every client; 0: torch's own choice"] = 0

    def __post_init__(self) -> None:
        TrainSettings.__post_init__(self)
        Federation.__post_init__(self)
        if self.keep_epochs or self.new_images:
            raise BadSetting("--keep-epochs and --new-images are for train; a federation has --keep-rounds")
        if unknown := [client for client in self.excluded.clients if client >= self.clients]:
            raise BadSetting(f"no client {unknown[0]}; clients run 0 to {self.clients - 1}")
        if self.valid_dir or self.valid_from_test:
            raise BadSetting(
                "clients of a federation validate on their own images; leave out --valid-dir and --valid-from-test"
            )

    @property
    def code(self) -> tuple[str, ...]:
        """Names that may be those of functions of others; Flower's own strategies are none."""
        strategy = self.strategy.partition("(")[0]
        return (*super().code, "" if strategy.startswith("flwr.") else strategy)

    @property
    def passes(self) -> Passes:
        """Rounds."""
        return Passes("rounds", self.rounds, self.keep_rounds)

    @property
    def image_passes(self) -> float:
        """How often clients pass over their images, on average: most are not drawn in most rounds."""
        return self.epochs * self.rounds * self.fraction

    @property
    def federation(self) -> Federation:
        """The part of the settings that only a federation has."""
        return Federation(**{field.name: getattr(self, field.name) for field in fields(Federation)})


def relocated(settings: S, data_dir: str) -> S:
    """The settings with their data in another directory; unchanged if none is given."""
    if not data_dir:
        return settings
    named = settings.data in DATASETS
    return replace(settings, data_dir=data_dir) if named else replace(settings, data=data_dir, data_dir="")


def held_rows(data: Dataset, federation: Federation, seed: int) -> dict[int, Tensor]:
    """The rows of the training and validation images that each client holds or held."""
    return partitioned(data.known_rows, data.train.store_labels, federation, seed)


def partitioned(rows: Tensor, store_labels: Tensor, federation: Federation, seed: int) -> dict[int, Tensor]:
    """Each client's part of these rows of a store."""
    how = (federation.clients, federation.split)
    parts = partition(store_labels[rows], *how, seed=seed, minimum=federation.least_images)
    return {client: rows[positions] for client, positions in enumerate(parts)}


def sample_clients(
    present: Sequence[int], federation: Federation, seed: int, turn: int, always: Collection[int] = ()
) -> list[int]:
    """The clients that train in a round, in ascending order: those of `always`, and others drawn by seed and round.

    Together they are the federation's share of its clients; at least one of the others is drawn. Seed and round give a
    permutation of all clients, of which the first that are present train: the absence of a client that would not be
    drawn changes nothing. The draw 1, of runs before there were two, is among those present and has no such property.

    >>> sample_clients(range(10), Federation(clients=10, fraction=0.3), seed=0, turn=0)
    [2, 8, 9]
    >>> sample_clients([0, 2, 3, 8, 9], Federation(clients=10, fraction=0.3), seed=0, turn=0)  # half of them are absent
    [2, 8, 9]
    >>> sample_clients(range(10), Federation(clients=10, fraction=0.3, draw=1), seed=0, turn=0, always=[8])
    [0, 3, 8]
    """
    if not present:
        raise FedOrthoError("no client is connected; start the nodes and try again")
    named, others = (sorted(c for c in present if (c in always) is wanted) for wanted in (True, False))
    number = min(max(round(federation.fraction * federation.clients) - len(named), 1), len(others))
    if federation.draw == 1:
        drawn = np.random.default_rng([seed, turn, 77]).choice(np.asarray(others, dtype=int), number, replace=False)
    else:
        order = np.random.default_rng([seed, turn, 78]).permutation(federation.clients)
        drawn = order[np.isin(order, others)][:number]
    return sorted([*named, *drawn.tolist()])


def is_kept(policy: str, number: int) -> bool:
    """Whether the model after `number` rounds or epochs is kept; before the first it follows from the seed.

    >>> [number for number in range(20) if is_kept("powers", number)], [n for n in range(20) if is_kept("6", n)]
    ([1, 2, 4, 8, 16], [6, 12, 18])
    """
    if policy == "powers":
        return number.bit_count() == 1
    return bool(policy and number) and (policy == "all" or number % int(policy) == 0)
