"""
An audit log in files: whole batches, bounded files, one writer, and what a crash leaves behind.

What every log of audited events does is in `reefknot.testing.conformance`.
"""

# ruff: noqa: ASYNC240 - the files are what is tested, and nothing else shares the loop
import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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
from tests.stories import InLoop

pytestmark = pytest.mark.real_time

WRITER = "reefknot.audit.jsonlines.writer.os"


class StoppedClock:
    """A clock that stands still."""

    def now(self) -> float:
        return 100.0

    def wall(self) -> float:
        return 1_800_000_000.0

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing waits here")

    async def asleep(self, seconds: float) -> None:
        raise AssertionError("nothing waits here")


def entry(number: int, *, size: int = 0, correlation: str | None = None) -> AuditEntry:
    about: dict[str, Any] = {"timestamp": timestamp(number / 1000), "correlation_id": correlation}
    event = OperatorAction(**about, actor="ann", action=f"n{number}", subject="x" * size)
    return AuditEntry(encode(event), "operator_action", number, correlation)


@asynccontextmanager
async def opened(path: Path, **settings: Any) -> AsyncIterator[JsonLinesLog]:
    log = await JsonLinesLog.open(path, StoppedClock(), **{"fsync": "never", "largest": 4096, **settings})
    try:
        yield log
    finally:
        await log.close()


async def fill(log: JsonLinesLog, *numbers: int, size: int = 500) -> None:
    """A batch for each number; eight fill a file."""
    for number in numbers:
        await log.append([entry(number, size=size)])


async def actions(log: JsonLinesLog) -> list[str]:
    events = [decode(kept.entry.body) for kept in await log.read()]
    return [event.action if isinstance(event, OperatorAction) else event.event_type for event in events]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "audit.jsonl"


@pytest.fixture
def log(path: Path) -> InLoop:
    return InLoop(lambda: opened(path))


@pytest.mark.parametrize("fsync", ["always", "rotate", "never"])
async def test_what_is_appended_is_read_back_and_the_chain_goes_on_after_reopening(path: Path, fsync: str) -> None:
    async with opened(path, fsync=fsync) as log:
        assert (await log.append([])).sequence == 0
        head = await log.append([entry(1, correlation="c"), entry(2)])
        assert (head.sequence, await log.head()) == (2, head)
    async with opened(path, fsync=fsync) as log:
        assert await log.head() == head
        await log.append([entry(3)])
        kept = [(one.sequence, one.entry) for one in await log.read()]
        assert kept == [(1, entry(1, correlation="c")), (2, entry(2)), (3, entry(3))]
        assert await log.verify() == await log.verify(head) == []


async def test_an_event_that_does_not_say_what_it_is_found_by_is_filed_beside_itself(log: JsonLinesLog) -> None:
    strange = AuditEntry(b'{"n":1}', "custom", 7, "c", "t", "w")
    await log.append([strange])
    assert [kept.entry for kept in await log.read(AuditQuery(work_id="w"))] == [strange]
    assert await log.verify() == []


async def test_full_files_are_rotated_read_in_order_and_for_their_owner_alone(log: JsonLinesLog, path: Path) -> None:
    await fill(log, *range(20))
    assert len(files_of(path)) > 2
    assert all(file.stat().st_size <= 4096 for file in files_of(path))
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    assert await actions(log) == [f"n{number}" for number in range(20)]
    assert [kept.sequence for kept in await log.read(AuditQuery(after=17))] == [18, 19, 20]
    assert await log.verify() == []


async def test_a_batch_larger_than_a_file_is_not_split(log: JsonLinesLog, path: Path) -> None:
    await log.append([entry(0)])
    await log.append([entry(number, size=1000) for number in range(1, 10)])
    assert len(files_of(path)) == 2
    assert await log.verify() == []


async def test_the_oldest_file_goes_with_an_anchor_event_and_the_rest_still_verifies(path: Path) -> None:
    async with opened(path, keep=2) as log:
        await fill(log, *range(60))
        kept = await log.read()
        anchors = [event for one in kept if isinstance(event := decode(one.entry.body), Anchor)]
        assert len(files_of(path)) == 2
        assert anchors[-1].sequence == kept[0].sequence - 1
        assert await log.verify() == []


