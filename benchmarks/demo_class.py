"""The class of `make demo`: the one of which a probe reads most in the original beyond a network that never saw it.

    python benchmarks/demo_class.py [--runs DIR]

fashion-mini and vgg-mini with the two epochs of the demo, seed 0. For each class one network is retrained without it,
and the linear probe of C1 is read on validation images, at every depth, in the original and in that network. The class
with the largest gap is that of the demo (of equal ones the first): there C1 can tell something. No network that forgot
anything is looked at. Trained runs stay in DIR, so a killed process goes on.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from result_files import write_results

import fedortho as fo
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.probe import depth_recalls
from fedortho.evaluation.case import Case

HERE = Path(__file__).parent
SETTINGS = fo.TrainSettings(data="fashion-mini", model="vgg-mini", epochs=2, threads=1)
WHAT = "recall of a linear probe on validation images: original and retrained without the class, by depth"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "demo-class", help="directory of the runs")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "demo-class.json", help="result file")
    given = parser.parse_args(words)
    original = fo.train_run(given.runs / "original", SETTINGS)
    data, rows = original.load_data(), list[Mapping[str, object]]()
    for label, name in enumerate(data.train.names):
        request = fo.ForgetRequest.parse(f"class:{label}")
        retrained = fo.train_run(given.runs / f"without-{label}", replace(SETTINGS, without=str(request)))
        models = (original.load_model(), original.load_model(), (retrained.load_model(),))
        recalls = depth_recalls(Case(*models, replace(data, test=data.valid), request), MeasurementCache())
        gaps = {depth: recalls["original"][depth] - recalls["reference"][depth] for depth in recalls["original"]}
        row = {"request": str(request), "name": name, "original": recalls["original"]}
        rows.append({**row, "retrained": recalls["reference"], "gap": max(gaps.values())})
        print(rows[-1], flush=True)
        write_results(given.out, WHAT, "python benchmarks/demo_class.py", rows)


if __name__ == "__main__":
    main()
