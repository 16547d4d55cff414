"""C4, membership (U-LiRA-lite): can models that unlearned an image be told from models that never trained on it?

Shadow models are trained by the run's recipe on halves of a proxy (a sample of the training images) and unlearn by the
method. For clients and samples, models that unlearned an image are compared with models that never had it and unlearned
the others. A class is unlearned by all of them, so they are compared with shadow models trained without it: by the
margin of the image's own label and by that of the closest retained class; the margin that separates better decides.
The audit judges the method on smaller models; offline LiRA on the audited model itself is reported beside it.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.result import AuditResult, Limit, Outcome
from fedortho.data.images import Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.query import Selection
from fedortho.errors import BadData
from fedortho.evaluation import lira
from fedortho.evaluation.case import Case
from fedortho.evaluation.sample_attack import AUC, attack_samples, attack_summary, margins_under, self_test
from fedortho.evaluation.shadows import ShadowPlan, Shadows, choose_proxy
from fedortho.models.predictions import logits_of
from fedortho.models.zoo import reinitialised

LIMIT = Limit("membership", 0.1)  # |AUC − 0.5| of the attack
UNMEASURED = "as nothing that only the forget set taught can be measured"
OWN, CLOSEST = "the image's own label", "the closest retained class"


def membership(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """|AUC − 0.5| of U-LiRA on shadow models that unlearn by the method; above and below 0.5 are failures.

    An attack that does not find the forget set in the shadow models as trained has no power: INCONCLUSIVE, never PASS.
    For clients and samples the self-test must hold as well, or nothing is decided.
    """
    plan = case.shadows
    if plan is None:
        return AuditResult("NOT RUN", "needs shadow models (--audit full --shadows N)")
    pool = Selection(exclude=case.forgotten).select(case.data.train, case.clients)
    proxy, forget = choose_proxy(pool, case.request.mask(pool, case.clients), plan.settings)
    if not bool(forget.any()):
        raise BadData(f"{case.request} matches no training image; there is nothing to attack")
    shadows = Shadows(plan.directory, proxy, partial(reinitialised, case.original), plan.settings, device=case.device)
    targets = proxy.subset(forget)
    unseen = case.unseen_like(targets.labels, len(targets))
    tables = _margin_tables(case, plan, shadows, forget, unseen)
    attacks = {by: _attack(rows, shadows.members[:, forget], plan.settings.seed) for by, rows in tables.items()}
    is_class = case.request.kind == "class"
    strongest = max(attacks, key=lambda by: abs(attacks[by]["AUC"] - 0.5))
    details = attacks[strongest] | {
        "by the margin of": strongest,
        "AUC by each": {by: attack["AUC"] for by, attack in attacks.items()},
        "AUC of the originals by each": {by: attack["AUC of the originals"] for by, attack in attacks.items()},
        "offline LiRA: AUC": _offline(case, targets, unseen, tables[OWN], shadows.members[:, forget]),
        "proxy": f"{len(proxy)} of {len(case.data.train)} training images, {int(forget.sum())} in the forget set",
        "shadows": str(shadows.directory),
        "self-test": None if is_class else self_test(shadows, LIMIT.value, case.device),
        "settings": asdict(plan.settings),
    }
    return _result(details)


def _margins(case: Case, model: nn.Module, images: Images, name: str) -> dict[str, Tensor]:
    """φ of each image, (n,), by each kind of margin."""
    if case.request.kind != "class":
        return {OWN: margins_under(model, images, name, case.device)}
    logits = logits_of(copy.deepcopy(model).to(case.device), images, device=case.device)
    excluded = case.all_requests.labels(case.data.train.names)
    retain = logits[:, [label for label in range(logits.shape[1]) if label not in excluded]]
    own, closest = lira.margins(logits, images.labels, name), lira.margins(retain, retain.argmax(1), name)
    return {OWN: own, CLOSEST: closest}


def _margin_tables(
    case: Case, plan: ShadowPlan, shadows: Shadows, forget: Tensor, unseen: Images
) -> dict[str, dict[str, Tensor]]:
    """By kind of margin, φ of the forget images under each shadow model, (shadows, n).

    Under `original` as trained, `unlearned` after the method, for a class `without` retrained without it; under
    `unseen`, as trained, φ of unseen images. A class is forgotten by name, clients and samples by their rows.
    """
    targets = shadows.proxy.subset(forget)
    rows: dict[str, dict[str, list[Tensor]]] = {}

    def note(name: str, found: Mapping[str, Tensor]) -> None:
        for by, values in found.items():
            rows.setdefault(by, {}).setdefault(name, []).append(values)

    for number in range(shadows.settings.models):
        model, name = shadows.original(number), f"shadow model {number}"
        note("original", _margins(case, model, targets, name))
        note("unseen", _margins(case, model, unseen, name))
        note("unlearned", _unlearned_margins(case, plan, shadows, forget, number, model))
        if case.request.kind == "class":
            note("without", _margins(case, shadows.without(number, forget), targets, f"{name}, retrained"))
    return {by: {name: torch.stack(values) for name, values in tables.items()} for by, tables in rows.items()}


def _unlearned_margins(
    case: Case, plan: ShadowPlan, shadows: Shadows, forget: Tensor, number: int, model: nn.Module
) -> Mapping[str, Tensor]:
    """φ of the forget images after a shadow model has unlearned those that it has; kept if the method is named."""
    targets, images = shadows.proxy.subset(forget), shadows.proxy.subset(shadows.members[number])
    mine = images.rows[forget[shadows.members[number]]]

    def measure() -> dict[str, Tensor]:
        unlearned = model
        if len(mine):  # otherwise this shadow model has nothing to forget
            samples = ForgetRequest(samples=tuple(map(str, mine.tolist())))
            request = case.request if case.request.kind == "class" else samples
            kept = shadows.epochs(number) if plan.replays else None
            unlearned = plan.forget(model, replace(case.data, train=images), request, kept)
        return _margins(case, unlearned, targets, f"shadow model {number}, unlearned")

    if not plan.method:
        return measure()
    what = sha256(f"{plan.method} {case.all_requests}".encode()).hexdigest()[:12]
    return shadows.kept(f"unlearned-{what}-{shadows.name_of(forget)}-{number:02}", measure)


def _attack(tables: Mapping[str, Tensor], members: Tensor, seed: int) -> dict[str, Any]:
    """U-LiRA by one kind of margin, against unlearned shadow models and against those as trained."""
    found, before = (
        attack_summary(*lira.unlearning_scores(tables[kind], tables["without"], members), seed)
        if "without" in tables
        else attack_samples(tables[kind], members, seed)
        for kind in ("unlearned", "original")
    )
    return found | {"AUC of the originals": before[AUC], "ideal AUC": 0.5}


def _offline(
    case: Case, targets: Images, unseen: Images, tables: Mapping[str, Tensor], members: Tensor
) -> dict[str, float]:
    """AUC of offline LiRA on the case's own models: forget images against unseen images with the same labels."""
    none = torch.zeros_like(tables["unseen"], dtype=torch.bool)
    sides = ((targets, tables["original"], members), (unseen, tables["unseen"], none))

    def scores(role: str, images: Images, shadow_margins: Tensor, members: Tensor) -> Tensor:
        own = _margins(case, case.models[role], images, f"the {role} model")[OWN]
        return lira.finite(lira.offline_scores(own, shadow_margins, members))

    return {role: lira.roc_auc(*(scores(role, *side) for side in sides)) for role in case.models}


