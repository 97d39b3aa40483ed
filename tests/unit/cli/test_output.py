"""What is shown: nothing steers a terminal, JSON is JSON, and a table in a log stays a table."""

from __future__ import annotations

import json
from math import inf

import pytest

from reefknot.cli.output import jsonable, printable, put, put_json, put_table, say
from reefknot.core.retry.policy import Jitter
from tests.unit.cli.running import Commands

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
