"""
cli.options
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Parameter

from reefknot.cli.app import CommandError
from reefknot.cli.output import printable, say

if TYPE_CHECKING:
    from reefknot.config.settings import Settings

Config = Annotated[str | None, Parameter(help="The configuration file, instead of the one that would be found.")]
Json = Annotated[bool, Parameter(help="JSON on stdout, for programs.")]
Source = Annotated[str | None, Parameter(help="A configured source; its own policy is laid over its connector's.")]
Seed = Annotated[int | None, Parameter(help="Draw the waits with this seed, instead of giving their ranges.")]
Target = Annotated[str | None, Parameter(help="block:TYPE, connector:TYPE or operation:NAME.")]
T = TypeVar("T")


def one_of(flag: str, given: str, accepted: dict[str, T]) -> T:
    """The value that a word stands for, or an error that names them all."""
    found = accepted.get(given.lower().replace("-", "_"))
    if found is None:
        raise unknown(flag, given, accepted)
    return found


def unknown(flag: str, given: str, accepted: Iterable[str], *, also: str = "", prefix: str = "") -> CommandError:
    """What to say of a word that means nothing. A `prefix` that all share is no likeness."""
    from reefknot.config.layers import suggest

    words = list(accepted)
    shown = given if len(given) <= 60 else given[:59] + "…"
    hint = suggest(given.removeprefix(prefix), [word.removeprefix(prefix) for word in words])
    hint = hint.replace("did you mean '", f"did you mean '{prefix}", 1)
    listed = ", ".join(words) or "none is configured"
    return CommandError(f"{flag}: {printable(shown)!r} is not known; accepted: {listed}{also}{hint}")


def load(config: str | None) -> Settings:
    """The settings in force, or every mistake in them."""
    with _without_plugins():
        from reefknot.config.settings import load_settings

    return load_settings(config, environ=os.environ, cwd=Path.cwd())


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Plugins of pydantic are for the models of applications. Looking for them is a good part of a cold start."""
    name = "PYDANTIC_DISABLE_PLUGINS"
    before = os.environ.get(name)
    os.environ[name] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def settings(config: str | None) -> Settings:
    """The settings in force. What a person should know about them is said on stderr."""
    found = load(config)
    for warning in found.warnings:
        say(f"warning: {warning}")
    return found


Workers = Annotated[int, Parameter(help="How many workers, 1 unless said.")]
Modules = Annotated[
    list[str] | None,
    Parameter(name="--module", help="A module with steps of your own under @reefknot.block.", negative=()),
]
EngineOrMemory = Annotated[
    str | None,
    Parameter(help="sqlite:PATH or memory:. Without it, the configured one, or sqlite:.reefknot/state.db."),
]


Engine = Annotated[
    str | None, Parameter(help="The store: sqlite:PATH. Without it, the configured one, or sqlite:.reefknot/state.db.")
]
Actor = Annotated[
    str | None, Parameter(name="--as", help="Who does this, for the record, instead of the user of this system.")
]
DryRun = Annotated[bool, Parameter(help="Say what would be done, and do nothing.")]
