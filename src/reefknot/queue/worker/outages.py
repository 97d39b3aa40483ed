"""
Outages of destinations: permits for calls, reports to breakers, and the waits of assignments whose destination is down.

    refused by the breaker ──┐
                             ├──▶ wait until the next probe, spend nothing ──▶ the deadline or `max_outage` end it
    failed while it is down ─┘

A wait is kept with the item (`core/results.py`: `waits_for`), so a worker that restarts in an outage knows of it.
"""

from collections.abc import Mapping

import msgspec

from reefknot.audit.model.event import Event
from reefknot.core.breaker import Permit, Refused
from reefknot.core.failure import Failure, FailureType
from reefknot.queue.execution.decision_log import DecisionLog
from reefknot.queue.execution.events import breaker_event
from reefknot.queue.execution.failures import StepOutcome, last_error
from reefknot.queue.model.destination_health import BreakerInputs
from reefknot.queue.model.messages import DEFAULT_TIMEOUT_MS, StepRequest, StepStatus
from reefknot.queue.model.results import down_reason, waits_for
from reefknot.queue.model.work import Snooze, WorkItem
from reefknot.queue.worker.context import WorkerContext
from reefknot.queue.worker.destinations import Destination, Destinations
from reefknot.queue.worker.records import AcceptedWork, AttemptInputs, AttemptReport
from reefknot.steps.port import Block

BEHIND_S = 0.5
"""How much later than the next probe assignments are due that do not make it: by then it has mostly ended."""
FAR_BEHIND_S = 1.0
"""The same for those that have failed themselves: a few bad ones must not make every probe, and so keep others away."""


class Outages:
    """The destinations of one worker's steps, and the waits of its assignments for them."""

    def __init__(self, context: WorkerContext, blocks: Mapping[str, Block], log: DecisionLog) -> None:
        self._clock = context.clock
        self._redactor = context.redactor
        self._is_on = context.settings.retries_v2
        self._blocks = blocks
        self._log = log
        self.destinations = Destinations(context.settings.throttle, context.settings.breaker)

    def destination(self, block: Block, request: StepRequest) -> Destination:
        try:
            name = block.destination(request.inputs)
        except Exception:  # inputs that make no sense; the block itself will say so
            name = f"{block.type}: unknown"
        return self.destinations.at(name)

    def resume(self, item: WorkItem) -> None:
        """Learn from a stored item that its destination is down: a restart in an outage makes no burst of calls."""
        if waits_for(item) is None or not self._is_on:
            return
        try:
            assignment = AcceptedWork.read(item).assignment
        except msgspec.DecodeError:  # its attempt will say so
            return
        block = self._blocks.get(assignment.job.type)
        if block is not None:
            self._resume(item, self.destination(block, StepRequest.of(assignment, DEFAULT_TIMEOUT_MS)))

    def _resume(self, item: WorkItem, destination: Destination) -> None:
        waits = waits_for(item)
        if waits is not None:
            ahead = self._clock.now() - self._clock.wall()
            destination.resume(waits.since / 1000 + ahead, waits.next_probe_at / 1000 + ahead)

    def permit(
        self, attempt: AttemptInputs, destination: Destination, *, skip: bool
    ) -> tuple[Permit | Refused | None, list[Event]]:
        """
        The breaker's answer; None for the baseline and heavy degradation, which have no breaker.

        A probe has an event, and so has the beginning of a wait.
        """
        if not self._is_on or skip:
            return None, []
        self._resume(attempt.item, destination)
        permit, inputs = destination.admit(self._clock.now())
        is_probe = isinstance(permit, Permit) and permit.probe
        if is_probe or (isinstance(permit, Refused) and waits_for(attempt.item) is None):
            return permit, [self._event(attempt, destination, inputs)]
        return permit, []

    def report(
        self,
        attempt: AttemptInputs,
        destination: Destination,
        permit: Permit,
        ran: StepOutcome,
        failure: Failure | None,
    ) -> tuple[bool, list[Event]]:
        """
        Count the answer for or against the destination: transient failures and full time-outs count against it.

        Returns whether the failure is an outage, which is not the assignment's fault, and the event of a change.
        """
        if ran.timed_out is not None and ran.timed_out.whole:
            destination.release(permit)
            return False, []
        item, now = attempt.item, self._clock.now()
        transient = failure is not None and failure.failure_type is FailureType.TRANSIENT
        is_failed = transient or ran.step.status is StepStatus.TIMEOUT
        tenant = attempt.assignment.tenant_id or ""
        changed = destination.report(permit, now, ok=not is_failed, job=item.id, tenant=tenant)
        events = [] if changed is None else [self._event(attempt, destination, changed)]
        if changed is not None:
            self._log.breaker(self._redactor(destination.name), destination.health, now)
        first = None if item.budget.first_attempt_at is None else now - attempt.elapsed(self._clock.wall())
        return is_failed and destination.spares(first), events

    def wait_after(
        self, attempt: AttemptInputs, destination: Destination, events: list[Event], failure: str
    ) -> AttemptReport | None:
        """The wait of an assignment that has just met the outage itself. The next probe is another one's."""
        seconds, inputs = destination.wait(self._clock.now())
        if waits_for(attempt.item) is None and inputs is not None:
            events = [*events, self._event(attempt, destination, inputs)]
        return self._snooze(attempt, destination, seconds + FAR_BEHIND_S, events, failure)

    def wait(
        self, attempt: AttemptInputs, destination: Destination, seconds: float, events: list[Event]
    ) -> AttemptReport | None:
        """The wait of an assignment that the breaker refused; None when it has no time for it: see `ended`."""
        if attempt.item.failure is not None:
            behind = FAR_BEHIND_S
        else:
            behind = 0.0 if destination.plans_probe() else BEHIND_S
        return self._snooze(attempt, destination, seconds + behind, events)

    def _snooze(
        self,
        attempt: AttemptInputs,
        destination: Destination,
        seconds: float,
        events: list[Event],
        failure: str | None = None,
    ) -> AttemptReport | None:
        wall, deadline_at = self._clock.wall(), attempt.item.deadline_at
        due = int((wall + seconds) * 1000) + 1
        if self._waited(attempt) >= destination.rules.max_outage or (deadline_at is not None and due >= deadline_at):
            return None
        waits = waits_for(attempt.item)
        reason = down_reason(self._redactor(destination.name), int(wall * 1000) if waits is None else waits.since)
        self._log.put_off(attempt.assignment, reason, seconds)
        return AttemptReport(Snooze(due, reason, due - int(attempt.began * 1000), failure=failure), tuple(events))

    def ended(self, attempt: AttemptInputs, destination: Destination) -> str:
        """The message of an assignment that cannot wait any longer."""
        longest = destination.rules.max_outage
        why = "the assignment has no time to wait until it is called again"
        if self._waited(attempt) >= longest:
            why = f"the assignment has waited for it for {longest:.0f} s (max_outage_seconds)"
        before = "" if attempt.item.failure is None else f"; before that: {last_error(attempt.item)}"
        return str(self._redactor(f"{destination.name} is down, and {why}{before}"))

    def _waited(self, attempt: AttemptInputs) -> float:
        waits = waits_for(attempt.item)
        return 0.0 if waits is None else max(0.0, self._clock.wall() - waits.since / 1000)

    def _event(self, attempt: AttemptInputs, destination: Destination, inputs: BreakerInputs) -> Event:
        return breaker_event(attempt.assignment, self._clock.wall(), self._redactor(destination.name), inputs)
