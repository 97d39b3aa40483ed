"""
Options that several commands share, checks of their values, and the settings that `--config` names.

A command takes one of the flattened groups (`CommonFlags`, `StoreFlags`, `OperatorFlags`, `SystemFlags`) and its own
flags. A value that is not accepted is refused with what is accepted, and with a suggestion, before any work starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_origin

from cyclopts import Parameter

from reefknot.console.cli.app import CommandError, Exit
from reefknot.console.cli.output import relative, say
from reefknot.console.operations.values import MOST_LISTED, duration_s
from reefknot.runtime.log import printable
from reefknot.stores.port.engines import DEFAULT_URL, accepted_urls

if TYPE_CHECKING:
    from cyclopts import Token

    from reefknot.policy.settings import Settings

if TYPE_CHECKING:
    FileName: TypeAlias = str
else:
    FileName = Path
    """The text of a file's name, with `file_arg`: for a `Path`, shell completion offers file names."""


def arg(text: str, *names: str, **more: Any) -> Parameter:
    """A parameter of a command: its help, and its names where the Python name is not the one to type."""
    return Parameter(name=names or None, help=text, **more)


def time_arg(text: str, *names: str) -> Parameter:
    """A parameter that is a time or a duration. One with a minus is refused with what is accepted, not as an option."""
    return arg(text, *names, allow_leading_hyphen=True)


def file_arg(text: str, *names: str, **more: Any) -> Parameter:
    """A parameter that names a file. Its value is the text as it was typed: a `Path` would lose `./` and `-`."""
    return arg(text, *names, converter=_typed, **more)


def _typed(hint: Any, tokens: Sequence[Token]) -> str | list[str]:
    values = [token.value for token in tokens]
    return values if get_origin(hint) is list else values[0]


Json = Annotated[bool, arg("Print JSON on stdout, for programs.")]
_DEFAULT_STORE = f"Default: the configured one, or {DEFAULT_URL}."
LONGEST_S = 10 * 365 * 86_400
Actor = Annotated[str | None, arg("Audited actor. Default: the user of this system.", "--as")]
_MODULES = "Module (app.steps) or file (steps.py) that defines steps with @reefknot.block; repeatable."
Modules = Annotated[list[FileName] | None, file_arg(_MODULES, "--module")]

