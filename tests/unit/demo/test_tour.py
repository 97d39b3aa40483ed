"""The guided tour of retrying: it shows what it says, ends by itself, and leaves nothing behind."""

from __future__ import annotations

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


def test_it_goes_through_all_scenes(told: str) -> None:
    assert [f"\n{number}. " in told for number in range(1, len(demo.SCENES) + 2)] == [True] * len(demo.SCENES) + [False]


def test_without_a_retry_the_first_failure_is_the_callers(told: str) -> None:
    assert scene(told, 1).count("GET ") == 1
    assert "the caller gets HTTPError 503" in scene(told, 1)


def test_a_retry_recovers_after_three_waits_that_are_drawn_as_bars(told: str) -> None:
    waits = [line for line in scene(told, 2).splitlines() if "wait" in line and "█" in line]

    assert len(waits) == 3
    assert waits[2].count("█") > waits[0].count("█")
    assert "'here you are', after 4 requests" in scene(told, 2)


def test_a_hint_of_the_server_is_honoured_and_one_that_is_too_long_ends_it(told: str) -> None:
    waits = [float(line.split()[1]) for line in scene(told, 3).splitlines() if line.startswith("   wait")]

    assert len(waits) == 1
    assert 1.0 <= waits[0] <= 1.1
    assert "longer wait than max_retry_after" in scene(told, 3)


def test_the_deadline_is_not_overrun(told: str) -> None:
    elapsed = float(scene(told, 4).split("given up after ")[1].split()[0])

    assert 1.1 <= elapsed < 1.5


def test_an_inner_retry_is_not_multiplied(told: str) -> None:
    assert "3 requests, not 9" in scene(told, 5)


def test_the_breaker_opens_leaves_the_service_alone_and_closes(told: str) -> None:
    text = scene(told, 6)

    assert "the breaker is open after 3 failures" in text
    assert "the service saw 3 requests" in text
    assert "the breaker is closed again" in text


def test_a_hanging_attempt_is_cut_in_async_code(told: str) -> None:
    assert "after AttemptTimeoutError" in scene(told, 7)
    assert "'here you are'" in scene(told, 7)


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
    assert threading.active_count() == threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((demo.LOOPBACK, ports[0]), timeout=1)
