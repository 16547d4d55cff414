"""The trials of a method at given ratios: what more editing costs."""

from collections.abc import Sequence

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.methods.hide import Hide
from fedortho.models.patch import NOTHING
from fedortho.unlearning.calibrate import RATIOS
from fedortho.unlearning.kernels import choose_weighting, peak_queries, rank_parts, weakened
from fedortho.unlearning.task import start_task
from fedortho.unlearning.trials import Candidate, Trial, baseline_queries, make_runner, read_baseline

IMAGES = 4000  # of the retain set, and a quarter as many of the forget set


def trace_frontier(
    method: Hide, model: nn.Module, engine: Engine, request: ForgetRequest, ratios: Sequence[float] = RATIOS
) -> list[Trial]:
    """The trial of each ratio, after one without any edit (ratio 0)."""
    task = start_task(model, engine, request, method)
    weighting = choose_weighting(task, method)
    peaks = engine.measure(task.model, peak_queries(task, weighting, method.statistics_images))
    rankings = rank_parts(task, peaks, weighting, method.contrast)
    candidates = [Candidate(NOTHING, 0.0), *(Candidate(weakened(task, rankings, method, r), r) for r in ratios)]
    baseline = read_baseline(task, method, engine.measure(task.model, baseline_queries(task, method)))
    runner = make_runner(task, method, baseline, repair=method.repair)
    runner.looks = [(*task.forget_sets(IMAGES // 4), task.retain_set(IMAGES, "valid"))]
    return runner.attempt(candidates)
