"""
The blocks of a worker by name: the standard ones, and Python functions under `@block`.

`@block("invoice.render")` registers a function of (inputs, context) and its options; a worker finds it by `--module`,
or by an entry point of the group `reefknot.blocks`. Modules are named on the command line or by installed packages,
never by data that came in. A plain function runs in a thread, where it cannot be interrupted (`steps/threads.py`).
Standard blocks have short names as well: `http` is `http.request`.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, TypeVar, Unpack

from msgspec import Struct

from reefknot.core.canonical import json_value
from reefknot.core.failure import ErrorCode
from reefknot.errors import ConfigurationError, NotJsonError, ParameterError, ParameterTypeError
from reefknot.queue.model.follow_ups import FollowUp, Gather, follow_ups_in
from reefknot.queue.model.messages import StepResult
from reefknot.runtime.user_modules import import_user_module
from reefknot.steps.addresses import HttpSettings
from reefknot.steps.fs import BlobGet, BlobPut, Delete, Folders, FsSettings
from reefknot.steps.http import HttpRequest
from reefknot.steps.inputs import failed
from reefknot.steps.port import Block, BlockContext
from reefknot.steps.sql import SqlQuery
from reefknot.steps.sql_rows import SqlSettings
from reefknot.steps.step_options import BlockOptions, StepOptions, caller_place, checked_options
from reefknot.steps.threads import FunctionsOverdueError, function_threads
from reefknot.steps.typed_inputs import InputMismatchError, InputReader, Model, caller_names, input_reader, outputs_of

GROUP = "reefknot.blocks"
_TYPE = re.compile(r"[a-z][a-z0-9_-]{0,63}(?:\.[a-z0-9][a-z0-9_-]{0,63}){0,7}")
_ACCEPTED_TYPE = "a name in lower case, with dots between its parts: invoice.render"
_ACCEPTED_ANSWER = "a dict of outputs, a model of them, a StepResult, follow-ups (rk.then, rk.gather) or None"

Outputs = Mapping[str, object] | Model | StepResult | FollowUp | Gather | Sequence[FollowUp | Gather] | None
BlockFunction = Callable[[Any, BlockContext], Outputs | Awaitable[Outputs]]
"""A step. The type of its inputs is its own: a mapping, or a model that they are read into."""
Function = TypeVar("Function", bound=BlockFunction)


class PythonBlock:
    """A Python function as a block."""

    def __init__(
        self,
        type_name: str,
        function: BlockFunction,
        *,
        options: StepOptions | None = None,
        reader: InputReader | None = None,
    ) -> None:
        """`reader` makes the argument of the function from the inputs; without one they are passed as they are."""
        options = options or StepOptions()
        self.type = type_name
        self.policy = options.policy
        self.place = options.place
        self.rule = options.rule
        self.resource_class = options.resource_class
        self.function = function
        self._destination = options.destination or type_name
        self._reader = reader
        self._awaits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
        )

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return self._destination

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        """The result of the function. Its exceptions are left to the worker; inputs that do not fit are a failure."""
        argument: Any = inputs
        if self._reader is not None:
            try:
                argument = self._reader(inputs)
            except InputMismatchError as mismatch:
                return failed(ErrorCode.invalid_input, str(mismatch))
        answer: Any
        if self._awaits:
            called: Any = self.function(argument, context)
            answer = await called
        else:
            work = partial(copy_context().run, _called, self.function, argument, context)
            try:
                answer = await function_threads().run(self.type, work, within=context.seconds)
            except FunctionsOverdueError as error:
                return failed(ErrorCode.resource_unavailable, str(error))
            if isinstance(answer, _Raised):
                raise answer.error
            if inspect.isawaitable(answer):
                answer = await answer
        if (found := follow_ups_in(answer)) is not None:
            asked = {id(one) for one in context.follow_ups}  # by the context, and returned as well
            context.follow_ups.extend(one for one in found if id(one) not in asked)
            return StepResult()
        return self._result(answer)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _result(self, answer: object) -> StepResult:
        if isinstance(answer, StepResult):
            return answer
        if answer is None:
            return StepResult()
        try:
            outputs = answer if type(answer) is dict else outputs_of(answer)
            if not isinstance(outputs, dict | Mapping):
                text = f"the block {self.type} returned {type(outputs).__name__}; accepted: {_ACCEPTED_ANSWER}"
                return failed(ErrorCode.execution_failed, text)
            return StepResult(outputs=json_value(dict(outputs)))
        except NotJsonError as error:
            return failed(ErrorCode.execution_failed, f"the block {self.type} returned what JSON cannot say: {error}")


class _Raised(Struct, frozen=True):
    """An exception that no future can carry to the task that waits for it."""

    error: BaseException


def _called(function: BlockFunction, inputs: Any, context: BlockContext) -> Any:
    """The function's answer, or what it raised where a future would lose it, or close the task with it."""
    try:
        return function(inputs, context)
    except (StopIteration, GeneratorExit) as error:
        return _Raised(error)
    except KeyboardInterrupt as error:  # of the function itself: signals reach the main thread alone
        return failed(ErrorCode.execution_failed, f"KeyboardInterrupt: {error}".removesuffix(": "))


