"""
`DialectReader`: the three dialects of retry settings, read into one policy book.

The worker, the connectors and the operations each configure retries in their own words. Here those words become layers
of one book: retries become executions, milliseconds become seconds, and every value keeps the position it was written
at. A strategy is named by a built-in word, or by one that an installed package offers as an entry point of the group
`reefknot.strategies`; only what a configuration names is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from reefknot.core.backoff import register_strategy
from reefknot.core.checks import suggest
from reefknot.core.failure import ErrorCategory, ErrorCode, FailureType
from reefknot.core.policy import CUSTOM_STRATEGIES, Jitter, RetryStrategy
from reefknot.errors import ParameterError
from reefknot.policy.layers import Tree
from reefknot.policy.model.book import (
    Book,
    CategoryEntry,
    Condition,
    FieldValue,
    Layer,
    Patch,
    StatusRules,
    TargetEntry,
)
from reefknot.policy.model.defaults import (
    BASE,
    BLOCK_LIMITS,
    CATEGORIES,
    CONNECTORS,
    OTHER_CONNECTORS,
    OTHERS,
    STATUSES,
    TARGETS,
    RetryCategory,
    connector_entry,
    operation_entry,
    operation_target,
)
from reefknot.policy.reading.session import KeyPath, Problem, shortened
from reefknot.policy.schema import Category, Configuration, ConnectorEntry, ErrorOverride
from reefknot.policy.sections import Section

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "reefknot.strategies"
V2 = ("worker", "retries", "v2")

_NULL = "null is not a value here; leave the key out to {}"
_LONGEST_NAME = 64
_OWN_OPERATION = rf"(?=.{{3,{_LONGEST_NAME}}}\Z)[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+"
_OWN_CONNECTOR = rf"[a-z][a-z0-9_]{{2,{_LONGEST_NAME - 1}}}"
_SLIP_LIKENESS = 0.85
"""Likeness from which a name counts as another one, mistyped: `kv.gett` does, `kv.purge` does not."""


class DialectPlace(NamedTuple):
    """A path in the tree, the layer that its words are read for, and the list of mistakes."""

    tree: Tree
    path: KeyPath
    layer: Layer
    problems: list[Problem]

    def at(self, *more: str) -> DialectPlace:
        return self._replace(path=(*self.path, *more))

    def on(self, layer: Layer) -> DialectPlace:
        return self._replace(layer=layer)

    def value(self, value: Any, *more: str) -> FieldValue:
        return FieldValue(value, self.layer, str(self.tree.mark((*self.path, *more))))

    def wrong(self, message: str, *more: str) -> None:
        """Note a mistake here, or at a key below."""
        self.problems.append(self.tree.problem((*self.path, *more), message))

    def unknown(self, kind: str, name: str, accepted: str, near: Iterable[str], *more: str) -> None:
        self.wrong(f"unknown {kind} {shortened(name)!r}; accepted: {accepted}{suggest(name, near)}", *more)


class DialectReader:
    """A checked configuration as layers of a book; `problems` collects what the schema alone could not see."""

    def __init__(self, tree: Tree, configuration: Configuration) -> None:
        self.tree = tree
        self.configuration = configuration
        self.problems: list[Problem] = []

    def book(self, hash: str, content: Mapping[str, Any] | None = None) -> Book:  # noqa: A002 - as in Book
        """The book of this configuration; `problems` says whether it may be used."""
        default = self.configuration.worker.retries.v2.default_policy
        written = _fields(default, BACKOFF_WORDS, self._place(Layer.GLOBAL, *V2, "default_policy"))
        worker = _fields(self.configuration.worker, WORKER_WORDS, self._place(Layer.GLOBAL, "worker"))
        return Book(
            base={**BASE, "block": (*BASE["block"], worker, written)},
            categories=self._categories(),
            statuses=(STATUSES, self._statuses()),
            targets={**TARGETS, **self._blocks(), **self._connectors(), **self._operations()},
            others=OTHERS,
            own=BLOCK_LIMITS,
            sources=self._sources(),
            hash=hash,
            content=content,
        )

    def _place(self, layer: Layer, *path: str) -> DialectPlace:
        return DialectPlace(self.tree, path, layer, self.problems)

    # ---- the worker's dialect --------------------------------------------------------------------------------------

    def _blocks(self) -> dict[str, tuple[TargetEntry, ...]]:
        entries: dict[str, tuple[TargetEntry, ...]] = {}
        for name, words in self.configuration.worker.retries.v2.block_policies.items():
            place = self._place(Layer.TARGET, *V2, "block_policies", name)
            overrides: dict[Condition, Patch] = {}
            for key, override in words.error_overrides.items():
                where = place.at("error_overrides", key).on(Layer.OVERRIDE)
                condition = _condition(key, where)
                if condition is None:
                    continue
                if condition in overrides:
                    where.wrong("the same failure is given twice; keep one of them")
                overrides[condition] = _override(condition, override, where)
            entries[f"block:{name}"] = (TargetEntry(_fields(words, BACKOFF_WORDS, place), overrides),)
        return entries

    def _categories(self) -> dict[ErrorCategory, tuple[CategoryEntry, ...]]:
        classification = self.configuration.worker.retries.v2.error_classification
        entries: dict[ErrorCategory, tuple[CategoryEntry, ...]] = {}
        for category, known in CATEGORIES.items():
            section = f"{category.value}_errors"
            words: Category | None = getattr(classification, section, None)
            entries[category] = (known,)
            if words is not None:
                place = self._place(Layer.CATEGORY, *V2, "error_classification", section)
                entry = CategoryEntry(_fields(words, BACKOFF_WORDS, place), _flags(category, words, place))
                entries[category] = (known, entry)
        return entries

    def _statuses(self) -> StatusRules:
        section = ("error_classification", "network_errors", "http_status_mapping")
        place = self._place(Layer.CATEGORY, *V2, *section)
        hundreds: dict[int, FieldValue] = {}
        statuses: dict[int, FieldValue] = {}
        mapping = self.configuration.worker.retries.v2.error_classification.network_errors.http_status_mapping
        for name, words in mapping.items():
            hundred = int(name[0])
            if words.retryable is not None:
                hundreds[hundred] = place.value(words.retryable, name, "retryable")
            for status, flag in words.exceptions.items():
                if _is_status(status) and int(status) // 100 == hundred:
                    statuses[int(status)] = place.value(flag, name, "exceptions", status)
                else:
                    place.wrong(f"accepted: a status of {name}, such as {hundred}08", name, "exceptions", status)
        return StatusRules(hundreds, statuses)

    # ---- the connectors' dialect -----------------------------------------------------------------------------------

    def _connectors(self) -> dict[str, tuple[TargetEntry, ...]]:
        entries: dict[str, tuple[TargetEntry, ...]] = {}
        for name, words in self.configuration.retry_policies.items():
            place = self._place(Layer.TARGET, "retry_policies", name)
            if _is_connector(name, place):
                entries[f"connector:{name}"] = (connector_entry(name), _connector(name, (words,), place))
        return entries

    def _sources(self) -> dict[str, tuple[str, TargetEntry]]:
        entries: dict[str, tuple[str, TargetEntry]] = {}
        for name, source in self.configuration.sources.items():
            place = self._place(Layer.SOURCE, "sources", name)
            if _is_connector(source.connector, place.at("connector")):
                beneath = self.configuration.retry_policies.get(source.connector, ConnectorEntry())
                own = _connector(source.connector, (source.retry, beneath), place.at("retry"))
                entries[name] = (source.connector, own)
        return entries

    # ---- the operations' dialect -----------------------------------------------------------------------------------

    def _operations(self) -> dict[str, tuple[TargetEntry, ...]]:
        entries: dict[str, tuple[TargetEntry, ...]] = {}
        written: dict[tuple[str, str], str] = {}
        for name, words in self.configuration.operations.items():
            place = self._place(Layer.TARGET, "operations", name)
            target = operation_target(name)
            # Two files, or a file and a variable, may spell it differently: then the later one stands above.
            where = (target, self.tree.mark(place.path).source)
            if where in written:
                place.wrong(f"the same operation as {written[where]!r}; keep one of them")
            elif target in TARGETS or _is_own_operation(name, place):
                written[where] = name
                beneath = entries.get(target, (operation_entry(target),))
                own = _fields(words, OPERATION_WORDS, place, null="keep the operation's default")
                entries[target] = (*beneath, TargetEntry(own))
        return entries


def _fields(
    words: Section, meanings: Mapping[str, Meaning], place: DialectPlace, *, null: str = "inherit it"
) -> dict[str, FieldValue]:
    """The fields that the words of one place set. Null is a mistake, except for no timeout; so is a wrong strategy."""
    fields: dict[str, FieldValue] = {}
    for word in sorted(words.written & meanings.keys()):
        value = getattr(words, word)
        field, translate = meanings[word]
        problem = problem_with(value) if word == "strategy" and value is not None else ""
        if value is None and word not in NO_LIMIT:
            problem = _NULL.format(null)
        if problem:
            place.wrong(problem, word)
        else:
            fields[field] = place.value(None if value is None else translate(value), word)
    return fields


def _override(condition: Condition, words: ErrorOverride, place: DialectPlace) -> Patch:
    fields = _fields(words, BACKOFF_WORDS, place)
    if "retryable" not in words.written:
        return fields
    if words.retryable is None:
        place.wrong(_NULL.format("inherit it"), "retryable")
    elif isinstance(condition, FailureType):
        place.wrong("only a code or a status may set it", "retryable")
    elif isinstance(condition, ErrorCode):
        _refuse_cancellation(condition.category, words.retryable, place)
    fields["retryable"] = place.value(words.retryable is True, "retryable")
    return fields


def _condition(key: str, place: DialectPlace) -> Condition | None:
    if _is_status(key):
        return int(key)
    names: dict[str, Condition] = {code.name: code for code in ErrorCode if code is not ErrorCode.none}
    names |= {failure_type.value: failure_type for failure_type in FailureType}
    condition = names.get(key.lower())
    if condition is None:
        accepted = f"an HTTP status, or one of {', '.join(names)}"
        place.wrong(f"{shortened(key)!r} is not a failure; accepted: {accepted}{suggest(key, names)}")
    return condition


def _flags(category: ErrorCategory, words: Category, place: DialectPlace) -> dict[ErrorCode, FieldValue]:
    codes = {code.name: code for code in ErrorCode if code.category is category}
    written = words.retryable
    if "retryable" not in words.written:
        return {}
    if isinstance(written, bool):
        _refuse_cancellation(category, written, place)
        whole = {code: place.value(written, "retryable") for code in codes.values()}
        if written and ErrorCode.http_error in whole:
            whole[ErrorCode.http_error] = place.value("conditional", "retryable")
        return whole
    if not isinstance(written, Mapping):
        place.wrong("accepted: true, false, or a mapping of error codes", "retryable")
        return {}
    flags: dict[ErrorCode, FieldValue] = {}
    for name, flag in written.items():
        where = place.at("retryable")
        if name not in codes:
            where.unknown("code", name, ", ".join(codes), codes, name)
        elif not isinstance(flag, bool) and not (flag == "conditional" and name == "http_error"):
            also = ', or "conditional"' if name == "http_error" else ""
            where.wrong(f"accepted: true or false{also}", name)
        else:
            _refuse_cancellation(category, flag, place)
            flags[codes[name]] = where.value(flag, name)
    return flags


def _refuse_cancellation(category: ErrorCategory, flag: object, place: DialectPlace) -> None:
    if category is ErrorCategory.CANCELLATION and flag is True:
        place.wrong("cancellation is never retried; accepted: false", "retryable")


def _is_connector(name: str, place: DialectPlace) -> bool:
    """Whether the connector is built in, or a name of one's own; one that looks like a mistyped one is a mistake."""
    if name in CONNECTORS or name in {point.name for point in _offered("reefknot.connectors")}:
        return True
    begun = [known for known in CONNECTORS if known.startswith(name)]
    if (
        re.fullmatch(_OWN_CONNECTOR, name)
        and not begun
        and not get_close_matches(name, CONNECTORS, cutoff=_SLIP_LIKENESS)
    ):
        return True
    accepted = f"{', '.join(CONNECTORS)}, or a name of your own: 3 or more lower-case letters, digits and _"
    meant = f", and not the beginning of a built-in one; did you mean {str(begun[0])!r}?" if begun else ""
    place.unknown("connector", name, accepted + meant, () if begun else CONNECTORS)
    return False


