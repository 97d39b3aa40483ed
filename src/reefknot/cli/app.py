"""
How a command ends.

One number per kind of ending, and the words that go with it. An error of the person who typed is never a traceback;
what is our own mistake says so, and `REEFKNOT_TRACEBACK=1` shows it whole.

All nouns, and the one place where a command ends.

Nouns are loaded when they are named. Whatever a command raises becomes a line on stderr and an exit code here; no
command prints an error itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import IntEnum

from cyclopts import App, CycloptsError, Parameter

from reefknot.cli.output import say, where
from reefknot.errors import (
    ConfigurationError,
    IdempotencyError,
    KeyInProgressError,
    NameTakenError,
    ParameterError,
    StoreCorruptError,
    StoreError,
    StoreVersionError,
)


class Exit(IntEnum):
    """The exit codes, the same for every command."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    MISMATCH = 65
    UNREACHABLE = 69
    TEMPORARY = 75
    FORBIDDEN = 77
    MISCONFIGURED = 78
    INTERRUPTED = 130
    TERMINATED = 143


class CommandError(Exception):
    """A command cannot do what was asked. The text says what to do instead."""

    def __init__(self, message: str, exit: Exit = Exit.USAGE) -> None:  # noqa: A002 - it is the exit code
        super().__init__(message)
        self.exit = exit


FLAGS = {
    "code": "--error",
    "http_status": "--status",
    "failure_type": "--failure-type",
    "retry_after": "--retry-after",
    "retry_count": "--retry-count",
    "timeout_ms": "--timeout-ms",
    "max_attempts": "--retry-count",
    "source": "--source",
    "target": "--target",
    "url": "--engine",
    "threshold": "--threshold",
    "key": "KEY",
}
"""What a parameter is called on the command line."""


def told(error: Exception) -> tuple[Exit, list[str]]:
    """The exit code of an error, and its lines for stderr."""
    match error:
        case CommandError():
            return error.exit, [f"reefknot: {error}"]
        case ConfigurationError():
            return Exit.MISCONFIGURED, [where(line) for line in str(error).splitlines()]
        case ParameterError():
            flag = FLAGS.get(error.parameter, error.parameter)
            text = str(error).removeprefix(f"{error.parameter}=")
            return Exit.USAGE, [f"reefknot: {flag}: {text}"]
        case StoreCorruptError():
            return Exit.MISMATCH, [f"reefknot: {error}"]
        case StoreVersionError():
            return Exit.MISCONFIGURED, [f"reefknot: {error}"]
        case StoreError():
            return Exit.UNREACHABLE, [f"reefknot: {error}"]
        case KeyInProgressError() | NameTakenError():
            return Exit.TEMPORARY, [f"reefknot: {error}"]
        case IdempotencyError():
            return Exit.USAGE if isinstance(error, ValueError) else Exit.FAILED, [f"reefknot: {error}"]
        case PermissionError():
            return Exit.FORBIDDEN, [f"reefknot: {_of_system(error)}"]
        case ConnectionError() | TimeoutError():
            return Exit.UNREACHABLE, [f"reefknot: {_of_system(error)}"]
        case OSError():
            return Exit.FAILED, [f"reefknot: {_of_system(error)}"]
        case _:
            text = f"reefknot: this is a mistake of ours: {type(error).__name__}: {error}"
            return Exit.FAILED, [text, "Run it again with REEFKNOT_TRACEBACK=1 to see where, and report it."]


def _of_system(error: OSError) -> str:
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    return f"{error.filename}: {reason}" if error.filename else reason


NOUNS = {
    "run": ("reefknot.cli.run:app", "Send a file of assignments through router, queue, worker and back."),
    "up": ("reefknot.cli.serve:app", "Run the whole system until it is told to end."),
    "submit": ("reefknot.cli.submit:app", "Hand work to a system that runs, or will run, on the same store."),
    "worker": ("reefknot.cli.worker:app", "Start a worker; see, drain and pause those that run."),
    "router": ("reefknot.cli.router:app", "Start a router; see those that run."),
    "job": ("reefknot.cli.job:app", "See and call off pieces of work."),
    "quarantine": ("reefknot.cli.quarantine:app", "Look after work that waits for a person."),
    "policy": ("reefknot.cli.policy:app", "Ask the policy book: who is retried, why, and when."),
    "config": ("reefknot.cli.config:app", "See and check the configuration."),
    "audit": ("reefknot.cli.audit:app", "Read, prove, replay and analyse what was decided."),
    "idempotency": ("reefknot.cli.idempotency:app", "See, resolve and forget idempotency keys."),
    "store": ("reefknot.cli.store:app", "Look after a store: check, back up, migrate, compact."),
    "init": ("reefknot.cli.config:init_app", "Write a commented reefknot.yaml to start from."),
}
"""By name: where it is loaded from, and what the list of commands says of it."""


def application() -> App:
    """The command line, without its nouns loaded."""
    app = App(
        name="reefknot",
        help="Runs unreliable work reliably. Data on stdout, talk on stderr; --json on every command.",
        help_epilogue="Examples:\n\n    reefknot init\n    reefknot policy list\n"
        "    reefknot policy explain --target block:http --status 429\n    reefknot --version",
        help_format="plaintext",
        version_flags=[],
        default_parameter=Parameter(negative=(), show_default=False),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for noun, (place, summary) in NOUNS.items():
        app.command(place, name=noun, help=summary)
    return app


def run(words: Sequence[str]) -> int:
    """One command, to its exit code."""
    try:
        answer = application()(words)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return Exit.FINE
    except KeyboardInterrupt:
        say("interrupted")
        return Exit.INTERRUPTED
    except CycloptsError as error:
        say(f"reefknot: {error}")
        say("See --help of the command for what it takes.")
        return Exit.USAGE
    except Exception as error:
        if os.environ.get("REEFKNOT_TRACEBACK"):
            raise
        code, lines = told(error)
        for line in lines:
            say(line)
        _flush_or_drop()
        return code
    return answer if isinstance(answer, int) else Exit.FINE


def _flush_or_drop() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    """Nobody takes what we write. What is still buffered goes nowhere, so that the interpreter does not complain."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it lasts as long as the process
