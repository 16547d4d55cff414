"""Tables and the frontier of erasing: what regrow was tried with, what it reaches, and the final protocol."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

from comparison_tables import NAMES, cell_words
from result_text import RESULTS, Drawing, depth, grid, origin, read

from fedortho.reports.figures.style import MARKERS, SERIES, caption, entitle, name_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUICK = ("C1", "C2", "C3", "C6", "retention")  # audits of the quick budget, and what is judged beside them
KINDS = ("hidden", "retrained", "retrained, then erased", "erased")  # of networks, in the order of the table
LONG = 150  # epochs of a training that is not as short as ours
ROLES = ("unlearned", "reference", "original")
LEVELS = {"hide": "hide", "regrow": "erase", "retrain": "exact"}
Cells = Sequence[dict[str, Any]]


def regrow() -> str:
    """The probe at every depth after `--method regrow`, on validation images."""
    result, rows = read("regrow"), []
    for row in result["rows"]:
        names = [name for name, _ in sorted(row["probe"]["unlearned"].items(), key=depth)]
        probes = [", ".join(f"{100 * row['probe'][who][name]:.1f}" for name in names) for who in ROLES]
        retained = [f"{100 * row['accuracies'][who]['retain']:.1f}" for who in ROLES]
        forget = f"{100 * row['accuracies']['unlearned']['forget']:.1f}"
        share = f"{row['share']:.1%} / {row['share'] * row['epochs'] / LONG:.1%}"
        about = [row["model"], row["request"], str(row["stages"] or "all but the first"), ", ".join(names)]
        rows.append([*about, *probes, forget, " / ".join(retained), share])
    header = ["model", "request", "stages reset", "depths", "probe after regrow", "retrained", "original", "forget %"]
    header += ["retain %: regrow / retrained / original", f"FLOPs of retraining / of {LONG} epochs (computed)"]
    return grid(header, rows) + origin(result)


def regrow_tried() -> str:
    """What was tried before the method had its defaults."""
    result, rows = read("regrow-tried"), []
    for row in result["rows"]:
        what = ", ".join(f"{key} {value}" for key, value in row["tried"].items()) or "–"
        probes = ", ".join(f"{share:.1f}" for _, share in sorted(row["probe"].items(), key=depth))
        share = f"{row['share']:.0f}" if "share" in row else "–"
        about = [row["model"], str(row["class"]), row["network"], what]
        rows.append([*about, probes, f"{row['forget']:.1f}", f"{row['retain']:.1f}", share])
    header = ["model", "class", "network", "tried", "probe at each depth, the classifier last", "forget %", "retain %"]
    return grid([*header, "% of the FLOPs of retraining"], rows) + origin(result)


def published_erasing() -> str:
    """What `erase` keeps of a network that was trained for long elsewhere."""
    result, rows = read("published-erasing"), []
    for row in sorted(result["rows"], key=lambda row: (row["split"] == "test", row["share"])):
        split = "validation" if row["split"] == "valid" else "test"
        before, after = ([100 * row[when][key] for key in ("forget", "retain")] for when in ("before", "after"))
        ends = [
            f"{after[0]:.1f} ({before[0]:.1f})",
            f"{after[1]:.1f} ({before[1]:.1f})",
            f"{after[1] - before[1]:+.1f}",
        ]
        rows.append([row["request"], split, row["settings"], *ends, f"{row['share']:.1%}"])
    header = ["request", "images", "settings of regrow", "forget % (before)", "retain % (before)", "change"]
    return grid([*header, "FLOPs of 200 epochs"], rows) + origin(result)


def resnet18() -> str:
    """ResNet-18 itself: what each method leaves and costs, and what the quick audits find."""
    if not (RESULTS / "resnet18.json").exists():
        return "The protocol has not been run."
    result, rows = read("resnet18"), []
    for row in result["rows"]:
        ends = [f"{100 * row['accuracies'][key]:.1f}" for key in ("forget", "retain")]
        if "before" in row:
            before = [f"{100 * row['before'][key]:.1f}" for key in ("forget", "retain")]
            rows.append(["original", *before, *["–"] * 6])
        kept = row["cost"]["kept-flops"] / row["retraining-flops"] if row["cost"] else 0.0
        shares = [f"{100 * share:.3g}" for share in (row["share"], row["share"] - kept)]
        long = f"{100 * row['share'] * row['epochs'] / LONG:.2g}" if row["method"] != "retrain" else "100"
        found = row.get("alike", row)
        recalls = [
            " / ".join(f"{100 * audits[key]:.1f}" for key in ROLES) if None not in audits.values() else "–"
            for audits in (
                {key: found.get("audits", {}).get(name, {}).get(key) for key in ROLES} for name in ("C1", "C3")
            )
        ]
        rows.append([row["method"], *ends, *shares, long, *recalls, found.get("label", "–")])
    header = ["method", "forget %", "retain %", "FLOPs of retraining %, everything counted", "kept by everybody"]
    header += [f"of {LONG} epochs (computed)", "C1, worst depth: after / retrained / original", "C3, prototype"]
    return grid([*header, "quick audits"], rows) + origin(result)


def published_directions() -> str:
    """What `hide` and `directions` leave of a class in a network with identity shortcuts."""
    result, rows = read("published-directions"), []
    for row in sorted(
        result["rows"], key=lambda row: (row["split"] == "test", row["request"], row["method"] != "hide")
    ):
        before, after = row["before"], row["after"]
        ends = [f"{100 * after[key]:.1f} ({100 * before[key]:.1f})" for key in ("forget", "retain")]
        probe = next(reversed(after["probe"]))  # the classifier's input; entries before the edit stay as they are
        number = sum(row["directions"].values()) if row["directions"] else 0
        ends.append(f"{100 * after['probe'][probe]:.1f} ({100 * before['probe'][probe]:.1f})")
        split = "validation" if row["split"] == "valid" else "test"
        rows.append([row["request"], split, row["method"], *ends, str(number or "–"), str(row["cpu-seconds"])])
    header = [
        "request",
        "images",
        "method",
        "forget % (before)",
        "retain % (before)",
        "probe at the classifier % (before)",
    ]
    return grid([*header, "directions removed", "CPU seconds"], rows) + origin(result)


def erasing() -> str:
    """The final protocol: what each method leaves and costs, one row for each network, class and method."""
    if not (RESULTS / "erasing.json").exists():
        return "The protocol has not been run."
    result, rows = read("erasing"), []
    for row in result["rows"]:
        ends = [f"{100 * row['accuracies'][key]:.1f}" for key in ("forget", "retain")]
        about = [row["data"], row["model"], str(row["seed"]), row["request"], row["method"]]
        judged = [text for found in (row, row.get("alike", {})) for text in (_probe(found), found.get("label", "–"))]
        rows.append([*about, *ends, f"{row['share']:.1%}", *judged])
    header = ["data", "model", "seed", "request", "method", "forget %", "retain %", "FLOPs of retraining"]
    header += ["C1, worst depth: after / retrained / original", "audits", "C1 / retrained and treated alike", "audits"]
    return grid(header, rows) + origin(result)


def erasing_seeds() -> str:
    """The probe at every depth after `erase` of one class by several seeds."""
    result = read("erasing-seeds")
    names = [name for name, _ in sorted(result["rows"][0]["probe"].items(), key=depth)]
    rows = []
    for row in result["rows"]:
        seed = str(row["seed"]) if "erased" in row["what"] else "–"
        rows.append([row["what"], seed, *(f"{100 * row['probe'][name]:.1f}" for name in names)])
        rows[-1] += [f"{100 * row[key]:.1f}" for key in ("forget", "retain")]
    return grid(["model", "seed of erase", *names, "forget %", "retain %"], rows) + origin(result)


def small_rows(part: str) -> list[dict[str, Any]]:
    """The rows of one part of `benchmarks/erasing_small.py`; none before it was run."""
    rows = read("erasing-small")["rows"] if (RESULTS / "erasing-small.json").exists() else []
    return [row for row in rows if row["part"] == part]


def small_classes(part: str = "classes") -> str:
    """Every embedded class but the demo's, erased and hidden, by the full audits."""
    rows = []
    for row in small_rows(part):
        retained = [f"{100 * row[when]['retain']:.1f}" for when in ("after", "retrained", "before")]
        about = [row["name"], row["level"], f"{100 * row['after']['forget']:.1f}", " / ".join(retained)]
        rows.append([*about, f"{row['share']:.1%}", _probe(row), row["label"]])
    header = ["class", "level", "forget %", "retain %: after / retrained / original", "FLOPs of retraining"]
    header += ["C1, worst depth: after / retrained (erase: treated alike) / original", "audits"]
    return grid(header, rows) + origin(read("erasing-small")) if rows else "*Not run yet.*"