def _connector(name: str, entries: tuple[ConnectorEntry, ...], place: DialectPlace) -> TargetEntry:
    """The entry of a connector. `entries` is its own and then those beneath: null means "as for other failures"."""
    words, given = entries[0], entries[0].written
    defaults = CONNECTORS.get(name, OTHER_CONNECTORS)
    overrides: dict[Condition, Patch] = {}
    own = place if place.layer is Layer.SOURCE else place.on(Layer.OVERRIDE)
    if "transient_max_attempts" in given:
        beneath = _first_given(*(one.max_attempts for one in entries), defaults.max_attempts)
        retries = words.transient_max_attempts or beneath
        overrides[FailureType.TRANSIENT] = {"max_attempts": own.value(retries + 1, "transient_max_attempts")}
    if "rate_limit_delay_seconds" in given:
        beneath = _first_given(*(one.base_delay_seconds for one in entries), defaults.base_delay_seconds)
        delay = float(words.rate_limit_delay_seconds or beneath)
        overrides[FailureType.RATE_LIMITED] = {"base_delay": own.value(delay, "rate_limit_delay_seconds")}
    if (never := words.permanent_failures_no_retry) is not None:
        overrides[FailureType.PERMANENT] = {"retryable": own.value(not never, "permanent_failures_no_retry")}
    elif "permanent_failures_no_retry" in given:
        place.wrong(_NULL.format("keep the connector's default"), "permanent_failures_no_retry")
    return TargetEntry(_fields(words, CONNECTOR_WORDS, place, null="keep the connector's default"), overrides)


