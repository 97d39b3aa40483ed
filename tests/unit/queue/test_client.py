"""A caller's side: what is called off is off, with a router and without; clients without an event loop."""

import asyncio
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import reefknot as rk
from reefknot.app.system import running_system
from reefknot.audit.model.event import OperatorAction
from reefknot.errors import KeyConflictError, NotJsonError, ParameterError, ResultPendingError
from reefknot.policy.settings import load_settings
from reefknot.queue.client import Client, Handle
from reefknot.queue.model.messages import ExecResult, ResultStatus
from reefknot.queue.model.work import Interrupted
from reefknot.queue.port.work_queue import Settlement, WorkFilter
from reefknot.queue.router.service import Router
from reefknot.stores.port import Store
from tests.unit.queue.shops import served, stored
from tests.workshop import Shop, Step, work


async def nobody(store: Store) -> bool:
    return False


async def somebody(store: Store) -> bool:
    return True


async def called_off(handle: Handle) -> ExecResult:
    result = await handle.result(30)
    assert (result.status, result.error_code) == (ResultStatus.CANCELLED, "CANCELLED_BY_USER")
    return result


async def test_without_a_router_it_is_off_at_once_and_on_record(shop: Shop) -> None:
    client = Client(shop.store, shop.clock, has_router=nobody)
    handle = await client.hand_in(work("a"))
    await handle.cancel("not needed")
    assert (await called_off(handle)).error_message == "not needed"
    (event,) = await shop.events(OperatorAction)
    assert (event.work_id, event.action) == ("a", "cancel")  # type: ignore[union-attr]
    assert not await client.cancel("a")
    assert not await client.cancel("never heard of")
    assert len(await shop.events(OperatorAction)) == 1


async def test_without_a_router_what_a_worker_has_is_off_too(shop: Shop) -> None:
    router = await served(shop, Step(seconds=100), lease=5)
    client = Client(shop.store, shop.clock, has_router=nobody)
    handle = await client.hand_in(work("a"))
    await asyncio.sleep(2)
    shop.vanish(router)
    await handle.cancel()
    await called_off(handle)
    assert (await stored(shop, "a")).state.value == "cancelled"
    await shop.send(work("alone"))
    assert await client.cancel("alone")


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
@pytest.mark.parametrize("where", ["handed in", "taken on", "handed back"])
async def test_a_router_that_starts_hears_what_was_called_off_while_it_was_away(shop: Shop, where: str) -> None:
    assert await story_of(shop, where) == "cancelled"


async def story_of(shop: Shop, where: str) -> str:
    """Called off between two lives of the router; answers how it ended."""
    client = Client(shop.store, shop.clock, has_router=somebody)  # it has not noticed that the router is gone
    handle = await client.hand_in(work("a"))
    if where != "handed in":
        first = await shop.router()
        await asyncio.sleep(1)
        shop.vanish(first)
    if where == "handed back":
        item = await stored(shop, "a")
        await shop.store.work.settle([Settlement(item.id, item.owner, item.fence, Interrupted())])
    await handle.cancel()
    await shop.router()
    await asyncio.sleep(60)
    await shop.worker("w1", Step())
    return (await handle.result(60)).status.value


