"""
What a block was asked for, field by field.

A field that is missing, unknown or of the wrong kind is refused by name, with what would have been accepted. Nothing is
guessed and nothing is converted.
"""

from base64 import b64decode
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

from reefknot.core.failure import ErrorCode
from reefknot.core.messages import StepResult, StepStatus
from reefknot.errors import shown

TIMEOUT = "timeout_ms"
"""Every block takes it: the assignment reads its time from the same place."""


class Refusal(Exception):  # noqa: N818 - it is an answer on its way out, not an error of ours
    """A step that ends here, with its code and its words. It never leaves a block."""

    def __init__(self, code: ErrorCode, message: str, **metadata: Any) -> None:
        super().__init__(message)
        self.code = code
        self.metadata = metadata

    @property
    def result(self) -> StepResult:
        return failed(self.code, str(self), **self.metadata)


def failed(code: ErrorCode, message: str, **metadata: Any) -> StepResult:
    """A step that did not work."""
    return StepResult(StepStatus.ERROR, code, error_message=message, metadata=metadata)


def invalid(field: str, given: object, accepted: str) -> Refusal:
    return Refusal(ErrorCode.invalid_input, f"{field}: {shown(given)} is not accepted; accepted: {accepted}")


class Inputs:
    """The inputs of one step, checked as they are read."""

    def __init__(self, given: Mapping[str, Any], *known: str) -> None:
        accepted = (*known, TIMEOUT)
        for name in given:
            if name not in accepted:
                text = f"{str(name)[:60]}: no such input; accepted: {', '.join(accepted)}"
                raise Refusal(ErrorCode.invalid_input, text)
        self._given = given

    def has(self, name: str) -> bool:
        """Whether it was said at all; null is the same as not said."""
        return self._given.get(name) is not None

    def any(self, name: str) -> Any:
        return self._given.get(name)

    def need(self, *names: str, accepted: str) -> None:
        """One of these fields has to be there."""
        if not any(self.has(name) for name in names):
            text = f"{' or '.join(names)}: missing; accepted: {accepted}"
            raise Refusal(ErrorCode.missing_required_field, text)

    def text(self, name: str, *, accepted: str, default: str | None = None) -> str:
        if default is None:
            self.need(name, accepted=accepted)
        value = self._given.get(name, default)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise invalid(name, value, accepted)
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._given.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(name, value, "true or false")
        return value

    def octets(self, name: str) -> bytes:
        """Bytes, from their base64 form."""
        value = self.text(name, accepted="base64 text")
        try:
            return b64decode(value, validate=True)
        except ValueError:
            raise invalid(name, value, "base64 text") from None

    def seconds(self, most: float) -> float:
        """The attempt's own time limit, never longer than what is left."""
        value = self._given.get(TIMEOUT)
        if value is None:
            return most
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise invalid(TIMEOUT, value, "a number of milliseconds above 0")
        return min(most, value / 1000)


def limit(seconds: float) -> float | None:
    """As asyncio wants it: None for no limit."""
    return None if seconds == inf else seconds
