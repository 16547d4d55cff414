"""Our rows beside the paper's: the number printed for a row, and which of the paper's claims hold here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from fedortho.experiments.experiment import Experiment
from fedortho.experiments.relations import (
    METRICS,
    SeedRow,
    TableRow,
    as_text,
    differences,
    judge_differences,
    over_seeds,
)
from fedortho.storage.provenance import Environment


@dataclass(frozen=True)
class PairFinding:
    """Two rows that a claim is about: differences in points, one for each seed, and what they come to."""

    rows: tuple[Mapping[str, Any], Mapping[str, Any]]
    differences: tuple[float, ...]
    verdict: str


@dataclass(frozen=True)
class ClaimFinding:
    """A claim of the paper with the pairs of rows here, and the verdicts on the paper's own rows."""

    relation: str
    here: tuple[PairFinding, ...]
    paper: tuple[str, ...]


@dataclass(frozen=True)
class ExperimentResults:
    """The result file of an experiment."""

    schema: ClassVar[int] = 2
    what: str
    command: str
    scale: str
    rows: tuple[SeedRow, ...]
    claims: tuple[ClaimFinding, ...]
    environment: Environment


def check_claims(experiment: Experiment, rows: Sequence[SeedRow]) -> tuple[ClaimFinding, ...]:
    """Each claim of the paper, checked on our rows and on the printed ones."""
    ours, findings = over_seeds(rows), []
    for claim in experiment.relations:
        here = [(pair, values) for pair in claim.pairs(ours) if (values := differences(claim, pair))]
        printed = [values for pair in claim.pairs(experiment.printed) if (values := differences(claim, pair))]
        pairs = [PairFinding((a.key, b.key), tuple(v), judge_differences(v)) for (a, b), v in here]
        findings.append(ClaimFinding(claim.text, tuple(pairs), tuple(map(judge_differences, printed))))
    return tuple(findings)


def printed_beside(experiment: Experiment, row: TableRow) -> Mapping[str, float]:
    """What the paper prints for a row of ours, or for its like in the setting that `beside` names; empty: nothing."""
    key = {**row.key, **experiment.beside}
    for candidate in experiment.printed:
        if all(name in key and as_text(key[name]) == as_text(value) for name, value in candidate.key.items()):
            return candidate.values[0]
    return {}


def row_verdict(experiment: Experiment, row: TableRow) -> str:
    """How a row compares with the printed one; numbers are compared at the paper's own scale only."""
    printed = printed_beside(experiment, row)
    if not row.of("forget"):
        return "refused"
    if not printed or experiment.scale != "paper":
        return "other setting" if printed else "not printed"
    off = {metric: abs(fmean(row.of(metric)) - printed[metric]) for metric in METRICS if metric in printed}
    if not all(f"{metric}-sd" in printed for metric in off):
        return f"off by {max(off.values()):.1f}; no sd printed"
    outside = [metric for metric in off if off[metric] > 2 * printed[f"{metric}-sd"]]
    return f"outside 2 sd: {', '.join(outside)}" if outside else "within 2 sd"
