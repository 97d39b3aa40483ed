"""
`RetryManager` and `IdempotencyManager`: operations with a category, a key and audit events.

    look up the key → try under the category's policy, each attempt with its timeout → record → write the events

The policy comes from the book, by category; the retry loop is the library's own, so the same function decides here. An
operation that fails for good raises `RetryError` from its last error; one that is not retryable raises its own error.

Both managers work without arguments: built-in policies, and the store in scope, else memory, which is not durable.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from reefknot import clock
from reefknot.audit.book_recorder import BookRecorder
from reefknot.audit.journal import AuditSink, Journal, OnFailure, envelope
from reefknot.audit.model.event import (
    DecisionRecord,
    Event,
    IdempotencyEvent,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TimeoutOccurred,
)
from reefknot.core import checks
from reefknot.core.canonical import canonical, checked_result_type, json_value, result_to_json
from reefknot.core.canonical import fingerprint as fingerprint_of
from reefknot.core.decide import REFUSED, History, Reason
from reefknot.core.policy import RetryPolicy
from reefknot.core.redaction import Redactor
from reefknot.errors import AttemptTimeoutError, ConfigurationError, KeyConflictError, ParameterTypeError, RetryError
from reefknot.idempotency.decorator import current_store
from reefknot.idempotency.events import KeyEvents
from reefknot.idempotency.model import KeyState, compute_key
from reefknot.idempotency.once import KeyOptions, Mode, Once, mode_named
from reefknot.policy.model.defaults import RetryCategory, operation_target
from reefknot.retrying.call import CallState, begin_call
from reefknot.retrying.exhaustion import exhaustions
from reefknot.retrying.functions import what_to_pass
from reefknot.retrying.plan import Plan
from reefknot.retrying.wrappers import attempt_within
from reefknot.runtime.event_loops import require_asyncio
from reefknot.runtime.log import logger

if TYPE_CHECKING:
    from reefknot.idempotency.port import IdempotencyStore
    from reefknot.policy.model.book import Book

_MOST_KEYS_IN_MEMORY = 100_000


# ---- keys ------------------------------------------------------------------------------------------------------------


class Lookup(Struct, frozen=True):
    """The record of a key. `found` distinguishes a recorded None from no record."""

    found: bool
    result: Any = None
    state: str | None = None
    metadata: Any = None


class IdempotencyManager:
    """
    Reads, records and clears keys by hand: in the store given, else in the store in scope, else in memory.

    To guard an effect use `@idempotent` or a `RetryManager`, which claim the key before they act: checking here and
    then acting would let two callers act.
    """

    def __init__(self, store: IdempotencyStore | None = None) -> None:
        require_asyncio("IdempotencyManager")
        self.store = _keys_in_scope() if store is None else store
        self.once = Once(self.store)
        self._journal = Journal(None)

    @staticmethod
    def compute_idempotency_key(
        operation: str,
        tenant_id: str | None = None,
        correlation_id: str | None = None,
        additional_params: Mapping[str, object] | None = None,
    ) -> str:
        """The key of these four; the order inside the parameters does not matter."""
        return compute_key(operation, tenant_id, correlation_id, additional_params)

    async def check_idempotency(self, idempotency_key: str) -> Any | None:
        """The recorded result, or None. `lookup` distinguishes a recorded None from no record."""
        found = await self.lookup(idempotency_key)
        if found.found:
            await self._journal.write(_key_event(idempotency_key, "hit"))
        return found.result

    async def lookup(self, idempotency_key: str) -> Lookup:
        """The record of the key: result, state and metadata."""
        record = await self.store.get(idempotency_key)
        if record is None:
            return Lookup(False)
        metadata = None if record.metadata is None else msgspec.json.decode(record.metadata)
        if record.state is not KeyState.DONE or record.result is None:
            return Lookup(False, None, record.state.value, metadata)
        return Lookup(True, msgspec.json.decode(record.result), record.state.value, metadata)

    async def record_result(self, idempotency_key: str, result: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Record a result by hand. Recording the same result again is fine; another one is refused."""
        given = json_value(result, round_trip=True)
        options = KeyOptions(wait=0.0, metadata=None if metadata is None else result_to_json(dict(metadata)))

        async def known() -> Any:
            return given

        events = KeyEvents(self._journal, lambda action: _key_event(idempotency_key, action), one_chain=False)
        recorded = await self.once.run(idempotency_key, known, options, events)
        mine, theirs = fingerprint_of(given), fingerprint_of(recorded)
        if mine != theirs:
            raise KeyConflictError(idempotency_key, recorded=theirs, given=mine)

    async def clear_idempotency(self, idempotency_key: str) -> None:
        """Forget a key, unless it is held."""
        if await self.store.forget(idempotency_key):
            await self._journal.write(_key_event(idempotency_key, "forget"))


