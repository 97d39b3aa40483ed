"""The guided tour of retrying: it shows what it says, ends by itself, and leaves nothing behind."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from reefknot.demo import tour as demo


@pytest.fixture(scope="module")
def told() -> str:
    """What a visitor reads, from a process of its own."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "reefknot.demo", "--retry", "--fast"],
        env=os.environ | {"PYTHONWARNINGS": "error", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert time.monotonic() - started < 120, "virtual time does not wait; the rest is room for a busy machine"
    return done.stdout


def scene(told: str, number: int) -> str:
    _, _, following = told.partition(f"\n{number}. ")
    return following.partition(f"\n{number + 1}. ")[0]


SAID = {
    1: ["the caller gets HTTPError 503"],
    2: ["'here you are', after 4 requests"],
    3: ["longer wait than max_retry_after"],
    5: ["3 requests, not 9"],
    6: ["the breaker is open after 3 failures", "the service saw 3 requests", "the breaker is closed again"],
    7: ["after AttemptTimeoutError", "'here you are'"],
}
"""An inner retry is not multiplied (5), a hanging attempt is cut in async code (7)."""


def test_it_goes_through_all_scenes_and_each_shows_what_it_says(told: str) -> None:
    assert [f"\n{number}. " in told for number in range(1, len(demo.SCENES) + 2)] == [True] * len(demo.SCENES) + [False]
    assert {number: [text for text in texts if text in scene(told, number)] for number, texts in SAID.items()} == SAID
    assert scene(told, 1).count("GET ") == 1, "without a retry the first failure is the caller's"


def test_waits_are_drawn_as_bars_follow_a_hint_and_do_not_overrun_the_deadline(told: str) -> None:
    bars = [line.count("█") for line in scene(told, 2).splitlines() if "wait" in line and "█" in line]
    assert (len(bars), bars[2] > bars[0]) == (3, True)
    (hinted,) = [float(line.split()[1]) for line in scene(told, 3).splitlines() if line.startswith("   wait")]
    assert 1.0 <= hinted <= 1.1
    assert 1.1 <= float(scene(told, 4).split("given up after ")[1].split()[0]) < 1.5


def test_it_speaks_plainly_where_rich_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(demo, "SCENES", (demo.plain_failure,))

    assert demo.main(fast=True) == 0
    assert "the caller gets HTTPError 503" in capsys.readouterr().out


def test_an_interrupt_ends_it_cleanly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The server is closed, the log is as before, the exit code is a shell's own for Ctrl-C."""
    handlers = list(logging.getLogger("reefknot").handlers)
    threads = threading.active_count()
    ports: list[int] = []

    def interrupted(tour: demo.Tour) -> None:
        ports.append(tour.service.port)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "SCENES", (interrupted,))

    assert demo.main(fast=True) == 130
    assert capsys.readouterr().err == "\nstopped\n"
    assert logging.getLogger("reefknot").handlers == handlers
    assert logging.getLogger("reefknot").propagate
    assert threading.active_count() <= threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((demo.LOOPBACK, ports[0]), timeout=1)
