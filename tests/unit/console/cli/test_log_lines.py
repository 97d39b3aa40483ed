"""Log lines of commands: their two forms, what is kept out of them, and that logging is as before afterwards."""

import json
import logging
import re

import pytest

from reefknot.console.cli.live_output import LogFlags
from reefknot.console.cli.output import say
from reefknot.console.operations.values import ParameterUseError
from tests.unit.console.cli.running import Commands

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
OURS = logging.getLogger("reefknot")


def logged(capsys: pytest.CaptureFixture[str], flags: LogFlags, *, feed: bool = False) -> list[str]:
    """The lines on stderr of one line of each level, a retry, an audited event and a message."""
    with flags.applied(feed=feed):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            OURS.log(level, "at %s", logging.getLevelName(level).lower())
        OURS.warning("tried again", extra={"decision": "retry", "attempt": 1, "work_id": "a"})
        logging.getLogger("reefknot.audit").info("audited")
        say("a message")
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("debug", ["at debug", "at info", "at warning", "at error", "tried again"]),
        ("info", ["at info", "at warning", "at error", "tried again"]),
        ("warning", ["at warning", "at error", "tried again"]),
        ("error", ["at error"]),
    ],
)
def test_lines_below_a_level_are_left_out(level: str, kept: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = logged(capsys, LogFlags(log_level=level, log_format="text"))
    assert (lines.pop(), [line.split(": ", 1)[1] for line in lines]) == ("a message", [*kept, "audited"])
    assert all(re.match(rf"{STAMP} [A-Z]+ reefknot", line) for line in lines)


def test_as_json_messages_are_lines_too_and_a_retry_has_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in logged(capsys, LogFlags(log_format="json"))]
    assert [line["message"] for line in lines] == ["at warning", "at error", "tried again", "audited", "a message"]
    assert (lines[2]["attempt"], lines[2]["work_id"], lines[2]["level"]) == (1, "a", "warning")
    assert lines[-1]["logger"] == "reefknot.cli"
    assert all(re.fullmatch(STAMP, line["time"]) for line in lines)


def test_beside_a_live_feed_attempts_are_not_logged_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tried again" not in " ".join(logged(capsys, LogFlags(log_format="text"), feed=True))
    assert "tried again" in " ".join(logged(capsys, LogFlags(log_format="json"), feed=True))


@pytest.mark.parametrize("words", [("up",), ("worker", "start"), ("router", "start"), ("dashboard",)], ids=" ".join)
def test_without_a_terminal_all_that_a_service_says_is_lines_of_json(rk: Commands, words: tuple[str, ...]) -> None:
    rk.environment.delenv("REEFKNOT_LOG_FORMAT")
    rk.environment.setenv("REEFKNOT__DASHBOARD__PORT", "0")
    assert rk("submit", "--type", "fs.blob_get", "--id", "one").code == 0
    ended = rk(*words, "--for", "0")
    assert ended.code == 0
    assert all(json.loads(line)["message"] for line in ended.err.splitlines())
    assert ended.err


def test_the_traceback_of_a_step_is_a_field_of_its_line_and_the_feed_is_for_terminals(rk: Commands) -> None:
    rk.environment.setenv("REEFKNOT__DASHBOARD__ENABLED", "false")
    rk.write("import reefknot as rk\n@rk.block('own.bug')\nasync def bug(inputs, context):\n    {}['x']\n", "bugs.py")
    assert rk("submit", "--type", "own.bug", "--id", "one").code == 0
    ended = rk("up", "--for", "2", "--module", "bugs", "--log-format", "json", "--log-level", "info")
    lines = [json.loads(line) for line in ended.err.splitlines()]
    assert [line["work_id"] for line in lines if line.get("decision") == "give_up"] == ["one"]
    assert (ended.out, "1 failed" in lines[-1]["message"]) == ("", True)
    (line,) = [one for one in lines if "traceback" in one]
    assert line["message"].endswith("own.bug one: its step raised")
    assert line["traceback"].startswith("Traceback (most recent call last):\n  File ")
    assert line["traceback"].endswith("KeyError: 'x'")
    assert "is_traceback" not in line


def test_the_form_can_be_chosen_by_the_environment(rk: Commands) -> None:
    rk.environment.setenv("REEFKNOT_LOG_FORMAT", "json")
    assert json.loads(rk("up", "--for", "0").err.splitlines()[0])["logger"] == "reefknot.cli"
    rk.environment.setenv("REEFKNOT_LOG_FORMAT", "xml")
    ended = rk("up", "--for", "0")
    assert (ended.code, "REEFKNOT_LOG_FORMAT: 'xml' is unknown" in ended.err) == (2, True)


def test_logging_is_as_before_afterwards_and_when_a_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    root, audit = logging.getLogger(), logging.getLogger("reefknot.audit")
    before = list(root.handlers), root.level, audit.level
    logged(capsys, LogFlags(log_level="debug", log_format="json"))
    assert (list(root.handlers), root.level, audit.level) == before
    say("plain")
    assert capsys.readouterr().err == "plain\n"
    for flags in (LogFlags(log_level="loud"), LogFlags(log_format="xml")):
        with pytest.raises(ParameterUseError, match="is unknown; accepted: "), flags.applied():
            pass
    assert (list(root.handlers), root.level, audit.level) == before


def test_the_error_that_ends_a_command_is_such_a_line_too(rk: Commands) -> None:
    rk.write("x", "plain.txt")
    ended = rk("up", "--for", "0", "--engine", "sqlite:plain.txt/state.db", "--log-format", "json")
    plain = rk("up", "--for", "0", "--engine", "sqlite:plain.txt/state.db")
    lines = [json.loads(line) for line in ended.err.splitlines()]
    assert (ended.code, plain.code) == (69, 69)
    assert "plain.txt/state.db" in lines[-1]["message"]
    assert plain.err.splitlines()[-1] == lines[-1]["message"], "the next command's messages are plain"
