"""`BookRecorder`: the policy book is in the audit log, once."""

import logging

import pytest

import reefknot as rk
from reefknot import clock as timing
from reefknot.audit.book_recorder import LOOK_AGAIN_S, BookRecorder
from reefknot.audit.journal import Journal
from reefknot.audit.log_sink import LogSink
from reefknot.audit.model.event import BookStored, decode
from reefknot.audit.model.replay import replay
from reefknot.audit.port import AuditLog
from reefknot.core.redaction import Redactor
from reefknot.policy.model.book import content_hash
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.testing.conformance.harness import event
from tests.unit.retrying.flaky import AsyncAlways

BOOK = rk.PolicyBook.loads(
    """
operations: {KV_PUT: {max_attempts: 2, base_delay: 0.01, retryable_exceptions: [hunter2hunter2]}}
secrets: {db: env:DB_PASSWORD}
engine: sqlite:///a
sources: {mail: {connector: imap_mailbox, password: "env:SECRET", retry: {max_attempts: 2}}}
"""
)


async def books_in(log: AuditLog) -> list[BookStored]:
    found = [decode(kept.entry.body) for kept in await log.read()]
    return [one for one in found if isinstance(one, BookStored)]


async def test_a_manager_stores_its_book_before_the_first_decision_that_refers_to_it() -> None:
    store = MemoryStore(VirtualClock())
    book = rk.PolicyBook.loads("operations: {KV_PUT: {max_attempts: 2, base_delay: 0.01}}")
    for _ in range(2):  # another process finds it there
        manager = rk.RetryManager(book=book, idempotency=store.idempotency, audit=store.audit)
        for _ in range(2):
            with pytest.raises(rk.RetryError):
                await manager.execute_with_retry("KV_PUT", "put", AsyncAlways())
    types = [kept.entry.event_type for kept in await store.audit.read()]
    assert types == ["book_stored", *["retry_attempt", "retry_exhausted"] * 4]
    (stored,) = await books_in(store.audit)
    assert stored.book_hash == book.hash == content_hash(stored.content)
    assert stored.content["operations"] == {"KV_PUT": {"max_attempts": 2, "base_delay": 0.01}}
    again = replay(kept.entry.body for kept in await store.audit.read())
    assert (again.decisions, again.books, again.books_missing, again.differences) == (8, 1, (), ())


async def test_the_stored_book_holds_the_policies_and_nothing_else_and_no_secret() -> None:
    store = MemoryStore(VirtualClock())
    recorder = BookRecorder(store.audit, Journal(store.audit, redactor=Redactor(["hunter2hunter2"])))
    assert await recorder.put(BOOK.snapshot)
    (kept,) = await store.audit.read()
    for secret in (b"hunter2", b"DB_PASSWORD", b"env:SECRET", b"sqlite:"):
        assert secret not in kept.entry.body
    assert set((await books_in(store.audit))[0].content) == {"worker", "retry_policies", "operations", "sources"}


async def test_a_book_without_written_policies_is_not_stored() -> None:
    store = MemoryStore(VirtualClock())
    for book in (rk.PolicyBook(), rk.PolicyBook.loads("engine: 'memory:'")):
        assert not await BookRecorder(store.audit, Journal(store.audit)).put(book.snapshot)
    assert await store.audit.read() == []


async def test_a_book_that_retention_removed_is_written_again() -> None:
    store = MemoryStore(VirtualClock())
    recorder = BookRecorder(store.audit, Journal(store.audit))
    await store.audit.append([event("a")])
    assert await recorder.put(BOOK.snapshot)
    await timing.asleep(LOOK_AGAIN_S)
    assert not await recorder.put(BOOK.snapshot)  # looked for, and found
    await timing.asleep(LOOK_AGAIN_S)
    assert not await recorder.put(BOOK.snapshot)  # still at its place
    await store.audit.trim(10**15)
    assert not await recorder.put(BOOK.snapshot)  # was looked at a moment ago
    await timing.asleep(LOOK_AGAIN_S)
    assert await recorder.put(BOOK.snapshot)
    assert len(await books_in(store.audit)) == 1


async def test_in_a_log_that_cannot_be_read_the_book_is_written_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot.audit")
    sink = LogSink()
    recorder = BookRecorder(sink, Journal(sink))
    assert await recorder.put(BOOK.snapshot)
    await timing.asleep(2 * LOOK_AGAIN_S)
    assert not await recorder.put(BOOK.snapshot)
    assert caplog.text.count("book_stored") == 1


async def test_a_log_that_cannot_be_read_for_a_while_is_logged_and_searched_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(VirtualClock())
    recorder = BookRecorder(store.audit, Journal(store.audit))

    async def down(*query: object) -> list[object]:
        raise OSError("no disk")

    with monkeypatch.context() as patched:
        patched.setattr(store.audit, "read", down)
        assert not await recorder.put(BOOK.snapshot)
    assert await recorder.put(BOOK.snapshot)
    assert "cannot search the audit log for the policy book (no disk)" in caplog.text
