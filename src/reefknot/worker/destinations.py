"""
Destinations of a worker's steps: a retry throttle, a breaker and the usual service time of each, bounded in number.

They are fed by facts about the destination only. An attempt that was cut short by its own deadline tells neither that
the destination failed nor how long it takes.
"""

from collections import OrderedDict
from itertools import islice
from math import exp2
from typing import Any

from reefknot.core.overload.breaker import Breaker, BreakerState, Permit
from reefknot.core.overload.submission import running_mean
from reefknot.core.retry.decide import ThrottleView
from reefknot.core.retry.throttle import RetryThrottle
from reefknot.worker.settings import ThrottleSettings

MOST = 10_000
OPENS_AFTER = 20
"""Failures in a row: well above what the documented retries of a few assignments make."""
RESTS_FOR = 5.0
LEAST = 100
"""Calls in ten seconds from which on throttle and breaker may act: small work always gets its retries."""
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
        "_failing",
        "_mean_s",
        "_share",
        "_tenants",
        "_traffic",
        "breaker",
        "throttle",
    )

    def __init__(self, name: str, settings: ThrottleSettings, share: int) -> None:
        self.breaker = Breaker(name, failures=OPENS_AFTER, cooldown=RESTS_FOR)
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
        self.shared_by(share, settings)

    def shared_by(self, workers: int, settings: ThrottleSettings) -> None:
        """Set this worker's part of the fleet's tokens, their trickle, and the calls that make a destination busy."""
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

    def report(self, permit: Permit, now: float, *, ok: bool, tenant: str) -> None:
        """Tell the breaker what became of a call. One tenant alone does not open it while others call as well."""
        self._tenants[tenant] = now
        self._tenants.move_to_end(tenant)
        while len(self._tenants) > MOST_TENANTS or next(iter(self._tenants.values())) < now - TENANT_SEEN_S:
            self._tenants.popitem(last=False)
        if ok:
            self._failing.clear()
            self.breaker.succeeded(permit)
            return
        if len(self._failing) < MOST_TENANTS:
            self._failing.add(tenant)
        self.breaker.failed(permit, now, may_open=len(self._failing) > 1 or len(self._tenants) == 1)

    def busy(self, now: float) -> bool:
        """Whether it gets so many calls from here that its breaker may act."""
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

    def __init__(self, settings: ThrottleSettings) -> None:
        self._settings = settings
        self.share = 1
        self._known: OrderedDict[str, Destination] = OrderedDict()

    def fleet_of(self, workers: int) -> None:
        """So many workers share each destination's tokens from now on."""
        workers = max(1, workers)
        if workers != self.share:
            self.share = workers
            for place in self._known.values():
                place.shared_by(workers, self._settings)

    def at(self, name: str) -> Destination:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = Destination(name, self._settings, self.share)
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(name)
        return found

    def troubled(self, now: float) -> list[dict[str, Any]]:
        """Lately used destinations whose breaker is not closed, or whose throttle is out of tokens."""
        found = []
        for name, place in islice(reversed(self._known.items()), MOST_LOOKED_AT):
            state = place.breaker.state(now)
            view = place.view(now)
            throttled = view is not None and view.acting and view.tokens < 1.0
            if throttled or state is not BreakerState.CLOSED:
                tokens = None if view is None else round(view.tokens, 2)
                found.append({"name": name, "breaker": state.value, "throttled": throttled, "tokens": tokens})
        return found[:MOST_TROUBLED]
