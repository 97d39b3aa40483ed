"""
The retry throttle: a token bucket per destination, so that a fleet does not multiply an outage by retrying.

Successes add tokens, retries spend them. While a destination is healthy the bucket is full; while it is down no success
refills it, and retries stop after a handful. The throttle only acts on busy destinations, so the documented retries of
small workloads always happen. Its price: when about a fifth of all calls fails at random, retries become scarce and
fewer calls succeed in the end; up to one in twenty nothing changes.
"""

from reefknot.core import checks
from reefknot.core.decide import ThrottleView


class RetryThrottle:
    """
    The tokens of one destination, refilled by successes; all callers of that destination share one object.

    A successful call does three cheap things: `tick()`, `roll(now)` once a second, and `feed()` only while tokens are
    missing. Callers pass the time; the throttle owns no clock. A race between threads can at most lend a token, which
    is then missing: the long-run bound holds.
    """

    __slots__ = (
        "_marks",
        "_per_second",
        "_per_success",
        "cap",
        "edge",
        "executions",
        "fed_at",
        "least",
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
        window: "checks.Seconds" = 10.0,
    ) -> None:
        self.cap = checks.number("tokens", tokens, least=1.0)
        self._per_success = checks.number("per_success", per_success)
        self._per_second = checks.number("per_second", per_second)
        self.least = int(checks.number("min_executions", min_executions))
        self.window = checks.number("window", checks.in_seconds(window), least=0.001)
        self.tokens = self.cap
        self.fed_at = -1.0
        self.edge = -1.0
        self.executions = 0
        """The number of executions so far, as counted by `tick`."""
        self._marks: list[tuple[float, int]] = []

    def tick(self) -> None:
        """Count an execution."""
        self.executions += 1

    def roll(self, now: float) -> None:
        """Start a new tenth of the window; call it before `tick` when `now` is past `edge`."""
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
        """Change the capacity and the refill per second, as when a fleet grows; spent tokens stay spent."""
        self.cap = checks.number("tokens", tokens, least=1.0)
        self._per_second = checks.number("per_second", per_second)
        self.tokens = min(self.tokens, self.cap)

    def feed(self) -> None:
        """Add the fraction of a token that one success is worth."""
        self.tokens = min(self.cap, self.tokens + self._per_success)

    def view(self, now: float) -> ThrottleView:
        """The state for a decision, after adding the tokens earned by the time that passed."""
        if self.fed_at >= 0.0 and now > self.fed_at:
            self.tokens = min(self.cap, self.tokens + (now - self.fed_at) * self._per_second)
        self.fed_at = now
        return ThrottleView(acting=self.recent(now) >= self.least, tokens=self.tokens)

    def spend(self) -> None:
        """
        Spend the token of a granted retry.

        While the throttle does not act, retries are granted without tokens: otherwise they would build up a debt that
        refuses every retry for hours. A race between threads may overdraw by one token, which stays owed.
        """
        self.tokens = max(-1.0, self.tokens - 1.0)
