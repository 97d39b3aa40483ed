"""
Destinations of a worker's steps: a retry throttle, a breaker and the usual service time of each, bounded in number.

They are fed by facts about the destination only. An attempt that was cut short by its own deadline tells neither that
the destination failed nor how long it takes. The decisions of the breaker are in `core/overload/destination_health.py`.
"""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from math import ceil, exp2, inf
from typing import Any

import msgspec
from msgspec import structs

from reefknot.audit.model.event import Event
from reefknot.core.breaker import BreakerState, Permit, Refused
from reefknot.core.decide import ThrottleView
from reefknot.core.failure import Failure, FailureType
from reefknot.core.throttle import RetryThrottle
from reefknot.queue.execution.decision_log import DecisionLog
from reefknot.queue.execution.events import breaker_event
from reefknot.queue.execution.failures import StepOutcome, last_error
from reefknot.queue.model.destination_health import (
    SLOW_START_PAUSE,
    BreakerInputs,
    DestinationHealth,
    DestinationRules,
    Traffic,
    admitted,
    answered,
    failed,
    released,
    resumed,
    spends_attempt,
)
from reefknot.queue.model.messages import DEFAULT_TIMEOUT_MS, StepRequest, StepStatus
from reefknot.queue.model.results import down_reason, waits_for
from reefknot.queue.model.submission import running_mean
from reefknot.queue.model.work import Snooze, WorkItem
from reefknot.queue.worker.context import WorkerContext
from reefknot.queue.worker.records import AcceptedWork, AttemptInputs, AttemptReport
from reefknot.queue.worker.settings import ThrottleSettings
from reefknot.steps.port import Block

MOST = 10_000
LEAST = 100
"""Calls in ten seconds from which on the throttle acts, and half of them failing opens the breaker."""
LEAST_ANSWERS = 5
"""Answers after which the service time of a destination is known."""
HALF_LIFE_S = 5.0
"""The time without an answer after which a service time counts half: a slow destination is asked again some day."""
TENANT_SEEN_S = 10.0
MOST_TENANTS = 1000
MOST_LOOKED_AT = 200
MOST_TROUBLED = 20
"""Bounds of `troubled`: destinations that a status is made from, and that it has."""
LEAST_FOR_A_TOKEN = 5
"""Calls in ten seconds that earn one saved token, where a worker's share of the fleet's tokens is less than one."""


