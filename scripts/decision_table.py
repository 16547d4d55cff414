"""The one table of the README: what hide, erase and exact leave and cost, beside the best of the other methods."""

import textwrap
from collections import Counter
from statistics import mean
from typing import Any

from comparison_tables import NAMES
from result_text import RESULTS, grid, read

MODEL = "vgg-mini"
LEVELS = {"hide": "**hide**", "regrow": "**erase**", "retrain": "**exact** (retraining)"}
RIVALS = {"ssd": "SSD", "salun": "SalUn", "eu-k": "EU-k", "logit-mask": "logit mask (a control)"}
RIVALS |= {"regrow-all": "all stages new (a control)"}  # by the recipe of erase, it never saw the class
CLASSES = NAMES | {"class:2": "bird", "class:4": "deer", "class:6": "frog"}
HEADER = ["", "forget %", "retain % (retrained)", "probe gap", "cost %", "audits that fail", "on"]
Rows = list[dict[str, Any]]


def decision() -> str:
    """One line for each method, from the strictest measurement that there is of it, and what that was."""
    found = {"a": erasing_rows(), "b": audited_rows(), "c": regrow_rows()}
    lines = []
    for method, name in (LEVELS | RIVALS).items():
        letter = next((letter for letter, rows in found.items() if rows.get(method)), None)
        if letter:
            rows = found[letter][method]
            layers = rows[0].get("settings", {}).get("k")
            lines.append([f"{name} of {layers} layers" if layers else name, *cells(rows), letter])
    used = {line[-1] for line in lines}
    notes = [f"({letter}) {NOTES[letter]} {where(rows)}." for letter, rows in found.items() if letter in used]
    notes += tuned_eu_k(found["a"].get("eu-k", []))
    every = [row for rows in found["a"].values() for row in rows]
    notes += [ALIKE] if any(row["gap-alike"] is not None for row in every) else []
    return f"{grid(HEADER, lines)}\n\n" + "\n".join(textwrap.wrap(" ".join([*notes, UNKNOWN]), 118))


NOTES = {
    "a": "`benchmarks/results/erasing.json`: full audits, test images,",
    "b": "`verdicts.json` and `comparison.json`: test images, the probe before the classifier only (≥: the worst depth "
    "was not measured), methods as they were tuned for 0.1.0,",
    "c": "`regrow.json`: validation images of the classes on which erase was chosen, no audit but the probe,",
}
ALIKE = (
    "A gap in brackets, and the audits of its class, compare with `erase` applied to the retrained models "
    "([why](docs/erasing.md))."
)
UNKNOWN = (
    f"Everywhere: CIFAR-10, {MODEL}, six epochs, two CPU cores; other networks and methods, clients and samples are in "
    "[docs/results.md](docs/results.md); ResNet-18, without audits so far, in "
    "[docs/reproduction.md](docs/reproduction.md#resnet-18-itself). Not measured: larger images, GPUs."
)


def tuned_eu_k(audited: Rows) -> list[str]:
    """What EU-k keeps and costs as it was tuned, on the classes on which it was audited with other settings."""
    classes = {row["request"] for row in audited if "k" in row.get("settings", {})}
    rows = [row for row in read("comparison")["rows"] if row["model"] == MODEL and row["request"] in classes]
    eu_k, exact = ([row for row in rows if row["label"] == name] for name in ("eu-k", "retrain"))
    if not (eu_k and exact):
        return []
    kept, retrained = (f"{100 * mean(row['accuracies']['retain'] for row in each):.1f}" for each in (eu_k, exact))
    cost, whole = (mean(row["cost"]["flops"] for row in each) for each in (eu_k, exact))
    layers = eu_k[0]["settings"]["k"]
    told = f"of {layers} layers, it keeps {kept} % ({retrained}) at a cost of {_percent(cost / whole)} %"
    return [f"EU-k was audited untuned, with the layers and passes of `erase`; tuned, {told} and was not audited."]


