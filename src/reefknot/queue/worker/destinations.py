"""
Destinations of a worker's steps: a retry throttle, a breaker and the usual service time of each, bounded in number.

They are fed by facts about the destination only. An attempt that was cut short by its own deadline tells neither that
the destination failed nor how long it takes. The decisions of the breaker are in `core/overload/destination_health.py`.
"""

from collections import OrderedDict
from itertools import islice
from math import ceil, exp2, inf
from typing import Any

from msgspec import structs

from reefknot.core.breaker import BreakerState, Permit, Refused
from reefknot.core.decide import ThrottleView
from reefknot.core.throttle import RetryThrottle
from reefknot.queue.model.destination_health import (
    SLOW_START_PAUSE,
    BreakerInputs,
    DestinationHealth,
    DestinationRules,
    Traffic,
    released,
    resumed,
    spends_attempt,
)
from reefknot.queue.model.submission import running_mean
from reefknot.queue.worker.settings import ThrottleSettings

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
"""Calls in ten seconds that are worth one saved token, where a worker's share of the fleet's is less than one."""


class Destination:
    """
    Throttle and breaker of one destination.

    A fleet shares the destination's tokens. A share of less than one token could never grant a retry, so a worker may
    save up to one; but only while it sends so many calls there that one retry more is little beside them. So the
    retries that a fleet adds to an outage stay in proportion to its calls, however many workers it has.
    """

    __slots__ = (
        "_answered_at",
        "_answers",
        "_failed",
        "_failing",
        "_mean_s",
        "_planned",
        "_running",
        "_share",
        "_tenants",
        "_traffic",
        "health",
        "name",
        "rules",
        "succeeded_at",
        "throttle",
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

    def admit(self, now: float) -> tuple[Permit | Refused, BreakerInputs]:
        """A permit for one call, or the time to wait; and what it follows from. Every permit must be reported on."""
        inputs = BreakerInputs(now, self.rules, self.health, self._running)
        after, answer = inputs.admitted()
        if isinstance(answer, Permit):
            self._running = 1 + (self._running if after.generation == self.health.generation else 0)
            self.health = after
        return answer, inputs

    def report(self, permit: Permit, now: float, *, ok: bool, job: str, tenant: str) -> BreakerInputs | None:
        """
        Count how a permitted call ended. Returns what the change of the breaker's state follows from, if there is one.

        One tenant alone does not open it while others call as well.
        """
        traffic = self._seen(now, ok=ok, tenant=tenant)
        inputs = BreakerInputs(now, self.rules, self.health, permit=permit, ok=ok, job=job, traffic=traffic)
        if ok:
            self.succeeded_at = now
        old = self.health.state(now)
        self._ended(permit, inputs.reported(permit))
        new = self.health.state(now)
        if old is not new and new is BreakerState.CLOSED:
            self._failed = _window()
        return None if old is new else inputs

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
        """Whether it gets so many calls from here that its throttle acts."""
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
        """So many workers share each destination's tokens from now on."""
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
