"""
A step that cancels other tasks of its process, met by `reefknot up` and `worker start` as a supervisor meets it.

Services begin again. A process whose main task was cancelled ends with a message and a code that make a supervisor
start it again: it is never half dead. Its neighbours end, whatever the step cancels.
"""

import subprocess
import time
from collections.abc import Callable

import pytest

from tests.acceptance.folder import CONFIG, MODULE, PATIENCE_S, Folder, throughout, until

STEPS = (
    MODULE
    + """
@rk.block("own.vandal")
async def vandal(inputs, context):
    tasks = asyncio.all_tasks() - ({asyncio.current_task()} if inputs["spares_itself"] else set())
    for task in tasks:
        name = task.get_name()
        is_of_nats = "/nats/" in task.get_coro().cr_code.co_filename
        if inputs["everything"] or is_of_nats or not name.startswith(("Task-", "live feed", "slot ")):
            task.cancel()
    await asyncio.sleep(0)
    return {}

@rk.block("own.tick")
async def tick(inputs, context):
    return {}
"""
)
BROKEN = "import reefknot.runtime.tasks\nreefknot.runtime.tasks.Services._ended = lambda *_: None\n"
"""The control: services that were cancelled stay away."""
MORE = """
schedules:
  tick: {every: 1s, assignment: {job: {type: own.tick, payload: {}}}}
sources:
  notes: {connector: local_files, path: notes, every: 1s}
"""
ENDED = "start it again: accepted work is kept"
NEIGHBOURS = ["order-1", "order-2", "order-3"]
MOST_STARTS = 20
LOOK_S = 0.2


@pytest.fixture
def scene(folder: Folder) -> Folder:
    folder.write("naps.py", STEPS)
    return folder


class Supervisor:
    """Starts a process, and again whenever it ends."""

    def __init__(self, start: Callable[[], subprocess.Popen[str]], folder: Folder) -> None:
        self._start = start
        self._folder = folder
        self.messages: list[str] = []
        self._process = start()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for it, and start the process again whenever it has ended, at once: this takes many starts."""
        ends = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < ends, "it did not come to that"
            try:
                self._process.wait(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                continue
            code, _, err = self._folder.ends(self._process)
            assert (code, ENDED in err) == (75, True), err
            self.messages.append(err)
            assert len(self.messages) < MOST_STARTS, "it ends for ever"
            self._process = self._start()


def neighbours(folder: Folder) -> None:
    """Start three steps that run beside what comes."""
    for name in NEIGHBOURS:
        folder.wait(name)
    until(lambda: set(NEIGHBOURS) <= set(folder.begun()))


def up(folder: Folder) -> subprocess.Popen[str]:
    """A system that may be cancelled before it says that it is up."""
    return folder.start("up", "--module", "naps", "--drain", "0.5")


def worker(folder: Folder) -> subprocess.Popen[str]:
    return folder.part("worker", "--module", "naps", "--drain", "0.5")


@pytest.mark.parametrize(("start", "spares_itself"), [(up, True), (up, False), (worker, True)])
def test_a_step_that_cancels_every_task_ends_the_process_and_all_work_is_done(
    scene: Folder, start: Callable[[Folder], subprocess.Popen[str]], spares_itself: bool
) -> None:
    if start is worker:
        scene.part("router")
    system = Supervisor(lambda: start(scene), scene)
    neighbours(scene)
    scene.submit("own.vandal", "bad", everything=True, spares_itself=spares_itself)
    system.until(lambda: bool(system.messages))
    scene.go()
    scene.wait("later")
    ends = [*NEIGHBOURS, "later", *(["bad"] if spares_itself else [])]  # else it is given up, after many starts
    system.until(lambda: scene.have_succeeded(*ends))
    assert all("was cancelled by a step" in one for one in system.messages)


def cancelled_services(folder: Folder, start: Callable[[Folder], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """A process whose services a step has cancelled, all at once, with nats-py's own."""
    process = start(folder)
    neighbours(folder)
    folder.submit("own.vandal", "bad", everything=False, spares_itself=True)
    return process


@pytest.mark.parametrize("start", [up, worker])
def test_services_begin_again_and_work_goes_on(scene: Folder, start: Callable[[Folder], subprocess.Popen[str]]) -> None:
    """Schedules, syncs of sources, submissions, results and operators' commands."""
    (scene.path / "notes").mkdir()
    (scene.path / "notes" / "first.md").write_text("first")
    scene.write("reefknot.yaml", CONFIG + MORE)
    if start is worker:
        scene.part("router")
    process = cancelled_services(scene, start)
    until(lambda: scene.have_succeeded("bad"))
    before = len(scene.states())
    (scene.path / "notes" / "second.md").write_text("second")
    scene.go()
    scene.wait("later")
    until(lambda: scene.have_succeeded(*NEIGHBOURS, "later"))
    until(lambda: len(scene.states()) >= before + 3)
    if start is up:
        until(lambda: "second" in scene("source", "search", "second").out)
    code, _, err = scene.stop(process)
    assert code == 143
    assert "was cancelled from outside; it begins again" in err


def test_services_that_stay_cancelled_would_be_noticed(scene: Folder) -> None:
    scene.write("naps.py", STEPS + BROKEN)
    cancelled_services(scene, up)
    scene.go()
    scene.wait("later")
    throughout(3.0, lambda: not scene.have_succeeded("later"))
