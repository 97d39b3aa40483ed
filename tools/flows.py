"""
How much code six ordinary flows run through: modules, functions, calls and changes of module of the product.

    flows.py [--write] [NAME …]

Every flow runs several times with a profiler in all threads, and its smallest figures are printed next to those in
`tools/flows.json`; `--write` keeps them there. A function of C and a function of another library is not counted, and
neither is a comprehension, which is a part of its function (Python 3.12 runs it so); a coroutine that is resumed is
called again. Modules and functions are exact; calls differ by a few from run to run, because background tasks and
threads take part.
"""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, chdir, contextmanager, redirect_stdout
from itertools import count, islice
from pathlib import Path
from types import FrameType
from typing import Any, Self

import msgspec
from msgspec import Struct

import reefknot as rk
from reefknot.app.system import running_system
from reefknot.console.cli import main as command
from reefknot.ingest.assembly import running_ingestion
from reefknot.policy.settings import load_settings
from reefknot.queue.model.messages import ExecAssignment, Job, ResultStatus
from reefknot.steps.port import BlockContext
from reefknot.steps.python import block

KEPT = Path(__file__).with_name("flows.json")
PRODUCT = str(Path(rk.__file__).parent) + "/"
TIMES = 3
WITHIN_S = 60.0
PAUSE_S = 0.05
COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>"})
GATES = {"WORKER_RETRIES_V2_ENABLED": "true", "WORKER_QUEUE_V2_ENABLED": "true"}


class FlowSize(Struct, frozen=True):
    """The code that one flow runs through."""

    modules: int
    functions: int
    calls: int
    changes: int
    """Calls whose caller before them, in the same thread, was of another module."""


