"""
Retries that a fleet cannot multiply.

Tokens are fed by successes and spent by retries. While a destination is well they are always full; when it is down no
success feeds them, and retries end after a handful. The throttle only acts on busy destinations, so the documented
retries of small work always happen. Its price: when about a fifth of all calls fails at random, retries become scarce
and fewer calls succeed in the end; up to one in twenty nothing changes.
"""

from itertools import count
from typing import Any

from reefknot.core.retry.decide import ThrottleView
from reefknot.errors import ParameterError, ParameterTypeError

_LARGEST = 1.7976931348623157e308  # an int may be larger, and then is no float


class RetryThrottle:
    """
    Success-fed tokens for one destination. Share one object between all that call the same place.

    A happy call does three cheap things: `tick()`, `roll(now)` once a second, and `feed()` only while tokens are
    missing. Callers pass the time; the throttle owns no clock. A race between threads can at most lend a token, which
    is then missing: the long-run bound holds.
    """

    __slots__ = (
        "_marks",
        "_per_second",
        "_per_success",
        "_ticks",
        "cap",
        "edge",
        "fed_at",
        "least",
        "tick",
        "tokens",
        "window",
    )

    def __init__(
        self,
        tokens: float = 10.0,
        *,
        per_success: float = 0.1,
        per_second: float = 0.1,
        min_executions: int = 100,
        window: float = 10.0,
    ) -> None:
        self.cap = _positive("tokens", tokens, least=1.0)
        self._per_success = _positive("per_success", per_success)
        self._per_second = _positive("per_second", per_second)
        self.least = int(_positive("min_executions", min_executions))
        self.window = _positive("window", window, least=0.001)
        self.tokens = self.cap
        self.fed_at = -1.0
        self.edge = -1.0
        self._ticks = count()
        self.tick = self._ticks.__next__
        self._marks: list[tuple[float, int]] = []

    @property
    def executions(self) -> int:
        """All executions that were ever ticked."""
        state: Any = self._ticks.__reduce__()
        return int(state[1][0])

    def roll(self, now: float) -> None:
        """Begin a new tenth of the window; called before `tick` when `now` is past `edge`."""
        step = self.window / 10
        self.edge = now + step
        horizon = now - self.window - step
        self._marks = [mark for mark in self._marks if mark[0] > horizon]
        self._marks.append((now, self.executions))

    def recent(self, now: float) -> int:
        """Executions within the window before `now`, to a tenth of the window."""
        horizon = now - self.window - self.window / 10
        for at, executions in self._marks:
            if at > horizon:
                return self.executions - executions
        return 0

    def share(self, tokens: float, *, per_second: float) -> None:
        """From now on so many tokens at most, and so much trickle; what was spent stays spent."""
        self.cap = _positive("tokens", tokens, least=1.0)
        self._per_second = _positive("per_second", per_second)
        self.tokens = min(self.tokens, self.cap)

    def feed(self) -> None:
        """A success brings a fraction of a token."""
        self.tokens = min(self.cap, self.tokens + self._per_success)

    def view(self, now: float) -> ThrottleView:
        """The state a decision is taken with; time trickles in first."""
        if self.fed_at >= 0.0 and now > self.fed_at:
            self.tokens = min(self.cap, self.tokens + (now - self.fed_at) * self._per_second)
        self.fed_at = now
        return ThrottleView(acting=self.recent(now) >= self.least, tokens=self.tokens)

    def spend(self) -> None:
        """
        One retry was granted.

        While the throttle does not act, retries are granted without tokens; they must not pile up a debt that would
        refuse every retry for hours once it does. What a race lent, one token, stays missing.
        """
        self.tokens = max(-1.0, self.tokens - 1.0)


def _positive(name: str, value: object, least: float = 0.0) -> float:
    accepted = f"a finite number, {least:g} or more"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterTypeError(name, value, accepted)
    if not least <= value <= _LARGEST:
        raise ParameterError(name, value, accepted)
    return float(value)
