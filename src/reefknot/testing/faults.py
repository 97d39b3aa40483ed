"""
Faults and stand-ins for the steps of a system under test.

Each step of the system is wrapped: the wrapper records the inputs of every execution, fails those that the test wants
to fail, and answers in place of the step where the test gave an answer. Everything around the step is as in production:
classification, policies, throttle, breaker, time limits and audit see the failure as if the step itself had failed.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from msgspec import Struct

from reefknot.core import checks
from reefknot.core.canonical import canonical, json_value
from reefknot.core.failure import ErrorCode
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.queue.model.messages import StepResult
from reefknot.runtime.clocks import VirtualLoop
from reefknot.steps.inputs import failed
from reefknot.steps.port import Block, BlockContext
from reefknot.steps.python import BlockFunction, PythonBlock

MOST_FAULTS = 1_000_000
INJECTED = "injected by fail()"

Answer = Mapping[str, Any] | StepResult | None | BlockFunction
"""An answer in place of a step: outputs, a result, or a function of (inputs, context)."""


class Fault(Struct, frozen=True):
    """A failure of executions that a test asked for: an exception that is raised, or a result."""

    error: BaseException | type[BaseException] | None
    result: StepResult | None
    delay: float

    async def happen(self) -> StepResult:
        """The failure, after its delay."""
        if self.delay:
            await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def fault(error: object, status: object, delay: float) -> Fault:
    """The fault of these arguments of `fail`, checked."""
    if error is not None and status is not None:
        raise ParameterError("status", status, "not together with error; give one of them")
    if status is not None:
        code = checks.whole_number("status", status, least=400, most=599)
        text = f"HTTP {code}, {INJECTED}"
        return Fault(None, failed(ErrorCode.http_error, text, http_status_code=code), delay)
    if error is None:
        return Fault(ConnectionError(INJECTED), None, delay)
    if isinstance(error, BaseException) or (isinstance(error, type) and issubclass(error, BaseException)):
        return Fault(error, None, delay)
    raise ParameterTypeError("error", error, "an exception, such as ConnectionError('refused')")


class WrappedBlock:
    """A step of a system under test. What the test did not change is the step's own."""

    def __init__(self, block: Block, loop: VirtualLoop) -> None:
        self.block = block
        self.type = block.type
        self.inputs: list[dict[str, Any]] = []
        """The inputs of every execution, the oldest first."""
        self._loop = loop
        self._faults: list[tuple[Fault, float]] = []
        self._stand_in: PythonBlock | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)

    def fail(self, one: Fault, times: float) -> None:
        """Fail this many executions, after those that are to fail already; 0 ends all of them."""
        self._faults = [*self._faults, (one, times)] if times else []

    def answer(self, given: Answer) -> None:
        """Answer in place of the step from now on."""
        self._stand_in = PythonBlock(self.type, _function_of(given))

    def destination(self, inputs: Mapping[str, Any]) -> str:
        """The destination of the step itself, so that throttle and breaker are those of production."""
        return self.block.destination(inputs)

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        """Run one execution: a fault, the stand-in's answer, or the step's own."""
        self.inputs.append(dict(inputs))
        if self._faults:
            one, times = self._faults[0]
            left = [(one, times - 1)] if times > 1 else []
            self._faults = [*left, *self._faults[1:]]
            return await one.happen()
        if self._stand_in is not None:
            return await self._stand_in.run(inputs, context)
        with self._real_time():
            return await self.block.run(inputs, context)

    def _real_time(self) -> AbstractContextManager[None]:
        """A scope in which virtual time waits for a standard step, whose servers, files and processes are real."""
        return nullcontext() if isinstance(self.block, PythonBlock) else self._loop.holding()

    async def close(self) -> None:
        await self.block.close()


def _function_of(given: Answer) -> BlockFunction:
    if callable(given):
        return _checked_function(given)
    if isinstance(given, StepResult) or given is None:
        return lambda inputs, context: given
    if not isinstance(given, Mapping):
        accepted = "a mapping of outputs, a StepResult, None, or a function of (inputs, context)"
        raise ParameterTypeError("answer", given, accepted)
    canonical(dict(given), "answer")  # refuses what JSON cannot say, with its place
    outputs: Any = json_value(dict(given))
    return lambda inputs, context: outputs


def _checked_function(function: Callable[..., Any]) -> BlockFunction:
    from inspect import signature

    try:
        signature(function).bind({}, None)
    except TypeError as error:
        raise ParameterTypeError("answer", function, f"a function of (inputs, context); {error}") from None
    return function