class BlockRegistry:
    """Blocks by their type; a type has one block."""

    def __init__(self) -> None:
        self._blocks: dict[str, Block] = {}

    def add(self, block: Block) -> None:
        known = self._blocks.get(block.type)
        if known is not None and not _is_same_function(known, block):
            holder = ".".join(filter(None, _home_of(known))) or type(known).__name__
            raise ParameterError("type", block.type, f"a type that no other block has; this one is of {holder}")
        self._blocks[block.type] = block

    def blocks(self) -> dict[str, Block]:
        return dict(self._blocks)

    def __contains__(self, type_name: str) -> bool:
        return type_name in self._blocks


registry = BlockRegistry()
"""The registry that `@block` fills. A process has one, like it has one `sys.modules`."""


def block(
    type_name: str, *, into: BlockRegistry | None = None, **options: Unpack[BlockOptions]
) -> Callable[[Function], Function]:
    """
    Register a function as a step of this type; it stays an ordinary function.

    It is called with the inputs and a context, and returns a dict of outputs, a model of them, a `StepResult`, or None.
    Inputs whose annotated type is a pydantic model, a dataclass, a `msgspec.Struct` or a `TypedDict` are read into it
    first; those that do not fit fail the step for good. `attempts`, `base_delay`, `max_delay`, `multiplier`, `jitter`,
    `timeout` (all executions and waits, in seconds) and `attempt_timeout` (one of them) are its policy, over the
    defaults of all steps: what the configuration says of this type, and an assignment's options, come before it. `on`
    says which of its exceptions are retried, as in `retry`: classes, or a function of the exception that answers with a
    truth value or seconds; an `async def` is awaited.
    `resource_class` names the slots it runs in; a worker that loads it has them. `destination` names what it talks to,
    for the throttle and the breaker; by default its type.
    """
    step = checked_options(options, caller_place(1))
    if not isinstance(type_name, str) or not _TYPE.fullmatch(type_name):
        kind = ParameterError if isinstance(type_name, str) else ParameterTypeError
        raise kind("type_name", type_name, _ACCEPTED_TYPE)
    names = caller_names(1)

    def register(function: Function) -> Function:
        if not callable(function):
            raise ParameterTypeError("function", function, "a function of (inputs, context)")
        _check_signature(function)
        target = registry if into is None else into
        target.add(PythonBlock(type_name, function, options=step, reader=input_reader(function, names)))
        return function

    return register


