"""
The policy book: all layers of policy, frozen.

    global < category < step < target < the target's failure overrides < source < its overrides < request

Resolving a book for (target, source, failure, request) gives one policy with the provenance of every field. A book
never changes: a reload makes another one, and work in flight keeps the policy it was given.

A layer is a stack of patches. A patch holds the fields that one place sets, each with its layer and its source. Folding
patches in their order gives the winner of every field and, beneath it, the values it overrode. A field that is not set
is not in the patch; a field that is set to none is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from hashlib import sha256
from types import MappingProxyType
from typing import Any, TypeAlias

from msgspec import Struct, json, structs

from reefknot.core.failure import ErrorCategory, ErrorCode, Failure, FailureType
from reefknot.core.policy import ALIASES, FIELDS, RetryPolicy, RetryStrategy
from reefknot.errors import ParameterError


class Layer(StrEnum):
    """The origin of a value, lowest precedence first."""

    BUILTIN = "builtin"
    GLOBAL = "global"
    CATEGORY = "category"
    STEP = "step"
    """Options of `@rk.block`: over what holds for all steps, under what the configuration says of this one."""
    TARGET = "target"
    OVERRIDE = "override"
    SOURCE = "source"
    REQUEST = "request"

    @property
    def rank(self) -> int:
        """The precedence of the layer: a higher rank wins."""
        return list(Layer).index(self)


class FieldValue(Struct, frozen=True):
    """The value that one place gives to a field: its layer, and its source there."""

    value: Any
    layer: Layer
    source: str


class FieldOrigin(FieldValue, frozen=True):
    """The value that won, where it comes from, and the values it overrode, the last loser first."""

    overrode: tuple[FieldValue, ...] = ()

    def overridden_by(self, winner: FieldValue) -> "FieldOrigin":
        """The origin of the field after `winner` was laid over this one."""
        beaten = FieldValue(self.value, self.layer, self.source)
        return FieldOrigin(winner.value, winner.layer, winner.source, (beaten, *self.overrode))


Patch = Mapping[str, FieldValue]
EMPTY_PATCH: Patch = MappingProxyType({})


def patch(layer: Layer, source: str, fields: Mapping[str, Any]) -> Patch:
    """A patch whose fields all come from one place."""
    return MappingProxyType({name: FieldValue(value, layer, source) for name, value in fields.items()})


def merge(lower: Patch, higher: Patch) -> Patch:
    """Two patches as one; the higher wins where both set a field. Associative, with `EMPTY_PATCH` as its neutral."""
    return MappingProxyType({**lower, **higher})


def fold_patches(patches: Iterable[Patch]) -> dict[str, FieldOrigin]:
    """The winner of every field, for patches from the lowest to the highest."""
    fields: dict[str, FieldOrigin] = {}
    for one in patches:
        for name, given in one.items():
            lower = fields.get(name)
            alone = FieldOrigin(given.value, given.layer, given.source)
            fields[name] = alone if lower is None else lower.overridden_by(given)
    return fields


SHOWN_FIELDS = tuple(
    f for f in FIELDS if f not in ("whole_seconds", "retryable_exceptions", "non_retryable_exceptions")
)
"""The fields that tables and `explain` show; the rest follows from the target or is rarely set."""

Condition: TypeAlias = ErrorCode | FailureType | int
"""The failures that an override is for: an error code, a failure type, or an HTTP status."""

_KINDS = ("block", "connector", "operation")
_CACHE = 4096


class TargetEntry(Struct, frozen=True):
    """The patches of one target or one source: its policy, and its policy for particular failures."""

    policy: Patch = EMPTY_PATCH
    overrides: Mapping[Condition, Patch] = {}

    def for_failure(self, failure: Failure | None) -> Iterator[Patch]:
        """The overrides that apply to this failure, weakest first: by failure type, by code, by status."""
        if failure is None:
            return
        yield self.overrides.get(failure.failure_type, EMPTY_PATCH)
        yield self.overrides.get(failure.code, EMPTY_PATCH)
        status = failure.http_status
        if status is not None:
            if status not in self.overrides and failure.failure_type is FailureType.RATE_LIMITED:
                status = 429
            yield self.overrides.get(status, EMPTY_PATCH)


class CategoryEntry(Struct, frozen=True):
    """The patch of one category of error codes, and which of its codes are retryable."""

    policy: Patch = EMPTY_PATCH
    codes: Mapping[ErrorCode, FieldValue] = {}


class StatusRules(Struct, frozen=True):
    """The HTTP statuses that are retryable: by hundred, and single statuses over them."""

    hundreds: Mapping[int, FieldValue] = {}
    statuses: Mapping[int, FieldValue] = {}


class Request(Struct, frozen=True):
    """The retry options of one request. None leaves a field to the lower layers."""

    retries: int | None = None
    base_delay: float | None = None
    time_budget: float | None = None
    attempt_timeout: float | None = None

    def patch(self) -> Patch:
        fields = {
            "max_attempts": None if self.retries is None else self.retries + 1,
            "base_delay": self.base_delay,
            "time_budget": self.time_budget,
            "attempt_timeout": self.attempt_timeout,
        }
        return patch(Layer.REQUEST, "request", {name: given for name, given in fields.items() if given is not None})


NO_REQUEST = Request()


class ResolvedPolicy(RetryPolicy):
    """A policy with the provenance of every field, as a book resolved it."""

    __slots__ = ("book_hash", "provenance", "target")

    target: str
    provenance: Mapping[str, FieldOrigin]
    book_hash: str

    @classmethod
    def of(cls, target: str, fields: Mapping[str, FieldOrigin], book_hash: str) -> "ResolvedPolicy":
        policy = cls(**{name: field.value for name, field in fields.items()})
        put = object.__setattr__
        put(policy, "target", target)
        put(policy, "provenance", MappingProxyType(dict(fields)))
        put(policy, "book_hash", book_hash)
        return policy

    @property
    def set_by_step(self) -> dict[str, str]:
        """The fields that a step sets, with their places. A worker passes on a step's time as the request's own."""
        found: dict[str, str] = {}
        for name, origin in self.provenance.items():
            lower: FieldValue = origin.overrode[0] if origin.layer is Layer.REQUEST and origin.overrode else origin
            if lower.layer is Layer.STEP and lower.value == origin.value:
                found[name] = lower.source
        return found

    def replace(self, **changes: Any) -> "ResolvedPolicy":
        """A policy that differs in the given fields, whose provenance is then the caller."""
        changed = super().replace(**changes)
        fields = dict(self.provenance)
        for name in changes:
            field = ALIASES.get(name, name)
            given = FieldOrigin(getattr(changed, field), Layer.REQUEST, "caller")
            fields[field] = fields[field].overridden_by(given) if field in fields else given
        return ResolvedPolicy.of(self.target, fields, self.book_hash)

    def __reduce__(self) -> tuple[Any, ...]:
        return ResolvedPolicy.of, (self.target, dict(self.provenance), self.book_hash)


class Book(Struct, frozen=True, eq=False, kw_only=True):
    """A frozen snapshot of all layers of policy."""

    base: Mapping[str, tuple[Patch, ...]]
    """By kind of target: the defaults of all targets of that kind, the built-in patch first, then the file's."""
    categories: Mapping[ErrorCategory, tuple[CategoryEntry, ...]]
    statuses: tuple[StatusRules, ...]
    targets: Mapping[str, tuple[TargetEntry, ...]]
    """By target, lowest first: the built-in entry, then the file's."""
    others: Mapping[str, TargetEntry]
    """By kind of target: the built-in entry of targets that have none of their own."""
    sources: Mapping[str, tuple[str, TargetEntry]]
    """By source: the connector it belongs to, and its entry."""
    hash: str
    own: Mapping[str, Patch] = {}
    """By target: the policy that a block brings itself."""
    content: Mapping[str, Any] | None = None
    """The written policies, which `hash` is the hash of, for the audit log. None when nothing was written."""
    _cache: dict[object, ResolvedPolicy] = {}

    def __repr__(self) -> str:
        return f"<Book {self.hash[:12]}>"

    def resolve(
        self,
        target: str,
        failure: Failure | None = None,
        *,
        source: str | None = None,
        request: Request = NO_REQUEST,
        retryable: FieldValue | None = None,
    ) -> ResolvedPolicy:
        """
        The policy for this target, source, failure and request.

        `retryable` is the answer of the step itself about this failure, which belongs to the step's layer.
        """
        known = None if failure is None else (failure.code, failure.failure_type, failure.http_status)
        key = (target, source, known, request, retryable)
        found = self._cache.get(key)
        if found is None:
            origins = self.origins(target, failure, source=source, request=request, retryable=retryable)
            found = ResolvedPolicy.of(target, origins, self.hash)
            if len(self._cache) >= _CACHE:
                self._cache.clear()
            self._cache[key] = found
        return found

    def with_blocks(self, own: Mapping[str, Patch]) -> "Book":
        """The book with the policies that blocks bring themselves, by target: beneath what the file says of them."""
        return structs.replace(self, own={**self.own, **own}, _cache={}) if own else self

    def resolver(self, target: str, *, source: str | None = None) -> Callable[[Failure], RetryPolicy]:
        """A function from failure to policy for one target, as a retrier takes it."""
        return lambda failure: self.resolve(target, failure, source=source)

    def origins(
        self,
        target: str,
        failure: Failure | None = None,
        *,
        source: str | None = None,
        request: Request = NO_REQUEST,
        retryable: FieldValue | None = None,
    ) -> dict[str, FieldOrigin]:
        """The winner of every field. Whether they make sense together is only checked by `resolve`."""
        kind = kind_of(target)
        asked = EMPTY_PATCH if retryable is None else {"retryable": retryable}
        fields = fold_patches(self._patches(kind, target, failure, source, request, asked))
        _keep_consistent(fields, kind, failure)
        return fields

    def _patches(
        self, kind: str, target: str, failure: Failure | None, source: str | None, request: Request, asked: Patch
    ) -> Iterator[Patch]:
        yield from self.base[kind]
        if kind == "block" and failure is not None:
            yield from self._category(failure)
        yield self.own.get(target, EMPTY_PATCH)
        yield asked
        entries = [entry for name in families(target) for entry in self.targets.get(name, ())]
        if not entries and kind in self.others:
            entries = [self.others[kind]]
        yield from (entry.policy for entry in entries)
        for entry in entries:
            yield from entry.for_failure(failure)
        if source is not None:
            entry = self._source(source, target)
            yield entry.policy
            yield from entry.for_failure(failure)
        yield request.patch()

    def _category(self, failure: Failure) -> Iterator[Patch]:
        by_status = False
        for entry in self.categories.get(failure.category, ()):
            yield entry.policy
            flag = entry.codes.get(failure.code)
            if flag is None:
                continue
            if flag.value != "conditional":
                yield {"retryable": flag}
            elif not by_status:
                by_status = True
                yield from self._by_status(failure)

    def _by_status(self, failure: Failure) -> Iterator[Patch]:
        status = failure.http_status
        if status is None:
            return
        if status == 403 and failure.failure_type is FailureType.RATE_LIMITED:
            status = 429
        # A single status beats a hundred that a higher layer sets: what that layer does not name is inherited.
        for rule in (
            *(rules.hundreds.get(status // 100) for rules in self.statuses),
            *(rules.statuses.get(status) for rules in self.statuses),
        ):
            if rule is not None:
                yield {"retryable": rule}

    def _source(self, source: str, target: str) -> TargetEntry:
        if source not in self.sources:
            accepted = ", ".join(sorted(self.sources)) or "none, because no source is configured"
            raise ParameterError("source", source, f"a configured source: {accepted}")
        connector, entry = self.sources[source]
        if target != f"connector:{connector}":
            raise ParameterError("source", source, f"a source of {target}; this one belongs to connector:{connector}")
        return entry


def content_hash(content: Mapping[str, Any]) -> str:
    """The hash of written policies, whatever file and order they were written in."""
    return sha256(json.encode(content, order="sorted")).hexdigest()


def kind_of(target: str) -> str:
    """The kind of a target: `block`, `connector` or `operation`."""
    kind, colon, name = target.partition(":")
    if not colon or kind not in _KINDS or not name:
        raise ParameterError("target", target, "block:<type>, connector:<type> or operation:<name>")
    return kind


def families(target: str) -> Iterator[str]:
    """The names that entries of a target may have: `block:http.request` is also configured as `block:http`."""
    if target.startswith("block:"):
        family = target.partition(".")[0]
        if family != target:
            yield family
    yield target


def _keep_consistent(fields: dict[str, FieldOrigin], kind: str, failure: Failure | None) -> None:
    """
    Apply the rules between fields.

    A rate limit's own delay may exceed the cap, and then is the cap. A request's base delay obeys the cap. Of a step's
    own delay or cap and another layer's, the lower layer yields. A strategy that never retries is not retryable.
    """
    base, cap = fields["base_delay"], fields["max_delay"]
    if base.value > cap.value:
        limited = failure is not None and failure.failure_type is FailureType.RATE_LIMITED
        by_request, by_step = base.layer is Layer.REQUEST, Layer.STEP in (base.layer, cap.layer)
        if (kind == "connector" and limited) or (by_step and not by_request and base.layer.rank > cap.layer.rank):
            fields["max_delay"] = cap.overridden_by(base)
        elif by_request or by_step:
            fields["base_delay"] = base.overridden_by(cap)
    strategy, retryable = fields["strategy"], fields["retryable"]
    if strategy.value is RetryStrategy.NO_RETRY and retryable.value:
        fields["retryable"] = retryable.overridden_by(FieldValue(False, strategy.layer, strategy.source))


MOST_BOOKS = 16
"""Books that are kept for work that has begun. Work older than all of them follows the oldest one."""


class BookHistory:
    """The books of a process and since when each has been in force: work follows the one it began under."""

    def __init__(self, book: Book) -> None:
        self._books = [(0, book)]

    def add(self, book: Book, *, since: int) -> None:
        """Put a book in force from a time (ms UTC) on."""
        self._books = [*self._books, (since, book)][-MOST_BOOKS:]

    def at(self, began: int) -> Book:
        """The book that was in force at a time (ms UTC)."""
        if len(self._books) == 1:
            return self._books[0][1]
        return next((book for since, book in reversed(self._books) if since <= began), self._books[0][1])
