"""
What `run` and `up` share: the settings they start from, what they say about them, and how a signal ends them.

The first signal asks for an orderly end, the second ends at once: what was accepted is in the store either way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from msgspec import Struct

from reefknot.cli.engine import DEFAULT, checked_url
from reefknot.cli.exits import CommandError, Exit
from reefknot.cli.output import say, where

if TYPE_CHECKING:
    import asyncio

    from reefknot.config.settings import Settings

MOST_WORKERS = 64

Workers = Annotated[int, Parameter(help="How many workers, 1 unless said.")]
Modules = Annotated[
    list[str] | None,
    Parameter(name="--module", help="A module with steps of your own under @reefknot.block.", negative=()),
]
Store = Annotated[
    str | None,
    Parameter(help="sqlite:PATH or memory:. Without it, the configured one, or sqlite:.reefknot/state.db."),
]


class Ready(Struct, frozen=True):
    """What a system starts from."""

    settings: Any
    url: str
    secrets: tuple[str, ...]


def ready(engine: str | None, config: str | None, workers: int = 1) -> Ready:
    """Read everything, say what a person should know, and refuse what cannot work before anything is started."""
    from reefknot.config.settings import load_settings

    if not 1 <= workers <= MOST_WORKERS:
        raise CommandError(f"--workers: {workers} is not accepted: a whole number from 1 to {MOST_WORKERS}")
    settings = load_settings(config, environ=os.environ, cwd=Path.cwd(), forgiving=True)
    for warning in settings.warnings:
        say(f"warning: {warning}")
    _say_baseline(settings)
    folder = Path.cwd() if engine is not None or settings.path is None else settings.path.parent
    url = checked_url(engine or settings.configuration.engine or f"sqlite:{DEFAULT}", folder)
    return Ready(settings, url, _secrets(settings, config))


def _say_baseline(settings: Settings) -> None:
    """Which of the two gates is shut, and how to open it."""
    gates = (
        (
            "retries",
            settings.retries_gate,
            "linear waits of 100 ms, every failure retried",
            "WORKER_RETRIES_V2_ENABLED",
        ),
        ("queue", settings.queue_gate, "a queue without a bound", "WORKER_QUEUE_V2_ENABLED"),
    )
    for name, gate, what, variable in gates:
        if not gate:
            way = _way_out(name, variable, gate.said_by, settings)
            say(f"The baseline is in force ({name}: {what}; said by {where(gate.said_by)}). To leave it: {way}.")


def _way_out(name: str, variable: str, said_by: str, settings: Settings) -> str:
    """What has not been done yet: a variable that is set already is no way."""
    if said_by.startswith("missing file"):
        return "create the file, or do not name it"
    if said_by.startswith("environment"):
        return f"{variable}=true; the environment wins over the file"
    return f"worker.{name}.v2.enabled: true in {_file(settings)}, or {variable}=true"


def _file(settings: Settings) -> str:
    return "reefknot.yaml (`reefknot init` writes one)" if settings.path is None else where(str(settings.path))


def _secrets(settings: Settings, config: str | None) -> tuple[str, ...]:
    """The configured secrets. One that cannot be read here cannot leak from here either; it is told all the same."""
    from reefknot.config.load import load_tree
    from reefknot.config.secrets import resolve_section

    if settings.path is None:
        return ()
    tree, path = load_tree(config, environ=os.environ, cwd=Path.cwd())
    found, problems = resolve_section(tree, environ=os.environ, folder=Path.cwd() if path is None else path.parent)
    for problem in problems:
        say(f"warning: {where(str(problem))}")
    return tuple(secret.reveal() for secret in found.values())


class Ending:
    """Whether somebody asked for the end, and what the exit code is then."""

    def __init__(self, asked: asyncio.Event) -> None:
        self.asked = asked
        self.code: Exit | None = None

    def heard(self, signal: Signals) -> None:
        if self.code is not None:
            say("ended at once; what was accepted is in the store")
            os._exit(self.code)
        self.code = Exit.INTERRUPTED if signal == SIGINT else Exit.TERMINATED
        say("ending; what runs may finish (a second signal ends at once)")
        self.asked.set()


@contextmanager
def signals() -> Iterator[Ending]:
    """Inside, SIGINT and SIGTERM ask for the end instead of making it."""
    import asyncio

    loop = asyncio.get_running_loop()
    ending = Ending(asyncio.Event())
    set_up = []
    for signal in (SIGINT, SIGTERM):
        try:
            loop.add_signal_handler(signal, ending.heard, signal)
            set_up.append(signal)
        except (RuntimeError, ValueError):  # no main thread, or a system without signals
            break
    try:
        yield ending
    finally:
        for signal in set_up:
            loop.remove_signal_handler(signal)
