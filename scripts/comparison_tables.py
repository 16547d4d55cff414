"""Tables, sentences and figures about methods side by side: the comparison, its searches, and costs."""

import sys
import textwrap
from functools import partial
from statistics import mean
from typing import Any

from result_text import RESULTS, ROOT, Drawing, grid, origin, read, spread

from fedortho.engines.cost import Cost
from fedortho.storage.records import from_json, to_json

sys.path.append(str(ROOT / "benchmarks"))

from paper_figures.costs import (
    COUNTED,
    KEPT,
    SENT,
    cheaper,
    cost_figure,
    least,
    quantities,
    short_number,
)  # needs the path

FLOPS = ("flops", "kept-flops")
CONTROLS = ("retrain", "retrain-plain", "logit-mask")  # never marked as best
SEEN, NAMES = "class:1", {"class:0": "airplane", "class:1": "automobile", "class:9": "truck"}
DRESS = {"class:3": "Dress"}  # fashion-mini
Rows = list[dict[str, Any]]


def compared(kinds: tuple[str, ...]) -> dict[tuple[str, str], dict[str, Rows]]:
    """The rows of the comparison by engine and model, then by method, each with its gap to Retrain (None: unknown)."""
    found: dict[tuple[str, str], dict[str, Rows]] = {}
    rows = [row for row in read("comparison")["rows"] if row["request"].partition(":")[0] in kinds]
    exact = {(row["run"], row["request"]): row["accuracies"] for row in rows if row["method"] == "retrain"}
    for row in rows:
        reference = exact.get((row["run"], row["request"]))
        pairs = [
            (row["accuracies"][key], reference[key]) for key in ("forget", "retain") if reference and row["accuracies"]
        ]
        gap = 50 * sum(abs(ours - theirs) for ours, theirs in pairs) if pairs else None
        methods = found.setdefault((row["engine"], row["model"]), {})
        methods.setdefault(row.get("label", row["method"]), []).append(row | {"gap": gap})
    return found


def cells_of(rows: Rows, best: bool = False) -> list[str]:
    """Forget and retain accuracy and the gap, as means over rows; the best gap in bold."""
    served = [row for row in rows if row["accuracies"]]
    if not served:
        why = "refused: cannot serve it" if any("serves" in row["refused"] for row in rows) else "refused"
        return [why if rows else "–", "–", "–"]
    gap = spread([row["gap"] for row in served if row["gap"] is not None])
    shares = [spread([100 * row["accuracies"][key] for row in served]) for key in ("forget", "retain")]
    return [*shares, f"**{gap}**" if best else gap]


def flops_of(rows: Rows) -> list[str]:
    """TFLOPs of a request: everything counted, and kept by everybody (a dash where rows do not tell)."""
    costs = [row["cost"] for row in rows if row["cost"]]
    counted = [cost["flops"] / 1e12 for cost in costs]
    kept = [(cost["flops"] - cost["kept-flops"]) / 1e12 for cost in costs if "kept-flops" in cost]
    return [tera(counted), tera(kept if len(kept) == len(costs) else [])]


def tera(values: list[float]) -> str:
    if not values:
        return "–"
    value = mean(values)
    return f"{value:.2f}" if value >= 0.005 or not value else f"{value:.1g}"


def is_unchanged(rows: Rows) -> bool:
    """Whether a method left every model as it was."""
    return all(row["weights"] == row["original"] for row in rows)


def smallest_gap(methods: dict[str, Rows]) -> str | None:
    """The method nearest to Retrain, whoever made it, of those that changed it and have as many rows as the most."""
    known = {name: [row["gap"] for row in rows if row["gap"] is not None] for name, rows in methods.items()}
    most = max(map(len, known.values()), default=0)
    able = [name for name in known if most and len(known[name]) == most and methods[name][0]["method"] not in CONTROLS]
    able = [name for name in able if not is_unchanged(methods[name])]
    return min(able, key=lambda name: mean(known[name]), default=None)


