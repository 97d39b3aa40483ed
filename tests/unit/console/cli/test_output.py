"""Output: no control characters, valid JSON, tables of bounded width, and a bar on terminals only."""

from __future__ import annotations

import io
import json
import sys
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


def test_control_characters_become_escapes() -> None:
    assert printable(EVIL) == "a\\x1b[31mb\\x9b0mc\\rd\\u202ee\\x00"


@pytest.mark.parametrize("show", [put, say, lambda text: put_table(("x",), [(text,)]), put_json])
def test_no_way_out_lets_a_control_character_through(show: object, capsys: pytest.CaptureFixture[str]) -> None:
    show(EVIL)  # type: ignore[operator]

    shown = "".join(capsys.readouterr()).replace("\n", "")
    assert shown.isprintable()
    assert "31m" in shown


def test_json_keeps_what_it_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    put_json({"text": EVIL, "plain": "±"})

    out = capsys.readouterr().out
    assert json.loads(out) == {"text": EVIL, "plain": "±"}
    assert "±" in out


def test_no_limit_is_null_and_an_enum_is_its_text() -> None:
    assert jsonable({"a": inf, "b": Jitter.FULL, "c": (1, 2.5, None, True)}) == {
        "a": None,
        "b": "full",
        "c": [1, 2.5, None, True],
    }


def test_markup_in_data_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    put_table(("x",), [("[red]:smile: [/red]",)])

    assert "[red]:smile: [/red]" in capsys.readouterr().out


def test_a_table_that_is_not_on_a_terminal_has_no_colours(rk: Commands) -> None:
    assert "\x1b" not in rk("policy", "list").out


@pytest.mark.parametrize(("columns", "widest"), [("", 120), ("60", 60), ("9999", 400), ("much", 120)])
def test_its_width_is_bounded(rk: Commands, columns: str, widest: int) -> None:
    rk.environment.setenv("COLUMNS", columns)

    ended = rk("policy", "list")

    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= widest


@given(st.text(alphabet="ab c-:.日é", max_size=60), st.integers(min_value=2, max_value=20))
def test_a_line_is_broken_without_losing_a_character(line: str, width: int) -> None:
    parts = wrapped(line, width)

    assert [part for part in parts if cell_len(part) > width] == []
    assert "".join("".join(parts).split()) == "".join(line.split())


def test_a_line_is_broken_between_words_where_it_can_be() -> None:
    assert wrapped("4 (1 + 3 retries), built-in: worker", 16) == ["4 (1 + 3", "retries),", "built-in: worker"]
    assert wrapped("reefknot.yaml:2:50 and 2 more", 16) == ["reefknot.yaml:2:", "50 and 2 more"]


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
    ids=["a terminal", "NO_COLOR", "a dumb terminal"],
)
def test_a_table_has_colours_on_a_terminal_that_wants_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    put_table(("job", "state"), [("a", "failed")], styles=("cyan", "bold"))

    assert ("\x1b[36ma\x1b[0m" in terminal.getvalue()) is coloured
    assert ("\x1b" in terminal.getvalue()) is coloured


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("failing", [1, 2])
def test_only_a_first_view_that_fails_ends_a_watch(
    failing: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    views: list[int] = []

    def draw() -> None:
        views.append(len(views) + 1)
        if views[-1] == failing:
            raise StoreLockedError("sqlite:state.db", "it is locked", "try again")

    monkeypatch.setattr(watch, "sleep", lambda seconds: None)
    monkeypatch.setattr(watch, "reader_is_gone", lambda: len(views) == 3)
    if failing == 1:
        with pytest.raises(StoreLockedError):
            watch.repeated(1.0, draw)
    else:
        watch.repeated(1.0, draw)
        assert (views, "it is locked" in capsys.readouterr().err) == ([1, 2, 3], True)


def test_a_watch_ends_when_its_output_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[int] = []

    def draw() -> None:
        views.append(1)
        if len(views) == 2:
            raise OutputError("the disk is full")

    monkeypatch.setattr(watch, "sleep", lambda seconds: None)
    monkeypatch.setattr(watch, "reader_is_gone", lambda: len(views) > 2)
    with pytest.raises(OutputError):
        watch.repeated(1.0, draw)
