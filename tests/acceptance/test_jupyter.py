"""The cells of the guide in a real Jupyter kernel: a client across cells, retries, interrupts, a restarted kernel."""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.acceptance.folder import ROOT, Folder
from tests.docs.run_page import Fence, fences, missing

PATIENCE_S = 60.0
QUIET_S = 0.3
PAGE = ROOT / "docs" / "guides" / "inside-an-application.md"
CELL = re.compile(r"^```python cell\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
"""A cell, and what is shown beneath it."""
CONNECT, SUBMIT, WAIT, STATUS = range(4)
"""Cells of the guide, by their place."""
INTERRUPTED = ("CancelledError", "KeyboardInterrupt")
"""What a kernel shows for a cell that waits in the event loop, by its version."""


@dataclass(slots=True)
class Shown:
    """What a notebook shows beneath a cell."""

    text: str = ""
    error: str = ""
    """The name of the exception that ended the cell."""
    message: str = ""


@dataclass(slots=True)
class Notebook:
    """A kernel, and the client through which a notebook runs its cells."""

    kernel: KernelManager
    client: BlockingKernelClient
    shown: dict[str, Shown] = field(default_factory=dict)

    def run(self, cell: str) -> Shown:
        """Run a cell to its end."""
        return self.end(self.begin(cell))

    def begin(self, cell: str) -> str:
        """Start a cell; returns the id under which `end` finds it."""
        name = str(self.client.execute(cell, allow_stdin=False))
        self.shown[name] = Shown()
        return name

    def end(self, name: str) -> Shown:
        while not self._read(name, PATIENCE_S):
            pass
        shown = self.shown.pop(name)
        assert "never retrieved" not in shown.text, shown.text
        return shown

    def interrupt(self, name: str, *, after: str) -> Shown:
        """Interrupt a cell that has shown `after`, and since then nothing: it waits."""
        while after not in self.shown[name].text:
            assert not self._read(name, PATIENCE_S), self.shown[name]
        while True:
            try:
                assert not self._read(name, QUIET_S), self.shown[name]
            except Empty:
                break
        self.kernel.interrupt_kernel()
        return self.end(name)

    def restart(self) -> None:
        self.kernel.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def _read(self, name: str, timeout: float) -> bool:
        """Take in one message of the kernel; returns whether it says that the cell has ended."""
        message: Any = self.client.get_iopub_msg(timeout=timeout)
        if message["parent_header"].get("msg_id") != name:
            return False
        shown, content = self.shown[name], message["content"]
        kind = message["msg_type"]
        if kind == "stream":
            shown.text += content["text"]
        elif kind == "execute_result":
            shown.text += content["data"]["text/plain"] + "\n"
        elif kind == "error":
            shown.error, shown.message = content["ename"], content["evalue"]
        return bool(kind == "status" and content["execution_state"] == "idle")


@pytest.fixture
def notebook(folder: Folder) -> Iterator[Notebook]:
    """A notebook in the folder. Its kernel listens on sockets of files, so that no port is taken from others."""
    with tempfile.TemporaryDirectory() as sockets:  # the path of a socket is short, and that of a test is not
        kernel = KernelManager(transport="ipc", ip=f"{sockets}/k", connection_file=f"{sockets}/kernel.json")
        kernel.start_kernel(cwd=str(folder.path), env=folder.environment | {"PYTHONWARNINGS": "default"})
        client = kernel.client()
        try:
            client.start_channels()
            client.wait_for_ready(timeout=PATIENCE_S)
            yield Notebook(kernel, client)
        finally:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)
            kernel.cleanup_resources()


@dataclass(frozen=True, slots=True)
class Guide:
    """The section of the guide: the step, and the cells with the lines that are shown beneath each."""

    steps: Fence
    cells: list[tuple[str, list[str]]]


def section() -> Guide:
    text = PAGE.read_text(encoding="utf-8").partition("\n## Jupyter\n")[2].partition("\n## ")[0]
    found = list(fences(text))
    cells = [(cell[1], (cell[2] or "").splitlines()) for cell in CELL.finditer(text)]
    assert [cell for cell, _ in cells] == [fence.content for fence in found if fence.is_cell]
    (steps,) = (fence for fence in found if fence.file.endswith(".py"))
    return Guide(steps, cells)


@pytest.fixture
def guide(folder: Folder) -> Guide:
    """The section, with its module of steps written as its reader would."""
    found = section()
    (folder.path / found.steps.file).write_text(found.steps.content)
    return found


def serve(folder: Folder, guide: Guide) -> None:
    folder.part("router")
    folder.part("worker", "--module", Path(guide.steps.file).stem)


def test_every_cell_of_the_guide_runs_and_shows_the_same(folder: Folder, guide: Guide, notebook: Notebook) -> None:
    serve(folder, guide)
    for cell, lines in guide.cells:
        shown = notebook.run(cell)
        assert shown.error == "", (cell, shown)
        assert missing(lines, shown.text) == [], (cell, shown)
        assert "Traceback" not in shown.text, (cell, shown)
    assert sum(len(lines) for _, lines in guide.cells) >= 8, "lines were found to compare"


def test_an_interrupted_wait_leaves_the_client_usable_and_a_restarted_kernel_finds_the_job(
    folder: Folder, guide: Guide, notebook: Notebook
) -> None:
    cells = [cell for cell, _ in guide.cells]
    assert [notebook.run(cells[number]).error for number in (CONNECT, SUBMIT)] == ["", ""]

    for _ in range(2):  # no system runs yet, so the result does not come
        waits = notebook.begin(f"print(await job.status())\n{cells[WAIT]}")
        assert notebook.interrupt(waits, after="pending\n").error in INTERRUPTED
        assert notebook.run("await job.status()").text == "'pending'\n"

    serve(folder, guide)
    assert notebook.run(cells[WAIT]) == Shown("{'bars': 5}\n")
    notebook.restart()
    assert notebook.run("job").error == "NameError", "the kernel is a new one"
    assert notebook.run(cells[CONNECT]).error == ""
    assert notebook.run(cells[STATUS]) == Shown("succeeded\n")


def test_a_retry_that_waits_can_be_interrupted_and_the_client_goes_on(guide: Guide, notebook: Notebook) -> None:
    cells = [cell for cell, _ in guide.cells]
    assert [notebook.run(cells[number]).error for number in (CONNECT, SUBMIT)] == ["", ""]
    for kind, call, wait in (("def", "read()", 30), ("async def", "await read()", 2)):  # `await` is interrupted late
        waits = notebook.begin(f"@rk.retry(wait=[{wait}])\n{kind} read():\n    raise ConnectionError\n\n{call}")
        shown = notebook.interrupt(waits, after="read: attempt 1 of 4 failed with ConnectionError")
        assert shown.error in INTERRUPTED, shown
        assert shown.text.count("attempt") == 1, "it is not tried again"
        assert notebook.run("await job.status()").text == "'pending'\n"


def test_a_sync_client_is_refused_with_what_to_use_and_works_in_a_thread(guide: Guide, notebook: Notebook) -> None:
    notebook.run("import asyncio, reefknot as rk")

    shown = notebook.run("rk.connect_sync()")
    assert shown.error == "EventLoopRunningError"
    assert "use `async with rk.connect(url) as client:` here, or another thread" in shown.message
    in_a_thread = """
def look():
    with rk.connect_sync() as client:
        return client.job("chart-5").status()

await asyncio.to_thread(look)"""
    assert notebook.run(in_a_thread).text.endswith("'unknown'\n")
