"""
Policies before anything has failed: the policy book in force, one policy with its provenance, and the decision about a
failure described by an operator.

Nothing here runs or changes anything, and no store is needed. Unknown targets, sources and failures are refused with
what is accepted, before anything is resolved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import inf
from sys import float_info
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from reefknot.console.operations.values import ParameterUseError, jsonable, one_of, unknown_word
from reefknot.console.words.policies import (
    CONTROL_FLOW,
    RETRYABLE,
    PolicyAnswer,
    condition_name,
    ingestion_json,
    limit_text,
    short_of_time,
)
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.core.redaction import Redactor
from reefknot.errors import ParameterError
from reefknot.policy.model.book import (
    SHOWN_FIELDS,
    Book,
    Condition,
    FieldOrigin,
    FieldValue,
    Layer,
    Patch,
    Request,
    ResolvedPolicy,
    TargetEntry,
    merge,
)

if TYPE_CHECKING:
    from reefknot.core.limits import LimitRule
    from reefknot.policy.layers import Gate
    from reefknot.policy.model.explain import PlannedWait
    from reefknot.policy.settings import Settings
    from reefknot.queue.model.source_health import HealthRules
    from reefknot.steps.port import OwnRule

CONTROL_FLOW_EXCEPTIONS = frozenset(
    {"KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "asyncio.CancelledError"}
)
"""Exceptions that are never retried and never classified, whatever a policy says."""
KINDS = ("block", "connector", "operation")
NO_SECRETS = Redactor()
"""For answers that have no text of others in them: then no secret need be read."""
TARGETS = "block:TYPE, connector:TYPE or operation:NAME"

# ---- the book --------------------------------------------------------------------------------------------------------


class ActiveBook(NamedTuple):
    """The policy book in force, the gate that decides whether workers follow it, and what hides the file's secrets."""

    book: Book
    gate: Gate
    redactor: Redactor
    settings: Settings | None = None
    """None where nothing is configured."""
    rules: Mapping[str, OwnRule] = {}
    """By target: the `on=` of one's own steps."""

    @property
    def gate_text(self) -> str:
        return "on" if self.gate else "off"


def active_book(
    settings: Settings | None,
    *,
    own: Mapping[str, Patch] | None = None,
    redactor: Redactor | None = None,
) -> ActiveBook:
    """
    The book and the gate in force; the built-in ones without settings.

    `own` are the policies of one's own steps by target, as a worker has them that loads their modules. Without a
    `redactor`, the secrets of the settings are read here; one that cannot be read is skipped: it cannot be shown.
    """
    if settings is None:
        from reefknot.policy.layers import RETRIES, gate
        from reefknot.policy.model.defaults import builtin_book

        active = ActiveBook(builtin_book(), gate(RETRIES, os.environ, None), redactor or Redactor())
    else:
        if redactor is None:
            from reefknot.policy.secrets import secret_texts

            redactor = Redactor(secret_texts(settings.tree, settings.path, environ=os.environ)[0])
        active = ActiveBook(settings.book, settings.retries_gate, redactor, settings)
    return active._replace(book=active.book.with_blocks(own)) if own else active


def known_target(book: Book, target: str | None, source: str | None = None) -> str:
    """The target as the book spells it. A block may have any name; an unknown connector or operation is refused."""
    from reefknot.policy.model.defaults import operation_target

    if source is not None and source not in book.sources:
        raise ParameterUseError("source", unknown_word(source, sorted(book.sources)))
    if target is None:
        if source is None:
            raise ParameterUseError("target", f"is missing; accepted: {TARGETS}")
        return f"connector:{book.sources[source][0]}"
    kind, colon, name = target.partition(":")
    if kind not in KINDS or not colon or not name or not name.isprintable():
        also = "" if target in book.targets else f"; a target is {TARGETS}"
        raise ParameterUseError("target", unknown_word(target, sorted(book.targets), also=also))
    if kind == "operation":
        target = operation_target(name)
    known, prefix = all_targets(book), f"{kind}:"
    if kind != "block" and target not in known:
        same_kind = sorted(one for one in known if one.startswith(prefix))
        raise ParameterUseError("target", unknown_word(target, same_kind, prefix=prefix))
    return target


# ---- the list of policies --------------------------------------------------------------------------------------------