async def test_a_router_that_listens_from_its_start_on_misses_them(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    honest = Router._cancel_command

    async def deaf(router: Router, command: object) -> None:
        if asyncio.get_running_loop().time() > 100:
            await honest(router, command)  # type: ignore[arg-type]

    monkeypatch.setattr(Router, "_cancel_command", deaf)
    assert await story_of(shop, "handed in") == "success"


async def test_an_old_cancel_does_not_reach_what_a_person_wanted_again(shop: Shop) -> None:
    client = Client(shop.store, shop.clock)
    first = await served(shop, Step(ValueError("no"), ValueError("no")), quarantine_failed=True)
    handle = await client.hand_in(work("a"))
    assert (await handle.result(30)).status is ResultStatus.ERROR
    await client.cancel("a")  # too late: it has ended
    await asyncio.sleep(1)
    await first.stop()
    shop.members.remove(first)
    await shop.store.quarantine.requeue(WorkFilter(ids=("a",)), who="ann")
    await shop.router()
    await asyncio.sleep(30)
    assert (await handle.result(30)).status is ResultStatus.ERROR


@pytest.mark.parametrize("when", ["waiting", "under way", "ended"])
@pytest.mark.parametrize("by", ["client", "router"])
async def test_the_same_id_with_another_job_is_refused_with_both_fingerprints(shop: Shop, by: str, when: str) -> None:
    """And with the same job it is one piece of work with one answer."""
    router, step = await shop.router(), Step(seconds=5)
    submit = Client(shop.store, shop.clock).hand_in if by == "client" else router.submit
    first = await submit(work("a", {"n": 1}))
    if when != "waiting":
        await shop.worker("w1", step)
        await asyncio.sleep(2 if when == "under way" else 20)
    with pytest.raises(KeyConflictError, match="another job") as caught:
        await submit(work("a", {"n": 2}))
    assert (caught.value.key, len({caught.value.given, caught.value.recorded})) == ("a", 2)
    with pytest.raises(KeyConflictError):
        await submit(work("a", {"n": 1}, job="another.step"))
    again = await submit(work("a", {"n": 1}, priority="high"))
    if when == "waiting":
        await shop.worker("w1", step)
    results = [await one.result(30) if isinstance(one, Handle) else await one for one in (first, again)]
    assert results[0] == results[1]
    assert (results[0].status, len(step.began)) == (ResultStatus.SUCCESS, 1)


async def test_two_at_once_with_one_id_and_two_jobs_are_not_one_piece_of_work(shop: Shop) -> None:
    router = await shop.router()
    pair = [router.submit(work("a", {"n": number})) for number in (1, 2)]
    kept = await asyncio.gather(*pair, return_exceptions=True)
    assert [isinstance(one, KeyConflictError) for one in kept] == [False, True]


CIRCLE: dict[str, Any] = {}
CIRCLE["again"] = CIRCLE


async def test_what_json_cannot_say_is_refused_with_its_place(shop: Shop) -> None:
    client, router = Client(shop.store, shop.clock), await shop.router()
    plain = (object(), math.nan, math.inf, b"bytes", {1, 2}, datetime.now(UTC), {1: "a"})
    deep: dict[str, Any] = {"inputs.x[1][0].deep": [1, [{"deep": -math.inf}]], "inputs.x.again": CIRCLE}
    deep |= {"inputs": "\ud800"}
    for place, value in [*(("inputs.x", one) for one in plain), *deep.items()]:
        with pytest.raises(NotJsonError) as caught:
            await client.submit("test.step", {"x": value})
        assert caught.value.path.startswith(place)
        for hand_in in (client.hand_in, router.submit):
            with pytest.raises(NotJsonError, match=r"^job\.payload"):
                await hand_in(work("a", {"x": value}))
        with pytest.raises(NotJsonError, match=r"^metadata"):
            await client.hand_in(structs.replace(work("a"), metadata={"x": value}))


async def test_every_json_value_is_accepted_and_a_time_that_is_over_means_now(shop: Shop) -> None:
    client = Client(shop.store, shop.clock)
    await client.submit("test.step", {"a": (1, 2), "b": None, "c": [True, 1.5, 2**70], "d": {"e": "ü"}})
    handle = await client.submit("test.step", at=datetime(2000, 1, 1, tzinfo=UTC))
    item = await stored(shop, handle.assignment_id)
    assert (item.reason, item.due_at) == ("", item.created_at)


async def test_a_wait_that_is_no_time_is_refused(shop: Shop) -> None:
    handle = await Client(shop.store, shop.clock).hand_in(work("a"))
    wrong: tuple[Any, ...] = (math.nan, -1, "5", True)
    for timeout in wrong:
        with pytest.raises(ParameterError, match=r"timeout=.* is not accepted: a number of seconds, 0 or more"):
            await handle.result(timeout)
    with pytest.raises(ResultPendingError):
        await handle.result(0)


async def test_the_fields_of_an_assignment_are_taken_as_a_mapping_and_missing_ids_are_made(shop: Shop) -> None:
    client = Client(shop.store, shop.clock)
    handle = await client.hand_in({"job": {"type": "test.step", "payload": {"n": 1}}})
    named = await client.hand_in({"assignment_id": "a", "job": {"type": "test.step"}})
    assert (named.assignment_id, await handle.status()) == ("a", "pending")
    assert (await stored(shop, handle.assignment_id)).correlation_id == handle.assignment_id, "as in a file"
    assert (await stored(shop, "a")).correlation_id not in ("a", handle.assignment_id)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"assigment_id": "a", "job": {"type": "t"}}, "assigment_id: unknown field; .*did you mean 'assignment_id'?"),
        ({"job": {"type": "t"}, "options": {"deadlin_ms": 5}}, "options.deadlin_ms: unknown field"),
        ({"job": {"type": "t", "payload": {"n": {1, 2}}}}, r"assignment\.job\.payload\.n"),
        ({"job": {}}, "job.type: missing"),
        (["job"], "an ExecAssignment, or a mapping of its fields"),
    ],
)
async def test_fields_that_no_assignment_has_are_refused_by_the_client_too(shop: Shop, fields: Any, told: str) -> None:
    with pytest.raises((ParameterError, NotJsonError), match=told):
        await Client(shop.store, shop.clock).hand_in(fields)