def _key_event(key: str, action: str) -> IdempotencyEvent:
    return IdempotencyEvent(**envelope(wall=clock.wall()), idempotency_key=key, action=action)


# ---- operations ------------------------------------------------------------------------------------------------------


class HasSnapshot(Protocol):
    """A policy book, or anything else whose `snapshot` is the book in force."""

    @property
    def snapshot(self) -> Book: ...


class _AuditedOperation(Struct, frozen=True):
    """Operation of one call, redacted, as its events describe it."""

    category: RetryCategory | str
    name: str
    tenant_id: str | None
    correlation_id: str | None
    trace_id: str | None
    context: dict[str, Any] | None

    def fields(self) -> dict[str, Any]:
        ids = {"tenant_id": self.tenant_id, "correlation_id": self.correlation_id, "trace_id": self.trace_id}
        return {
            **envelope(wall=clock.wall(), **ids),
            "retry_category": str(self.category),
            "operation": self.name,
            "additional_context": self.context,
        }


class RetryManager:
    """
    Executes operations under the policy of their category; see `execute_with_retry`.

    Defaults: `book`, the built-in policies; `idempotency`, the store in scope, else memory, which is not durable;
    `audit`, the log of the store that keeps the keys, and for memory the `reefknot.audit` logger.
    """

    def __init__(
        self,
        *,
        book: HasSnapshot | None = None,
        idempotency: IdempotencyStore | None = None,
        audit: AuditSink | None = None,
        secrets: tuple[str, ...] = (),
        on_audit_failure: OnFailure | str | None = None,
        lease: checks.Seconds = 60.0,
        wait_for_result: checks.Seconds = 60.0,
    ) -> None:
        from reefknot.policy.book import PolicyBook

        self._lease = checks.seconds("lease", lease)
        self._wait = checks.seconds("wait_for_result", wait_for_result, or_zero=True, most=inf)
        store = _keys_in_scope() if idempotency is None else idempotency
        sink = _default_sink(store) if audit is None else audit
        self._book: HasSnapshot = PolicyBook() if book is None else book
        self._redactor = Redactor(secrets)
        self.journal = Journal(sink, on_failure=on_audit_failure, redactor=self._redactor)
        self.idempotency_manager = IdempotencyManager(store)
        self.idempotency_manager._journal = self.journal
        self._books = BookRecorder(sink, self.journal)
        self._one_chain = getattr(store, "audit", None) is sink

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
        The result of `coro()`, retried as the category's policy says.

        `coro` is a function to call for every attempt. With a key, the result is recorded and every caller of the key
        gets it; a recorded None is a result.
        """
        require_asyncio("RetryManager")
        if not callable(coro):
            raise ParameterTypeError("coro", coro, what_to_pass(coro))
        checks.text("operation", operation, "a text that names the operation")
        checks.text("category", category, "a RetryCategory, or a text")
        if policy is not None and not isinstance(policy, RetryPolicy):
            raise ParameterTypeError("policy", policy, "a RetryPolicy, or None for the category's own")
        context = self._context(additional_context)
        name = self._redactor(operation)
        described = _AuditedOperation(_category(category), name, tenant_id, correlation_id, trace_id, context)
        chosen = mode_named(mode)
        plan = self._plan(described, policy, single_attempt=chosen is Mode.GUARD)
        await self.journal.flush_backlog()
        if idempotency_key is None:
            value, recovered = await self._try(described, plan, coro)
            await self.journal.write(*recovered)
            return value

        async def work() -> Any:
            result, events.with_record[:] = await self._try(described, plan, coro)
            return result

        def event(action: str) -> IdempotencyEvent:
            key = self._redactor(idempotency_key)
            return IdempotencyEvent(**described.fields(), idempotency_key=key, action=action)

        options = KeyOptions(chosen, self._lease, self._wait, fingerprint, checked_result_type(result_type))
        events = KeyEvents(self.journal, event, one_chain=self._one_chain)
        return await self.idempotency_manager.once.run(idempotency_key, work, options, events)

    async def execute_with_nats_retry(
        self,
        operation: str,
        coro: Callable[[], Awaitable[Any]],
        *,
        category: RetryCategory | str | None = None,
        **more: Any,
    ) -> Any:
        """`execute_with_retry` for a NATS operation; the default category is a publish."""
        return await self.execute_with_retry(category or RetryCategory.NATS_PUBLISH, operation, coro, **more)

    async def execute_with_kv_retry(
        self,
        operation: str,
        coro: Callable[[], Awaitable[Any]],
        *,
        category: RetryCategory | str | None = None,
        **more: Any,
    ) -> Any:
        """`execute_with_retry` for a key-value operation; the default category is a get."""
        return await self.execute_with_retry(category or RetryCategory.KV_GET, operation, coro, **more)

    def _context(self, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The context, redacted. One that no event could hold is refused before any work begins."""
        context = None if given is None else json_value(dict(given), "additional_context")
        canonical(context)
        return self._redactor.tree(context)  # type: ignore[return-value]  # a dictionary stays one

    def _plan(self, operation: _AuditedOperation, given: RetryPolicy | None, *, single_attempt: bool) -> Plan:
        """The plan of one call. A guarded one has a single attempt: after a failure the outcome is unknown."""
        name = f"{operation.category}: {operation.name}"
        target = operation_target(operation.category)
        book = self._book.snapshot
        if given is None:
            plan = Plan(book.resolve(target), name=name, resolver=lambda: book.resolver(target))
        else:
            policy = given
            if policy.attempt_timeout == inf:  # no attempt without a timeout
                policy = policy.replace(attempt_timeout=book.resolve(target).attempt_timeout)
            plan = Plan(policy, name=name, resolver=lambda: lambda failure: policy)
        return plan.with_options({"attempts": 1}) if single_attempt else plan

    async def _try(
        self, operation: _AuditedOperation, plan: Plan, coro: Callable[[], Awaitable[Any]]
    ) -> tuple[Any, list[Event]]:
        """
        The retry loop: each attempt under its timeout, each failure audited before the wait begins.

        Returns the value and the events to write with it: a success must not fail because of its events.
        """
        run = begin_call(plan, clock.now(), exhaustions.count, keeps_records=True)
        run.redact = self._redactor
        decisions: list[DecisionRecord] = []
        run.observe = lambda *inputs, **more: decisions.append(DecisionRecord.of(*inputs, **more))
        try:
            while True:
                if run.delay > 0.0:
                    await clock.asleep(run.delay)
                run.attempt_started()
                began = clock.now()
                try:
                    value = await attempt_within(run, _called, (coro,), {})
                except Exception as error:
                    took = clock.now() - began
                    stops = run.record_failure(error) is None
                    if len(decisions) == run.attempts:  # else there was no decision: the error could not be read
                        await self._audit_failure(operation, run, error, decisions[-1], took)
                    if not stops:
                        continue
                    if run.reason is Reason.NOT_RETRYABLE:
                        raise
                    reason = str(run.reason)
                    raise RetryError(operation.category, list(run.records), operation.name, reason=reason) from error
                else:
                    run.succeeded()
                    return value, _recovered(operation, run)
        finally:
            if run.trace is not None:
                run.trace.end()

    async def _audit_failure(
        self, operation: _AuditedOperation, run: CallState, error: Exception, decision: DecisionRecord, took: float
    ) -> None:
        book = self._book.snapshot
        if decision.book_hash == book.hash:  # after a reload, the decision's book is another one
            await self._books.put(book)
        events: list[Event] = []
        if isinstance(error, AttemptTimeoutError):
            seconds = error.seconds
            events.append(TimeoutOccurred(**operation.fields(), attempt_number=run.attempts, timeout_seconds=seconds))
        await self.journal.write(*events, _failure_event(operation, run, decision, took))