ANY_BLOCK = "block:*"
"""Stands for every block without a policy of its own."""
FIELDS = tuple(name for shown in SHOWN_FIELDS for name in ((shown, "retries") if shown == "max_attempts" else (shown,)))
"""The shown fields of a policy: `retries` comes right after `max_attempts`, from which it follows."""


class PolicyRow(Struct, frozen=True):
    """The policy of one target, or of one source of it."""

    target: str
    source: str | None
    policy: ResolvedPolicy
    overrides: Mapping[Condition, Patch]

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "source": self.source,
            "policy": {name: jsonable(getattr(self.policy, name)) for name in FIELDS},
            "from": origins(self.policy),
            "overrides": sorted(map(condition_name, self.overrides)),
        }


def list_policies(settings: Settings | None, kind: str | None = None) -> dict[str, Any]:
    """Every target and source with its policy, and where it is defined; all of them, or those of one kind."""
    if kind is not None and kind not in KINDS:
        raise ParameterUseError("kind", unknown_word(kind, KINDS))
    active = active_book(settings, redactor=NO_SECRETS)
    return policies_json(active, policy_rows(active.book, kind))


def policies_json(active: ActiveBook, rows: Sequence[PolicyRow]) -> dict[str, Any]:
    return {"gate": active.gate_text, "policies": [row.as_json() for row in rows]}


def all_targets(book: Book) -> set[str]:
    """Every target that is built in, configured, or read by a configured source."""
    return {*book.targets, *(f"connector:{connector}" for connector, _ in book.sources.values())}


def policy_rows(book: Book, kind: str | None = None) -> list[PolicyRow]:
    """Every target, by kind and name, and after a connector its sources."""
    targets = sorted(
        {ANY_BLOCK, *all_targets(book)}, key=lambda target: (KINDS.index(target.partition(":")[0]), target)
    )
    rows = []
    for target in targets:
        if kind is not None and not target.startswith(f"{kind}:"):
            continue
        rows.append(PolicyRow(target, None, book.resolve(target), overrides_of(book, target, None)))
        rows += [
            PolicyRow(target, source, book.resolve(target, source=source), overrides_of(book, target, source))
            for source, (connector, _) in sorted(book.sources.items())
            if target == f"connector:{connector}"
        ]
    return rows


def overrides_of(book: Book, target: str, source: str | None) -> dict[Condition, Patch]:
    """The overrides for particular failures that are in force, merged from all layers: what a source sets for all
    failures beats what its connector sets for some of them."""
    entries = [*book.targets.get(target, ())]
    kind = target.partition(":")[0]
    if not entries and kind in book.others:
        entries = [book.others[kind]]
    found = _merged(entries)
    if source is None:
        return found
    own = book.sources[source][1]
    left = {
        condition: {name: one for name, one in fields.items() if name not in own.policy}
        for condition, fields in found.items()
    }
    return _merged([TargetEntry(overrides={condition: fields for condition, fields in left.items() if fields}), own])


def _merged(entries: Sequence[TargetEntry]) -> dict[Condition, Patch]:
    found: dict[Condition, Patch] = {}
    for entry in entries:
        for condition, fields in entry.overrides.items():
            found[condition] = merge(found.get(condition, {}), fields)
    return found


def origins(policy: ResolvedPolicy) -> list[str]:
    """The sources that changed something over the built-in policy, else the built-in one itself."""
    changed = [field for field in policy.provenance.values() if field.layer is not Layer.BUILTIN]
    if changed:
        return sorted({field.source for field in changed}, key=_by_position)
    return [policy.provenance["max_attempts"].source]


def _by_position(source: str) -> tuple[str, ...]:
    return tuple(part.rjust(8, "0") if part.isdigit() else part for part in source.split(":"))


# ---- one policy with its provenance ----------------------------------------------------------------------------------


def show_policy(settings: Settings | None, target: str | None = None, source: str | None = None) -> dict[str, Any]:
    """The policy of a target, or of a source of it: for each field its value, the layer and source that set it, and
    what it overrides."""
    active = active_book(settings, redactor=NO_SECRETS)
    return policy_row_json(active, policy_row(active, target, source))


def policy_row(active: ActiveBook, target: str | None, source: str | None) -> PolicyRow:
    """The policy of one target, as people name it."""
    name = known_target(active.book, target, source)
    return PolicyRow(name, source, active.book.resolve(name, source=source), overrides_of(active.book, name, source))