async def test_work_for_later_runs_at_its_time_and_its_deadline_counts_from_there(shop: Shop) -> None:
    step = Step()
    await served(shop, step, wait=1)
    began = asyncio.get_running_loop().time()
    client = Client(shop.store, shop.clock)
    soon = await client.submit("test.step", delay=100, deadline=5, assignment_id="soon")
    at = datetime.fromtimestamp(shop.clock.wall() + 200, UTC)
    later = await client.submit("test.step", at=at, assignment_id="later")
    item = await stored(shop, "soon")
    assert (item.state.value, item.reason, item.due_at - item.created_at) == ("pending", "scheduled", 100_000)
    assert item.deadline_at == item.due_at + 5000
    for handle in (soon, later):
        assert (await handle.result()).status is ResultStatus.SUCCESS
    (first, early), (second, late) = ((name, when - began) for name, when in step.began)
    assert (first, second, 100 <= early < 105, 200 <= late < 205) == ("soon", "later", True, True)


CONFIGURATION = """\
worker: {retries: {v2: {enabled: true}}, queue: {v2: {enabled: true}}}
blocks: {fs: {roots: [files]}}
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "reefknot.yaml").write_text(CONFIGURATION)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("ahoy")
    return f"sqlite:{tmp_path / 'state.db'}"


@contextmanager
def system(url: str, folder: Path) -> Iterator[None]:
    """A router and a worker, on a loop in a thread of their own."""
    started, ends = threading.Event(), threading.Event()

    async def main() -> None:
        settings = load_settings(str(folder / "reefknot.yaml"), environ={}, cwd=folder)
        async with running_system(url, settings):
            started.set()
            await asyncio.to_thread(ends.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert started.wait(60)
        yield
    finally:
        ends.set()
        thread.join(60)


def test_several_threads_submit_wait_and_run_through_one_client(url: str, tmp_path: Path) -> None:
    def work(number: int) -> tuple[str, object]:
        result = client.submit("fs.blob_get", {"path": "a.txt"}, assignment_id=f"a{number}").result(60)
        return result.assignment_id, (result.output or {})["content"]

    with system(url, tmp_path), rk.connect_sync(url) as client, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(8))) == [(f"a{number}", "ahoy") for number in range(8)]
        assert client.run("fs.blob_get", {"path": "a.txt"}, deadline=60).status is ResultStatus.SUCCESS
        handed = client.hand_in({"assignment_id": "h", "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}})
        assert (handed.result(60).status, handed.status()) == (ResultStatus.SUCCESS, "succeeded")


def test_cancelled_work_ends_and_what_has_no_result_is_told(url: str) -> None:
    with rk.connect_sync(url) as client:
        first, second = (client.submit("fs.blob_get", delay=3600, assignment_id=name) for name in ("one", "two"))
        with pytest.raises(rk.ResultPendingError):
            first.result(0.01)
        first.cancel("not needed")
        assert first.result(60).status is ResultStatus.CANCELLED
        assert client.cancel("two")
        assert second.result(60).status is ResultStatus.CANCELLED


async def test_where_an_event_loop_runs_it_refuses_with_a_sentence(url: str) -> None:
    with pytest.raises(rk.EventLoopRunningError, match=r"use `async with rk\.connect"):
        rk.connect_sync(url)
    client = await asyncio.to_thread(rk.connect_sync, url)
    with pytest.raises(rk.EventLoopRunningError, match="would block it"):
        client.submit("fs.blob_get")
    await asyncio.to_thread(client.close)


def test_a_closed_client_says_so_also_to_a_thread_that_waits(url: str) -> None:
    client = rk.connect_sync(url)
    handle, waits = client.submit("fs.blob_get", delay=3600), threading.Event()

    def wait() -> None:
        waits.set()
        handle.result(3600)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        assert waits.wait(60)
        client.close()
        with pytest.raises(rk.StoreUnavailableError, match="the client is closed"):
            waiting.result(60)
    client.close()
    with pytest.raises(rk.StoreUnavailableError, match="connect again"):
        client.submit("fs.blob_get")


def test_a_store_that_cannot_be_opened_is_an_error_of_connect_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(rk.ParameterError):
        rk.connect_sync("postgres:nothing")
    assert threading.active_count() <= before + 1


def test_a_call_that_is_made_while_another_thread_closes_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = rk.connect_sync(url)
    handle = client.submit("fs.blob_get", {"path": "a.txt"})
    schedule, closing = asyncio.run_coroutine_threadsafe, threading.Thread(target=client.close)

    def slowly(*given: Any) -> Any:
        closing.start()  # it has to wait until the call is scheduled, and ends it then
        return schedule(*given)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", slowly)
    with pytest.raises(rk.StoreUnavailableError, match="the client is closed"):
        handle.result(60)
    closing.join()
    with pytest.raises(rk.StoreUnavailableError, match="the client is closed"):
        handle.status()


def test_a_coroutine_over_its_store_runs_on_the_loop_of_the_client(url: str) -> None:
    with rk.connect_sync(url) as client:
        client.submit("fs.blob_get", assignment_id="a")
        found = client.call(client.store.work.get("a"))
        assert found is not None
        assert found.kind == "fs.blob_get"
        never_run = client.store.work.get("a")
    with pytest.raises(rk.StoreUnavailableError, match="the client is closed"):
        client.call(never_run)  # closed as well: a coroutine that is never awaited would be a warning
