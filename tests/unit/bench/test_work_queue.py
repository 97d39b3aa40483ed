"""procrastinate is measured when its server starts, and its absence is told; a job left undone is no figure."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import procrastinate
import pytest
from procrastinate.testing import InMemoryConnector

from bench.measure import Contestant
from bench.postgres_queue import all_finished
from bench.tables import work_queue
from tools import postgres_server


def asked() -> Contestant | str:
    with ExitStack() as stack, asyncio.Runner() as runner:
        return work_queue.with_procrastinate(stack, runner)


def test_without_the_wheel_or_its_client_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """`None` in the list of modules is how Python marks one that cannot be imported."""
    with monkeypatch.context() as patched:
        patched.setattr(postgres_server, "WHEEL", "no_such_wheel_anywhere")
        assert str(asked()).startswith("procrastinate was not measured: there is no PostgreSQL")
    monkeypatch.delitem(sys.modules, "bench.postgres_queue", raising=False)
    monkeypatch.delattr("bench.postgres_queue", raising=False)
    monkeypatch.setitem(sys.modules, "procrastinate", None)
    begin, _, said = str(asked()).partition(": ")
    assert (begin, "procrastinate" in said) == ("procrastinate was not measured", True)


def test_what_a_failing_server_says_becomes_one_line_and_a_mistake_of_the_bench_is_no_absence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second is the control: only what a machine may lack is told in a sentence."""
    errors: list[Exception] = [
        postgres_server.ServerError("initdb exited with 1:\n  no space\n  left"),
        TypeError("wrong argument"),
    ]

    @contextmanager
    def broken(settings: Sequence[str]) -> Iterator[Path]:
        raise errors.pop(0)
        yield Path()

    monkeypatch.setattr(postgres_server, "running", broken)
    assert asked() == "procrastinate was not measured: initdb exited with 1: no space left."
    with pytest.raises(TypeError, match="wrong argument"):
        asked()


def test_a_job_that_is_not_done_is_no_figure_and_one_that_is_done_counts() -> None:
    asyncio.run(one_job(fails=False, worked=True))
    for fails, worked in ((False, False), (True, True)):
        with pytest.raises(RuntimeError, match="left 1 jobs undone"):
            asyncio.run(one_job(fails=fails, worked=worked))


async def one_job(*, fails: bool, worked: bool) -> None:
    app = procrastinate.App(connector=InMemoryConnector())

    @app.task(name="work")
    async def work() -> None:
        if fails:
            raise ConnectionError("refused")

    async with app.open_async():
        await work.defer_async()
        if worked:
            await app.run_worker_async(wait=False, listen_notify=False, install_signal_handlers=False)
        await all_finished(app)
