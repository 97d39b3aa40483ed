"""`kept_events`: copies, the stored book and the settings of a journal, as the configuration says."""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot import errors
from reefknot.app.managers import open_manager
from reefknot.app.system import running_system
from reefknot.audit import copies as audit_copies
from reefknot.audit.copies import Copier, HeadsWriter, kept_events
from reefknot.audit.journal import Journal
from reefknot.audit.jsonlines import JsonLinesLog, open_audit_log
from reefknot.audit.model.chain import KeptHead
from reefknot.audit.model.event import decode
from reefknot.audit.retention import Retention, RetentionNote
from reefknot.idempotency.model import Claimed, Done
from reefknot.policy.schema import HeadsFile
from reefknot.policy.settings import Settings, load_settings
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.event_loops import first_of
from reefknot.stores.memory import MemoryStore
from reefknot.stores.opening import options_of
from reefknot.stores.port import Store
from reefknot.testing import run_virtual
from reefknot.testing.conformance.harness import event
from tests.unit.retrying.flaky import AsyncFlaky

Work = Callable[[Store], Awaitable[None]]


def said(folder: Path, text: str) -> Settings:
    (folder / "reefknot.yaml").write_text(text)
    return load_settings(environ={}, cwd=folder)


def kept(folder: Path, text: str, work: Work) -> None:
    """Do something with a store whose events are kept as this text says."""
    settings = said(folder, text)

    async def main() -> None:
        async with (
            rk.open_store(f"sqlite:{folder / 'state.db'}", **options_of(settings)) as store,
            kept_events(store, settings),
        ):
            await work(store)

    run_virtual(main())


def copied(path: Path) -> list[str]:
    async def main() -> list[str]:
        async with open_audit_log(str(path)) as log:
            assert await log.verify() == []
            return [one.entry.event_type for one in await log.read()]

    return asyncio.run(main())


async def settled(store: Store) -> None:
    await asyncio.sleep(10)


FILE = "audit: {jsonl: {path: logs/audit.jsonl, max_file_bytes: 4096, fsync: never}}\n"


async def tells(store: Store) -> None:
    await store.audit.append([event("a"), event("b")])
    await asyncio.sleep(10)
    await store.audit.append([event("c")])  # right before the end


def test_every_event_is_copied_to_the_file_once_over_restarts_and_from_the_start_of_a_store_made_again(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        kept(tmp_path, FILE, tells)
    assert copied(tmp_path / "logs" / "audit.jsonl") == ["a", "b", "c"] * 2
    for file in tmp_path.glob("state.db*"):
        file.unlink()
    kept(tmp_path, FILE, tells)
    assert copied(tmp_path / "logs" / "audit.jsonl") == ["a", "b", "c"] * 3


def test_the_file_is_rotated_as_it_says(tmp_path: Path) -> None:
    async def long(store: Store) -> None:
        for number in range(40):
            await store.audit.append([event(f"{number:0200}")])
            await asyncio.sleep(10)

    kept(tmp_path, FILE.replace("fsync: never", "fsync: rotate, max_files: 3"), long)
    assert len(list((tmp_path / "logs").glob("audit.jsonl.0*"))) == 2


def test_the_log_gets_what_happens_from_now_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot.audit")
    for work in (tells, settled):
        kept(tmp_path, "audit: {log: true}\n", work)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "reefknot.audit"]
    assert lines == [{"event_type": name} for name in "abc"]


class FlakySink:
    """A sink that fails while it is `down`."""

    def __init__(self, *, down: bool) -> None:
        self.got: list[str] = []
        self.down = down

    async def append(self, entries: Any) -> Any:
        if self.down:
            raise OSError("no disk")
        self.got += [one.event_type for one in entries]


async def test_a_sink_that_is_down_holds_nothing_back_and_gets_every_event_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, sink, ending = MemoryStore(VirtualClock()), FlakySink(down=True), asyncio.Event()
    task = asyncio.create_task(Copier(store.audit, sink).run(ending))
    for number in range(5):
        await store.audit.append([event(str(number))])
        await asyncio.sleep(60)
    sink.down = False
    await asyncio.sleep(60)
    assert sink.got == ["0", "1", "2", "3", "4"]
    await store.audit.append([event("5")])
    ending.set()
    await task
    assert sink.got[-1] == "5"
    assert 1 <= caplog.text.count("events cannot be copied (OSError: no disk)") <= 5


