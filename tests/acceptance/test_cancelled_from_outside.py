"""
A step that cancels other tasks of its process, met by `reefknot up` as a supervisor meets it.

The process goes on with all its parts, or ends with a message and a code that make a supervisor start it again: it is
never half dead. Its neighbours end, whatever the step cancels.
"""

from __future__ import annotations

import json

import pytest

from tests.acceptance.folder import Folder, until

STEPS = """\
import asyncio
import os
import reefknot as rk

@rk.block("own.hold")
async def hold(inputs, context):
    with open("begun.txt", "a") as file:
        file.write(context.assignment_id + "\\n")
    while not os.path.exists("go"):
        await asyncio.sleep(0.05)
    return {}

@rk.block("own.vandal")
async def vandal(inputs, context):
    tasks = asyncio.all_tasks() - ({asyncio.current_task()} if inputs["spares_itself"] else set())
    for task in tasks:
        if task.get_name().startswith(inputs["names"]):
            task.cancel()
    await asyncio.sleep(0)
    return {}
"""
ENDED = "start it again: accepted work is kept"
NEIGHBOURS = ["order-1", "order-2", "order-3"]
MOST_STARTS = 20


@pytest.fixture
def scene(folder: Folder) -> Folder:
    (folder.path / "calls.py").write_text(STEPS)
    return folder


def submit(folder: Folder, kind: str, name: str, **inputs: object) -> None:
    done = folder("submit", "--type", kind, "--id", name, "--inputs", json.dumps(inputs))
    assert done.code == 0, done.err


class Supervisor:
    """Starts `up`, and again whenever it ends."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.messages: list[str] = []
        self._start()

    def _start(self) -> None:
        self._process = self._folder.up("--module", "calls", "--drain", "0.5")

    def states(self) -> dict[str, str]:
        """The states of all jobs; a process that has ended is started again."""
        if self._process.poll() is not None:
            code, _, err = self._folder.ends(self._process)
            assert (code, ENDED in err) == (75, True), err
            self.messages.append(err)
            assert len(self.messages) < MOST_STARTS, "it ends for ever"
            self._start()
        return {one["id"]: one["state"] for one in self._folder.json("job", "list")["jobs"]}


def supervised(folder: Folder, names: str, *, spares_itself: bool) -> list[str]:
    """Three neighbours, a step that cancels the tasks of these names, and a job after it; the messages of the ends."""
    system = Supervisor(folder)
    for name in NEIGHBOURS:
        submit(folder, "own.hold", name)
    until(lambda: set(NEIGHBOURS) <= set(folder.begun()))
    submit(folder, "own.vandal", "bad", names=names, spares_itself=spares_itself)
    ends = [*NEIGHBOURS, "later"]
    if spares_itself:  # else it is given up in the end, after many starts
        ends.append("bad")
        until(lambda: system.states()["bad"] == "succeeded")
    until(lambda: bool(system.states()) and (bool(system.messages) or spares_itself))
    folder.go()
    submit(folder, "own.hold", "later")
    until(lambda: all(system.states()[name] == "succeeded" for name in ends))
    return system.messages


@pytest.mark.parametrize("spares_itself", [False, True])
def test_a_step_that_cancels_every_task_ends_the_process_and_all_work_is_done(
    scene: Folder, spares_itself: bool
) -> None:
    messages = supervised(scene, "", spares_itself=spares_itself)
    assert messages
    assert all("was cancelled by a step" in one for one in messages)


@pytest.mark.parametrize("names", ["router dispatch", "router", "system status", "system alerts", "store retention"])
def test_a_process_without_one_of_its_services_ends(scene: Folder, names: str) -> None:
    (message,) = supervised(scene, names, spares_itself=True)
    assert f"the service `{names}" in message


@pytest.mark.parametrize("names", ["worker-1", "messages from", "ended work"])
def test_a_process_goes_on_where_a_service_begins_again(scene: Folder, names: str) -> None:
    assert supervised(scene, names, spares_itself=True) == []
