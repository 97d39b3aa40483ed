"""Notes of a step: checkpoints that survive failures, kills and frozen owners; progress and lines for people."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from msgspec import json

from reefknot.errors import LeaseLostError, NotJsonError, ParameterError, StoreUnavailableError
from reefknot.queue.model.messages import ResultStatus, StepResult
from reefknot.queue.model.notes import CHECKPOINT, LARGEST_CHECKPOINT, LINES, Notes, StepLog, StepProgress
from reefknot.queue.model.work import NO_EXTRA, WorkItem, WorkState
from reefknot.queue.port.work_queue import Held, Settlement
from reefknot.queue.worker.notes import EVERY_S, AttemptNotes
from reefknot.queue.worker.service import Worker
from reefknot.steps.port import BlockContext
from reefknot.steps.python import PythonBlock
from reefknot.stores.work_in_memory.table import WorkTable
from tests.unit.queue.shops import sent, stored
from tests.workshop import Shop, Step, work

LEASE_S = 6.0
on_each_store = pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)


class Spoken(Step):
    """A step that is a function of its context."""

    def __init__(self, told: Callable[[BlockContext], Awaitable[dict[str, Any] | None]]) -> None:
        super().__init__()
        self.told = told

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        self.contexts.append(context)
        return StepResult(outputs=await self.told(context) or {})


class Pages(Step):
    """A step of so many seconds that goes on from its last checkpoint, one for each second; or does not make any."""

    def __init__(self, seconds: int, *, makes_checkpoints: bool = True) -> None:
        super().__init__()
        self.pages = seconds
        self.makes_checkpoints = makes_checkpoints
        self.starts: list[int] = []

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        begin = context.last_checkpoint or 0
        self.starts.append(begin)
        for page in range(begin + 1, self.pages + 1):
            await asyncio.sleep(1)
            if self.makes_checkpoints:
                await context.checkpoint(page)
        return StepResult(outputs={"pages": self.pages})


class Counted:
    """The work queue of a store, and the notes that it was given."""

    def __init__(self, shop: Shop, *errors: Exception) -> None:
        self.work = shop.store.work
        self.errors = list(errors)
        self.noted: list[Notes] = []
        self.at: list[float] = []
        self.reads = 0
        self.settled: list[Settlement] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    async def note(self, held: Held, notes: Notes) -> bool:
        self.noted.append(notes)
        self.at.append(asyncio.get_running_loop().time())
        if self.errors:
            raise self.errors.pop(0)
        return await self.work.note(held, notes)

    async def notes(self, work_id: str) -> dict[str, bytes]:
        self.reads += 1
        return await self.work.notes(work_id)

    async def settle(self, settlements: list[Settlement]) -> list[bool]:
        self.settled += settlements
        return await self.work.settle(settlements)


async def counted(shop: Shop, step: Step, *errors: Exception, **options: Any) -> Counted:
    """A worker that speaks to a counted queue, and has been sent the work `a`."""
    worker = await shop.worker("w1", step, lease=LEASE_S)
    queue = Counted(shop, *errors)
    shop.use_queue(worker, queue)
    await sent(shop, work("a", **{"timeout_ms": 900_000} | options), wait=0.0)
    return queue


def kill(shop: Shop, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As kill -9: what was not stored is lost."""

    async def gone(notes: AttemptNotes) -> None:
        notes.end()

    monkeypatch.setattr(AttemptNotes, "stop", gone)
    shop.vanish(worker)


async def killed(shop: Shop, step: Pages, monkeypatch: pytest.MonkeyPatch, *, times: int, every: float) -> WorkItem:
    """The work `a` after its worker was killed so often, and an hour."""
    worker = await shop.worker("w1", step, lease=LEASE_S)
    await sent(shop, work("a", timeout_ms=900_000), wait=every)
    for _ in range(times):
        kill(shop, worker, monkeypatch)
        await asyncio.sleep(LEASE_S + 1)
        worker = await shop.worker("w1", step, lease=LEASE_S)
        await asyncio.sleep(every)
    await asyncio.sleep(3600)
    return await stored(shop, "a")


