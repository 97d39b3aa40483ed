"""
What a worker knows about the places its steps talk to: a retry throttle and a breaker for each, bounded in number.
"""

from collections import OrderedDict

from reefknot.core.overload.breaker import Breaker
from reefknot.core.retry.throttle import RetryThrottle
from reefknot.worker.settings import ThrottleSettings

MOST = 10_000
OPENS_AFTER = 20
"""Failures in a row: well above what the documented retries of a few assignments make."""
RESTS_FOR = 5.0


class Destination:
    """One place."""

    __slots__ = ("_traffic", "breaker", "throttle")

    def __init__(self, name: str, settings: ThrottleSettings, share: int) -> None:
        self.breaker = Breaker(name, failures=OPENS_AFTER, cooldown=RESTS_FOR)
        self._traffic = RetryThrottle(
            max(1.0, settings.tokens / share),
            per_success=settings.per_success,
            per_second=settings.per_second / share,
        )
        self.throttle = self._traffic if settings.enabled else None

    def busy(self, now: float) -> bool:
        """Whether it gets so many calls that throttle and breaker may act: small work always gets its retries."""
        return self._traffic.recent(now) >= self._traffic.least

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
        self._share = 1
        self._known: OrderedDict[str, Destination] = OrderedDict()

    def fleet_of(self, workers: int) -> None:
        """So many workers share each destination's tokens from now on."""
        if max(1, workers) != self._share:
            self._share = max(1, workers)
            self._known.clear()

    def at(self, name: str) -> Destination:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = Destination(name, self._settings, self._share)
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(name)
        return found
