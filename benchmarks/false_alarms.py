"""How often audits fail a network that never saw the class, and how often they fail one that did.

    python benchmarks/false_alarms.py [--classes 0,4] [--stages 2,3]

Written down before its first run. An audit that fails `erase` says something only if it passes networks that never saw
the class. fashion-mini, vgg-mini, six epochs, as in benchmarks/erasing_small.py; all ten classes, since nothing is
chosen here; test images; the quick audits (C1, C2, C3 by its prototype, C5, C6) with the limits of the package. Of each
class there are three reference models, of seeds 0 to 2. Every model below is judged three times, each time against two
of them; a reference is judged against the other two, so once:

- retrained: a reference model itself, which is what exactness would give;
- retrained, then erased: what `erase` makes of a reference, judged against the other two and what it makes of those;
- erased and hidden: what the levels `erase` and `hide` make of the original.

The first two never saw the class: their failures are false alarms. The last should fail: its passes are misses.
Networks were erased with two stages reset, as the level then did, original and references alike. Three stages (all but
the first, the level's default since) were added after those rows: first for three classes of which two had failed, then
for all. A row that is there is not measured again; networks stay in runs/false-alarms, so a killed process goes on.
Processors of another kind round otherwise, and so make other networks from the same seeds: rows are kept by processor,
and each has rows of its own.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from erasing_small import SUMMARISED, TRAINING
from result_files import add_row, read_results
from torch import nn

import fedortho as fo
from fedortho.audits import run_audits
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.result import label
from fedortho.audits.retention import RETENTION
from fedortho.evaluation.case import Case
from fedortho.requests.counterfactuals import counterfactuals
from fedortho.requests.levels import chosen_method
from fedortho.requests.references import train_references
from fedortho.requests.run_context import open_context
from fedortho.storage.provenance import environment

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs" / "false-alarms"
OUT = HERE / "results" / "false-alarms.json"
WHAT = "audits of networks that never saw a class, and of erased and hidden ones; fashion-mini, test images"
COMMAND = "python benchmarks/false_alarms.py"
REFERENCES = 3
TREATED = "retrained, then erased"
STAGES = (2, 3)  # that erase resets, one after the other
DETAILED = ("C1", "C3")  # audits whose recalls are kept
KEY = ("processor", "request", "kind", "number")
Judged = tuple[str, int, nn.Module, tuple[nn.Module, ...], tuple[nn.Module, ...]]
Models = tuple[nn.Module, ...]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default="0,1,2,3,4,5,6,7,8,9", help="labels, separated by commas")
    parser.add_argument("--stages", default=",".join(map(str, STAGES)), help="how many stages erase resets")
    parser.add_argument("--out", type=Path, default=OUT, help="result file")
    parser.add_argument("--runs", type=Path, default=RUNS, help="directory of the networks")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    data = fo.load_images("fashion-mini")
    original = fo.train_run(given.runs / "original", TRAINING)
    for number in map(int, given.classes.split(",")):
        judge_class(original, fo.ForgetRequest.parse(f"class:{number}"), data, given)


def judge_class(original: fo.Run, request: fo.ForgetRequest, data: fo.Dataset, given: argparse.Namespace) -> None:
    """Make the networks of a class and add a row for each verdict on them that is missing."""
    rows = read_results(given.out).rows if given.out.exists() else ()
    about = {"processor": processor(), "request": str(request)}
    done = {(row["kind"], row["number"]) for row in rows if about.items() <= row.items()}
    stages = [int(number) for number in given.stages.split(",")]
    if {(kind, number) for kind in kinds(stages) for number in range(REFERENCES)} <= done:
        return
    before, cache = original.load_model(), MeasurementCache()
    for kind, number, model, references, alike in judged(original, request, data, given.runs, stages):
        if (kind, number) not in done:
            case = Case(model, before, references, data, request, counterfactuals=alike)
            audits = run_audits(case, "quick", cache=cache)
            row: dict[str, Any] = {**about, "name": data.train.names[int(request.classes[0])]}
            row |= {"kind": kind, "number": number, "label": label(audits)}
            results = (*audits, RETENTION(case, cache))
            row["audits"] = {each.name: {key: getattr(each, key) for key in SUMMARISED} for each in results}
            row["details"] = {each.name: dict(each.details) for each in audits if each.name in DETAILED}
            add_row(given.out, row, KEY, order, WHAT, COMMAND)
            print(row["name"], kind, number, row["label"], flush=True)


def processor() -> str:
    """The kind of processor and its vector instructions."""
    here = environment()
    return f"{here.processor} {here.instructions}"


def kinds(stages: Sequence[int]) -> list[str]:
    """Names of the kinds of networks: the first two do not depend on stages."""
    return ["retrained", "hidden", *(f"{kind} of {at} stages" for at in stages for kind in (TREATED, "erased"))]


def judged(
    original: fo.Run, request: fo.ForgetRequest, data: fo.Dataset, runs: Path, stages: Sequence[int]
) -> Iterator[Judged]:
    """Kind, number, model, references and counterfactuals of each verdict; the number is the reference left out."""
    trained = list(islice(train_references(original, request, (), runs / "references", data, None), REFERENCES))
    references = models(trained)
    hidden = forgotten(original, request, data, runs / f"hide-{request.word}", level="hide")
    for number in range(REFERENCES):
        yield "retrained", number, references[number], without(references, number), ()
        yield "hidden", number, hidden, without(references, number), ()
    for at in stages:
        method = chosen_method(original, "regrow", changes={"stages": at})
        treated = models(counterfactuals(open_context(original, data), method, request, trained, runs / "treated"))
        erased = forgotten(original, request, data, runs / f"erase{at}-{request.word}", method=method)
        for number in range(REFERENCES):
            compared = without(references, number), without(treated, number)
            yield f"{TREATED} of {at} stages", number, treated[number], *compared
            yield f"erased of {at} stages", number, erased, *compared


def models(runs: Sequence[fo.Run]) -> Models:
    return tuple(run.load_model() for run in runs)


def without(each: Models, number: int) -> Models:
    """All but one, which is judged or left out."""
    return tuple(model for at, model in enumerate(each) if at != number)


def forgotten(original: fo.Run, request: fo.ForgetRequest, data: fo.Dataset, place: Path, **how: Any) -> nn.Module:
    """What a level or a method makes of the original, made once."""
    if not (place / "run.json").exists():
        fo.forget_run(original, request, out=place, hide_first=False, data=data, **how)
    return fo.open_run(place).load_model()


def order(row: Any) -> Any:
    return row["processor"], row["request"], kinds(range(1, 99)).index(row["kind"]), row["number"]


if __name__ == "__main__":
    main()
