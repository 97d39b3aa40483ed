"""
Broken variants of the product: what the tests of overload and fairness must catch.

    python -m tests.faults.broken VARIANT up --engine …

A variant replaces one decision, in the system and in its clients alike. It does so by a `patch` that it is given: for
good in a process of its own, or as pytest's `monkeypatch.setattr`, which restores the product after the test.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from reefknot.queue.model import submission
from reefknot.queue.model.submission import OpenWork, Waiting
from reefknot.queue.worker.destinations import Destination, Outages
from reefknot.queue.worker.pool import BoundedQueue
from reefknot.stores.sqlite import admission
from reefknot.stores.table import items as work_items

Patch = Callable[[Any, str, Any], None]
"""Replaces an attribute: `setattr`, or one that remembers what was there."""
ORDER = (admission, work_items)
"""The modules of the engines that import the decision about the order of work by name."""


def _no_time_bound(patch: Patch) -> None:
    """Submissions are admitted by count alone, whatever their deadlines are."""
    admit = submission.admit_submission

    def by_count(open_work: OpenWork, arrival: Any, rules: Any) -> Any:
        return admit(open_work, msgspec.structs.replace(arrival, deadline_ms=None), rules)

    patch(submission, "admit_submission", by_count)
    _begin_hopeless(patch)


def _begin_hopeless(patch: Patch) -> None:
    """Attempts are begun however little time is left, and one that runs out of it counts against the destination."""
    report = Outages.report

    def counted(self: Any, attempt: Any, destination: Any, permit: Any, ran: Any, failure: Any) -> Any:
        if ran.timed_out is not None:
            ran = msgspec.structs.replace(ran, timed_out=msgspec.structs.replace(ran.timed_out, whole=False))
        assignment = msgspec.structs.replace(attempt.assignment, tenant_id=None)
        return report(self, msgspec.structs.replace(attempt, assignment=assignment), destination, permit, ran, failure)

    patch(Outages, "report", counted)
    patch(Destination, "usual", lambda self, now: 0.0)


def _first_come(patch: Patch) -> None:
    """Neither priorities nor tenants count: who comes first is served first."""

    def by_age(queues: Mapping[str, Sequence[Waiting]], n: int, after: str = "") -> list[tuple[str, Waiting]]:
        every = [(tenant, one) for tenant, queue in queues.items() for one in queue]
        return sorted(every, key=lambda found: found[1][2])[:n]

    def everything(self: OpenWork, priority: int, tenant: str) -> int:
        return sum(self._counts.values())

    for engine in ORDER:
        patch(engine, "in_turns", by_age)
    patch(OpenWork, "ahead", everything)
    patch(OpenWork, "lowest", lambda self, tenant=None: None)
    patch(OpenWork, "submitted_by_tenant", lambda self: {"": self.submitted})
    patch(BoundedQueue, "behind", lambda self, priority, tenant: 0)


VARIANTS: dict[str, Callable[[Patch], None]] = {
    "no_time_bound": _no_time_bound,
    "begin_hopeless": _begin_hopeless,
    "first_come": _first_come,
}


def break_product(variant: str, patch: Patch = setattr) -> None:
    """Break this process."""
    VARIANTS[variant](patch)


if __name__ == "__main__":
    from reefknot.console.cli import main

    break_product(sys.argv.pop(1))
    sys.exit(main())
