"""The one table of the README: what hide, erase and exact leave and cost, beside the best of the other methods."""

import textwrap
from collections import Counter
from statistics import mean
from typing import Any

from comparison_tables import NAMES
from result_text import RESULTS, grid, read

MODEL = "vgg-mini"
LEVELS = {"hide": "**hide**", "regrow": "**erase**", "retrain": "**exact** (retraining)"}
RIVALS = {"ssd": "SSD", "salun": "SalUn", "scrub": "SCRUB", "eu-k tuned": "EU-k", "eu-k": "EU-k of 6 layers"}
RIVALS |= {"logit-mask": "logit mask (a control)"}
RIVALS |= {"regrow-all": "all stages new (a control)"}  # by the recipe of erase, it never saw the class
HEADER = ["", "forget %", "retain % (retrained)", "probe gap", "cost %", "audits that fail"]
Rows = list[dict[str, Any]]


def decision() -> str:
    """One line for each method, with the means of the final protocol over the classes on which it was audited."""
    found = erasing_rows()
    lines = [[name, *cells(found[method])] for method, name in (LEVELS | RIVALS).items() if found.get(method)]
    every = [row for rows in found.values() for row in rows]
    notes = [f"`benchmarks/results/erasing.json`: {MODEL} on CIFAR-10, {where(every)}; test images. {BUDGETS}"]
    notes += [ALIKE] if any(row["gap-alike"] is not None for row in every) else []
    return f"{grid(HEADER, lines)}\n\n" + "\n".join(textwrap.wrap(" ".join([*notes, UNKNOWN]), 118))


BUDGETS = (
    "hide, erase, exact, all stages new and EU-k of 6 layers (the last two stages, with the passes of `erase`, not "
    "tuned) had the full audits on seed 0; the other methods, with one pass and hyper-parameters tuned on frog, and "
    "other networks had the quick ones. Not all was run for all methods: n in k/n counts classes and networks."
)
ALIKE = (
    "A gap in brackets, and the audits of its class, compare with `erase` applied to the retrained models "
    "([why](docs/erasing.md))."
)
UNKNOWN = (
    "More networks and methods, clients and samples are in [docs/results.md](docs/results.md), ResNet-18, without "
    "audits so far, in [docs/reproduction.md](docs/reproduction.md#resnet-18-itself). Larger images and GPUs were not "
    "measured."
)


def where(rows: Rows) -> str:
    """The classes and the number of networks."""
    classes = ", ".join(dict.fromkeys(NAMES[row["request"]] for row in rows))
    networks = len({row["seed"] for row in rows})
    return f"{classes}; {networks} network{'s' * (networks > 1)}"


def cells(rows: Rows) -> list[str]:
    """Means over networks and classes; how many fail an audit or leave it open, of how many that were judged."""
    forget, retain, exact = (f"{100 * mean(row[key] for row in rows):.1f}" for key in ("forget", "retain", "exact"))
    gaps, alike = ([row[key] for row in rows if row.get(key) is not None] for key in ("gap", "gap-alike"))
    gap = f"{100 * mean(gaps):+.1f}".replace("-", "−") if gaps else "–"
    classes = dict.fromkeys(NAMES[row["request"]] for row in rows if row.get("gap-alike") is not None)
    of_some = f"{', '.join(classes)} " if len(alike) < len(rows) else ""
    gap += f" ({of_some}{100 * mean(alike):+.1f})".replace("-", "−") if alike else ""
    cost = _percent(mean(row["share"] for row in rows))
    judged = [row["audits"] for row in rows if row["audits"]]
    failing, undecided = (counted(judged, outcomes) for outcomes in (("FAIL", "ERROR"), ("INCONCLUSIVE",)))
    told = (failing or f"none, {len(judged)}/{len(judged)}") + (f"; undecided {undecided}" if undecided else "")
    return [forget, f"{retain} ({exact})", gap, cost, told if judged else "–"]


def _percent(share: float) -> str:
    return "below 0.01" if 0 < share < 1e-4 else f"{100 * share:.3g}"


def counted(judged: list[dict[str, Any]], outcomes: tuple[str, ...]) -> str:
    """The audits with one of these outcomes, each with how often it has."""
    found = Counter(name for audits in judged for name, audit in audits.items() if audit["outcome"] in outcomes)
    return ", ".join(f"{name} {number}/{len(judged)}" for name, number in sorted(found.items()))


def erasing_rows() -> dict[str, Rows]:
    """By method, the rows of the final protocol on CIFAR-10."""
    rows = read("erasing")["rows"] if (RESULTS / "erasing.json").exists() else []
    rows = [row for row in rows if (row["data"], row["model"]) == ("cifar10", MODEL)]
    exact = {(row["seed"], row["request"]): row["accuracies"] for row in rows if row["method"] == "retrain"}
    found: dict[str, Rows] = {}
    for row in rows:
        if (cell := (row["seed"], row["request"])) not in exact:
            continue  # its retrained model has not been measured yet
        told = {
            "exact": exact[cell]["retain"],
            "gap": probe_gap(row),
            "gap-alike": probe_gap(row.get("alike", {})),
            "audits": row.get("alike", row).get("audits") or {},
        }
        found.setdefault(row["method"], []).append({**row, **row["accuracies"], **told})
    return found


def probe_gap(found: dict[str, Any]) -> float | None:
    """Recall of the probe at its worst depth, above that of the reference models."""
    probe = (found.get("audits") or {}).get("C1", {})
    return None if probe.get("reference") is None else float(probe["unlearned"] - probe["reference"])