@pytest.mark.parametrize("gone", [0, 1], ids=["the first", "one in the middle"])
async def test_a_file_that_was_deleted_is_found(log: JsonLinesLog, path: Path, gone: int) -> None:
    """The control of the test above: without an anchor event a missing beginning is a finding."""
    await fill(log, *range(30))
    files_of(path)[gone].unlink()
    found = await log.verify()
    assert (len(found) >= 1, gone or "no anchor event says so" in found[0].problem) == (True, True)


async def test_trimming_goes_to_the_event_and_leaves_an_anchor(path: Path) -> None:
    async with opened(path) as log:
        await fill(log, *range(20))
        before = len(files_of(path))
        assert await log.trim(13) == 13
        assert (await actions(log))[:8] == [f"n{number}" for number in range(13, 20)] + ["anchor"]
        assert len(files_of(path)) < before
        assert (await log.verify(), await log.trim(13)) == ([], 0)
    async with opened(path) as log:
        await log.append([entry(99)])
        assert await log.verify() == []


async def test_trimming_everything_leaves_a_chain_that_goes_on_and_no_proof_of_earlier_heads(log: JsonLinesLog) -> None:
    early = await log.append([entry(1)])
    await log.append([entry(2)])
    assert await log.trim(1000) == 2
    assert "cannot be compared" in (await log.verify(early))[0].problem
    await log.append([entry(3)])
    assert (await actions(log), await log.verify()) == (["anchor", "n3"], [])


@pytest.mark.parametrize("cut", [1, 20, 200, 400])
async def test_a_batch_torn_by_a_crash_goes_as_a_whole_and_that_is_on_record(path: Path, cut: int) -> None:
    async with opened(path) as log:
        whole = await log.append([entry(1), entry(2)])
        size = path.stat().st_size
        await log.append([entry(3), entry(4), entry(5)])
    os.truncate(path, path.stat().st_size - cut)
    torn = path.stat().st_size - size

    async with opened(path) as log:
        repaired = decode((await log.read())[-1].entry.body)
        assert isinstance(repaired, LogRepaired)
        assert repaired.removed_bytes == torn
        assert await actions(log) == ["n1", "n2", "log_repaired"]
        assert (await log.verify(whole), (await log.head()).sequence) == ([], 3)


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
    (between,) = {ends[0] + len(whole[ends[0] :].splitlines(keepends=True)[0])}
    near = {*range(ends[0], ends[2], 5), between, *(end + one for end in ends[1:] for one in (-2, -1, 0))}
    for size in sorted(near):
        path.write_bytes(whole[:size])
        async with opened(path, inline=True) as log:
            kept = [name for name in await actions(log) if name != "log_repaired"]
            assert kept == ["n1", "n2", "n3", "n4", "n5"][: 1 + 2 * sum(size >= end for end in ends[1:])]
            assert ("log_repaired" in await actions(log)) is (size not in ends)
            assert await log.verify() == []


async def test_garbage_at_the_end_is_cut_off_and_damage_in_the_middle_stays_as_evidence(path: Path) -> None:
    async with opened(path) as log:
        await fill(log, 1, 2)
    text = path.read_bytes().replace(b'"n1"', b'"n\x00"')
    path.write_bytes(text + b"\x00" * 100 + b"\n" + b"\x00")
    async with opened(path) as log:
        assert await actions(log) == ["n2", "log_repaired"]
        assert len(await log.verify()) >= 1
        assert b"n\x00" in path.read_bytes()


async def test_a_crash_between_two_files_is_mended(path: Path) -> None:
    async with opened(path) as log:
        head = await log.append([entry(1)])
    path.rename(path.with_name("audit.jsonl.000000000001"))
    async with opened(path) as log:
        assert await log.head() == head
        await log.append([entry(2)])
        assert (await actions(log), await log.verify()) == (["n1", "n2"], [])


async def test_a_file_that_opens_no_log_and_a_folder_without_rights_are_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("hello\n")
    with pytest.raises(StoreCorruptError, match="opens no log"):
        await JsonLinesLog.open(path, StoppedClock())
    assert path.read_text() == "hello\n"
    with pytest.raises(StoreUnavailableError, match="check the folder"):
        await JsonLinesLog.open(path / "audit.jsonl", StoppedClock())


async def test_a_second_writer_is_refused_here_and_in_another_process_until_the_first_lets_go(path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from reefknot.audit.jsonlines import JsonLinesLog\n"
        "from tests.unit.audit.test_jsonlines import StoppedClock\n"
        "asyncio.run(JsonLinesLog.open(sys.argv[1], StoppedClock()))\n"
    )
    async with opened(path):
        with pytest.raises(StoreUnavailableError, match="another process writes it"):
            await JsonLinesLog.open(path, StoppedClock())
        words = [sys.executable, "-c", program, str(path)]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=30)
        assert "another process writes it" in done.stderr
    async with opened(path) as log:
        await log.append([entry(1)])


