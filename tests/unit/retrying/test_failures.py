"""Exceptions as failures: hints, statuses, attributes that raise, repeated texts, and what is retried by default."""

from datetime import timedelta
from email.utils import format_datetime
from enum import Enum
from http import HTTPStatus
from typing import Any
from urllib.error import URLError

import pytest
from google.api_core import exceptions as google_errors

import reefknot as rk
from reefknot import clock
from reefknot.core.failure import ErrorCode, FailureType
from reefknot.retrying import failures
from reefknot.retrying.exhaustion import MARK, current_scope
from reefknot.retrying.failures import failure_from, http_errors, read_hints, retryable_by_default
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Flaky


class Response:
    """A response as HTTP clients have it."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.status_code = status
        self.headers = headers or {}


class ResponseError(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__(f"answered {response.status_code}")
        self.response = response


def read(status: int, **headers: str) -> tuple[int | None, float | None, bool]:
    return read_hints(ResponseError(Response(status, {name.replace("_", "-"): text for name, text in headers.items()})))


def http_date(seconds: float) -> str:
    from datetime import UTC, datetime

    return format_datetime(datetime.fromtimestamp(clock.wall() + seconds, UTC), usegmt=True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("120", 120.0), (" 7 ", 7.0), ("0", 0.0), ("1.5", 1.5)),
        *((text, None) for text in ("-5", "soon", "", "nan", "1e5", "²", "Fri, 99 Zzz 9999 99:99:99 GMT")),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None),
    ],
)
def test_a_retry_after_header_is_seconds(text: str, seconds: float | None) -> None:
    assert failure_from(ResponseError(Response(503, {"Retry-After": text}))).retry_after == seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((5, 5.0), (0, 0.0), (2.5, 2.5), ("30", 30.0), (timedelta(minutes=1), 60.0), (timedelta(minutes=-1), 0.0)),
        *((value, None) for value in (-1, float("nan"), float("inf"), True, object(), 10**400)),
    ],
)
def test_an_attribute_retry_after_is_heard(value: Any, seconds: float | None) -> None:
    error = ConnectionError("busy")
    error.retry_after = value  # type: ignore[attr-defined]  # as clients do
    assert failure_from(error).retry_after == seconds


@pytest.mark.parametrize("name", ["response", "status_code", "status", "headers", "retry_after", "error_code"])
def test_an_attribute_that_raises_does_not_replace_the_error(name: str, no_wait: VirtualClock) -> None:
    def bites(self: object) -> object:
        raise RuntimeError("do not look")

    biting = type("Biting", (ConnectionError,), {name: property(bites)})
    error = biting("refused")
    fn = Flaky(error)
    assert rk.retry(fn)() == "ok"
    assert fn.calls == 2
    assert failure_from(error).code is rk.ErrorCode.network_error


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        *((URLError(reason), True) for reason in (ConnectionRefusedError(111, "refused"), TimeoutError("timed out"))),
        *((URLError(reason), False) for reason in ("unknown url type: x", FileNotFoundError(2, "no such file"))),
        *((ResponseError(Response(status)), status == 503) for status in (503, 404)),
        (ConnectionResetError("gone"), True),
        (ValueError("timeout must be positive"), False),  # words alone are no outage
    ],
)
def test_an_outage_is_a_connection_a_status_or_what_the_reason_of_a_url_error_means(
    error: Exception, retried: bool
) -> None:
    assert http_errors(error) is retried
    assert rk.http_errors is http_errors


def test_status_and_hint_of_an_answer_are_read_also_as_a_date_or_as_the_reset_of_a_spent_limit(
    virtual_time: VirtualClock,
) -> None:
    failure = failure_from(ResponseError(Response(429, {"retry-after": "3"})))
    assert (failure.http_status, failure.retry_after) == (429, 3.0)
    assert failure.failure_type is rk.FailureType.RATE_LIMITED

    assert read(503, Retry_After=http_date(90))[1] == pytest.approx(90)
    assert read(503, Retry_After=http_date(-90))[1] == 0.0
    assert read(503, Retry_After=http_date(90).replace("GMT", "-0000"))[1] == pytest.approx(90)

    reset = str(int(clock.wall()) + 45)
    failure = failure_from(ResponseError(Response(403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": reset})))
    assert failure.failure_type is rk.FailureType.RATE_LIMITED
    assert failure.retry_after == pytest.approx(45, abs=1)
    left = failure_from(ResponseError(Response(403, {"X-RateLimit-Remaining": "7", "X-RateLimit-Reset": reset})))
    assert (left.failure_type, left.retry_after) == (rk.FailureType.PERMANENT, None)
    odd = failure_from(ResponseError(Response(403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "²"})))
    assert odd.retry_after is None


# ---- a repeated text is not read again -------------------------------------------------------------------------------


class Refused(ConnectionError):
    """A class of this module, so that no other test has raised it."""


@pytest.fixture(autouse=True)
def _nothing_read_before() -> None:
    failures._last_failure.clear()


def test_the_same_words_of_a_class_give_the_same_failure_as_reading_them_anew_and_others_are_read() -> None:
    first = failure_from(Refused("connection refused"))
    again = failure_from(Refused("connection refused"))
    failures._last_failure.clear()
    assert again is first
    assert again == failure_from(Refused("connection refused"))

    assert failure_from(Refused("connection reset")).message == "connection reset"
    assert failure_from(ValueError("connection reset")).exception == "ValueError"


def test_no_secret_is_kept_and_no_more_classes_than_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert "hunter2" not in failure_from(Refused("login failed: password=hunter2")).message
    assert "hunter2" not in repr(failures._last_failure)

    monkeypatch.setattr(failures, "_MAX_CLASSES", 8)
    failures._traits_of.clear()
    for number in range(50):
        failure_from(type(f"Error{number}", (Exception,), {})("text"))
    assert len(failures._last_failure) <= 8


def test_an_error_that_carries_a_hint_or_was_raised_from_an_exhausted_one_is_read_whatever_its_words() -> None:
    failure_from(Refused("busy"))
    hinted, outer, inner = Refused("busy"), Refused("busy"), ConnectionError("inner")
    hinted.retry_after = 3  # type: ignore[attr-defined]
    setattr(inner, MARK, (5, current_scope(), 0))
    outer.__cause__ = inner

    assert failure_from(hinted).retry_after == 3.0
    assert failure_from(Refused("busy")).retry_after is None
    assert failure_from(outer, since=4).exhausted
    assert not failure_from(Refused("busy"), since=4).exhausted


# ---- retried by default ----------------------------------------------------------------------------------------------


class Declared(Exception):
    def __init__(self, **said: object) -> None:
        super().__init__("it broke")
        self.__dict__.update(said)


class Touchy(Exception):
    @property
    def error_code(self) -> ErrorCode:
        raise RuntimeError("do not look")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((Declared(error_code=ErrorCode[name]), True) for name in ("network_error", "system_overload", "http_error")),
        *((Declared(error_code=ErrorCode[name]), False) for name in ("invalid_input", "quota_exceeded")),
        # an HTTP error asks the status beside it
        *((Declared(error_code=ErrorCode.http_error, status_code=status), status == 503) for status in (404, 503)),
        *((Declared(failure_type=kind), True) for kind in (FailureType.TRANSIENT, FailureType.RATE_LIMITED)),
        *((Declared(failure_type=kind), False) for kind in (FailureType.PERMANENT, FailureType.UNKNOWN)),
        (Declared(error_code="network_error"), False),  # other words are not heard
        (Touchy("connection refused"), False),
    ],
)
def test_what_an_exception_declares_speaks_for_itself_and_an_attribute_that_raises_says_nothing(
    error: Exception, expected: bool
) -> None:
    assert retryable_by_default(error, failure_from(error)) is expected


# ---- AWS and gRPC, by shape ------------------------------------------------------------------------------------------


class ClientError(Exception):
    """The error of botocore."""

    def __init__(self, code: str, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"An error occurred ({code}) when calling the PutItem operation: words")
        self.response = {
            "Error": {"Code": code, "Message": "words"},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers or {}, "RetryAttempts": 4},
        }


THROTTLED = ("ThrottlingException", 400), ("ProvisionedThroughputExceededException", 400), ("SlowDown", 503)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        *((*answer, FailureType.RATE_LIMITED) for answer in (*THROTTLED, ("SomethingNew", 429))),
        *((code, status, FailureType.TRANSIENT) for code, status in (("RequestTimeout", 400), ("InternalError", 500))),
        ("SomethingNew", 503, FailureType.TRANSIENT),
        *((code, status, FailureType.PERMANENT) for code, status in (("AccessDenied", 403), ("NoSuchKey", 404))),
        ("ValidationException", 400, FailureType.PERMANENT),
    ],
)
def test_an_error_of_aws_is_read_by_its_code_then_by_its_status(code: str, status: int, kind: FailureType) -> None:
    retried = kind is not FailureType.PERMANENT
    error = ClientError(code, status)
    failure = failure_from(error)
    assert (failure.http_status, failure.failure_type) == (status, kind)
    assert retryable_by_default(error, failure) is retried
    assert http_errors(error) is retried
    assert rk.classify_failure("", error) is kind
    assert failure_from(ClientError(code, status, {"Retry-After": "7"})).retry_after == 7.0


@pytest.mark.parametrize(
    "response",
    [
        *({"ResponseMetadata": found} for found in (None, {"HTTPStatusCode": "503"})),
        *({"ResponseMetadata": {}, "Error": found} for found in (None, {"Code": ["x"]})),
        {},
    ],
)
def test_an_answer_of_another_shape_says_nothing(response: Any) -> None:
    error = ClientError("x", 500)
    error.response = response
    failure = failure_from(error)
    assert (failure.http_status, failure.failure_type) == (None, FailureType.UNKNOWN)
    assert retryable_by_default(error, failure) is False


@pytest.mark.parametrize(
    ("name", "retried"),
    [
        *((name, True) for name in ("ConnectTimeoutError", "ReadTimeoutError", "EndpointConnectionError")),
        *((name, False) for name in ("SSLError", "NoCredentialsError")),
    ],
)
def test_errors_of_botocore_without_an_answer_are_known_by_class(name: str, retried: bool) -> None:
    base = type("ConnectionError", (Exception,), {"__module__": "botocore.exceptions"})
    parents = (Exception,) if name == "NoCredentialsError" else (base,)
    error = type(name, parents, {"__module__": "botocore.exceptions"})("words")
    assert http_errors(error) is retried


class StatusCode(Enum):
    """The statuses of grpc."""

    OK, UNAVAILABLE, DEADLINE_EXCEEDED = (0, "ok"), (14, "unavailable"), (4, "deadline exceeded")
    RESOURCE_EXHAUSTED, NOT_FOUND = (8, "resource exhausted"), (5, "not found")
    PERMISSION_DENIED, ABORTED, INTERNAL = (7, "permission denied"), (10, "aborted"), (13, "internal")


class RpcError(Exception):
    """The error of grpc and grpc.aio: methods tell its status."""

    def __init__(self, status: StatusCode) -> None:
        super().__init__()
        self._status = status

    def code(self) -> StatusCode:
        return self._status

    def details(self) -> str:
        return "words"


class CallError(Exception):
    """The error of google-api-core around one of grpc."""

    def __init__(self, status: StatusCode) -> None:
        super().__init__()
        self.grpc_status_code = status


@pytest.mark.parametrize("kind", [RpcError, CallError])
@pytest.mark.parametrize(
    ("status", "failure_type", "retried"),
    [
        *((status, FailureType.TRANSIENT, True) for status in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED)),
        (StatusCode.RESOURCE_EXHAUSTED, FailureType.RATE_LIMITED, True),
        *((status, FailureType.PERMANENT, False) for status in (StatusCode.NOT_FOUND, StatusCode.PERMISSION_DENIED)),
        *((status, FailureType.UNKNOWN, False) for status in (StatusCode.ABORTED, StatusCode.INTERNAL)),
    ],
)
def test_a_status_of_grpc_is_read(kind: Any, status: StatusCode, failure_type: FailureType, retried: bool) -> None:
    error = kind(status)
    failure = failure_from(error)
    assert failure.failure_type is failure_type
    assert retryable_by_default(error, failure) is retried


def test_statuses_of_grpclib_and_of_google_api_core_are_read_after_a_declaration_of_the_exception() -> None:
    error = type("GRPCError", (Exception,), {"__module__": "grpclib.exceptions"})()
    error.status = StatusCode.UNAVAILABLE
    assert http_errors(error) is True
    declared: Any = RpcError(StatusCode.UNAVAILABLE)
    declared.failure_type = FailureType.PERMANENT
    assert http_errors(declared) is False

    retried = ("ServiceUnavailable", "TooManyRequests", "InternalServerError", "GatewayTimeout")
    for name in (*retried, "NotFound", "Forbidden", "BadRequest"):
        assert http_errors(getattr(google_errors, name)("words")) is (name in retried), name
    for status in (HTTPStatus.BAD_GATEWAY, HTTPStatus.CONFLICT):
        by_http = type("GoogleAPICallError", (Exception,), {"code": status, "grpc_status_code": None})("words")
        assert failure_from(by_http).http_status == status
        assert http_errors(by_http) is (status is HTTPStatus.BAD_GATEWAY)
