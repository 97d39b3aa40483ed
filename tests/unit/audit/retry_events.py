"""Events of retries; the fields that a test does not speak of have the usual values."""

from typing import Any

from reefknot.audit.model.event import DecisionRecord, RetryAttempt, RetryExhausted, RetryRefused
from reefknot.core.decide import Reason

AT = "2026-01-25T21:15:00.000Z"


def attempt(decision: DecisionRecord, **fields: Any) -> RetryAttempt:
    usual: dict[str, Any] = {"timestamp": AT, "attempt_number": 1, "max_attempts": 3, "delay_seconds": 0.5}
    usual |= {"exception_type": "NETWORK_ERROR", "exception_message": ""}
    return RetryAttempt(**usual | fields, decision=decision)


def given_up(
    decision: DecisionRecord, kind: type[RetryExhausted | RetryRefused] = RetryExhausted, **fields: Any
) -> RetryExhausted | RetryRefused:
    usual: dict[str, Any] = {"timestamp": AT, "total_attempts": 3, "reason": Reason.ATTEMPTS_SPENT}
    usual |= {"final_exception_type": "NETWORK_ERROR", "final_exception_message": ""}
    return kind(**usual | fields, decision=decision)
