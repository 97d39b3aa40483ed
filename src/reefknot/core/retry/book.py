"""
Who said what, and who wins.

A patch is what one place said about a policy, field by field; each saying knows its layer and its source. Folding
patches in their order gives the winner of every field and, beneath it, what it overrode. Not said is not in the patch;
"said: none" is.

The policy book: all layers of policy, frozen.

    global < category < target < the target's failure overrides < source < its overrides < request

Resolving it for (target, source, failure, request) gives one policy whose every field knows where it came from. A book
never changes: reloading makes another one, and work in flight keeps the policy it was given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from hashlib import sha256
from types import MappingProxyType
from typing import Any, TypeAlias

from msgspec import Struct, json

from reefknot.core.failure import ErrorCategory, ErrorCode, Failure, FailureType
from reefknot.core.retry.policy import FIELDS, RetryPolicy, RetryStrategy
from reefknot.errors import ParameterError


class Layer(StrEnum):
    """Where a value was said, lowest first."""

    BUILTIN = "builtin"
    GLOBAL = "global"
    CATEGORY = "category"
    TARGET = "target"
    OVERRIDE = "override"
    SOURCE = "source"
    REQUEST = "request"

    @property
    def rank(self) -> int:
        """How near to the request it is."""
        return list(Layer).index(self)


class Said(Struct, frozen=True):
    """A value, and where it was said."""

    value: Any
    layer: Layer
    source: str


class Settled(Struct, frozen=True):
    """The value that won, where it was said, and what it overrode, the nearest first."""

    value: Any
    layer: Layer
    source: str
    overrode: tuple[Said, ...] = ()


Patch = Mapping[str, Said]
NOTHING_SAID: Patch = MappingProxyType({})


def patch(layer: Layer, source: str, fields: Mapping[str, Any]) -> Patch:
    """Everything in `fields`, said in one place."""
    return MappingProxyType({name: Said(value, layer, source) for name, value in fields.items()})


def merge(lower: Patch, higher: Patch) -> Patch:
    """Two patches as one: where both speak, the higher one does. Associative, with `NOTHING_SAID` as its neutral."""
    return MappingProxyType({**lower, **higher})


def settle(patches: Iterable[Patch]) -> dict[str, Settled]:
    """Fold patches, lowest first, into winners that know what they overrode."""
    settled: dict[str, Settled] = {}
    for one in patches:
        for name, said in one.items():
            beaten = settled.get(name)
            overrode = () if beaten is None else (Said(beaten.value, beaten.layer, beaten.source), *beaten.overrode)
            settled[name] = Settled(said.value, said.layer, said.source, overrode)
    return settled


SHOWN_FIELDS = tuple(
    f for f in FIELDS if f not in ("whole_seconds", "retryable_exceptions", "non_retryable_exceptions")
)
"""What tables and `explain` show; the rest follows from the target or speaks for itself."""

Condition: TypeAlias = ErrorCode | FailureType | int
"""What an override is for: a code, a failure type, or an HTTP status."""

_KINDS = ("block", "connector", "operation")
_CACHE = 4096


class TargetEntry(Struct, frozen=True):
    """What is said about one target, or one source: its policy, and its policy for particular failures."""

    policy: Patch = NOTHING_SAID
    overrides: Mapping[Condition, Patch] = {}

    def for_failure(self, failure: Failure | None) -> Iterator[Patch]:
        """The overrides that apply, weakest first: by failure type, by code, by status."""
        if failure is None:
            return
        yield self.overrides.get(failure.failure_type, NOTHING_SAID)
        yield self.overrides.get(failure.code, NOTHING_SAID)
        status = failure.http_status
        if status is not None:
            if status not in self.overrides and failure.failure_type is FailureType.RATE_LIMITED:
                status = 429
            yield self.overrides.get(status, NOTHING_SAID)


class CategoryEntry(Struct, frozen=True):
    """What is said about one category of error codes: its policy, and which of its codes are worth another try."""

    policy: Patch = NOTHING_SAID
    codes: Mapping[ErrorCode, Said] = {}


class StatusRules(Struct, frozen=True):
    """Which HTTP statuses are worth another try: by hundred, and by exception."""

    hundreds: Mapping[int, Said] = {}
    statuses: Mapping[int, Said] = {}


class Request(Struct, frozen=True):
    """What one request says about its own retries. None is "not said"."""

    retries: int | None = None
    base_delay: float | None = None
    time_budget: float | None = None

    def patch(self) -> Patch:
        said: dict[str, Any] = {}
        if self.retries is not None:
            said["max_attempts"] = self.retries + 1
        if self.base_delay is not None:
            said["base_delay"] = self.base_delay
        if self.time_budget is not None:
            said["time_budget"] = self.time_budget
        return patch(Layer.REQUEST, "request", said)


NO_REQUEST = Request()


class ResolvedPolicy(RetryPolicy):
    """A policy with the provenance of every field."""

    __slots__ = ("book_hash", "provenance", "target")

    target: str
    provenance: Mapping[str, Settled]
    book_hash: str

    @classmethod
    def of(cls, target: str, settled: Mapping[str, Settled], book_hash: str) -> "ResolvedPolicy":
        policy = cls(**{name: field.value for name, field in settled.items()})
        put = object.__setattr__
        put(policy, "target", target)
        put(policy, "provenance", MappingProxyType(dict(settled)))
        put(policy, "book_hash", book_hash)
        return policy

    def replace(self, **changes: Any) -> "ResolvedPolicy":
        """A policy that differs in the given fields, which were then said by the caller."""
        changed = super().replace(**changes)
        settled = dict(self.provenance)
        for name in changes:
            field = _SPELLED.get(name, name)
            said = patch(Layer.REQUEST, "caller", {field: getattr(changed, field)})
            settled |= settle([*_history(settled.get(field), field), said])
        return ResolvedPolicy.of(self.target, settled, self.book_hash)

    def __reduce__(self) -> tuple[Any, ...]:
        return ResolvedPolicy.of, (self.target, dict(self.provenance), self.book_hash)


_SPELLED = {"backoff_multiplier": "multiplier", "jitter_enabled": "jitter"}


def _history(settled: Settled | None, field: str) -> Iterator[Patch]:
    """What was said of a field so far, lowest first."""
    if settled is not None:
        yield from ({field: one} for one in reversed(settled.overrode))
        yield {field: Said(settled.value, settled.layer, settled.source)}


class Book:
    """One frozen snapshot of all layers."""

    __slots__ = ("_cache", "base", "categories", "content", "hash", "others", "sources", "statuses", "targets")

    def __init__(
        self,
        *,
        base: Mapping[str, tuple[Patch, ...]],
        categories: Mapping[ErrorCategory, tuple[CategoryEntry, ...]],
        statuses: tuple[StatusRules, ...],
        targets: Mapping[str, tuple[TargetEntry, ...]],
        others: Mapping[str, TargetEntry],
        sources: Mapping[str, tuple[str, TargetEntry]],
        hash: str,  # noqa: A002 - it is the book's hash, and the word of the design
        content: Mapping[str, Any] | None = None,
    ) -> None:
        self.base = base
        """By kind of target: what holds when nothing else is said. Lowest first, the file's over the built-in."""
        self.categories = categories
        self.statuses = statuses
        self.targets = targets
        """By target, lowest first: the built-in entry, then the file's."""
        self.others = others
        """By kind of target: what is built in for those that nobody spoke of."""
        self.sources = sources
        """By source: the connector it belongs to, and what is said about it."""
        self.hash = hash
        self.content = content
        """What was written, for the record: the hash is that of this. None when nothing was."""
        self._cache: dict[object, ResolvedPolicy] = {}

    def resolve(
        self, target: str, failure: Failure | None = None, *, source: str | None = None, request: Request = NO_REQUEST
    ) -> ResolvedPolicy:
        """The policy for this target, source, failure and request."""
        known = None if failure is None else (failure.code, failure.failure_type, failure.http_status)
        key = (target, source, known, request)
        found = self._cache.get(key)
        if found is None:
            found = self._resolve(target, failure, source, request)
            if len(self._cache) >= _CACHE:
                self._cache.clear()
            self._cache[key] = found
        return found

    def resolver(self, target: str, *, source: str | None = None) -> Callable[[Failure], RetryPolicy]:
        """`resolve` for one target, as a retrier wants it."""
        return lambda failure: self.resolve(target, failure, source=source)

    def _resolve(self, target: str, failure: Failure | None, source: str | None, request: Request) -> ResolvedPolicy:
        settled = self.settled(target, failure, source=source, request=request)
        return ResolvedPolicy.of(target, settled, self.hash)

    def settled(
        self, target: str, failure: Failure | None = None, *, source: str | None = None, request: Request = NO_REQUEST
    ) -> dict[str, Settled]:
        """Every field's winner, before anybody asks whether they make sense together."""
        kind = kind_of(target)
        settled = settle(self._patches(kind, target, failure, source, request))
        _keep_consistent(settled, kind, failure)
        return settled

    def _patches(
        self, kind: str, target: str, failure: Failure | None, source: str | None, request: Request
    ) -> Iterator[Patch]:
        yield from self.base[kind]
        if kind == "block" and failure is not None:
            yield from self._category(failure)
        entries = [entry for name in families(target) for entry in self.targets.get(name, ())]
        if not entries and kind in self.others:
            entries = [self.others[kind]]
        yield from (entry.policy for entry in entries)
        for entry in entries:
            yield from entry.for_failure(failure)
        if source is not None:
            said = self._source(source, target)
            yield said.policy
            yield from said.for_failure(failure)
        yield request.patch()

    def _category(self, failure: Failure) -> Iterator[Patch]:
        asked = False
        for entry in self.categories.get(failure.category, ()):
            yield entry.policy
            flag = entry.codes.get(failure.code)
            if flag is None:
                continue
            if flag.value != "conditional":
                yield {"retryable": flag}
            elif not asked:
                asked = True
                yield from self._by_status(failure)

    def _by_status(self, failure: Failure) -> Iterator[Patch]:
        status = failure.http_status
        if status is None:
            return
        if status == 403 and failure.failure_type is FailureType.RATE_LIMITED:
            status = 429
        # An exception outlives a hundred that is said again above it: what is not given is inherited.
        for said in (
            *(rules.hundreds.get(status // 100) for rules in self.statuses),
            *(rules.statuses.get(status) for rules in self.statuses),
        ):
            if said is not None:
                yield {"retryable": said}

    def _source(self, source: str, target: str) -> TargetEntry:
        if source not in self.sources:
            accepted = ", ".join(sorted(self.sources)) or "none, because no source is configured"
            raise ParameterError("source", source, f"a configured source: {accepted}")
        connector, entry = self.sources[source]
        if target != f"connector:{connector}":
            raise ParameterError("source", source, f"a source of {target}; this one belongs to connector:{connector}")
        return entry


def content_hash(content: Mapping[str, Any]) -> str:
    """Stands for what was written about policies, wherever and in whatever order."""
    return sha256(json.encode(content, order="sorted")).hexdigest()


def kind_of(target: str) -> str:
    """`block`, `connector` or `operation`."""
    kind, colon, name = target.partition(":")
    if not colon or kind not in _KINDS or not name:
        raise ParameterError("target", target, "block:<type>, connector:<type> or operation:<name>")
    return kind


def families(target: str) -> Iterator[str]:
    """`block:http.request` is also spoken of as `block:http`."""
    if target.startswith("block:"):
        family = target.partition(".")[0]
        if family != target:
            yield family
    yield target


def _keep_consistent(settled: dict[str, Settled], kind: str, failure: Failure | None) -> None:
    """
    What follows from two fields together.

    A rate limit's own delay may exceed the cap, and then is the cap. A request's base delay obeys the cap. A strategy
    that never retries is not retryable.
    """
    base, cap = settled["base_delay"], settled["max_delay"]
    if base.value > cap.value:
        limited = failure is not None and failure.failure_type is FailureType.RATE_LIMITED
        if kind == "connector" and limited:
            beaten = (Said(cap.value, cap.layer, cap.source), *cap.overrode)
            settled["max_delay"] = Settled(base.value, base.layer, base.source, beaten)
        elif base.layer is Layer.REQUEST:
            beaten = (Said(base.value, base.layer, base.source), *base.overrode)
            settled["base_delay"] = Settled(cap.value, cap.layer, cap.source, beaten)
    strategy, retryable = settled["strategy"], settled["retryable"]
    if strategy.value is RetryStrategy.NO_RETRY and retryable.value:
        beaten = (Said(retryable.value, retryable.layer, retryable.source), *retryable.overrode)
        settled["retryable"] = Settled(False, strategy.layer, strategy.source, beaten)