def _is_own_operation(name: str, place: DialectPlace) -> bool:
    """Whether this is a dotted name of the user's own that is no slip of a built-in one; notes a mistake if not."""
    names, spelled = [one.name for one in RetryCategory], [one.spelled for one in RetryCategory]
    is_slip = bool(get_close_matches(name.lower()[:_LONGEST_NAME], spelled, cutoff=_SLIP_LIKENESS))
    if is_slip or not re.fullmatch(_OWN_OPERATION, name):
        accepted = f"{', '.join(names)}, or a dotted name of your own such as billing.charge"
        place.unknown("operation", name, accepted, [*names, *spelled])
        return False
    return True


def _is_status(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) == 3 and 100 <= int(key) <= 599


def _first_given(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def strategy_named(name: str) -> RetryStrategy | str:
    """The strategy of a name that `problem_with` accepts."""
    return name if name in CUSTOM_STRATEGIES else RetryStrategy(name)


def problem_with(name: str) -> str:
    """The mistake in a strategy's name, "" when it can be used; then it is loaded."""
    if name in CUSTOM_STRATEGIES or name in set(RetryStrategy):
        return ""
    offered = {point.name: point for point in _offered(GROUP)}
    if name not in offered:
        hint = suggest(name, [*RetryStrategy, *offered])
        return f"{shortened(name)!r} is not accepted; accepted: {accepted_strategies()}{hint}"
    try:
        register_strategy(name, offered[name].load())
    except ParameterError as error:
        return f"the strategy cannot be used: {error}"
    except Exception as error:  # another package's code: whatever it raises
        return f"the strategy cannot be loaded ({type(error).__name__}: {shortened(str(error), 200)})"
    return ""


def accepted_strategies() -> str:
    """The names that a configuration may use, in words."""
    known = ", ".join(repr(str(one)) for one in [*RetryStrategy, *sorted(point.name for point in _offered(GROUP))])
    return f"{known}, or what an installed package offers as an entry point of {GROUP}"


def load_all() -> list[str]:
    """Load every strategy that is offered, for replaying what others recorded. Returns what went wrong."""
    return [problem for point in _offered(GROUP) if (problem := problem_with(point.name))]


def _offered(group: str) -> Iterable[EntryPoint]:
    """The entry points of installed packages in a group. None of them is imported."""
    from importlib.metadata import entry_points

    return entry_points(group=group)


def _seconds(milliseconds: float) -> float:
    return milliseconds / 1000


def _executions(retries: int) -> int:
    return retries + 1


NO_LIMIT = ("timeout", "attempt_timeout_ms")
"""Words whose null is a value: no time limit."""
Meaning = tuple[str, Callable[[Any], Any]]
"""The field that a word sets, and the translation of its value."""
BACKOFF_WORDS: dict[str, Meaning] = {
    "max_attempts": ("max_attempts", _executions),
    "base_delay_ms": ("base_delay", _seconds),
    "max_delay_ms": ("max_delay", _seconds),
    "jitter_type": ("jitter", Jitter),
    "jitter_factor": ("jitter_factor", float),
    "exponential_base": ("multiplier", float),
    "strategy": ("strategy", strategy_named),
    "max_retry_after_ms": ("max_retry_after", _seconds),
    "timeout_ms": ("time_budget", _seconds),
    "attempt_timeout_ms": ("attempt_timeout", _seconds),
}
WORKER_WORDS: dict[str, Meaning] = {"default_timeout_ms": ("time_budget", _seconds)}
CONNECTOR_WORDS: dict[str, Meaning] = {
    "strategy": ("strategy", strategy_named),
    "max_attempts": ("max_attempts", _executions),
    "base_delay_seconds": ("base_delay", float),
    "max_delay_seconds": ("max_delay", float),
    "jitter_factor": ("jitter_factor", float),
    "backoff_multiplier": ("multiplier", float),
    "max_retry_after_seconds": ("max_retry_after", float),
}
OPERATION_WORDS: dict[str, Meaning] = {
    "max_attempts": ("max_attempts", int),
    "base_delay": ("base_delay", float),
    "max_delay": ("max_delay", float),
    "backoff_multiplier": ("multiplier", float),
    "jitter_enabled": ("jitter", lambda enabled: Jitter.PROPORTIONAL if enabled else Jitter.NONE),
    "jitter_factor": ("jitter_factor", float),
    "retryable_exceptions": ("retryable_exceptions", tuple),
    "non_retryable_exceptions": ("non_retryable_exceptions", tuple),
    "max_retry_after": ("max_retry_after", float),
    "timeout": ("attempt_timeout", float),
}
