"""A failure is data: numbers that never change, a category by thousands, a readable name."""

import msgspec
import pytest

from reefknot.core.failure import ErrorCategory, ErrorCode, Failure, FailureType
from tests.rows import for_each_row

NUMBERS = (
    {"none": 0, "invalid_input": 1001, "missing_required_field": 1002, "invalid_format": 1003}
    | {"execution_failed": 2001, "resource_unavailable": 2002, "permission_denied": 2003, "quota_exceeded": 2004}
    | {"network_error": 3001, "connection_timeout": 3002, "http_error": 3003}
    | {"internal_error": 4001, "system_overload": 4002, "cancelled_by_user": 5001, "cancelled_by_timeout": 5002}
)


def test_the_codes_have_the_numbers_and_names_of_the_wire_and_no_others() -> None:
    assert {code.name: int(code) for code in ErrorCode} == NUMBERS

    assert ErrorCode.connection_timeout.wire == "CONNECTION_TIMEOUT"
    assert [kind.value for kind in FailureType] == ["transient", "rate_limited", "permanent", "unknown"]


@for_each_row(
    ("thousands", "category"),
    [(0, "none"), (1, "validation"), (2, "execution"), (3, "network"), (4, "system"), (5, "cancellation")],
)
def test_the_thousands_of_a_code_are_its_category(thousands: int, category: str) -> None:
    codes = [code for code in ErrorCode if code // 1000 == thousands]

    assert codes
    assert {code.category for code in codes} == {ErrorCategory(category)}


def test_a_failure_knows_nothing_that_it_was_not_told_and_does_not_change() -> None:
    failure = Failure(ErrorCode.network_error, FailureType.TRANSIENT)
    assert (failure.message, failure.http_status, failure.retry_after, failure.exceptions) == ("", None, None, ())
    assert (failure.exhausted, failure.exception, failure.category) == (False, "", ErrorCategory.NETWORK)

    failure = Failure(
        ErrorCode.http_error, FailureType.RATE_LIMITED, "slow down", 429, 2.5, ("a.B", "builtins.X"), True
    )
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure
    with pytest.raises(AttributeError):
        failure.http_status = 503  # type: ignore[misc]


@for_each_row(
    ("code", "message", "exceptions", "exception", "text"),
    [
        (
            *(ErrorCode.connection_timeout, "too slow"),
            *(("httpx._exceptions.ReadTimeout", "httpx._exceptions.TimeoutException"), "ReadTimeout"),
            "ReadTimeout: too slow",
        ),
        (ErrorCode.none, "", ("Oops",), "Oops", "Oops"),
        (ErrorCode.http_error, "status 503", (), "", "http_error: status 503"),
        (ErrorCode.http_error, "", (), "", "http_error"),
    ],
)
def test_a_failure_is_named_by_its_most_specific_class_else_by_its_code(
    code: ErrorCode, message: str, exceptions: tuple[str, ...], exception: str, text: str
) -> None:
    failure = Failure(code, FailureType.TRANSIENT, message, exceptions=exceptions)

    assert (failure.exception, str(failure)) == (exception, text)
