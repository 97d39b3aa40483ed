"""Log lines, hooks, and callbacks that misbehave."""

from __future__ import annotations

import logging

import pytest

import reefknot as rk
from reefknot.engines.clocks import VirtualClock
from reefknot.retrying.call import RetryEvent
from reefknot.runtime.log import printable
from tests.unit.retrying.flaky import Always, AsyncFlaky, Flaky


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "reefknot" and record.levelno == level]


def test_a_retry_logs_one_line(caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock) -> None:
    rk.retry(attempts=3, base_delay=0.5, jitter="none", name="fetch")(Flaky(ConnectionError("refused")))()
    assert lines(caplog) == ["fetch: attempt 1 of 3 failed with ConnectionError: refused; trying again in 0.5 s"]
    assert (caplog.records[0].retry_attempt, caplog.records[0].retry_delay) == (1, 0.5)  # type: ignore[attr-defined]  # extra


def test_neither_success_nor_the_last_failure_logs_a_line(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock
) -> None:
    rk.retry(Flaky())()
    rk.Retrier(attempts=1).run(Always())
    assert lines(caplog) == []


def test_arguments_are_never_logged(caplog: pytest.LogCaptureFixture, no_wait: VirtualClock) -> None:
    rk.retry(Flaky(ConnectionError("refused")))("CANARY", key="CANARY")
    assert lines(caplog)
    assert "CANARY" not in caplog.text


def test_secrets_are_redacted_in_lines_records_and_callback_reports(
    caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    def broken(event: RetryEvent) -> None:
        raise ValueError("password=CANARY")

    error = ConnectionError("https://me:CANARY@db/?token=CANARY Authorization: Bearer CANARY")
    outcome = rk.Retrier(on_retry=broken, attempts=2).run(Flaky(error, error))
    assert lines(caplog)
    assert "CANARY" not in caplog.text
    assert "CANARY" not in repr(outcome.history)
    assert "CANARY" not in "".join(error.__notes__)


def test_control_characters_cannot_forge_a_line(caplog: pytest.LogCaptureFixture, no_wait: VirtualClock) -> None:
    error = ConnectionError("a\nERROR forged\r\x1b[31mred\x00\u2028")
    rk.retry(name="my\nname")(Flaky(error))()
    (line,) = lines(caplog)
    assert line.isprintable()
    assert r"a\nERROR forged\r\x1b[31mred\x00\u2028" in line


def test_a_long_message_is_cut(caplog: pytest.LogCaptureFixture, no_wait: VirtualClock) -> None:
    rk.retry(Flaky(ConnectionError("x" * 100_000)))()
    assert len(lines(caplog)[0]) < 500
    assert printable("x" * 10, most=10) == "x" * 10
    assert printable("x" * 11, most=10) == "x" * 9 + "…"


def test_lines_are_bounded_a_burst_of_ten_then_one_a_second(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock
) -> None:
    call = rk.retry(attempts=2, base_delay=0, max_delay=0)(Always())

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(ConnectionError):
                call()

    fail(100)
    assert len(lines(caplog)) == 10

    virtual_time.advance(1.0)
    fail(50)
    assert len(lines(caplog)) == 11
    assert lines(caplog)[-1].endswith("(90 such lines left out)")

    virtual_time.advance(1.0)
    fail(1)
    assert lines(caplog)[-1].endswith("(49 such lines left out)")

    virtual_time.advance(3600)
    fail(100)
    assert len(lines(caplog)) == 22


def test_the_bound_holds_for_an_unnamed_retrier_and_for_overrides_per_request(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock
) -> None:
    retrier = rk.Retrier(attempts=2, base_delay=0, max_delay=0)
    fetch = rk.retry(policy=rk.Retrier(attempts=2, base_delay=0, max_delay=0))(Always())
    for _ in range(30):
        retrier.run(Always())
    assert len(lines(caplog)) == 10
    for _ in range(30):
        with pytest.raises(ConnectionError):
            fetch.using(deadline=5)()
    assert len(lines(caplog)) == 20


def test_hooks_are_told_of_every_retry_recovery_and_end(virtual_time: VirtualClock) -> None:
    events: list[tuple[str, RetryEvent]] = []
    call = rk.retry(
        attempts=3,
        base_delay=1,
        jitter="none",
        name="fetch",
        on_retry=lambda event: events.append(("retry", event)),
        on_recover=lambda event: events.append(("recover", event)),
        on_give_up=lambda event: events.append(("give up", event)),
    )
    error = ConnectionError("refused")
    call(Flaky(error))()
    with pytest.raises(ConnectionError):
        call(Always())()

    assert [kind for kind, _ in events] == ["retry", "recover", "retry", "retry", "give up"]
    first, recovered, last = events[0][1], events[1][1], events[-1][1]
    assert (first.name, first.attempt, first.max_attempts) == ("fetch", 1, 3)
    assert (first.error, first.delay, first.elapsed, first.reason) == (error, 1.0, 0.0, None)
    assert str(first.failure) == "ConnectionError: refused"
    assert (recovered.attempt, recovered.failure, recovered.delay, recovered.elapsed) == (2, None, None, 1.0)
    assert (last.attempt, last.delay, last.elapsed, last.reason) == (3, None, 3.0, rk.Reason.ATTEMPTS_SPENT)


def test_a_first_try_success_is_no_recovery() -> None:
    rk.retry(on_recover=lambda event: pytest.fail("nothing to recover from"))(Flaky())()


@pytest.mark.parametrize("broken", [ValueError("broken\nhook"), Unspeakable()])
def test_hooks_that_raise_change_nothing_and_are_reported(
    broken: Exception, caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    def hook(event: RetryEvent) -> None:
        raise broken

    call = rk.retry(attempts=2, on_retry=hook, on_recover=hook, on_give_up=hook)
    assert call(Flaky(ConnectionError))() == "ok"
    with pytest.raises(ConnectionError, match="call 2"):
        call(Always())()
    reports = lines(caplog, logging.ERROR)
    assert [report.split()[0] for report in reports] == ["on_retry=", "on_recover=", "on_retry=", "on_give_up="]
    assert all("the outcome is unchanged" in report and report.isprintable() for report in reports)


def test_hooks_work_in_async_code_and_do_not_change_the_outcome(caplog: pytest.LogCaptureFixture) -> None:
    def hook(event: RetryEvent) -> None:
        raise ValueError("broken hook")

    fn = AsyncFlaky(ConnectionError)
    assert rk.testing.run_virtual(rk.retry(on_retry=hook, on_recover=hook)(fn)()) == "ok"
    assert len(lines(caplog, logging.ERROR)) == 2


def test_control_flow_raised_by_a_hook_is_not_swallowed(no_wait: VirtualClock) -> None:
    def hook(event: RetryEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rk.retry(on_retry=hook)(Flaky(ConnectionError))()


def test_an_error_that_cannot_be_shown_is_still_retried(
    caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    assert rk.retry(on=Unspeakable)(Flaky(Unspeakable()))() == "ok"
    assert "<Unspeakable cannot be shown>" in lines(caplog)[0]
