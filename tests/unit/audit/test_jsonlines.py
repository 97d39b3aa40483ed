"""An audit log in files: whole batches, bounded files, one writer, and what a crash leaves behind."""

# ruff: noqa: ASYNC240 - the files are what is tested, and nobody else shares the loop
from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import msgspec
import pytest

from reefknot.app.managers import RetryManager
from reefknot.audit.journal import FanOut
from reefknot.audit.jsonlines import JsonLinesLog, open_audit_log
from reefknot.audit.jsonlines.writer import files_of
from reefknot.audit.log_sink import LogSink
from reefknot.audit.model.chain import Head, header_line
from reefknot.audit.model.event import Anchor, LogRepaired, OperatorAction, decode, encode, timestamp
from reefknot.audit.port import AuditEntry, AuditQuery
from reefknot.errors import NotJsonError, ParameterError, StoreCorruptError, StoreFullError, StoreUnavailableError
from reefknot.stores.opening import open_store

P = ParamSpec("P")


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test, run in an event loop of its own."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class StoppedClock:
    """A clock that stands still."""

    def now(self) -> float:
        return 100.0

    def wall(self) -> float:
        return 1_800_000_000.0

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")

    async def asleep(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")


def entry(number: int, *, size: int = 0, correlation: str | None = None) -> AuditEntry:
    event = OperatorAction(
        timestamp=timestamp(number / 1000),
        actor="ann",
        action=f"n{number}",
        subject="x" * size,
        correlation_id=correlation,
    )
    return AuditEntry(encode(event), "operator_action", number, correlation)


@asynccontextmanager
async def opened(path: Path, **settings: Any) -> AsyncIterator[JsonLinesLog]:
    log = await JsonLinesLog.open(path, StoppedClock(), **{"fsync": "never", **settings})
    try:
        yield log
    finally:
        await log.close()


async def actions(log: JsonLinesLog) -> list[str]:
    events = [decode(kept.entry.body) for kept in await log.read()]
    return [event.action if isinstance(event, OperatorAction) else event.event_type for event in events]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "audit.jsonl"


@pytest.mark.parametrize("fsync", ["always", "rotate", "never"])
@in_a_loop
async def test_what_is_appended_is_read_back_and_the_chain_goes_on_after_reopening(path: Path, fsync: str) -> None:
    async with opened(path, fsync=fsync) as log:
        head = await log.append([entry(1, correlation="c"), entry(2)])
        assert (head.sequence, await log.head()) == (2, head)
    async with opened(path, fsync=fsync) as log:
        assert await log.head() == head
        await log.append([entry(3)])
        kept = await log.read()

        assert [one.entry for one in kept] == [entry(1, correlation="c"), entry(2), entry(3)]
        assert [one.sequence for one in kept] == [1, 2, 3]
        assert await log.verify() == []
        assert await log.verify(head) == []


@in_a_loop
async def test_nothing_appended_leaves_the_chain_where_it_is(path: Path) -> None:
    async with opened(path) as log:
        assert (await log.append([])).sequence == 0


@in_a_loop
async def test_queries_find_by_everything_they_name(path: Path) -> None:
    async with opened(path) as log:
        await log.append([entry(1), entry(2, correlation="c"), entry(3, correlation="d"), entry(4, correlation="c")])

        async def found(query: AuditQuery) -> list[int]:
            return [kept.sequence for kept in await log.read(query)]

        assert await found(AuditQuery(correlation_id="c")) == [2, 4]
        assert await found(AuditQuery(correlation_id="c", after=2)) == [4]
        assert await found(AuditQuery(since=2, until=4)) == [2, 3]
        assert await found(AuditQuery(limit=2)) == [1, 2]
        assert await found(AuditQuery(event_type="anchor")) == []
        assert await found(AuditQuery(event_type="operator_action", trace_id="t")) == []


@in_a_loop
async def test_an_event_that_does_not_say_what_it_is_found_by_is_filed_beside_itself(path: Path) -> None:
    strange = AuditEntry(b'{"n":1}', "custom", 7, "c", "t", "w")
    async with opened(path) as log:
        await log.append([strange])

        assert [kept.entry for kept in await log.read(AuditQuery(work_id="w"))] == [strange]
        assert await log.verify() == []


@in_a_loop
async def test_full_files_are_rotated_and_read_in_order(path: Path) -> None:
    async with opened(path, largest=4096) as log:
        for number in range(20):
            await log.append([entry(number, size=500)])

        assert len(files_of(path)) > 2
        assert all(file.stat().st_size <= 4096 for file in files_of(path))
        assert await actions(log) == [f"n{number}" for number in range(20)]
        assert [kept.sequence for kept in await log.read(AuditQuery(after=17))] == [18, 19, 20]
        assert await log.verify() == []


@in_a_loop
async def test_a_batch_larger_than_a_file_is_not_split(path: Path) -> None:
    async with opened(path, largest=4096) as log:
        await log.append([entry(0)])
        await log.append([entry(number, size=1000) for number in range(1, 10)])

        assert len(files_of(path)) == 2
        assert await log.verify() == []


@in_a_loop
async def test_the_oldest_file_goes_with_an_anchor_event_and_the_rest_still_verifies(path: Path) -> None:
    async with opened(path, largest=4096, keep=2) as log:
        for number in range(60):
            await log.append([entry(number, size=500)])

        kept = await log.read()
        anchors = [event for one in kept if isinstance(event := decode(one.entry.body), Anchor)]
        assert len(files_of(path)) == 2
        assert anchors[-1].sequence == kept[0].sequence - 1
        assert await log.verify() == []


@in_a_loop
async def test_a_first_file_that_somebody_deleted_is_found(path: Path) -> None:
    """The control of the test above: without an anchor event a missing beginning is a finding."""
    async with opened(path, largest=4096) as log:
        for number in range(20):
            await log.append([entry(number, size=500)])
        files_of(path)[0].unlink()

        assert "no anchor event says so" in (await log.verify())[0].problem


@in_a_loop
async def test_a_file_missing_in_the_middle_is_found(path: Path) -> None:
    async with opened(path, largest=4096) as log:
        for number in range(30):
            await log.append([entry(number, size=500)])
        files_of(path)[1].unlink()

        assert len(await log.verify()) >= 1


@in_a_loop
async def test_trimming_goes_to_the_event_and_leaves_an_anchor(path: Path) -> None:
    async with opened(path, largest=4096) as log:
        for number in range(20):
            await log.append([entry(number, size=500)])
        before = len(files_of(path))

        assert await log.trim(13) == 13
        assert (await actions(log))[:8] == [f"n{number}" for number in range(13, 20)] + ["anchor"]
        assert len(files_of(path)) < before
        assert await log.verify() == []
        assert await log.trim(13) == 0
    async with opened(path) as log:
        await log.append([entry(99)])
        assert await log.verify() == []


@in_a_loop
async def test_trimming_everything_leaves_the_anchor_and_a_chain_that_goes_on(path: Path) -> None:
    async with opened(path) as log:
        await log.append([entry(1), entry(2)])
        assert await log.trim(1000) == 2
        await log.append([entry(3)])

        assert await actions(log) == ["anchor", "n3"]
        assert await log.verify() == []


@in_a_loop
async def test_a_head_from_before_the_trim_can_no_longer_be_proven_and_that_is_said(path: Path) -> None:
    async with opened(path) as log:
        early = await log.append([entry(1)])
        await log.append([entry(2), entry(3)])
        await log.trim(3)

        assert "cannot be compared" in (await log.verify(early))[0].problem


@pytest.mark.parametrize("cut", [1, 20, 200, 400])
@in_a_loop
async def test_a_batch_torn_by_a_crash_goes_as_a_whole_and_that_is_on_record(path: Path, cut: int) -> None:
    async with opened(path) as log:
        whole = await log.append([entry(1), entry(2)])
        size = path.stat().st_size
        await log.append([entry(3), entry(4), entry(5)])
    os.truncate(path, path.stat().st_size - cut)
    torn = path.stat().st_size - size

    async with opened(path) as log:
        events = [decode(kept.entry.body) for kept in await log.read()]
        repaired = events[-1]
        assert isinstance(repaired, LogRepaired)
        assert repaired.removed_bytes == torn
        assert await actions(log) == ["n1", "n2", "log_repaired"]
        assert (await log.verify(whole), (await log.head()).sequence) == ([], 3)


@in_a_loop
async def test_wherever_a_crash_cuts_the_file_only_whole_batches_are_left(tmp_path: Path) -> None:
    """All over two batches; what was acknowledged before the last write is never lost."""
    path = tmp_path / "audit.jsonl"
    async with opened(path, inline=True) as log:
        await log.append([entry(1)])
        ends = [path.stat().st_size]
        for batch in ([entry(2), entry(3)], [entry(4), entry(5)]):
            await log.append(batch)
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in sorted({*range(ends[0], ends[2], 5), *(end + near for end in ends[1:] for near in (-2, -1, 0))}):
        path.write_bytes(whole[:size])
        async with opened(path, inline=True) as log:
            kept = [name for name in await actions(log) if name != "log_repaired"]
            assert kept == ["n1", "n2", "n3", "n4", "n5"][: 1 + 2 * sum(size >= end for end in ends[1:])]
            assert ("log_repaired" in await actions(log)) is (size not in ends)
            assert await log.verify() == []


@in_a_loop
async def test_a_batch_cut_between_two_of_its_lines_goes_as_a_whole(path: Path) -> None:
    async with opened(path) as log:
        await log.append([entry(1)])
        await log.append([entry(2), entry(3)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))

    async with opened(path) as log:
        assert await actions(log) == ["n1", "log_repaired"]


@in_a_loop
async def test_garbage_at_the_end_is_cut_off_and_damage_in_the_middle_stays_as_evidence(path: Path) -> None:
    async with opened(path) as log:
        await log.append([entry(1)])
        await log.append([entry(2)])
    text = path.read_bytes().replace(b'"n1"', b'"n\x00"')
    path.write_bytes(text + b"\x00" * 100 + b"\n" + b"\x00")

    async with opened(path) as log:
        assert await actions(log) == ["n2", "log_repaired"]
        assert len(await log.verify()) >= 1
        assert b"n\x00" in path.read_bytes()


@in_a_loop
async def test_a_crash_between_two_files_is_mended(path: Path) -> None:
    async with opened(path) as log:
        head = await log.append([entry(1)])
    path.rename(path.with_name("audit.jsonl.000000000001"))

    async with opened(path) as log:
        assert await log.head() == head
        await log.append([entry(2)])
        assert (await actions(log), await log.verify()) == (["n1", "n2"], [])


@in_a_loop
async def test_a_file_that_opens_no_log_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("hello\n")

    with pytest.raises(StoreCorruptError, match="opens no log"):
        await JsonLinesLog.open(path, StoppedClock())
    assert path.read_text() == "hello\n"


@in_a_loop
async def test_a_second_writer_is_refused_until_the_first_lets_go(path: Path) -> None:
    async with opened(path):
        with pytest.raises(StoreUnavailableError, match="another process writes it"):
            await JsonLinesLog.open(path, StoppedClock())
    async with opened(path) as log:
        await log.append([entry(1)])


@pytest.mark.real_time
async def test_another_process_is_refused_too(path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from reefknot.audit.jsonlines import JsonLinesLog\n"
        "from tests.unit.audit.test_jsonlines import StoppedClock\n"
        "asyncio.run(JsonLinesLog.open(sys.argv[1], StoppedClock()))\n"
    )
    async with opened(path):
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=30
        )

    assert "another process writes it" in done.stderr


