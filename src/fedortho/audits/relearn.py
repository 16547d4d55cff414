"""C3, relearning: how fast does the forget set come back, by a prototype at once, or by training in so many steps?"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import (
    MeasurementCache,
    accuracy_on,
    balanced_sample,
    classifier_features,
    classifier_name,
    editable_copy,
    forget_accuracy,
    measure_model,
)
from fedortho.audits.reset_tail import FALSE_ALARMS, reset_tail
from fedortho.audits.reset_tail import LAST_LIMIT as LAST_TAIL_LIMIT
from fedortho.audits.reset_tail import LIMIT as TAIL_LIMIT
from fedortho.audits.result import (
    NO_POWER,
    Attack,
    AuditResult,
    Limit,
    compared,
    decide,
    doubts,
    original_exceeds,
    shares_text,
)
from fedortho.engines.query import draw
from fedortho.evaluation.case import Case
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

PROTOTYPE_LIMIT = Limit("prototype", 0.05, calibrated=0.06)  # forget accuracy by a prototype, above the reference's
SPEED_UP_LIMIT = Limit("speed-up", 2.0)  # relearning steps of the reference per step of the unlearned model
SAMPLES: tuple[int, ...] = (0, 10, 50)  # images of the forget set among those of the retain set
STEPS, BATCH, EVERY = 60, 128, 2  # upper bound (twice for the reference), images per step, steps between evaluations
RECIPE = Recipe(  # without momentum, so that a fit cut into pieces is the same fit
    epochs=1, batch_size=BATCH, lr=0.1, schedule="constant", momentum=0.0, weight_decay=0.0, crop=0, flip=0.0, ortho=0.0
)
TARGET = 0.8  # share of the original's forget accuracy that counts as relearned
EVALUATED = 500  # images at every evaluation
SHOTS, DRAWS = 10, 20  # images of a prototype, and prototypes that are averaged
RELEARNED = "relearning"  # steps by k, in the details of the full budget


def relearning(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """The prototype, and in `full` reset tails and the speed-ups of relearning; the attack furthest beyond its limit.

    If none fails and one is undecided, the audit is INCONCLUSIVE, and so it is if the original model would pass every
    attack. Where one class is retained, its images alone teach a constant answer, so forget images are always added.
    """
    retrained, case = case, case.treated_alike
    is_class, attacks = case.request.kind == "class", list[Attack]()
    details: dict[str, Any] = {"steps": STEPS, "batch": BATCH, "shots": SHOTS}
    if is_class:
        attacks.append(_prototype_attack(case, retrained, cache))
        details["prototype"] = attacks[0].measured
    if is_class and budget == "full":
        attacks.append(reset_tail(case, cache))
        details["reset tail"] = attacks[1].details
    if budget == "full":
        numbers = [k for k in SAMPLES if k or not case.retains_one_class]
        details[RELEARNED] = {str(k): _relearning_steps(case, cache, k) for k in numbers}
        attacks += [_relearning_attack(k, steps) for k, steps in details[RELEARNED].items()]
    if not attacks:
        reason = "the prototype applies to class requests only; relearning is part of --audit full"
        return AuditResult("NOT RUN", reason)
    decided = [attack for attack in attacks if not attack.is_undecided]
    undecided = [attack.finding for attack in attacks if attack.is_undecided]
    details["values"] = {attack.name: attack.value for attack in decided}
    telling = [attack for attack in decided if attack.has_power]
    if not telling:
        findings = [*undecided, *(attack.finding for attack in decided), *([NO_POWER] if decided else [])]
        return AuditResult("INCONCLUSIVE", "; ".join(findings), details=details)
    worst = max(telling, key=lambda attack: (attack.value or 0.0) / attack.limit.value)
    if [attack.name for attack in telling if attack.fails] == ["reset tail"] and attacks[0] in telling:
        details["erased_behind"] = worst.details["erased_behind"]  # nothing is found before the classifier
    others = [attack.finding for attack in telling if attack.name != worst.name]
    finding = "; ".join([worst.finding, *others, *undecided])
    finding += "" if budget == "full" else "; reset tails and relearning by training were not run (--audit full)"
    result = decide(finding, worst.measured, worst.limit, details | {"decided_by": worst.name}, worst.value)
    return replace(result, outcome="INCONCLUSIVE") if undecided and result.outcome == "PASS" else result


def _prototype_attack(case: Case, retrained: Case, cache: MeasurementCache) -> Attack:
    """The prototype; the original, which nobody treated, is held against the models as they were retrained."""
    shares = compared({role: prototype_recall(case, cache, role) for role in case.models})
    found = f"a prototype of {SHOTS} images recovers {shares_text(shares, len(case.references))} of the class"
    if "reference" not in shares:
        return Attack("prototype", found, shares, PROTOTYPE_LIMIT)
    untreated = shares
    if retrained.counterfactuals:
        untreated = compared({role: prototype_recall(retrained, cache, role) for role in retrained.models})
    value, has_power = shares["unlearned"] - shares["reference"], original_exceeds(untreated, PROTOTYPE_LIMIT)
    doubt = doubts(case, value, PROTOTYPE_LIMIT) if has_power else ""
    found = f"{found}; {doubt}" if doubt else found
    return Attack("prototype", found, shares, PROTOTYPE_LIMIT, value, has_power, bool(doubt))


def _relearning_attack(k: str, steps: Mapping[str, int | None]) -> Attack:
    """The speed-up; the reference model was trained until it arrived or certainly is slower by more than the limit."""
    counted = {role: float(STEPS if number is None else number) for role, number in steps.items()}
    finding = f"relearning with {k} forgotten images takes {_steps_text(steps['unlearned'], STEPS)} steps"
    if "reference" not in steps:
        return Attack(f"k = {k}", finding, counted, SPEED_UP_LIMIT)
    mine, theirs = steps["unlearned"], steps["reference"]
    ratio = speed_up(mine, theirs)
    bound = "" if None not in (mine, theirs) else "at most " if mine is None else "at least "
    speed = "unknown" if mine is None and theirs is None else f"{bound}{ratio:.1f}"
    finding += f" (one reference model {_steps_text(theirs, most_steps(mine))}; speed-up {speed})"
    has_power = speed_up(0, theirs) > SPEED_UP_LIMIT.value  # the original model needs no step
    return Attack(f"k = {k}", finding, counted, SPEED_UP_LIMIT, ratio, has_power)


def prototype_recall(case: Case, cache: MeasurementCache, role: str) -> float:
    """Forget accuracy when each row of the class is built from the mean feature of a few images; mean over draws."""
    train, evaluated = classifier_features(case, cache, role)
    model = case.models[role]
    linear = model.get_submodule(classifier_name(case, editable_copy(case, model)))
    assert isinstance(linear, nn.Linear), "find_classifier finds no other"
    weight = linear.weight.detach().cpu().double()
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach().cpu().double()
    names = case.data.train.names
    forget, excluded = case.request.labels(names), case.all_requests.labels(names)
    retain = torch.tensor([label for label in range(len(weight)) if label not in excluded])
    labels, shares = balanced_sample(case).labels, []
    generator = torch.Generator().manual_seed(case.seed)
    retain_features = train[torch.isin(labels, retain)]
    for _ in range(DRAWS):
        best, predicted = (evaluated @ weight[retain].T + bias[retain]).amax(1), torch.full((len(evaluated),), -1)
        for label in forget:
            own = train[labels == label]
            shots = own[torch.randperm(len(own), generator=generator)[:SHOTS]]
            row, shift = prototype(shots, retain_features, weight[retain], bias[retain])
            logit = evaluated @ row + shift
            predicted = torch.where(logit > best, label, predicted)
            best = torch.maximum(best, logit)
        shares.append(float((predicted == case.forget_eval.labels).double().mean()))  # on the CPU
    return sum(shares) / DRAWS


def prototype(shots: Tensor, retain: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A classifier row and its bias, from features of a few images of the class and of the retain set.

    The row points from the retain images' mean to the shots' mean and is as long as the other rows, from their centre;
    beside a single row any length gives the same answers, because the bias follows. Features are seldom negative, so
    the plain mean would win everywhere; the bias lets the row take FALSE_ALARMS of the retain images, in every model.
    """
    centre = weight.mean(0)
    length = (weight - centre).norm(dim=1).mean() if len(weight) > 1 else 1.0
    direction = shots.mean(0) - retain.mean(0)
    row = centre + length * direction / direction.norm().clamp_min(1e-12)
    margins = (retain @ weight.T + bias).amax(1) - retain @ row
    return row, margins.quantile(FALSE_ALARMS)


