"""
`checked`: the whole configuration, or one error with all of its mistakes.

The schema finds wrong names, kinds and bounds; the dialects find words that mean nothing; the rest only shows when
things are put together. Each mistake says where it is, what is accepted, and what was perhaps meant. Nothing is
half-applied.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product, takewhile
from math import ceil
from typing import Any

from pydantic import ValidationError

from reefknot.core.checks import suggest
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.redaction import redact
from reefknot.errors import ConfigurationError, ParameterError
from reefknot.policy.dialects import DialectReader, accepted_strategies
from reefknot.policy.layers import Tree
from reefknot.policy.model.book import Book, content_hash, families
from reefknot.policy.model.defaults import TARGETS
from reefknot.policy.model.explain import horizon
from reefknot.policy.reading.session import KeyPath, Problem, shortened
from reefknot.policy.schema import MAPPING, TEXT, Configuration, TimetableKeys
from reefknot.policy.secrets import ACCEPTED, SECRET_KEYS, WEBHOOK, is_reference

_QUEUE: KeyPath = ("worker", "queue", "v2")


def checked(tree: Tree) -> tuple[Configuration, Book]:
    """The configuration and its book, or `ConfigurationError` with every mistake."""
    configuration, kept, problems = _validated(tree)
    reader = DialectReader(tree, configuration)
    written = _retry_part(kept)
    book = reader.book(book_hash(kept), written if any(written.values()) else None)
    problems += [*reader.problems, *_queue_problems(tree, configuration), *_unresolvable(tree, book)]
    if configuration.alerts.rules or configuration.alerts.webhook:
        problems += _alert_problems(tree, configuration)
    if configuration.sources or configuration.schedules:
        problems += _timetable_problems(tree, configuration)
    if not problems:  # only a book that resolves has a horizon
        problems += _short_retention(tree, configuration, book)
    if problems:
        problems.sort(key=lambda one: (one.mark.source, one.mark.line or 0, one.mark.column or 0))
        raise ConfigurationError(tuple(problems))
    return configuration, book


def _validated(tree: Tree) -> tuple[Configuration, dict[str, Any], list[Problem]]:
    """The configuration, and its values, without what the schema refuses; and the refusals."""
    noted: dict[KeyPath, Problem] = {}  # what is cut out for its kind is not missing as well
    value = tree.value
    while True:
        try:
            return Configuration.model_validate(value), value, [*noted.values()]
        except ValidationError as error:
            found = [(_path(one["loc"], value), one) for one in error.errors(include_url=False)]
            noted = {path: tree.problem(path, _message(path, one)) for path, one in found} | noted
            value = copy.deepcopy(value)
            cut = [_cut_out(value, path[:-1] if one["type"] == "missing" else path) for path, one in found]
            if not any(cut):  # what cannot be cut out cannot be checked around either
                value = {}


def _cut_out(value: dict[str, Any], path: KeyPath) -> bool:
    """Remove the value at `path`, a list as a whole. The rest is smaller, so checking it comes to an end."""
    names = list(takewhile(lambda part: isinstance(part, str), path))
    holder: Any = value
    for name in names[:-1]:
        holder = holder.get(name) if isinstance(holder, dict) else None
    if not names or not isinstance(holder, dict) or names[-1] not in holder:
        return False
    del holder[names[-1]]
    return True


def book_hash(value: dict[str, Any]) -> str:
    """The hash of everything a configuration says about retries, independent of file, order and layer."""
    return content_hash(_retry_part(value))


def _retry_part(value: dict[str, Any]) -> dict[str, Any]:
    """The values that a book's hash covers: all policies, without the gate."""
    v2 = value.get("worker", {}).get("retries", {}).get("v2", {})
    sources = {
        name: {"connector": source.get("connector"), "retry": source.get("retry", {})}
        for name, source in value.get("sources", {}).items()
    }
    return {
        "worker": {name: part for name, part in v2.items() if name != "enabled"},
        "retry_policies": value.get("retry_policies", {}),
        "operations": value.get("operations", {}),
        "sources": sources,
    }


