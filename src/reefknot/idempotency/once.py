"""
One effect per key.

    claim the key → run the work under a renewed lease → record what came of it, outside of the work

Later callers get the recorded answer, wait for the first one, or are told. A record that cannot be written never makes
the effect happen again in this process: it is remembered here, answered from, and written later. What is promised
depends on the mode, and is stated with it:

    retry   at least once: a crash in between runs it again
    dedup   once, where the sink deduplicates on the key that the work is given
    guard   at most once: an outcome that nobody knows is left to a person
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from reefknot import clock as timing
from reefknot.audit.journal import event_id
from reefknot.core.canonical import canonical, result_from_json, result_to_json
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
    KeyConflictError,
    KeyInProgressError,
    LeaseLostError,
    NotJsonError,
    OutcomeUnknownError,
    ParameterError,
    RecordedFailureError,
    ResultTooLargeError,
    StoreUnavailableError,
)
from reefknot.idempotency import manager as ambient
from reefknot.idempotency.renewal import Renewal
from reefknot.idempotency.unrecorded import Outstanding, outstanding_of
from reefknot.retrying.failures import read_failure
from reefknot.runtime import tasks as background
from reefknot.runtime.log import logger, printable

if TYPE_CHECKING:
    from reefknot.idempotency.events import Telling
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.idempotency_store import IdempotencyStore

T = TypeVar("T")

STORE_TIMEOUT = 30.0
RECORD_TRIES = 5


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
    metadata: str | None = None
    """JSON text that is kept beside the result."""


class Once:
    """Runs work at most as often as its key's mode says. Any number of them may share a store."""

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store
        self._outstanding = outstanding_of(store)

    async def run(self, key: str, work: Callable[[], Awaitable[Any]], how: How, telling: Telling) -> Any:
        """What came of the key: from the record, or by running `work`."""
        checked_key(key)
        waits_until = timing.now() + how.wait
        while True:
            late = self._outstanding.get(key)
            if late is not None and await self._recorded_late(late, telling):
                return _answer(late, how, telling)
            answer = await self._claim(key, how)
            match answer:
                case Claimed(claim=claim):
                    if self._outstanding.is_full:
                        await self._end(claim, Released(), "release", telling)
                        raise self._outstanding.refusal()
                    return await self._do(claim, work, how, telling)
                case Hit(record=record):
                    telling.saw("hit")
                    return _on_record(record, how)
                case Conflict(record=record, given=given):
                    telling.saw("conflict")
                    raise KeyConflictError(key, recorded=record.fingerprint, given=given)
                case Uncertain(record=record):
                    telling.saw("unknown")
                    ambient.left_unknown(key)
                    raise OutcomeUnknownError(key, owner=record.owner)
                case Busy(record=record, remaining_ms=remaining):
                    left = waits_until - timing.now()
                    if left <= 0:
                        telling.saw("in_progress")
                        raise KeyInProgressError(key, owner=record.owner, retry_after=remaining / 1000)
                    await self._wait(key, min(left, max(0.001, remaining / 1000)))

    async def _claim(self, key: str, how: How) -> Claimed | Hit | Busy | Conflict | Uncertain:
        owner, guard = event_id(), how.mode is Mode.GUARD
        asking = self._store.claim(key, owner=owner, fingerprint=how.fingerprint, lease=how.lease, guard=guard)
        try:
            return await _bounded(asking)
        except (asyncio.CancelledError, StoreUnavailableError):  # it may have been granted all the same
            background.start(self._give_back(key, owner, how), "giving a key back")
            raise

    async def _give_back(self, key: str, owner: str, how: How) -> None:
        """The answer to a claim was lost, and nothing was done: ask again as the same owner, and let go."""
        guard = how.mode is Mode.GUARD
        answer = await _bounded(
            self._store.claim(key, owner=owner, fingerprint=how.fingerprint, lease=how.lease, guard=guard)
        )
        if isinstance(answer, Claimed):
            await self._finish(answer.claim, Released(), ())

    async def _wait(self, key: str, seconds: float) -> None:
        async with asyncio.timeout(seconds + STORE_TIMEOUT):
            await self._store.wait(key, seconds)

    async def _do(self, claim: Claim, work: Callable[[], Awaitable[Any]], how: How, telling: Telling) -> Any:
        renewal = Renewal(self._store, claim, how.lease)
        try:
            async with renewal:
                value = await work()
        except GeneratorExit:  # nobody runs this coroutine any more, so nothing can be awaited; the lease runs out
            raise
        except BaseException as error:
            if not renewal.lost:
                await self._let_go(claim, error, how, telling)
            raise
        return await self._record(claim, value, how, telling)

    async def _let_go(self, claim: Claim, error: BaseException, how: How, telling: Telling) -> None:
        """The work failed, or was cancelled. What it did before that nobody knows; the mode says what that means."""
        if how.mode is Mode.GUARD:
            ambient.left_unknown(claim.key)
            message = telling.safe(read_failure(error).message)
            ending: Ending = Unknown(canonical({"message": message, "exception": type(error).__name__}).decode())
            action = "unknown"
        else:
            ending, action = Released(), "release"
        await asyncio.shield(background.start(self._end(claim, ending, action, telling), "letting a key go"))

    async def _end(self, claim: Claim, ending: Ending, action: str, telling: Telling) -> None:
        try:
            await self._finish(claim, ending, telling.beside(action))
        except LeaseLostError:
            return
        except Exception as trouble:  # the lease runs out by itself
            _say("could not be let go, and stays taken until its lease runs out", claim, trouble)
        else:
            telling.did(action)

    async def _record(self, claim: Claim, value: Any, how: How, telling: Telling) -> Any:
        refused: Exception | None = None
        try:
            ending: Done | Failed = Done(result_to_json(value), how.metadata)
        except NotJsonError as error:
            ending, refused = _unfit(error), error
        try:
            trouble = await self._write_down(claim, ending, how, telling)
            if isinstance(trouble, ResultTooLargeError):
                ending, refused = _unfit(trouble), trouble
                trouble = await self._write_down(claim, ending, how, telling)
        except asyncio.CancelledError:  # the effect has happened, and its record does not depend on who waits for it
            background.start(self._write_down_and_tell(claim, ending, how, telling), "recording a result")
            raise
        if isinstance(trouble, LeaseLostError):
            raise trouble
        if refused is not None:
            raise refused
        assert isinstance(ending, Done)
        return result_from_json(ending.result, how.result_type)

    async def _write_down_and_tell(self, claim: Claim, ending: Done | Failed, how: How, telling: Telling) -> None:
        trouble = await self._write_down(claim, ending, how, telling)
        if isinstance(trouble, ResultTooLargeError):
            await self._write_down(claim, _unfit(trouble), how, telling)
        await telling.tell()

    async def _write_down(self, claim: Claim, ending: Done | Failed, how: How, telling: Telling) -> Exception | None:
        """Record it with patience; what cannot be recorded is remembered."""
        late = Outstanding(claim, ending, how.fingerprint, tuple(telling.beside("record")))
        self._outstanding.remember(late)
        trouble = await self._finish_with_patience(late)
        if trouble is None:
            if self._outstanding.forget(late):
                telling.did("record")
            if self._outstanding.any_stuck:
                background.start(self._catch_up(), "recording earlier results")
        elif isinstance(trouble, LeaseLostError | ResultTooLargeError):
            self._outstanding.forget(late)
        elif self._outstanding.stuck(late):
            telling.saw("unrecorded")
            _say("is done but could not be recorded; this process remembers it", claim, trouble)
        return trouble

    async def _catch_up(self) -> None:
        """The store works again: write what it could not take before."""
        for late in self._outstanding.take_stuck():
            trouble = await self._finish_with_patience(late, tries=1)
            if trouble is None or isinstance(trouble, LeaseLostError):
                self._outstanding.forget(late)
            else:
                self._outstanding.stuck(late)

    async def _recorded_late(self, late: Outstanding, telling: Telling) -> bool:
        """
        The effect happened in this process, but its record is not there yet: try to write it.

        False when somebody else took the key over meanwhile: then their record counts.
        """
        trouble = await self._finish_with_patience(late, tries=1)
        if trouble is None and self._outstanding.forget(late):
            telling.did("record")
        if isinstance(trouble, LeaseLostError):
            self._outstanding.forget(late)
            return False
        return True

    async def _finish_with_patience(self, late: Outstanding, *, tries: int = RECORD_TRIES) -> Exception | None:
        trouble: Exception | None = None
        for attempt in range(tries):
            if attempt:
                await timing.asleep(0.05 * 2 ** (attempt - 1))
            try:
                await self._finish(late.claim, late.ending, late.entries)
            except (LeaseLostError, ResultTooLargeError) as final:
                return final
            except Exception as error:
                trouble = error
            else:
                return None
        return trouble

    async def _finish(self, claim: Claim, ending: Ending, entries: Sequence[AuditEntry]) -> None:
        await _bounded(self._store.finish(claim, ending, events=entries))


