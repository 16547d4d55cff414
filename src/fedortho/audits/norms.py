"""C2: does forgetting outlive a change of norms that needs neither labels nor what was forgotten?

One attack re-estimates batch-norm statistics on retained images, the other needs nothing but the weights: it brings
kernels and batch-norm scales that stand out as short back to what is typical in their layer.
"""

import torch
from torch import Tensor, nn

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, compared, each, gap, ready, right, ruled
from fedortho.audits.thresholds import LIMITS
from fedortho.evaluation.case import Case
from fedortho.models.norms import batch_norms, estimate_norms, usable
from fedortho.models.split import Split
from fedortho.statistics.query import draw

IMAGES = 2000  # retained ones, for the statistics
SHORT = 0.75  # of the layer's median: below it a kernel or a scale stands out
RESTORED = {"kernels": (nn.Conv2d,), "scales": (nn.BatchNorm2d,), "both": (nn.Conv2d, nn.BatchNorm2d)}


def norm_attacks(case: Case, cache: MeasurementCache, budget: str) -> Audit:
    """Forget accuracy after either attack, the one further above the reference deciding."""
    recovered = {"restored norms": each(case, cache, "restored norms", lambda m, who: _best_restored(case, m, who))}
    norms = batch_norms(case.forgot)
    if norms:
        recovered["new statistics"] = each(
            case, cache, "new statistics", lambda m, who: right(case, renewed(case, m), case.judged, who)
        )
    name, measured = max(recovered.items(), key=lambda pair: pair[1]["forgot"] - pair[1].get("reference", 0.0))
    images = usable(min(IMAGES, len(case.kept_train)))
    details = {"attacks": recovered, "images": images, "short": SHORT, "batch_norms": len(norms)}
    says = f"the worse of {len(recovered)} attacks on norms ({name}) brings back {compared(measured)}"
    return ruled("C2", says, case, measured, gap(measured), LIMITS["norms"], details, is_gap=True)


def renewed(case: Case, model: nn.Module) -> nn.Module:
    """A copy with batch-norm statistics of retained images only; no gradient, no label."""
    twin = ready(case, model)
    images = draw(case.kept_train, IMAGES, case.seed)
    estimate_norms(twin, Split(None), batch_norms(twin), images.normalise(images.pixels[images.rows].to(case.device)))
    return twin


def _best_restored(case: Case, model: nn.Module, who: str) -> float:
    tried = [right(case, restored(ready(case, model), kinds), case.judged, who) for kinds in RESTORED.values()]
    return max(tried)


def restored(twin: nn.Module, kinds: tuple[type[nn.Module], ...]) -> nn.Module:
    """The model itself, with what is short lengthened to its layer's median; what is 0 has nothing to be lengthened."""
    for module in twin.modules():
        if isinstance(module, kinds) and isinstance(weight := module.weight, Tensor):
            lengths = weight.detach().flatten(1).norm(dim=1) if weight.dim() > 1 else weight.detach().abs()
            typical = lengths[lengths > 0].median() if bool((lengths > 0).any()) else lengths.max()
            short = (lengths > 0) & (lengths < SHORT * typical)
            factor = torch.where(short, typical / lengths, 1.0)
            with torch.no_grad():
                weight.mul_(factor.view(-1, *(1,) * (weight.dim() - 1)))
                if isinstance(module.bias, Tensor):
                    module.bias.mul_(factor)  # the edits that shorten a channel shorten its shift as well
    return twin