async def test_events_that_retention_removed_before_they_were_copied_are_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, sink = MemoryStore(VirtualClock()), FlakySink(down=False)
    copier = Copier(store.audit, sink)
    await store.audit.append([event("a", at=1)])
    assert await copier.step() == 1
    await store.audit.append([event("b", at=2), event("c", at=3), event("d", at=9)])
    await store.audit.trim(5)
    assert await copier.step() == 2
    assert (sink.got, copier.lost) == (["a", "d", "anchor"], 2)
    assert "retention removed 2 events before they were copied, 2 in all" in caplog.text


def test_another_process_that_writes_the_file_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def held(store: Store) -> None:
        await store.audit.append([event("a")])
        await asyncio.sleep(60)
        await other.close()
        await asyncio.sleep(60)

    other = asyncio.run(JsonLinesLog.open(tmp_path / "logs" / "audit.jsonl", VirtualClock(), inline=True))
    kept(tmp_path, FILE, held)
    assert "another process writes it" in caplog.text
    assert copied(tmp_path / "logs" / "audit.jsonl") == ["a"]


# ---- what a failing log means ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fail_open", "fail_closed"])
def test_what_a_failing_log_means_is_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async def work(store: Store) -> None:
        journal = Journal(store.audit)  # as workers and routers make theirs
        events = [decode(b'{"event_type":"breaker","timestamp":"","name":"b","state":"open"}')] * 7
        with monkeypatch.context() as patched:
            patched.setattr(store.audit, "append", FlakySink(down=True).append)
            with pytest.raises(errors.AuditUnavailableError) if how == "fail_closed" else nullcontext():
                await journal.write(*events)
        assert (journal.buffered, journal.lost) == (3, 4)

    kept(tmp_path, f"audit: {{on_failure: {how}, max_buffered: 3}}\n", work)


# ---- a system ------------------------------------------------------------------------------------------------------


@pytest.mark.real_time
async def test_a_system_stores_its_book_and_opens_its_store_as_configured(tmp_path: Path) -> None:
    settings = said(
        tmp_path,
        "worker: {retries: {v2: {enabled: true, default_policy: {max_attempts: 2}}}, retention_seconds: 3600}\n"
        "idempotency: {max_keys: 1, largest_result_bytes: 10, retention_seconds: 700000}\n"
        "audit: {retention_seconds: null}\n",
    )
    url = f"sqlite:{tmp_path / 'state.db'}"
    for _ in range(2):
        async with running_system(url, settings) as system:
            types = [one.entry.event_type for one in await system.store.audit.read()]
            assert types.count("book_stored") == 1
    async with running_system(url, settings) as system:
        answer = await system.store.idempotency.claim("a", owner="me")
        assert isinstance(answer, Claimed)
        with pytest.raises(errors.KeyQuotaError):
            await system.store.idempotency.claim("b", owner="me")
        with pytest.raises(errors.ResultTooLargeError):
            await system.store.idempotency.finish(answer.claim, Done('"' + "x" * 20 + '"'))
        record = await system.store.idempotency.finish(answer.claim, Done("1"))
        assert record.expires_at - record.updated_at == 700_000_000
    assert RetentionNote(str(tmp_path / "state.db")).read().retention == Retention(events=None, work=3600.0)


# ---- a manager of a configuration ------------------------------------------------------------------------------------


def test_a_manager_is_opened_as_a_configuration_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reefknot.yaml").write_text(
        "operations: {KV_PUT: {max_attempts: 2, base_delay: 0.001}}\n"
        "secrets: {key: env:PLANTED}\n"
        "idempotency: {max_keys: 1}\n"
        f"{FILE}"
    )

    async def main() -> None:
        async with open_manager(environ={"PLANTED": "hunter2hunter2"}) as manager:
            fails = AsyncFlaky(*[ConnectionError("no hunter2hunter2 for you")] * 2)
            with pytest.raises(rk.RetryError):
                await manager.execute_with_retry("KV_PUT", "put", fails)
            assert await manager.execute_with_retry("KV_PUT", "put", AsyncFlaky(), idempotency_key="a") == "ok"
            with pytest.raises(errors.KeyQuotaError):
                await manager.execute_with_retry("KV_PUT", "put", AsyncFlaky(), idempotency_key="b")

    run_virtual(main())
    kinds = ["book_stored", "retry_attempt", "retry_exhausted", "idempotency"]
    assert copied(tmp_path / "logs" / "audit.jsonl") == kinds
    assert (tmp_path / ".reefknot" / "state.db").exists()
    assert b"hunter2" not in b"".join(file.read_bytes() for file in (tmp_path / "logs").iterdir())


