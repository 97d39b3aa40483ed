"""
Broken variants of the product: what the tests of overload and fairness must catch.

    python -m tests.faults.broken VARIANT up --engine …

A variant replaces one decision, in the system and in its clients alike.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from reefknot.core.overload import submission
from reefknot.core.overload.submission import OpenWork, Waiting
from reefknot.engines.sqlite import admission
from reefknot.worker.attempt import StepRunner
from reefknot.worker.destinations import Destination
from reefknot.worker.queue import BoundedQueue


def _no_time_bound() -> None:
    """Submissions are admitted by count alone, whatever their deadlines are."""
    admit = submission.admit_submission

    def by_count(open_work: OpenWork, arrival: Any, rules: Any) -> Any:
        return admit(open_work, msgspec.structs.replace(arrival, deadline_ms=None), rules)

    setattr(admission, "admit_submission", by_count)  # noqa: B010 - a name that the module imported
    _begin_hopeless()


def _begin_hopeless() -> None:
    """Attempts are begun however little time is left, and one that runs out of it counts against the destination."""
    report = StepRunner._report_to_breaker

    def counted(self: Any, destination: Any, permit: Any, ran: Any, failure: Any, tenant: str) -> Any:
        if ran.timed_out is not None:
            ran = msgspec.structs.replace(ran, timed_out=msgspec.structs.replace(ran.timed_out, whole=False))
        return report(self, destination, permit, ran, failure, "")

    StepRunner._report_to_breaker = counted  # type: ignore[method-assign]
    Destination.usual = lambda self, now: 0.0  # type: ignore[method-assign]


def _first_come() -> None:
    """Neither priorities nor tenants count: who comes first is served first."""

    def by_age(queues: Mapping[str, Sequence[Waiting]], n: int, after: str = "") -> list[tuple[str, Waiting]]:
        every = [(tenant, one) for tenant, queue in queues.items() for one in queue]
        return sorted(every, key=lambda found: found[1][2])[:n]

    def everything(self: OpenWork, priority: int, tenant: str) -> int:
        return sum(self._counts.values())

    setattr(admission, "in_turns", by_age)  # noqa: B010
    OpenWork.ahead = everything  # type: ignore[method-assign]
    OpenWork.lowest = lambda self, tenant=None: None  # type: ignore[method-assign]
    OpenWork.submitted_by_tenant = lambda self: {"": self.submitted}  # type: ignore[method-assign]
    BoundedQueue.behind = lambda self, priority, tenant: 0  # type: ignore[method-assign]


VARIANTS: dict[str, Callable[[], None]] = {
    "no_time_bound": _no_time_bound,
    "begin_hopeless": _begin_hopeless,
    "first_come": _first_come,
}


def break_product(variant: str) -> None:
    """Break this process."""
    VARIANTS[variant]()


if __name__ == "__main__":
    from reefknot.cli import main

    break_product(sys.argv.pop(1))
    sys.exit(main())
