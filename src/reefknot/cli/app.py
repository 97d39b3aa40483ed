"""
All nouns, and the one place where a command ends.

Nouns are loaded when they are named. Whatever a command raises becomes a line on stderr and an exit code here; no
command prints an error itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from reefknot.cli.exits import Exit, told
from reefknot.cli.output import say

NOUNS = {
    "run": ("reefknot.cli.run:app", "Send a file of assignments through router, queue, worker and back."),
    "up": ("reefknot.cli.up:app", "Run the whole system until it is told to end."),
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
    "init": ("reefknot.cli.init:app", "Write a commented reefknot.yaml to start from."),
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
