"""The power goes after any storage call: with FULL every acknowledged row is there, with less it is not."""

import asyncio
import json
import os
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

import reefknot.stores.sqlite.store as sqlite_store
from reefknot.errors import StoreError
from reefknot.idempotency.model import Claimed, Done, KeyState
from reefknot.queue.model.work import WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Enqueued, Settlement, WorkClaim
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.sqlite_files import open_connection
from reefknot.stores.sqlite import SqliteStore, idempotency
from tests.faults.cutting import Disk, Image
from tests.faults.points import either, spread
from tests.faults.story import stored_keys, told
from tests.faults.vfs import Call, DroppingRecorder, FaultyDisk, Hook, Recorder, lazy_disk

ROUNDS = 12


class Promise(NamedTuple):
    """What a caller was told, and how many storage calls had been made by then."""

    after: int
    what: str
    name: str


class Recording(NamedTuple):
    log: list[Call]
    promises: list[Promise]


@pytest.fixture(autouse=True)
def keys_that_move_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of keys is enough for some to move from the recent to the older ones."""
    monkeypatch.setattr(idempotency, "ROWS_PER_MOVE", 4)
    monkeypatch.setattr(idempotency, "RECENT_KEYS", 16)


def recorded(folder: Path, synchronous: str) -> Recording:
    """A workload of several callers at once, large and small rows, with its log moved into the file now and then."""
    recorder = Recorder()
    promises: list[Promise] = []
    dice = random.Random(7)

    def promised(what: str, name: str) -> None:
        promises.append(Promise(len(recorder.log), what, name))

    async def order(store: SqliteStore, name: str) -> None:
        size = dice.choice((0, 100, 9_000))
        answer = await store.work.enqueue([WorkItem(name, "t", payload=b"x" * size)], events=[told("admission", name)])
        assert answer == [Enqueued.ACCEPTED]
        promised("accepted", name)
        claimed = await store.idempotency.claim(name, owner=name)
        assert isinstance(claimed, Claimed)
        promised("claimed", name)
        await store.idempotency.finish(claimed.claim, Done(json.dumps(name)), events=[told("record", name)])
        promised("recorded", name)

    async def main(power: FaultyDisk) -> None:
        opener = power.opener(autocheckpoint=40)
        store = SqliteStore(folder / "state.db", SystemClock(), opener=opener, synchronous=synchronous)
        await store.start()
        for number in range(ROUNDS):
            await asyncio.gather(*(order(store, f"{number}-{caller}") for caller in range(1 + number % 4)))
            for item in await store.work.claim(99, WorkClaim(owner="me")):
                (kept,) = await store.work.settle([Settlement(item.id, "me", item.fence, WorkDone())])
                assert kept
                promised("settled", item.id)
        await store.close()

    folder.mkdir()
    with lazy_disk(recorder) as power:
        asyncio.run(main(power))
    return Recording(recorder.log, promises)


def missing(folder: Path, image: Image, promises: list[Promise]) -> list[str]:
    """Put the disk back in, open the store, and look for everything that was promised."""
    for suffix in ("", "-wal", "-journal", "-shm"):
        (folder / f"state.db{suffix}").unlink(missing_ok=True)
    for suffix, content in image.items():
        (folder / f"state.db{suffix}").write_bytes(content)

    async def look(power: FaultyDisk) -> list[str]:
        store = await SqliteStore(folder / "state.db", SystemClock(), opener=power.opener(), inline=True).start()
        try:
            check = await store.check()
            items = {item.id: item for item in (await store.work.search(limit=1000)).items}
            keys = await stored_keys(store)
            events = {(kept.entry.event_type, kept.entry.work_id) for kept in await store.audit.read()}
        finally:
            await store.close()
        gone = [] if check.ok else ["the file or its chain is damaged"]
        for _, what, name in promises:
            match what:
                case "accepted":
                    held = name in items and ("admission", name) in events
                case "claimed":
                    held = name in keys
                case "recorded":
                    record = keys.get(name)
                    held = record is not None and record.state is KeyState.DONE and ("record", name) in events
                case _:
                    held = name in items and items[name].state is WorkState.SUCCEEDED
            if not held:
                gone.append(f"{what}: {name}")
        return gone

    with lazy_disk(Hook()) as power:
        try:
            return asyncio.run(look(power))
        except StoreError as error:
            return [f"it cannot be opened: {error}"]


def cuts(folder: Path, recording: Recording, *, most: int, seeds: int) -> list[list[str]]:
    """What is missing at each cut: once with nothing unsynced kept, then with any of it."""
    disk_now, followed, found = Disk(), 0, []
    folder.mkdir()
    for place in spread(range(len(recording.log) + 1), most):
        disk_now.follow(recording.log[followed:place])
        followed = place
        promises = [promise for promise in recording.promises if promise.after <= place]
        images = [disk_now.image(), *(disk_now.image(random.Random(1000 * place + seed)) for seed in range(seeds))]
        found += [missing(folder, image, promises) for image in images]
    return found


@pytest.mark.slow
def test_with_full_synchronisation_no_power_cut_takes_an_acknowledged_row(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "made", "FULL")
    assert len(recording.log) > 500
    assert {call.file for call in recording.log if call.kind == "sync"} == {"", "-wal", "-journal"}
    found = cuts(tmp_path / "cut", recording, most=100, seeds=either(1, 8))
    assert [gone for gone in found if gone] == []
    print(f"FULL: {len(found)} cuts over {len(recording.log)} calls, 0 lost")


def test_with_normal_synchronisation_most_power_cuts_take_acknowledged_rows(tmp_path: Path) -> None:
    """The control: the same check, the weaker setting."""
    recording = recorded(tmp_path / "made", "NORMAL")
    found = cuts(tmp_path / "cut", recording, most=60, seeds=0)
    lost = [gone for gone in found if gone]
    assert len(lost) > len(found) / 2
    assert not any("damaged" in one or "opened" in one for gone in lost for one in gone)
    print(f"NORMAL: {len(lost)} of {len(found)} cuts lose rows")


def test_a_disk_that_only_says_it_synced_loses_acknowledged_rows(tmp_path: Path) -> None:
    """The control of the model: without the log's syncs, FULL is worth nothing."""
    recording = recorded(tmp_path / "made", "FULL")
    lying = recording._replace(log=[call for call in recording.log if (call.kind, call.file) != ("sync", "-wal")])
    moved = [
        promise._replace(
            after=promise.after - sum((c.kind, c.file) == ("sync", "-wal") for c in recording.log[: promise.after])
        )
        for promise in recording.promises
    ]
    found = cuts(tmp_path / "cut", lying._replace(promises=moved), most=40, seeds=0)
    assert sum(bool(gone) for gone in found) > len(found) / 2


