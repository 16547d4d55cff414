"""Hyper-parameters that methods of ours share; each method is a dataclass that adds its own."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedortho.storage.settings import Count, Range, Share, check_settings
from fedortho.unlearning.select import SCOPES, SPREADS

WEIGHTINGS = ("pooled", "paper")


@dataclass(frozen=True)
class EditSettings:
    """What every edit needs: its layers, its size, and the images it is decided on."""

    layers: Annotated[str, "which convolutions: a depth, names, patterns"] = "deep"
    ratio: Annotated[Share, "share of kernels, or directions, in each layer; 0: found by target and budget"] = 0.0
    statistics_images: Annotated[Count, "images per group for the statistics, at most; 0: all"] = 0
    seed: Annotated[Count, "seed of all subsamples"] = 0
    name: ClassVar[str] = ""  # of the method
    edit, tap = "channel", "stream"  # what is edited, and where responses are read; a method may make fields of them

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class KernelSettings(EditSettings):
    """How kernels are ranked, chosen and weakened (paper, sections 4.2 and 4.3)."""

    alpha: Annotated[Share, "least strength; 1 silences the kernel"] = 1.0
    rank_base: Annotated[int, Range(0, 1), "first rank in S = max(alpha, 1 - rank/number): 1 as printed, or 0"] = 1
    scope: Annotated[str, SCOPES, "choose kernels per layer or global"] = "layer"
    weighting: Annotated[str, WEIGHTINGS, "in a federation: pooled sums, or the paper's local differences"] = "pooled"
    min_difference: Annotated[float, "spare kernels whose difference is below this"] = -1e30
    spread, contrast, repair = "equal", "retain", False  # as printed; a method may make fields of them


@dataclass(frozen=True)
class CalibrationSettings(EditSettings):
    """A target and a retain budget instead of a ratio, and how edits are tried, repaired and scrubbed."""

    spread: Annotated[str, SPREADS, "how the ratio is spread over layers: equal, or rising towards the last"] = "rising"
    repair_by: Annotated[
        str, ("batches", "layers"), "batches: all norms in one exchange; layers: exact, one exchange for each norm"
    ] = "batches"
    repair_images: Annotated[Count, "retained images for the repair"] = 400
    scrub: Annotated[bool, "finish a class request in the classifier if the edit within the budget falls short"] = True
    target: Annotated[Share, "forget accuracy to reach, class requests"] = 0.01
    limit: Annotated[
        Share, "forget accuracy of clients and samples in models without them; 0: of unseen images with their labels"
    ] = 0.0
    anyway: Annotated[bool, "edit even where nothing that only the clients or samples taught can be measured"] = False
    max_retain_drop: Annotated[Share, "retain accuracy that may be lost"] = 0.01
    trial_images: Annotated[
        Count, "retained images for trials, at most, and a quarter as many of the forget set; 0: all"
    ] = 1024
