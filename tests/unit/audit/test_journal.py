"""`Journal`: events are buffered with a bound, counted and logged when lost, and hold no secrets."""

import asyncio
import gc
import json
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from reefknot import clock
from reefknot.audit.journal import Journal, OnFailure, envelope, observed
from reefknot.audit.model.chain import Head
from reefknot.audit.model.event import (
    Admission,
    AnyEvent,
    Completed,
    Event,
    IdempotencyEvent,
    OperatorAction,
    Routing,
    Submitted,
    decode,
    tenant_hash,
)
from reefknot.audit.port import AuditEntry
from reefknot.core.redaction import Redactor
from reefknot.errors import AuditUnavailableError
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.testing import run_virtual


class Log:
    """A log that fails, hangs or is slow on demand."""

    def __init__(self, *, down: bool = False, fails: int = 0) -> None:
        self.kept: list[AuditEntry] = []
        self.down = down
        self.fails = fails
        self.hangs = False
        self.tries = 0
        self.seconds = 0.0

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        self.tries += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.down or self.fails > 0:
            self.fails -= 1
            raise OSError("no space, password=hunter2")
        self.kept.extend(entries)
        return Head("test", len(self.kept))

    @property
    def said(self) -> list[str]:
        return [_key(decode(entry.body)) for entry in self.kept]


def _key(event: AnyEvent) -> str:
    assert isinstance(event, IdempotencyEvent)
    return event.idempotency_key


def event(key: str) -> IdempotencyEvent:
    return IdempotencyEvent(**envelope(wall=clock.wall()), idempotency_key=key, action="hit")


async def test_an_entry_has_the_ids_that_its_event_is_found_by() -> None:
    log = Log()
    ids = {"tenant_id": "n", "correlation_id": "c", "trace_id": "t", "work_id": "w"}
    given = IdempotencyEvent(**envelope(wall=clock.wall(), **ids), idempotency_key="k", action="hit")
    assert (given.timestamp, given.tenant_id) == ("2023-11-14T22:13:20.000Z", "n")
    await Journal(log).write(given)
    entry = AuditEntry(log.kept[0].body, "idempotency", 1_700_000_000_000, "c", "t", "w")
    assert (log.kept, decode(entry.body)) == ([entry], given)
    assert len({event("k").event_id for _ in range(1000)}) == 1000, "the ids of events are never the same"


async def test_a_log_that_fails_for_a_moment_costs_nothing() -> None:
    log = Log(fails=2)
    journal = Journal(log)
    await journal.write(event("a"))
    assert (log.said, log.tries, journal.buffered, journal.lost) == (["a"], 3, 0, 0)


async def test_while_the_log_is_down_events_wait_and_work_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(down=True)
    journal = Journal(log)
    await journal.write(event("a"))
    await journal.write(event("b"))
    assert (journal.buffered, journal.lost) == (2, 0)
    log.down = False
    await asyncio.sleep(2)
    await Journal(log).write(event("c"))  # all journals of a log share their backlog
    assert (log.said, journal.buffered) == (["a", "b", "c"], 0)
    assert "the audit log cannot be written (OSError: no space" in caplog.text
    assert "1 events are buffered, 0 are lost" in caplog.text
    assert "hunter2" not in caplog.text


async def test_an_outage_of_the_log_does_not_slow_every_write(caplog: pytest.LogCaptureFixture) -> None:
    """A log that hangs is waited for once, not for each of a hundred events; and log lines are bounded."""
    log = Log()
    log.hangs = True
    journal = Journal(log)
    for number in range(100):
        await journal.write(event(str(number)))
    assert asyncio.get_running_loop().time() == pytest.approx(10)
    assert (log.tries, journal.buffered) == (1, 100)
    assert len(caplog.records) == 1


async def test_the_buffer_is_bounded_and_what_is_lost_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(down=True)
    journal = Journal(log, most_buffered=3)
    for number in range(5):
        await journal.write(event(str(number)))
        await asyncio.sleep(2)
    assert (journal.buffered, journal.lost) == (3, 2)
    log.down = False
    await journal.write()
    assert (log.said, journal.lost) == (["2", "3", "4"], 2)
    assert "3 events are buffered, 2 are lost in all" in caplog.text