def _relearning_steps(case: Case, cache: MeasurementCache, k: int) -> dict[str, int | None]:
    original = forget_accuracy(case, cache, "original")
    if case.retains_one_class:
        original = measure_model(case, cache, "original", "recovered", partial(_recovered, case))
    target = TARGET * original

    def needed(role: str, most: int) -> int | None:
        measure = partial(steps_needed, case, k=k, target=target, most=most)
        return measure_model(case, cache, role, f"relearn {k} {most}", measure)

    mine = needed("unlearned", STEPS)
    return {"unlearned": mine} | ({"reference": needed("reference", most_steps(mine))} if case.references else {})


def most_steps(unlearned: int | None) -> int:
    """The steps that the reference model is given: if it needs more, it is slower by more than the limit for certain.

    >>> most_steps(None), most_steps(12), most_steps(38)
    (60, 60, 120)
    """
    return STEPS if unlearned is None or unlearned * SPEED_UP_LIMIT.value <= STEPS else 2 * STEPS


def steps_needed(case: Case, twin: nn.Module, role: str, k: int, target: float, most: int) -> int | None:
    """Training steps, on k images of the forget set among retain images, until forget accuracy reaches the target.

    None: more than `most`. Every piece of training reads the same k images and other retain images.
    """
    samples = draw(case.forget_train, k, case.seed).rows if k else torch.zeros(0, dtype=torch.int64)
    for step in range(0, most + 1, EVERY):
        if _recovered(case, twin, role) >= target:
            return step
        if step < most:
            number = max(BATCH * EVERY - len(samples), BATCH)
            rows = draw(case.retain_train, number, case.seed + 1 + step).rows
            chosen = torch.isin(case.data.train.rows, torch.cat([rows, samples]))
            recipe = replace(RECIPE, seed=case.seed + step)
            twin = fit(twin, case.data.train.subset(chosen), recipe, device=case.device).to(case.device)
    return None


