"""Result files and their rows as text: what all tables of README and docs share."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return value


def grid(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def origin(result: dict[str, Any]) -> str:
    about = result["environment"]
    versions = f"torch {about['versions']['torch']}, fedortho {about['versions']['fedortho']}"
    remark = f" {result['remark']}." if "remark" in result else ""
    return f"\n\n<sub>`{result['command']}`; {about['processor']}, {about['cores']} cores, {versions}.{remark}</sub>"


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