def _failure_event(operation: _AuditedOperation, run: CallState, decision: DecisionRecord, took: float) -> Event:
    failure = decision.failure
    if run.reason is None:
        return RetryAttempt(
            **operation.fields(),
            attempt_number=run.attempts,
            max_attempts=decision.policy.max_attempts,
            delay_seconds=run.delay,
            exception_type=failure.exception_type,
            exception_message=failure.message,
            decision=decision,
            attempt_seconds=round(took, 3),
        )
    kind = RetryRefused if run.reason in REFUSED else RetryExhausted
    return kind(
        **operation.fields(),
        total_attempts=run.attempts,
        final_exception_type=failure.exception_type,
        final_exception_message=failure.message,
        reason=run.reason,
        decision=decision,
        attempt_seconds=round(took, 3),
    )


def _recovered(operation: _AuditedOperation, run: CallState) -> list[Event]:
    if not run.attempts:
        return []
    history = History(run.attempts, run.elapsed)
    return [
        RetryRecovered(
            **operation.fields(), total_attempts=run.attempts + 1, elapsed_seconds=history.elapsed, history=history
        )
    ]


async def _called(coro: Callable[[], Awaitable[Any]]) -> Any:
    """The result of one call; a plain function with a plain result is accepted too."""
    value = coro()
    return await value if hasattr(value, "__await__") else value


