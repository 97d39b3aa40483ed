"""
The port of a block: runs one type of step, one attempt at a time.

A block takes inputs and a context, and returns a result; it never retries. It may raise: the worker classifies the
error. The context holds a key for sinks that deduplicate, and the seconds that are left.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from reefknot.core.messages import StepResult
from reefknot.core.retry.book import Layer, Patch, patch


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


class Block(Protocol):
    """
    The implementation of one type of step.

    A block may have a policy of its own, `policy` (fields of a `RetryPolicy`), which is written at `place` (a file and
    a line), and a `resource_class` of its own.
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


def own_policies(blocks: Iterable[Block]) -> dict[str, Patch]:
    """The policies that blocks have of their own, by policy target: `block:invoice.render`."""
    found: dict[str, Patch] = {}
    for block in blocks:
        fields: Mapping[str, Any] = getattr(block, "policy", {})
        if fields:
            found[f"block:{block.type}"] = patch(Layer.STEP, getattr(block, "place", "") or "@rk.block", fields)
    return found


def own_classes(blocks: Iterable[Block]) -> dict[str, str]:
    """The resource classes that blocks have of their own, by their types."""
    classes = {block.type: getattr(block, "resource_class", "") for block in blocks}
    return {name: given for name, given in classes.items() if given}
