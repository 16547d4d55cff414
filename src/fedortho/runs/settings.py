"""Settings of a training run: the data, the model, the recipe, the federation."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, TypeVar

from fedortho.data.request import ForgetRequest
from fedortho.data.sources import DATASETS
from fedortho.devices import DEVICES
from fedortho.errors import BadSetting, unknown
from fedortho.runs.federation import Federation
from fedortho.training.recipe import Recipe

S = TypeVar("S", bound="Subject")
FREE = ("data-dir", "timeout", "quorum")  # settings that may differ when a run is continued


@dataclass(frozen=True)
class Subject:
    """Which model, on which data."""

    data: Annotated[str, "a dataset's name, a Parquet file or folder, or an image folder"] = "fashion-mini"
    data_dir: Annotated[str, "the directory that holds the named dataset's Parquet files"] = ""
    image_size: Annotated[int, "resize all images to this; 0: keep"] = 0
    valid: Annotated[float, "share of the training images used for validation"] = 0.1
    model: Annotated[str, "a model's name, or package.module:function"] = "vgg-mini"
    device: Annotated[str, "auto, cpu, cuda or mps"] = "auto"

    def __post_init__(self) -> None:
        if self.device.partition(":")[0] not in DEVICES:
            raise unknown("device", self.device, DEVICES)
        if self.image_size < 0:
            raise BadSetting(f"image-size must not be negative, not {self.image_size}")


@dataclass(frozen=True)
class ImportSettings(Subject):
    """The architecture of a model that was trained elsewhere, and its data."""

    seed: Annotated[int, "seed of the validation split"] = 0


@dataclass(frozen=True)
class TrainSettings(Recipe, Subject):
    """A recipe, the data and the network."""

    without: Annotated[str, "request whose images are left out, such as class:3: a reference model"] = ""
    split_seed: Annotated[int, "seed of the validation split and of the client partition; -1: the seed"] = -1
    threads: Annotated[int, "CPU threads; 0: torch's own choice"] = 0

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        Subject.__post_init__(self)
        if self.threads < 0:
            raise BadSetting(f"threads must not be negative, not {self.threads}")
        if self.split_seed < -1:
            raise BadSetting(f"split-seed must be at least 0, or -1 for the seed, not {self.split_seed}")
        if self.without:
            ForgetRequest.parse(self.without)

    @property
    def partition_seed(self) -> int:
        """The seed of the validation split and of the client partition."""
        return self.seed if self.split_seed < 0 else self.split_seed

    @property
    def recipe(self) -> Recipe:
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})


@dataclass(frozen=True)
class FederateSettings(TrainSettings, Federation):
    """A recipe, the data, the network and the federation."""

    epochs: Annotated[int, "local epochs of a client in a round"] = 1
    keep_updates: Annotated[bool, "keep the update of every client in every round, which FedEraser needs"] = False
    start: Annotated[str, "run whose model training starts from; its forgotten images stay excluded"] = ""
    threads: Annotated[int, "CPU threads of every client; 0: torch's own choice"] = 0

    def __post_init__(self) -> None:
        TrainSettings.__post_init__(self)
        Federation.__post_init__(self)

    @property
    def federation(self) -> Federation:
        return Federation(**{field.name: getattr(self, field.name) for field in fields(Federation)})


def relocated(settings: S, data_dir: str) -> S:
    """The settings with their data in another directory; unchanged if none is given."""
    if not data_dir:
        return settings
    named = settings.data in DATASETS
    return replace(settings, data_dir=data_dir) if named else replace(settings, data=data_dir, data_dir="")