def _category(category: RetryCategory | str) -> RetryCategory | str:
    """The built-in category of this name; a name that is not built in stays as it is."""
    try:
        return RetryCategory(category)
    except ValueError:
        return str(category)


# ---- managers by configuration, and by default -----------------------------------------------------------------------


@asynccontextmanager
async def open_manager(
    config: str | None = None, *, engine: str | None = None, environ: Mapping[str, str] | None = None
) -> AsyncIterator[RetryManager]:
    """
    A manager as the configuration says, for as long as the block lasts: its book, store, secrets and audit.

    The file is the one named, else the one found from the current folder. `engine` replaces the file's engine.
    """
    from reefknot.audit.copies import kept_events
    from reefknot.policy.book import PolicyBook
    from reefknot.policy.secrets import secret_texts
    from reefknot.policy.settings import load_settings
    from reefknot.stores.opening import open_store, options_of, store_url

    known = os.environ if environ is None else environ
    settings = load_settings(config, environ=known, cwd=Path.cwd())
    secrets, problems = secret_texts(settings.tree, settings.path, environ=known)
    if problems:
        raise ConfigurationError(problems)
    async with (
        open_store(engine or store_url(settings), **options_of(settings)) as store,
        kept_events(store, settings, secrets=secrets),
    ):
        book = PolicyBook.of(settings.book)
        yield RetryManager(book=book, idempotency=store.idempotency, audit=store.audit, secrets=secrets)


_manager: RetryManager | None = None
_warned = False


def get_retry_manager() -> RetryManager:
    """The manager of this process: built-in policies, keys in memory, events in the log. For one event loop."""
    global _manager
    if _manager is None:
        _manager = RetryManager(idempotency=_keys_in_memory())
    return _manager


def _keys_in_scope() -> IdempotencyStore:
    store = current_store.get()
    return _keys_in_memory() if store is None else store.idempotency


def _keys_in_memory() -> IdempotencyStore:
    from reefknot.stores.memory import MemoryStore

    global _warned
    if not _warned:
        _warned = True
        logger().warning(
            "idempotency keys are kept in memory and end with this process; for durable ones, "
            "open a store (async with reefknot.open_store('sqlite:state.db') as store) and pass store.idempotency"
        )
    # The module is a Clock: the time that the library goes by, a virtual one included.
    return MemoryStore(clock, retention=86400.0, most_keys=_MOST_KEYS_IN_MEMORY).idempotency


def _default_sink(store: IdempotencyStore) -> AuditSink:
    from reefknot.audit.log_sink import LogSink

    # An audit log in memory is never trimmed, which a process that runs for months cannot afford.
    return store.audit if store.durable else LogSink()
