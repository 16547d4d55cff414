"""The published ResNet-20, imported as downloaded, forgets three classes; plainly trained references stand beside it.

    python benchmarks/published.py --networks ../shared/networks --data-dir ../shared/data --references DIR

--references has without-6.pt, without-8.pt and without-9.pt, which plain_training.py writes. The classes were drawn
before the first run by random.Random("fedortho published ResNet-20 2026-11-17").sample(range(10), 3). Everything is
decided on half of the test images, which becomes the validation set; accuracies and audits are of the other half, and
the original's also of all. Goes on where it was stopped, and writes benchmarks/results/published.json.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from result_files import add_row, write_results

import fedortho as fo
from fedortho.storage.records import to_json

OUT = Path(__file__).parent / "results" / "published.json"
CLASSES = random.Random("fedortho published ResNet-20 2026-11-17").sample(range(10), 3)
WEIGHTS = Path("third-party") / "resnet20-12fca82f.th"
WHAT = "a published ResNet-20 forgets three drawn classes"


def imported(place: Path, weights: Path, data_dir: str, *, held_out: float = 0.5, without: str = "") -> fo.Run:
    """The run of this checkpoint; made at the first call."""
    if (place / "run.json").exists():
        return fo.open_run(place)
    settings = fo.ImportSettings(
        model="resnet20:resnet20",
        data="cifar10",
        data_dir=data_dir,
        scale="imagenet",
        valid_from_test=held_out,
        without=without,
    )
    return fo.import_run(place, weights, settings)


def opened(words: list[str] | None, about: str | None, out: Path) -> tuple[fo.Run, Path]:
    """The run that the flags of a script name, and where its rows go; half of the test images are set aside."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, default=Path("../shared/networks"))
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--runs", type=Path, default=Path("runs/published"), help="directory for the runs")
    parser.add_argument("--out", type=Path, default=out)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    weights = given.networks / WEIGHTS
    return imported(given.runs / "original", weights, given.data_dir).at(given.data_dir), given.out


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, default=Path("../shared/networks"))
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--references", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/published"), help="directory for the runs")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    published = given.networks / WEIGHTS
    command = "python benchmarks/published.py --references DIR"
    whole = imported(given.runs / "whole", published, given.data_dir, held_out=0.0)
    original = imported(given.runs / "original", published, given.data_dir)
    data = original.load_data(given.data_dir)
    if not OUT.exists():
        write_results(OUT, WHAT, command, [])
    for label in sorted(CLASSES):
        name, request = data.train.names[label], f"class:{label}"
        reference = imported(
            given.runs / f"without-{label}", given.references / f"without-{label}.pt", given.data_dir, without=request
        )
        place = given.runs / f"forgot-{label}"
        if not (place / "run.json").exists():
            fo.forget_run(original, request, "hide", out=place)
        run = fo.open_run(place)
        verdict = fo.judge_run(run, options=fo.JudgeOptions(reference=reference.path), data=data)
        add_row(OUT, row_of(name, request, whole, data, run, reference, verdict), ["request"], str, WHAT, command)
        print(verdict, flush=True)


def row_of(
    name: str, request: str, whole: fo.Run, data: fo.Dataset, run: fo.Run, reference: fo.Run, verdict: fo.Verdict
) -> dict[str, Any]:
    """What is told about one class."""
    served = run.record.requests[-1]
    models = {"unlearned": run.load_model(), "reference": reference.load_model()}
    ends = {who: fo.accuracies_of(model, data, request) for who, model in models.items()}
    return {
        "class": name,
        "request": request,
        "original, all test images": whole.record.result.test_accuracy,
        "before": {"forget": served.before.forget, "retain": served.before.retain},
        "accuracies": {who: {"forget": found.forget, "retain": found.retain} for who, found in ends.items()},
        "effect": None if served.effect is None else to_json(served.effect),
        "audits": {audit.name: {"outcome": audit.outcome, "finding": audit.finding} for audit in verdict.audits},
        "sentence": verdict.sentence,
    }


if __name__ == "__main__":
    main()