# ---- groups of options -----------------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CommonFlags:
    """Options of every command that reads the configuration."""

    config: Annotated[FileName | None, file_arg("Configuration file. Default: the nearest reefknot.yaml upwards.")] = (
        None
    )
    json: Json = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreFlags(CommonFlags):
    """Options of a command that works on a store which other processes can open."""

    engine: Annotated[str | None, arg(f"Store: {accepted_urls(shared_only=True)}. {_DEFAULT_STORE}")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OperatorFlags(StoreFlags):
    """Options of a command that changes a store and is audited."""

    dry_run: Annotated[bool, arg("Show what would be done, and change nothing.")] = False
    actor: Actor = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SystemFlags(CommonFlags):
    """Options of a command that runs a whole system: router and workers."""

    engine: Annotated[str | None, arg(f"Store: {accepted_urls()}. {_DEFAULT_STORE}")] = None
    workers: Annotated[int, arg("Number of workers. Default: 1.")] = 1
    module: Modules = None
    seed: Annotated[int | None, arg("Seed of jitter and of the choice of workers.")] = None


COMMON, STORE, OPERATOR, SYSTEM = CommonFlags(), StoreFlags(), OperatorFlags(), SystemFlags()
"""The defaults of each group."""

Tenant = Annotated[str | None, arg("Tenant of the assignment. Default: none.")]
ConnectorName = Annotated[str | None, arg("Only this connector, such as imap_mailbox.")]
Wide = Annotated[bool, arg("Print all columns, however wide the terminal is.")]
Limit = Annotated[int, arg("Maximum number of entries. Default: 50.")]

# ---- checks ----------------------------------------------------------------------------------------------------------


def check_number(flag: str, value: float | None, low: float, high: float, accepted: str) -> None:
    """Refuse a number outside of `low` … `high`; None, an option that is absent, passes."""
    if value is not None and not low <= value <= high:
        shown = value if isinstance(value, int) else f"{value:g}"
        raise CommandError(f"{flag}: {shown} is not accepted: {accepted}")


def check_whole(flag: str, value: int, high: int = MOST_LISTED) -> None:
    check_number(flag, value, 1, high, f"a whole number from 1 to {high}")


def check_seconds(flag: str, value: float | None) -> None:
    check_number(flag, value, 0, LONGEST_S, "seconds, 0 or more")


def checked_duration(flag: str, text: str) -> float:
    """The seconds of a duration: `90s`, `15m`, `2h`, `7d`."""
    seconds = duration_s(text)
    if seconds is None or seconds > LONGEST_S:
        raise CommandError(f"{flag}: {text[:60]!r} is not accepted: a duration such as 90s, 15m, 2h, 7d")
    return seconds


def moment_of(flag: str, text: str) -> datetime:
    """
    The time of a flag, ISO 8601; without a zone it is local.

    A local time that a clock change skips is taken later, never earlier: so `timestamp` reads it, and `astimezone` not.
    """
    try:
        return datetime.fromtimestamp(datetime.fromisoformat(text).timestamp(), UTC).astimezone()
    except (ValueError, OverflowError, OSError):
        accepted = "a time such as 2026-01-25T21:15:00Z, or without a zone for local time"
        raise CommandError(f"{flag}: {text[:60]!r} is not accepted: {accepted}") from None


# ---- settings --------------------------------------------------------------------------------------------------------


def is_unconfigured(config: str | None) -> bool:
    """True when neither a flag, a file nor the environment says anything: then the configuration reader, slow to
    import, need not be loaded. A gate in the environment is checked all the same."""
    from reefknot.policy.layers import PREFIX, QUEUE, RETRIES, find, gate

    if config is not None or any(name.startswith(PREFIX) for name in os.environ):
        return False
    if find(None, environ=os.environ, cwd=Path.cwd()) is not None:
        return False
    for name in (QUEUE, RETRIES):
        gate(name, os.environ, None)  # raises for a value that it does not accept
    return True


def load(config: str | None, *, forgiving: bool = False) -> Settings:
    """The settings in force, or an error with every mistake in them."""
    from reefknot.policy.settings import load_settings

    return load_settings(config, environ=os.environ, cwd=Path.cwd(), forgiving=forgiving)


def settings(config: str | None, *, forgiving: bool = False) -> Settings:
    """The settings in force, their warnings printed on stderr."""
    found = load(config, forgiving=forgiving)
    for warning in found.warnings:
        say(f"warning: {warning}", level="warning")
    return found


_BASELINE = {
    "retries": "every failure is retried alike, after 100, 200 and 300 ms",
    "queue": "the queue of a worker has no bound",
}
"""What the baseline does, by the gate that is off."""


def warn_of_baseline(found: Settings) -> None:
    """Say what the baseline does and how to leave it: in one sentence where no file is there, else for each gate."""
    gates = {"retries": found.retries_gate, "queue": found.queue_gate}
    off = {name: gate for name, gate in gates.items() if not gate}
    if found.path is None and len(off) == 2 and all(gate.origin == "default" for gate in off.values()):
        say(
            f"No reefknot.yaml here: {', and '.join(_BASELINE.values())} (the baseline). To switch to v2, which retries"
            " by kind of failure and bounds the queue: reefknot init",
            level="warning",
        )
        return
    for name, gate in off.items():
        if gate.origin.startswith("missing file"):
            continue  # the warning about that file says it
        way = _way_out(name, gate.origin, found)
        text = f"worker.{name}.v2 is off ({relative(gate.origin)}): {_BASELINE[name]}. To switch it on: {way}"
        say(text, level="warning")


def _way_out(name: str, origin: str, found: Settings) -> str:
    """Advice on turning a gate on, given what has turned it off."""
    variable = f"WORKER_{name.upper()}_V2_ENABLED"
    if origin.startswith("environment"):
        return f"{variable}=true; the environment overrides the file"
    file = "reefknot.yaml (`reefknot init` writes one)" if found.path is None else relative(str(found.path))
    return f"worker.{name}.v2.enabled: true in {file}, or {variable}=true"


def settings_to_look(config: str | None) -> tuple[Settings, tuple[str, ...]]:
    """
    The settings that a look at a store needs, their mistakes and warnings printed on stderr, and the mistakes.

    What runs something refuses such a configuration.
    """
    from reefknot.policy import settings as reading
    from reefknot.policy.layers import load_tree

    tree, path = load_tree(config, environ=os.environ, cwd=Path.cwd())
    found, mistakes = reading.settings_to_look(tree, path, environ=os.environ)
    lines = [relative(str(one)) for one in mistakes]
    for line in (*lines, *found.warnings):
        say(f"warning: {line}", level="warning")
    return found, tuple(lines)


def unwritable(name: str, error: OSError | ValueError) -> CommandError:
    """The refusal of a file that cannot be written, by the name that was given for it."""
    reason = getattr(error, "strerror", None) or "cannot be written"
    code = Exit.FORBIDDEN if isinstance(error, PermissionError) else Exit.USAGE
    return CommandError(f"{printable(name)}: {reason.lower()}", code)