async def test_a_write_that_fails_is_taken_back_and_the_next_one_works(
    log: JsonLinesLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def full(handle: int, data: bytes) -> int:
        real(handle, bytes(data)[:30])
        raise OSError(28, "No space left on device")

    await log.append([entry(1)])
    with monkeypatch.context() as patch:
        patch.setattr(f"{WRITER}.write", full)
        with pytest.raises(StoreFullError, match="make room"):
            await log.append([entry(2)])
    await log.append([entry(3)])
    assert (await actions(log), await log.verify()) == (["n1", "n3"], [])


async def test_fsync_happens_as_often_as_the_setting_says_and_after_a_failed_one_nothing_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: dict[str, int] = {}
    calls: list[int] = []
    real = os.fsync

    def counting(handle: int) -> None:
        calls.append(handle)
        real(handle)

    def failing(handle: int) -> None:
        raise OSError(5, "Input/output error")

    for setting in ("always", "rotate", "never"):
        async with opened(path.with_name(f"{setting}.jsonl"), fsync=setting) as log:
            calls.clear()
            with monkeypatch.context() as patch:
                patch.setattr(f"{WRITER}.fsync", counting)
                await fill(log, *range(5), size=0)
            counted[setting] = len(calls)
    assert counted == {"always": 5, "rotate": 0, "never": 0}

    async with opened(path, fsync="always") as log:
        with monkeypatch.context() as patch:
            patch.setattr(f"{WRITER}.fsync", failing)
            with pytest.raises(StoreUnavailableError, match="not known"):
                await log.append([entry(1)])
        with pytest.raises(StoreUnavailableError, match="given up"):
            await log.append([entry(2)])


async def test_what_is_no_json_or_more_than_a_line_is_refused_whole_and_a_closed_log_says_so(log: JsonLinesLog) -> None:
    for body in (b"{", b'{"a":\n1}'):
        with pytest.raises(NotJsonError):
            await log.append([entry(1), AuditEntry(body, "x", 1)])
    assert await log.read() == []
    for _ in range(2):
        await log.close()
    with pytest.raises(StoreUnavailableError, match="it is closed"):
        await log.read()


@pytest.mark.parametrize("settings", [{"largest": 10}, {"keep": 0}, {"fsync": "sometimes"}])
async def test_settings_that_mean_nothing_are_refused(path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(settings))):
        await JsonLinesLog.open(path, StoppedClock(), **settings)
    assert not path.exists()


async def test_another_chains_head_is_told_apart(log: JsonLinesLog) -> None:
    head = await log.append([entry(1)])
    assert "is of chain other" in (await log.verify(msgspec.structs.replace(head, chain="other")))[0].problem
    assert "cut off" in (await log.verify(Head(head.chain, 9, "0" * 64)))[0].problem


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


async def test_a_log_is_proven_while_others_go_on_appending_and_rotating(path: Path) -> None:
    """The walk sees the files as they were; neither a new line nor a new name of a file is a mismatch."""
    began, go_on = threading.Event(), threading.Event()

    def told(_: int) -> None:
        began.set()
        assert go_on.wait(10)

    async with opened(path, keep=2) as log:
        await fill(log, *range(60), size=0)
        proving = asyncio.create_task(log.verify(await log.head(), progress=told))
        await asyncio.to_thread(began.wait, 10)
        async with asyncio.timeout(10):  # were the walk in the writer's own thread, this would never come back
            await fill(log, *range(60, 200), size=0)
        go_on.set()
        assert await proving == []
        assert await log.verify() == []


async def test_a_log_that_goes_on_from_an_exported_file_keeps_its_format_until_the_next_file(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(header_line(Head("c1")))
    async with opened(path) as log:
        await log.append([entry(1), entry(2), entry(3)])
        assert await log.trim(3) == 2
        await log.append([entry(4)])
        assert await log.verify() == []
        header, *lines = path.read_bytes().splitlines()
        assert b'"format":2' in header
        assert all(b'"seq":' in line for line in lines), "retention rewrites it in its own format"
        await log.append([entry(5, size=4096)])
        assert await log.verify() == []
    header, line = files_of(path)[-1].read_bytes().splitlines()
    assert (b'"format":1' in header, b'"sequence":6' in line) == (True, True)
