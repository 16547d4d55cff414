"""Audit C4, U-LiRA-lite: can models that unlearned an image be told from models that never met it?

Shadow models are trained on halves of a proxy (some of the training images), made to forget by the method, and
compared, image by image, with shadows that were trained without: by the margin of the image's own label, and for a
class also by that of the nearest class that stays, whichever tells more. It judges the method, on small models; how the
audited model itself answers is read beside it by offline LiRA.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.audits.audit import Audit
from fedortho.audits.thresholds import MEMBERSHIP
from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadData
from fedortho.evaluation.case import Case
from fedortho.evaluation.lira import (
    Scores,
    area_under_curve,
    interval,
    margins,
    offline_scores,
    true_positives,
    unlearning_scores,
)
from fedortho.evaluation.metric_suite import untrained_like
from fedortho.evaluation.shadows import Report, Shadows, ShadowSettings, choose_proxy
from fedortho.models.predictions import logits_of

NAME = "C4"
OWN = "the image's own label"
BINS = 20
Forget = Callable[[nn.Module, Dataset, ForgetRequest], nn.Module]


def audit_membership(
    case: Case,
    forget: Forget,
    directory: Path,
    settings: ShadowSettings | None = None,
    *,
    build: Callable[[int], nn.Module] | None = None,
    report: Report | None = None,
) -> Audit:
    """Run the method on every shadow and hold the attack's |AUC − 0.5| against its limit; above and below are failures.

    Shadows are kept under `directory` for other methods and requests. `build` makes a network with new weights from a
    seed; without it the original is copied and initialised anew. An attack that cannot even tell the untouched
    shadows from those trained without proves nothing: that is NOT RUN, never a PASS.
    """
    settings = settings or ShadowSettings()
    pool = case.data.train
    if case.forgotten is not None:
        pool = pool.subset(~case.forgotten.mask(pool, case.clients))
    proxy, gone = choose_proxy(pool, case.request.mask(pool, case.clients), settings)
    if not bool(gone.any()):
        raise BadData(f"{case.request} names none of the training images; there is nothing to attack")
    make = build or partial(untrained_like, case.original)
    shadows = Shadows(directory, proxy, make, settings, device=case.device, report=report)
    tables = _answers(case, shadows, gone, forget)
    played = {name: _played(rows, shadows.met[:, gone], settings) for name, rows in tables.items()}
    telling = max(played, key=lambda name: abs(played[name]["AUC"] - 0.5))
    details = played[telling] | {
        "by the margin of": telling,
        "AUC by each": {name: found["AUC"] for name, found in played.items()},
        "AUC of the originals by each": {name: found["AUC of the originals"] for name, found in played.items()},
        "offline LiRA: AUC": _offline(case, shadows, gone, tables[OWN]),
        "proxy": f"{len(proxy)} of {len(case.data.train)} training images, {int(gone.sum())} of them to be forgotten",
        "shadows": str(shadows.directory),
        "settings": asdict(settings),
    }
    return _verdict(details)


def _auc(game: tuple[Scores, Scores]) -> float:
    return area_under_curve(game[0].values, game[1].values)


def _asked(case: Case, images: Images, gone: Tensor) -> ForgetRequest:
    """The request as a shadow gets it: a class by name, clients and samples by the rows that the shadow has met."""
    if case.request.kind == "class":
        return case.request
    return ForgetRequest(samples=tuple(str(row) for row in images.rows[gone].tolist()))


def _margins(case: Case, model: nn.Module, images: Images, what: str) -> dict[str, Tensor]:
    """φ of each image, (n,), by each margin that is looked at."""
    logits = logits_of(copy.deepcopy(model).to(case.device), images, device=case.device)
    found = {OWN: margins(logits, images.labels, what)}
    if case.request.kind == "class":
        gone = case.everything.labels(case.data.train.names)
        rest = logits[:, [label for label in range(logits.shape[1]) if label not in gone]]
        found["the nearest class that stays"] = margins(rest, rest.argmax(1), what)
    return found


def _answers(case: Case, shadows: Shadows, gone: Tensor, forget: Forget) -> dict[str, dict[str, Tensor]]:
    """By margin, φ of the forgotten images under each shadow, (shadows, n): as trained, made to forget, and without;

    and under `unseen`, as trained, of test images of their kind.
    """
    targets = shadows.proxy.subset(gone)
    unseen = case.unseen(targets.labels, len(targets))
    found: dict[str, dict[str, list[Tensor]]] = {}

    def look(name: str, model: nn.Module, images: Images = targets) -> None:
        for by, values in _margins(case, model, images, f"a shadow, {name}").items():
            found.setdefault(by, {}).setdefault(name, []).append(values)

    for number in range(shadows.settings.models):
        model, images = shadows.original(number), shadows.images(number)
        look("original", model)
        look("unseen", model, unseen)
        mine = gone[shadows.met[number]]
        if bool(mine.any()):  # else it has nothing to forget
            model = forget(model, replace(case.data, train=images), _asked(case, images, mine))
        look("unlearned", model)
        look("without", shadows.without(number, gone))
    return {by: {name: torch.stack(rows) for name, rows in tables.items()} for by, tables in found.items()}


def _played(tables: Mapping[str, Tensor], met: Tensor, settings: ShadowSettings) -> dict[str, Any]:
    """The attack by one margin: what it comes to against models that unlearned, and against untouched ones."""
    unlearned, never = tables["unlearned"], tables["without"]
    game = unlearning_scores(unlearned, met, never, met)
    before = unlearning_scores(tables["original"], met, never, met)
    return _summary(game, before, settings) | {
        "never met, but unlearnt others: AUC": _auc(unlearning_scores(unlearned, met, unlearned, ~met)),
        "margins": _histograms({name: table[met] for name, table in tables.items() if name != "unseen"}),
    }


def _summary(game: tuple[Scores, Scores], before: tuple[Scores, Scores], settings: ShadowSettings) -> dict[str, Any]:
    values = game[0].values, game[1].values
    return {
        "AUC": area_under_curve(*values),
        "AUC, 95 %": interval(area_under_curve, *game, seed=settings.seed),
        "true positives at 1 % false": true_positives(*values),
        "true positives at 1 % false, 95 %": interval(true_positives, *game, seed=settings.seed),
        "AUC of the originals": _auc(before),
        "ideal AUC": 0.5,
        "scores": [len(side) for side in values],
    }


def _histograms(groups: dict[str, Tensor]) -> dict[str, Any]:
    """Counts of φ over the same bins for every kind of shadow, of the images that it met before forgetting."""
    everything = torch.cat(list(groups.values()))
    low, high = float(everything.min()), float(everything.max())
    edges = torch.linspace(low, max(high, low + 1e-9), BINS + 1, dtype=torch.float64)
    counts = {name: torch.histogram(values, edges).hist.int().tolist() for name, values in groups.items()}
    return {"edges": edges.tolist(), **counts}


def _offline(case: Case, shadows: Shadows, gone: Tensor, tables: Mapping[str, Tensor]) -> dict[str, float]:
    """How well the case's own models' answers tell forgotten images from unseen ones of their kind."""
    mine, targets, unseen = shadows.proxy.subset(gone), tables["original"], tables["unseen"]
    groups = (
        (mine, targets, shadows.met[:, gone]),
        (case.unseen(mine.labels, len(mine)), unseen, torch.zeros(unseen.shape, dtype=torch.bool)),
    )
    models = {"forgot": case.forgot, "original": case.original, "reference": case.reference}
    found = {}
    for name, model in models.items():
        if model is not None:
            scores = []
            for images, answers, met in groups:
                scores.append(offline_scores(_margins(case, model, images, f"the {name} model")[OWN], answers, met))
            found[name] = area_under_curve(*(values[values.isfinite()] for values in scores))
    return found


def _verdict(details: dict[str, Any]) -> Audit:
    auc, before, (low, high) = details["AUC"], details["AUC of the originals"], details["AUC, 95 %"]
    value = abs(auc - 0.5)
    says = (
        f"on small shadow models, those that unlearned an image are told from those that never met it with an AUC "
        f"of {auc:.3f} ({low:.3f} to {high:.3f}; ideal 0.5, limit {MEMBERSHIP:g} either way), untouched ones "
        f"with {before:.3f}, by the margin of {details['by the margin of']}"
    )
    outcome = "PASS" if value <= MEMBERSHIP else "FAIL"
    power = max(abs(found - 0.5) for found in details["AUC of the originals by each"].values())
    if outcome == "PASS" and power <= MEMBERSHIP:
        outcome, says = "NOT RUN", f"{says}: the attack has no power here and proves nothing"
    return Audit(NAME, outcome, says, value, MEMBERSHIP, auc, before, details=details)
