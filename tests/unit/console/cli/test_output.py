"""Output: no control characters, valid JSON, tables of bounded width, and a bar on terminals only."""

import io
import json
import sys
from contextlib import nullcontext
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.console.cli import watch
from reefknot.console.cli.output import OutputError, cell_len, progress, put, put_json, put_table, say, wrapped
from reefknot.console.operations.values import jsonable
from reefknot.core.policy import Jitter
from reefknot.errors import StoreLockedError
from reefknot.runtime.log import printable
from tests.unit.console.cli.running import Commands

EVIL = "a\x1b[31mb\x9b0mc\rd\u202ee\x00"


@pytest.mark.parametrize("show", [put, say, lambda text: put_table(("x",), [(text,)]), put_json])
def test_no_way_out_lets_a_control_character_through(show: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(EVIL) == "a\\x1b[31mb\\x9b0mc\\rd\\u202ee\\x00"
    show(EVIL)  # type: ignore[operator]
    shown = "".join(capsys.readouterr()).replace("\n", "")
    assert (shown.isprintable(), "31m" in shown) == (True, True)


def test_data_stays_what_it_is_in_json_and_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    put_json({"text": EVIL, "plain": "±"})
    out = capsys.readouterr().out
    assert (json.loads(out), "±" in out) == ({"text": EVIL, "plain": "±"}, True)
    put_table(("x",), [("[red]:smile: [/red]",)])
    assert "[red]:smile: [/red]" in capsys.readouterr().out


def test_no_limit_is_null_and_an_enum_is_its_text() -> None:
    given = {"a": inf, "b": Jitter.FULL, "c": (1, 2.5, None, True)}
    assert jsonable(given) == {"a": None, "b": "full", "c": [1, 2.5, None, True]}


@pytest.mark.parametrize(("columns", "widest"), [("", 120), ("60", 60), ("9999", 400), ("much", 120)])
def test_a_table_off_a_terminal_is_bounded_and_has_no_colours(rk: Commands, columns: str, widest: int) -> None:
    rk.environment.setenv("COLUMNS", columns)
    ended = rk("policy", "list")
    assert (ended.code, "\x1b" in ended.out) == (0, False)
    assert max(map(len, ended.out.splitlines())) <= widest


@given(st.text(alphabet="ab c-:.日é", max_size=60), st.integers(min_value=2, max_value=20))
def test_a_line_is_broken_without_losing_a_character(line: str, width: int) -> None:
    parts = wrapped(line, width)
    assert [part for part in parts if cell_len(part) > width] == []
    assert "".join("".join(parts).split()) == "".join(line.split())


def test_a_line_is_broken_between_words_where_it_can_be() -> None:
    assert wrapped("4 (1 + 3 retries), built-in: worker", 16) == ["4 (1 + 3", "retries),", "built-in: worker"]
    assert wrapped("reefknot.yaml:2:50 and 2 more", 16) == ["reefknot.yaml:2:", "50 and 2 more"]


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["a terminal", "plain", "dumb"])
def test_a_table_has_colours_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    put_table(("job", "state"), [("a", "failed")], styles=("cyan", "bold"))
    assert ("\x1b[36ma\x1b[0m" in terminal.getvalue()) is ("\x1b" in terminal.getvalue()) is (not variables)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    written, terminal = io.StringIO(), Terminal()
    for stream in (written, terminal):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("replaying", 10) as advance:
            advance(10)
    assert written.getvalue() == ""
    assert "replaying" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


LOCKED = StoreLockedError("sqlite:state.db", "it is locked", "try again")


@pytest.mark.parametrize(
    ("failing", "error", "ends"), [(1, LOCKED, True), (2, LOCKED, False), (2, OutputError("the disk is full"), True)]
)
def test_only_a_first_view_that_fails_or_an_output_that_is_gone_ends_a_watch(
    failing: int, error: Exception, ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    views: list[int] = []

    def draw() -> None:
        views.append(len(views) + 1)
        if views[-1] == failing:
            raise error

    monkeypatch.setattr(watch, "sleep", lambda seconds: None)
    monkeypatch.setattr(watch, "reader_is_gone", lambda: len(views) == 3)
    with pytest.raises(type(error)) if ends else nullcontext():
        watch.repeated(1.0, draw)
    if not ends:
        assert (views, "it is locked" in capsys.readouterr().err) == ([1, 2, 3], True)