async def test_a_secret_that_cannot_be_read_is_a_mistake_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reefknot.yaml").write_text("secrets: {key: env:NOWHERE}\n")
    with pytest.raises(errors.ConfigurationError, match=r"reefknot.yaml:1:11: secrets.key: env:NOWHERE"):
        async with open_manager(environ={}, engine="memory:"):
            pass


async def test_what_is_written_while_a_closing_copier_reads_is_copied_as_well() -> None:
    store, copy, ending = MemoryStore(VirtualClock()), MemoryStore(VirtualClock()), asyncio.Event()
    read = store.audit.read

    async def slow_read(*given: Any) -> Any:
        """The first read sees an empty log; the block ends before it returns."""
        found = await read(*given)
        if not ending.is_set():
            await store.audit.append([event("late")])
            ending.set()
        return found

    store.audit.read = slow_read  # type: ignore[method-assign,assignment]
    await Copier(store.audit, copy.audit).run(ending)
    assert [one.entry.event_type for one in await copy.audit.read()] == ["late"]


# heads


def heads_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_heads_are_written_at_the_start_on_schedule_and_at_the_end_if_they_have_moved(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere" / "heads.jsonl"

    async def work(store: Store) -> None:
        await asyncio.sleep(100)
        assert not path.exists(), "an empty log has no head to keep"
        await store.audit.append([event("a")])
        await asyncio.sleep(30)
        assert [one["sequence"] for one in heads_in(path)] == [1]
        await asyncio.sleep(300)
        assert len(heads_in(path)) == 1, "it has not moved"
        await store.audit.append([event("b")])

    kept(tmp_path, "audit: {heads: {path: elsewhere/heads.jsonl, every_seconds: 30}}", work)
    lines = heads_in(path)
    assert [one["sequence"] for one in lines] == [1, 2]
    assert set(lines[0]) == {"at", "chain", "hash", "sequence"}
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.real_time
async def test_a_full_file_of_heads_loses_its_older_half_and_a_cut_line_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    wanted = HeadsFile(path="heads.jsonl", max_heads=10)
    store = MemoryStore(VirtualClock())
    writer = HeadsWriter(store.audit, path, wanted)
    for number in range(25):
        await store.audit.append([event(str(number))])
        assert await writer.write()
        assert not await writer.write()
        assert len(path.read_bytes().splitlines()) <= 10
    assert heads_in(path)[-1]["sequence"] == 25
    path.write_bytes(path.read_bytes()[:-20])
    assert await writer.write()
    assert [one["sequence"] for one in heads_in(path)][-2:] == [24, 25]


def test_heads_or_a_file_that_cannot_be_written_are_logged_and_hold_nothing_back_unless_it_fails_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file, no folder")
    with pytest.raises(errors.StoreUnavailableError, match="jsonlines:"):
        kept(tmp_path, FILE.replace("jsonl:", "on_failure: fail_closed, jsonl:"), settled)
    kept(tmp_path, FILE, settled)  # fail_open: logged, and tried again
    kept(tmp_path, "audit: {heads: {path: logs/heads.jsonl, every_seconds: 30}}", tells)
    assert "the head of the audit log cannot be written to" in caplog.text


@pytest.mark.real_time
async def test_a_place_of_heads_that_hangs_is_reported_once_and_written_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every look at the schedule comes through `first_of`: five of them during one hung write start no other."""
    answers, writes, looks = threading.Event(), list[int](), list[float]()
    append = HeadsWriter._append
    monkeypatch.setattr(audit_copies, "HEAD_S", 0.05)

    async def counted(*waiting: Any) -> None:
        looks.append(0.0)
        await first_of(*waiting)

    def hanging(self: HeadsWriter, head: KeptHead) -> bool:
        writes.append(head.sequence)
        assert answers.wait(30)
        return append(self, head)

    monkeypatch.setattr(audit_copies, "first_of", counted)
    monkeypatch.setattr(HeadsWriter, "_append", hanging)
    path = tmp_path / "heads.jsonl"
    wanted = HeadsFile(path="heads.jsonl", every_seconds=0.01, max_heads=10)
    store, ending = MemoryStore(VirtualClock()), asyncio.Event()
    await store.audit.append([event("a")])
    async with asyncio.timeout(30):
        running = asyncio.create_task(HeadsWriter(store.audit, path, wanted).run(ending))
        while len(looks) < 5:  # noqa: ASYNC110 - a condition with a limit
            await asyncio.sleep(0.01)
        assert (writes, caplog.text.count("cannot be written")) == ([1], 1)
        answers.set()
        while not path.exists() or not path.read_bytes().endswith(b"\n"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        ending.set()
        await running
    assert [one["sequence"] for one in heads_in(path)] == [1]
    assert caplog.text.count("cannot be written") == 1
