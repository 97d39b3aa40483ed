"""
The port of a block: runs one type of step, one attempt at a time.

A block takes inputs and a context, and returns a result; it never retries. It may raise: the worker classifies the
error. The context holds a key for sinks that deduplicate, and the seconds that are left. By it a step says how far it
has come: `checkpoint`, `progress`, `log`.
"""

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from reefknot.core.failure import Failure
from reefknot.policy.model.book import FieldValue, Layer, Patch, patch
from reefknot.queue.model.messages import StepResult
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
