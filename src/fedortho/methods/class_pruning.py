"""Class-discriminative pruning: prune channels by their TF-IDF score for a class (Wang et al., WWW 2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, withheld_hint
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import BadData
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.models.patch import edit_model
from fedortho.models.sites import find_sites
from fedortho.storage.settings import Count, Range
from fedortho.unlearning.select import kernel_count, kernel_patch


@dataclass(frozen=True)
class ClassPruning(Schedule):
    """Prune the channels with the highest TF-IDF of class u over all layers, then fine-tune (arXiv:2110.11794).

    a_{j,c} is the activation of channel j after ReLU, averaged over its map and over the images of class c.
    TF_j = a_{j,u} / Σ_j a_{j,u} within the layer, and IDF_j = log(C / (1 + number of classes whose a_{j,c} is at least
    the mean over classes)). Public re-implementations prune the least discriminative channels; the paper, and this
    method, prune the most discriminative ones. A pruned channel stays 0 during fine-tuning.
    """

    name: ClassVar[str] = "class-pruning"
    kinds: ClassVar[tuple[str, ...]] = ("class",)
    needs: ClassVar[str] = "all: one forward pass; retain: a few epochs"
    norms: ClassVar[str] = "those of pruned channels reset, the others updated by training"
    lr: Annotated[float, "learning rate"] = 0.005
    ratio: Annotated[float, Range(0, 1, "()"), "share of all channels that is pruned"] = 0.05
    layers: Annotated[str, "which convolutions: a depth, names, patterns"] = "all"
    tap: Annotated[str, "where activations are read: relu (after the batch norm) or conv (before it)"] = "relu"
    images: Annotated[Count, "images per class for the scores, at most; 0: all"] = 0

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        sites = find_sites(model, engine.info.image_shape, self.layers, "channel", self.tap)
        names = engine.info.class_names
        groups = tuple(Selection("train", ForgetRequest((name,)), None, self.images, self.seed) for name in names)
        statistic = Statistic("averages", self.layers, "channel", self.tap)
        (observations,) = engine.measure(model, [Query(groups, statistic)])
        if empty := [name for name, seen in zip(names, observations, strict=True) if not seen.images]:
            hint = withheld_hint(engine)
            raise BadData(f"class {empty[0]} has no training images{hint}; TF-IDF needs images of every class")
        means = {site.name: torch.stack([o.mean(site.name) for o in observations]) for site in sites}
        chosen = highest_channels(tf_idf(means, request.labels(names)), self.ratio)
        patch = kernel_patch(model, sites, {s: (k, torch.ones(len(k)).double()) for s, k in chosen.items()}, "channel")
        return engine.fit(edit_model(model, patch), retain, self.recipe, trainable=patch.trainable(model))


def tf_idf(means: Mapping[str, Tensor], labels: Sequence[int]) -> dict[str, Tensor]:
    """TF-IDF of each channel, per layer, from means (classes, channels); with several labels the highest of them."""
    scores = {}
    for layer, mean in means.items():
        wide = (mean >= mean.mean(0)).sum(0)  # number of classes with at least average activation
        idf = torch.log(len(mean) / (1.0 + wide.double()))
        per_label = [mean[label] / mean[label].sum().clamp_min(1e-12) * idf for label in labels]
        scores[layer] = torch.stack(per_label).amax(0)
    return scores


def highest_channels(scores: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """The share `ratio` of channels with the highest scores over all layers; each layer keeps at least one."""
    whole = torch.cat(list(scores.values()))
    rank = torch.argsort(whole, descending=True, stable=True).argsort()
    number = kernel_count(ratio, len(whole))
    chosen = {}
    for (layer, own), ranks in zip(scores.items(), rank.split([len(s) for s in scores.values()]), strict=True):
        picked = torch.argsort(ranks)[: min(int((ranks < number).sum()), len(own) - 1)]
        if len(picked):
            chosen[layer] = picked
    return chosen