def _result(details: dict[str, Any]) -> AuditResult:
    auc, before, (low, high) = details["AUC"], details["AUC of the originals"], details["AUC, 95 %"]
    value = abs(auc - 0.5)
    finding = (
        f"on shadow models, an attack separates those that unlearned an image from those never trained on it "
        f"with an AUC of {auc:.3f} ({low:.3f} to {high:.3f}; ideal 0.5, limit {LIMIT.value:g} either way), and those "
        f"as trained with {before:.3f}, by the margin of {details['by the margin of']}"
    )
    outcome: Outcome = "PASS" if value <= LIMIT.value else "FAIL"
    power = max(abs(area - 0.5) for area in details["AUC of the originals by each"].values())
    tested = details["self-test"]
    if tested:
        untouched, retrained = (tested[name][AUC] for name in ("untouched", "retrained"))
        finding += f"; self-test on the {tested['images']} most memorised images: "
        finding += f"untouched {untouched:.3f} (must fail), retrained {retrained:.3f} (must pass)"
    if tested and not tested["holds"]:
        outcome, finding = "INCONCLUSIVE", f"{finding}: it does not hold, so nothing is shown; train more shadow models"
    elif outcome == "PASS" and power <= LIMIT.value:
        outcome, finding = "INCONCLUSIVE", f"{finding}: the attack has no power here, {UNMEASURED}"
    return AuditResult(outcome, finding, value, LIMIT.value, auc, before, details=details)


MEMBERSHIP = Audit("C4", "membership (U-LiRA-lite)", membership, (LIMIT,), is_quick=False)
