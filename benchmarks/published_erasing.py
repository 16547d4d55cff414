"""The published ResNet-20, trained for 200 epochs elsewhere, erases a class: what is kept, by passes and stages.

    python benchmarks/published_erasing.py --networks ../shared/networks --data-dir ../shared/data

Settings of `regrow` are tried on bird, a class on which choices are made, by validation images (half of the test
images). What was chosen is then confirmed once on the three drawn classes of published.py, by the other half. There is
no reference model: retraining would take 200 epochs. Cells that have a row are left alone; several processes started
alike share the work. Rows go to benchmarks/results/published-erasing.json.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from published import CLASSES, opened
from result_files import add_row, read_results

from fedortho.data.request import ForgetRequest
from fedortho.engines.cost import flops_per_image
from fedortho.errors import Busy
from fedortho.methods import unlearn
from fedortho.requests.run_context import RunContext, method_for_run, open_context
from fedortho.storage.files import locked

OUT = Path(__file__).parent / "results" / "published-erasing.json"
TRAINED = 200  # epochs, by its publisher
TRIED_ON = "class:2"
TRIED: tuple[Mapping[str, Any], ...] = (
    {"epochs": 2},
    {"epochs": 5},
    {"epochs": 10},
    {"epochs": 5, "frozen": True},
    {"epochs": 3, "stages": 1, "frozen": True},
)
CHOSEN: Mapping[str, Any] = {"epochs": 10}
KEY = ("request", "split", "settings")


def main(words: list[str] | None = None) -> None:
    original, out = opened(words, __doc__, OUT)
    context = open_context(original, original.load_data())
    cells = [(TRIED_ON, "valid", settings) for settings in TRIED]
    cells += [(f"class:{label}", "test", CHOSEN) for label in sorted(CLASSES)]
    for request, split, settings in cells:
        name = ", ".join(f"{key}={value}" for key, value in settings.items())
        try:
            with locked(out.parent / f"published-{request}-{split}-{name}"):
                known = read_results(out).rows if out.exists() else ()
                if not any((row["request"], row["split"], row["settings"]) == (request, split, name) for row in known):
                    row = {"request": request, "split": split, "settings": name} | measured(
                        context, request, split, settings
                    )
                    print(row, flush=True)
                    what = "a published ResNet-20 erases a class: accuracies and cost; no reference model"
                    add_row(out, row, KEY, str, what, "python benchmarks/published_erasing.py")
        except Busy:
            continue


def measured(context: RunContext, request: str, split: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Erase once: accuracies before and after on images of one split, FLOPs and CPU seconds."""
    method, asked = method_for_run(context.run, "regrow", settings), ForgetRequest.parse(request)
    on = context if split == "test" else replace(context, data=replace(context.data, test=context.data.valid))
    started = time.process_time()
    with context.engine() as engine:
        result = unlearn(context.run.load_model(), engine, asked, method)
    seconds = time.process_time() - started
    ends = {"before": context.run.load_model(), "after": result.model}
    found = {when: on.accuracies(model, asked) for when, model in ends.items()}
    shares = {when: {"forget": one.forget, "retain": one.retain} for when, one in found.items()}
    return shares | {
        "flops": result.cost.flops,
        "share": result.cost.flops / training_flops(context),
        "cpu-seconds": round(seconds),
        "digest": result.patch.after,
    }


def training_flops(context: RunContext) -> float:
    """Of the training by its publisher, without what it computed beside forward and backward passes."""
    images = context.data.train
    return float(TRAINED * len(images) * flops_per_image(context.run.load_model(), images.shape)[1])


if __name__ == "__main__":
    main()
