"""Part of C3, the reset tail: what follows a stage's entry is reset and trained on a few images of the forget set.

A new tail knows nothing, so what it recovers beyond the reference models' tails was left in the layers before it. They
are frozen, and their outputs are computed once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedortho.audits.measurements import (
    MeasurementCache,
    balanced_sample,
    checked_logits,
    editable_copy,
    example_batch,
    measure_model,
)
from fedortho.audits.result import ROUNDING, Attack, Limit, compared, doubts, original_exceeds, shares_text
from fedortho.data.images import Images, made_images
from fedortho.engines.query import draw
from fedortho.evaluation.case import Case
from fedortho.models.graph import stage_entries
from fedortho.models.layout import ordered_batches
from fedortho.models.split import Split, Tail, entry_inputs, split_before
from fedortho.models.zoo import reinitialised
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

LIMIT = Limit("reset tail", 0.08)  # recall behind a new tail, above the reference models'
LAST_LIMIT = Limit("last reset tail", 0.08, calibrated=0.112)  # the same behind the entry of the last stage
SAMPLES = (50, 250)  # images of the forget set among those of the retain set
STEPS, MOST_STEPS = 50, 200  # doubled until the reference model has learned its images of the forget set
ARRIVED = 0.8  # recall of these images with which it has
TAILS = 2  # new tails, by seed, whose recalls are averaged
EVALUATED = 1000  # retained test images, on which false alarms are counted
FALSE_ALARMS = 0.05  # share of retain images that may be taken for the class: the bias of a tail does not count
RECIPE = Recipe(epochs=1, batch_size=64, lr=0.05, crop=0, flip=0.0, ortho=0.0)


@dataclass(frozen=True)
class TailTrial:
    """A model whose tail was reset and trained."""

    recall: float  # of the class, on the evaluated forget images
    fitted: float  # recall of the forget images of its training


def reset_tail(case: Case, cache: MeasurementCache) -> Attack:
    """Recall behind a new tail at every stage entry and for each number of forget images.

    The gap furthest beyond its limit decides. Only those count at which the original model exceeds the limit. An entry
    at which the reference model does not arrive within MOST_STEPS, or at which the network cannot be split, is
    undecided.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    steps: dict[str, int] = {}
    undecided: dict[str, str] = {}  # entry → why
    entries = stage_entries(case.original, case.data.train.shape)
    for entry in entries:
        split = split_before(editable_copy(case, case.original), entry, example_batch(case))
        if split.entry is None:
            undecided[entry] = "the network cannot be split there"
            continue
        steps[entry] = _steps_needed(case, cache, split)
        if steps[entry] > MOST_STEPS:
            undecided[entry] = f"the reference model does not learn its forgotten images in {MOST_STEPS} steps"
            continue
        trials = {role: trials_of(case, cache, role, split, steps[entry]) for role in case.models}
        for k in trials["unlearned"]:
            found.setdefault(entry, {})[str(k)] = compared({role: trials[role][k].recall for role in trials})
    details = {"steps": steps, "recalls": found, "undecided": undecided}
    return _attack(case, found, undecided, tail_limits(entries), details)


def tail_limits(entries: Sequence[str]) -> dict[str, Limit]:
    """The limit at each entry, given in the order of a forward pass."""
    return dict.fromkeys(entries, LIMIT) | dict.fromkeys(entries[-1:], LAST_LIMIT)


def _attack(
    case: Case,
    found: dict[str, dict[str, dict[str, float]]],
    undecided: dict[str, str],
    limits: Mapping[str, Limit],
    details: dict[str, object],
) -> Attack:
    """The trial furthest beyond its limit, of those that can tell."""
    trials = {(entry, k): shares for entry, numbers in found.items() for k, shares in numbers.items()}
    reasons = [f"behind {entry} no reset tail decides: {reason}" for entry, reason in undecided.items()]
    if not trials:
        finding = "; ".join(reasons) or "the network has one stage, so no tail can be reset"
        return Attack("reset tail", finding, {}, LIMIT, None, bool(undecided), bool(undecided), details)
    telling = [key for key, shares in trials.items() if not case.references or original_exceeds(shares, limits[key[0]])]
    gaps = {key: shares["unlearned"] - shares.get("reference", 0.0) for key, shares in trials.items()}
    excess = {(entry, k): gap - limits[entry].value for (entry, k), gap in gaps.items()}
    entry, k = max(telling or trials, key=lambda key: excess[key])
    failed = [key[0] for key in telling if case.references and excess[key] > ROUNDING]
    finding = f"a new tail behind {entry}, trained on {k} forgotten images, recalls "
    finding += f"{shares_text(trials[entry, k], len(case.references))} of the class at {FALSE_ALARMS:.0%} false alarms"
    value = gaps[entry, k] if case.references else None
    doubt = doubts(case, value, limits[entry]) if telling else ""
    finding = "; ".join(filter(None, [finding, *reasons, doubt]))
    details |= {"entry": entry, "images": k, "erased_behind": failed[-1] if failed else ""}
    is_open = bool(doubt or (undecided and not failed))
    return Attack("reset tail", finding, trials[entry, k], limits[entry], value, bool(telling), is_open, details)


