"""The application: help of every command, one exit code per kind of error, and no traceback for a usage error."""

import errno
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from reefknot import errors
from reefknot.console.cli import app
from reefknot.console.cli.app import NOUNS, CommandError, Exit, exit_for, with_default_watch
from tests.unit.console.cli.running import Commands


def commands() -> Iterator[tuple[str, ...]]:
    yield ()
    for noun, (import_path, _) in NOUNS.items():
        module, _, name = import_path.partition(":")
        yield (noun,)
        yield from ((noun, verb) for verb in getattr(import_module(module), name) if not verb.startswith("-"))


COMMANDS = list(commands())
ODD_WORDS = ("unless said", "hand in", "handed in", "on record", "call off", "a line each", "nobody", "somebody")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_shows_an_example_in_plain_words(rk: Commands, words: tuple[str, ...]) -> None:
    ended = rk(*words, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert f"    {' '.join(('reefknot', *words))}" in ended.out
    assert "Example" in ended.out
    assert [word for word in ODD_WORDS if word in ended.out] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("no"), 2),
        (CommandError("no", Exit.FAILED), 1),
        (errors.ParameterError("code", "x", "one of a, b"), 2),
        (errors.ConfigurationError(["a.yaml:1:1: bad"]), 78),
        (PermissionError(errno.EACCES, "Permission denied", "x.yaml"), 77),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), 69),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (errors.StoreLockedError("sqlite:x", "locked", "try again"), 75),
        (errors.StorePermissionError("sqlite:x", "forbidden", "ask"), 77),
        (errors.StoreUnavailableError("sqlite:x", "away", "look"), 69),
        (KeyError("ours"), 1),
    ],
)
def test_an_error_has_one_exit_code(error: Exception, code: int) -> None:
    assert exit_for(error)[0] == code


def documented_exit_codes(page: str) -> list[int]:
    """The codes in the first column of the table of exit codes; one row may name several."""
    section = page.partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ") and line[2].isdigit()]
    return [int(code) for row in rows for code in row.split(",")]


def test_the_numbers_are_those_of_the_documents_and_every_command_is_found() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert documented_exit_codes(page) == sorted(Exit)
    assert documented_exit_codes(page.replace("| 66 |", "| |")) != sorted(Exit), "a missing row is noticed"
    assert len(COMMANDS) == 1 + 23 + 72


def test_a_bug_is_an_internal_error_with_a_traceback_an_interrupt_130_and_odd_bytes_are_escapes(rk: Commands) -> None:
    odd = rk("policy", "show", b"connector:\xff\xfe".decode("utf-8", "surrogateescape"))
    assert (odd.code, "\\udcff" in odd.err) == (2, True)
    raised: list[BaseException] = [KeyboardInterrupt(), *[RuntimeError("a bolt is loose")] * 2]

    def broken(words: object) -> None:
        raise raised.pop(0)

    rk.environment.setattr(app, "application", lambda: broken)
    assert rk("policy", "list").code == 130
    ended = rk("policy", "list")
    assert (ended.code, "internal error: RuntimeError: a bolt is loose" in ended.err) == (1, True)
    assert "REEFKNOT_TRACEBACK=1" in ended.err
    rk.environment.setenv("REEFKNOT_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="a bolt is loose"):
        rk("policy", "list")


def test_watch_without_seconds_means_every_two() -> None:
    read = {
        "job list --watch": "job list --watch=2",
        "job list --watch --json": "job list --watch=2 --json",
        "job list --watch --": "job list --watch=2 --",
    }
    said = ("--watch 5 --json", "--watch .5", "--watch=1", "--watch -1", "--watch -.5", "--watch often")
    read |= {f"job list {one}": f"job list {one}" for one in said} | {"": ""}
    assert {given: " ".join(with_default_watch(given.split())) for given in read} == read