def where(rows: dict[str, Rows]) -> str:
    """The classes and the number of networks of a source."""
    every = [row for found in rows.values() for row in found]
    classes = ", ".join(dict.fromkeys(CLASSES[row["request"]] for row in every))
    networks = len({row["seed"] for row in every})
    return f"{classes}; {networks} network{'s' * (networks > 1)}"


def cells(rows: Rows) -> list[str]:
    """Means over networks and classes; how many fail an audit or leave it open, of how many that were judged."""
    forget, retain, exact = (f"{100 * mean(row[key] for row in rows):.1f}" for key in ("forget", "retain", "exact"))
    gaps, alike = ([row[key] for row in rows if row.get(key) is not None] for key in ("gap", "gap-alike"))
    least = "≥ " if gaps and not all(row["is-worst"] for row in rows) else ""
    gap = f"{least}{100 * mean(gaps):+.1f}".replace("-", "−") if gaps else "–"
    classes = dict.fromkeys(CLASSES[row["request"]] for row in rows if row.get("gap-alike") is not None)
    of_some = f"{', '.join(classes)} " if len(alike) < len(rows) else ""
    gap += f" ({of_some}{100 * mean(alike):+.1f})".replace("-", "−") if alike else ""
    costs = [row["share"] for row in rows if row["share"] is not None]
    cost = _percent(mean(costs)) if costs else "–"
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
    """By method, the rows of the final protocol."""
    rows = read("erasing")["rows"] if (RESULTS / "erasing.json").exists() else []
    rows = [row for row in rows if row["model"] == MODEL]
    exact = {(row["seed"], row["request"]): row["accuracies"] for row in rows if row["method"] == "retrain"}
    found: dict[str, Rows] = {}
    for row in rows:
        if (cell := (row["seed"], row["request"])) not in exact:
            continue  # its retrained model has not been measured yet
        told = {
            "exact": exact[cell]["retain"],
            "gap": probe_gap(row),
            "gap-alike": probe_gap(row.get("alike", {})),
            "is-worst": True,
            "audits": row.get("alike", row).get("audits") or {},
        }
        found.setdefault(row["method"], []).append({**row, **row["accuracies"], **told})
    return found


def probe_gap(found: dict[str, Any]) -> float | None:
    """Recall of the probe at its worst depth, above that of the reference models."""
    probe = (found.get("audits") or {}).get("C1", {})
    return None if probe.get("reference") is None else float(probe["unlearned"] - probe["reference"])


def audited_rows() -> dict[str, Rows]:
    """By method, what the audits of automobile found, with costs of the comparison."""
    spent = {  # by method: FLOPs do not depend on the seed
        row["method"]: row["cost"]["flops"]
        for row in read("comparison")["rows"]
        if (row["model"], row["request"], row["engine"]) == (MODEL, "class:1", "central")
        and row["cost"]
        and row["label"] == row["method"]  # one pass, as audited
    }
    found: dict[str, Rows] = {}
    for row in read("verdicts")["rows"]:
        if row["model"] == MODEL and "details" not in row:
            probe, seed = row["audits"]["C1"], row["seed"]
            ends = {key: row[f"{key}-accuracy"]["value"] for key in ("forget", "retain")}
            told = {
                "gap": probe["unlearned"] - probe["reference"],
                "is-worst": False,
                "request": "class:1",
                "seed": seed,
            }
            told |= {"audits": row["audits"], "exact": row["retain-accuracy"]["reference"]}
            told |= {"share": spent[row["method"]] / spent["retrain"]}
            found.setdefault(row["method"], []).append(ends | told)
    return found


def regrow_rows() -> dict[str, Rows]:
    """Erase on the classes on which it was chosen."""
    rows = []
    for row in read("regrow")["rows"]:
        if row["model"] == MODEL:
            probe = row["probe"]
            gap = max(probe["unlearned"][depth] - probe["reference"][depth] for depth in probe["unlearned"])
            about = {"gap": gap, "is-worst": True, "request": row["request"], "seed": row["settings"]["seed"]}
            about |= {"exact": row["accuracies"]["reference"]["retain"], "share": row["share"], "audits": {}}
            rows.append({**row["accuracies"]["unlearned"], **about})
    return {"regrow": rows}
