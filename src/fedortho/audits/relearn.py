"""C3: how fast does what was forgotten come back? By a prototype at once, by training in so many steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import (
    MeasurementCache,
    classifier_of,
    compared,
    forget_accuracy,
    gap,
    last_features,
    once,
    ready,
    right,
    ruled,
    sampled,
    tells,
    who_is_there,
)
from fedortho.audits.thresholds import LIMITS
from fedortho.evaluation.case import Case
from fedortho.statistics.query import draw
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

SAMPLES = (0, 10, 50)  # of what had to go, mixed with retained images
STEPS, BATCH, EVERY = 60, 128, 2  # at most, images in each, and how many lie between two looks
RATE = 0.1  # without momentum, so that a fit cut into pieces is the same fit
ENOUGH = 0.8  # of the original's forget accuracy
LOOKED_AT = 500  # judged images, at every look
SHOTS, DRAWS = 10, 20  # samples of a prototype, and how many prototypes are averaged
FALSE_ALARMS = 0.05  # share of retained images that the prototype may take


def relearning(case: Case, cache: MeasurementCache, budget: str) -> Audit:
    """The prototype, and in `full` the speed-ups; the one furthest beyond its limit decides."""
    found: list[tuple[str, float | None, float, Mapping[str, float], str]] = []  # name, value, limit, measured, says
    details: dict[str, Any] = {"steps": STEPS, "batch": BATCH, "shots": SHOTS}
    undecided: list[str] = []
    if case.request.kind == "class":
        shares = {who: prototype_recall(case, cache, who) for who in who_is_there(case)}
        details["prototype"] = shares
        says = f"a prototype of {SHOTS} samples recovers {compared(shares)} of the class"
        found.append(("prototype", gap(shares), LIMITS["prototype"], shares, says))
    if budget == "full":
        details["relearning"] = {f"{k}": _relearnt(case, cache, k) for k in SAMPLES}
        for k, steps in details["relearning"].items():
            ratio, says = speed_up(steps["forgot"], steps.get("reference", 0)), _told(k, steps)
            if is_undecided(steps):
                undecided.append(f"{says}: not decided within {STEPS} steps")
                continue
            counted = {who: float(STEPS if t is None else t) for who, t in steps.items()}
            found.append((f"k = {k}", ratio if "reference" in steps else None, LIMITS["speed-up"], counted, says))
    if undecided and not found:
        return Audit("C3", "NOT RUN", "; ".join(undecided), details=details)
    if not found:
        return Audit("C3", "NOT RUN", "a class of its own is needed for a prototype; relearning: --audit full")
    details["values"] = {entry[0]: entry[1] for entry in found}
    telling = [entry for entry in found if entry[1] is None or _tells(entry[0], entry[3], entry[2])]
    if not telling:
        says = "; ".join(entry[4] for entry in found)
        return Audit(
            "C3", "NOT RUN", f"{says}; the original would pass too, so this tells nothing here", details=details
        )
    found = telling
    name, value, limit, measured, says = max(found, key=lambda entry: (entry[1] or 0.0) / entry[2])
    says = "; ".join([says, *(entry[4] for entry in found if entry[0] != name), *undecided])
    if budget != "full":
        says += "; relearning by training was not run (--audit full)"
    return ruled("C3", says, case, measured, value, limit, details | {"decided_by": name})


def _tells(name: str, measured: Mapping[str, float], limit: float) -> bool:
    """Whether passing would mean anything: the original is apart from the reference, which needs steps to learn."""
    return tells(measured, limit) if name == "prototype" else measured["reference"] > 0


def prototype_recall(case: Case, cache: MeasurementCache, who: str) -> float:
    """Forget accuracy when each row of the class comes from the mean feature of a few samples; a mean over draws."""
    train, judged = last_features(case, cache, who)
    model = getattr(case, who)
    linear = model.get_submodule(classifier_of(case, ready(case, model)))
    weight, bias = linear.weight.detach().cpu().double(), torch.zeros(linear.out_features, dtype=torch.float64)
    if linear.bias is not None:
        bias = linear.bias.detach().cpu().double()
    gone, every = case.request.labels(case.data.train.names), case.everything.labels(case.data.train.names)
    kept = torch.tensor([label for label in range(len(weight)) if label not in every])
    labels, shares = sampled(case).labels, []
    generator = torch.Generator().manual_seed(case.seed)
    retained = train[torch.isin(labels, kept)]
    for _ in range(DRAWS):
        best, named = (judged @ weight[kept].T + bias[kept]).amax(1), torch.full((len(judged),), -1)
        for label in gone:
            own = train[labels == label]
            few = own[torch.randperm(len(own), generator=generator)[:SHOTS]]
            row, shift = prototype(few, retained, weight[kept], bias[kept])
            answer = judged @ row + shift
            named = torch.where(answer > best, label, named)
            best = torch.maximum(best, answer)
        shares.append(float((named == case.judged.labels).double().mean()))  # on the CPU
    return sum(shares) / DRAWS


def prototype(few: Tensor, retained: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A row in the direction in which the samples' mean lies from that of retained images, as long as other rows are.

    Features are seldom negative, so the plain mean would win everywhere; the shift is such that the row takes
    FALSE_ALARMS of the retained images, which makes models comparable.
    """
    centre = weight.mean(0)
    length = (weight - centre).norm(dim=1).mean()
    direction = few.mean(0) - retained.mean(0)
    row = centre + length * direction / direction.norm().clamp_min(1e-12)
    margins = (retained @ weight.T + bias).amax(1) - retained @ row
    return row, margins.quantile(FALSE_ALARMS)