def false_alarms() -> str:
    """How often each audit fails networks that never saw the class, and networks that did."""
    if not (RESULTS / "false-alarms.json").exists():
        return "*Not run yet.*"
    result = read("false-alarms")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["kind"], []).append(row)
    rows = []
    for kind, judged in sorted(found.items(), key=lambda each: KINDS.index(each[0].partition(" of ")[0])):
        outcomes = [Counter(row["audits"][name]["outcome"] for row in judged) for name in QUICK]
        told = [f"{each['FAIL']}, {each['INCONCLUSIVE']} open" for each in outcomes]
        classes = len({row["name"] for row in judged})
        processors = len({row["processor"] for row in judged})
        about = [kind, "no" if is_innocent(kind) else "yes", str(classes), str(processors)]
        rows.append([*about, f"{sum(bool(failed(row)) for row in judged)} of {len(judged)}", *told])
    header = ["model", "saw the class", "classes", "processors", "verdicts with a failure"]
    return f"{grid([*header, *(f'{name} fails' for name in QUICK)], rows)}\n\n{failures_told(found)}{origin(result)}"


def failed(row: dict[str, Any]) -> list[str]:
    """The audits of a verdict that failed."""
    return [name for name, audit in row["audits"].items() if audit["outcome"] == "FAIL"]


