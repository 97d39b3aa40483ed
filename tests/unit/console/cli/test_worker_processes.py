"""The parts of `up --processes` that need no process: pauses, log lines through pipes, and the socket to a parent."""

import asyncio
import fcntl
import os
import struct
import termios
from queue import SimpleQueue
from socket import socketpair
from threading import Thread

import pytest

from reefknot.console.cli import worker_processes
from reefknot.console.cli.worker_processes import ParentLink, next_pause


def test_a_worker_that_dies_again_and_again_is_started_after_growing_pauses() -> None:
    pauses = [0.0]
    for _ in range(8):
        pauses.append(next_pause(pauses[-1], 0.5))
    assert pauses[1:] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert next_pause(30, 60) == 1, "it lived for a minute"
    assert next_pause(30, 59.9) == 30


def written(descriptor: int, text: bytes) -> None:
    """Write to a pipe, and wait until its reader has taken it."""
    os.write(descriptor, text)
    while struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"    "))[0]:
        os.sched_yield()


def test_lines_of_several_workers_are_written_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Each begins before the other has ended; some are longer than what a pipe takes at once."""
    pipes = [os.pipe() for _ in range(2)]
    threads = [Thread(target=worker_processes._pass_on, args=(reading,)) for reading, _ in pipes]
    for thread in threads:
        thread.start()
    for length in (10, 5_000, 100_000):
        for half in (b"%d: " + b"x" * length, b"y" * length + b"\n%d: end\n%d: and "):
            for number, (_, writing) in enumerate(pipes):
                written(writing, half.replace(b"%d", b"%d" % number))
    for (_, writing), thread in zip(pipes, threads, strict=True):
        os.close(writing)
        thread.join()
    lines = capsys.readouterr().err.splitlines()
    for number in range(2):
        prefixes = (f"{number}: ", f"{number}: and {number}: ", f"{number}: and {number}: ")
        wanted = [f"{at}{'x' * n}{'y' * n}" for at, n in zip(prefixes, (10, 5_000, 100_000), strict=True)]
        ends = [f"{number}: end"] * 3
        assert [one for one in lines if one.startswith(f"{number}: ")] == [
            one for pair in zip(wanted, ends, strict=True) for one in pair
        ] + [f"{number}: and "]
    assert len(lines) == 14


def test_what_never_ends_a_line_is_not_kept_for_ever(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "LONGEST_LINE", 100)
    reading, writing = os.pipe()
    thread = Thread(target=worker_processes._pass_on, args=(reading,))
    thread.start()
    written(writing, b"x" * 101)
    written(writing, b"y\n")
    os.close(writing)
    thread.join()
    assert capsys.readouterr().err == "x" * 101 + "\ny\n"


@pytest.mark.real_time
async def test_a_worker_obeys_words_and_without_its_parent_ends_in_order_then_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last word is for an event loop that a step blocks: nothing else would end such a worker."""
    monkeypatch.setattr(worker_processes, "STOP_S", 0.0)
    ours, theirs = socketpair()
    obeyed: SimpleQueue[str] = SimpleQueue()
    link = ParentLink(theirs.detach())
    actions = [lambda word=word: obeyed.put(word) for word in ("end", "reload", "stop")]
    link.follow(*actions, drain=0.0)
    ours.sendall(b"reload\nend\n")
    assert [await asyncio.to_thread(obeyed.get) for _ in range(2)] == ["reload", "end"]
    ours.close()
    assert {await asyncio.to_thread(obeyed.get) for _ in range(2)} == {"end", "stop"}


def test_a_worker_whose_parent_is_gone_before_it_has_begun_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socketpair()
    ended: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(os, "_exit", ended.put)
    monkeypatch.setattr(worker_processes, "STOP_S", 0.0)
    ParentLink(theirs.detach())
    ours.sendall(b"reload\n")
    ours.close()
    assert ended.get(timeout=30) == 143
    assert ended.get(timeout=30) == 143