async def test_two_writers_at_once_append_the_backlog_only_once() -> None:
    log = Log(down=True)
    journal = Journal(log)
    await journal.write(event("waited"))
    log.down = False
    log.seconds = 1.0
    await asyncio.sleep(2)
    await asyncio.gather(*(journal.write(event(f"new {number}")) for number in range(5)))
    assert sorted(log.said) == ["new 0", "new 1", "new 2", "new 3", "new 4", "waited"]
    assert journal.buffered == 0


async def test_the_backlog_of_one_writer_is_not_cleared_by_anothers_success() -> None:
    class FailsForSome(Log):
        async def append(self, entries: Sequence[AuditEntry]) -> Head:
            await asyncio.sleep(0.01)
            if b"unlucky" in entries[-1].body:
                raise OSError("no")
            return await super().append(entries)

    log = FailsForSome()
    journal = Journal(log)
    await asyncio.gather(journal.write(event("unlucky")), journal.write(event("lucky")))
    assert (log.said, journal.buffered) == (["lucky"], 1)


async def test_a_cancelled_write_keeps_its_events_for_the_next() -> None:
    log = Log()
    log.seconds = 5
    journal = Journal(log)
    writing = asyncio.create_task(journal.write(event("a")))
    await asyncio.sleep(1)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert journal.buffered == 1
    await journal.write(event("b"))
    assert log.said == ["a", "b"]


async def test_fail_closed_stops_work_until_its_events_are_written() -> None:
    log = Log(down=True)
    journal = Journal(log, on_failure="fail_closed")
    with pytest.raises(AuditUnavailableError) as stopped:
        await journal.write(event("a"))
    assert stopped.value.events == 1
    assert isinstance(stopped.value.__cause__, OSError)
    with pytest.raises(AuditUnavailableError):
        await journal.flush_backlog()
    log.down = False
    await asyncio.sleep(2)
    await journal.flush_backlog()
    assert log.said == ["a"]


async def test_fail_open_never_waits_for_the_backlog_and_an_unknown_setting_is_refused() -> None:
    log = Log(down=True)
    journal = Journal(log)
    await journal.write(event("a"))
    tries = log.tries
    await asyncio.sleep(2)
    await journal.flush_backlog()
    assert log.tries == tries
    with pytest.raises(ValueError, match="fail_sometimes"):
        Journal(log, on_failure="fail_sometimes")
    assert set(OnFailure) == {"fail_open", "fail_closed"}


async def turns_of_the_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def written(store: MemoryStore) -> list[str]:
    return [_key(decode(kept.entry.body)) for kept in await store.audit.read()]


async def test_an_event_for_soon_goes_with_the_next_write_of_a_whole_log_or_is_appended_to_a_sink() -> None:
    store, sink = MemoryStore(VirtualClock()), Log()
    journal = Journal(store.audit)
    for key in ("a", "b"):
        journal.write_soon(event(key))
        Journal(sink).write_soon(event(key))
    assert await store.audit.read() == []
    await turns_of_the_loop()
    assert await written(store) == sink.said == ["a", "b"]


async def test_an_event_for_soon_that_the_log_does_not_take_is_buffered_and_goes_first_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore(VirtualClock())
    journal = Journal(store.audit)
    failed: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
    failed.set_exception(OSError("no space"))
    with monkeypatch.context() as patched:
        patched.setattr(store.audit, "append_soon", lambda entries: failed)
        journal.write_soon(event("a"))
        await turns_of_the_loop()
    assert journal.buffered == 1
    journal.write_soon(event("b"))
    await turns_of_the_loop()
    assert (await written(store), journal.buffered) == (["a", "b"], 0)


async def test_without_a_log_nothing_is_written_and_nothing_is_buffered() -> None:
    journal = Journal(None)
    journal.write_soon(event("a"))
    await turns_of_the_loop()
    await journal.write(event("a"))
    assert journal.buffered == 0


SECRETS = ("s3cr3t-value", 'with "quotes" and \\', "1700000000", "zeile\num")