async def _bounded(asking: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(STORE_TIMEOUT):
            return await asking
    except TimeoutError as error:
        problem = f"no answer within {STORE_TIMEOUT:g} s"
        raise StoreUnavailableError("of idempotency keys", problem, "see whether it is overloaded or gone") from error


def _unfit(error: Exception) -> Failed:
    """The effect has happened and must not happen again, but what it gave cannot be kept."""
    return Failed(canonical({"message": f"it happened, but its result could not be kept: {error}"}).decode())


def _answer(late: Outstanding, how: How, telling: Telling) -> Any:
    given = how.fingerprint
    if late.fingerprint and given and late.fingerprint != given:
        telling.saw("conflict")
        raise KeyConflictError(late.claim.key, recorded=late.fingerprint, given=given)
    telling.saw("hit")
    if isinstance(late.ending, Failed):
        raise RecordedFailureError(late.claim.key, failure=late.ending.failure)
    return result_from_json(late.ending.result, how.result_type)


def _on_record(record: KeyRecord, how: How) -> Any:
    if record.state is KeyState.FAILED:
        raise RecordedFailureError(record.key, failure=record.failure or "")
    assert record.result is not None
    return result_from_json(record.result, how.result_type)


def _say(what: str, claim: Claim, trouble: Exception) -> None:
    key, said = printable(claim.key, most=80), printable(str(trouble), most=300)
    logger().error("key %s %s: %s: %s", key, what, type(trouble).__name__, said)


def mode_named(mode: Mode | str) -> Mode:
    """The mode, or an error that says where `txn` lives."""
    try:
        return Mode(mode)
    except ValueError:
        accepted = "retry, guard or dedup (for txn use rk.ledger(connection).once(key) in your own database)"
        raise ParameterError("mode", mode, accepted) from None