def policy_row_json(active: ActiveBook, row: PolicyRow) -> dict[str, Any]:
    return {
        "target": row.target,
        "source": row.source,
        "gate": active.gate_text,
        "policy": policy_json(row.policy, row.policy.provenance),
        "overrides": {
            condition_name(condition): {field: value_json(one) for field, one in fields.items()}
            for condition, fields in row.overrides.items()
        },
    }


def with_provenance(policy: RetryPolicy, provenance: Mapping[str, FieldOrigin]) -> dict[str, FieldOrigin]:
    """Every shown field with the policy's own value, and its origin."""
    fields: dict[str, FieldOrigin] = {}
    for name in FIELDS:
        known = provenance["max_attempts" if name == "retries" else name]
        overrode = known.overrode
        if name == "retries":
            overrode = tuple(FieldValue(one.value - 1, one.layer, one.source) for one in overrode)
        fields[name] = FieldOrigin(getattr(policy, name), known.layer, known.source, overrode)
    return fields


def policy_json(policy: RetryPolicy, provenance: Mapping[str, FieldOrigin]) -> dict[str, Any]:
    return {
        name: {**value_json(field), "overrode": [value_json(one) for one in field.overrode]}
        for name, field in with_provenance(policy, provenance).items()
    }


def value_json(field: FieldValue | FieldOrigin) -> dict[str, Any]:
    """A value with the layer and the source that set it."""
    return {"value": jsonable(field.value), "layer": field.layer.value, "source": field.source}


# ---- one decision ----------------------------------------------------------------------------------------------------


class PolicyQuestion(Struct, frozen=True, kw_only=True):
    """A question about a failure that may come: where it happens, what it is, and what its request asks for."""

    target: str | None = None
    source: str | None = None
    error: str | None = None
    """Error code by name or number."""
    status: int | None = None
    failure_type: str | None = None
    exception: str | None = None
    message: str | None = None
    retry_after: float | None = None
    retry_count: int | None = None
    timeout_ms: int | None = None
    seed: int | None = None
    """Waits are drawn with it; without one, only their ranges are known."""
    baseline: bool = False

    @property
    def has_failure(self) -> bool:
        """Whether anything is said about the failure."""
        facts = (self.error, self.status, self.failure_type, self.exception, self.message, self.retry_after)
        return facts != (None,) * len(facts)

    @property
    def is_control_flow(self) -> bool:
        from reefknot.policy.book import exception_class

        name = self.exception or ""
        found = exception_class(name)
        other = found is not None and not issubclass(found, Exception | BaseExceptionGroup)
        return other or name.removeprefix("builtins.") in CONTROL_FLOW_EXCEPTIONS

    @property
    def has_unknown_exception(self) -> bool:
        """Whether the exception is a name alone, whose class cannot be looked up in this environment."""
        from reefknot.policy.book import is_known_exception

        return bool(self.exception) and not self.is_control_flow and not is_known_exception(str(self.exception))

    def failure(self, redact: Redactor) -> Failure:
        """The described failure, without secrets; an unknown one when nothing is said about it."""
        from reefknot.policy.book import failure_from_facts

        code = None if self.error is None else _error_code(self.error)
        types = {kind.value: kind for kind in FailureType}
        kind = None if self.failure_type is None else one_of("failure_type", self.failure_type, types)
        if self.status is not None and not 300 <= self.status <= 599:
            text = f"{self.status} is not a failure; accepted: a status from 300 to 599"
            raise ParameterUseError("status", text)
        if self.retry_after is not None and not 0 <= self.retry_after <= float_info.max:
            raise ParameterUseError("retry_after", f"{self.retry_after:g} is not accepted: seconds, 0 or more")
        return failure_from_facts(
            code=code,
            http_status=self.status,
            failure_type=kind,
            exception=None if self.exception is None else redact.values_out_of(self.exception),
            message=redact(self.message or ""),
            retry_after=self.retry_after,
        )

    def request(self) -> Request:
        """The retry options that the request carries."""
        from reefknot.policy.book import request_of

        return request_of(retry_count=self.retry_count, timeout_ms=self.timeout_ms)


_ACCEPTED_TYPES = {int: "a whole number", float: "a number of seconds", bool: "true or false", str: "text"}


