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
FREE = ("data-dir", "timeout", "quorum")  # settings that may differ when a run goes on


@dataclass(frozen=True)
class Subject:
    """Which model, on which data."""

    data: Annotated[str, "a dataset's name, a Parquet file or folder, or an image folder"] = "fashion-mini"
    data_dir: Annotated[str, "the directory that holds the named dataset's Parquet files"] = ""
    image_size: Annotated[int, "resize all images to this; 0: keep"] = 0
    valid: Annotated[float, "share of the training images set aside for every later choice"] = 0.1
    model: Annotated[str, "a model's name, or package.module:function"] = "vgg-mini"
    device: Annotated[str, "auto, cpu, cuda or mps"] = "auto"

    def __post_init__(self) -> None:
        if self.device.partition(":")[0] not in DEVICES:
            raise unknown("device", self.device, DEVICES)
        if self.image_size < 0:
            raise BadSetting(f"image-size must not be negative, not {self.image_size}")


@dataclass(frozen=True)
class ImportSettings(Subject):
    """What a model that was trained elsewhere is, and on which data it is to be judged."""

    seed: Annotated[int, "of the validation split"] = 0


@dataclass(frozen=True)
class TrainSettings(Recipe, Subject):
    """A recipe, and what it is applied to."""

    without: Annotated[
        str, "train without what this request names, such as class:3: what forgetting is measured by"
    ] = ""
    split_seed: Annotated[int, "of the images set aside and of who holds which; -1: the seed"] = -1
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
        """The seed by which images were set aside and dealt to clients."""
        return self.seed if self.split_seed < 0 else self.split_seed

    @property
    def recipe(self) -> Recipe:
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})


@dataclass(frozen=True)
class FederateSettings(TrainSettings, Federation):
    """A recipe, what it is applied to, and the federation that applies it."""

    epochs: Annotated[int, "a client's passes over its images in a round"] = 1
    keep_updates: Annotated[bool, "keep what every client sends in every round, which FedEraser needs"] = False
    start: Annotated[str, "go on from this run instead of from new weights; what it has forgotten stays so"] = ""
    threads: Annotated[int, "CPU threads of every client; 0: torch's own choice"] = 0

    def __post_init__(self) -> None:
        TrainSettings.__post_init__(self)
        Federation.__post_init__(self)

    @property
    def federation(self) -> Federation:
        return Federation(**{field.name: getattr(self, field.name) for field in fields(Federation)})


def relocated(settings: S, data_dir: str) -> S:
    """The settings with their data at another place; as they are if none is given."""
    if not data_dir:
        return settings
    named = settings.data in DATASETS
    return replace(settings, data_dir=data_dir) if named else replace(settings, data=data_dir, data_dir="")
