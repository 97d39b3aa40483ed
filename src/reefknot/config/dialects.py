"""
`DialectReader`: the three dialects of retry settings, read into one policy book.

The worker, the connectors and the operations each configure retries in their own words. Here those words become layers
of one book: retries become executions, milliseconds become seconds, and every value keeps the position it was written
at. A strategy is named by a built-in word, or by one that an installed package offers as an entry point of the group
`reefknot.strategies`; only what a configuration names is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from reefknot.config.layers import Tree, suggest
from reefknot.config.reading.session import KeyPath, Problem, dotted, shortened
from reefknot.config.schema import Backoff, Category, Configuration, ConnectorEntry, ErrorOverride, OperationEntry
from reefknot.core.failure import ErrorCategory, ErrorCode, FailureType
from reefknot.core.retry.backoff import register_strategy
from reefknot.core.retry.book import Book, CategoryEntry, Condition, FieldValue, Layer, Patch, StatusRules, TargetEntry
from reefknot.core.retry.defaults import (
    BASE,
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
from reefknot.core.retry.policy import CUSTOM_STRATEGIES, Jitter, RetryStrategy
from reefknot.errors import ParameterError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "reefknot.strategies"
V2: KeyPath = ("worker", "retries", "v2")

_INHERITS = "null is not a value here; leave the key out to inherit it"
_LONGEST_NAME = 64
_OWN_OPERATION = re.compile(rf"(?=.{{3,{_LONGEST_NAME}}}\Z)[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")
_SLIP_LIKENESS = 0.85
"""Likeness from which a name counts as another one, mistyped: `kv.gett` does, `kv.purge` does not."""


class DialectPlace(NamedTuple):
    """A path in the tree and the layer that its words are read for."""

    tree: Tree
    path: KeyPath
    layer: Layer

    def at(self, *more: str) -> DialectPlace:
        return DialectPlace(self.tree, (*self.path, *more), self.layer)

    def on(self, layer: Layer) -> DialectPlace:
        return DialectPlace(self.tree, self.path, layer)

    def value(self, value: Any, *more: str) -> FieldValue:
        return FieldValue(value, self.layer, str(self.tree.mark((*self.path, *more))))

    def problem(self, message: str, *more: str) -> Problem:
        path = (*self.path, *more)
        return Problem(self.tree.mark(path), dotted(path), message)


class DialectReader:
    """A checked configuration as layers of a book; `problems` collects what the schema alone could not see."""

    def __init__(self, tree: Tree, configuration: Configuration) -> None:
        self.tree = tree
        self.configuration = configuration
        self.problems: list[Problem] = []

    def book(self, hash: str, content: Mapping[str, Any] | None = None) -> Book:  # noqa: A002 - as in Book
        """The book of this configuration; `problems` says whether it may be used."""
        v2 = self.configuration.worker.retries.v2
        written = self._backoff(v2.default_policy, DialectPlace(self.tree, (*V2, "default_policy"), Layer.GLOBAL))
        base = {**BASE, "block": (*BASE["block"], written)}
        return Book(
            base=base,
            categories=self._categories(),
            statuses=(STATUSES, self._statuses()),
            targets={**TARGETS, **self._blocks(), **self._connectors(), **self._operations()},
            others=OTHERS,
            sources=self._sources(),
            hash=hash,
            content=content,
        )

    # ---- the worker's dialect --------------------------------------------------------------------------------------

    def _backoff(self, words: Backoff, place: DialectPlace) -> Patch:
        fields: dict[str, FieldValue] = {}
        for word in sorted(words.model_fields_set):
            value = getattr(words, word)
            if word not in BACKOFF_WORDS:
                continue
            if value is None:
                self.problems.append(place.problem(_INHERITS, word))
                continue
            if word == "strategy" and not self._known_strategy(value, place):
                continue
            field, translate = BACKOFF_WORDS[word]
            fields[field] = place.value(translate(value), word)
        return fields

    def _known_strategy(self, name: str, place: DialectPlace) -> bool:
        problem = problem_with(name)
        if problem:
            self.problems.append(place.problem(problem, "strategy"))
        return not problem

    def _blocks(self) -> dict[str, tuple[TargetEntry, ...]]:
        entries: dict[str, tuple[TargetEntry, ...]] = {}
        for name, words in self.configuration.worker.retries.v2.block_policies.items():
            place = DialectPlace(self.tree, (*V2, "block_policies", name), Layer.TARGET)
            overrides: dict[Condition, Patch] = {}
            for key, override in words.error_overrides.items():
                where = place.at("error_overrides", key).on(Layer.OVERRIDE)
                condition = self._condition(key, where)
                if condition is None:
                    continue
                if condition in overrides:
                    self.problems.append(where.problem("the same failure is given twice; keep one of them"))
                overrides[condition] = self._override(condition, override, where)
            entries[f"block:{name}"] = (TargetEntry(self._backoff(words, place), overrides),)
        return entries

    def _override(self, condition: Condition, words: ErrorOverride, place: DialectPlace) -> Patch:
        fields = dict(self._backoff(words, place))
        if "retryable" not in words.model_fields_set:
            return fields
        if words.retryable is None:
            self.problems.append(place.problem(_INHERITS, "retryable"))
        elif isinstance(condition, FailureType):
            self.problems.append(place.problem("only a code or a status may set it", "retryable"))
        elif isinstance(condition, ErrorCode):
            self._refuse_cancellation(condition.category, words.retryable, place)
        fields["retryable"] = place.value(words.retryable is True, "retryable")
        return fields

    def _condition(self, key: str, place: DialectPlace) -> Condition | None:
        if _is_status(key):
            return int(key)
        names: dict[str, Condition] = {code.name: code for code in ErrorCode if code is not ErrorCode.none}
        names |= {failure_type.value: failure_type for failure_type in FailureType}
        condition = names.get(key.lower())
        if condition is None:
            accepted = f"an HTTP status, or one of {', '.join(names)}"
            self.problems.append(
                place.problem(f"{shortened(key)!r} is not a failure; accepted: {accepted}{suggest(key, names)}")
            )
        return condition

    def _categories(self) -> dict[ErrorCategory, tuple[CategoryEntry, ...]]:
        classification = self.configuration.worker.retries.v2.error_classification
        entries: dict[ErrorCategory, tuple[CategoryEntry, ...]] = {}
        for category, known in CATEGORIES.items():
            words: Category | None = getattr(classification, f"{category.value}_errors", None)
            if words is None:
                entries[category] = (known,)
                continue
            place = DialectPlace(self.tree, (*V2, "error_classification", f"{category.value}_errors"), Layer.CATEGORY)
            entries[category] = (known, CategoryEntry(self._backoff(words, place), self._flags(category, words, place)))
        return entries

    def _flags(self, category: ErrorCategory, words: Category, place: DialectPlace) -> dict[ErrorCode, FieldValue]:
        codes = {code.name: code for code in ErrorCode if code.category is category}
        written = words.retryable
        if "retryable" not in words.model_fields_set:
            return {}
        if isinstance(written, bool):
            self._refuse_cancellation(category, written, place)
            whole = {code: place.value(written, "retryable") for code in codes.values()}
            if written and ErrorCode.http_error in whole:
                whole[ErrorCode.http_error] = place.value("conditional", "retryable")
            return whole
        if not isinstance(written, Mapping):
            self.problems.append(place.problem("accepted: true, false, or a mapping of error codes", "retryable"))
            return {}
        flags: dict[ErrorCode, FieldValue] = {}
        for name, flag in written.items():
            where = place.at("retryable")
            if name not in codes:
                accepted = ", ".join(codes)
                self.problems.append(
                    where.problem(f"unknown code {shortened(name)!r}; accepted: {accepted}{suggest(name, codes)}", name)
                )
            elif not isinstance(flag, bool) and not (flag == "conditional" and name == "http_error"):
                also = ', or "conditional"' if name == "http_error" else ""
                self.problems.append(where.problem(f"accepted: true or false{also}", name))
            else:
                self._refuse_cancellation(category, flag, place)
                flags[codes[name]] = where.value(flag, name)
        return flags

    def _refuse_cancellation(self, category: ErrorCategory, flag: object, place: DialectPlace) -> None:
        if category is ErrorCategory.CANCELLATION and flag is True:
            self.problems.append(place.problem("cancellation is never retried; accepted: false", "retryable"))

    def _statuses(self) -> StatusRules:
        mapping = self.configuration.worker.retries.v2.error_classification.network_errors.http_status_mapping
        place = DialectPlace(
            self.tree, (*V2, "error_classification", "network_errors", "http_status_mapping"), Layer.CATEGORY
        )
        hundreds: dict[int, FieldValue] = {}
        statuses: dict[int, FieldValue] = {}
        for name, words in mapping.items():
            hundred = int(name[0])
            if words.retryable is not None:
                hundreds[hundred] = place.value(words.retryable, name, "retryable")
            for status, flag in words.exceptions.items():
                if not _is_status(status) or int(status) // 100 != hundred:
                    where = place.at(name, "exceptions")
                    self.problems.append(where.problem(f"accepted: a status of {name}, such as {hundred}08", status))
                    continue
                statuses[int(status)] = place.value(flag, name, "exceptions", status)
        return StatusRules(hundreds, statuses)

    # ---- the connectors' dialect -----------------------------------------------------------------------------------

    def _connectors(self) -> dict[str, tuple[TargetEntry, ...]]:
        entries: dict[str, tuple[TargetEntry, ...]] = {}
        for name, words in self.configuration.retry_policies.items():
            place = DialectPlace(self.tree, ("retry_policies", name), Layer.TARGET)
            if not self._known_connector(name, place):
                continue
            entries[f"connector:{name}"] = (connector_entry(name), self._connector(name, (words,), place))
        return entries

    def _known_connector(self, name: str, place: DialectPlace) -> bool:
        known = [job_type.value for job_type in CONNECTORS]
        if name in known or name in _connectors_by_entry_point():
            return True
        accepted = ", ".join(known)
        self.problems.append(
            place.problem(f"unknown connector {shortened(name)!r}; accepted: {accepted}{suggest(name, known)}")
        )
        return False

    def _connector(self, name: str, entries: tuple[ConnectorEntry, ...], place: DialectPlace) -> TargetEntry:
        """The entry of a connector. `entries` is its own and then those beneath: null means "as for other failures"."""
        words = entries[0]
        fields: dict[str, FieldValue] = {}
        overrides: dict[Condition, Patch] = {}
        defaults = {job_type.value: row for job_type, row in CONNECTORS.items()}.get(name, OTHER_CONNECTORS)
        own = place.on(Layer.OVERRIDE)
        for word in sorted(words.model_fields_set):
            value = getattr(words, word)
            match word:
                case "transient_max_attempts":
                    retries = value or _first_given(*(one.max_attempts for one in entries), defaults.max_attempts)
                    overrides[FailureType.TRANSIENT] = {"max_attempts": own.value(retries + 1, word)}
                case "rate_limit_delay_seconds":
                    delay = value or _first_given(
                        *(one.base_delay_seconds for one in entries), defaults.base_delay_seconds
                    )
                    overrides[FailureType.RATE_LIMITED] = {"base_delay": own.value(float(delay), word)}
                case "permanent_failures_no_retry" if value is not None:
                    overrides[FailureType.PERMANENT] = {"retryable": own.value(not value, word)}
                case _ if value is None:
                    message = "null is not a value here; leave the key out to keep the connector's default"
                    self.problems.append(place.problem(message, word))
                case "strategy" if not self._known_strategy(value, place):
                    continue
                case _:
                    field, translate = CONNECTOR_WORDS[word]
                    fields[field] = place.value(translate(value), word)
        return TargetEntry(fields, overrides)

    def _sources(self) -> dict[str, tuple[str, TargetEntry]]:
        entries: dict[str, tuple[str, TargetEntry]] = {}
        for name, source in self.configuration.sources.items():
            place = DialectPlace(self.tree, ("sources", name), Layer.SOURCE)
            if not self._known_connector(source.connector, place.at("connector")):
                continue
            beneath = self.configuration.retry_policies.get(source.connector, ConnectorEntry())
            own = self._connector(source.connector, (source.retry, beneath), place.at("retry"))
            overrides = {
                condition: {field: FieldValue(one.value, Layer.SOURCE, one.source) for field, one in fields.items()}
                for condition, fields in own.overrides.items()
            }
            entries[name] = (source.connector, TargetEntry(own.policy, overrides))
        return entries

    # ---- the operations' dialect -----------------------------------------------------------------------------------

    def _operations(self) -> dict[str, tuple[TargetEntry, ...]]:
        entries: dict[str, tuple[TargetEntry, ...]] = {}
        written: dict[tuple[str, str], str] = {}
        for name, words in self.configuration.operations.items():
            place = DialectPlace(self.tree, ("operations", name), Layer.TARGET)
            target = operation_target(name)
            # Two files, or a file and a variable, may spell it differently: then the later one stands above.
            where = (target, self.tree.mark(place.path).source)
            if where in written:
                self.problems.append(place.problem(f"the same operation as {written[where]!r}; keep one of them"))
                continue
            if not self._known_operation(name, target, place):
                continue
            written[where] = name
            beneath = entries.get(target, (operation_entry(target),))
            entries[target] = (*beneath, TargetEntry(self._operation(words, place)))
        return entries

    def _known_operation(self, name: str, target: str, place: DialectPlace) -> bool:
        """Whether the name is built in, or a dotted name of the user's own that is no slip of a built-in one."""
        if target in TARGETS:
            return True
        names, spelled = [one.name for one in RetryCategory], [one.spelled for one in RetryCategory]
        is_slip = bool(get_close_matches(name.lower()[:_LONGEST_NAME], spelled, cutoff=_SLIP_LIKENESS))
        if is_slip or not _OWN_OPERATION.fullmatch(name):
            accepted = f"{', '.join(names)}, or a dotted name of your own such as billing.charge"
            hint = suggest(name, [*names, *spelled])
            self.problems.append(place.problem(f"unknown operation {shortened(name)!r}; accepted: {accepted}{hint}"))
            return False
        return True

    def _operation(self, words: OperationEntry, place: DialectPlace) -> Patch:
        fields: dict[str, FieldValue] = {}
        for word in sorted(words.model_fields_set):
            value = getattr(words, word)
            if value is None and word != "timeout":
                message = "null is not a value here; leave the key out to keep the operation's default"
                self.problems.append(place.problem(message, word))
                continue
            field, translate = OPERATION_WORDS[word]
            fields[field] = place.value(translate(value), word)
        return fields