@in_a_loop
async def test_a_write_that_fails_is_taken_back_and_the_next_one_works(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def full(handle: int, data: bytes) -> int:
        real(handle, bytes(data)[:30])
        raise OSError(28, "No space left on device")

    async with opened(path) as log:
        await log.append([entry(1)])
        with monkeypatch.context() as patch:
            patch.setattr("reefknot.audit.jsonlines.writer.os.write", full)
            with pytest.raises(StoreFullError, match="make room"):
                await log.append([entry(2)])
        await log.append([entry(3)])

        assert (await actions(log), await log.verify()) == (["n1", "n3"], [])


@in_a_loop
async def test_after_a_failed_flush_nothing_more_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(handle: int) -> None:
        raise OSError(5, "Input/output error")

    async with opened(path, fsync="always") as log:
        with monkeypatch.context() as patch:
            patch.setattr("reefknot.audit.jsonlines.writer.os.fsync", failing)
            with pytest.raises(StoreUnavailableError, match="not known"):
                await log.append([entry(1)])
        with pytest.raises(StoreUnavailableError, match="given up"):
            await log.append([entry(2)])


@in_a_loop
async def test_fsync_happens_as_often_as_the_setting_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[str, int] = {}
    real = os.fsync
    for setting in ("always", "rotate", "never"):
        async with opened(path.with_name(f"{setting}.jsonl"), fsync=setting) as log:
            calls: list[int] = []
            with monkeypatch.context() as patch:
                patch.setattr(
                    "reefknot.audit.jsonlines.writer.os.fsync", lambda fd, to=calls: (to.append(fd), real(fd))
                )
                for number in range(5):
                    await log.append([entry(number)])
            counted[setting] = len(calls)

    assert counted == {"always": 5, "rotate": 0, "never": 0}


@in_a_loop
async def test_waiting_ends_with_the_next_event(path: Path) -> None:
    async with opened(path) as log:
        assert await log.wait(0, 0) is False
        waiting = asyncio.create_task(log.wait(0, 60))
        await asyncio.sleep(0)
        await log.append([entry(1)])

        assert await waiting is True
        assert await log.wait(0, 0) is True


@in_a_loop
async def test_what_is_no_json_or_more_than_a_line_is_refused_whole(path: Path) -> None:
    async with opened(path) as log:
        for body in (b"{", b'{"a":\n1}'):
            with pytest.raises(NotJsonError):
                await log.append([entry(1), AuditEntry(body, "x", 1)])
        assert await log.read() == []


@in_a_loop
async def test_a_closed_log_says_so(path: Path) -> None:
    async with opened(path, inline=True) as log:
        await log.append([entry(1)])
    await log.close()
    with pytest.raises(StoreUnavailableError, match="it is closed"):
        await log.read()


@pytest.mark.parametrize("settings", [{"largest": 10}, {"keep": 0}, {"fsync": "sometimes"}])
@in_a_loop
async def test_settings_that_mean_nothing_are_refused(path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(settings))):
        await JsonLinesLog.open(path, StoppedClock(), **settings)
    assert not path.exists()


