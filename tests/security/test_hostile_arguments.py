"""Odd input at the command line: a named error with its exit code, never an internal one, and no forged line."""

import sys
from pathlib import Path

import pytest

from reefknot.errors import KeyConflictError
from reefknot.queue.connect import connect
from reefknot.queue.model.work import WorkFailed
from reefknot.stores.opening import open_store
from tests.unit.console.cli import work_items
from tests.unit.console.cli.running import Commands
from tests.warm_commands import run_cold

NOT_UTF8 = "\udcff"
"""The byte 0xff, as Python hands it to a program."""


@pytest.fixture
def rk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, monkeypatch, capsys)


@pytest.fixture
def store(rk: Commands) -> Path:
    path = rk.folder / ".reefknot" / "state.db"
    work_items.submitted(path, "known")
    return path


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["submit", "--type", "own.step", "--inputs", DEEP], "--inputs: nested too deeply"),
        (["submit", "--type", "own.step", "--inputs", '{"a": "' + NOT_UTF8 + '"}'], "UTF-8"),
        (["submit", "--type", NOT_UTF8], "UTF-8"),
        (["submit", "--type", "own.step", "--id", NOT_UTF8], "UTF-8"),
        (["submit", "/dev/urandom"], "/dev/urandom: is a device; accepted: a file"),
        (["run", "/dev/zero"], "/dev/zero: is a device; accepted: a file"),
        (["audit", "tail", "-n", "99999999999999999999"], "--lines: 99999999999999999999 is not accepted: a whole"),
        (["audit", "tail", "-n", "²"], "-n"),
        (["audit", "tail", "--correlation", NOT_UTF8], "UTF-8"),
        *((["job", verb, NOT_UTF8], "UTF-8") for verb in ("show", "cancel")),
        (["quarantine", "show", NOT_UTF8], "UTF-8"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_odd_input_is_a_usage_error_with_its_name(rk: Commands, store: Path, words: list[str], named: str) -> None:
    ended = rk(*words)
    assert ended.code == 2
    assert named in ended.err
    assert "internal error" not in ended.err


def test_an_endless_line_in_a_pipe_ends_the_reading(tmp_path: Path) -> None:
    """A control for the bound: without it, this process reads for ever."""
    with open("/dev/zero", "rb") as zeros:
        ended = run_cold(sys.executable, "-m", "reefknot", "submit", "-", stdin=zeros, cwd=tmp_path)
    assert ended.returncode == 2
    assert "line 1 has no end within 67108864 bytes" in ended.stderr


FORGED = "2026-01-01T00:00:00.000Z  completed: all is well"


@pytest.mark.parametrize("words", [["job", "show", "liar"], ["job", "list"]])
def test_a_message_cannot_forge_a_line(rk: Commands, store: Path, words: list[str]) -> None:
    work_items.accepted(store, "liar", WorkFailed(None, None, f"broken\n{FORGED}\r\n{FORGED}\u2028{FORGED}"))
    shown = rk(*words).out
    assert "broken\\n" in shown
    assert not [line for line in shown.splitlines() if line.startswith(FORGED[:24])]


@pytest.mark.real_time
async def test_a_payload_is_compared_by_type(tmp_path: Path) -> None:
    """1, 1.0 and true are equal in Python, and three different payloads."""
    url = f"sqlite:{tmp_path / 's.db'}"
    async with open_store(url), connect(url) as client:
        for _ in range(2):
            await client.submit("own.step", {"paid": 1}, assignment_id="one")
        for other in (1.0, True):
            with pytest.raises(KeyConflictError) as refused:
                await client.submit("own.step", {"paid": other}, assignment_id="one")
            assert refused.value.key == "one"
