"""Live exceptions, read: hints, statuses, and attributes that bite."""

from __future__ import annotations

from datetime import timedelta
from email.utils import format_datetime
from typing import Any
from urllib.error import URLError

import pytest

import reefknot as rk
from reefknot import clock as timing
from reefknot.engines.clocks import VirtualClock
from reefknot.retrying.failures import read_failure, read_hints
from tests.unit.retrying.flaky import Flaky


class Answer:
    """A response as clients have them."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.status_code = status
        self.headers = headers or {}


class AnswerError(Exception):
    def __init__(self, response: Answer) -> None:
        super().__init__(f"answered {response.status_code}")
        self.response = response


def read(status: int, **headers: str) -> tuple[int | None, float | None, bool]:
    return read_hints(AnswerError(Answer(status, {name.replace("_", "-"): text for name, text in headers.items()})))


def http_date(seconds: float) -> str:
    from datetime import UTC, datetime

    return format_datetime(datetime.fromtimestamp(timing.wall() + seconds, UTC), usegmt=True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120.0),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-5", None),
        ("soon", None),
        ("", None),
        ("nan", None),
        ("1e5", None),
        ("²", None),
        ("Fri, 99 Zzz 9999 99:99:99 GMT", None),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None),
    ],
)
def test_a_retry_after_header_is_seconds(text: str, seconds: float | None) -> None:
    assert read_failure(AnswerError(Answer(503, {"Retry-After": text}))).retry_after == seconds


def test_a_retry_after_header_may_be_a_date(virtual_time: VirtualClock) -> None:
    assert read(503, Retry_After=http_date(90))[1] == pytest.approx(90)
    assert read(503, Retry_After=http_date(-90))[1] == 0.0
    assert read(503, Retry_After=http_date(90).replace("GMT", "-0000"))[1] == pytest.approx(90)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (5, 5.0),
        (0, 0.0),
        (2.5, 2.5),
        (timedelta(minutes=1), 60.0),
        (timedelta(minutes=-1), 0.0),
        ("30", 30.0),
        (-1, None),
        (float("nan"), None),
        (float("inf"), None),
        (True, None),
        (object(), None),
        (10**400, None),
    ],
)
def test_an_attribute_retry_after_is_heard(value: Any, seconds: float | None) -> None:
    error = ConnectionError("busy")
    error.retry_after = value  # type: ignore[attr-defined]  # as clients do
    assert read_failure(error).retry_after == seconds


def test_a_spent_rate_limit_waits_until_its_reset(virtual_time: VirtualClock) -> None:
    reset = str(int(timing.wall()) + 45)
    failure = read_failure(AnswerError(Answer(403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": reset})))
    assert failure.failure_type is rk.FailureType.RATE_LIMITED
    assert failure.retry_after == pytest.approx(45, abs=1)
    left = read_failure(AnswerError(Answer(403, {"X-RateLimit-Remaining": "7", "X-RateLimit-Reset": reset})))
    assert (left.failure_type, left.retry_after) == (rk.FailureType.PERMANENT, None)
    odd = read_failure(AnswerError(Answer(403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "²"})))
    assert odd.retry_after is None


@pytest.mark.parametrize("name", ["response", "status_code", "status", "headers", "retry_after", "error_code"])
def test_an_attribute_that_raises_does_not_replace_the_error(name: str, no_wait: VirtualClock) -> None:
    def bites(self: object) -> object:
        raise RuntimeError("do not look")

    biting = type("Biting", (ConnectionError,), {name: property(bites)})
    error = biting("refused")
    fn = Flaky(error)
    assert rk.retry(fn)() == "ok"
    assert fn.calls == 2
    assert read_failure(error).code is rk.ErrorCode.network_error


def test_a_url_error_means_what_its_reason_means() -> None:
    assert rk.http_errors(URLError(ConnectionRefusedError(111, "refused"))) is True
    assert rk.http_errors(URLError(TimeoutError("timed out"))) is True
    assert rk.http_errors(URLError("unknown url type: x")) is False
    assert rk.http_errors(URLError(FileNotFoundError(2, "no such file"))) is False


def test_status_and_hint_of_an_answer_are_read() -> None:
    failure = read_failure(AnswerError(Answer(429, {"retry-after": "3"})))
    assert (failure.http_status, failure.retry_after) == (429, 3.0)
    assert failure.failure_type is rk.FailureType.RATE_LIMITED
    assert rk.http_errors(AnswerError(Answer(503))) is True
    assert rk.http_errors(AnswerError(Answer(404))) is False
