"""From a ranking to a patch: which kernels are weakened and by how much."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedortho.errors import BadSetting
from fedortho.models.patch import Patch
from fedortho.models.sites import Site
from fedortho.unlearning.rank import Ranking

SCOPES = ("layer", "global")


def kernel_count(ratio: float, kernels: int) -> int:
    """N_p = ⌈ratio · kernels⌉, at least 1 and at most all, safe from rounding: 0.07 · 100 is 7."""
    return min(max(math.ceil(ratio * kernels - 1e-9), 1), kernels)


def strengths(number: int, alpha: float, rank_base: int = 1) -> Tensor:
    """S_i = max(alpha, 1 − i/N_p) for the ranks i = 1 … N_p (paper, section 4.3), float64.

    >>> [round(s, 3) for s in strengths(6, 0.5).tolist()]
    [0.833, 0.667, 0.5, 0.5, 0.5, 0.5]
    """
    ranks = torch.arange(rank_base, rank_base + number, dtype=torch.float64)
    return (1 - ranks / number).clamp_min(alpha)


def choose_kernels(
    ranking: Ranking, ratio: float, *, scope: str = "layer", min_difference: float = -math.inf, spread: str = "equal"
) -> dict[str, Tensor]:
    """The top kernels: ⌈ratio · kernels⌉ of each site, or the same share over all sites, by score / standard deviation.

    With scope `layer` the ratio is that of each site (spread `equal`) or rises from the first to the last, with
    the same mean (`rising`). Kernels whose difference is below `min_difference` are spared.
    """
    if not 0 < ratio <= 1:
        raise BadSetting(f"ratio must be above 0 and at most 1, not {ratio}")
    if scope == "layer":
        shares = zip(ranking.scores.items(), SPREADS[spread](len(ranking.scores)), strict=True)
        numbers = {site: kernel_count(min(ratio * share, 1.0), len(scores)) for (site, scores), share in shares}
    else:  # how many of each site are among the best of all, scores being divided by the site's deviation
        scaled = [scores / scores.std().clamp_min(1e-12) for scores in ranking.scores.values()]
        everything = torch.cat(scaled)
        best = torch.argsort(everything, descending=True, stable=True)[: kernel_count(ratio, len(everything))]
        is_best = torch.zeros(len(everything), dtype=torch.bool).index_fill(0, best, True)
        parts = is_best.split([len(scores) for scores in scaled])
        numbers = {site: int(part.sum()) for site, part in zip(ranking.scores, parts, strict=True)}
    chosen = {}
    for site, number in numbers.items():
        kernels = ranking.order(site)[:number]
        kernels = kernels[ranking.scores[site][kernels] >= min_difference]
        if len(kernels):
            chosen[site] = kernels
    return chosen


SPREADS: dict[str, Callable[[int], list[float]]] = {
    "equal": lambda sites: [1.0] * sites,
    "rising": lambda sites: [2 * place / (sites + 1) for place in range(1, sites + 1)],
}


def merge_chosen(several: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Several selections (site → kernels, strengths) as one: the larger strength counts for a kernel in both."""
    merged: dict[str, dict[int, float]] = {}
    for selection in several:
        for site, (kernels, strong) in selection.items():
            place = merged.setdefault(site, {})
            for kernel, strength in zip(kernels.tolist(), strong.tolist(), strict=True):
                place[kernel] = max(place.get(kernel, 0.0), strength)
    pairs = {site: (list(found), list(found.values())) for site, found in merged.items()}
    return {site: (torch.tensor(k), torch.tensor(s, dtype=torch.float64)) for site, (k, s) in pairs.items()}


def kernel_patch(
    model: nn.Module, sites: Sequence[Site], chosen: Mapping[str, tuple[Tensor, Tensor]], edit: str
) -> Patch:
    """The patch that weakens the chosen kernels (site → kernels, strengths) by 1 − S; not yet bound to digests.

    `conv` scales the kernel's weight and bias, as printed. `channel` scales what leaves the layer: scale and shift of
    the norm that follows, or weight and bias where none does. A kernel that the channel edit silences altogether is set
    to 0 itself, and its running statistics to mean 0 and variance 1, so that rescaling cannot restore it.
    """
    scaled: dict[str, tuple[Tensor, Tensor]] = {}
    put: dict[str, tuple[Tensor, Tensor]] = {}
    for site in sites:
        if site.name not in chosen:
            continue
        kernels, strong = chosen[site.name]
        factors = (1 - strong).clamp(0, 1)
        for layer in site.layers:
            at = layer.norm if edit == "channel" and layer.norm else layer.name
            for name in _parameters(model, at):
                scaled[name] = (kernels, factors.float())
            gone = kernels[factors == 0]
            if edit == "channel" and layer.norm_kind == "BatchNorm2d" and len(gone):
                for name in _parameters(model, layer.name):
                    put[name] = (gone, torch.zeros(len(gone)))
                for name, value in (("running_mean", 0.0), ("running_var", 1.0)):
                    if f"{layer.norm}.{name}" in dict(model.named_buffers()):
                        put[f"{layer.norm}.{name}"] = (gone, torch.full((len(gone),), value))
    about = {site: {"kernels": k.tolist(), "factors": (1 - s).tolist()} for site, (k, s) in chosen.items()}
    return Patch("", "", scaled, put, {}, {"edit": edit, "sites": about})


def _parameters(model: nn.Module, module: str) -> list[str]:
    return [f"{module}.{name}" for name, _ in model.get_submodule(module).named_parameters(recurse=False)]
