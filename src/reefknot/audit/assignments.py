"""
Events of every assignment, from its submission to its end, and the rules that its admission refers to.

There are four of them for each assignment, and two for an ingestion job, so they are small: `submitted`, `routing`,
`admission`, `completed`. Type, work, tenant and time identify such an event, and it has no id of its own. The rules of
a queue are written once, by `RulesRecorder`; an admission has only their hash.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from math import inf
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from reefknot.audit.journal import Journal, about_item, envelope
from reefknot.audit.model.event import (
    RESULT_DIGITS,
    Completed,
    Event,
    Quarantined,
    Requeued,
    RulesStored,
    Submitted,
    timestamp,
)
from reefknot.core.clock import Clock
from reefknot.queue.model.admission import ADMISSION_VERSION, Rules, rules_content
from reefknot.queue.model.messages import ExecAssignment, ExecResult
from reefknot.queue.model.results import answer_of
from reefknot.queue.model.work import (
    CRASH_LIMIT,
    WorkItem,
    WorkState,
    assignment_and_tenant,
    attempts_begun,
    is_ingestion,
    runs_now,
)
from reefknot.runtime.processes import ProcessIdentity, own_identity

STORE_AGAIN_S = 3600.0
"""How often the rules in force are written: retention may have removed them."""
WORKER_VANISHED, ORCHESTRATOR_VANISHED = "its worker vanished", "its orchestrator vanished"


def briefly_about(work: ExecAssignment | ExecResult | WorkItem, wall: float) -> dict[str, Any]:
    """The envelope of such an event. A correlation that is only the work's own id is left out."""
    correlation = work.correlation_id if isinstance(work, WorkItem) else work.request_id
    other = None if correlation == work.assignment_id else correlation
    return {
        "timestamp": timestamp(wall),
        "tenant_id": work.tenant_id,
        "work_id": work.assignment_id,
        "correlation_id": other,
        "trace_id": work.trace_id,
    }


def submitted_event(item: WorkItem, wall: float, who: ProcessIdentity | None = None) -> Submitted:
    """The event of an assignment that this process submits, or another one, `who`."""
    mine = who or own_identity()
    parent = assignment_and_tenant(item.extra.parent)[0] or None
    return Submitted(**briefly_about(item, wall), actor=mine.user, host=mine.host, process=mine.process, parent=parent)


def completed_event(
    result: ExecResult,
    body: bytes | None,
    wall: float,
    *,
    since_ms: int | None = None,
    attempts: int | None = None,
    worker_id: str | None = None,
) -> Completed:
    """
    The event of an assignment that ended with this result, stored as `body`, or not stored.

    `since_ms` is when the assignment was submitted (ms UTC). Attempts and worker are those of the result unless given;
    a result of the baseline names no worker.
    """
    if attempts is None and result.retries_used is not UNSET:
        attempts = result.retries_used + 1
    return Completed(
        **briefly_about(result, wall),
        status=result.status.value,
        operation=result.job.type,
        attempts=attempts,
        duration_ms=None if since_ms is None else max(0, int(wall * 1000) - since_ms),
        worker_id=worker_id or result.worker_id or None,
        result_hash="" if body is None else sha256(body).hexdigest()[:RESULT_DIGITS],
    )


def job_completed_event(item: WorkItem, result: bytes, wall: float) -> Completed:
    """The event of an ingestion job that succeeded with this result."""
    return Completed(
        **briefly_about(item, wall),
        status="success",
        operation=item.kind,
        attempts=item.attempts + 1,
        duration_ms=max(0, int(wall * 1000) - item.created_at),
        result_hash=sha256(result).hexdigest()[:RESULT_DIGITS],
    )


def ended_event(item: WorkItem, wall: float, *, cancelled: str | None = None) -> Completed:
    """
    The event of an item that ended without a stored result.

    With `cancelled`, the reason, the item is given as it was before; an attempt that ran then has begun, and counts.
    """
    attempts = attempts_begun(item)
    ran = max(0.0, round(wall - item.updated_at / 1000, 6)) if runs_now(item) else None
    if cancelled is not None:
        item = msgspec.structs.replace(item, state=WorkState.CANCELLED, reason=cancelled, result=None)
    result = answer_of(item)
    assert result is not None
    ended = completed_event(result, None, wall, since_ms=item.created_at, attempts=attempts)
    return msgspec.structs.replace(ended, attempt_seconds=ran)


def vanished_events(item: WorkItem, wall: float) -> list[Event]:
    """
    The events of an item after its owner vanished: it is back in the queue, or in quarantine.

    The caller of an assignment is answered then, so it has ended. A job of a source has no caller.
    """
    about, of_source = about_item(item, wall), is_ingestion(item)
    if item.state is not WorkState.QUARANTINED:
        reason = ORCHESTRATOR_VANISHED if of_source else WORKER_VANISHED
        began = item.budget.first_attempt_at
        is_first = began is not None and item.crashes == 1 and not item.attempts
        ran = max(0.0, round(wall - (began or 0) / 1000, 6)) if is_first else None
        return [Requeued(**about, reason=reason, generation=item.generation, attempt_seconds=ran)]
    inputs = {"crashes": item.crashes, "limit": CRASH_LIMIT, "attempts": item.attempts}
    quarantined = Quarantined(**about, reason=item.reason, inputs=inputs)
    return [quarantined] if of_source else [quarantined, ended_event(item, wall)]


class RuledQueue(Protocol):
    """The part of a queue that its rules are recorded by."""

    name: str
    rules: Rules
    rules_hash: str


class RulesRecorder:
    """
    The rules that the admissions of one process refer to, written with the first of them and again every hour.

    They are written in the transaction of that admission. If it is rolled back, the next admission writes them.
    """

    def __init__(self, clock: Clock, *, enabled: bool) -> None:
        self._clock = clock
        self._enabled = enabled
        self._written: dict[str, float] = {}

    def missing(self, queues: Iterable[RuledQueue]) -> list[RulesStored]:
        """The events to write before admissions to these queues."""
        wall = self._clock.wall()
        used = {queue.rules_hash: queue for queue in queues} if self._enabled else {}
        return [
            RulesStored(
                **envelope(wall=wall),
                version=ADMISSION_VERSION,
                rules_hash=hashed,
                resource_class=queue.name,
                content=rules_content(queue.rules, queue.name),
            )
            for hashed, queue in used.items()
            if not wall - self._written.get(hashed, -inf) < STORE_AGAIN_S
        ]

    def written(self, events: Iterable[RulesStored]) -> None:
        """Note that these are in the log."""
        self._written.update((event.rules_hash, self._clock.wall()) for event in events)

    async def write(self, journal: Journal, event: Event, queues: Iterable[RuledQueue]) -> None:
        """Write the event of an admission that changes nothing, after the rules that are missing."""
        rules = self.missing(queues)
        await journal.write(*rules, event)
        self.written(rules)
