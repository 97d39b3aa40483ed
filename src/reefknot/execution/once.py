"""
One effect per key.

    claim the key → run the work under a renewed lease → record what came of it, outside of the work

Later callers get the recorded answer, wait for the first one, or are told. A record that cannot be written never makes
the effect happen again in this process. What is promised depends on the mode, and is stated with it:

    retry   at least once: a crash in between runs it again
    dedup   once, where the sink deduplicates on the key that the work is given
    guard   at most once: an outcome that nobody knows is left to a person
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Struct

from reefknot.core.canonical import canonical
from reefknot.core.idempotency import (
    Busy,
    Claim,
    Claimed,
    Conflict,
    Done,
    Ending,
    Failed,
    Hit,
    KeyRecord,
    KeyState,
    Released,
    Uncertain,
    Unknown,
    checked_key,
)
from reefknot.errors import (
    IdempotencyError,
    KeyConflictError,
    KeyInProgressError,
    LeaseLostError,
    NotJsonError,
    OutcomeUnknownError,
    ParameterError,
    RecordedFailureError,
    ResultTooLargeError,
    StoreError,
)
from reefknot.execution import report, timing
from reefknot.execution.journal import event_id
from reefknot.execution.reading import read_failure

if TYPE_CHECKING:
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.idempotency_store import IdempotencyStore

LARGEST_RESULT = 256 * 1024
STORE_TIMEOUT = 30.0
RECORD_TRIES = 5
MOST_UNRECORDED = 1000


class Mode(StrEnum):
    """What is promised about the effect."""

    RETRY = "retry"
    DEDUP = "dedup"
    GUARD = "guard"


class How(Struct, frozen=True):
    """How a key is used. `wait` is how long a later caller waits for the first; 0 means that it is told at once."""

    mode: Mode = Mode.RETRY
    lease: float = 60.0
    wait: float = 60.0
    fingerprint: str = ""
    result_type: Any = Any


Events = Callable[[str], Sequence["AuditEntry"]]
"""The events of an action on the key: `hit`, `record`, `release`, `unknown`."""


def _no_events(action: str) -> Sequence[AuditEntry]:
    return ()


class Once:
    """Runs work at most as often as its key's mode says. One for each store: `Once.of(store)`."""

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store
        self._unrecorded: dict[str, tuple[Claim, Done]] = {}

    @classmethod
    def of(cls, store: IdempotencyStore) -> Once:
        """The one for this store; what could not be recorded is remembered there."""
        once = _for_store.get(store)
        if once is None:
            once = _for_store[store] = cls(store)
        return once

    async def run(
        self, key: str, work: Callable[[], Awaitable[Any]], how: How, *, events: Events = _no_events
    ) -> tuple[Any, bool]:
        """The answer, and whether it came from the record."""
        checked_key(key)
        if key in self._unrecorded:
            return await self._recorded_late(key, how, events), True
        waits_until = timing.now() + how.wait
        while True:
            answer = await self._claim(key, how)
            match answer:
                case Claimed(claim=claim):
                    return await self._do(claim, work, how, events), False
                case Hit(record=record):
                    return _answer(record, how), True
                case Conflict(record=record, given=given):
                    raise KeyConflictError(key, recorded=record.fingerprint, given=given)
                case Uncertain(record=record):
                    raise OutcomeUnknownError(key, owner=record.owner)
                case Busy(record=record, remaining_ms=remaining):
                    left = waits_until - timing.now()
                    if left <= 0:
                        raise KeyInProgressError(key, owner=record.owner, retry_after=remaining / 1000)
                    await self._store.wait(key, min(left, max(0.001, remaining / 1000)))

    async def _claim(self, key: str, how: How) -> Claimed | Hit | Busy | Conflict | Uncertain:
        async with asyncio.timeout(STORE_TIMEOUT):
            return await self._store.claim(
                key,
                owner=event_id(),
                fingerprint=how.fingerprint,
                lease=how.lease,
                guard=how.mode is Mode.GUARD,
            )

    async def _do(self, claim: Claim, work: Callable[[], Awaitable[Any]], how: How, events: Events) -> Any:
        try:
            async with _Renewal(self._store, claim, how.lease):
                value = await work()
        except LeaseLostError:
            raise
        except BaseException as error:
            await self._let_go(claim, error, how, events)
            raise
        return await self._record(claim, value, how, events)

    async def _let_go(self, claim: Claim, error: BaseException, how: How, events: Events) -> None:
        """The work failed, or was cancelled. What it did before that nobody knows; the mode says what that means."""
        if how.mode is Mode.GUARD:
            failure = read_failure(error)
            ending: Ending = Unknown(canonical({"message": failure.message, "exception": failure.exception}).decode())
            action = "unknown"
        else:
            ending, action = Released(), "release"
        finishing = asyncio.ensure_future(self._finish(claim, ending, events(action)))
        with suppress(IdempotencyError, StoreError, TimeoutError):  # the lease runs out by itself
            await asyncio.shield(finishing)

    async def _record(self, claim: Claim, value: Any, how: How, events: Events) -> Any:
        try:
            done = Done(_text(value))
        except (NotJsonError, ResultTooLargeError) as error:
            await self._finish(claim, Failed(canonical({"message": str(error)}).decode()), events("record"))
            raise
        self._unrecorded[claim.key] = (claim, done)
        if len(self._unrecorded) > MOST_UNRECORDED:
            self._unrecorded.pop(next(iter(self._unrecorded)))
        trouble = await self._finish_with_patience(claim, done, events("record"))
        if trouble is None:
            self._unrecorded.pop(claim.key, None)
        elif isinstance(trouble, LeaseLostError):
            self._unrecorded.pop(claim.key, None)
            raise trouble
        else:
            report.logger().error(
                "key %s: the effect happened but could not be recorded (%s: %s); this process remembers it",
                report.printable(claim.key, most=80),
                type(trouble).__name__,
                report.printable(str(trouble), most=300),
            )
        return _typed(done.result, how)

    async def _recorded_late(self, key: str, how: How, events: Events) -> Any:
        """The effect happened in this process, but its record is not there yet: try to write it, and answer from it."""
        claim, done = self._unrecorded[key]
        trouble = await self._finish_with_patience(claim, done, events("record"), tries=1)
        if trouble is None:
            self._unrecorded.pop(key, None)
        return _typed(done.result, how)

    async def _finish_with_patience(
        self, claim: Claim, ending: Ending, events: Sequence[AuditEntry], *, tries: int = RECORD_TRIES
    ) -> Exception | None:
        trouble: Exception | None = None
        for attempt in range(tries):
            try:
                await self._finish(claim, ending, events)
            except LeaseLostError as lost:
                return lost
            except Exception as error:
                trouble = error
                if attempt + 1 < tries:
                    await timing.asleep(0.05 * 2**attempt)
            else:
                return None
        return trouble

    async def _finish(self, claim: Claim, ending: Ending, events: Sequence[AuditEntry]) -> None:
        async with asyncio.timeout(STORE_TIMEOUT):
            await self._store.finish(claim, ending, events=events)