@pytest.mark.parametrize("secret", SECRETS)
async def test_configured_secrets_are_in_no_field_and_no_index(secret: str) -> None:
    log = Log()
    given = OperatorAction(
        **envelope(wall=clock.wall(), correlation_id=f"c {secret}", trace_id=f"t {secret}", work_id=f"w {secret}"),
        actor=f"a {secret}",
        action="x",
        details={"list": [f"l {secret}"], f"key {secret}": 1700000000, "n": 1.17},
    )
    await Journal(log, redactor=Redactor([secret])).write(given)
    (entry,) = log.kept
    read = decode(entry.body)
    assert isinstance(read, OperatorAction)
    assert read.details is not None
    assert 1700000000 in read.details.values(), "a number stays a number"
    for text in (entry.body.decode(), entry.correlation_id, entry.trace_id, entry.work_id):
        assert text is not None
        assert secret not in text.replace("1700000000,", "").replace("1700000000}", "")
        assert json.dumps(secret)[1:-1] not in text.replace("1700000000,", "").replace("1700000000}", "")


async def test_a_body_is_canonical_with_secrets_and_without() -> None:
    log = Log()
    given = event("k")
    await Journal(log).write(given)
    await Journal(log, redactor=Redactor(["nowhere to be found"])).write(given)
    assert log.kept[0].body == log.kept[1].body


def test_a_journal_does_not_keep_its_log_alive() -> None:
    async def main() -> weakref.ref[Log]:
        log = Log(down=True)
        await Journal(log).write(event("a"))
        return weakref.ref(log)

    gone = run_virtual(main())
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("redactor", [Redactor(), Redactor(("secret-of-no-one",))], ids=["plain", "redacting"])
def test_what_leaves_its_correlation_to_the_submission_is_found_by_it_all_the_same(redactor: Redactor) -> None:
    ids: dict[str, Any] = {"correlation_id": "c", "trace_id": "t", "work_id": "w"}
    ids["timestamp"] = "2026-11-16T03:52:17.599Z"
    events: list[Event] = [
        Submitted(**ids, actor="me", host="h", process=1),
        Routing(**ids),
        Admission(**ids),
        Completed(**ids, status="success"),
        Admission(**ids, reason="queue_full", status="rejected"),
    ]
    entries = Journal(None, redactor=redactor).entries(events)
    assert [(one.correlation_id, one.trace_id, one.work_id) for one in entries] == [("c", "t", "w")] * 5
    assert [b'"correlation_id"' in one.body for one in entries] == [True, False, False, False, True]


# ---- observers -------------------------------------------------------------------------------------------------------


@pytest.mark.real_time
async def test_an_observer_sees_every_event_for_its_log_however_it_is_written_and_no_others() -> None:
    store = MemoryStore(VirtualClock())
    seen: list[str] = []
    with observed(store.audit, lambda one: seen.append(_key(one))):  # type: ignore[arg-type] # all of them are
        await Journal(store.audit).write(event("written"))
        Journal(store.audit).entries([event("kept with a change")])
        Journal(store.audit).write_soon(event("soon"))
        await Journal(Log()).write(event("of another log"))
        await asyncio.sleep(0)
    await Journal(store.audit).write(event("afterwards"))

    assert seen == ["written", "kept with a change", "soon"]


@pytest.mark.real_time
async def test_a_mistake_of_an_observer_reaches_the_log_and_never_the_work(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()

    def breaks(_: Event) -> None:
        raise ZeroDivisionError

    with observed(log, breaks):
        await Journal(log).write(event("a"))

    assert log.said == ["a"]
    assert "an event was not observed" in caplog.text


def test_a_tenant_is_hashed_without_its_secret() -> None:
    """Its hash would tell the secret to a reader who can try all of them."""
    about = {**envelope(wall=0.0, tenant_id="tenant of pin-4711 and more"), "worker_id": "worker-1"}
    (entry,) = Journal(None, redactor=Redactor(["pin-4711"])).entries([Routing(**about)])
    fields = json.loads(entry.body)
    assert fields["tenant_hash"] == tenant_hash(Redactor(["pin-4711"]).values_out_of("tenant of pin-4711 and more"))
    assert fields["tenant_hash"] != tenant_hash("tenant of pin-4711 and more")
