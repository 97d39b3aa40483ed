"""
The circuit breaker: the state machine that stops calls to a destination that keeps failing.

    closed ──(failures in a row)──▶ open ──(cool-down over)──▶ half-open ──(probe succeeds)──▶ closed
                                     ▲                             │
                                     └────────(probe fails)────────┘

Half-open lets exactly one probe through. A probe that never reports expires after a cool-down, so a crashed caller
cannot keep a breaker half-open forever. Time is an argument; locking, where it is needed, is up to the caller.
"""

from enum import StrEnum

from msgspec import Struct

from reefknot.core import checks


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Refused(Struct, frozen=True):
    """The call may not go through; ask again after `retry_after` seconds."""

    retry_after: float


class Permit(Struct, frozen=True):
    """The call may go through. `generation` distinguishes a late report from a current one."""

    generation: int
    probe: bool = False


class BreakerSnapshot(Struct, frozen=True):
    """The state of a breaker at one moment."""

    name: str
    state: BreakerState
    failures: int
    opened: int
    retry_after: float


class Breaker:
    """The state machine of one destination."""

    __slots__ = ("_failures", "_generation", "_opened", "_probe_until", "_until", "cooldown", "name", "threshold")

    def __init__(self, name: str, *, failures: int = 5, cooldown: "checks.Seconds" = 30.0) -> None:
        self.name = checks.text("name", name, "a text that names the destination")
        self.threshold = checks.whole_number("failures", failures)
        self.cooldown = checks.seconds("cooldown", cooldown, most=checks.LARGEST_FLOAT)
        self._failures = 0
        self._opened = 0
        self._generation = 0
        self._until: float | None = None
        self._probe_until: float | None = None

    def state(self, now: float) -> BreakerState:
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    def admit(self, now: float) -> Permit | Refused:
        """A permit for a call at `now`, or a refusal with the time to wait."""
        if self._until is None:
            return Permit(self._generation)
        if now < self._until:
            return Refused(self._until - now)
        if self._probe_until is not None and now < self._probe_until:
            return Refused(self._probe_until - now)
        self._probe_until = now + self.cooldown
        self._generation += 1
        return Permit(self._generation, probe=True)

    def succeeded(self, permit: Permit) -> None:
        """Report a success: the breaker closes."""
        if permit.generation != self._generation:
            return
        self._failures = 0
        self._until = self._probe_until = None

    def failed(self, permit: Permit, now: float, *, may_open: bool = True) -> None:
        """
        Report a failure: the breaker opens after a failed probe, or after `threshold` failures in a row.

        Without `may_open`, a failure is counted but does not open the breaker: one tenant alone says little about a
        destination.
        """
        if permit.generation != self._generation:
            return
        self._failures += 1
        if permit.probe or (may_open and self._failures >= self.threshold):
            self._open(now)

    def released(self, permit: Permit) -> None:
        """Report a call that says nothing about the destination, because it was cancelled or refused elsewhere."""
        if permit.probe and permit.generation == self._generation:
            self._probe_until = None

    def snapshot(self, now: float) -> BreakerSnapshot:
        left = max(0.0, self._until - now) if self._until is not None else 0.0
        return BreakerSnapshot(self.name, self.state(now), self._failures, self._opened, left)

    def _open(self, now: float) -> None:
        self._until = now + self.cooldown
        self._probe_until = None
        self._generation += 1
        self._opened += 1