def other_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The sections of a configuration that differ in something else than policies."""
    first, second = _without_policies(before), _without_policies(after)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _without_policies(value: dict[str, Any]) -> dict[str, Any]:
    rest = copy.deepcopy({name: one for name, one in value.items() if name not in ("retry_policies", "operations")})
    v2 = rest.get("worker", {}).get("retries", {}).get("v2", {})
    for name in [name for name in v2 if name != "enabled"]:
        del v2[name]
    for source in rest.get("sources", {}).values():
        source.pop("retry", None)
    return rest


# ---- what the schema finds -------------------------------------------------------------------------------------------


def _path(location: KeyPath, value: Any) -> KeyPath:
    """The location in the file, without the parts that mark a refused key or the kind of a union."""
    location = tuple(part for part in location if part not in (TEXT, MAPPING))
    if location[-1:] != ("[key]",):
        return location
    for part in location[:-1]:
        value = value[part]
    return location if isinstance(value, dict) and "[key]" in value else location[:-1]


def _message(path: KeyPath, found: Any) -> str:
    context = found.get("ctx", {})
    given = found.get("input")
    if len(path) > 1 and (path[0] == "secrets" or path in SECRET_KEYS):
        return "what is written here is not accepted; accepted: a reference, env:NAME or file:PATH"
    match found["type"]:
        case "extra_forbidden":
            accepted = _fields_at(path[:-1])
            return f"unknown key; accepted: {', '.join(accepted)}{suggest(str(path[-1]), accepted)}"
        case "missing":
            return "missing; it must be given"
        case "not_accepted":
            return f"{_shown(redact(given))} is not accepted; {context.get('why', '')}accepted: {context['accepted']}"
        case "literal_error":
            wrong = "unknown key" if path[-1:] == (given,) else f"{_shown(given)} is not accepted"
            return f"{wrong}; accepted: {context['expected']}{_near(given, context['expected'])}"
        case "greater_than_equal" | "greater_than" | "less_than_equal" | "less_than":
            return f"{_shown(given)} is out of bounds; accepted: {_bounds(path)}"
        case "model_type" | "dict_type" | "model_attributes_type":
            keys = ", ".join(_fields_at(path))
            accepted_mapping = f"a mapping{keys and f' of {keys}'}, or no such key at all"
            return f"{_shown(given)} is not accepted; accepted: {accepted_mapping}"
        case "string_type" | "string_pattern_mismatch" if path[-1:] == ("every",):
            return f"{_shown(given)} is not accepted; accepted: a duration from 1s to 366d, such as 90s, 15m, 2h, 7d"
        case "string_type" if path[-1:] == ("strategy",):
            return f"{_shown(given)} is not accepted; accepted: {accepted_strategies()}"
        case "string_pattern_mismatch" if described := _described(path):
            return f"{_shown(given)} is not accepted; accepted: {described}"
        case kind:
            return f"{_shown(given)} is {_WRONG_KIND.get(kind, found['msg'].lower())}"


_WRONG_KIND = {
    "int_type": "not accepted; accepted: a whole number",
    "int_from_float": "not accepted; accepted: a whole number",
    "float_type": "not accepted; accepted: a number",
    "bool_type": "not accepted; accepted: true or false",
    "string_type": "not accepted; accepted: text",
    "list_type": "not accepted; accepted: a list",
    "string_too_short": "not accepted; accepted: text that is not empty",
}


def _shown(value: object) -> str:
    """The beginning of a value, in the spelling of the file's formats."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return shortened(repr(value))


def _near(given: object, expected: str) -> str:
    words = [word.strip("' ") for word in expected.replace(" or ", ",").split(",")]
    return suggest(given, words) if isinstance(given, str) else ""


def _fields_at(path: KeyPath) -> list[str]:
    """The keys that are accepted at a path, sorted."""
    return sorted(name for one in _schemas_at(path) for name in one.get("properties", ()))


def _bounds(path: KeyPath) -> str:
    """The bounds of a number, from the schema, in words."""
    stated = {name: limit for one in _schemas_at(path) for name, limit in one.items()}
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return " ".join(f"{word} {stated[name]}" for name, word in words.items() if name in stated)


def _described(path: KeyPath) -> str:
    """The description of a setting, from the schema."""
    return next((one["description"] for one in _schemas_at(path) if "description" in one), "")


