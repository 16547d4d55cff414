"""Write the tables, sentences and figures of README and docs from the checked-in result files: no number is typed.

python scripts/tables.py          rewrite the marked blocks and the figures
python scripts/tables.py --check  fail if one is out of date
"""

import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

from comparison_tables import (
    cheaper_in_short,
    cheaper_sentences,
    comparison,
    comparison_each,
    comparison_others,
    comparison_small,
    cost_figures,
    costs,
    paper_costs,
    searches,
)
from decision_table import decision
from erasing_tables import (
    erasing,
    erasing_figures,
    erasing_seeds,
    false_alarms,
    published_directions,
    published_erasing,
    regrow,
    regrow_tried,
    resnet18,
    small_classes,
    small_federation,
    small_sequence,
)
from federation_tables import kills, malice, malice_training, million, rewind, scale, server_view
from membership_tables import membership, membership_federation, membership_setting
from reproduction_tables import reproduced
from request_tables import forgetting, profile, requests, sequence
from result_text import RESULTS, ROOT, depth, grid, origin, read, stale_figures
from theory_tables import theory, theory_figures

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


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


AUDITED = ["forget", "probe", "prototype", "BN attack", "CKA", "copies", "retention"]


EARLIER_PROBE = (
    " **Measured before the probe was decided by its worst depth**: C1 here is the probe before the classifier alone. "
    "Where it passes, today's C1 has not been run; at the entry of the last stage `hide` and `directions` leave the "
    "original's recall ([full audits](FULL))."
)


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
    return grid(["model", "seeds", "method", *AUDITED], rows) + _earlier(result, "#full-audits")


def _earlier(result: dict[str, Any], page: str) -> str:
    return origin(result).replace("</sub>", EARLIER_PROBE.replace("FULL", page) + "</sub>")


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
    return grid(["model", "seed", "method", *AUDITED, "audits"], rows) + _earlier(result, "#full-audits")


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
        numbers = [f"{mean(values):.3f}", f"{max(values):.3f}"] if values else ["–", "–"]
        rows.append([name, str(len(values)), *numbers, f"{limit:g}"])
    return grid(["measure", "pairs", "mean", "largest", "limit"], rows) + origin(result)


def published() -> str:
    """What a network from the web kept and lost."""
    result = read("published")
    rows = []
    for row in result["rows"]:
        effect, ends = row["effect"], row["accuracies"]
        steps = [effect["before"], *(effect[key] for key in ("pruned", "scrubbed") if effect.get(key) is not None)]
        pairs = [row["before"], ends["unlearned"], ends["reference"]]
        told = [" / ".join(f"{100 * pair[key]:.1f}" for key in ("forget", "retain")) for pair in pairs]
        outcomes = ", ".join(f"{name} {audit['outcome']}" for name, audit in row["audits"].items())
        rows.append([row["class"], *told, " → ".join(f"{100 * step:.1f}" for step in steps), outcomes])
    header = ["class", "original: forget / retain %", "after `hide`", "reference, four epochs"]
    header += ["training images: before → pruned → classifier edited", "audits"]
    return grid(header, rows) + origin(result)


def campaigns() -> str:
    """What hostile input, kills and forgeries did, summed over doors, commands and files."""
    found = {name: read(name) for name in ("fuzz", "chaos", "forging")}
    sums = {name: Counter[str]() for name in found}
    for name, result in found.items():
        for row in result["rows"]:
            sums[name].update({key: value for key, value in row.items() if isinstance(value, int)})
    fuzz, chaos, forging = sums.values()
    doors, commands, files = (len(result["rows"]) for result in found.values())
    broken = sum(chaos[kind] for kind in ("torn", "stuck", "leftover", "differ", "lost"))
    tried = (
        f"{fuzz['cases']:,} hostile inputs at {doors} doors",
        f"kills at {chaos['operations']:,} file operations of {commands} commands",
        f"{forging['cases']:,} forgeries of {forging['values']} values in {files} files",
    )
    told = f"{forging['told']} of a kind that the check says nobody can measure"
    ended = (
        f"{fuzz['tracebacks']} tracebacks, {fuzz['hangs']} hangs, {fuzz['forgeries']} forgeries accepted",
        f"{chaos['completed']} of {chaos['states']} different states repeated, {broken} not completed",
        f"{forging['refused']:,} refused by name, {told}, {forging['same']} read as the honest value, "
        f"{forging['accepted']} accepted",
    )
    names = ("`make fuzz`", "`make chaos`", "`python benchmarks/forging.py`")
    rows = [list(row) for row in zip(names, tried, ended, strict=True)]
    return grid(["campaign", "tried", "found"], rows) + "".join(origin(result) for result in found.values())


TABLES: dict[str, Callable[[], str]] = {
    "orthogonality": orthogonality,
    "overhead": overhead,
    "forgetting": forgetting,
    "sequence": sequence,
    "federation": federation,
    "drift": drift,
    "recovery": recovery,
    "engines": engines,
    "decision": decision,
    "comparison": comparison,
    "comparison-each": comparison_each,
    "comparison-others": comparison_others,
    "comparison-small": comparison_small,
    "searches": searches,
    "costs": costs,
    "paper-costs": paper_costs,
    "requests": requests,
    "profile": profile,
    "cheaper": cheaper_sentences,
    "cheaper-in-short": cheaper_in_short,
    "verdicts": verdicts,
    "verdicts-each": verdicts_each,
    "verdicts-full": verdicts_full,
    "calibration": calibration,
    "published": published,
    "erasing": erasing,
    "published-directions": published_directions,
    "published-erasing": published_erasing,
    "erasing-seeds": erasing_seeds,
    "false-alarms": false_alarms,
    "erasing-small-classes": small_classes,
    "erasing-small-sequence": small_sequence,
    "erasing-small-federation": small_federation,
    "erasing-small-federated": partial(small_classes, "federated"),
    "reproduced": reproduced,
    "theory": theory,
    "membership": membership,
    "membership-setting": membership_setting,
    "membership-federation": membership_federation,
    "regrow": regrow,
    "regrow-tried": regrow_tried,
    "resnet": resnet18,
    "campaigns": campaigns,
    "scale": scale,
    "million": million,
    "kills": kills,
    "malice": malice,
    "malice-training": malice_training,
    "server-view": server_view,
    "rewind": rewind,
}


def rendered(text: str) -> str:
    """The page with each block filled anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}\n{block[3]}", text)


def main() -> None:
    is_check = "--check" in sys.argv
    stale = stale_figures({**cost_figures(), **erasing_figures(), **theory_figures()}, write=not is_check)
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
