"""
The two gates between the baseline and v2.

The environment wins both ways when it says yes or no; unset or empty it is silent, and the file speaks; else the gate
is off. Anything else in the variable is a mistake, not a guess.
"""

from collections.abc import Mapping

from msgspec import Struct

from reefknot.config.document import Mark, Problem
from reefknot.errors import ConfigurationError

RETRIES = "WORKER_RETRIES_V2_ENABLED"
QUEUE = "WORKER_QUEUE_V2_ENABLED"

_YES = frozenset({"true", "1", "yes", "on"})
_NO = frozenset({"false", "0", "no", "off"})


class Gate(Struct, frozen=True):
    """Whether v2 is in force, and who said so."""

    on: bool
    said_by: str

    def __bool__(self) -> bool:
        return self.on


def gate(variable: str, environ: Mapping[str, str], configured: bool | None, *, where: str = "the file") -> Gate:
    """The state of one gate."""
    said = said_by_environment(variable, environ)
    if said is not None:
        return Gate(said, f"environment {variable}")
    if configured is not None:
        return Gate(configured, where)
    return Gate(False, "default")


def said_by_environment(variable: str, environ: Mapping[str, str]) -> bool | None:
    """What the environment says; None when it is silent."""
    written = environ.get(variable, "").strip().lower()
    if not written:
        return None
    if written in _YES:
        return True
    if written in _NO:
        return False
    message = f"{environ[variable]!r} is not accepted; accepted: true, 1, yes, on, false, 0, no, off, or nothing"
    raise ConfigurationError((Problem(Mark(f"environment {variable}"), "", message),))
