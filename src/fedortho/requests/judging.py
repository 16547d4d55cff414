"""Judge a run that has served a request."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedortho.audits import Membership
from fedortho.audits.verdict import Verdict, judge_case
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.requests.references import case_of
from fedortho.runs.run import Run
from fedortho.runs.served import index_of_request
from fedortho.statistics.cost import Cost, flops_per_image
from fedortho.storage.files import write_json


def entry_for(run: Run, request: ForgetRequest) -> Mapping[str, Any]:
    """What a run records of having served a request."""
    return dict(run.record["requests"][index_of_request(run, request)])


def judge_run(
    run: Run,
    request: ForgetRequest,
    data: Dataset,
    original: Run,
    *,
    reference: Run | None = None,
    second: Run | None = None,
    audit: str = "quick",
    only: Sequence[str] = (),
    device: torch.device | str = "cpu",
    watch: Callable[[str], None] | None = None,
    membership: Membership | None = None,
) -> Verdict:
    """Judge a run that has served a request; the verdict is also written into its directory as verdict.json.

    Not so if `only` some audits were asked for: they would take the place of a whole verdict.
    """
    entry = entry_for(run, request)
    request = ForgetRequest.parse(entry["request"])  # one spelling: verdicts are found by it
    case = case_of(run, request, data, original, reference, second, device)
    seconds = None if reference is None else sum(epoch.seconds for epoch in reference.history())
    if not seconds and (history := original.history()):
        kept = len(case.kept_train) / max(len(data.train), 1)
        seconds = kept * sum(epoch.seconds for epoch in history)
    verdict = judge_case(
        case,
        audit,
        only=only,
        watch=watch,
        membership=membership,
        method=entry.get("method", "hide"),
        edited={key: entry[key] for key in ("kernels", "directions", "ratio", "scrub") if key in entry},
        cost=_cost(entry, original.load_model(), data),
        retrain_seconds=seconds or None,
        settings=entry.get("settings", {}),
        origin={"run": run.path.name, "data": run.record["data"], "settings": run.record["settings"]},
        digests={"before": original.record["model"]["digest"], "after": run.record["model"]["digest"]}
        | ({} if reference is None else {"reference": reference.record["model"]["digest"]}),
    )
    if not only and (audit != "none" or not (run.path / "verdict.json").exists()):  # one with audits says more
        write_json(run.path / "verdict.json", verdict.as_mapping())
    return verdict


def _cost(entry: Mapping[str, Any], model: nn.Module, data: Dataset) -> Cost | None:
    """What serving a request took, as its run tells: measured by a meter, or in the words of the method itself."""
    if entry.get("cost"):
        return Cost(**entry["cost"])
    if "seconds" not in entry:
        return None
    read = sum(entry["images-read"].values())
    wire = entry.get("wire", {}).values()
    up, down, exchanges = (sum(tally[key] for tally in wire) for key in ("bytes_up", "bytes_down", "exchanges"))
    flops = flops_per_image(model, data.train.shape)[0] * float(read) + sum(entry.get("tail-flops", {}).values())
    return Cost(sum(entry["seconds"].values()), read, 0, flops, exchanges, up, down)