def comparison() -> str:
    """Classes: the drawn ones together, automobile, which was seen during development, beside them."""
    rows = []
    for (_, model), methods in compared(("class",)).items():
        drawn = {name: [row for row in found if row["request"] != SEEN] for name, found in methods.items()}
        seen = {name: [row for row in found if row["request"] == SEEN] for name, found in methods.items()}
        best, best_seen = smallest_gap(drawn), smallest_gap(seen)
        for name, found in methods.items():
            number = str(len(drawn[name])) if drawn[name] else "–"
            gap = cells_of(seen[name], name == best_seen)[2]
            rows.append([model, name, number, *cells_of(drawn[name], name == best), gap, *flops_of(found)])
    header = ["model", "method", "networks × classes", "forget", "retain", "gap to retrain", "gap on automobile"]
    return grid([*header, "TFLOPs, everything counted", "kept by everybody"], rows) + origin(read("comparison"))


def comparison_each() -> str:
    """Every class by itself; several seeds as mean ± deviation."""
    rows = []
    for (engine, model), methods in compared(("class",)).items():
        for request in dict.fromkeys(row["request"] for found in methods.values() for row in found):
            here = {name: [row for row in found if row["request"] == request] for name, found in methods.items()}
            best = smallest_gap({name: found for name, found in here.items() if found})
            for name, found in here.items():
                if found:
                    about = [engine, model, NAMES[request], str(len(found)), name, found[0]["tuned-on"] or "–"]
                    rows.append([*about, *cells_of(found, name == best), *flops_of(found)])
    header = ["engine", "model", "request", "seeds", "method", "tuned on", "forget", "retain", "gap to retrain"]
    return grid([*header, "TFLOPs, everything counted", "kept by everybody"], rows) + origin(read("comparison"))


def comparison_others() -> str:
    """A client of federations, and samples of networks: several seeds as mean ± deviation, the original first."""
    rows = []
    for methods in compared(("client", "samples")).values():
        best = smallest_gap(methods)
        for name, found in methods.items():
            served = [row for row in found if row["accuracies"]]
            request = found[0]["request"] if len(found[0]["request"]) < 20 else "samples"
            if name == "retrain":
                before = [row["before"] for row in served]
                shares = [spread([100 * each[key] for each in before]) for key in ("forget", "retain")]
                rows.append([request, "original", str(len(found)), *shares, *["–"] * 4])
            sent = [(row["cost"]["bytes-up"] + row["cost"]["bytes-down"]) / 1e6 for row in served if row["cost"]]
            size = f"{mean(sent):.1f}" if any(sent) else "–"
            told = f"{name} (model unchanged)" if is_unchanged(found) else name
            rows.append([request, told, str(len(found)), *cells_of(found, name == best), *flops_of(found), size])
    header = ["request", "method", "seeds", "forget", "retain", "gap to retrain"]
    header += ["TFLOPs, everything counted", "kept by everybody", "MB, all clients, both ways"]
    return grid(header, rows) + origin(read("comparison"))


def comparison_small() -> str:
    """All methods on the data of the package, one seed."""
    result = read("comparison-fashion-mini")
    exact = next(row["accuracies"] for row in result["rows"] if row["method"] == "retrain")
    rows = []
    for row in result["rows"]:
        if not row["accuracies"]:
            continue  # refused
        ends, cost = row["accuracies"], from_json(Cost, row["cost"], "comparison-fashion-mini.json")
        gap = 50 * sum(abs(ends[key] - exact[key]) for key in ("forget", "retain"))
        told = [f"{value:.1f}" for value in (100 * ends["forget"], 100 * ends["retain"], gap)]
        rows.append(
            [row.get("label", row["method"]), *told, f"{cost.flops / 1e9:.1f}", f"{cost.request_flops / 1e9:.1f}"]
        )
    header = ["method", "forget %", "retain %", "gap to Retrain", "GFLOPs, everything counted", "kept by everybody"]
    return grid(header, rows) + origin(result)


