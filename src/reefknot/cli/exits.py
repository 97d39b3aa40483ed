"""
How a command ends.

One number per kind of ending, and the words that go with it. An error of the person who typed is never a traceback;
what is our own mistake says so, and `REEFKNOT_TRACEBACK=1` shows it whole.
"""

from __future__ import annotations

from enum import IntEnum

from reefknot.cli.output import where
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
