"""
The port of a block: runs one type of step, one attempt at a time.

A block takes inputs and a context, and returns a result; it never retries. It may raise: the worker classifies the
error. The context holds a key for sinks that deduplicate, and the seconds that are left. By it a step says how far it
has come: `checkpoint`, `progress`, `log`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, Unpack

from msgspec import Struct, field

from reefknot.core.failure import Failure
from reefknot.errors import EventLoopRunningError
from reefknot.policy.model.book import FieldValue, Layer, Patch, patch
from reefknot.queue.model.follow_ups import FollowUp, Gather, ThenOptions, gather, then
from reefknot.queue.model.messages import ExecResult, StepResult
from reefknot.queue.model.notes import StepProgress, checkpoint_text

StepRule = Callable[[Exception, Failure], Any]
"""Whether an exception of a step is retried: True, False, or the seconds to wait at least; or an awaitable of these."""


class AtOnce:
    """An awaitable of what is done already."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class StepNotes:
    """The notes of a step that are kept nowhere, as in a context made by hand; a worker has them stored."""

    def checkpoint(self, text: bytes) -> Awaitable[None]:
        """Keep a checkpoint, as JSON text."""
        return AtOnce()

    def progress(self, progress: StepProgress) -> None:
        """Keep how far the step has come."""

    def log(self, text: str) -> None:
        """Keep a line of log."""


UNKEPT = StepNotes()
T = TypeVar("T")


class AwaitedPages(Protocol):
    """Pages of results, which are read on this event loop."""

    loop: asyncio.AbstractEventLoop

    def __aiter__(self) -> AsyncIterator[list[ExecResult]]: ...


class Children:
    """
    Results of the work that a step has waited for, in its order.

    `await context.children()` is a list of them, `async for result in context.children()` reads them page by page. In a
    plain function it is `for result in context.children()`.
    """

    def __init__(self, awaited: AwaitedPages | None) -> None:
        self._awaited = awaited

    def __await__(self) -> Generator[Any, None, list[ExecResult]]:
        return self._all().__await__()

    async def _all(self) -> list[ExecResult]:
        return [one async for one in self]

    async def __aiter__(self) -> AsyncIterator[ExecResult]:
        if self._awaited is not None:
            async for page in self._awaited:
                for one in page:
                    yield one

    def __iter__(self) -> Iterator[ExecResult]:
        return iter(_from_thread(self._all(), None if self._awaited is None else self._awaited.loop))


def _from_thread(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None) -> T:
    """The result of a coroutine on the loop of the worker, for a step in a thread."""
    if loop is None:
        return asyncio.run(work)
    if asyncio._get_running_loop() is not None:
        work.close()
        raise EventLoopRunningError
    begin: Callable[..., Future[T]] = getattr(loop, "run_from_thread", None) or (
        lambda work: asyncio.run_coroutine_threadsafe(work, loop)
    )
    return begin(work).result()