def searches() -> str:
    """Every search's chosen value, the range that was tried, and whether the value lies inside it."""
    if not (RESULTS / "searches.json").exists():
        return "No search has ended."
    rows = []
    for row in read("searches")["rows"]:
        chosen, lowest, highest = (
            f"{row[key]:g}" if isinstance(row[key], float) else str(row[key]) for key in ("value", "lowest", "highest")
        )
        tuned_on = row["tuned-on"] if len(row["tuned-on"]) < 20 else "other samples"
        inside = "yes" if row["inside"] else ("no, score 0" if row["score"] == 0 else "**no**")
        told = [inside, str(row["attempts"]), "yes" if row["settled"] else "no"]
        rows.append([row["file"], tuned_on, row["method"], row["setting"], chosen, f"{lowest} to {highest}", *told])
    header = ["settings", "tuned on", "method", "setting", "chosen", "tried", "inside", "trials", "settled"]
    return grid(header, rows) + origin(read("searches"))


def one_pass(methods: dict[str, Rows]) -> dict[str, Rows]:
    """The methods that were not refused, at one pass."""
    served = {name: [row for row in rows if row["accuracies"]] for name, rows in methods.items() if "×" not in name}
    return {name: rows for name, rows in served.items() if rows}


def class_rows() -> dict[str, Rows]:
    """Rows of class requests on vgg-mini, central, all networks and classes."""
    found = compared(("class",))
    return one_pass(found[("central", "vgg-mini")])


def federated_rows() -> dict[str, Rows]:
    """Rows of a class request in a federation of ten clients."""
    return one_pass({row.get("label", row["method"]): [row] for row in read("costs")["rows"]})


def mean_costs(methods: dict[str, Rows]) -> dict[str, Cost]:
    """The cost of each method, its FLOPs as means over rows."""
    return {
        name: from_json(
            Cost, rows[0]["cost"] | {key: mean(row["cost"].get(key, 0) for row in rows) for key in FLOPS}, ""
        )
        for name, rows in methods.items()
    }


def costs() -> str:
    """What a class request sends and computes in a small federation, and what it leaves."""
    rows = []
    for row in read("costs")["rows"]:
        shares = [f"{100 * row['accuracies'][key]:.1f}" for key in ("forget", "retain")] if row["accuracies"] else []
        cost = row["cost"]
        sent = [f"{short_number(cost[key])}B" for key in ("bytes-down", "bytes-up")] if cost else []
        name = row.get("label", row["method"])
        rows.append([name, *(shares or ["refused", "–"]), *(sent or ["–", "–"]), *flops_of([row])])
    header = ["method", "forget", "retain", "down", "up", "TFLOPs, everything counted", "kept by everybody"]
    return grid(header, rows) + origin(read("costs"))


def paper_costs() -> str:
    """What a class request would send and compute at the size of the paper's Fig. 5."""
    rows = []
    for row in read("paper-costs")["rows"]:
        sent = ["–" if row[key] is None else f"{short_number(row[key])}B" for key in ("bytes_down", "bytes_up")]
        flops = [f"{short_number(value)}FLOPs" for value in (row["flops"], row["flops"] - row["kept_flops"])]
        rows.append([row["method"], str(row["rounds"] or "–"), *sent, *flops, row["source"]])
    header = ["method", "rounds", "down, all clients", "up, all clients", "everything counted", "kept by everybody", ""]
    return grid(header, rows) + origin(read("paper-costs"))


def shares(ends: tuple[float, ...]) -> str:
    return " / ".join(f"{share:.0f}" for share in ends)


def is_level(ends: tuple[float, ...], ours: tuple[float, ...]) -> bool:
    """Whether forget and retain accuracy are at most one point worse."""
    return ends[0] <= ours[0] + 1 and ends[1] >= ours[1] - 1


