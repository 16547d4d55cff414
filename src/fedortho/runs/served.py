"""The requests that a run has served, and the images that its model must not know."""

from fedortho.data.request import ForgetRequest, union_of
from fedortho.errors import FedOrthoError
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run


def served_requests(run: Run) -> list[ForgetRequest]:
    """The requests that a run has served, oldest first."""
    return [ForgetRequest.parse(served.request) for served in run.record.requests]


def excluded_by(run: Run) -> ForgetRequest | None:
    """The images that a run has forgotten or was trained without, as one request; None: there are none."""
    return run.excluded


def excluded_besides(run: Run, request: ForgetRequest) -> ForgetRequest | None:
    """As `excluded_by`, except this request."""
    names, without = run.record.data.class_names, run.settings.without
    every = [*served_requests(run), *([ForgetRequest.parse(without)] if without else [])]
    return union_of([other for other in every if other.settled(names) != request.settled(names)])


def check_unserved(run: Run, request: ForgetRequest) -> None:
    """Refuse a request that a run has served, or whose data it was trained without."""
    names, without = run.record.data.class_names, run.settings.without
    for served in run.record.requests:
        if ForgetRequest.parse(served.request).settled(names) == request.settled(names):
            other = "for another level or method give the run before that request"
            raise FedOrthoError(f"{run.path} has already forgotten {request}, by {served.method}; {other}")
    if without and ForgetRequest.parse(without).settled(names) == request.settled(names):
        raise FedOrthoError(f"{run.path} was trained without {request}; there is nothing to forget")


def index_of_request(run: Run, request: ForgetRequest) -> int:
    """The index of a request among those that a run has served; the last of equal ones."""
    last_request(run)  # refuses a run that has none
    names, served = run.record.data.class_names, served_requests(run)
    same = [place for place, other in enumerate(served) if other.settled(names) == request.settled(names)]
    if not same:
        choices = ", ".join(map(str, served))
        raise FedOrthoError(f"{run.path} has not forgotten {str(request)[:60]!r}; choose from {choices[:300]}")
    return same[-1]


def served_record(run: Run, request: ForgetRequest) -> ServedRecord:
    """The record of a request that a run has served."""
    return run.record.requests[index_of_request(run, request)]


def last_request(run: Run) -> ForgetRequest:
    """The last request that a run has served."""
    if not run.record.requests:
        raise FedOrthoError(f"{run.path} has forgotten nothing; first: fedortho forget {run.path} REQUEST --out NEW")
    return served_requests(run)[-1]
