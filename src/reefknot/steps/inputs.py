"""
`Inputs`: the inputs of one step, checked field by field.

A field that is missing, unknown or of the wrong kind is refused by name, with what would have been accepted. Nothing is
guessed and nothing is converted.
"""

import asyncio
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import wraps
from math import inf, isfinite
from typing import Any, TypeVar

from reefknot.core.checks import is_number
from reefknot.core.failure import ErrorCode
from reefknot.errors import shown
from reefknot.queue.model.messages import StepResult, StepStatus
from reefknot.steps.port import BlockContext

TIMEOUT = "timeout_ms"
"""An input of every block: the time limit of one attempt."""


class Refusal(Exception):  # noqa: N818 - it is an answer on its way out, not an error of ours
    """The end of a step with an error code and a message. It never leaves a block."""

    def __init__(self, code: ErrorCode, message: str, **metadata: Any) -> None:
        super().__init__(message)
        self.code = code
        self.metadata = metadata

    @property
    def result(self) -> StepResult:
        return failed(self.code, str(self), **self.metadata)


def failed(code: ErrorCode, message: str, **metadata: Any) -> StepResult:
    """The result of a step that did not work."""
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
        """Whether the input was given; null is the same as not given."""
        return self._given.get(name) is not None

    def value(self, name: str) -> Any:
        return self._given.get(name)

    def require(self, *names: str, accepted: str) -> None:
        """Refuse the step unless at least one of these inputs was given."""
        if not any(self.has(name) for name in names):
            text = f"{' or '.join(names)}: missing; accepted: {accepted}"
            raise Refusal(ErrorCode.missing_required_field, text)

    def text(self, name: str, *, accepted: str, default: str | None = None) -> str:
        if default is None:
            self.require(name, accepted=accepted)
        value = self._given[name] if self.has(name) else default
        if not isinstance(value, str):
            raise invalid(name, value, accepted)
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._given[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise invalid(name, value, "true or false")
        return value

    def base64_bytes(self, name: str) -> bytes:
        """The bytes of a base64 text."""
        value = self.text(name, accepted="base64 text")
        try:
            return b64decode(value, validate=True)
        except ValueError:
            raise invalid(name, value, "base64 text") from None

    def seconds(self, most: float) -> float:
        """The time limit of the attempt: its own, but never longer than `most`."""
        value = self._given.get(TIMEOUT)
        if value is None:
            return most
        if not is_number(value) or not isfinite(value) or value <= 0:
            raise invalid(TIMEOUT, value, "a number of milliseconds above 0")
        return min(most, value / 1000)


B = TypeVar("B")
Run = Callable[[B, Mapping[str, Any], BlockContext], Coroutine[Any, Any, StepResult]]


def answers_refusals(run: Run[B]) -> Run[B]:
    """Decorator of a block's `run`: a refusal becomes the result of the step."""

    @wraps(run)
    async def answered(self: B, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        try:
            return await run(self, inputs, context)
        except Refusal as refusal:
            return refusal.result

    return answered


@asynccontextmanager
async def time_limit(
    seconds: float, problem: str, code: ErrorCode = ErrorCode.resource_unavailable
) -> AsyncIterator[None]:
    """A limit around a part of a step: beyond it the step is refused with `problem`."""
    try:
        async with asyncio.timeout(None if seconds == inf else seconds):
            yield
    except TimeoutError as error:
        raise Refusal(code, f"{problem} within {seconds:.3g} s") from error


def text_or_base64(content: bytes, *, text: str, base64: str) -> dict[str, str]:
    """The output of bytes: under the name `text` when they are UTF-8, else as base64 under the other name."""
    try:
        return {text: content.decode("utf-8")}
    except UnicodeDecodeError:
        return {base64: b64encode(content).decode()}
