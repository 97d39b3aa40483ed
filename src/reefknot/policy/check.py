"""
`checked`: the whole configuration, or one error with all of its mistakes.

The schema finds wrong names, kinds and bounds; the dialects find unknown words; the rest shows only when sections are
combined. Each mistake says where it is, what is accepted, and what was probably meant. A configuration is applied as a
whole or not at all.
"""

import copy
from collections.abc import Iterator, Mapping
from itertools import product
from math import ceil
from typing import Any

from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.limits import LimitRule, limit_rule
from reefknot.errors import ConfigurationError, ParameterError
from reefknot.policy.dialects import DialectReader, accepted_strategies
from reefknot.policy.layers import Tree
from reefknot.policy.model.book import Book, content_hash, families
from reefknot.policy.model.defaults import TARGETS
from reefknot.policy.model.explain import horizon
from reefknot.policy.reading.session import KeyPath, Problem
from reefknot.policy.schema import Configuration, LimitEntry, TimetableKeys
from reefknot.policy.secrets import ACCEPTED, WEBHOOK, is_reference
from reefknot.policy.sections import SectionReader, plain, shown

_QUEUE: KeyPath = ("worker", "queue", "v2")


def checked(tree: Tree) -> tuple[Configuration, Book]:
    """The configuration and its book, or `ConfigurationError` with every mistake."""
    sections = SectionReader(tree, {"strategy": accepted_strategies})
    configuration: Configuration = sections.section(Configuration, tree.value, ())
    problems = sections.problems
    reader = DialectReader(tree, configuration)
    written = retry_part({} if problems else tree.value)
    book = reader.book(content_hash(written), written if any(written.values()) else None)
    problems += [*reader.problems, *_queue_problems(tree, configuration), *_unresolvable(tree, book)]
    if configuration.alerts.rules or configuration.alerts.webhook:
        problems += _alert_problems(tree, configuration)
    if configuration.sources or configuration.schedules:
        problems += _timetable_problems(tree, configuration)
    if configuration.limits:
        problems += _limit_problems(tree, configuration)
    if not problems:  # only a book that resolves has a horizon
        problems += _short_retention(tree, configuration, book)
    if problems:
        problems.sort(key=lambda one: (one.mark.source, one.mark.line or 0, one.mark.column or 0))
        raise ConfigurationError(tuple(problems))
    return configuration, book


def retry_part(value: dict[str, Any]) -> dict[str, Any]:
    """Everything a configuration says about retries, which is what a book's hash covers: all policies, no gate."""
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


_RELOADED = ("retry_policies", "operations", "limits")
"""Sections of which a reload applies everything."""


def other_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The sections of a configuration that differ in something else than policies and limits."""
    first, second = _without_policies(before), _without_policies(after)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _without_policies(value: dict[str, Any]) -> dict[str, Any]:
    rest = copy.deepcopy({name: one for name, one in value.items() if name not in _RELOADED})
    v2 = rest.get("worker", {}).get("retries", {}).get("v2", {})
    for name in [name for name in v2 if name != "enabled"]:
        del v2[name]
    for source in rest.get("sources", {}).values():
        source.pop("retry", None)
    return rest


# ---- what only shows when things are put together --------------------------------------------------------------------


def _queue_problems(tree: Tree, configuration: Configuration) -> Iterator[Problem]:
    queue = configuration.worker.queue.v2
    steps = queue.overload_thresholds
    if not steps.degraded < steps.overloaded < steps.critical:
        path = (*_QUEUE, "overload_thresholds")
        given = f"{steps.degraded:g}, {steps.overloaded:g}, {steps.critical:g}"
        yield tree.problem(path, f"{given} do not ascend; accepted: degraded < overloaded < critical")
    chosen = queue.rejection_policy
    if getattr(queue.policies, chosen).enabled is False and "rejection_policy" in queue.written:
        path = (*_QUEUE, "policies", chosen, "enabled")
        yield tree.problem(path, f"rejection_policy names {chosen!r}, so it cannot be disabled; accepted: true")


LONGEST_SCHEDULE_NAME = 200


def _alert_problems(tree: Tree, configuration: Configuration) -> Iterator[Problem]:
    """Limits with which an alert would be raised and resolved by the same value."""
    from reefknot.core import alert_rules

    for name, limits in configuration.alerts.rules.items():
        rule = alert_rules.with_limits(alert_rules.RULES[name], alert_rules.AlertLimits(**plain(limits)))
        for key in ("threshold", "clear"):
            if rule.most is not None and getattr(rule, key) > rule.most:
                text = (
                    f"{getattr(rule, key):g} is not accepted; accepted: at most {rule.most:g}, as the value is a share"
                )
                yield tree.problem(("alerts", "rules", name, key), text)
        if alert_rules.clear_is_beyond(rule) and (rule.most is None or rule.threshold <= rule.most):
            side = "at least" if rule.below else "at most"
            accepted = f"{side} the threshold, {rule.threshold:g}: an alert is resolved where it is not raised"
            yield tree.problem(
                ("alerts", "rules", name, "clear"), f"{rule.clear:g} is not accepted; accepted: {accepted}"
            )
    webhook = configuration.alerts.webhook
    if webhook is not None and not (is_reference(webhook) or webhook.lower().startswith(("http://", "https://"))):
        yield tree.problem(WEBHOOK, f"not accepted; accepted: {alert_rules.WEBHOOKS}, or {ACCEPTED}")


def limit_rules(tree: Tree, limits: Mapping[str, LimitEntry]) -> Iterator[LimitRule | Problem]:
    """The limits of a configuration, each with its place, or what is wrong with it."""
    for name, entry in limits.items():
        given = {key: getattr(entry, key) for key in ("rate", "burst", "running")}
        try:
            yield limit_rule(name, **given, per=entry.per or "", place=str(tree.mark(("limits", name))))
        except ParameterError as error:
            path: KeyPath = ("limits", name, *((error.parameter,) if error.parameter in entry.written else ()))
            stated = f"{shown(getattr(entry, error.parameter))} is" if len(path) > 2 else "this name is"
            if error.parameter not in ("name", *entry.written):
                stated = "a limit without a number is"
            yield tree.problem(path, f"{stated} not accepted; accepted: {error.accepted}")


def _limit_problems(tree: Tree, configuration: Configuration) -> Iterator[Problem]:
    """Mistakes in limits that their keys by themselves do not show."""
    written = tree.value.get("limits", {})
    whole = {name: one for name, one in configuration.limits.items() if one.written >= set(written.get(name, ()))}
    return (one for one in limit_rules(tree, whole) if isinstance(one, Problem))


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
                message = f"{shown(getattr(entry, error.parameter))} is not accepted; accepted: {error.accepted}"
                yield tree.problem((section, name, error.parameter), message)
            else:
                if entry.cron is None and "time_zone" in entry.written:
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
    from reefknot.queue.model.message_schema import written_assignment
    from reefknot.queue.model.messages import InvalidMessage

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
