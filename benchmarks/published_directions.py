"""The published ResNet-20, whose blocks have identity shortcuts, forgets a class by `directions` and by `hide`.

    python benchmarks/published_directions.py --networks ../shared/networks --data-dir ../shared/data

How blocks with an identity are edited was tried on bird, by validation images (half of the test images). What came of
it is then read once on the three drawn classes of published.py, by the other half: accuracies, and what a linear probe
finds of the class at each stage entry and at the classifier's input. There is no reference model: retraining would take
200 epochs. Rows that are there are left alone; they go to benchmarks/results/published-directions.json.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from published import CLASSES, opened
from result_files import add_row, read_results

import fedortho as fo
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.probe import depth_recalls
from fedortho.data.request import ForgetRequest
from fedortho.evaluation.case import Case

OUT = Path(__file__).parent / "results" / "published-directions.json"
TRIED_ON = "class:2"
METHODS = ("hide", "directions")
KEY = ("request", "split", "method")


def main(words: list[str] | None = None) -> None:
    original, out = opened(words, __doc__, OUT)
    data = original.load_data()
    tried = replace(data, test=data.valid)
    cells = [(TRIED_ON, "valid", method) for method in METHODS]
    cells += [(f"class:{label}", "test", method) for label in sorted(CLASSES) for method in METHODS]
    for cell in cells:
        known = read_results(out).rows if out.exists() else ()
        if any(tuple(row[key] for key in KEY) == cell for row in known):
            continue
        request, split, method = cell
        row = dict(zip(KEY, cell, strict=True))
        row |= measured(original, tried if split == "valid" else data, request, method)
        print(row, flush=True)
        what = (
            "a published ResNet-20 forgets a class by directions and by hide: accuracies and probes; no reference model"
        )
        add_row(out, row, KEY, str, what, "python benchmarks/published_directions.py")


def measured(run: fo.Run, data: fo.Dataset, request: str, method: str) -> dict[str, Any]:
    """Forget once: accuracies and probes before and after, the directions that were removed, CPU seconds."""
    started = time.process_time()
    result = fo.forget(run.load_model(), data, request, method)
    seconds = time.process_time() - started
    case = Case(result.model, run.load_model(), (), data, ForgetRequest.parse(request))
    recalls = depth_recalls(case, MeasurementCache())
    shares = {}
    for when, model, role in (("before", case.original, "original"), ("after", case.unlearned, "unlearned")):
        found = fo.accuracies_of(model, data, request)
        shares[when] = {"forget": found.forget, "retain": found.retain, "probe": recalls[role]}
    return shares | {
        "directions": result.patch.note.get("directions"),
        "cpu-seconds": round(seconds),
        "digest": result.patch.after,
    }


if __name__ == "__main__":
    main()