def _is_status(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) == 3 and 100 <= int(key) <= 599


def _first_given(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _connectors_by_entry_point() -> Iterator[str]:
    """Names of connectors that other packages offer, read for a name that is not built in. Nothing is imported."""
    from importlib.metadata import entry_points

    return (point.name for point in entry_points(group="reefknot.connectors"))


def strategy_named(name: str) -> RetryStrategy | str:
    """The strategy of a name that `problem_with` accepts."""
    return name if name in CUSTOM_STRATEGIES else RetryStrategy(name)


def problem_with(name: str) -> str:
    """The mistake in a strategy's name, "" when it can be used; then it is loaded."""
    if name in CUSTOM_STRATEGIES or name in set(RetryStrategy):
        return ""
    offered = {point.name: point for point in _offered()}
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
    known = ", ".join(repr(str(one)) for one in [*RetryStrategy, *sorted(point.name for point in _offered())])
    return f"{known}, or what an installed package offers as an entry point of {GROUP}"


def load_all() -> list[str]:
    """Load every strategy that is offered, for replaying what others recorded. Returns what went wrong."""
    return [problem for point in _offered() if (problem := problem_with(point.name))]


def _offered() -> Iterator[EntryPoint]:
    from importlib.metadata import entry_points

    yield from entry_points(group=GROUP)


def _seconds(milliseconds: float) -> float:
    return milliseconds / 1000


def _executions(retries: int) -> int:
    return retries + 1


def _unchanged(value: Any) -> Any:
    return value


def _jitter_switch(enabled: bool) -> Jitter:
    return Jitter.PROPORTIONAL if enabled else Jitter.NONE


BACKOFF_WORDS: dict[str, tuple[str, Any]] = {
    "max_attempts": ("max_attempts", _executions),
    "base_delay_ms": ("base_delay", _seconds),
    "max_delay_ms": ("max_delay", _seconds),
    "jitter_type": ("jitter", Jitter),
    "jitter_factor": ("jitter_factor", float),
    "exponential_base": ("multiplier", float),
    "strategy": ("strategy", strategy_named),
    "max_retry_after_ms": ("max_retry_after", _seconds),
}
CONNECTOR_WORDS: dict[str, tuple[str, Any]] = {
    "strategy": ("strategy", strategy_named),
    "max_attempts": ("max_attempts", _executions),
    "base_delay_seconds": ("base_delay", float),
    "max_delay_seconds": ("max_delay", float),
    "jitter_factor": ("jitter_factor", float),
    "backoff_multiplier": ("multiplier", float),
}
OPERATION_WORDS: dict[str, tuple[str, Any]] = {
    "max_attempts": ("max_attempts", _unchanged),
    "base_delay": ("base_delay", float),
    "max_delay": ("max_delay", float),
    "backoff_multiplier": ("multiplier", float),
    "jitter_enabled": ("jitter", _jitter_switch),
    "jitter_factor": ("jitter_factor", float),
    "retryable_exceptions": ("retryable_exceptions", tuple),
    "non_retryable_exceptions": ("non_retryable_exceptions", tuple),
    "timeout": ("attempt_timeout", _unchanged),
}
