"""What is worth another try when nobody said."""

import pytest

from reefknot.core.failure import ErrorCode, FailureType
from reefknot.retrying.failures import by_nature, http_errors, read_failure


class Declared(Exception):
    def __init__(self, **said: object) -> None:
        super().__init__("it broke")
        self.__dict__.update(said)


class Touchy(Exception):
    @property
    def error_code(self) -> ErrorCode:
        raise RuntimeError("do not look")


def judged(error: Exception) -> object:
    return by_nature(error, read_failure(error))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ErrorCode.network_error, True),
        (ErrorCode.system_overload, True),
        (ErrorCode.invalid_input, False),
        (ErrorCode.quota_exceeded, False),
        (ErrorCode.http_error, True),
    ],
)
def test_a_declared_code_speaks_for_itself(code: ErrorCode, expected: bool) -> None:
    assert judged(Declared(error_code=code)) is expected


def test_a_declared_code_asks_the_status_beside_it() -> None:
    assert judged(Declared(error_code=ErrorCode.http_error, status_code=404)) is False
    assert judged(Declared(error_code=ErrorCode.http_error, status_code=503)) is True


@pytest.mark.parametrize("failure_type", list(FailureType))
def test_a_declared_failure_type_speaks_for_itself(failure_type: FailureType) -> None:
    expected = failure_type in (FailureType.TRANSIENT, FailureType.RATE_LIMITED)

    assert judged(Declared(failure_type=failure_type)) is expected


def test_what_is_declared_in_other_words_is_not_heard() -> None:
    assert judged(Declared(error_code="network_error")) is False


def test_an_attribute_that_raises_says_nothing() -> None:
    assert judged(Touchy("connection refused")) is False


def test_words_alone_are_no_outage() -> None:
    assert http_errors(ValueError("timeout must be positive")) is False
    assert http_errors(ConnectionResetError("gone")) is True