def question_of(fields: Mapping[str, object]) -> PolicyQuestion:
    """The question that a form, a query string or a JSON object asks. An empty text is a field that was left out."""
    types = {field.name: field.type for field in msgspec.structs.fields(PolicyQuestion)}
    found: dict[str, Any] = {}
    for name, given in fields.items():
        if name not in types:
            raise ParameterUseError(name, f"is unknown; accepted: {', '.join(types)}")
        if given in ("", None):
            continue
        try:
            found[name] = msgspec.convert(given, types[name], strict=not isinstance(given, str))
        except msgspec.ValidationError:
            plain = next(kind for kind in (bool, int, float, str) if kind in (types[name], *_members(types[name])))
            raise ParameterError(name, given, _ACCEPTED_TYPES[plain]) from None
    return PolicyQuestion(**found)


def _members(union: Any) -> tuple[Any, ...]:
    return getattr(union, "__args__", ())


def _error_code(given: str) -> ErrorCode:
    names = {code.name: code for code in ErrorCode if code is not ErrorCode.none}
    numbers = {str(code.value): code for code in names.values()}
    return numbers.get(given) or one_of("error", given, names)


def explain_failure(
    settings: Settings | None, question: PolicyQuestion, *, redactor: Redactor | None = None
) -> dict[str, Any]:
    """Whether a failure is retried, why, and when."""
    return answer_json(explained(active_book(settings, redactor=redactor), question))


def explained(active: ActiveBook, question: PolicyQuestion) -> PolicyAnswer:
    """The answer to a question, by this book."""
    from reefknot.policy.model.explain import explain

    name = known_target(active.book, question.target, question.source)
    failure, request = question.failure(active.redactor), question.request()
    policy: RetryPolicy
    provenance: Mapping[str, FieldOrigin]
    if question.baseline:
        failure, policy, provenance = _baseline(active.book, name, request, failure)
    else:
        resolved = active.book.resolve(name, failure, source=question.source, request=request)
        policy, provenance = resolved, resolved.provenance
    explanation = explain(name, policy, failure, seed=question.seed)
    reason = RETRYABLE if explanation.reason is None else explanation.reason.value
    schedule = explanation.schedule
    if question.is_control_flow:
        reason, schedule = CONTROL_FLOW, ()
    in_ingestion = name.startswith("connector:") and not question.is_control_flow
    health = _health_rules(active) if in_ingestion else None
    throttled = name.startswith("block:") and bool(active.gate) and not question.baseline and _throttles(active)
    rule = None if question.baseline else active.rules.get(name)
    asked_at = "" if rule is None else rule.place
    more = health, throttled, asked_at, _limits(active, name)
    return PolicyAnswer(name, failure, policy, provenance, reason, schedule, active.gate, *more)


def _limits(active: ActiveBook, target: str) -> tuple[LimitRule, ...]:
    """The limits of the fleet under which a step begins, whatever its tenant, destination and inputs are."""
    kind, _, name = target.partition(":")
    rules = () if active.settings is None or kind != "block" else active.settings.limits
    return tuple([rule for rule in rules if rule.fits(name)])


def answer_json(answer: PolicyAnswer) -> dict[str, Any]:
    failure = answer.failure
    more: dict[str, Any] = {} if answer.health is None else {"ingestion": ingestion_json(answer, answer.health)}
    if answer.asked_at:
        more["on"] = {"source": answer.asked_at}
    if problem := short_of_time(answer):
        more["warning"] = problem
    if answer.limits:
        limits = [{"name": one.name, "text": limit_text(one), "source": one.place} for one in answer.limits]
        more["limits"] = limits
    return {
        "target": answer.target,
        "failure": {
            "code": failure.code.name,
            "category": failure.category.value,
            "failure_type": failure.failure_type.value,
            "http_status": failure.http_status,
            "exception": failure.exception or None,
            "message": failure.message or None,
            "retry_after": failure.retry_after,
        },
        "decision": "retry" if answer.retried else "stop",
        "reason": answer.reason,
        "gate": "on" if answer.gate else "off",
        "policy": policy_json(answer.policy, answer.provenance),
        "schedule": jsonable(msgspec.to_builtins(answer.schedule)),
        **more,
    }


def _throttles(active: ActiveBook) -> bool:
    """Whether workers with these settings have a throttle for each destination."""
    return active.settings is None or active.settings.configuration.worker.retries.v2.throttle.enabled


