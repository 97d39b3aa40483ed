"""A bar while something long goes on."""

import io
import sys

import pytest

from reefknot.cli.output import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nobody_watching_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with progress("replaying", 10) as advance:
        advance(5)

    assert written.getvalue() == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("replaying", 10) as advance:
        advance(10)

    assert "replaying" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
