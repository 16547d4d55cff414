"""What an audit is: an attempt to recover the forget set, or to tell the unlearned model from a retrained one."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.result import AuditResult, Limit
from fedortho.evaluation.case import Case

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Audit:
    """One audit, as the table has it: id, title, limits, budget and the function that runs it.

    `run(case, cache, budget)` returns the result; `budget` is "quick" or "full", `cache` keeps shared measurements.
    """

    name: str  # C1
    title: str
    run: Callable[[Case, MeasurementCache, str], AuditResult]
    limits: tuple[Limit, ...]
    is_quick: bool = True  # part of the quick budget

    def __call__(self, case: Case, cache: MeasurementCache | None = None, budget: str = "quick") -> AuditResult:
        """The result, with name, title and seconds filled in; an audit that raises is an ERROR, which is shown."""
        started = time.perf_counter()
        try:
            result = self.run(case, cache or MeasurementCache(), budget)
        except Exception as error:  # any: a failing audit is a result
            logger.warning("audit %s failed", self.name, exc_info=error)
            result = AuditResult("ERROR", f"{self.title}: {str(error) or type(error).__name__}")
        return replace(result, name=self.name, title=self.title, seconds=time.perf_counter() - started)