def cheaper_sentences() -> str:
    """What costs less than hide and what it leaves, in words; and what the paper's own edit sends."""
    lines = []
    for where, found in (("vgg-mini, central", class_rows()), ("ten clients, fashion-mini", federated_rows())):
        ends = ends_of(found)
        for label, values in quantities(mean_costs(found)).items() if {"hide", "retrain"} <= found.keys() else ():
            if label == KEPT and not all(
                key in row["cost"] for rows in found.values() for row in rows for key in FLOPS
            ):
                continue  # rows from before statistics were told apart
            told = {name: f"`{name}` {short_number(values[name])} ({shares(ends[name])})" for name in values}
            less = cheaper(values)
            ours = least(values)
            level = [name for name in less if is_level(ends[name], ends[ours])]
            worse = ", ".join(f"`{name}` ({shares(ends[name])})" for name in less if name not in level) or "none"
            lines.append(
                f"- {where}, {label}: {told[ours]}, {told['retrain']}; cheaper than `{ours}` and as accurate within "
                f"one point: {', '.join(told[name] for name in level) or 'none'}; cheaper and worse: {worse}."
            )
    large = {
        row["method"]: float(row["bytes_up"] + row["bytes_down"])
        for row in read("federation-cifar10")["rows"]
        if row.get("kind") == "class" and "bytes_up" in row
    }
    small = quantities(mean_costs(federated_rows()))[SENT]
    sent = {"ten clients, eight rounds": small, "100 clients, sixty rounds": large}
    parts = [
        f"{short_number(values['paper'])}B where retraining sends {short_number(values['retrain'])}B ({where})"
        for where, values in sent.items()
    ]
    after = shares(ends_of(federated_rows())["paper"])
    lines.append(
        f"- The paper's own edit of a class sends {' and '.join(parts)}. "
        f"With ten clients forget / retain accuracy are {after} after it."
    )
    return "\n".join(lines)


def cheaper_in_short() -> str:
    """The same in two sentences, for the README."""
    found, clients = class_rows(), federated_rows()
    ends, costs = ends_of(found), quantities(mean_costs(found))
    level = {
        label: " and ".join(f"`{name}`" for name in cheaper(values) if is_level(ends[name], ends[least(values)]))
        for label, values in costs.items()
        if label in (COUNTED, KEPT)
    }
    sent, after = quantities(mean_costs(clients))[SENT], ends_of(clients)
    counted = costs[COUNTED]
    share = counted[least(counted)] / counted["retrain"]
    text = (
        f"Where no statistics were kept, `hide` reads a sample of the images: {100 * share:.2g} % of the FLOPs of "
        "retraining, everything counted, and "
        "as accurate (the table has the pass over all images that made the statistics). Cheaper than that and as "
        f"accurate within one point is {level[COUNTED] or 'nothing'}; where statistics are kept, "
        f"{level[KEPT] or 'nothing'}. The paper's own edit sends "
        f"{short_number(sent['paper'])}B where retraining sends {short_number(sent['retrain'])}B (ten clients, eight "
        f"rounds), and leaves {after['paper'][1]:.0f} % retain accuracy (retraining: {after['retrain'][1]:.0f} %)."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


def ends_of(found: dict[str, Rows]) -> dict[str, tuple[float, ...]]:
    """By method: forget and retain accuracy in percent, means over rows."""
    return {
        name: tuple(100 * mean(row["accuracies"][key] for row in rows) for key in ("forget", "retain"))
        for name, rows in found.items()
    }


def cost_figures() -> dict[str, Drawing]:
    """The figures of costs."""
    shown = {
        "cost": ("vgg-mini on fashion-mini, ten clients, Dirichlet 0.3", federated_rows(), DRESS),
        "cost-central": ("vgg-mini on cifar10, one machine", class_rows(), NAMES),
    }
    drawn: dict[str, Drawing] = {}
    for figure, (place, methods, names) in shown.items():
        costs, first = mean_costs(methods), next(iter(methods.values()))
        cells = cell_words([(row.get("seed", 0), row["request"]) for row in first], names)
        about = f"{place}, {cells}; the mean of a request; retrain: the whole training, others that train: one pass"
        numbers = {method: {**to_json(cost), "seconds": 0} for method, cost in costs.items()}
        drawn[figure] = ({"about": about, **numbers}, partial(cost_figure, costs, about))
    return drawn


def cell_words(cells: list[tuple[int, str]], names: dict[str, str]) -> str:
    """Seeds and forgotten classes of rows, in words.

    >>> cell_words([(0, "class:1"), (0, "class:9"), (1, "class:1")], NAMES)
    'seeds 0, 1; forgotten: class 1 (automobile), class 9 (truck)'
    """
    seeds, requests = (sorted(set(each)) for each in zip(*cells, strict=True))
    named = {request: f" ({names[request]})" if request in names else "" for request in requests}
    classes = [request.replace(":", " ") + name for request, name in named.items()]
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; forgotten: {', '.join(classes)}"