class BlockContext(Struct, frozen=True):
    """The context of one attempt."""

    assignment_id: str
    attempt: int
    idempotency_key: str
    seconds: float
    """The time that is left for this attempt."""
    tenant_id: str | None = None
    trace_id: str | None = None
    traceparent: str | None = None
    """The span of this attempt, or that of the caller while tracing is off: for services that the step calls."""
    last_checkpoint: Any = None
    """The last checkpoint of an earlier attempt, on whatever machine that ran; None if there is none."""
    notes: StepNotes = UNKEPT

    def checkpoint(self, value: Any) -> Awaitable[None]:
        """
        Keep a JSON value of up to 64 kB from which the next attempt goes on; it finds it as `last_checkpoint`.

        `await` it in an async step; in a plain function it has waited already, and there is nothing to await. It is
        stored at most once a second, the latest value last, and what is left with the end of the attempt. It holds the
        job for longer, and is progress: a failure or a crash after it counts as the first again. A value that is not
        JSON, or too large, is refused. `LeaseLostError`: another worker has the job by now, or its time is over; stop.
        """
        return self.notes.checkpoint(checkpoint_text(value))

    def progress(self, done: float, of: float | None = None, text: str = "") -> None:
        """Say how far the step has come, for people: so much `done`, `of` so much, and what it does now."""
        self.notes.progress(StepProgress.checked(done, of, text))

    def log(self, text: str) -> None:
        """Keep a line with the job: `reefknot job logs` and its page show it. The last 200 lines are kept, or 32 kB."""
        self.notes.log(text)

    follow_ups: list[FollowUp | Gather] = field(default_factory=list)
    """The work that is submitted when the step has succeeded, in the transaction that stores its result."""
    awaited: AwaitedPages | None = None
    """The results of the work that this has waited for; None outside of a worker."""

    def then(self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[ThenOptions]) -> FollowUp:
        """Let a job follow this step: see `rk.then`."""
        self.follow_ups.append(one := then(job_type, inputs, **options))
        return one

    def gather(self, *children: FollowUp, then: FollowUp | None = None, return_failures: bool = False) -> Gather:
        """Let jobs follow this step, and one that runs when all of them have ended: see `rk.gather`."""
        self.follow_ups.append(one := gather(*children, then=then, return_failures=return_failures))
        return one

    def children(self) -> Children:
        """The results of the work that this step has waited for: of a gather's children, or of the jobs in `after`."""
        return Children(self.awaited)


class Block(Protocol):
    """
    The implementation of one type of step.

    A block may have a policy of its own, `policy` (fields of a `RetryPolicy`), and a `rule` about its exceptions, which
    are written at `place` (a file and a line), and a `resource_class` of its own.
    """

    @property
    def type(self) -> str:
        """The type in assignments: `http.request`."""

    def destination(self, inputs: Mapping[str, Any]) -> str:
        """The destination of these inputs, for the throttle and the breaker: a host, a database, a folder."""

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        """Run one attempt."""

    async def close(self) -> None:
        """Close connections."""


class OwnRule(Struct, frozen=True):
    """The rule of one block about its exceptions, and the file and line that it is written at."""

    ask: StepRule
    place: str

    def retryable(self, verdict: bool) -> FieldValue:
        """The field of a policy that an answer of the rule sets."""
        return FieldValue(verdict, Layer.STEP, self.place)


def own_rules(blocks: Iterable[Block]) -> dict[str, OwnRule]:
    """The rules that blocks have about their exceptions, by policy target."""
    rules = {f"block:{block.type}": (getattr(block, "rule", None), _place(block)) for block in blocks}
    return {target: OwnRule(rule, place) for target, (rule, place) in rules.items() if rule is not None}


def own_policies(blocks: Iterable[Block]) -> dict[str, Patch]:
    """The policies that blocks have of their own, by policy target: `block:invoice.render`."""
    found: dict[str, Patch] = {}
    for block in blocks:
        fields: Mapping[str, Any] = getattr(block, "policy", {})
        if fields:
            found[f"block:{block.type}"] = patch(Layer.STEP, _place(block), fields)
    return found


def _place(block: Block) -> str:
    return getattr(block, "place", "") or "@rk.block"


def own_classes(blocks: Iterable[Block]) -> dict[str, str]:
    """The resource classes that blocks have of their own, by their types."""
    classes = {block.type: getattr(block, "resource_class", "") for block in blocks}
    return {name: given for name, given in classes.items() if given}


def destinations_of(blocks: Mapping[str, Block]) -> Callable[[str, Mapping[str, Any]], str]:
    """The destination of a step by its type and inputs; empty for a type that is not among these blocks."""

    def destination_of(kind: str, inputs: Mapping[str, Any]) -> str:
        block = blocks.get(kind)
        try:
            return "" if block is None else block.destination(inputs)
        except Exception:  # inputs that make no sense; the block itself will say so
            return ""

    return destination_of
