"""Checkpoints of steps in real processes: killed again and again, or frozen and woken up, on SQLite and on NATS."""

import json
import signal
import subprocess
import time
from pathlib import Path

from tests.acceptance.folder import Folder, until
from tests.acceptance.test_liveness import is_locked

MODULE = """\
import asyncio
import os
import reefknot as rk

def tell(*words):
    with open("story.txt", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

@rk.block("own.pages", timeout=600)
async def pages(inputs, context):
    begin = context.last_checkpoint or 0
    tell("begin", begin, os.getpid())
    for page in range(begin + 1, inputs["pages"] + 1):
        await asyncio.sleep(inputs["seconds"])
        try:
            await context.checkpoint(page)
        except (rk.LeaseLostError, asyncio.CancelledError):  # by its checkpoint, or by the next renewal of the lease
            tell("lost", page, os.getpid())
            raise
        context.progress(page, inputs["pages"])
        context.log(f"page {page}")
        tell("page", page, os.getpid())
    return {"begun": begin}
"""
KILLS, PAGES = 5, 40


def story(folder: Folder, what: str, process: int = 0) -> list[int]:
    """The pages of all lines of a kind, of one process or of all."""
    file: Path = folder.path / "story.txt"
    lines = [line.split() for line in (file.read_text() if file.exists() else "").split("\n")[:-1]]
    return [int(page) for kind, page, by in lines if kind == what and process in (0, int(by))]


def killed_often(folder: Folder) -> subprocess.Popen[str]:
    """
    The work `a`, whose process is killed after three pages each time; then a system that is left alone.

    Returns the process that follows its lines.
    """
    folder.write("pages.py", MODULE)
    folder.submit("own.pages", "a", pages=PAGES, seconds=0.1)
    follower = folder.start("job", "logs", "a", "--follow", "--json")
    for _ in range(KILLS):
        process = folder.start("up", "--module", "pages")
        pages = len(story(folder, "page"))
        until(lambda: len(story(folder, "page")) >= pages + 3)  # noqa: B023 - it ends in this round
        folder.kill(process)
    folder.start("up", "--module", "pages")
    until(lambda: has_ended(folder))
    return follower


def has_ended(folder: Folder) -> bool:
    return folder.state("a") in ("succeeded", "quarantined")


def test_a_step_whose_process_is_killed_five_times_goes_on_from_its_last_checkpoint(folder: Folder) -> None:
    follower = killed_often(folder)
    job = folder.job("a")
    assert (job["state"], job["attempts"]) == ("succeeded", 1)
    begins = story(folder, "begin")
    assert len(begins) == KILLS + 1
    assert begins == sorted(set(begins)), "each life gets further"
    assert job["checkpoint"]["value"] == PAGES
    assert job["progress"] == {"done": PAGES, "of": PAGES, "percent": 100, "text": ""}
    shown = [line.rsplit("  ", 1)[1] for line in folder("job", "logs", "a").out.splitlines()]
    assert shown[-1] == f"page {PAGES}"
    lines = [json.loads(line) for line in folder("job", "logs", "a", "--json").out.splitlines()]
    assert [line["text"] for line in lines] == shown
    code, followed, _ = folder.ends(follower)
    assert (code, [json.loads(line) for line in followed.splitlines()]) == (0, lines)


def freeze(folder: Folder, process: subprocess.Popen[str]) -> None:
    """Stop a process that holds no lock: else nothing else could go on either."""
    process.send_signal(signal.SIGSTOP)
    while is_locked(folder):
        process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)


def awakened(folder: Folder) -> tuple[list[int], int]:
    """
    The pages that a worker reached after it was frozen until another one had its job; and the last page of that one.
    """
    folder.write("pages.py", MODULE)
    folder.part("router")
    first = folder.part("worker", "--worker-id", "w1", "--module", "pages", protection="long-leases")
    folder.submit("own.pages", "a", pages=25, seconds=0.3)
    until(lambda: len(story(folder, "page")) >= 3)
    freeze(folder, first)
    second = folder.part("worker", "--worker-id", "w2", "--module", "pages", protection="long-leases")
    until(lambda: len(story(folder, "page", second.pid)) >= 6)
    before = len(story(folder, "page", first.pid))
    first.send_signal(signal.SIGCONT)
    until(lambda: bool(story(folder, "lost", first.pid)) or len(story(folder, "page", first.pid)) > before + 4)
    until(lambda: has_ended(folder))
    return story(folder, "page", first.pid)[before:], story(folder, "page", second.pid)[-1]


def test_a_frozen_worker_that_wakes_up_is_refused_its_checkpoint(folder: Folder) -> None:
    late, last = awakened(folder)
    assert len(late) <= 1, "of the second in which nothing is asked of the store"
    assert last == 25
    job = folder.job("a")
    assert (job["state"], job["checkpoint"]["value"], job["crashes"]) == ("succeeded", 25, 1)
