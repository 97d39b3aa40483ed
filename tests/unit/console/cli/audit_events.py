"""Stores with audited events."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import apsw
from msgspec import structs

from reefknot.audit.model import event as audited
from reefknot.audit.model.event import AnyEvent, DecisionRecord, IdempotencyEvent, RetryAttempt, RetryExhausted, encode
from reefknot.audit.port import AuditEntry
from reefknot.core.decide import History, Reason, decide
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.stores import opening, port

R = TypeVar("R")
NOON = 1_769_342_400.0
POLICY = RetryPolicy(3, 1.0, jitter="none")
FAILURE = Failure(ErrorCode.network_error, FailureType.TRANSIENT, "it broke", exceptions=("builtins.ConnectionError",))


def in_store(path: Path, work: Callable[[port.Store], Awaitable[R]], **how: Any) -> R:
    async def main() -> R:
        async with opening.open_store(f"sqlite:{path}", **how) as store:
            return await work(store)

    return asyncio.run(main())


def change(path: Path, *statements: str) -> None:
    """What another program does to the file of a store."""
    connection = apsw.Connection(str(path))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def at(second: float) -> str:
    return audited.timestamp(NOON + second)


def decision(attempts: int, message: str = "it broke") -> DecisionRecord:
    history, failure = History(attempts, 0.0, 0.0), structs.replace(FAILURE, message=message)
    return DecisionRecord.of(decide(POLICY, history, failure, 0.5), POLICY, history, failure, 0.5)


def attempt(second: float, category: str = "RETRY_KV_GET", *, number: int = 1, message: str = "it broke") -> AnyEvent:
    about: Any = {"timestamp": at(second), "retry_category": category, "operation": "get it", "max_attempts": 3}
    about |= {"correlation_id": f"c{number}", "trace_id": f"t{number}", "attempt_number": number}
    raised: Any = {"exception_type": "ConnectionError", "exception_message": message}
    return RetryAttempt(**about, **raised, delay_seconds=2.0 ** (number - 1), decision=decision(number, message))


def exhausted(second: float, category: str = "RETRY_KV_GET") -> AnyEvent:
    about: Any = {"timestamp": at(second), "retry_category": category, "operation": "get it", "total_attempts": 3}
    raised: Any = {"final_exception_type": "ConnectionError", "final_exception_message": "it broke"}
    return RetryExhausted(**about, **raised, reason=Reason.ATTEMPTS_SPENT, decision=decision(3))


STORY: list[AnyEvent] = [
    attempt(0, number=1),
    attempt(1, number=2),
    exhausted(3),
    attempt(10, "RETRY_NATS_PUBLISH"),
    audited.RetryRecovered(
        timestamp=at(11), retry_category="RETRY_NATS_PUBLISH", total_attempts=2, elapsed_seconds=1.0
    ),
    IdempotencyEvent(timestamp=at(12), idempotency_key="order-7", action="record"),
]
"""Two operations and a key; three decisions to retry, one to stop."""


def entry(event: AnyEvent) -> AuditEntry:
    at = audited.timestamp_ms(event.timestamp) or 0
    return AuditEntry(encode(event), event.event_type, at, event.correlation_id, event.trace_id, event.work_id)


def recorded(path: Path, events: list[AnyEvent] = STORY) -> Path:
    async def write(store: port.Store) -> None:
        await store.audit.append([entry(event) for event in events])

    in_store(path, write)
    return path