def _health_rules(active: ActiveBook) -> HealthRules:
    """The rules by which a source is held to be down."""
    from reefknot.ingest.configured_sources import health_rules
    from reefknot.queue.model.source_health import HealthRules

    return HealthRules() if active.settings is None else health_rules(active.settings)


# ---- the baseline ----------------------------------------------------------------------------------------------------

_BASELINE = "built-in: baseline"


def _baseline(
    book: Book, name: str, request: Request, failure: Failure
) -> tuple[Failure, RetryPolicy, Mapping[str, FieldOrigin]]:
    """The failure as the baseline classifies it, and the baseline's policy for it. Its time is that of the book."""
    from reefknot.core.failure import ErrorCategory
    from reefknot.policy.model.defaults import BASELINE_RETRIES, baseline, without_retry_after

    if not name.startswith("block:"):
        raise ParameterUseError("baseline", f"{name} has none; the gate worker.retries.v2 governs blocks alone")
    failure = without_retry_after(failure)
    time = _baseline_time(book, name)
    policy = baseline(
        BASELINE_RETRIES if request.retries is None else request.retries,
        timeout=time.value if request.time_budget is None else request.time_budget,
        retryable=failure.category is not ErrorCategory.CANCELLATION,
    )
    provenance = _baseline_provenance(
        policy, time, counted=request.retries is not None, timed=request.time_budget is not None
    )
    return failure, policy, provenance


def _baseline_time(book: Book, target: str) -> FieldOrigin:
    """The time for a step in the baseline: that of the book, as for a worker, else the preset."""
    from reefknot.policy.model.defaults import DEFAULT_TIMEOUT

    found = book.resolve(target).provenance["time_budget"]
    preset = FieldOrigin(DEFAULT_TIMEOUT, Layer.BUILTIN, _BASELINE)
    return preset if found.value in (None, inf, DEFAULT_TIMEOUT) else found


def _baseline_provenance(
    policy: RetryPolicy, time: FieldOrigin, *, counted: bool, timed: bool
) -> dict[str, FieldOrigin]:
    """The provenance of the baseline's fields: the preset, overridden by what the request set."""
    from reefknot.policy.model.defaults import BASELINE_RETRIES

    fields = {name: FieldOrigin(getattr(policy, name), Layer.BUILTIN, _BASELINE) for name in SHOWN_FIELDS}
    fields["max_attempts"] = FieldOrigin(BASELINE_RETRIES + 1, Layer.BUILTIN, _BASELINE)
    fields["attempt_timeout"] = time
    requested = {"max_attempts": counted, "attempt_timeout": timed}
    for name in (name for name, by_request in requested.items() if by_request):
        fields[name] = fields[name].overridden_by(FieldValue(getattr(policy, name), Layer.REQUEST, "request"))
    return fields


# ---- the waits -------------------------------------------------------------------------------------------------------


def policy_waits(
    settings: Settings | None, question: PolicyQuestion, *, redactor: Redactor | None = None
) -> dict[str, Any]:
    """The waits of a target, each with the range that jitter allows for it; with a seed, drawn."""
    return planned(active_book(settings, redactor=redactor), question).as_json()


class PlannedWaits(Struct, frozen=True):
    """The waits of a target under a policy; none when it is not retried."""

    target: str
    policy: ResolvedPolicy
    waits: tuple[PlannedWait, ...]

    def as_json(self) -> dict[str, Any]:
        attempts, waits = self.policy.max_attempts, jsonable(msgspec.to_builtins(self.waits))
        return {"target": self.target, "max_attempts": attempts, "schedule": waits}


def planned(active: ActiveBook, question: PolicyQuestion) -> PlannedWaits:
    """The waits after the failure in question; without one, those of the policy as it is."""
    from reefknot.policy.model.explain import explain, schedule

    name = known_target(active.book, question.target, question.source)
    failure = question.failure(active.redactor) if question.has_failure else None
    policy = active.book.resolve(name, failure, source=question.source, request=question.request())
    if failure is not None:
        waits = explain(name, policy, failure, seed=question.seed).schedule
    else:
        waits = tuple(schedule(policy, seed=question.seed, key=name)) if policy.retryable else ()
    return PlannedWaits(name, policy, waits)