class _Renewal:
    """Keeps a lease alive while work runs, and ends the work when the lease is lost."""

    def __init__(self, store: IdempotencyStore, claim: Claim, lease: float) -> None:
        self._store = store
        self._claim = claim
        self._lease = lease
        self._worker: asyncio.Task[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost: LeaseLostError | None = None

    async def __aenter__(self) -> None:
        self._worker = asyncio.current_task()
        self._task = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            try:
                async with asyncio.timeout(self._lease / 3):
                    await self._store.renew(self._claim, lease=self._lease)
            except LeaseLostError as lost:
                self._lost = lost
                assert self._worker is not None
                self._worker.cancel()
                return
            except (StoreError, TimeoutError) as error:  # the next turn may succeed before the lease runs out
                report.logger().warning("a lease could not be renewed: %s", report.printable(str(error), most=300))

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._task is not None
        assert self._worker is not None
        self._task.cancel()
        if self._lost is not None:
            self._worker.uncancel()
            raise self._lost from error


_for_store: WeakKeyDictionary[IdempotencyStore, Once] = WeakKeyDictionary()


def _text(value: Any) -> str:
    """The result as it is recorded."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True)
    except (TypeError, NotImplementedError) as error:
        raise NotJsonError("", str(error)) from error
    text = canonical(plain)
    if len(text) > LARGEST_RESULT:
        raise ResultTooLargeError(size=len(text), limit=LARGEST_RESULT)
    return text.decode()


def _typed(text: str, how: How) -> Any:
    """The recorded result, as the type that was asked for: every caller gets the same, the first one too."""
    return msgspec.json.decode(text, type=how.result_type)


def _answer(record: KeyRecord, how: How) -> Any:
    if record.state is KeyState.FAILED:
        raise RecordedFailureError(record.key, failure=record.failure or "")
    assert record.result is not None
    return _typed(record.result, how)


def mode_named(mode: Mode | str) -> Mode:
    """The mode, or an error that says where `txn` lives."""
    try:
        return Mode(mode)
    except ValueError:
        accepted = "retry, guard or dedup (for txn use rk.ledger(connection).once(key) in your own database)"
        raise ParameterError("mode", mode, accepted) from None
