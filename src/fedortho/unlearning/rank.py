"""Which kernels respond more strongly to the forget set than to the retain set; no model, no data, no files."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedortho.errors import BadData
from fedortho.statistics.observe import Observation


@dataclass(frozen=True)
class Ranking:
    """One score per kernel and site: D_j = A_forget,j − A_retain,j (paper, equation of section 4.2)."""

    scores: Mapping[str, Tensor]  # site → (kernels,), float64

    def order(self, site: str) -> Tensor:
        """Kernels of a site, highest score first; equal ones by number."""
        return torch.argsort(self.scores[site], descending=True, stable=True)


def rank_kernels(forget: Observation, retain: Observation, keys: Mapping[str, str]) -> Ranking:
    """Rank each site by the difference of its mean peaks; `keys` says where an observation keeps each site."""
    if stale := [key for key in keys.values() if key in forget.stale or key in retain.stale]:
        raise BadData(f"the ledger is stale for {', '.join(stale)}: an edit came before; observe anew")
    return Ranking({site: forget.mean(key) - retain.mean(key) for site, key in keys.items()})


def same_label_retain(forget: Observation, retain: Observation) -> Observation:
    """The retain set with labels as often as in the forget set: against all, kernels of the class would rank first."""
    seen = forget.counts > 0
    if missing := (seen & (retain.counts == 0)).nonzero().flatten().tolist():
        raise BadData(f"no retained image has label {missing[0]}; contrast with all retained images instead")
    weight = torch.where(seen, forget.counts.double() / retain.counts.clamp_min(1), 0.0)
    sums = {key: value * weight.unsqueeze(1) for key, value in retain.sums.items()}
    return Observation(sums, forget.counts, retain.model, retain.stale)


def rank_correlation(first: Ranking, second: Ranking) -> float:
    """Spearman's correlation of two rankings, averaged over sites: 1 if they order all kernels alike."""
    from scipy.stats import spearmanr

    orders = [[ranking.order(site).argsort().numpy() for ranking in (first, second)] for site in first.scores]
    return sum(float(spearmanr(*pair).statistic) for pair in orders) / len(orders)