class Destination:
    """
    Throttle and breaker of one destination.

    A fleet shares the destination's tokens. A share of less than one token could never grant a retry, so a worker may
    save up to one, but only while it sends enough calls there that one more retry hardly adds to them. The retries
    that a fleet adds to an outage thus stay in proportion to its calls, however many workers it has.
    """

    __slots__ = (
        *("_answered_at", "_answers", "_failed", "_failing", "_mean_s", "_planned", "_running", "_share", "_tenants"),
        *("_traffic", "health", "name", "rules", "succeeded_at", "throttle"),
    )

    def __init__(self, name: str, settings: ThrottleSettings, rules: DestinationRules, share: int) -> None:
        self.name = name
        self.health = DestinationHealth()
        self.succeeded_at = -inf
        """When the destination last answered: with a result, or with a refusal of that job alone."""
        self._running = 0
        """Calls under way that were permitted in the breaker's present generation."""
        self._planned = 0.0
        """The end of the rest after which a waiting job makes the probe."""
        self._failed = _window()
        self._traffic = RetryThrottle(
            settings.tokens, per_success=settings.per_success, per_second=settings.per_second, min_executions=LEAST
        )
        self.throttle = self._traffic if settings.enabled else None
        self._answers = 0
        self._answered_at = 0.0
        self._mean_s = 0.0
        self._tenants: OrderedDict[str, float] = OrderedDict()
        """When each tenant was last answered."""
        self._failing: set[str] = set()
        """Tenants whose calls failed since the last success."""
        self.shared_by(share, settings, rules)

    def shared_by(self, workers: int, settings: ThrottleSettings, rules: DestinationRules) -> None:
        """Set this worker's part of the fleet's tokens, of the calls that make a destination busy, and of failures."""
        failures = max(rules.jobs, ceil(rules.failures / workers))
        calls = max(rules.failures, rules.calls // workers)  # of fewer, those of one job alone could be half
        self.rules = structs.replace(rules, failures=failures, calls=calls)
        self._share = settings.tokens / workers
        traffic = self._traffic
        traffic.share(max(1.0, self._share), per_second=settings.per_second / workers)
        traffic.tokens = min(traffic.tokens, self._share)
        traffic.least = max(1, LEAST // workers)

    def view(self, now: float) -> ThrottleView | None:
        """The throttle as a decision sees it; None when it is switched off."""
        if self.throttle is None:
            return None
        seen = self.throttle.view(now)
        if self._share >= 1.0 or self.throttle.recent(now) >= LEAST_FOR_A_TOKEN:
            return seen
        return ThrottleView(acting=seen.acting, tokens=min(seen.tokens, self._share))

    def usual(self, now: float) -> float:
        """The seconds that a call takes as a rule; 0 while that is not known, or not any more."""
        if self._answers < LEAST_ANSWERS:
            return 0.0
        return self._mean_s * exp2(-max(0.0, now - self._answered_at) / HALF_LIFE_S)

    def answered(self, now: float, seconds: float) -> None:
        """Count the service time of a call that the destination has answered, or let run into the whole limit."""
        self._answers += 1
        before = self.usual(now) if self._answers > LEAST_ANSWERS else self._mean_s
        self._mean_s = running_mean(before, seconds, number=self._answers)
        self._answered_at = now

    # ---- the breaker ------------------------------------------------------------------------------------------------

    def admit(self, now: float) -> tuple[Permit | Refused, BreakerInputs | None]:
        """
        A permit for one call, or the time to wait. Every permit must be reported on.

        With the answer comes what it follows from, except for an ordinary permit.
        """
        before, running = self.health, self._running
        after, answer = admitted(before, now, self.rules, running=running)
        if isinstance(answer, Permit):
            self._running = 1 + (running if after.generation == before.generation else 0)
            self.health = after
            if not answer.probe:
                return answer, None
        return answer, BreakerInputs(now, self.rules, before, running)

    def report(self, permit: Permit, now: float, *, ok: bool, job: str, tenant: str) -> BreakerInputs | None:
        """
        Count how a permitted call ended. Returns what the change of the breaker's state follows from, if there is one.

        One tenant alone does not open it while others call as well.
        """
        traffic = self._seen(now, ok=ok, tenant=tenant)
        before = self.health
        if ok:
            self.succeeded_at = now
            after = answered(before, permit, self.rules)
        else:
            after = failed(before, permit, now, self.rules, job=job, traffic=traffic)
        self._ended(permit, after)
        if after is before or (new := after.state(now)) is before.state(now):
            return None
        if new is BreakerState.CLOSED:
            self._failed = _window()
        return BreakerInputs(now, self.rules, before, permit=permit, ok=ok, job=job, traffic=traffic)

    def release(self, permit: Permit) -> None:
        """Forget a permitted call that says nothing about the destination."""
        self._ended(permit, released(self.health, permit))

    def resume(self, since: float, until: float) -> None:
        """Rest as another worker, or this one before its restart, has: a job has waited since then for the probe."""
        if self.rules.enabled and not self.health.generation and self.succeeded_at < since:
            self.health = resumed(self.health, self.rules, since=since, until=until)

    def spares(self, first_attempt_at: float | None) -> bool:
        """Whether a transient failure spends no attempt of a job whose first one was then."""
        return not spends_attempt(self.health, first_attempt_at, self.succeeded_at)

    def wait(self, now: float) -> tuple[float, BreakerInputs | None]:
        """The seconds that a job has to wait that has met the outage, and what they follow from; without a permit."""
        inputs = BreakerInputs(now, self.rules, self.health, self._running)
        _, answer = inputs.admitted()
        return (answer.retry_after, inputs) if isinstance(answer, Refused) else (SLOW_START_PAUSE, None)

    def plans_probe(self) -> bool:
        """Whether the job that asks is the first that can make the probe after this rest: the others need not come."""
        is_first = self._planned != self.health.rests_until or self.health.slow_start > 0
        self._planned = self.health.rests_until
        return is_first

    def _seen(self, now: float, *, ok: bool, tenant: str) -> Traffic:
        """The traffic with this call in it, and whether the tenants that fail speak for the destination."""
        tenants = self._tenants
        tenants[tenant] = now
        tenants.move_to_end(tenant)
        while len(tenants) > MOST_TENANTS or next(iter(tenants.values())) < now - TENANT_SEEN_S:
            tenants.popitem(last=False)
        if ok:
            self._failing.clear()
            return Traffic()
        if len(self._failing) < MOST_TENANTS:
            self._failing.add(tenant)
        if now > self._failed.edge:
            self._failed.roll(now)
        self._failed.tick()
        may_open = len(self._failing) > 1 or len(tenants) == 1
        return Traffic(1 + self._traffic.recent(now), self._failed.recent(now), may_open)

    def _ended(self, permit: Permit, after: DestinationHealth) -> None:
        if permit.generation == self.health.generation == after.generation:
            self._running = max(0, self._running - 1)
        elif after.generation != self.health.generation:
            self._running = 0
        self.health = after

    def busy(self, now: float) -> bool:
        """Whether this process sends it enough calls for its throttle to act."""
        return self._traffic.recent(now) >= LEAST

    def counted(self, now: float, *, ok: bool) -> None:
        """A call went there."""
        traffic = self._traffic
        if now > traffic.edge:
            traffic.roll(now)
        traffic.tick()
        if ok and traffic.tokens < traffic.cap:
            traffic.feed()


class Destinations:
    """All places, the least lately used forgotten first."""

    def __init__(self, settings: ThrottleSettings, rules: DestinationRules | None = None) -> None:
        self._settings = settings
        self._rules = rules or DestinationRules(calls=LEAST)
        self.share = 1
        self._known: OrderedDict[str, Destination] = OrderedDict()

    def fleet_of(self, workers: int) -> None:
        """Set the number of workers that share each destination's tokens."""
        workers = max(1, workers)
        if workers != self.share:
            self.share = workers
            for place in self._known.values():
                place.shared_by(workers, self._settings, self._rules)

    def at(self, name: str) -> Destination:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = Destination(name, self._settings, self._rules, self.share)
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(name)
        return found

    def troubled(self, now: float) -> list[dict[str, Any]]:
        """Lately used destinations whose breaker is not closed, or whose throttle is out of tokens."""
        found = []
        for name, place in islice(reversed(self._known.items()), MOST_LOOKED_AT):
            state = place.health.state(now)
            view = place.view(now)
            throttled = view is not None and view.acting and view.tokens < 1.0
            if throttled or state is not BreakerState.CLOSED:
                one = {
                    "name": name,
                    "breaker": state.value,
                    "throttled": throttled,
                    "tokens": None if view is None else round(view.tokens, 2),
                }
                if state is BreakerState.OPEN:
                    one["probe_in_s"] = round(place.health.rests_until - now, 1)
                found.append(one)
        return found[:MOST_TROUBLED]


def _window() -> RetryThrottle:
    """A counter of the last ten seconds."""
    return RetryThrottle(min_executions=LEAST)


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
        has_waited = bool(attempt.item.reason) and waits_for(attempt.item) is not None
        if has_waited:
            self._resume(attempt.item, destination)
        permit, inputs = destination.admit(self._clock.now())
        if inputs is None or (has_waited and isinstance(permit, Refused)):
            return permit, []
        return permit, [self._event(attempt, destination, inputs)]

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
        if not is_failed:
            return False, events
        first = None if item.budget.first_attempt_at is None else now - attempt.elapsed(self._clock.wall())
        return destination.spares(first), events

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