def _schemas_at(path: KeyPath) -> list[dict[str, Any]]:
    """The JSON Schema of each kind of value that may stand at a path."""
    whole = _json_schema()
    found = [*_alternatives(whole, whole)]
    for part in path:
        below = [one.get("properties", {}).get(part, one.get("additionalProperties")) for one in found]
        found = [one for node in below if isinstance(node, dict) for one in _alternatives(node, whole)]
    return found


def _alternatives(node: dict[str, Any], whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema itself, or those that it refers to or is a union of."""
    if "$ref" in node:
        node = whole["$defs"][node["$ref"].rpartition("/")[2]]
    union = node.get("anyOf") or node.get("oneOf")
    if union is None:
        yield node
    for one in union or ():
        yield from _alternatives(one, whole)


@cache
def _json_schema() -> dict[str, Any]:
    return Configuration.model_json_schema()


# ---- what only shows when things are put together --------------------------------------------------------------------


def _queue_problems(tree: Tree, configuration: Configuration) -> Iterator[Problem]:
    queue = configuration.worker.queue.v2
    steps = queue.overload_thresholds
    if not steps.degraded < steps.overloaded < steps.critical:
        path = (*_QUEUE, "overload_thresholds")
        given = f"{steps.degraded:g}, {steps.overloaded:g}, {steps.critical:g}"
        yield tree.problem(path, f"{given} do not ascend; accepted: degraded < overloaded < critical")
    chosen = queue.rejection_policy
    if getattr(queue.policies, chosen).enabled is False and "rejection_policy" in queue.model_fields_set:
        path = (*_QUEUE, "policies", chosen, "enabled")
        yield tree.problem(path, f"rejection_policy names {chosen!r}, so it cannot be disabled; accepted: true")


LONGEST_SCHEDULE_NAME = 200


def _alert_problems(tree: Tree, configuration: Configuration) -> Iterator[Problem]:
    """Limits with which an alert would be raised and resolved by the same value."""
    from reefknot.core import alerts

    for name, limits in configuration.alerts.rules.items():
        rule = alerts.with_limits(alerts.RULES[name], alerts.AlertLimits(**limits.model_dump()))
        for key in ("threshold", "clear"):
            if rule.most is not None and getattr(rule, key) > rule.most:
                text = (
                    f"{getattr(rule, key):g} is not accepted; accepted: at most {rule.most:g}, as the value is a share"
                )
                yield tree.problem(("alerts", "rules", name, key), text)
        if alerts.clear_is_beyond(rule) and (rule.most is None or rule.threshold <= rule.most):
            side = "at least" if rule.below else "at most"
            accepted = f"{side} the threshold, {rule.threshold:g}: an alert is resolved where it is not raised"
            yield tree.problem(
                ("alerts", "rules", name, "clear"), f"{rule.clear:g} is not accepted; accepted: {accepted}"
            )
    webhook = configuration.alerts.webhook
    if webhook is not None and not (is_reference(webhook) or webhook.lower().startswith(("http://", "https://"))):
        yield tree.problem(WEBHOOK, f"not accepted; accepted: {alerts.WEBHOOKS}, or {ACCEPTED}")


def _timetable_problems(tree: Tree, configuration: Configuration) -> Iterator[Problem]:
    """Mistakes of sources and schedules that their own words do not show: timetables, names, assignments."""
    from reefknot.queue.model import schedules

    sections: dict[str, Mapping[str, TimetableKeys]] = {
        "sources": configuration.sources,
        "schedules": configuration.schedules,
    }
    for section, entries in sections.items():
        for name, entry in entries.items():
            try:
                schedules.parse(entry.every, entry.cron, time_zone=entry.time_zone, missed=entry.missed)
            except ParameterError as error:
                message = f"{_shown(getattr(entry, error.parameter))} is not accepted; accepted: {error.accepted}"
                yield tree.problem((section, name, error.parameter), message)
            else:
                if entry.cron is None and "time_zone" in entry.model_fields_set:
                    message = "not accepted without cron, whose time zone it is: remove it, or give cron"
                    yield tree.problem((section, name, "time_zone"), message)
    for name, schedule in configuration.schedules.items():
        path: KeyPath = ("schedules", name)
        if not name.isprintable() or not 0 < len(name.encode()) <= LONGEST_SCHEDULE_NAME:
            accepted = f"a name of 1 to {LONGEST_SCHEDULE_NAME} bytes that can be printed"
            yield tree.problem(path, f"the name is not accepted; accepted: {accepted}")
        elif name in configuration.sources:
            yield tree.problem(path, "a source has this name; accepted: a name that no source has")
        else:
            yield from _assignment_problems(tree, (*path, "assignment"), name, schedule.assignment)


def _assignment_problems(tree: Tree, path: KeyPath, name: str, fields: dict[str, Any]) -> Iterator[Problem]:
    from reefknot.queue.model.messages import InvalidMessage, written_assignment

    for given in ("assignment_id", "request_id"):
        if given in fields:
            yield tree.problem((*path, given), "not accepted here: each submission has an id of name and due time")
            return
    longest = f"{name}@2026-01-25T21:15:00.000Z"
    found = written_assignment(fields, longest, longest)
    if isinstance(found, InvalidMessage):
        field = found.field or ""
        yield tree.problem((*path, *filter(None, field.split("."))), found.message.removeprefix(f"{field}: "))


_ANY_BLOCK = "block:*"


def _probes(book: Book, target: str) -> Iterator[Failure | None]:
    """Every failure that the target's layers could tell from another one. Only blocks look at codes and statuses."""
    yield None
    if not target.startswith("block:"):
        yield from (Failure(ErrorCode.execution_failed, failure_type) for failure_type in FailureType)
        return
    mentioned = {
        condition for name in families(target) for one in book.targets.get(name, ()) for condition in one.overrides
    }
    types = list(FailureType) if mentioned & {*FailureType} else [FailureType.UNKNOWN]
    statuses: list[int | None] = [None, *sorted(one for one in mentioned if type(one) is int)]
    for code, failure_type, status in product(ErrorCode, types, statuses):
        yield Failure(code, failure_type, "", status)


def _unresolvable(tree: Tree, book: Book) -> Iterator[Problem]:
    """Mistakes that only the merged layers show, such as a base delay above its cap."""
    noted: set[tuple[str, str]] = set()
    # Targets that no file mentions are built in, and a test holds that those make sense.
    mentioned = (target for target, entries in book.targets.items() if entries is not TARGETS.get(target))
    pairs: list[tuple[str, str | None]] = [(target, None) for target in mentioned]
    pairs += [(f"connector:{connector}", source) for source, (connector, _) in book.sources.items()]
    pairs.append((_ANY_BLOCK, None))
    for target, source in pairs:
        for failure in _probes(book, target):
            try:
                book.resolve(target, failure, source=source)
            except ParameterError as error:
                problem = _located(tree, book, target, source, failure, error)
                if (str(problem.mark), problem.message) not in noted:
                    noted.add((str(problem.mark), problem.message))
                    yield problem


def _located(
    tree: Tree, book: Book, target: str, source: str | None, failure: Failure | None, error: ParameterError
) -> Problem:
    fields = book.origins(target, failure, source=source)
    base, cap = fields["base_delay"], fields["max_delay"]
    field, blamed = ("max_delay", cap) if cap.layer.rank > base.layer.rank else ("base_delay", base)
    written = [path for path, mark in tree.marks.items() if str(mark) == blamed.source]
    if not written:
        return Problem(tree.mark(()), target, str(error))
    # A variable gives all of its values one mark: the word that sets the field is meant.
    path = max(written, key=lambda path: (str(path[-1:]).count(field), len(path)))
    shown = "any block" if target == _ANY_BLOCK else target
    message = (
        f"for {shown}, the base delay of {base.value:g} s is above the cap of {cap.value:g} s;"
        " accepted: base at most the cap"
    )
    return tree.problem(path, message)


def _short_retention(tree: Tree, configuration: Configuration, book: Book) -> Iterator[Problem]:
    """Yields a Problem if keys expire sooner than retries end: a forgotten key would let the effect happen twice."""
    kept = configuration.idempotency.retention_seconds
    targets = [target for target in (*book.targets, "block:*") if not target.startswith("connector:")]
    longest, target = max((horizon(book.resolve(target)), target) for target in targets)
    if kept < longest:
        message = (
            f"{kept:g} s is shorter than {target} may be retried for ({longest:g} s), so a key could be forgotten while"
            f" its work goes on; accepted: at least {ceil(longest)}"
        )
        yield tree.problem(("idempotency", "retention_seconds"), message)
