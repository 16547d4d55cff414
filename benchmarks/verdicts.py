"""Verdicts on the edited models of benchmarks/comparison.py: metrics and audits of each method.

    python benchmarks/verdicts.py --data-dir ../shared/data
    python benchmarks/verdicts.py --data-dir ../shared/data --audit full --shadows 16 --models vgg-mini --seeds 0

For every original of the manifest and every method: metrics and the quick audits, and C5 where there is a second
reference, against the reference of the original's own seed. `retrain` is a second retrained model, of another seed.
Resumes where it was stopped; verdicts go to runs/verdicts/NETWORK-METHOD.json and .txt (those of the full audits end in
-full), one row each to benchmarks/results/verdicts.json.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comparison import MODELS
from manifest import REPORTED, SEEDS, benchmark_parser, open_network, original_name, reference_names
from result_files import add_row

from fedortho.audits.judge import judge_case
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.verdict import Verdict
from fedortho.cli.console import out
from fedortho.cli.verdict import print_verdict
from fedortho.data.request import ForgetRequest
from fedortho.evaluation.metric_suite import MetricSuite
from fedortho.requests.references import case_of, find_references, reference_cost
from fedortho.requests.shadowing import shadow_plan, shadow_settings
from fedortho.runs.run import Run, open_run, served_record
from fedortho.storage.files import read_json, write_json, write_text
from fedortho.storage.records import to_json

HERE = Path(__file__).parent
PAGES = MODELS.parent / "verdicts"
METHODS = "hide,directions,paper,ssd,salun,finetune,logit-mask,retrain"
SUMMARISED = ("outcome", "value", "limit", "unlearned", "original", "reference")  # of each audit


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", default=",".join(SEEDS))
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", default="0,1,2", help="seeds of the originals")
    parser.add_argument("--audit", default="quick", help="quick or full")
    parser.add_argument("--shadows", type=int, default=0, help="shadow models for the membership audit (full)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "verdicts.json", help="result file")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    for model in arguments.models.split(",") if arguments.models else []:
        for seed in SEEDS[model]:
            if str(seed) in arguments.seeds.split(","):
                judge_original(model, seed, arguments)


def judge_original(model: str, seed: int, arguments: Any) -> None:
    """Judge every method's model of one original, and add a row for each."""
    original = open_network(arguments.networks, original_name(model, seed), arguments.data_dir)
    request = ForgetRequest.parse(REPORTED)
    for name in reference_names(original.path.name):
        open_network(arguments.networks, name, arguments.data_dir)
    references = find_references(original, request, arguments.networks)
    data, cache, suite = original.load_data(arguments.data_dir), MeasurementCache(), None
    loaded: dict[str, Any] = {}
    for method in arguments.methods.split(","):
        page = PAGES / f"{model}-seed{seed}-{method}{'-full' if arguments.audit == 'full' else ''}.json"
        forgot = outcome(original, method, references)
        if forgot is None or not references:
            continue
        others = [run for run in references if run.path != forgot.path]
        if is_current(page, forgot, others, shadows=bool(arguments.shadows)):
            continue
        case = case_of(forgot, request, data, original, others[:3])
        kept = [loaded.setdefault(str(run.path), model) for run, model in zip(others[:3], case.references, strict=True)]
        before = loaded.setdefault("original", case.original)  # one object each, for the measurements in the cache
        case = replace(case, original=before, references=tuple(kept))
        if suite is None or method == "retrain":
            suite = MetricSuite(case)
        only = ["C1", "C2", "C3", "C5", "C6"] if arguments.audit == "quick" and len(others) > 1 else []
        facts = about(original, forgot, others[0], method, data)
        if arguments.shadows and method != "retrain":
            entry = served_record(forgot, request)
            place = MODELS.parent / "shadows"
            settings = shadow_settings(original, arguments.shadows)
            shadows = shadow_plan(original, entry, place, settings, torch.device("cpu"))
            case = replace(case, shadows=shadows)
        verdict = judge_case(case, arguments.audit, only=only, suite=suite, cache=cache, **facts)
        write(page, verdict)
        add(arguments.out, page, verdict)


def is_current(page: Path, forgot: Run, references: list[Run], *, shadows: bool) -> bool:
    """Whether the file has the verdict on this model by this reference, with every audit that can run."""
    if not page.exists():
        return False
    verdict = read(page)
    same = verdict.digests["after"] == forgot.record.model.digest
    same &= verdict.digests["reference"] == references[0].record.model.digest
    ran = {audit.name for audit in verdict.audits if audit.outcome != "NOT RUN"}
    return same and ("C5" in ran or len(references) < 2) and ("C4" in ran or not shadows)


def outcome(original: Run, method: str, references: list[Run]) -> Run | None:
    """The edited model of a method; for `retrain` a reference of another seed."""
    if method == "retrain":
        return references[1] if len(references) > 1 else None
    path = MODELS / f"{original.path.name}-{ForgetRequest.parse(REPORTED).word}" / method
    return open_run(path) if (path / "run.json").exists() else None


def about(original: Run, forgot: Run, reference: Run, method: str, data: Any) -> dict[str, Any]:
    digests = {"before": original.record.model.digest, "after": forgot.record.model.digest}
    digests["reference"] = reference.record.model.digest
    facts: dict[str, Any] = {"method": method, "digests": digests}
    record = original.record
    facts["origin"] = {"run": forgot.path.name, "data": to_json(record.data), "settings": dict(record.settings)}
    facts["retrain_seconds"] = sum(epoch.seconds for epoch in reference.history())
    if method == "retrain":
        return facts | {"cost": reference_cost(forgot, data)}
    entry = served_record(forgot, ForgetRequest.parse(REPORTED))
    return facts | {"settings": entry.settings, "cost": entry.cost}


def read(page: Path) -> Verdict:
    """A verdict as it was written, with the numbers that were measured."""
    return Verdict.from_json(read_json(page), page)


def write(page: Path, verdict: Verdict) -> None:
    write_json(page, verdict.to_json())
    out.width = 110
    with out.capture() as shown:
        print_verdict(verdict)
    write_text(page.with_suffix(".txt"), shown.get())
    print(page.name, verdict.label, flush=True)


def add(results: Path, page: Path, verdict: Verdict) -> None:
    """Add the verdict's row to the results, or replace the one of the same network, method and audits."""
    metrics = {metric.name: metric for metric in verdict.metrics}
    settings = verdict.origin["settings"]
    row: dict[str, Any] = {"page": page.stem, "method": verdict.method, "label": verdict.label}
    row |= {"model": settings["model"], "seed": settings["seed"]}
    for key in ("forget-accuracy", "retain-accuracy", "mia-confidence", "average-gap", "tug-of-war"):
        row[key] = {"value": metrics[key].value, "reference": metrics[key].reference}
    row["audits"] = {audit.name: {key: getattr(audit, key) for key in SUMMARISED} for audit in verdict.results}
    if page.stem.endswith("-full"):
        row["details"] = {audit.name: dict(audit.details) for audit in verdict.audits}
    command = "python benchmarks/verdicts.py --data-dir ../shared/data"
    what = "audits of methods, CIFAR-10, class 1, against retrained models"
    add_row(results, row, ("page",), lambda other: other["page"], what, command)


if __name__ == "__main__":
    main()
