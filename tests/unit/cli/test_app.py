"""How commands end: every kind of ending has its number, and no mistake of the person who typed is a traceback."""

from __future__ import annotations

import errno

import pytest

from reefknot.cli import app
from reefknot.cli.app import CommandError, Exit, exit_for
from reefknot.errors import ConfigurationError, ParameterError
from tests.unit.cli.running import Commands


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("no"), 2),
        (CommandError("no", Exit.FAILED), 1),
        (ParameterError("code", "x", "one of a, b"), 2),
        (ConfigurationError(["a.yaml:1:1: bad"]), 78),
        (PermissionError(errno.EACCES, "Permission denied", "x.yaml"), 77),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), 69),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (KeyError("ours"), 1),
    ],
)
def test_an_error_has_one_exit_code(error: Exception, code: int) -> None:
    assert exit_for(error)[0] == code


def test_every_mistake_of_a_configuration_is_a_line_of_its_own() -> None:
    assert exit_for(ConfigurationError(["a.yaml:1:1: bad", "a.yaml:2:1: worse"]))[1] == [
        "a.yaml:1:1: bad",
        "a.yaml:2:1: worse",
    ]


def test_a_parameter_is_called_by_its_flag() -> None:
    _, lines = exit_for(ParameterError("retry_count", -1, "a whole number, 0 or more"))

    assert lines == ["reefknot: --retry-count: -1 is not accepted: a whole number, 0 or more"]


def test_the_numbers_are_those_of_the_documents() -> None:
    assert sorted(Exit) == [0, 1, 2, 65, 69, 75, 77, 78, 130, 143]


def test_our_own_mistake_says_so_and_how_to_see_it(rk: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(words: object) -> None:
        raise RuntimeError("a bolt is loose")

    monkeypatch.setattr(app, "application", lambda: broken)

    ended = rk("policy", "list")

    assert ended.code == 1
    assert "internal error: RuntimeError: a bolt is loose" in ended.err
    assert "REEFKNOT_TRACEBACK=1" in ended.err
    monkeypatch.setenv("REEFKNOT_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="a bolt is loose"):
        rk("policy", "list")


def test_an_interrupt_is_130(rk: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "application", lambda: interrupted)

    assert rk("policy", "list").code == 130


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("polcy",), 'Did you mean "policy"?'),
        (("policy", "explian"), 'Did you mean "explain"?'),
        (("policy", "explain", "block:http", "--stauts", "4"), "Did you mean --status?"),
        (("policy", "explain", "block:http", "--status", "many"), 'unable to convert "many" into int'),
        (("policy", "explain", "block:http", "--status"), "--status requires an argument"),
        (("policy", "explain", "block:http", "extra"), "extra"),
        (("policy", "list", "--kind", "blocks"), "blocks"),
        (("policy", "list", "--no-json"), "--no-json"),
        (("--nope",), "--nope"),
        (("init", "somewhere"), "somewhere"),
    ],
)
def test_what_no_command_takes_is_a_usage_error(rk: Commands, words: tuple[str, ...], says: str) -> None:
    ended = rk(*words)

    assert ended.code == 2
    assert says in ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err