@on_each_store
async def test_a_step_of_ten_minutes_that_is_killed_five_times_goes_on_each_time(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Pages(600)
    item = await killed(shop, step, monkeypatch, times=5, every=100)
    assert (item.state, item.attempts, item.crashes) == (WorkState.SUCCEEDED, 1, 1)
    assert shop.result("a").retries_used == 0
    assert len(step.starts) == 6
    gained = [after - before for before, after in zip(step.starts, step.starts[1:], strict=False)]
    assert all(gain >= 100 - 2 - EVERY_S for gain in gained), step.starts


async def test_without_checkpoints_it_is_quarantined_by_its_third_crash(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: nothing else lets it go on."""
    step = Pages(600, makes_checkpoints=False)
    item = await killed(shop, step, monkeypatch, times=5, every=100)
    assert (item.state, item.reason) == (WorkState.QUARANTINED, "its owner vanished 3 times")
    assert step.starts == [0, 0, 0]


async def test_crashes_do_not_give_a_step_more_than_its_whole_time(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """900 s in all, of which every 100 s led to a checkpoint."""
    step = Pages(10_000)
    item = await killed(shop, step, monkeypatch, times=12, every=100)
    assert item.state in (WorkState.FAILED, WorkState.QUARANTINED)
    assert shop.result("a").status is ResultStatus.TIMEOUT
    assert 850 <= step.starts[-1] <= 1000


# ---- the fence -------------------------------------------------------------------------------------------------------


async def frozen(shop: Shop) -> tuple[list[str], dict[str, bytes]]:
    """What an owner hears whose lease ran out while it slept, and the checkpoint that is kept in the end."""
    heard: list[str] = []

    async def told(context: BlockContext) -> None:
        is_heir = context.last_checkpoint is not None
        await context.checkpoint("heir" if is_heir else "first")
        await asyncio.sleep(30 if is_heir else 20)
        if not is_heir:
            try:
                await context.checkpoint("zombie")
                heard.append("kept")
            except LeaseLostError as error:
                heard.append(type(error).__name__)
            await asyncio.sleep(2)

    step = Spoken(told)
    first = await shop.worker("w1", step, lease=LEASE_S)
    await sent(shop, work("a", timeout_ms=900_000), wait=1)
    first.services.cancel()  # it renews nothing, and its step goes on
    shop.members.remove(first)
    await asyncio.sleep(LEASE_S + 1)
    await shop.worker("w1", step, lease=LEASE_S)
    await asyncio.sleep(60)
    return heard, await shop.store.work.notes("a")


@on_each_store
async def test_a_frozen_owners_late_checkpoint_is_refused_and_tells_it_so(shop: Shop) -> None:
    heard, kept = await frozen(shop)
    assert heard == ["LeaseLostError"]
    assert kept == {CHECKPOINT: b'"heir"'}
    assert (await stored(shop, "a")).state is WorkState.SUCCEEDED


async def test_without_the_fence_the_late_checkpoint_would_be_kept(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same story over a queue that does not look who asks."""

    def unfenced(table: WorkTable, held: Held, notes: Notes, *, now: Any) -> bool:
        return fenced(table, Held.of(table.items[held.id]), notes, now=now)

    fenced = WorkTable.note
    monkeypatch.setattr(WorkTable, "note", unfenced)
    heard, kept = await frozen(shop)
    assert heard == ["kept"]
    assert kept == {CHECKPOINT: b'"zombie"'}


async def test_a_step_that_outlives_its_time_hears_that_its_job_is_not_its_own(shop: Shop) -> None:
    heard: list[str] = []

    async def told(context: BlockContext) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
        context.log("nothing hears this")
        with pytest.raises(LeaseLostError):
            await context.checkpoint(1)
        heard.append("refused")

    await counted(shop, Spoken(told), timeout_ms=3000, retry_count=0)
    await asyncio.sleep(30)
    assert heard == ["refused"]
    assert (await stored(shop, "a")).extra == NO_EXTRA


# ---- when it is stored -----------------------------------------------------------------------------------------------


async def test_a_step_that_says_nothing_costs_no_call_and_no_byte(shop: Shop) -> None:
    queue = await counted(shop, Step(seconds=30))
    await asyncio.sleep(60)
    assert (queue.noted, queue.reads) == ([], 0)
    assert [one.notes for one in queue.settled] == [None]
    item = await stored(shop, "a")
    assert (item.state, item.extra) == (WorkState.SUCCEEDED, NO_EXTRA)
    assert json.encode(item).endswith(b",{}]")


async def test_what_is_said_is_stored_once_a_second_and_the_rest_with_the_report(shop: Shop) -> None:
    async def told(context: BlockContext) -> None:
        for number in range(100):
            await context.checkpoint(number)
            context.progress(number, 100)
            context.log(f"line {number}")
            await asyncio.sleep(0.05)

    queue = await counted(shop, Spoken(told))
    await asyncio.sleep(60)
    assert 4 <= len(queue.noted) <= 6
    assert min(after - before for before, after in zip(queue.at, queue.at[1:], strict=False)) >= EVERY_S - 1e-6
    (report,) = queue.settled
    assert report.notes is not None
    assert report.notes.parts[CHECKPOINT] == b"99"
    item, parts = await stored(shop, "a"), await shop.store.work.notes("a")
    assert item.extra.notes is not None
    assert (item.extra.notes.checkpoints, item.extra.notes.progress) == (100, StepProgress(99, 100))
    assert [line.text for line in StepLog.read(parts[LINES]).lines] == [f"line {number}" for number in range(100)]


async def test_a_step_that_is_stopped_loses_nothing_that_it_said(shop: Shop) -> None:
    async def told(context: BlockContext) -> None:
        if context.last_checkpoint is not None:
            return
        for number in range(2000):
            await context.checkpoint(number)
            context.log(f"line {number}")
            await asyncio.sleep(0.01)

    step = Spoken(told)
    worker = await shop.worker("w1", step, lease=LEASE_S)
    await sent(shop, work("a", timeout_ms=900_000), wait=3.505)
    await worker.stop()
    shop.members.remove(worker)
    parts = await shop.store.work.notes("a")
    last = json.decode(parts[CHECKPOINT])
    assert 340 <= last <= 351
    assert StepLog.read(parts[LINES]).lines[-1].text == f"line {last}"
    assert (await stored(shop, "a")).state is WorkState.PENDING
    await shop.worker("w1", step, lease=LEASE_S)
    await asyncio.sleep(10)
    assert step.contexts[-1].last_checkpoint == last
    assert (await stored(shop, "a")).attempts == 1


async def test_a_store_that_is_away_does_not_fail_the_step_and_gets_it_later(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    async def told(context: BlockContext) -> None:
        for number in range(3):
            await context.checkpoint(number)
            context.log(f"line {number}")
            await asyncio.sleep(0.4)
        await asyncio.sleep(5)

    away = [StoreUnavailableError("memory:", "it is away", "wait") for _ in range(3)]
    with caplog.at_level(logging.WARNING, "reefknot"):
        queue = await counted(shop, Spoken(told), *away)
        await asyncio.sleep(60)
    assert len(queue.noted) == 4
    parts = await shop.store.work.notes("a")
    assert parts[CHECKPOINT] == b"2"
    assert [line.text for line in StepLog.read(parts[LINES]).lines] == ["line 0", "line 1", "line 2"]
    assert "notes of a are not stored yet; they are tried again" in caplog.text


async def test_a_checkpoint_that_cannot_be_read_delays_the_attempt(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the step would begin from its start."""

    async def told(context: BlockContext) -> None:
        await context.checkpoint(7)
        if context.attempt == 1:
            raise ConnectionError("not now")

    step = Spoken(told)
    queue = await counted(shop, step)
    errors = [StoreUnavailableError("memory:", "it is away", "wait") for _ in range(2)]
    read = queue.notes

    async def notes(work_id: str) -> dict[str, bytes]:
        if errors:
            raise errors.pop()
        return await read(work_id)

    monkeypatch.setattr(queue, "notes", notes)
    await asyncio.sleep(60)
    assert [one.last_checkpoint for one in step.contexts] == [None, 7]
    item = await stored(shop, "a")
    assert (item.state, item.snoozes, item.attempts) == (WorkState.SUCCEEDED, 2, 2)


@pytest.mark.parametrize("left", [{}, {CHECKPOINT: b"{damaged", LINES: b"[damaged"}])
async def test_a_checkpoint_that_is_gone_is_said_and_the_step_begins_from_its_start(
    shop: Shop, left: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def told(context: BlockContext) -> None:
        await context.checkpoint(7)
        if context.attempt == 1:
            raise ConnectionError("not now")

    step = Spoken(told)
    queue = await counted(shop, step)

    async def lost(work_id: str) -> dict[str, bytes]:
        return left

    monkeypatch.setattr(queue, "notes", lost)
    await asyncio.sleep(60)
    assert [one.last_checkpoint for one in step.contexts] == [None, None]
    assert "the checkpoint of a is missing or damaged; it begins from its start" in caplog.text


# ---- attempts --------------------------------------------------------------------------------------------------------


async def failing(shop: Shop, *, makes_checkpoints: bool, step: int = 1) -> WorkItem:
    """A step of ten parts that fails after each of them, and may do so three times in a row; a checkpoint has `step`
    parts more."""

    async def told(context: BlockContext) -> None:
        begin = context.last_checkpoint or 0
        if begin == 10:
            return
        await asyncio.sleep(1)
        if makes_checkpoints:
            await context.checkpoint(begin + step)
        raise ConnectionError("the other side hung up")

    await counted(shop, Spoken(told), retry_count=2)
    await asyncio.sleep(600)
    return await stored(shop, "a")


async def test_after_a_checkpoint_a_failure_counts_as_the_first_again(shop: Shop) -> None:
    item = await failing(shop, makes_checkpoints=True)
    assert (item.state, item.attempts) == (WorkState.SUCCEEDED, 2)


@pytest.mark.parametrize("given", [{"makes_checkpoints": False}, {"makes_checkpoints": True, "step": 0}])
async def test_without_one_or_with_the_same_again_it_ends_with_its_attempts(shop: Shop, given: dict[str, Any]) -> None:
    item = await failing(shop, **given)
    assert (item.state, item.reason) == (WorkState.FAILED, "attempts_spent")
    assert item.attempts == 3


# ---- what may be said ------------------------------------------------------------------------------------------------


async def test_a_value_that_is_not_json_or_too_large_is_refused_and_the_last_one_stays(shop: Shop) -> None:
    refused: list[Exception] = []

    async def told(context: BlockContext) -> None:
        await context.checkpoint({"page": 1})
        for wrong in ({"at": object()}, {1: "one"}, float("nan"), "x" * LARGEST_CHECKPOINT, {"a": [b"bytes"]}):
            with pytest.raises((NotJsonError, ParameterError)) as caught:
                await context.checkpoint(wrong)
            refused.append(caught.value)

    await counted(shop, Spoken(told))
    await asyncio.sleep(10)
    assert (await shop.store.work.notes("a"))[CHECKPOINT] == b'{"page":1}'
    texts = [str(one) for one in refused]
    assert texts[0] == "checkpoint.at is not JSON: object has no JSON form"
    assert texts[1] == "checkpoint is not JSON: a key is text, not int"
    assert texts[2] == "checkpoint is not JSON: nan has no JSON form"
    assert "at most 65536 bytes as JSON, and it has 65538" in texts[3]
    assert texts[4] == "checkpoint.a[0] is not JSON: bytes has no JSON form"


@pytest.mark.real_time
async def test_a_loop_of_checkpoints_lets_others_run_and_can_be_stopped(shop: Shop) -> None:
    made: list[int] = []

    async def told(context: BlockContext) -> None:
        while True:
            await context.checkpoint(len(made))
            made.append(1)

    worker = await shop.worker("w1", Spoken(told), lease=LEASE_S)
    await sent(shop, work("a", timeout_ms=900_000), wait=0.05)
    assert made
    assert await shop.store.work.cancel("a")
    await worker.pools["cpu"].renew()
    await asyncio.sleep(0.05)
    assert not worker.pools["cpu"].running


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("3",), "done='3' is not accepted: a number"),
        ((-1,), "done=-1 is not accepted: a number that is 0 or more"),
        ((float("nan"),), "done=nan is not accepted: a number that is 0 or more"),
        ((1, True), "of=True is not accepted: a number"),
        ((1, 2, 3), "text=3 is not accepted: a text"),
    ],
)
def test_a_progress_that_is_none_is_refused(given: tuple[Any, ...], problem: str) -> None:
    context = BlockContext("a", 1, "a/0", 30.0)
    with pytest.raises(ParameterError) as caught:
        context.progress(*given)
    assert str(caught.value) == problem


def test_a_context_made_by_hand_takes_everything_and_keeps_nothing() -> None:
    context = BlockContext("a", 1, "a/0", 30.0, last_checkpoint={"page": 3})

    async def step() -> Any:
        context.progress(1, 2, "half")
        context.log("a line")
        await context.checkpoint({"page": 4})
        return context.last_checkpoint

    assert asyncio.run(step()) == {"page": 3}
    with pytest.raises(NotJsonError):
        context.checkpoint(object())


async def test_lines_are_bounded_redacted_and_without_control_characters(shop: Shop) -> None:
    async def told(context: BlockContext) -> None:
        for number in range(300):
            context.log(f"line {number}")
        context.log("password=hunter2 \x1b[31mred\nsecond")
        context.progress(1, None, "token=abcdef123456 \x07")

    await counted(shop, Spoken(told))
    await asyncio.sleep(10)
    log = StepLog.read((await shop.store.work.notes("a"))[LINES])
    assert (len(log.lines), log.dropped) == (200, 101)
    assert log.lines[-1].text == "password=[redacted] \\x1b[31mred\\nsecond"
    assert {line.attempt for line in log.lines} == {1}
    notes = (await stored(shop, "a")).extra.notes
    assert notes is not None
    assert notes.progress is not None
    assert "abcdef123456" not in notes.progress.text
    assert "\x07" not in notes.progress.text


async def test_the_lines_of_every_attempt_stay_with_its_number(shop: Shop) -> None:
    async def told(context: BlockContext) -> None:
        context.log(f"attempt {context.attempt}")
        if context.attempt < 3:
            raise ConnectionError("not now")

    await counted(shop, Spoken(told))
    await asyncio.sleep(60)
    log = StepLog.read((await shop.store.work.notes("a"))[LINES])
    assert [(line.attempt, line.text) for line in log.lines] == [(n, f"attempt {n}") for n in (1, 2, 3)]
    assert list(log.lines) == sorted(log.lines, key=lambda line: line.at)


async def test_a_call_that_is_not_awaited_is_kept_all_the_same(shop: Shop) -> None:
    async def told(context: BlockContext) -> None:
        waiting = context.checkpoint(1)
        await asyncio.sleep(3)
        assert (await shop.store.work.notes("a"))[CHECKPOINT] == b"1"
        await waiting

    await counted(shop, Spoken(told))
    await asyncio.sleep(10)
    assert shop.result("a").status is ResultStatus.SUCCESS


@pytest.mark.real_time
async def test_a_plain_function_speaks_from_its_thread_and_hears_that_its_time_is_over(shop: Shop) -> None:
    goes_on, heard = threading.Event(), list[str]()

    def plain(inputs: Mapping[str, Any], context: BlockContext) -> None:
        context.checkpoint({"page": 1})
        context.progress(1, 2, "half")
        context.log("a line")
        heard.append("kept")
        goes_on.wait(10)
        try:
            context.checkpoint({"page": 2})
        except LeaseLostError as error:
            heard.append(str(error))

    await shop.worker("w1", PythonBlock("test.step", plain), lease=LEASE_S)
    await sent(shop, work("a", timeout_ms=300, retry_count=0), wait=0.2)
    assert (await shop.store.work.notes("a"))[CHECKPOINT] == b'{"page":1}', "the call has waited for it"
    async with asyncio.timeout(10):
        while not shop.results:  # noqa: ASYNC110 - a worker reports it
            await asyncio.sleep(0.01)
        goes_on.set()
        while len(heard) < 2:  # noqa: ASYNC110 - a thread says it
            await asyncio.sleep(0.01)
    assert shop.result("a").status is ResultStatus.TIMEOUT
    assert heard[0] == "kept"
    assert heard[1].startswith("'a' is no longer held by w1#")
    parts, item = await shop.store.work.notes("a"), await stored(shop, "a")
    assert item.extra.notes is not None
    assert (item.extra.notes.checkpoints, item.extra.notes.progress) == (1, StepProgress(1, 2, "half"))
    assert [line.text for line in StepLog.read(parts[LINES]).lines] == ["a line"]
