"""Result files, their rows as text, and figures drawn from them: what all tables of README and docs share."""

import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from PIL import Image, PngImagePlugin

from fedortho.reports.figures.style import png
from fedortho.storage.files import canonical_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "benchmarks" / "figures"
Drawing = tuple[object, "Callable[[], Figure]"]  # the numbers of a figure, and what draws them


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
    processor = " ".join(filter(None, (about["processor"], about.get("instructions"))))
    return f"\n\n<sub>`{result['command']}`; {processor}, {about['cores']} cores, {versions}.{remark}</sub>"


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def depth(layer: tuple[str, float]) -> tuple[bool, list[int]]:
    """Layers by their numbers, the classifier, which has none, last."""
    numbers = [int(word) for word in re.findall(r"\d+", layer[0])]
    return not numbers, numbers


def stale_figures(figures: Mapping[str, Drawing], *, write: bool) -> list[str]:
    """The figures that were drawn from other numbers than today's: a PNG names the digest of its numbers."""
    stale = []
    for name, (numbers, draw) in figures.items():
        path = FIGURES / f"{name}.png"
        digest = hashlib.sha256(canonical_json(numbers).encode()).hexdigest()
        drawn = Image.open(io.BytesIO(path.read_bytes())).info.get("numbers") if path.exists() else None
        if drawn != digest:
            stale.append(str(path.relative_to(ROOT)))
            if write:
                note = PngImagePlugin.PngInfo()
                note.add_text("numbers", digest)
                Image.open(io.BytesIO(png(draw()))).save(path, pnginfo=note, optimize=True)
    return stale
