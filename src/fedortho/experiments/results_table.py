"""The rows of an experiment beside the printed ones, and what became of the paper's claims, as text."""

from collections import Counter

from fedortho.experiments.experiment import ClaimFinding, Experiment, ExperimentResults, printed_beside, row_verdict
from fedortho.experiments.relations import COLUMNS, as_text, mean_and_sd, over_seeds

LEAST_POWER = 0.55  # share of images of known membership that an attack is right for, in its best row
NO_POWER = "hardly better than a coin, so MIA and claims about it say nothing of membership here"


def results_table(experiment: Experiment, results: ExperimentResults) -> list[list[str]]:
    """Header and rows: the keys that vary, each metric beside the printed one, the row's verdict."""
    rows, unchanged = over_seeds(results.rows), [row.key for row in results.rows if row.is_unchanged]
    values = {key: {as_text(row.key[key]) for row in rows if key in row.key} for row in rows for key in row.key}
    varied = ["method", *(key for key, known in values.items() if key != "method" and len(known) > 1)]
    titles = ["MIA confidence" if metric == "mia" else metric for metric in COLUMNS]
    lines = [[*varied, *(name for title in titles for name in (title, "(paper)")), "verdict"]]
    for row in rows:
        beside = printed_beside(experiment, row)
        cells = [as_text(row.key.get(key, "")) for key in varied]
        for metric in COLUMNS:
            spread = f"±{beside[f'{metric}-sd']:.2f}" if f"{metric}-sd" in beside else ""
            number = f"{beside.get(metric, 0.0):{'.10g' if metric == 'seconds' else '.2f'}}"
            ours = mean_and_sd(row.of(metric), 2 if metric == "seconds" else 1)
            cells += [ours, f"{number}{spread}" if metric in beside else "–"]
        lines.append([*cells, "model unchanged" if row.key in unchanged else row_verdict(experiment, row)])
    return lines


def attack_words(results: ExperimentResults) -> str:
    """How often the membership attack was right on images of known membership, and whether it shows anything."""
    shares = [row.membership.accuracy for row in results.rows if row.membership is not None]
    if not shares:
        return "no model was attacked"
    told = f"on images of known membership it is right for {min(shares):.1%} to {max(shares):.1%} (a coin: 50 %)"
    return told if max(shares) >= LEAST_POWER else f"{told}: {NO_POWER}"


def claim_words(claim: ClaimFinding) -> str:
    """A claim of the paper, and in how many pairs of rows it holds here.

    >>> from fedortho.experiments.experiment import PairFinding
    >>> claim_words(ClaimFinding("a < b", (PairFinding(({}, {}), (-3.0,), "does not hold"),), ()))
    'a < b: does not hold, by -3.0 points (1 seed)'
    """
    if not claim.here:
        return f"{claim.relation}: no such rows here"
    number, pairs = min(len(pair.differences) for pair in claim.here), len(claim.here)
    unit = "seconds" if " seconds " in claim.relation else "points"
    words = f"{claim.here[0].verdict}, by {sum(claim.here[0].differences) / number:.1f} {unit}"
    if pairs > 1:
        verdicts = Counter(pair.verdict for pair in claim.here)
        words = ", ".join(f"{verdict} in {found} of {pairs}" for verdict, found in verdicts.items())
    return f"{claim.relation}: {words} ({number} seed{'s' if number > 1 else ''})"
