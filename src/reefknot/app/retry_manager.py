"""
Operations with a category, a record and a key.

    answer from the record → try under the category's policy, every attempt under its timeout → record → tell

The policy comes from the book by category; the loop is the library's own `Run`, so there is one decision here too. An
operation that fails for good raises `RetryError` from its last error; one that is not to be retried gives back its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from reefknot import clock as timing
from reefknot.audit.books import Shelf
from reefknot.audit.journal import AuditSink, Journal, OnFailure, event_id, now_text
from reefknot.core import checks
from reefknot.core.audit.event import (
    DecisionRecord,
    Event,
    FailureRecord,
    IdempotencyEvent,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TimeoutOccurred,
)
from reefknot.core.canonical import canonical, checked_result_type, json_value
from reefknot.core.redaction import Redactor
from reefknot.core.retry.decide import Reason
from reefknot.core.retry.defaults import RetryCategory, operation_target
from reefknot.core.retry.policy import RetryPolicy
from reefknot.errors import AttemptTimeoutError, ParameterTypeError, RetryError
from reefknot.idempotency.events import Telling
from reefknot.idempotency.manager import IdempotencyManager
from reefknot.idempotency.once import How, Mode, mode_named
from reefknot.retrying import plan as exhaustion
from reefknot.retrying.call import Run
from reefknot.retrying.plan import Plan, what_to_pass
from reefknot.retrying.wrappers import attempt_within

if TYPE_CHECKING:
    from reefknot.core.retry.book import Book
    from reefknot.ports.idempotency_store import IdempotencyStore

_REFUSED = frozenset({Reason.NOT_RETRYABLE, Reason.INNER_EXHAUSTED, Reason.THROTTLED, Reason.BREAKER_OPEN})


class HasSnapshot(Protocol):
    """A policy book's front."""

    @property
    def snapshot(self) -> Book: ...


class _Call(Struct, frozen=True):
    """Whose operation it is, for its events."""

    category: str
    operation: str
    tenant_id: str | None
    correlation_id: str | None
    trace_id: str | None
    context: dict[str, Any] | None

    def about(self) -> dict[str, Any]:
        return {
            "timestamp": now_text(),
            "event_id": event_id(),
            "retry_category": self.category,
            "operation": self.operation,
            "tenant_id": self.tenant_id,
            "correlation_id": self.correlation_id,
            "trace_id": self.trace_id,
            "additional_context": self.context,
        }


