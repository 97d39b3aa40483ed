"""
Limits: how often work may begin, and how much of it may run at the same time.

A rate is a token bucket: it holds `burst` tokens, gains `rate` of them a second, and each start spends one. So no
second has more starts than the rate of a second plus the burst. What may start soon is reserved first, and spent when
it has begun: however late that is, the bucket counts the start itself. Time is an argument; locking, where it is
needed, is up to the caller.
"""

import re
from collections.abc import Iterable, Mapping
from math import ceil, inf
from typing import Any

from msgspec import Struct

from reefknot.core import checks
from reefknot.errors import ParameterError

_SECONDS = {"s": 1, "min": 60, "h": 3600}
RATE_PATTERN = r"^\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*/\s*(s|min|h)\s*$"
ACCEPTED_RATE = "a number above 0 with /s, /min or /h, such as 10/s"
MOST_PER_SECOND = 100_000.0
MOST_BURST = 1_000_000
MOST_RUNNING = 1_000_000
PER = ("tenant", "destination")
"""What a limit can hold for each of, besides a field of the inputs."""
ACCEPTED_NAME = (
    "a job type, in which * stands for any text (billing.*); tenant or tenant:NAME; destination or destination:NAME; "
    "or a field of the inputs (inputs.account)"
)
LONGEST_KEY = 200
MOST_KEYS = 10_000
"""Keys that are remembered although nothing of theirs runs or waits."""
_ROUNDING = 1e-9


class Rate(Struct, frozen=True):
    """A number of starts in a time: `10/s`, `100/min`, `5000/h`."""

    count: float
    unit: str

    @property
    def per_second(self) -> float:
        return self.count / _SECONDS[self.unit]

    def __str__(self) -> str:
        return f"{self.count:g}/{self.unit}"


def parse_rate(given: object, name: str = "rate") -> Rate:
    """The rate that a text such as `10/s` states; `ParameterError` for any other text."""
    found = re.match(RATE_PATTERN, checks.text(name, given, ACCEPTED_RATE))
    if found is None or not float(found[1]):
        raise ParameterError(name, given, ACCEPTED_RATE)
    rate = Rate(float(found[1]), found[2])
    if rate.per_second > MOST_PER_SECOND:
        raise ParameterError(name, given, f"{ACCEPTED_RATE}; at most {MOST_PER_SECOND:g}/s")
    return rate


class LimitRule(Struct, frozen=True):
    """
    A limit: a rate with its burst, a number that may run at the same time, or both.

    It holds for the job types that match `types`. With `per` it holds for each tenant, destination or value of an input
    by itself; with `only`, for that one alone.
    """

    name: str
    rate: Rate | None = None
    burst: int = 1
    running: int | None = None
    types: str = "*"
    per: str = ""
    only: str = ""
    place: str = ""
    """The file and line that it is written at."""

    def __str__(self) -> str:
        parts = [] if self.rate is None else [f"{self.rate}, burst {self.burst}"]
        parts += [] if self.running is None else [f"{self.running} running"]
        return ", ".join(parts)

    def fits(self, kind: str) -> bool:
        """Whether it holds for work of this type."""
        return self.types == "*" or globbed(self.types, kind)

    def key_of(self, tenant: str, destination: str, inputs: Mapping[str, Any]) -> str | None:
        """The key under which work is counted; None where the limit does not hold for it."""
        if not self.per:
            return self.name
        found = {"tenant": tenant, "destination": destination}.get(self.per)
        value = _field(inputs, self.per) if found is None else found
        if value == "" or (self.only and not globbed(self.only, value)):
            return None
        return f"{self.name.partition(':')[0] if self.only else self.name} {value}"[:LONGEST_KEY]


def limit_rule(
    name: str,
    *,
    rate: object = None,
    burst: object = None,
    running: object = None,
    per: str = "",
    place: str = "",
) -> LimitRule:
    """The limit of this name and these numbers, checked. Without a burst it is what the rate gives in a second."""
    types, own, only = _subject(name)
    if own and per:
        raise ParameterError("per", per, f"only for a limit of job types; this one holds per {own} already")
    if per and per not in PER and not _is_input(per):
        raise ParameterError("per", per, f"{', '.join(PER)}, or a field of the inputs such as inputs.account")
    found = None if rate is None else parse_rate(rate)
    if found is None and running is None:
        raise ParameterError("rate", None, "at least one of rate and running: {rate: 10/s} or {running: 5}")
    if found is None and burst is not None:
        raise ParameterError("burst", burst, "only together with rate")
    most = None if running is None else checks.whole_number("running", running, most=MOST_RUNNING)
    usual = 1 if found is None else max(1, ceil(found.per_second))
    tokens = usual if burst is None else checks.whole_number("burst", burst, most=MOST_BURST)
    return LimitRule(name, found, tokens, most, types, own or per, only, place)