def is_innocent(kind: str) -> bool:
    """Whether networks of this kind never saw the class."""
    return kind.startswith("retrained")


def failures_told(found: dict[str, list[dict[str, Any]]]) -> str:
    """False alarms in one sentence, and the classes on which each kind of erased network fails."""
    innocent = [row for kind, rows in found.items() if is_innocent(kind) for row in rows]
    told = [f"False alarms: {sum(bool(failed(row)) for row in innocent)} of {len(innocent)} verdicts."]
    for kind, rows in sorted(found.items()):
        if kind.startswith("erased"):
            counted = Counter((row["name"], name) for row in rows for name in failed(row))
            judged = Counter(row["name"] for row in rows)
            each = [f"{name} by {audit} {number}/{judged[name]}" for (name, audit), number in sorted(counted.items())]
            told.append(f"{kind.capitalize()} fail on: {', '.join(each) or 'none'}.")
    return " ".join(told)


def small_sequence() -> str:
    """Five embedded classes one after the other: the newest, the largest of all before, and what is left."""
    rows = []
    for row in small_rows("sequence"):
        shares, name = {each: 100 * share for each, share in row["forgotten"].items()}, row.get("name", "")
        newest = f"{shares.pop(name):.1f}" if name else "–"
        largest, retain = f"{max(shares.values()):.1f}" if shares else "–", f"{100 * row['retain']:.1f}"
        rows.append([row["level"], str(row["step"]), name or "all five at once", newest, largest, retain])
    return grid(["level", "request", "class", "forget %", "largest of the others forgotten", "retain %"], rows)


