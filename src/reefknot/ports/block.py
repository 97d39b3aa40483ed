"""
A step that can be run.

A block is given inputs and a context, and gives a result; it never retries. It may raise: the worker reads the error.
It gets a key to hand to a sink that deduplicates, and the seconds it has.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from reefknot.core.messages import StepResult


class BlockContext(Struct, frozen=True):
    """What a block may know about why it runs."""

    assignment_id: str
    attempt: int
    idempotency_key: str
    seconds: float
    """What is left for this attempt."""
    tenant_id: str | None = None
    trace_id: str | None = None


class Block(Protocol):
    """Runs one kind of step, once."""

    @property
    def type(self) -> str:
        """As assignments name it: `http.request`."""

    def destination(self, inputs: Mapping[str, Any]) -> str:
        """What it will talk to, for the throttle and the breaker: a host, a database, a folder."""

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        """One attempt."""

    async def close(self) -> None:
        """Let go of connections."""
