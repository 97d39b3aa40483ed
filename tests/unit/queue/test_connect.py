"""The client for code without an event loop, over a store that a real system works on."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.app.system import running_system
from reefknot.policy.settings import load_settings
from reefknot.queue.model.messages import ResultStatus

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
        handle = client.submit("fs.blob_get", {"path": "a.txt"}, assignment_id=f"a{number}")
        result = handle.result(60)
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
    handle = client.submit("fs.blob_get", delay=3600)
    waits = threading.Event()

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