def test_a_log_that_is_reused_before_the_file_is_synced_is_caught(tmp_path: Path) -> None:
    """The other control of the model: without the file's syncs, a checkpoint loses what it moved."""
    recording = recorded(tmp_path / "made", "FULL")
    disk_now = Disk()
    disk_now.follow(call for call in recording.log if (call.kind, call.file) != ("sync", ""))
    (tmp_path / "cut").mkdir()
    assert missing(tmp_path / "cut", disk_now.image(), recording.promises)


def test_a_folder_made_for_a_store_is_synced_into_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite syncs the folder of its files, and nobody else the folders above it."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    open_connection(str(tmp_path / "new" / "folder" / "state.db"), patience=1).close()
    assert synced == [str(tmp_path / "new"), str(tmp_path)]
    synced.clear()
    open_connection(str(tmp_path / "state.db"), patience=1).close()
    assert synced == []


def failed_once(folder: Path, successor: Path) -> Recording:
    """A process whose fsync fails and that dies of it, and its successor over what the system shows of the files."""
    recorder, promises = DroppingRecorder(), list[Promise]()

    async def accept(store: SqliteStore, name: str) -> None:
        await store.work.enqueue([WorkItem(name, "t", payload=b"x" * 9_000)], events=[told("admission", name)])
        promises.append(Promise(len(recorder.log), "accepted", name))

    async def main(power: FaultyDisk) -> None:
        first = await SqliteStore(folder / "state.db", SystemClock(), opener=power.opener(), inline=True).start()
        for number in range(5):
            await accept(first, f"before-{number}")
        recorder.fails_next = True
        with pytest.raises(StoreError, match="the disk reported an error"):
            await accept(first, "unknown")
        shutil.copytree(folder, successor, ignore=shutil.ignore_patterns("*-shm"))  # as after a kill
        length = len(recorder.log)
        await first.close()
        del recorder.log[length:]
        second = await SqliteStore(successor / "state.db", SystemClock(), opener=power.opener(), inline=True).start()
        for number in range(5):
            await accept(second, f"after-{number}")
        length = len(recorder.log)
        await second.close()
        del recorder.log[length:]

    folder.mkdir()
    with lazy_disk(recorder) as power:
        asyncio.run(main(power))
    return Recording(recorder.log, promises)


def lost_after_a_failed_fsync(folder: Path) -> list[str]:
    recording = failed_once(folder / "made", folder / "successor")
    assert len(recording.promises) == 10
    disk_now = Disk()
    disk_now.follow(recording.log)
    (folder / "cut").mkdir()
    return missing(folder / "cut", disk_now.image(), recording.promises)


def test_pages_that_a_failed_fsync_dropped_take_no_later_row_with_them(tmp_path: Path) -> None:
    assert lost_after_a_failed_fsync(tmp_path) == []


def test_a_successor_that_appends_to_such_a_log_loses_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(sqlite_store, "empty_log", lambda _: None)
    assert [f"accepted: after-{number}" for number in range(5)] == lost_after_a_failed_fsync(tmp_path)
