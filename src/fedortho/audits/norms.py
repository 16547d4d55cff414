"""C2, norm attacks: does forgetting survive a change of norms that needs neither labels nor the forget set?

One attack re-estimates batch-norm statistics on the retain set. The other needs only the weights: it rescales kernels
and batch-norm scales that are unusually short to the median of their layer.
"""

import copy
from functools import partial

import torch
from torch import Tensor, nn

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, accuracy_on, measure_models
from fedortho.audits.result import AuditResult, Limit, compared, decide, shares_text
from fedortho.engines.query import draw
from fedortho.evaluation.case import Case
from fedortho.models.norms import batch_norms, estimate_norms, usable
from fedortho.models.split import Split

LIMIT = Limit("norms", 0.02)  # forget accuracy after the attack, above the reference model's
IMAGES = 2000  # of the retain set, for batch-norm statistics
SHORT = 0.75  # of the layer's median; a shorter kernel or scale is rescaled
RESCALED: tuple[tuple[type[nn.Module], ...], ...] = ((nn.Conv2d,), (nn.BatchNorm2d,), (nn.Conv2d, nn.BatchNorm2d))


def norm_attacks(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """Forget accuracy after the attack that is further above the reference model."""
    attacks, norms = {"restored norms": partial(_best_rescaled, case)}, batch_norms(case.unlearned)
    if norms:
        attacks["new statistics"] = partial(_with_statistics, case)
    recovered = {name: compared(measure_models(case, cache, name, attack)) for name, attack in attacks.items()}
    name, measured = max(recovered.items(), key=lambda pair: pair[1]["unlearned"] - pair[1].get("reference", 0.0))
    images = usable(min(IMAGES, len(case.retain_train)))
    details = {"attacks": recovered, "images": images, "short": SHORT, "batch_norms": len(norms)}
    shares = shares_text(measured, len(case.references))
    finding = f"the stronger of {len(recovered)} norm attacks ({name}) recovers {shares}"
    expected = 0.0 if case.request.kind == "class" else None  # no retrained model answers a class that it never saw
    return decide(finding, measured, LIMIT, details, expected=expected)


def _with_statistics(case: Case, twin: nn.Module, role: str) -> float:
    """Forget accuracy with batch-norm statistics of the retain set only; needs no gradient and no label."""
    images = draw(case.retain_train, IMAGES, case.seed)
    estimate_norms(twin, Split(None), batch_norms(twin), images.normalise(images.pixels[images.rows].to(case.device)))
    return accuracy_on(case, twin, case.forget_eval, role)


def _best_rescaled(case: Case, model: nn.Module, role: str) -> float:
    rescaled = (rescale_short(copy.deepcopy(model), kinds) for kinds in RESCALED)
    return max(accuracy_on(case, twin, case.forget_eval, role) for twin in rescaled)


def rescale_short(twin: nn.Module, kinds: tuple[type[nn.Module], ...]) -> nn.Module:
    """The given model, with short kernels and scales rescaled to their layer's median; zeros stay zero."""
    for module in twin.modules():
        if isinstance(module, kinds) and isinstance(weight := module.weight, Tensor):
            lengths = weight.detach().flatten(1).norm(dim=1) if weight.dim() > 1 else weight.detach().abs()
            typical = lengths[lengths > 0].median() if bool((lengths > 0).any()) else lengths.max()
            is_short = (lengths > 0) & (lengths < SHORT * typical)
            factor = torch.where(is_short, typical / lengths, 1.0)
            with torch.no_grad():
                weight.mul_(factor.view(-1, *(1,) * (weight.dim() - 1)))
                if isinstance(module.bias, Tensor):
                    module.bias.mul_(factor)  # edits that shorten a channel shorten its shift as well
    return twin


NORM_ATTACKS = Audit("C2", "batch-norm and kernel-norm attacks", norm_attacks, (LIMIT,))