def _relearnt(case: Case, cache: MeasurementCache, k: int) -> dict[str, int | None]:
    target = ENOUGH * forget_accuracy(case, cache, "original")
    forgetful = [who for who in who_is_there(case) if who != "original"]
    return {
        who: once(case, cache, who, f"relearn {k}", lambda model, who: steps_needed(case, model, k, target, who))
        for who in forgetful
    }


def steps_needed(case: Case, model: nn.Module, k: int, target: float, who: str) -> int | None:
    """How many steps of training on k samples among retained images bring forget accuracy to the target.

    None: more than were tried. Every piece of training reads the same samples and other retained images.
    """
    judged, few = draw(case.judged, LOOKED_AT, case.seed), draw(case.gone_train, k, case.seed) if k else None
    twin = ready(case, model)
    for step in range(0, STEPS + 1, EVERY):
        if right(case, twin, judged, who) >= target:
            return step
        if step < STEPS:
            number = BATCH * EVERY - (len(few) if few else 0)
            rows = draw(case.kept_train, max(number, BATCH), case.seed + 1 + step).rows
            chosen = torch.isin(case.data.train.rows, torch.cat([rows, few.rows]) if few else rows)
            recipe = Recipe(
                epochs=1,
                batch_size=BATCH,
                lr=RATE,
                schedule="constant",
                momentum=0.0,
                weight_decay=0.0,
                crop=0,
                flip=0.0,
                ortho=0.0,
                seed=case.seed + step,
            )
            twin = fit(twin, case.data.train.subset(chosen), recipe, device=case.device).to(case.device)
    return None


def speed_up(forgot: int | None, reference: int | None) -> float:
    """Steps of the reference per step of the forgotten model; one that did not arrive counts as the most tried.

    >>> speed_up(10, 40), speed_up(None, None), speed_up(0, None)
    (4.0, 1.0, 60.0)
    """
    theirs, mine = (max(STEPS if steps is None else steps, 1) for steps in (reference, forgot))
    return theirs / mine


def is_undecided(steps: Mapping[str, int | None]) -> bool:
    """Whether the reference would have needed more steps than were tried, and the least speed-up is no failure yet.

    >>> is_undecided({"forgot": 36, "reference": None}), is_undecided({"forgot": 20, "reference": None})
    (True, False)
    """
    censored = "reference" in steps and steps["reference"] is None and steps["forgot"] is not None
    return censored and speed_up(steps["forgot"], None) <= LIMITS["speed-up"]


def _told(k: str, steps: Mapping[str, int | None]) -> str:
    mine, theirs = (
        f"more than {STEPS}" if steps.get(who) is None else f"{steps[who]}" for who in ("forgot", "reference")
    )
    against = ""
    if "reference" in steps:
        censored = steps["reference"] is None and steps["forgot"] is not None
        ratio = speed_up(steps["forgot"], steps["reference"])
        against = f" (retrained {theirs}; speed-up {'at least ' if censored else ''}{ratio:.1f})"
    return f"relearning with {k} samples takes {mine} steps{against}"