def _steps_needed(case: Case, cache: MeasurementCache, split: Split) -> int:
    """The steps in which the first reference model's tail learns its forget images; above MOST_STEPS: it does not."""
    steps = STEPS
    while case.references and steps <= MOST_STEPS:
        if all(trial.fitted >= ARRIVED for trial in trials_of(case, cache, "reference", split, steps).values()):
            break
        steps *= 2
    return steps


def trials_of(case: Case, cache: MeasurementCache, role: str, split: Split, steps: int) -> dict[int, TailTrial]:
    """New tails of one of the case's models, by the number of forget images in their training."""

    def measure(model: nn.Module, role: str) -> dict[int, TailTrial]:
        forget, sample = draw(case.forget_train, max(SAMPLES), case.seed), balanced_sample(case)
        retained = sample.rows[~torch.isin(sample.rows, case.forget_train.rows)]
        images = replace(case.data.train, rows=torch.cat([retained, forget.rows]))
        sets = (images, case.forget_eval, draw(case.retain_test, EVALUATED, case.seed))
        stored, evaluated, others = (_at_entry(case, model, split, each) for each in sets)
        trials = {}
        for k in sorted({min(k, len(forget)) for k in SAMPLES}):
            own = torch.isin(images.rows, draw(case.forget_train, k, case.seed).rows)
            known = (own | torch.isin(images.rows, retained)).nonzero().flatten()
            training = stored.subset(balanced_rows(stored.labels, known, steps * RECIPE.batch_size))
            recalls = []
            for seed in range(case.seed, case.seed + TAILS):
                fresh = reinitialised(Tail(model, split), seed)
                tail = fit(fresh, training, replace(RECIPE, seed=seed), device=case.device).to(case.device)
                alarms = checked_logits(case, tail, others, role)
                for each in (evaluated, stored.subset(own)):
                    logits = checked_logits(case, tail, each, role)
                    recalls.append(recall_at_false_alarms(case, logits, alarms, each.labels))
            trials[k] = TailTrial(*torch.tensor(recalls).view(TAILS, 2).mean(0).tolist())
        return trials

    return measure_model(case, cache, role, f"reset tail {split.entry} {steps}", measure)


def _at_entry(case: Case, model: nn.Module, split: Split, images: Images) -> Images:
    """What the entry receives for these images, as images of the tail."""
    batches = ordered_batches(model, images, case.device)
    inputs = torch.cat([entry_inputs(model, split, batch).cpu() for batch, _ in batches])
    return made_images(inputs, images.labels, images.names)


def balanced_rows(labels: Tensor, known: Tensor, number: int) -> Tensor:
    """About `number` of the known positions, equally many of each label, repeated where a label has fewer.

    >>> balanced_rows(torch.tensor([0, 0, 0, 1]), torch.arange(4), 6).tolist()
    [0, 1, 2, 3, 3, 3]
    """
    own = [known[labels[known] == label] for label in labels[known].unique()]
    each = number // len(own)
    return torch.cat([rows.repeat(-(-each // len(rows)))[:each] for rows in own])


def recall_at_false_alarms(case: Case, forget: Tensor, retain: Tensor, labels: Tensor) -> float:
    """The share of forget images that a tail finds, if it takes FALSE_ALARMS of the retained images for the class.

    `forget` and `retain` are logits; the margin of the class over the retained classes is compared with a threshold.
    """
    names = case.data.train.names
    own, excluded = torch.tensor(case.request.labels(names)), case.all_requests.labels(names)
    rest = [label for label in range(forget.shape[1]) if label not in excluded]
    margins, alarms = (logits[:, own].amax(1) - logits[:, rest].amax(1) for logits in (forget, retain))
    is_found = (margins > alarms.quantile(1 - FALSE_ALARMS)) & (own[forget[:, own].argmax(1)] == labels)
    return float(is_found.float().mean())