@in_a_loop
async def test_the_files_are_nobody_elses_to_read(path: Path) -> None:
    async with opened(path, largest=4096) as log:
        for number in range(10):
            await log.append([entry(number, size=500)])

        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


@in_a_loop
async def test_a_folder_without_rights_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match="check the folder"):
        await JsonLinesLog.open(tmp_path / "file" / "audit.jsonl", StoppedClock())


@in_a_loop
async def test_another_chains_head_is_told_apart(path: Path) -> None:
    async with opened(path) as log:
        head = await log.append([entry(1)])

        assert "is of chain other" in (await log.verify(msgspec.structs.replace(head, chain="other")))[0].problem
        assert "cut off" in (await log.verify(Head(head.chain, 9, "0" * 64)))[0].problem


@in_a_loop
async def test_a_manager_writes_its_events_to_the_file_and_to_the_log_at_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fine() -> int:
        return 7

    async with open_store("memory:") as store, open_audit_log(str(path)) as log:
        caplog.set_level(logging.INFO, logger="reefknot.audit")
        manager = RetryManager(idempotency=store.idempotency, audit=FanOut(log, LogSink()))
        assert await manager.execute_with_retry("KV_PUT", "put", fine, idempotency_key="k") == 7

        assert [kept.entry.event_type for kept in await log.read()] == ["idempotency"]
        assert [record.name for record in caplog.records] == ["reefknot.audit"]
        assert await log.verify() == []