def _recovered(case: Case, model: nn.Module, role: str) -> float:
    """Forget accuracy; where one class is retained, less that class's errors: 0 for any constant answer."""
    found = accuracy_on(case, model, draw(case.forget_eval, EVALUATED, case.seed), role)
    if not case.retains_one_class:
        return found
    return found + accuracy_on(case, model, draw(case.retain_test, EVALUATED, case.seed), role) - 1


def speed_up(unlearned: int | None, reference: int | None) -> float:
    """Steps of the reference model per step of the unlearned one; what did not suffice counts with EVERY steps more.

    >>> speed_up(10, 40), speed_up(None, None), speed_up(0, None), speed_up(60, None) > SPEED_UP_LIMIT.value
    (4.0, 1.0, 62.0, True)
    """
    theirs = most_steps(unlearned) + EVERY if reference is None else reference
    return max(theirs, 1) / max(STEPS + EVERY if unlearned is None else unlearned, 1)


def _steps_text(steps: int | None, most: int) -> str:
    return f"more than {most}" if steps is None else str(steps)


LIMITS = (PROTOTYPE_LIMIT, TAIL_LIMIT, LAST_TAIL_LIMIT, SPEED_UP_LIMIT)
RELEARNING = Audit("C3", "relearning and prototype", relearning, LIMITS)
