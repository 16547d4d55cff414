"""Write the tables, sentences and cost figures of README and docs from the checked-in result files: no number is typed.

python scripts/tables.py          rewrite the marked blocks and the figures of costs
python scripts/tables.py --check  fail if one is out of date
"""

import hashlib
import io
import json
import re
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from PIL import Image, PngImagePlugin

from fedortho.engines.cost import Cost
from fedortho.reports.figures.style import png
from fedortho.storage.files import canonical_json
from fedortho.storage.records import from_json, to_json

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from paper_figures.costs import KEPT, SENT, cheaper, cost_figure, quantities, short_number  # noqa: E402  # needs the path

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURES = ROOT / "benchmarks" / "figures"
FLOPS = ("flops", "kept-flops")
BLOCK = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def grid(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def origin(result: dict[str, Any]) -> str:
    about = result["environment"]
    versions = f"torch {about['versions']['torch']}, fedortho {about['versions']['fedortho']}"
    remark = f" {result['remark']}." if "remark" in result else ""
    return f"\n\n<sub>`{result['command']}`; {about['processor']}, {about['cores']} cores, {versions}.{remark}</sub>"


def orthogonality() -> str:
    header = [
        "data",
        "model",
        "orthogonality",
        "epochs",
        "seed",
        "validation",
        "test",
        "mean abs. cosine of kernels",
        "penalty",
    ]
    rows, origins = [], ""
    for path in sorted(RESULTS.glob("orthogonality-*.json")):
        result = read(path.stem)
        origins += origin(result)
        for row in result["rows"]:
            accuracies = [f"{row[name]:.1%}" for name in ("valid_accuracy", "test_accuracy")]
            ortho = [f"{row['mean_abs_cosine']:.4f}", f"{row['penalty']:.3g}"]
            about = [path.stem.removeprefix("orthogonality-"), row["model"], row["variant"].replace("-", " λ=")]
            rows.append([*about, str(row["epochs"]), str(row["seed"]), *accuracies, *ortho])
    return grid(header, rows) + origins


def overhead() -> str:
    result = read("overhead")
    variants = list(dict.fromkeys(row["variant"] for row in result["rows"] if row["variant"] != "plain"))
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    cells = {(row["model"], row["variant"]): f"{row['ratio']:.2f} / {row['median']:.2f}" for row in result["rows"]}
    return grid(["model", *variants], [[m, *(cells[m, v] for v in variants)] for m in models]) + origin(result)


def forgetting() -> str:
    header = ["data", "model", "training", "method", "classes", "forget", "worst", "retain"]
    header += ["forget after BN", "retain after BN", "mean ratio", "scrubbed"]
    rows, origins = [], ""
    for path in sorted(RESULTS.glob("forgetting-*.json")):
        result = read(path.stem)
        origins += origin(result)
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in result["rows"]:
            groups.setdefault((row["model"], row["variant"], row["method"]), []).append(row)
        for (model, variant, method), found in groups.items():
            served = [row for row in found if "forget" in row]
            keys = ("forget", "retain", "forget_bn", "retain_bn")
            cells = [f"{100 * mean(row[key] for row in served):.1f}" if key in served[0] else "–" for key in keys]
            number = str(len(found)) if len(served) == len(found) else f"{len(served)} of {len(found)}"
            training = "plain" if variant == "none" else "orthogonal"
            data = path.stem.removeprefix("forgetting-")
            cells.insert(1, f"{100 * max(row['forget'] for row in served):.1f}")
            ratios, scrubs = ([row[key] for row in served if row.get(key) is not None] for key in ("ratio", "scrub"))
            cells += [f"{mean(ratios):.3f}" if ratios else "–", str(sum(map(bool, scrubs))) if scrubs else "–"]
            rows.append([data, model, training, method, number, *cells])
    return grid(header, rows) + origins


def federation() -> str:
    result = read("federation-cifar10")
    header = ["request", "images", "method", "forget", "retain", "test", "exchanges", "MB down", "MB up", "seconds"]
    rows = []
    for row in result["rows"]:
        if row["what"] != "request":
            continue
        scores = [f"{100 * row[key]:.1f}" if key in row else "refused" for key in ("forget", "retain", "test")]
        bytes_ = [f"{row[key] / 1e6:,.1f}" if key in row else "–" for key in ("bytes_down", "bytes_up")]
        cost = [str(row.get("exchanges", "–")), *bytes_, f"{row['seconds']:,.0f}" if "seconds" in row else "–"]
        rows.append([row["kind"], f"{row['images']:,}", row["method"], *scores, *cost])
    return grid(header, rows) + origin(result)


def drift() -> str:
    result = read("federation-cifar10")
    rows = []
    for row in result["rows"]:
        if row["what"] == "training":
            values = [value for value in row["drift_by_round"][1:] if value is not None]
            thirds = [
                values[: len(values) // 3],
                values[len(values) // 3 : -(len(values) // 3)],
                values[-(len(values) // 3) :],
            ]
            name = "with alignment" if row["variant"] == "original" else "without"
            rows.append([name, f"{row['test-accuracy']:.1%}", *(f"{mean(part):.2f}" for part in thirds)])
    return grid(["training", "test", "drift, first third of the rounds", "second", "last"], rows)


def recovery() -> str:
    rows = []
    for row in read("federation-cifar10")["rows"]:
        if row["what"] == "recovery":
            cells = [f"{100 * row[when][key]:.1f}" for when in ("before", "after") for key in ("forget", "retain")]
            rows.append([row["method"], str(row["rounds"]), "yes" if row["masked_tensors"] else "no", *cells])
    header = ["method", "rounds", "kernels held", "forget before", "retain before", "forget after", "retain after"]
    return grid(header, rows)


ENGINES = ("inprocess", "ray")


def engines() -> str:
    result = read("engines")
    rows = []
    for what, text in (("transport", "45 MB to ten clients and back"), ("training", "ten clients train")):
        here, ray = (next(r for r in result["rows"] if (r["what"], r.get("engine")) == (what, e)) for e in ENGINES)
        ratio = f"{ray['median'] / here['median']:.1f}"
        rows.append(
            [text, f"{here['median']:.2f}", f"{ray['median']:.2f}", ratio, f"{ray['whole'] / here['whole']:.1f}"]
        )
    header = ["a round", "in this process, s", "Ray, two workers, s", "ratio", "ratio of whole runs, start-up included"]
    few, many = (next(r for r in result["rows"] if r.get("clients") == n)["megabytes"] for n in (10, 1000))
    sizes = next(row for row in result["rows"] if row["what"] == "bytes")
    memory = f"\n\nPeak memory with 1,000 clients: {many:,.0f} MB, with 10: {few:,.0f} MB."
    memory += f" ResNet-50: statistics of a class request {sizes['observe_up'] / 1000:.1f} KB up per client;"
    memory += f" one round of training {sizes['round_up'] / 1e6:.1f} MB."
    return grid(header, rows) + memory + origin(result)


CONTROLS = ("retrain", "retrain-plain", "logit-mask")  # never marked as best
SEEN, NAMES = "class:1", {"class:0": "airplane", "class:1": "automobile", "class:9": "truck"}
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


def smallest_gap(methods: dict[str, Rows]) -> str | None:
    """The method nearest to Retrain, whoever made it; only among methods with as many rows as the most."""
    known = {name: [row["gap"] for row in rows if row["gap"] is not None] for name, rows in methods.items()}
    most = max(map(len, known.values()), default=0)
    able = [name for name in known if most and len(known[name]) == most and methods[name][0]["method"] not in CONTROLS]
    return min(able, key=lambda name: mean(known[name]), default=None)


EARLIER = """**This protocol has not been run to its end** (`python benchmarks/comparison.py all`). The rows below
are of an earlier one: automobile only, six trials per method on 10,000 images of frog, FLOPs by numbers of images."""


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
    table = grid([*header, "TFLOPs, everything counted", "kept by everybody"], rows) + origin(read("comparison"))
    every = chain.from_iterable(chain.from_iterable(each.values()) for each in compared(("class",)).values())
    has_drawn = any(row["request"] != SEEN for row in every)
    return table if has_drawn else f"{EARLIER}\n\n{table}"


def comparison_each(kinds: tuple[str, ...] = ("class",)) -> str:
    """Every request by itself; several seeds as mean ± deviation."""
    rows = []
    for (engine, model), methods in compared(kinds).items():
        for request in dict.fromkeys(row["request"] for found in methods.values() for row in found):
            here = {name: [row for row in found if row["request"] == request] for name, found in methods.items()}
            best = smallest_gap({name: found for name, found in here.items() if found})
            what = NAMES.get(request, request if len(request) < 20 else "samples")
            for name, found in here.items():
                if found:
                    tuned = found[0].get("tuned-on", "–") or "–"
                    about = [engine, model, what, str(len(found)), name, tuned if len(tuned) < 20 else "other samples"]
                    rows.append([*about, *cells_of(found, name == best), *flops_of(found)])
    header = ["engine", "model", "request", "seeds", "method", "tuned on", "forget", "retain", "gap to retrain"]
    return grid([*header, "TFLOPs, everything counted", "kept by everybody"], rows) + origin(read("comparison"))


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
        told = ["yes" if row["inside"] else "**no**", str(row["attempts"]), "yes" if row["settled"] else "no"]
        rows.append([row["file"], tuned_on, row["method"], row["setting"], chosen, f"{lowest} to {highest}", *told])
    header = ["settings", "tuned on", "method", "setting", "chosen", "tried", "inside", "trials", "settled"]
    return grid(header, rows) + origin(read("searches"))


def one_pass(methods: dict[str, Rows]) -> dict[str, Rows]:
    """The methods that were not refused, at one pass."""
    served = {name: [row for row in rows if row["accuracies"]] for name, rows in methods.items() if "×" not in name}
    return {name: rows for name, rows in served.items() if rows}


def class_rows() -> dict[str, Rows]:
    """Rows of class requests on vgg-mini, central, all networks and classes."""
    return one_pass(compared(("class",)).get(("central", "vgg-mini"), {}))


def federated_rows() -> dict[str, Rows]:
    """Rows of a class request in a federation of ten clients."""
    return one_pass({row["method"]: [row] for row in read("costs")["rows"]})


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
        rows.append([row["method"], *(shares or ["refused", "–"]), *(sent or ["–", "–"]), *flops_of([row])])
    header = ["method", "forget", "retain", "down", "up", "TFLOPs, everything counted", "kept by everybody"]
    return grid(header, rows) + origin(read("costs"))


def shares(ends: tuple[float, ...]) -> str:
    return " / ".join(f"{share:.0f}" for share in ends)


def is_level(ends: tuple[float, ...], ours: tuple[float, ...]) -> bool:
    """Whether forget and retain accuracy are at most one point worse."""
    return ends[0] <= ours[0] + 1 and ends[1] >= ours[1] - 1


def cheaper_sentences() -> str:
    """What costs less than hide and what it leaves, in words; and what the paper's own edit sends."""
    lines = []
    for where, found in (("vgg-mini, central", class_rows()), ("ten clients, fashion-mini", federated_rows())):
        ends = {
            name: tuple(100 * mean(row["accuracies"][key] for row in rows) for key in ("forget", "retain"))
            for name, rows in found.items()
        }
        for label, values in quantities(mean_costs(found)).items() if {"hide", "retrain"} <= found.keys() else ():
            if label == KEPT and not all(
                key in row["cost"] for rows in found.values() for row in rows for key in FLOPS
            ):
                continue  # rows from before statistics were told apart
            told = {name: f"`{name}` {short_number(values[name])} ({shares(ends[name])})" for name in values}
            less = cheaper(values)
            level = [name for name in less if is_level(ends[name], ends["hide"])]
            worse = ", ".join(f"`{name}` ({shares(ends[name])})" for name in less if name not in level) or "none"
            lines.append(
                f"- {where}, {label}: {told['hide']}, {told['retrain']}; cheaper than `hide` and as accurate within "
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
    (paper,) = federated_rows()["paper"]
    after = shares(tuple(100 * paper["accuracies"][key] for key in ("forget", "retain")))
    lines.append(
        f"- The paper's own edit of a class sends {' and '.join(parts)}. "
        f"With ten clients forget / retain accuracy are {after} after it."
    )
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


AUDITED = ["forget", "probe", "prototype", "BN attack", "CKA", "copies", "retention"]


def verdicts() -> str:
    """What audits find: one line for each network and method, the mean over seeds, and how many of them fail."""
    result = read("verdicts")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "details" not in row:
            groups.setdefault((row["model"], row["method"]), []).append(row)
    rows = []
    for (model, method), found in groups.items():
        cells = [f"{mean(100 * row['forget-accuracy']['value'] for row in found):.1f}"]
        for name in ("C1", "C3", "C2", "C5", "C6", "retention"):
            audits = [row["audits"][name] for row in found if row["audits"][name]["outcome"] in ("PASS", "FAIL")]
            failed = sum(audit["outcome"] == "FAIL" for audit in audits)
            values = [audit["value"] if name == "C5" else 100 * audit["unlearned"] for audit in audits]
            mark = f"**✗** {failed}/{len(audits)}" if failed else "✓"
            parts = [f"{mean(values):.{2 if name == 'C5' else 1}f} {mark}"] if audits else []
            undecided = sum(row["audits"][name]["outcome"] == "INCONCLUSIVE" for row in found)
            parts += [f"~ {undecided}/{len(found)}"] if undecided else []
            cells.append(" ".join(parts) or "–")
        rows.append([model, str(len(found)), method, *cells])
    return grid(["model", "seeds", "method", *AUDITED], rows) + origin(result)


def verdicts_each() -> str:
    """The same for each seed."""
    result = read("verdicts")
    rows = []
    for row in result["rows"]:
        if "details" in row:
            continue  # full audits have a table of their own
        audits = row["audits"]
        cells = []
        for name in ("C1", "C3", "C2", "C5", "C6"):
            found = audits[name]
            mark = {"FAIL": "**✗** ", "PASS": "✓ ", "INCONCLUSIVE": "~ "}.get(found["outcome"], "")
            value = found["unlearned"] if name not in ("C5",) else found["value"]
            shown = "–" if value is None or not mark else f"{100 * value:.1f}" if name != "C5" else f"{value:.2f}"
            cells.append(f"{mark}{shown}")
        forget, retention = row["forget-accuracy"]["value"], audits["retention"]
        retention_cell = f"{'✓' if retention['outcome'] == 'PASS' else '**✗**'} {100 * retention['unlearned']:.1f}"
        rows.append(
            [row["model"], str(row["seed"]), row["method"], f"{100 * forget:.1f}", *cells, retention_cell, row["label"]]
        )
    return grid(["model", "seed", "method", *AUDITED, "audits"], rows) + origin(result)


def depth(layer: tuple[str, float]) -> tuple[bool, list[int]]:
    """Layers by their numbers, the classifier, which has none, last."""
    numbers = [int(word) for word in re.findall(r"\d+", layer[0])]
    return not numbers, numbers


def _steps(number: int | None) -> str:
    return "> 60" if number is None else str(number)


def verdicts_full() -> str:
    """What the full audits add: the probe behind every stage, steps of relearning, membership by shadow models."""
    result = read("verdicts")
    rows = []
    for row in (row for row in result["rows"] if "details" in row):
        stages, again, shadows = (row["details"][name] for name in ("C1", "C3", "C4"))
        seen = [
            " ".join(f"{100 * share:.0f}" for _, share in sorted(stages["stages"][who].items(), key=depth))
            for who in ("unlearned", "reference", "original")
        ]
        steps = [
            " / ".join(_steps(again["relearning"][k][who]) for who in ("unlearned", "reference")) for k in ("10", "50")
        ]
        area = f"{shadows['AUC']:.2f} ({shadows['AUC of the originals']:.2f})" if shadows else "–"
        rows.append([row["model"], str(row["seed"]), row["method"], *seen, *steps, area, row["label"]])
    header = ["model", "seed", "method", "probe by stage", "retrained", "original"]
    header += ["steps, 10 samples / retrained", "50 samples / retrained", "U-LiRA AUC (untouched)", "audits"]
    return grid(header, rows) + origin(result)


def calibration() -> str:
    """How far retrained models are from each other, and the limits that follow."""
    result = read("calibration")
    rows = []
    for name, limit in result["limits"].items():
        values = [row["values"][name] for row in result["rows"] if row["values"][name] is not None]
        rows.append([name, str(len(values)), f"{mean(values):.3f}", f"{max(values):.3f}", f"{limit:g}"])
    return grid(["measure", "pairs", "mean", "largest", "limit"], rows) + origin(result)


TABLES: dict[str, Callable[[], str]] = {
    "orthogonality": orthogonality,
    "overhead": overhead,
    "forgetting": forgetting,
    "federation": federation,
    "drift": drift,
    "recovery": recovery,
    "engines": engines,
    "comparison": comparison,
    "comparison-each": comparison_each,
    "comparison-others": lambda: comparison_each(("client", "samples")),
    "searches": searches,
    "costs": costs,
    "cheaper": cheaper_sentences,
    "verdicts": verdicts,
    "verdicts-each": verdicts_each,
    "verdicts-full": verdicts_full,
    "calibration": calibration,
}


def read(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return value


def rendered(text: str) -> str:
    """The page with each block filled anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}\n{block[3]}", text)


def stale_figures(*, write: bool) -> list[str]:
    """The figures of costs that were drawn from other numbers than today's: a PNG names the digest of its numbers."""
    stale = []
    for name, costs in (("cost", mean_costs(federated_rows())), ("cost-central", mean_costs(class_rows()))):
        path = FIGURES / f"{name}.png"
        numbers = {method: {**to_json(cost), "seconds": 0} for method, cost in costs.items()}
        digest = hashlib.sha256(canonical_json(numbers).encode()).hexdigest()
        drawn = Image.open(io.BytesIO(path.read_bytes())).info.get("numbers") if path.exists() else None
        if drawn != digest:
            stale.append(str(path.relative_to(ROOT)))
            if write:
                note = PngImagePlugin.PngInfo()
                note.add_text("numbers", digest)
                Image.open(io.BytesIO(png(cost_figure(costs)))).save(path, pnginfo=note, optimize=True)
    return stale


def main() -> None:
    is_check = "--check" in sys.argv
    stale = stale_figures(write=not is_check)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if rendered(text) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not is_check:
                page.write_text(rendered(text), encoding="utf-8")
    print("out of date:" if is_check else "rewritten:", ", ".join(stale) or "none")
    sys.exit(is_check and bool(stale))


if __name__ == "__main__":
    main()