class RetryManager:
    """Executes operations under the policy of their category."""

    def __init__(
        self,
        *,
        book: HasSnapshot,
        idempotency: IdempotencyStore,
        audit: AuditSink | None = None,
        secrets: tuple[str, ...] = (),
        on_audit_failure: OnFailure | str | None = None,
        lease: float = 60.0,
        wait_for_result: float = 60.0,
    ) -> None:
        checks.seconds("lease", lease)
        checks.seconds("wait_for_result", wait_for_result, or_zero=True, most=inf)
        self._book = book
        self._redactor = Redactor(secrets)
        self.journal = Journal(audit, on_failure=on_audit_failure, redactor=self._redactor)
        self.idempotency_manager = IdempotencyManager(idempotency, journal=self.journal)
        self._shelf = Shelf(audit, self.journal)
        self._one_chain = audit is not None and getattr(idempotency, "audit", None) is audit
        self._lease = lease
        self._wait = wait_for_result

    def get_policy(self, category: RetryCategory | str) -> RetryPolicy:
        """The policy of a category; an unknown one gets the default."""
        return self._book.snapshot.resolve(operation_target(str(category)))

    async def execute_with_retry(
        self,
        category: RetryCategory | str,
        operation: str,
        coro: Callable[[], Awaitable[Any]],
        policy: RetryPolicy | None = None,
        idempotency_key: str | None = None,
        tenant_id: str | None = None,
        correlation_id: str | None = None,
        trace_id: str | None = None,
        additional_context: Mapping[str, Any] | None = None,
        *,
        mode: Mode | str = Mode.RETRY,
        fingerprint: str = "",
        result_type: Any = Any,
    ) -> Any:
        """
        The result of `coro()`, tried as often as the category's policy says.

        `coro` is a function to call for every attempt. With a key, the result is recorded and every caller of the key
        gets it; a recorded None is a result.
        """
        if not callable(coro):
            raise ParameterTypeError("coro", coro, what_to_pass(coro))
        checks.text("operation", operation, "a text that names the operation")
        checks.text("category", category, "a RetryCategory, or a text")
        if policy is not None and not isinstance(policy, RetryPolicy):
            raise ParameterTypeError("policy", policy, "a RetryPolicy, or None for the category's own")
        call = self._call(category, operation, tenant_id, correlation_id, trace_id, additional_context)
        chosen = mode_named(mode)
        plan = self._plan(call, policy, once_only=chosen is Mode.GUARD)
        await self.journal.ready()
        if idempotency_key is None:
            value, more = await self._tried(call, plan, coro)
            await self.journal.write(*more)
            return value

        async def work() -> Any:
            result, telling.with_record[:] = await self._tried(call, plan, coro)
            return result

        how = How(chosen, self._lease, self._wait, fingerprint, checked_result_type(result_type))
        telling = Telling(
            self.journal, lambda action: self._key_event(call, idempotency_key, action), one_chain=self._one_chain
        )
        try:
            value = await self.idempotency_manager.once.run(idempotency_key, work, how, telling)
        except Exception:
            await telling.tell()
            raise
        except BaseException:
            telling.tell_later()
            raise
        await telling.tell()
        return value

    def _call(
        self,
        category: RetryCategory | str,
        operation: str,
        tenant_id: str | None,
        correlation_id: str | None,
        trace_id: str | None,
        context: Mapping[str, Any] | None,
    ) -> _Call:
        shown = None if context is None else json_value(dict(context), "additional_context")
        canonical(shown)  # what no event could hold is refused before anything happens
        return _Call(
            _wire(category),
            self._redactor(operation),
            tenant_id,
            correlation_id,
            trace_id,
            self._redactor.tree(shown),  # type: ignore[arg-type]  # a dictionary stays one
        )

    async def execute_with_nats_retry(
        self,
        operation: str,
        coro: Callable[[], Awaitable[Any]],
        *,
        category: RetryCategory | str | None = None,
        **more: Any,
    ) -> Any:
        """A NATS operation: a publish, unless the category says otherwise."""
        return await self.execute_with_retry(category or RetryCategory.NATS_PUBLISH, operation, coro, **more)

    async def execute_with_kv_retry(
        self,
        operation: str,
        coro: Callable[[], Awaitable[Any]],
        *,
        category: RetryCategory | str | None = None,
        **more: Any,
    ) -> Any:
        """A key-value operation: a get, unless the category says otherwise."""
        return await self.execute_with_retry(category or RetryCategory.KV_GET, operation, coro, **more)

    def _plan(self, call: _Call, given: RetryPolicy | None, *, once_only: bool) -> Plan:
        """Under a guard there is one execution: after a failure nobody knows whether the effect happened."""
        name = f"{call.category}: {call.operation}"
        target = operation_target(call.category)
        book = self._book.snapshot
        if given is None:
            plan = Plan(book.resolve(target), name=name, resolve=book.resolver(target))
        else:
            policy = given
            if policy.attempt_timeout == inf:  # no execution without a limit
                policy = policy.replace(attempt_timeout=book.resolve(target).attempt_timeout)
            plan = Plan(policy, name=name, resolve=lambda failure: policy)
        return plan.with_options({"attempts": 1}) if once_only else plan

    async def _tried(self, call: _Call, plan: Plan, coro: Callable[[], Awaitable[Any]]) -> tuple[Any, list[Event]]:
        """
        The loop: every attempt under its timeout, every failure on record before the wait begins.

        Gives the value, and the events that are to be told with it: a success must not fail because of them.
        """
        run = Run(plan, timing.now(), exhaustion.so_far)
        run.redact = self._redactor
        facts: list[DecisionRecord] = []
        run.observe = lambda *inputs, **more: facts.append(DecisionRecord.of(*inputs, **more))
        while True:
            if run.delay > 0.0:
                await timing.asleep(run.delay)
            try:
                value = await attempt_within(run, _started, (coro,), {})
            except Exception as error:
                if not run.stops(error):
                    await self._told(call, run, error, facts[-1])
                else:
                    await self._given_up(call, run, error, facts[-1])
                    if run.reason is Reason.NOT_RETRYABLE:
                        raise
                    raise RetryError(
                        call.category, list(run.records), call.operation, reason=str(run.reason)
                    ) from error
            else:
                return value, self._recovered(call, run)

    def _recovered(self, call: _Call, run: Run) -> list[Event]:
        if not run.attempts:
            return []
        return [RetryRecovered(**call.about(), total_attempts=run.attempts + 1, elapsed_seconds=run.elapsed)]

    async def _told(self, call: _Call, run: Run, error: Exception, facts: DecisionRecord) -> None:
        failure = facts.failure
        await self._put_book(facts)
        await self.journal.write(
            *self._timeout(call, run, error),
            RetryAttempt(
                **call.about(),
                attempt_number=run.attempts,
                max_attempts=facts.policy.max_attempts,
                delay_seconds=run.delay,
                exception_type=_name_of(failure),
                exception_message=failure.message,
                decision=facts,
            ),
        )

    async def _given_up(self, call: _Call, run: Run, error: Exception, facts: DecisionRecord) -> None:
        assert run.reason is not None
        failure = facts.failure
        kind = RetryRefused if run.reason in _REFUSED else RetryExhausted
        await self._put_book(facts)
        await self.journal.write(
            *self._timeout(call, run, error),
            kind(
                **call.about(),
                total_attempts=run.attempts,
                final_exception_type=_name_of(failure),
                final_exception_message=failure.message,
                reason=run.reason,
                decision=facts,
            ),
        )

    async def _put_book(self, facts: DecisionRecord) -> None:
        """Before the first decision that refers to it. After a reload, that is another one."""
        book = self._book.snapshot
        if facts.book_hash == book.hash:
            await self._shelf.put(book)

    def _timeout(self, call: _Call, run: Run, error: Exception) -> list[Event]:
        if not isinstance(error, AttemptTimeoutError):
            return []
        return [TimeoutOccurred(**call.about(), attempt_number=run.attempts, timeout_seconds=error.seconds)]

    def _key_event(self, call: _Call, key: str, action: str) -> IdempotencyEvent:
        return IdempotencyEvent(**call.about(), idempotency_key=self._redactor(key), action=action)


async def _started(coro: Callable[[], Awaitable[Any]]) -> Any:
    """One execution; a plain function that gives a plain value is as good."""
    value = coro()
    return await value if hasattr(value, "__await__") else value


def _wire(category: RetryCategory | str) -> str:
    """The category as it travels; a name that is not built in stays as it is."""
    try:
        return RetryCategory(category).value
    except ValueError:
        return str(category)


def _name_of(failure: FailureRecord) -> str:
    return failure.exceptions[0].rpartition(".")[2] if failure.exceptions else failure.code