def load_module(name: str, *, path: str | None = None, others: Callable[[], object] = dict) -> dict[str, Block]:
    """
    Import a module, so that its `@block`s register. Returns all that are registered.

    A module without any is refused, unless it has registered something else: then `others` returns another value.

    `name` is a module's name (`pkg.steps`), or its file (`steps.py`, `./steps.py`, `pkg/steps.py`). `path` is the
    folder in which it is looked for, before all others.
    """
    before, others_before = registry.blocks(), others()
    module = import_user_module(name, path=path).__name__
    after = registry.blocks()
    if after == before and others() == others_before and not any(_home_of(one)[0] == module for one in after.values()):
        raise ConfigurationError([f"--module {name}: it has no function under @reefknot.block"])
    return after


def load_entry_points(found: Iterable[EntryPoint] | None = None) -> dict[str, Block]:
    """The blocks that installed packages offer: a function, a block, or a class of blocks, under the entry's name."""
    problems = []
    loaded: dict[str, Block] = {}
    for entry in entry_points(group=GROUP) if found is None else found:
        try:
            one = _offered_block(entry.name, entry.load())
            loaded[one.type] = one
        except Exception as error:  # a third party's package
            problems.append(f"entry point {entry.name} = {entry.value}: {type(error).__name__}: {error}")
    if problems:
        raise ConfigurationError(problems)
    return loaded


def _offered_block(name: str, thing: Any) -> Block:
    if inspect.isclass(thing):
        thing = thing()
    if hasattr(thing, "run") and hasattr(thing, "destination") and hasattr(thing, "type"):
        made: Block = thing
        return made
    if not _TYPE.fullmatch(name):
        raise ParameterError("name", name, _ACCEPTED_TYPE)
    _check_signature(thing)
    return PythonBlock(name, thing, reader=input_reader(thing))


def _check_signature(function: Any) -> None:
    try:
        inspect.signature(function).bind({}, None)
    except ValueError:
        return  # a builtin that does not say what it takes
    except TypeError as error:
        raise ParameterTypeError("function", function, f"a function of (inputs, context); {error}") from None


def _is_same_function(known: Block, new: Block) -> bool:
    """Whether both are the same function, which a module that is imported again registers again."""
    home = _home_of(new)
    return home == _home_of(known) and home[1] != ""


def _home_of(one: Block) -> tuple[str, str]:
    """Module and name of a block's function; empty for a block that is not a Python function."""
    function = getattr(one, "function", None)
    return str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))


ALIASES: Mapping[str, str] = {
    "http": "http.request",
    "fs_blob_put": "fs.blob_put",
    "fs_blob_get": "fs.blob_get",
    "sql": "sql.query",
}


class BlockSettings(Struct, frozen=True):
    """Settings of the standard blocks. By default they reach public addresses, and neither files nor databases."""

    http: HttpSettings = HttpSettings()
    fs: FsSettings = FsSettings()
    sql: SqlSettings = SqlSettings()


def standard_blocks(settings: BlockSettings | None = None) -> dict[str, Block]:
    """The blocks of this package. Without its library, `http.request` fails and says what to install."""
    settings = settings or BlockSettings()
    folders = Folders(settings.fs)
    files = BlobPut(folders), BlobGet(folders), Delete(folders)
    blocks: list[Block] = [_http_block(settings), *files, SqlQuery(settings.sql)]
    return {block.type: block for block in blocks}


def _http_block(settings: BlockSettings) -> Block:
    if not all(map(find_spec, ("httpcore2", "httpx2"))):
        return PythonBlock("http.request", _http_is_not_installed)
    return HttpRequest(settings.http)


async def _http_is_not_installed(inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
    return failed(
        ErrorCode.execution_failed, "http.request needs the extra 'http': pip install '.[http]' in a checkout"
    )


def by_name(*groups: Mapping[str, Block]) -> dict[str, Block]:
    """All blocks under all their names. Two blocks of one type are a `ConfigurationError`."""
    blocks: dict[str, Block] = {}
    for group in groups:
        for name, block in group.items():
            if name in blocks or name in ALIASES:
                raise ConfigurationError([f"block {name}: there is another block of this type; give it another name"])
            blocks[name] = block
    for alias, name in ALIASES.items():
        if name in blocks:
            blocks[alias] = blocks[name]
    return blocks