def _subject(name: str) -> tuple[str, str, str]:
    """The types that a limit of this name holds for, what it holds for each of, and the only one of these."""
    word, colon, only = name.partition(":")
    if word in PER and (only or not colon):
        return "*", word, only
    if _is_input(name):
        return "*", name, ""
    if not name or ":" in name or not name.isprintable() or " " in name or len(name) > LONGEST_KEY:
        raise ParameterError("name", name, ACCEPTED_NAME)
    return name, "", ""


def _is_input(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "inputs" and bool(rest) and all(rest)


def _field(inputs: Mapping[str, Any], path: str) -> str:
    """The text of a field of the inputs; empty where it is missing, or neither a text nor a number."""
    value: Any = inputs
    for name in path.split(".")[1:]:
        value = value.get(name) if isinstance(value, Mapping) else None
    return str(value) if isinstance(value, str | int | float) else ""


_patterns: dict[str, re.Pattern[str]] = {}


def globbed(pattern: str, text: str) -> bool:
    """Whether the text matches a pattern in which `*` stands for any text."""
    if pattern == text:
        return True
    known = _patterns.get(pattern)
    if known is None:
        if len(_patterns) >= MOST_KEYS:
            _patterns.clear()
        known = _patterns[pattern] = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    return known.fullmatch(text) is not None


class LimitState:
    """The state of one limit under one key: its tokens, what is about to start, and what runs."""

    __slots__ = ("_at", "_late", "_tokens", "key", "reserved", "rule", "running")

    def __init__(self, rule: LimitRule, key: str, now: float, *, tokens: float | None = None) -> None:
        """A full bucket, or one with these `tokens`."""
        self.rule = rule
        self.key = key
        self.reserved = 0
        """Starts that were granted and have not been counted yet."""
        self.running: set[str] = set()
        """The ids of what was granted and has not ended, where their number is limited."""
        self._tokens = float(rule.burst) if tokens is None else tokens
        self._at = now
        self._late = 0

    def wait(self, now: float) -> float:
        """Seconds until something may start: 0 when it may now, infinity when it depends on what runs or begins."""
        if self.rule.running is not None and len(self.running) >= self.rule.running:
            return inf
        missing = 1.0 - (self.tokens(now) - self.reserved)
        if self.rule.rate is None or missing <= _ROUNDING:
            return 0.0
        if self.rule.burst - self.reserved < 1:
            return inf
        return missing / self.rule.rate.per_second

    def room(self, now: float) -> int:
        """The number that may start now."""
        room = inf if self.rule.running is None else self.rule.running - len(self.running)
        if self.rule.rate is not None:
            room = min(room, int(self.tokens(now) - self.reserved + _ROUNDING))
        return MOST_RUNNING if room == inf else max(0, int(room))

    def tokens(self, now: float) -> float:
        """The tokens in the bucket, those of granted starts among them."""
        if self.rule.rate is None:
            return inf
        gained = max(0.0, now - self._at) * self.rule.rate.per_second
        self._tokens = min(float(self.rule.burst), self._tokens + gained) - self._late
        self._at, self._late = max(now, self._at), 0
        return self._tokens

    def grant(self, work_id: str) -> None:
        """Reserve a start; `started` or `given_up` follows."""
        self.reserved += 1
        if self.rule.running is not None:
            self.running.add(work_id)

    def started(self) -> None:
        """Count a granted start. Its token is spent at the next look: as late as that, it allows nothing more."""
        self.reserved -= 1
        self._late += 1

    def given_up(self) -> None:
        """Forget a granted start that did not take place."""
        self.reserved -= 1

    def ended(self, work_id: str) -> None:
        """Forget what ran."""
        self.running.discard(work_id)

    def empty(self, now: float) -> None:
        """Take all tokens out: another process may have spent them meanwhile."""
        self.tokens(now)
        self._tokens = min(self._tokens, 0.0)

    def is_idle(self, now: float) -> bool:
        """Whether nothing depends on it: a new one would be the same."""
        return not self.reserved and not self.running and self.tokens(now) >= self.rule.burst

    def is_full(self, now: float) -> bool:
        """Whether no token was spent lately."""
        return self.rule.rate is None or self.tokens(now) >= self.rule.burst


class Grant:
    """A start that was granted to one piece of work, under each of its limits."""

    __slots__ = ("_is_started", "states", "work_id")

    def __init__(self, states: tuple[LimitState, ...], work_id: str) -> None:
        self.states = states
        self.work_id = work_id
        self._is_started = False
        for state in states:
            state.grant(work_id)

    def started(self) -> None:
        """The work has begun, or may have."""
        if not self._is_started:
            self._is_started = True
            for state in self.states:
                state.started()

    def refused(self) -> None:
        """The work was not begun, and nothing is spent."""
        if not self._is_started:
            self._is_started = True
            for state in self.states:
                state.given_up()

    def ended(self) -> None:
        """The work does not run any more."""
        self.started()
        for state in self.states:
            state.ended(self.work_id)


class LimitTable:
    """The limits of a configuration with their states, by key."""

    def __init__(self, rules: Iterable[LimitRule] = ()) -> None:
        self.rules = tuple(rules)
        self._of_type: dict[str, tuple[LimitRule, ...]] = {}
        self._states: dict[str, LimitState] = {}
        self.spent_before: set[str] = set()
        """Keys that others have used until `since`: they begin without a token."""
        self.since = 0.0

    def follow(self, rules: Iterable[LimitRule]) -> None:
        """Change the limits. A limit that is still there keeps what runs, and no more tokens than before."""
        self.rules, before = tuple(rules), self._states
        self._of_type.clear()
        self._states = {}
        for rule in self.rules:
            for key, old in before.items():
                if old.rule.name == rule.name and old.rule.per == rule.per:
                    new = self._states[key] = LimitState(rule, key, old._at, tokens=min(old._tokens, rule.burst))
                    new.reserved, new.running, new._late = old.reserved, old.running, old._late

    def of_type(self, kind: str) -> tuple[LimitRule, ...]:
        """The limits that may hold for work of this type."""
        found = self._of_type.get(kind)
        if found is None:
            if len(self._of_type) >= MOST_KEYS:
                self._of_type.clear()
            found = self._of_type[kind] = tuple(rule for rule in self.rules if rule.fits(kind))
        return found

    def states(self, kind: str, now: float, *, tenant: str, destination: str, inputs: Any) -> tuple[LimitState, ...]:
        """The states of all limits that hold for this work; of two for one tenant, the one that names it."""
        keys: dict[str, LimitRule] = {}
        for rule in self.of_type(kind):
            key = rule.key_of(tenant, destination, inputs if isinstance(inputs, Mapping) else {})
            if key is not None and (key not in keys or rule.only):
                keys[key] = rule
        return tuple([self._state(rule, key, now) for key, rule in keys.items()])

    def _state(self, rule: LimitRule, key: str, now: float) -> LimitState:
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= MOST_KEYS:
                self._forget_some(now)
            is_spent = key in self.spent_before
            state = LimitState(rule, key, self.since if is_spent else now, tokens=0.0 if is_spent else None)
            self._states[key] = state
        return state

    def _forget_some(self, now: float) -> None:
        """Forget the keys that are idle; of more than are remembered those with the most tokens, if nothing runs."""
        self._states = {key: one for key, one in self._states.items() if not one.is_idle(now)}
        excess = len(self._states) - MOST_KEYS * 9 // 10
        if excess > 0:
            free = [one for one in self._states.values() if not one.reserved and not one.running]
            for one in sorted(free, key=lambda one: one.tokens(now) - one.rule.burst, reverse=True)[:excess]:
                del self._states[one.key]

    def get(self, key: str) -> LimitState | None:
        """The state under a key, if it is known."""
        return self._states.get(key)

    def all(self) -> list[LimitState]:
        """The states that are known."""
        return list(self._states.values())

    def empty(self, now: float) -> None:
        """Begin without tokens, as after a time in which another process may have granted starts."""
        for state in self._states.values():
            state.empty(now)
