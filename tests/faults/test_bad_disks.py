"""A disk that is full, or fails: a named error with the way out, all or nothing, no second fsync after a failed one."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest

import reefknot.stores.sqlite.writer as writer
from reefknot.errors import StoreError, StoreFullError, StoreUnavailableError
from reefknot.idempotency.model import Claimed, Done, KeyState
from reefknot.queue.model.work import WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore
from tests.faults.points import spread
from tests.faults.story import told
from tests.faults.vfs import Counter, Failing, Hook, disk_error, disk_full, lazy_disk

# apsw also tells of errors inside a disk that SQLite has no use for.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

THREE = ("a", "b", "c")
Error = Callable[[], Exception]
Step = Callable[[SqliteStore], Awaitable[Any]]
Steps = tuple[Step, ...]


async def enqueue(store: SqliteStore) -> None:
    items = [WorkItem(name, "t", payload=b"x" * 5_000) for name in THREE]
    await store.work.enqueue(items, events=[told("admission", "a")])


async def enqueue_apart(store: SqliteStore) -> None:
    """The broken variant: three writes for one promise."""
    for name in THREE:
        await store.work.enqueue([WorkItem(name, "t", payload=b"x" * 5_000)])
    await store.audit.append([told("admission", "a")])


async def record(store: SqliteStore) -> None:
    answer = await store.idempotency.claim("key", owner="me")
    if isinstance(answer, Claimed):
        await store.idempotency.finish(answer.claim, Done('"paid"'), events=[told("record", "key")])


async def settle(store: SqliteStore) -> None:
    for item in await store.work.claim(3, WorkClaim(owner="me", lease=60)):
        await store.work.settle([Settlement(item.id, "me", item.fence, WorkDone(), (told("settled", item.id),))])


STEPS: Steps = (enqueue, record, settle)


class Facts(NamedTuple):
    """What of the three steps is there."""

    items: list[str]
    admitted: bool
    recorded: bool
    record_told: bool
    settled: list[str]
    settled_told: list[str]
    whole: bool


async def facts(store: SqliteStore) -> Facts:
    items = sorted((await store.work.search()).items, key=lambda item: item.id)
    key = await store.idempotency.get("key")
    events = [(kept.entry.event_type, kept.entry.work_id or "") for kept in await store.audit.read()]
    return Facts(
        items=[item.id for item in items],
        admitted=("admission", "a") in events,
        recorded=key is not None and key.state is KeyState.DONE,
        record_told=("record", "key") in events,
        settled=[item.id for item in items if item.state is WorkState.SUCCEEDED],
        settled_told=sorted(work_id for event_type, work_id in events if event_type == "settled"),
        whole=(await store.check()).ok,
    )


def halves(found: Facts) -> list[str]:
    """Every change that is there without the rest of it."""
    wrong = [] if found.whole else ["the file or its chain is damaged"]
    if len(found.items) not in (0, 3) or bool(found.items) != found.admitted:
        wrong.append(f"half an enqueue: {found.items}, told: {found.admitted}")
    if found.recorded != found.record_told:
        wrong.append("half a record")
    if found.settled != found.settled_told:
        wrong.append("half a settlement")
    return wrong


class Run(NamedTuple):
    """One run over a disk that fails once: the errors, what was done by then, and what a healthy disk shows."""

    errors: list[BaseException]
    done: list[str]
    worked_again: bool
    calls_after: int
    reopened: Facts
    finished: Facts


def run(folder: Path, hook: Failing, steps: Steps = STEPS) -> Run:
    async def main() -> Run:
        errors: list[BaseException] = []
        done: list[str] = []
        started, worked_again, calls_after = False, False, 0
        clock = VirtualClock()
        with lazy_disk(hook) as bad:
            opener = bad.opener(autocheckpoint=4)
            store = SqliteStore(folder / "state.db", clock, inline=True, opener=opener)
            try:
                await store.start()
                started = True
                for step in steps:
                    await step(store)
                    done.append(step.__name__)
            except Exception as error:
                errors.append(error)
            hook.mended = True
            after = Counter()
            bad.hook = after
            try:
                if started:
                    await store.audit.append([told("again", "")])
                    worked_again = True
            except Exception as error:
                errors.append(error)
            calls_after = sum(call.kind in ("write", "sync") for call in after.calls)
            await store.close()
        clock.advance(120)
        with lazy_disk(Hook()) as good:
            store = await SqliteStore(folder / "state.db", clock, inline=True, opener=good.opener()).start()
            reopened = await facts(store)
            if not reopened.items:
                await enqueue(store)
            await record(store)
            clock.advance(120)
            await settle(store)
            finished = await facts(store)
            await store.close()
        return Run(errors, done, worked_again, calls_after, reopened, finished)

    folder.mkdir()
    return asyncio.run(main())


def sweep(folder: Path, kind: str, error: Error, *, most: int = 60, steps: Steps = STEPS) -> list[tuple[Failing, Run]]:
    """The same run once for every call of this kind, which fails. Points at which nothing failed are left out."""
    counting = Failing((kind,), 1 << 30, error)
    counter = Counter()
    counting.around = counter.around  # type: ignore[method-assign]
    run(folder / "counting", counting, steps)
    number = sum(call.kind == kind for call in counter.calls)
    runs = []
    for at in spread(range(1, number + 1), most):
        hook = Failing((kind,), at, error)
        runs.append((hook, run(folder / f"{at}", hook, steps)))
    return [(hook, one) for hook, one in runs if hook.failed]


def kept(one: Run) -> list[str]:
    """What was acknowledged and is not there."""
    there = {
        "enqueue": len(one.reopened.items) == 3,
        "record": one.reopened.recorded,
        "settle": len(one.reopened.settled) == 3,
    }
    return [name for name, is_there in there.items() if name in one.done and not is_there]


COMPLETE = Facts(list(THREE), True, True, True, list(THREE), list(THREE), True)


def test_a_full_disk_refuses_whole_writes_by_name_and_works_again_when_there_is_room(tmp_path: Path) -> None:
    runs = sweep(tmp_path, "write", disk_full)
    assert len(runs) > 40
    for hook, one in runs:
        for error in one.errors[:1]:
            # While the log is turned on, SQLite does not say what is wrong; our message names both reasons.
            turning_on = isinstance(error, StoreUnavailableError) and "cannot be turned on" in str(error)
            assert isinstance(error, StoreFullError) or turning_on, (hook.failed, one.errors)
            assert "make room" in str(error)
        assert (halves(one.reopened), kept(one), one.finished) == ([], [], COMPLETE)
    opened = [one for _, one in runs if one.worked_again]
    assert len(opened) > len(runs) / 2, "only a store that never opened stays shut"
    refused = [hook for hook, one in runs if one.errors]
    passed = [hook for hook, one in runs if not one.errors]
    assert refused
    assert all(call.file == "" for hook in passed for call in hook.failed), "only moving the log may wait for room"


def test_the_check_catches_a_promise_that_is_written_in_pieces(tmp_path: Path) -> None:
    runs = sweep(tmp_path, "write", disk_full, most=30, steps=(enqueue_apart,))
    assert any("half an enqueue" in wrong for _, one in runs for wrong in halves(one.reopened))


def test_after_a_failed_fsync_the_store_refuses_everything_until_it_is_opened_again(tmp_path: Path) -> None:
    runs = sweep(tmp_path, "sync", disk_error)
    logs = [one for hook, one in runs if hook.failed[0].file == "-wal" and one.errors]
    assert len(logs) > 5
    for one in logs:
        assert all(isinstance(error, StoreUnavailableError) for error in one.errors), one.errors
        assert "check the disk" in str(one.errors[0])
        assert not one.worked_again
        assert one.calls_after == 0
    for hook, one in runs:
        assert one.errors or hook.failed[0].file == "" or one.done == ["enqueue", "record", "settle"], hook.failed
        assert (halves(one.reopened), kept(one), one.finished) == ([], [], COMPLETE)


def test_a_store_that_goes_on_after_a_failed_fsync_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "is_fatal", lambda _: False)
    runs = sweep(tmp_path, "sync", disk_error)
    assert any(one.worked_again and one.errors for _, one in runs)


@pytest.mark.parametrize("kind", ["write", "read", "truncate", "delete", "size", "lock", "access"])
def test_a_failing_disk_is_named_and_loses_nothing_that_was_acknowledged(tmp_path: Path, kind: str) -> None:
    runs = sweep(tmp_path, kind, disk_error, most=40)
    assert runs
    for hook, one in runs:
        assert all(isinstance(error, StoreError) and type(error) is not StoreError for error in one.errors), (
            hook.failed,
            one.errors,
        )
        assert (halves(one.reopened), kept(one), one.finished) == ([], [], COMPLETE)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    runs = sweep(tmp_path, "open", lambda: apsw.CantOpenError("no such luck"))
    assert len(runs) >= 2
    for _, one in runs:
        assert all(isinstance(error, StoreUnavailableError) for error in one.errors)
        assert (halves(one.reopened), one.finished) == ([], COMPLETE)
    assert "check that the folder exists" in str(runs[0][1].errors[0])


@pytest.mark.real_time
async def test_callers_of_one_batch_all_hear_that_the_disk_is_full_and_all_succeed_afterwards(tmp_path: Path) -> None:
    """With the writer's thread: the batch is one write, and its refusal everybody's."""
    hook = Failing(("write",), 1, disk_full, lasts=1 << 30)
    hook.mended = True
    with lazy_disk(hook) as bad:
        store = await SqliteStore(tmp_path / "state.db", VirtualClock(), opener=bad.opener()).start()
        hook.mended = False
        claims = [store.idempotency.claim(f"{number}", owner="me") for number in range(20)]
        answers = await asyncio.gather(*claims, return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreFullError}
        hook.mended = True
        assert not await store.idempotency.counts()
        claims = [store.idempotency.claim(f"{number}", owner="me") for number in range(20)]
        assert {type(answer) for answer in await asyncio.gather(*claims)} == {Claimed}
        await store.close()


@pytest.mark.real_time
async def test_a_store_whose_log_cannot_be_turned_on_is_refused_instead_of_keeping_less(tmp_path: Path) -> None:
    """SQLite answers with another mode and no error; in that mode a power cut may take back what was acknowledged."""

    def without_a_log(path: str, flags: int) -> apsw.Connection:
        return apsw.Connection(":memory:")

    with pytest.raises(StoreUnavailableError, match="write-ahead log cannot be turned on") as refused:
        await SqliteStore(tmp_path / "state.db", VirtualClock(), opener=without_a_log).start()
    assert "use a local one" in str(refused.value)


def test_a_disk_that_is_full_while_the_log_is_turned_on_makes_no_store_without_one(tmp_path: Path) -> None:
    runs = sweep(tmp_path, "write", disk_full, most=1 << 30, steps=())
    assert len(runs) > 20
    assert all(one.errors for _, one in runs)
