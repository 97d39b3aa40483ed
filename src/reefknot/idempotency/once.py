"""
`Once`: runs the work of a key once, and gives its recorded result to every caller.

    claim the key → run the work under a renewed lease → record the result, outside of the work

A later caller gets the recorded result, waits for the first caller, or gets `KeyInProgressError`. A key whose process
is gone is free at once, since its lease cannot be renewed. A result that cannot be recorded does not repeat the effect
in this process: it is kept in memory, returned to callers, and recorded later. When another owner has taken over the
key, the work is cancelled: a late owner has nothing to write. The guarantee depends on the mode:

    retry   at least once: a crash between effect and record repeats the effect
    dedup   once, if the receiver deduplicates on the key that the work is given
    guard   at most once: an unknown outcome is left to a person
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from reefknot import clock
from reefknot.core.canonical import canonical, result_from_json, result_to_json
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
from reefknot.idempotency.model import (
    Busy,
    Claim,
    Claimed,
    ClaimResult,
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
from reefknot.idempotency.unrecorded import UnrecordedResult, unrecorded_of
from reefknot.idempotency.waiting import HeldKey, attempt_keys, bounded, end_dead_lease, report_unknown, wait_for_change
from reefknot.retrying.failures import failure_from
from reefknot.runtime.event_loops import require_asyncio
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.processes import marked_owner
from reefknot.runtime.redactor import redact
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import run_in_background
from reefknot.runtime.timeouts import Timeout

if TYPE_CHECKING:
    from reefknot.audit.port import AuditEntry
    from reefknot.idempotency.events import KeyEvents
    from reefknot.idempotency.port import IdempotencyStore

RECORD_TRIES = 5


class Mode(StrEnum):
    """The guarantee about an effect."""

    RETRY = "retry"
    DEDUP = "dedup"
    GUARD = "guard"


def mode_named(mode: Mode | str) -> Mode:
    """The mode of this name; the error for `txn` says where to find it."""
    try:
        return Mode(mode)
    except ValueError:
        accepted = "retry, guard or dedup (for txn use rk.ledger(connection).once(key) in your own database)"
        raise ParameterError("mode", mode, accepted) from None


class KeyOptions(Struct, frozen=True):
    """Options of one call. `wait`: seconds that a later caller waits for the first; 0 raises at once."""

    mode: Mode = Mode.RETRY
    lease: float = 60.0
    wait: float = 60.0
    fingerprint: str = ""
    result_type: Any = Any
    metadata: str | None = None
    """JSON text to keep with the result."""


class Once:
    """Runs work under keys of one store. Any number of instances may share a store."""

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store
        self._unrecorded = unrecorded_of(store)

    async def run(self, key: str, work: Callable[[], Awaitable[Any]], options: KeyOptions, events: KeyEvents) -> Any:
        """The result of the key, recorded before or by running `work` now. Writes its events, however it ends."""
        require_asyncio("an idempotency key")
        try:
            answer = await self._answer(checked_key(key), work, options, events)
        except Exception:
            await events.flush()
            raise
        except BaseException:
            events.flush_later()
            raise
        await events.flush()
        return answer

    async def _answer(
        self, key: str, work: Callable[[], Awaitable[Any]], options: KeyOptions, events: KeyEvents
    ) -> Any:
        attempt = attempt_keys.get()
        wait = options.wait if attempt is None else min(options.wait, attempt.wait(asyncio.get_running_loop().time()))
        waits_until = clock.now() + wait
        while True:
            unrecorded = self._unrecorded.get(key)
            if unrecorded is not None and await self._still_ours(unrecorded, events):
                return _unrecorded_result(unrecorded, options, events)
            match await self._claim(key, options, events):
                case Claimed(claim=claim, taken_over=taken_over):
                    if taken_over:
                        events.taken_over()
                    if self._unrecorded.is_full:
                        await self._finish_or_log(claim, Released(), "release", events)
                        raise self._unrecorded.refusal()
                    return await self._work(claim, work, options, events)
                case Hit(record=record):
                    events.observed("hit")
                    return _recorded_result(record, options)
                case Conflict(record=record, given=given):
                    events.observed("conflict")
                    raise KeyConflictError(key, recorded=record.fingerprint, given=given)
                case Uncertain(record=record):
                    events.observed("unknown")
                    report_unknown(key)
                    raise OutcomeUnknownError(key, owner=record.owner)
                case Busy(record=record, remaining_ms=remaining):
                    if await end_dead_lease(self._store, record):
                        continue
                    left = waits_until - clock.now()
                    if left <= 0:
                        events.observed("in_progress")
                        if attempt is not None and wait < options.wait:
                            attempt.held.append(HeldKey(key, record.owner, options.wait))
                        raise KeyInProgressError(key, owner=record.owner, retry_after=remaining / 1000)
                    await wait_for_change(self._store, record, min(left, max(0.001, remaining / 1000)))

    async def _claim(self, key: str, options: KeyOptions, events: KeyEvents) -> ClaimResult:
        owner = marked_owner(new_id())
        try:
            return await self._claim_as(owner, key, options, events)
        except (asyncio.CancelledError, StoreUnavailableError):  # it may have been granted all the same
            run_in_background(self._release_lost_claim(owner, key, options), "releasing a key")
            raise

    async def _release_lost_claim(self, owner: str, key: str, options: KeyOptions) -> None:
        """Claim again as the same owner, which returns the claim whose answer was lost, and release that claim."""
        answer = await self._claim_as(owner, key, options)
        if isinstance(answer, Claimed):
            await self._finish(answer.claim, Released(), ())

    async def _claim_as(
        self, owner: str, key: str, options: KeyOptions, events: KeyEvents | None = None
    ) -> ClaimResult:
        return await bounded(
            self._store.claim(
                key,
                owner=owner,
                fingerprint=options.fingerprint,
                lease=options.lease,
                guard=options.mode is Mode.GUARD,
                takeover_events=None if events is None else events.taking_over,
            )
        )

    async def _work(
        self, claim: Claim, work: Callable[[], Awaitable[Any]], options: KeyOptions, events: KeyEvents
    ) -> Any:
        renewal = Renewal(self._store, claim, options.lease)
        try:
            with renewal:
                value = await work()
        except GeneratorExit:  # nothing drives this coroutine any more, so nothing can be awaited; the lease expires
            raise
        except BaseException as error:
            if not renewal.expired:
                await self._release(claim, error, options, events)
            raise
        return await self._record(claim, value, options, events)

    async def _release(self, claim: Claim, error: BaseException, options: KeyOptions, events: KeyEvents) -> None:
        """End the claim of work that failed or was cancelled: released, or unknown in mode `guard`."""
        if options.mode is Mode.GUARD:
            report_unknown(claim.key)
            message = events.safe(failure_from(error).message)
            ending: Ending = Unknown(canonical({"message": message, "exception": type(error).__name__}).decode())
            action = "unknown"
        else:
            ending, action = Released(), "release"
        await asyncio.shield(run_in_background(self._finish_or_log(claim, ending, action, events), "releasing a key"))

    async def _finish_or_log(self, claim: Claim, ending: Ending, action: str, events: KeyEvents) -> None:
        try:
            await self._finish(claim, ending, events.atomic_with(action))
        except LeaseLostError:
            return
        except Exception as trouble:
            _log("could not be released and stays held until its lease expires", claim, trouble)
        else:
            events.applied(action)

    async def _record(self, claim: Claim, value: Any, options: KeyOptions, events: KeyEvents) -> Any:
        refused: Exception | None = None
        try:
            ending: Done | Failed = Done(result_to_json(value), options.metadata)
        except NotJsonError as error:
            ending, refused = _result_not_kept(error), error
        try:
            trouble = await self._save(claim, ending, options, events)
        except asyncio.CancelledError:  # the effect has happened: its record does not depend on who waits for it
            run_in_background(self._save_and_flush(claim, ending, options, events), "recording a result")
            raise
        if isinstance(trouble, LeaseLostError | ResultTooLargeError):
            raise trouble
        if refused is not None:
            raise refused
        assert isinstance(ending, Done)
        return result_from_json(ending.result, options.result_type)

    async def _save_and_flush(
        self, claim: Claim, ending: Done | Failed, options: KeyOptions, events: KeyEvents
    ) -> None:
        await self._save(claim, ending, options, events)
        await events.flush()

    async def _save(
        self, claim: Claim, ending: Done | Failed, options: KeyOptions, events: KeyEvents
    ) -> Exception | None:
        """
        Write the record, with retries. A result that cannot be written stays in `UnrecordedResults`.

        A result that is too large is recorded as too large, because its effect must not be repeated either.
        """
        result = UnrecordedResult(claim, ending, options.fingerprint, tuple(events.atomic_with("record")))
        self._unrecorded.remember(result)
        trouble = await self._finish_with_retries(result)
        if trouble is None:
            if self._unrecorded.forget(result):
                events.applied("record")
            if self._unrecorded.any_stuck:
                run_in_background(self._save_stuck(), "recording earlier results")
        elif isinstance(trouble, LeaseLostError | ResultTooLargeError):
            self._unrecorded.forget(result)
            if isinstance(trouble, ResultTooLargeError) and isinstance(ending, Done):
                lost = await self._save(claim, _result_not_kept(trouble), options, events)
                return lost if isinstance(lost, LeaseLostError) else trouble
        elif self._unrecorded.mark_stuck(result):
            events.observed("unrecorded")
            _log("is done but could not be recorded; this process remembers it", claim, trouble)
        return trouble

    async def _save_stuck(self) -> None:
        """Write results that the store refused earlier, now that it works again."""
        for result in self._unrecorded.take_stuck():
            trouble = await self._finish_with_retries(result, tries=1)
            if trouble is None or isinstance(trouble, LeaseLostError):
                self._unrecorded.forget(result)
            else:
                self._unrecorded.mark_stuck(result)

    async def _still_ours(self, result: UnrecordedResult, events: KeyEvents) -> bool:
        """Try to write an unrecorded result. False when another owner took the key over: its record counts."""
        trouble = await self._finish_with_retries(result, tries=1)
        if trouble is None and self._unrecorded.forget(result):
            events.applied("record")
        if isinstance(trouble, LeaseLostError):
            self._unrecorded.forget(result)
            return False
        return True

    async def _finish_with_retries(self, result: UnrecordedResult, *, tries: int = RECORD_TRIES) -> Exception | None:
        trouble: Exception | None = None
        for attempt in range(tries):
            if attempt:
                await clock.asleep(0.05 * 2 ** (attempt - 1))
            try:
                await self._finish(result.claim, result.ending, result.entries)
            except (LeaseLostError, ResultTooLargeError) as final:
                return final
            except Exception as error:
                trouble = error
            else:
                return None
        return trouble

    async def _finish(self, claim: Claim, ending: Ending, entries: Sequence[AuditEntry]) -> None:
        await bounded(self._store.finish(claim, ending, events=entries))


def _result_not_kept(error: Exception) -> Failed:
    """The ending of an effect that happened and must not be repeated, although its result cannot be stored."""
    return Failed(canonical({"message": f"it happened, but its result could not be kept: {error}"}).decode())


def _unrecorded_result(result: UnrecordedResult, options: KeyOptions, events: KeyEvents) -> Any:
    given = options.fingerprint
    if result.fingerprint and given and result.fingerprint != given:
        events.observed("conflict")
        raise KeyConflictError(result.claim.key, recorded=result.fingerprint, given=given)
    events.observed("hit")
    if isinstance(result.ending, Failed):
        raise RecordedFailureError(result.claim.key, failure=result.ending.failure)
    return result_from_json(result.ending.result, options.result_type)


def _recorded_result(record: KeyRecord, options: KeyOptions) -> Any:
    if record.state is KeyState.FAILED:
        raise RecordedFailureError(record.key, failure=record.failure or "")
    assert record.result is not None
    return result_from_json(record.result, options.result_type)


def _log(what: str, claim: Claim, trouble: Exception) -> None:
    logger().error("key %s %s: %s", printable(redact(claim.key), most=80), what, error_text(trouble))


class Renewal(Timeout):
    """
    `with Renewal(store, claim, lease): …` renews the claim three times per lease, and expires when it is lost.

    A failed renewal is tried again; the fence protects the record meanwhile. While the event loop is blocked, a thread
    may renew it by `extend_keys`.
    """

    def __init__(self, store: IdempotencyStore, claim: Claim, lease: float) -> None:
        super().__init__(lease / 3, self._lease_lost)
        self._store = store
        self._claim = claim
        self._lease = lease
        self._renewing: asyncio.Task[None] | None = None
        self._lost: LeaseLostError | None = None
        self._extend_at = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self.expired and not isinstance(error, asyncio.CancelledError):
            raise self._lease_lost() from error

    def _arm(self) -> None:
        # Most work ends before its lease has to be renewed: a timer is cheap, and a task is made only for the rest.
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._begin)
        _renewals.add(self)

    def _begin(self) -> None:
        self._renewing = asyncio.get_running_loop().create_task(self._renew())

    def _disarm(self) -> None:
        super()._disarm()
        _renewals.discard(self)
        if self._renewing is not None:
            self._renewing.cancel()

    def extend(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        """Renew the claim of work in this loop, from another thread, if it is time to."""
        if self._task.get_loop() is not loop or now < self._extend_at:
            return
        self._extend_at = now + self._seconds
        try:
            self._store.extend([self._claim], lease=self._lease)
        except Exception as error:
            _log("is held by a blocked event loop, and its lease could not be renewed", self._claim, error)

    def _lease_lost(self) -> LeaseLostError:
        assert self._lost is not None
        return self._lost

    async def _renew(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._store.renew(self._claim, lease=self._lease)
            except LeaseLostError as lost:
                self._lost = lost
                self.expire()
                return
            except Exception as error:
                key = printable(redact(self._claim.key), most=80)
                text = "the lease of key %s could not be renewed and is tried again: %s"
                logger().warning(text, key, error_text(error))
            await asyncio.sleep(self._seconds)


_renewals: set[Renewal] = set()
"""The renewals of all keys that this process holds now."""


def extend_keys(loop: asyncio.AbstractEventLoop, now: float) -> None:
    """Renew the keys that work in this loop holds, from another thread, because the loop is blocked."""
    for renewal in list(_renewals):
        renewal.extend(loop, now)