def small_federation() -> str:
    """A federation that erases, or hides, a class and then trains on without it."""
    rows = []
    for row in small_rows("federation"):
        is_choice = row["level"].startswith("choice")
        ((name, share),) = row["forgotten"].items()
        when = (
            f"after {row['step']} further rounds"
            if row["step"]
            else "at once"
            if row["level"] != "before"
            else "before"
        )
        what = "–" if row["level"] == "before" else row["level"].replace("choice", "erase")
        what += f", {row['step']} rounds (validation images)" if is_choice else ""
        sent = f"{row['bytes_up'] / 1e6:.1f} / {row['bytes_down'] / 1e6:.1f}" if "bytes_up" in row else "–"
        rows.append(
            [name, what, "at once" if is_choice else when, f"{100 * share:.1f}", f"{100 * row['retain']:.1f}", sent]
        )
    return grid(["class", "level", "when", "forget %", "retain %", "MB up / down"], rows)


def _probe(found: dict[str, Any]) -> str:
    """The recall of the probe at its worst depth, in each model."""
    probe = found.get("audits", {}).get("C1")
    seen = [] if probe is None else [probe[who] for who in ROLES]
    return " / ".join("–" if share is None else f"{100 * share:.1f}" for share in seen) or "–"


def erasing_figures() -> dict[str, Drawing]:
    """The frontier of the final protocol on CIFAR-10, once it has been run."""
    if not (RESULTS / "erasing.json").exists():
        return {}
    rows = [row for row in read("erasing")["rows"] if row["data"] == "cifar10"]
    points, models = frontier(rows), " and ".join(dict.fromkeys(row["model"] for row in rows))
    cells = cell_words([(row["seed"], row["request"]) for row in rows], NAMES)
    about = f"{models} on cifar10, {cells}; test images; a point for each class that was run; larger: costs more"
    return {"erasing": ({"about": about, **points}, partial(frontier_drawn, points, about))}


def frontier(rows: Cells) -> dict[str, list[tuple[float, float, float]]]:
    """By method: gap of the probe at its worst depth and retain accuracy against retraining in points, and cost."""
    retrained = {
        (row["model"], row["seed"], row["request"]): row["accuracies"]["retain"]
        for row in rows
        if row["method"] == "retrain"
    }
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        probe, cell = row.get("audits", {}).get("C1", {}), (row["model"], row["seed"], row["request"])
        if probe.get("reference") is not None and cell in retrained:
            gap, lost = probe["unlearned"] - probe["reference"], row["accuracies"]["retain"] - retrained[cell]
            points.setdefault(row["method"], []).append((100 * gap, 100 * lost, row["share"]))
    return points


def frontier_drawn(points: dict[str, list[tuple[float, float, float]]], about: str) -> "Figure":
    """Retain accuracy against the gap of the probe, both against retraining; the area of a point is its cost."""
    figure, ((ax,),) = new_figure(6.6, 4.2)
    gaps = {name: mean(gap for gap, _, _ in own) for name, own in points.items()}
    for place, (name, own) in enumerate(points.items()):
        across, up, shares = zip(*own, strict=True)
        sizes = [12 + 160 * share for share in shares]
        label = f"{LEVELS.get(name, name)}: {gaps[name]:+.1f} and {mean(up):+.1f}; cost {mean(shares):.0%}"
        shape = MARKERS[(place + place // len(SERIES)) % len(MARKERS)]  # no colour has a shape twice
        colour = SERIES[place % len(SERIES)]
        ax.scatter(across, up, s=sizes, c=colour, marker=shape, alpha=0.75, linewidths=0, label=label)
    for draw in (ax.axvline, ax.axhline):
        draw(0, color="#999999", linewidth=0.8)
    name_axes(ax, "probe above retrained at the worst depth, points", "retain accuracy against retrained, points")
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    told = ", ".join(f"{level} {gaps[name]:+.1f}" for name, level in LEVELS.items() if name in gaps)
    entitle(figure, f"A probe above retrained models, on average: {told} points")
    caption(figure, about)
    return figure
