"""Tables of class requests: what they do, what they cost, and where the cost goes."""

from statistics import mean
from typing import Any

from result_text import RESULTS, grid, origin, read


def forgetting() -> str:
    header = ["data", "model", "training", "method", "classes", "forget", "worst", "retain", "largest loss"]
    header += ["forget after BN", "retain after BN", "mean ratio", "scrubbed"]
    rows, origins = [], ""
    for path in sorted(RESULTS.glob("forgetting-*.json")):
        result = read(path.stem)
        origins += origin(result)
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        originals: dict[tuple[str, ...], float] = {}
        for row in result["rows"]:
            groups.setdefault((row["model"], row["variant"], row["method"]), []).append(row)
            if row["method"] == "original":
                originals[row["model"], row["variant"], row["class"]] = row["retain"]
        for (model, variant, method), found in groups.items():
            served = [row for row in found if "forget" in row]
            keys = ("forget", "retain", "forget_bn", "retain_bn")
            cells = [f"{100 * mean(row[key] for row in served):.1f}" if key in served[0] else "–" for key in keys]
            number = str(len(found)) if len(served) == len(found) else f"{len(served)} of {len(found)}"
            training = "plain" if variant == "none" else "orthogonal"
            data = path.stem.removeprefix("forgetting-")
            cells.insert(1, f"{100 * max(row['forget'] for row in served):.1f}")
            losses = [originals[row["model"], row["variant"], row["class"]] - row["retain"] for row in served]
            cells.insert(3, "–" if method == "original" else f"{100 * max(losses):.1f}")
            ratios, scrubs = ([row[key] for row in served if row.get(key) is not None] for key in ("ratio", "scrub"))
            cells += [f"{mean(ratios):.3f}" if ratios else "–", str(sum(map(bool, scrubs))) if scrubs else "–"]
            rows.append([data, model, training, method, number, *cells])
    return grid(header, rows) + origins


def sequence() -> str:
    """Five classes forgotten one after the other: the accuracy of each, of all before it, and of the others."""
    result, rows = read("forgetting-cifar10"), []
    for row in result["sequence"]:
        *earlier, new = (100 * value for value in row["forgotten"].values())
        retain = f"{100 * row['retain_before']:.1f} → {100 * row['retain']:.1f}"
        rows.append([row["model"], row["request"], f"{new:.1f}", f"{max(earlier):.1f}" if earlier else "–", retain])
    header = ["model", "request", "forget", "largest of earlier requests", "retain, before → after"]
    return grid(header, rows) + origin(result)


def requests() -> str:
    """What a class request costs by each method, means over the classes that were measured."""
    result, rows = read("requests"), []
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        request = row["request"] if row["part"] == "repeated" else ""
        groups.setdefault((row["network"], f"{row['method']} {request}".strip(), row["part"]), []).append(row)
    for (network, method, _), found in groups.items():
        costs = [row["cost"] for row in found]

        def cell(key: str, scale: float, digits: int, costs: list[dict[str, Any]] = costs) -> str:
            return f"{mean(cost[key] for cost in costs) / scale:,.{digits}f}" if key in costs[0] else "–"

        memory = f"{mean(row['memory'] for row in found):.2f}" if "memory" in found[0] else "–"
        kept = f"{found[0]['ledger-flops'] / 1e9:,.1f}" if "ledger-flops" in found[0] else "–"
        counted = [cell("flops", 1e9, 1), cell("request-flops", 1e9, 1), kept]
        read_ = [cell("images-read", 1, 0), cell("bytes-up", 1e3, 1)]
        seconds = "computed" if found[0].get("computed") else cell("cpu-seconds", 1, 1)
        rows.append([network, method, seconds, *counted, *read_, memory])
    header = [
        "network",
        "method",
        "CPU seconds",
        "GFLOPs, everything counted",
        "kept by everybody",
        "to keep the ledger",
    ]
    return grid([*header, "images read", "kB up", "memory / forward pass"], rows) + origin(result)


def profile() -> str:
    """Where a calibrated hide spends its FLOPs and CPU seconds, by what is asked of the images."""
    result, rows = read("requests"), []
    steps = {"peaks": "sums of peaks", "moments": "repair", "inputs": "direction of the scrub", "right": "trials"}
    for row in result["rows"]:
        if row["method"] not in ("hide", "hide, statistics kept") or "profile" not in row:
            continue
        spent, cost = row["profile"], row["cost"]
        cells = [f"{spent[kind]['flops'] / 1e9:,.1f} / {spent[kind]['seconds']:.2f}" for kind in steps]
        flops, seconds = (sum(part[key] for part in spent.values()) for key in ("flops", "seconds"))
        rest = f"{(cost['request-flops'] - flops) / 1e9:,.1f} / "
        rest += f"{cost['cpu-seconds'] - seconds:.2f}" if "cpu-seconds" in cost else "–"
        sent = row.get("client-bytes", {}).get("all", 0)
        rows.append([row["network"], row["request"], *cells, rest, f"{sent / 1024:,.0f}" if sent else "–"])
    header = ["network", "request", *steps.values(), "ranking, patches, digests", "KB of one client"]
    return grid(header, rows) + origin(result)