@in_a_loop
async def test_a_log_is_proven_while_others_go_on_appending_and_rotating(path: Path) -> None:
    """The walk sees the files as they were; neither a new line nor a new name of a file is a mismatch."""
    began, go_on = threading.Event(), threading.Event()

    def told(_: int) -> None:
        began.set()
        assert go_on.wait(10)

    async with opened(path, largest=4096, keep=2) as log:
        for number in range(60):
            await log.append([entry(number)])
        head = await log.head()
        proving = asyncio.create_task(log.verify(head, progress=told))
        await asyncio.to_thread(began.wait, 10)
        async with asyncio.timeout(10):  # were the walk in the writer's own thread, this would never come back
            for number in range(60, 200):
                await log.append([entry(number)])
        go_on.set()

        assert await proving == []
        assert await log.verify() == []


@in_a_loop
async def test_a_log_that_goes_on_from_an_exported_file_keeps_its_format_until_the_next_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(header_line(Head("c1")))
    async with opened(path, largest=4096) as log:
        await log.append([entry(1), entry(2)])
        await log.append([entry(3, size=4096)])
        assert await log.verify() == []
    first, second = (file.read_bytes().splitlines() for file in files_of(path))

    assert [b'"seq":' in line for line in first[1:]] == [True, True]
    assert b'"format":1' in second[0]
    assert b'"sequence":3' in second[1]


@in_a_loop
async def test_retention_rewrites_an_exported_file_in_its_own_format(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(header_line(Head("c1")))
    async with opened(path) as log:
        await log.append([entry(1), entry(2), entry(3)])
        assert await log.trim(3) == 2
        await log.append([entry(4)])
        assert await log.verify() == []
    header, *lines = path.read_bytes().splitlines()

    assert b'"format":2' in header
    assert all(b'"seq":' in line for line in lines)
