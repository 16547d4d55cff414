"""What a run has forgotten: the requests that it served, and what its model must not know."""

from fedortho.data.request import ForgetRequest, union_of
from fedortho.errors import FedOrthoError
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run


def served_requests(run: Run) -> list[ForgetRequest]:
    return [ForgetRequest.parse(served.request) for served in run.record.requests]


def excluded_by(run: Run) -> ForgetRequest | None:
    """All that a run's model must not know: what it has forgotten, and what it was trained without."""
    without = run.settings.without
    return union_of([*served_requests(run), *([ForgetRequest.parse(without)] if without else [])])


def excluded_besides(run: Run, request: ForgetRequest) -> ForgetRequest | None:
    """All that a run's model must not know, but for this request: it need not have stayed."""
    names, without = run.record.data.class_names, run.settings.without
    every = [*served_requests(run), *([ForgetRequest.parse(without)] if without else [])]
    return union_of([other for other in every if other.settled(names) != request.settled(names)])


def index_of_request(run: Run, request: ForgetRequest) -> int:
    """Which of a run's requests this is; the last of equal ones."""
    last_request(run)  # refuses a run that has none
    names, served = run.record.data.class_names, served_requests(run)
    same = [place for place, other in enumerate(served) if other.settled(names) == request.settled(names)]
    if not same:
        there = ", ".join(map(str, served))
        raise FedOrthoError(f"{run.path} has not forgotten {str(request)[:60]!r}; choose from {there[:300]}")
    return same[-1]


def served_record(run: Run, request: ForgetRequest) -> ServedRecord:
    """The record of a request that a run has served."""
    return run.record.requests[index_of_request(run, request)]


def last_request(run: Run) -> ForgetRequest:
    """What a run was asked to forget last."""
    if not run.record.requests:
        raise FedOrthoError(f"{run.path} has forgotten nothing; first: fedortho forget {run.path} REQUEST --out NEW")
    return served_requests(run)[-1]