class FlowTrace:
    """The calls of functions of the product, in all threads that begin after it was installed."""

    def __init__(self) -> None:
        self._is_counting = False
        self._functions: set[tuple[str, str, int]] = set()
        self._threads: dict[int, _ThreadCount] = {}

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Hear all calls while the block lasts; those in `counting` are counted."""
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from zero while the block lasts."""
        self._functions, self._threads = set(), {}
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def size(self) -> FlowSize:
        """The counts of the last block."""
        counts = list(self._threads.values())
        return FlowSize(
            modules=len({file for file, _, _ in self._functions}),
            functions=len(self._functions),
            calls=sum(one.calls for one in counts),
            changes=sum(one.changes for one in counts),
        )

    def _hear(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._is_counting:
            return
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(PRODUCT) or code.co_name in COMPREHENSIONS:
            return
        self._functions.add((file, code.co_qualname, code.co_firstlineno))
        thread = threading.get_ident()
        count = self._threads.get(thread)
        if count is None:
            count = self._threads[thread] = _ThreadCount()
        count.calls += 1
        count.changes += count.file not in {"", file}
        count.file = file


class _ThreadCount:
    """The calls of one thread."""

    __slots__ = ("calls", "changes", "file")

    def __init__(self) -> None:
        self.calls = self.changes = 0
        self.file = ""


# ---- the flows -------------------------------------------------------------------------------------------------------

Once = Callable[[], Awaitable[None]]
Flow = Callable[[Path], AbstractAsyncContextManager[Once]]
"""A flow in a folder of its own: everything is open inside the block, which gets the part that is counted."""


@asynccontextmanager
async def library_retry(_: Path) -> AsyncIterator[Once]:
    """One call of a function that fails once."""
    failures: list[Exception] = []

    @rk.retry(attempts=3, base_delay=0.0001)
    async def flaky() -> None:
        if failures:
            raise failures.pop()

    async def once() -> None:
        failures.append(ConnectionError("down"))
        await flaky()

    yield once


@asynccontextmanager
async def idempotent_call(folder: Path) -> AsyncIterator[Once]:
    """One call with a new key on SQLite."""
    numbers = count()

    @rk.idempotent(key=str, name="flows.charge")
    async def charge(number: int) -> int:
        return number

    async def once() -> None:
        await charge(next(numbers))

    async with rk.open_store(f"sqlite:{folder / 'state.db'}"):
        yield once


@block("flows.nothing")
async def nothing(inputs: Mapping[str, Any], context: BlockContext) -> dict[str, Any]:
    """A step that does nothing."""
    return {"number": inputs["number"]}


@asynccontextmanager
async def _assignments(folder: Path, url: str) -> AsyncIterator[Once]:
    settings = load_settings(None, environ=GATES, cwd=folder)
    names = (str(number) for number in count())
    made = iter([ExecAssignment(name, name, Job("flows.nothing", {"number": 7})) for name in islice(names, 1 + TIMES)])
    async with running_system(url, settings, modules=(__name__,)) as system:

        async def once() -> None:
            result = await (await system.submit(next(made)))
            assert result.status is ResultStatus.SUCCESS

        yield once


def memory_assignment(folder: Path) -> AbstractAsyncContextManager[Once]:
    """One assignment in memory, from its submission to a running system until its result is there."""
    return _assignments(folder, "memory:")


def sqlite_assignment(folder: Path) -> AbstractAsyncContextManager[Once]:
    """The same on SQLite: router, store, transport and worker, and nothing that belongs to the process as a whole."""
    return _assignments(folder, f"sqlite:{folder / 'state.db'}")


@asynccontextmanager
async def folder_sync(folder: Path) -> AsyncIterator[Once]:
    """One sync of a folder in which one file is new."""
    notes = folder / "notes"
    notes.mkdir()
    (folder / "reefknot.yaml").write_text("sources:\n  notes: {connector: local_files, path: notes}\n")
    settings = load_settings(None, environ=GATES, cwd=folder)
    numbers, synced = count(), asyncio.Event()
    url = f"sqlite:{folder / 'state.db'}"
    async with rk.open_store(url) as store, running_ingestion(store, settings, url) as running:
        assert running is not None
        running.on_sync(lambda *_: synced.set())

        async def settled() -> None:
            """Wait without a call of the product: a source has one open job, which is over when it is let go."""
            await asyncio.sleep(PAUSE_S)
            while running.claims():  # noqa: ASYNC110 - an event would have to be called
                await asyncio.sleep(PAUSE_S)

        async def once() -> None:
            (notes / f"{next(numbers)}.txt").write_text("new")
            synced.clear()
            assert await running.request_sync("notes", trigger="flows") is not None
            await synced.wait()
            await settled()

        await settled()
        yield once


@asynccontextmanager
async def policy_explain(_: Path) -> AsyncIterator[Once]:
    """One command in this process, without a configuration file."""

    async def once() -> None:
        with redirect_stdout(io.StringIO()):
            done = await asyncio.to_thread(command, ["policy", "explain", "block:http", "--status", "429"])
        assert done == 0

    yield once


FLOWS: Mapping[str, Flow] = {
    "library retry": library_retry,
    "idempotent call on SQLite": idempotent_call,
    "assignment in memory": memory_assignment,
    "assignment on SQLite": sqlite_assignment,
    "sync of a folder": folder_sync,
    "policy explain": policy_explain,
}


# ---- measuring and printing ------------------------------------------------------------------------------------------


def measured(flow: Flow) -> FlowSize:
    """The smallest figures of some runs of a flow, after one that is not counted and loads what is loaded on use."""

    async def main() -> FlowSize:
        async with flow(Path(folder)) as once, asyncio.timeout(WITHIN_S):
            await once()
            sizes = []
            for _ in range(TIMES):
                with trace.counting():
                    await once()
                sizes.append(trace.size())
        return min(sizes, key=lambda one: one.calls)

    with tempfile.TemporaryDirectory() as folder, chdir(folder), FlowTrace().installed() as trace:
        logging.disable()  # the lines of a failure on purpose
        try:
            return asyncio.run(main())
        finally:
            logging.disable(logging.NOTSET)


def kept() -> dict[str, FlowSize]:
    """The figures in the file; none without a file."""
    return msgspec.json.decode(KEPT.read_bytes(), type=dict[str, FlowSize]) if KEPT.exists() else {}


def table(sizes: Mapping[str, FlowSize], before: Mapping[str, FlowSize]) -> Iterator[str]:
    """The lines of the table: every figure, and in brackets the kept one where it differs."""
    names = FlowSize.__struct_fields__
    yield f"{'':26}" + "".join(f"{name:>18}" for name in names)
    for flow, size in sizes.items():
        old = before.get(flow, size)
        yield f"{flow:26}" + "".join(f"{_cell(getattr(size, name), getattr(old, name)):>18}" for name in names)


def _cell(now: int, before: int) -> str:
    return f"{now:,}" if now == before else f"{now:,} ({before:,})"


def main(argv: Sequence[str]) -> int:
    """Measure, print, and with `--write` keep the figures."""
    names = [word for word in argv if word != "--write"] or list(FLOWS)
    if unknown := sorted(set(names) - set(FLOWS)):
        print(f"unknown: {', '.join(unknown)}; accepted: {', '.join(FLOWS)}", file=sys.stderr)
        return 2
    before = kept()
    sizes = {name: measured(FLOWS[name]) for name in names}
    print("\n".join(table(sizes, before)))
    if "--write" in argv:
        KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(before | sizes), indent=2) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
