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
        self._traffic = RetryThrottle(settings.tokens, per_success=settings.per_success, per_second=settings.per_second)
        self.throttle = self._traffic if settings.enabled else None
        self.shared_by(share, settings)

    def shared_by(self, workers: int, settings: ThrottleSettings) -> None:
        """Its part of the fleet's tokens, one at least: with less than one nothing could ever be tried again."""
        self._traffic.share(max(1.0, settings.tokens / workers), per_second=settings.per_second / workers)

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
