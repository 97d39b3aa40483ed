"""
The port of a block: runs one type of step, one attempt at a time.

A block takes inputs and a context, and returns a result; it never retries. It may raise: the worker classifies the
error. The context holds a key for sinks that deduplicate, and the seconds that are left.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from reefknot.core.messages import StepResult


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

    A block may have time limits of its own: `limits`, a mapping of `time_budget` and `attempt_timeout` to seconds.
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


def own_limits(blocks: Iterable[Block]) -> dict[str, Mapping[str, float]]:
    """The time limits that blocks have of their own, by policy target: `block:invoice.render`."""
    limits = {f"block:{block.type}": getattr(block, "limits", {}) for block in blocks}
    return {target: own for target, own in limits.items() if own}
