"""
Hands plans to the programs of this folder, and their evidence back.

    python -m tests.faults.PROGRAM FOLDER < plans.jsonl > evidence.jsonl

A program is a small process of one thread that has everything imported. Each life is a fork of it, so a death costs
milliseconds, and nobody else's threads or connections are in it.
"""

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
LONGEST = 1800.0
IN_MEMORY = Path("/dev/shm")
"""What a death leaves behind is in memory anyway; only power cuts tell a disk from it, and those are replayed."""

KILLED = -9
MODES = ("retry", "guard", "dedup")

Plan = dict[str, Any]
Life = dict[str, Any]
Say = Callable[[Any], None]


def plan(scenario: str, mode: str, at: int | None, **more: Any) -> Plan:
    """One fault: where, in which mode, and which wrong way is tried if any."""
    usual = {"torn": False, "flaw": "", "after_us": 0, "freezes": False}
    return {"scenario": scenario, "mode": mode, "at": at, **usual, **more}


def at_every_call(whole: Life, planned: Callable[..., Plan]) -> list[Plan]:
    """A plan for each call of a life that ran to its end; for a write, another one that leaves it half done."""
    ((_, kinds, *_),) = (said for said in whole["said"] if said[0] == "calls")
    each = [planned(number) for number in range(1, len(kinds) + 1)]
    return each + [planned(number, torn=True) for number, kind in enumerate(kinds, 1) if kind == "write"]


def carried_out(
    folder: Path, plans: list[Plan], *, program: str = "tests.faults.dying", within: float = LONGEST
) -> list[Life]:
    """All of them, shared among as many processes as there are processors."""
    number = min(len(plans), os.cpu_count() or 1)

    def share(which: int) -> list[Life]:
        lines = "".join(json.dumps(one) + "\n" for one in plans[which::number])
        folder.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else folder) as place:
            command = [sys.executable, "-m", program, place]
            done = subprocess.run(
                command, input=lines, cwd=ROOT, capture_output=True, text=True, timeout=within, check=False
            )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(number) as pool:
        return [one for lives in pool.map(share, range(number)) for one in lives]


# ---- in a program ----------------------------------------------------------------------------------------------------


class Fork:
    """A process of its own, which has started with its work."""

    def __init__(self, work: Callable[[Say], Any]) -> None:
        """What the work returns, or the coroutine that it returns, is said last."""
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _live(work, writing)
        os.close(writing)

    def heard(self) -> list[Any]:
        """All that it said, when it has ended."""
        with os.fdopen(self._reading, "rb") as pipe:
            return [json.loads(line) for line in pipe.read().splitlines()]

    def ended(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _live(work: Callable[[Say], Any], writing: int) -> NoReturn:
    def say(said: Any) -> None:
        """One write below the pipe's atomic size per word; what is in the pipe outlives its writer."""
        data = json.dumps(said).encode() + b"\n"
        while data:
            data = data[os.write(writing, data) :]

    code = 70
    try:
        given = work(say)
        if isinstance(given, Coroutine):
            given = asyncio.run(given)
        if given is not None:
            say(given)
        code = 0
    except BaseException as error:
        say(["error", type(error).__name__, str(error)])
    finally:
        os._exit(code)


def two_lives(plan: Plan, first: Fork, second: Callable[[list[Any]], Any]) -> Life:
    """The evidence of a life that may be cut short, and of the one after it, which may know what the first has said."""
    said, ended = first.heard(), first.ended()
    later = Fork(lambda _: second(said))
    evidence, code = later.heard(), later.ended()
    return {"plan": plan, "ended": ended, "said": said, "second": code, "evidence": evidence[-1] if evidence else None}


def carry_out_plans(one: Callable[[Path, Plan], Life]) -> None:
    """The main program: `one` gives the evidence of a plan, from an empty folder."""
    gc.freeze()  # or every fork copies every page of what was imported, only to count references
    folder = Path(sys.argv[1]) / "life"
    for line in sys.stdin:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        print(json.dumps(one(folder, json.loads(line))), flush=True)
