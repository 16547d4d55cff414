"""Class-discriminative pruning by TF-IDF: silence the channels that speak for a class (Wang et al., WWW 2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.request import ForgetRequest
from fedortho.errors import BadData, BadSetting
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.models.patch import edit_model
from fedortho.models.sites import find_sites
from fedortho.statistics.engine import Engine, withheld_hint
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.unlearning.select import kernel_count, plan_edit


@dataclass(frozen=True)
class ClassPruning(Schedule):
    """Prune the channels with the highest TF-IDF of the class, over all layers at once, then fine-tune.

    From arXiv:2110.11794. With a_{j,c} the mean over images of class c and over the map of what channel j says after
    ReLU, TF_j = a_{j,u} / Σ_j a_{j,u} within the layer and IDF_j = log(C / (1 + number of classes whose a_{j,c} is at
    least the mean over classes)). Public copies prune the least discriminative channels; the idea, and this,
    prune the most. A pruned channel stays silent while the rest is fine-tuned.
    """

    name: ClassVar[str] = "class-pruning"
    kinds: ClassVar[tuple[str, ...]] = ("class",)
    roles: ClassVar[str] = "all: one forward pass; retain: a few epochs"
    norms: ClassVar[str] = "those of pruned channels reset, the others updated by training"
    lr: Annotated[float, "learning rate"] = 0.005
    ratio: Annotated[float, "share of all channels that is pruned"] = 0.05
    layers: Annotated[str, "which convolutions: a depth, names, patterns"] = "all"
    tap: Annotated[str, "where responses are read: relu (behind the norm) or conv (before it)"] = "relu"
    images: Annotated[int, "at most so many images per class for the scores; 0: all"] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio < 1 or self.images < 0:
            raise BadSetting(f"ratio must be between 0 and 1 and images not negative, not {self.ratio}, {self.images}")

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        sites = find_sites(model, engine.shape, self.layers, "channel", self.tap)
        groups = tuple(
            Selection("train", ForgetRequest((name,)), None, self.images, self.seed) for name in engine.names
        )
        statistic = Statistic("averages", self.layers, "channel", self.tap)
        (found,) = engine.measure(model, [Query(groups, statistic)])
        if not all(observation.images for observation in found):
            empty = [name for name, seen in zip(engine.names, found, strict=True) if not seen.images]
            few = withheld_hint(engine)
            raise BadData(f"no training image shows class {empty[0]}{few}; TF-IDF compares all classes")
        means = {site.name: torch.stack([o.mean(site.name) for o in found]) for site in sites}  # (classes, kernels)
        chosen = most_telling(tf_idf(means, request.labels(engine.names)), self.ratio)
        patch = plan_edit(model, sites, {s: (k, torch.ones(len(k)).double()) for s, k in chosen.items()}, "channel")
        return engine.fit(edit_model(model, patch), retain, self.recipe, trainable=patch.trainable(model))


def tf_idf(means: Mapping[str, Tensor], labels: Sequence[int]) -> dict[str, Tensor]:
    """Per layer a score for each channel; of several labels the highest."""
    scores = {}
    for layer, mean in means.items():
        wide = (mean >= mean.mean(0)).sum(0)  # in how many classes a channel is more active than on average
        idf = torch.log(len(mean) / (1.0 + wide.double()))
        per_label = [mean[label] / mean[label].sum().clamp_min(1e-12) * idf for label in labels]
        scores[layer] = torch.stack(per_label).amax(0)
    return scores


def most_telling(scores: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """The channels above one threshold over all layers; a layer keeps at least one."""
    whole = torch.cat(list(scores.values()))
    order = torch.argsort(whole, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    number = kernel_count(ratio, len(whole))
    chosen = {}
    for (layer, own), ranks in zip(scores.items(), rank.split([len(s) for s in scores.values()]), strict=True):
        picked = torch.argsort(ranks)[: min(int((ranks < number).sum()), len(own) - 1)]
        if len(picked):
            chosen[layer] = picked
    return chosen
