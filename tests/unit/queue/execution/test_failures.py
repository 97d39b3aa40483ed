"""What a block raises ends its step, and nothing else; it is retried when it should be, and never when it must not."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import reefknot as rk
from reefknot.audit.model.event import Quarantined, RetryRefused, TimeoutOccurred
from reefknot.audit.model.replay import replay
from reefknot.audit.port import AuditQuery
from reefknot.core.failure import FailureType
from reefknot.errors import ConfigurationError, KeyInProgressError, OutcomeUnknownError, QueueFullError, SourceError
from reefknot.idempotency.decorator import in_scope
from reefknot.queue.execution import failures
from reefknot.queue.model.messages import ResultStatus, StepResult
from reefknot.queue.model.work import WorkState
from reefknot.queue.worker import attempt as step_module
from reefknot.retrying.failures import failure_from
from reefknot.runtime import redactor, user_modules
from reefknot.steps.python import PythonBlock
from tests.unit.queue.shops import sent, stored, told
from tests.workshop import OK, REFUSED, Shop, Step, with_shop, work


class Mine(BaseException):
    """Somebody's own control flow."""


def raising(error: BaseException) -> Any:
    async def outcome() -> StepResult:
        raise error

    return outcome


async def ran(shop: Shop, *outcomes: Any, seconds: float = 50, **options: Any) -> Any:
    step = Step(*outcomes)
    await shop.worker("w1", step)
    await sent(shop, work("a", **options), wait=seconds)
    return step


@pytest.mark.parametrize("retries_v2", [True, False])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt("own"), Mine("own")])
async def test_control_flow_that_a_block_raises_ends_its_step_for_good(
    shop: Shop, error: BaseException, retries_v2: bool
) -> None:
    """Its lease is 60 s: within 50 s nothing but the step's own end can have answered."""
    step = Step(raising(error))
    await shop.worker("w1", step, retries_v2=retries_v2)
    await sent(shop, work("a"), wait=50)
    result = shop.result("a")
    assert (result.status, result.error_code) == (ResultStatus.ERROR, "EXECUTION_FAILED")
    assert type(error).__name__ in (result.error_message or "")
    assert (result.retries_used, len(step.began)) == (0, 1)
    await sent(shop, work("b"), wait=1)
    assert (await stored(shop, "b")).state is WorkState.FAILED, "the worker goes on"


async def test_sys_exit_in_a_thread_of_a_block_is_no_end_of_the_worker(shop: Shop) -> None:
    async def in_thread() -> StepResult:
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        future.set_exception(SystemExit("done here"))
        return await future

    await ran(shop, in_thread)
    assert "SystemExit" in (shop.result("a").error_message or "")


async def test_what_does_not_finish_before_the_worker_stops_is_handed_back_and_spends_nothing(shop: Shop) -> None:
    """The control for the one above: a step that a worker stops goes back to the queue, and ends nothing."""
    worker = await shop.worker("w1", Step(seconds=30))
    await sent(shop, work("a"), wait=1)
    assert await worker.drain(0) == 1
    item = await stored(shop, "a")
    assert (item.state, item.attempts, item.interruptions, item.crashes) == (WorkState.PENDING, 0, 1, 0)
    assert shop.results == []


def test_ctrl_c_still_ends_everything() -> None:
    """A signal that comes while the step runs, with Python's own handler and with none of the loop's."""

    async def interrupted() -> StepResult:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)
        return OK

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            with_shop(lambda shop: ran(shop, interrupted))
    finally:
        signal.signal(signal.SIGINT, before)
    assert sys.exc_info() == (None, None, None)


def test_the_check_catches_a_worker_that_takes_every_interrupt_for_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: then a step ends everything."""
    monkeypatch.setattr(step_module, "is_ctrl_c", lambda error: True)
    with pytest.raises(KeyboardInterrupt):
        with_shop(lambda shop: ran(shop, raising(KeyboardInterrupt())))


def test_the_handler_of_asyncio_is_told_from_a_step_that_raises_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def _on_sigint() -> None:
        raise KeyboardInterrupt

    def own() -> None:
        raise KeyboardInterrupt

    def is_told(raises: Callable[[], None]) -> bool:
        try:
            raises()
        except KeyboardInterrupt as error:
            return failures.is_ctrl_c(error)
        return False

    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    assert (is_told(_on_sigint), is_told(own)) == (True, False)
    with ThreadPoolExecutor(1) as thread:
        assert not thread.submit(is_told, _on_sigint).result(), "signals reach the main thread alone"


def divides(depth: int) -> int:
    """A bug so many calls down."""
    return depth // 0 if depth < 2 else divides(depth - 1) + divides(depth - 2)


def fails(depth: int, message: str) -> None:
    password = "hunter2secret"  # noqa: F841 - a source line with a secret in it
    try:
        divides(depth)
    except ZeroDivisionError as error:
        raise LookupError(message) from error


async def kept_failure(shop: Shop, name: str = "a") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await stored(shop, name)).failure or "{}")
    return found


async def test_the_traceback_and_the_class_names_of_a_bug_are_kept_with_the_job(shop: Shop) -> None:
    await ran(shop, raising(KeyError("password=s3cr3t-value")))
    failure = await kept_failure(shop)
    assert failure["exceptions"] == ["builtins.KeyError", "builtins.LookupError", "builtins.Exception"]
    lines = failure["traceback"].splitlines()
    assert failure["message"] == lines[-1] == "KeyError: 'password=[redacted]'", "with no secret in it"
    assert lines[0] == "Traceback (most recent call last):"
    assert f'File "{__file__}", line ' in failure["traceback"]
    assert "attempt.py" not in failure["traceback"], "the worker's own frames are of no use"


async def test_a_job_that_is_retried_has_the_traceback_of_its_last_attempt(shop: Shop) -> None:
    await ran(shop, raising(ConnectionError("first")), raising(ConnectionError("second")), OK, seconds=0.015)
    assert "ConnectionError: first" in (await kept_failure(shop))["traceback"]
    await asyncio.sleep(50)
    assert (await stored(shop, "a")).failure is None


def test_a_traceback_is_bounded_and_its_last_frames_survive() -> None:
    def told_of(message: str) -> str:
        try:
            fails(900, message)
        except LookupError as error:
            return failures.traceback_text(error)
        return ""

    text = told_of("the end")
    assert len(text) <= failures.LONGEST_TRACEBACK
    assert text.endswith("raise LookupError(message) from error\nLookupError: the end")
    assert "ZeroDivisionError" in told_of("short"), "the cause stands before"
    long = told_of("x" * 1_000_000)
    assert len(long) <= failures.LONGEST_TRACEBACK
    assert "raise LookupError(message) from error" in long
    assert told_of("token=abcdef12345 was refused").endswith("LookupError: token=[redacted] was refused")
    assert told_of("half \ud800").endswith("LookupError: half ?")


def test_an_exception_that_is_raised_again_collects_no_frames_and_an_odd_one_has_none() -> None:
    class OddError(Exception):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("nothing to read here")

    same = ValueError("the same object")
    texts = [failures.traceback_text(raised(same)) for _ in range(3)]
    assert texts[0].count("raise error") == 1
    assert texts == [texts[0]] * 3
    assert failures.traceback_text(OddError()) == ""


async def test_the_log_has_the_traceback_of_a_bug_and_no_outage(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="reefknot")
    await ran(shop, raising(ConnectionError("down")))
    assert "Traceback" not in caplog.text
    caplog.clear()
    await shop.worker("w2", Step(raising(KeyError("total\nWARNING forged")), name="test.bug"))
    await sent(shop, work("b", job="test.bug"), to="w2", wait=50)
    (record,) = caplog.records
    lines = record.getMessage().splitlines()
    assert (lines[0], lines[1]) == ("w2: test.bug b: its step raised", "    Traceback (most recent call last):")
    assert all(line.startswith("    ") for line in lines[1:]), "no line of it reads like one of the log's own"


@pytest.mark.parametrize(
    ("group", "retries"),
    [
        (ExceptionGroup("both", [ConnectionError("x"), TimeoutError("y")]), 1),
        (ExceptionGroup("deep", [ExceptionGroup("in", [ConnectionError("x")]), TimeoutError("y")]), 1),
        (ExceptionGroup("mixed", [ConnectionError("x"), ValueError("y")]), 0),
        (ExceptionGroup("deep", [ConnectionError("x"), ExceptionGroup("in", [PermissionError("no")])]), 0),
        (BaseExceptionGroup("control", [ConnectionError("x"), SystemExit(1)]), 0),
    ],
)
async def test_a_group_is_retried_if_all_leaves_are(shop: Shop, group: BaseExceptionGroup[Any], retries: int) -> None:
    await ran(shop, raising(group), OK)
    result = shop.result("a")
    assert (result.retries_used, result.status is ResultStatus.SUCCESS) == (retries, bool(retries))


@pytest.mark.parametrize(
    "error",
    [
        rk.RetryAfter(2.0),
        rk.RetryAfter(2.0, "not found yet"),
        QueueFullError(depth=5, limit=5, retry_after=2.0),
        KeyInProgressError("k", owner="me", retry_after=2.0),
        ExceptionGroup("all", [ConnectionError("x"), rk.RetryAfter(2.0), rk.RetryAfter(0.1)]),
    ],
)
async def test_who_asks_to_be_tried_again_after_a_while_is(shop: Shop, error: Exception) -> None:
    step = await ran(shop, error, OK)
    assert (shop.result("a").status, shop.result("a").retries_used) == (ResultStatus.SUCCESS, 1)
    first, second = step.times("a")
    assert 2.0 <= second - first < 2.5


async def waits_for_a_key(shop: Shop, held_for: float, *, wait: float = 60.0, **options: Any) -> None:
    """A step whose key another caller holds for so long; its own time is a few seconds."""

    @rk.idempotent(key=lambda order, seconds: order, name=f"held-{id(shop)}", store=shop.store, wait=wait)
    async def charge(order: str, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return order

    async def outcome() -> StepResult:
        return StepResult(outputs={"charged": await charge("order-7", held_for)})

    other = asyncio.create_task(charge("order-7", held_for))
    await asyncio.sleep(0.01)
    await ran(shop, outcome, seconds=max(60.0, held_for), **options)
    other.cancel()


async def test_waiting_for_a_key_does_not_use_up_the_time_of_the_step_which_says_so(shop: Shop) -> None:
    waiting = asyncio.create_task(waits_for_a_key(shop, 20, timeout_ms=5000))
    await asyncio.sleep(5.2)
    item = await stored(shop, "a")
    assert (item.state, "order-7" in item.reason) == (WorkState.PENDING, True)
    await waiting
    result = shop.result("a")
    assert (result.status, result.output) == (ResultStatus.SUCCESS, {"charged": "order-7"})
    item = await stored(shop, "a")
    assert (item.attempts, item.snoozes) == (1, 3), "no attempt is spent on it"


async def test_the_wait_for_a_key_has_the_callers_own_bound_and_its_end_names_the_key(shop: Shop) -> None:
    await waits_for_a_key(shop, 300, wait=12.0, timeout_ms=5000)
    result = shop.result("a")
    assert (result.status is ResultStatus.SUCCESS, "order-7" in str(result.error_message)) == (False, True)
    assert (await stored(shop, "a")).snoozes == 2


async def test_the_deadline_holds_for_the_wait_too(shop: Shop) -> None:
    await waits_for_a_key(shop, 300, timeout_ms=3000, deadline_ms=6000)
    assert shop.result("a").status is ResultStatus.TIMEOUT


async def test_a_worker_that_lets_a_step_wait_too_long_is_caught(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.idempotency.waiting.AttemptKeys.wait", lambda self, now: 1e9)
    await waits_for_a_key(shop, 20, timeout_ms=5000)
    assert shop.result("a").status is ResultStatus.TIMEOUT


def guarded(shop: Shop, error: BaseException, calls: list[str], *, swallow: bool = False) -> Any:
    """A block that calls a guarded function, which fails with `error`."""

    @rk.idempotent(key=lambda order: order, mode="guard", name=f"charge-{id(calls)}", store=shop.store)
    async def charge(order: str) -> str:
        calls.append(order)
        await asyncio.sleep(1)
        raise error

    async def outcome() -> StepResult:
        try:
            await charge("order-7")
        except Exception:
            if not swallow:
                raise
            raise ConnectionError("told otherwise") from None
        return OK

    return outcome


@pytest.mark.parametrize("swallow", [False, True])
async def test_an_attempt_that_leaves_a_guarded_key_unknown_is_set_aside(shop: Shop, swallow: bool) -> None:
    calls: list[str] = []
    step = await ran(shop, guarded(shop, TimeoutError("no answer"), calls, swallow=swallow), timeout_ms=40_000)
    assert (len(step.began), calls) == (1, ["order-7"])
    item = await stored(shop, "a")
    assert item.state is WorkState.QUARANTINED
    assert "order-7" in item.reason
    result = shop.result("a")
    assert (result.status, result.retries_used) == (ResultStatus.ERROR, 0)
    assert "order-7" in (result.error_message or "")
    (event,) = await told(shop, Quarantined)
    assert (event.work_id, event.correlation_id) == ("a", "r-a")
    assert [one.reason for one in await told(shop, RetryRefused)] == ["not_retryable"]
    assert replay([kept.entry.body for kept in await shop.store.audit.read(AuditQuery(limit=1000))]).differences == ()


async def test_a_guarded_step_that_is_cut_off_is_an_unknown_outcome_too(shop: Shop) -> None:
    calls: list[str] = []
    await ran(shop, guarded(shop, ValueError(), calls), timeout_ms=500)
    assert (await stored(shop, "a")).state is WorkState.QUARANTINED
    assert (shop.result("a").status, calls) == (ResultStatus.ERROR, ["order-7"])
    (timeout,) = await told(shop, TimeoutOccurred)
    assert (timeout.whole, timeout.timeout_seconds) == (True, pytest.approx(0.5, abs=0.02))


async def test_a_key_whose_outcome_is_unknown_already_quarantines_whoever_needs_it(shop: Shop) -> None:
    assert len((await ran(shop, OutcomeUnknownError("charge:order-7", owner="w9"))).began) == 1
    item = await stored(shop, "a")
    assert (item.state, "charge:order-7" in item.reason) == (WorkState.QUARANTINED, True)
    assert [event.work_id for event in await told(shop, Quarantined)] == ["a"]


async def test_a_guarded_function_that_works_and_one_in_another_mode_change_nothing(shop: Shop) -> None:
    @rk.idempotent(key=lambda order: order, mode="guard", name="works")
    async def works(order: str) -> str:
        return order

    @rk.idempotent(key=lambda order: order, mode="retry", name="fails")
    async def fails(order: str) -> str:
        raise REFUSED

    async def outcome() -> StepResult:
        with in_scope(shop.store):
            await works("x")
            await fails("x")
        return OK

    assert (len((await ran(shop, outcome, OK)).began), shop.result("a").status) == (2, ResultStatus.SUCCESS)


async def test_a_worker_that_ignores_guarded_keys_would_be_caught(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without it the attempt is repeated, and the end is a plain failure that nobody looks at."""
    monkeypatch.setattr(step_module, "unknown_key", lambda ran, keys: "")
    calls: list[str] = []
    assert len((await ran(shop, guarded(shop, TimeoutError("no answer"), calls), timeout_ms=40_000)).began) > 1
    assert (await stored(shop, "a")).state is WorkState.FAILED


async def test_a_step_and_each_attempt_that_runs_out_of_time_is_on_record_as_such(shop: Shop) -> None:
    await shop.worker("w1", Step(seconds=60))
    await sent(shop, work("a", timeout_ms=2000), wait=5)
    await shop.worker("w2", Step(seconds=60), retries_v2=False)  # there, `timeout_ms` bounds each attempt
    await sent(shop, work("b", retry_count=1, timeout_ms=1000), to="w2", wait=10)
    events = await told(shop, TimeoutOccurred)
    cut = [(one.work_id, one.attempt_number, one.timeout_seconds, one.whole) for one in events]
    assert cut == [("a", 1, 2.0, True), ("b", 1, 1.0, False), ("b", 2, 1.0, False)]


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("x"), "KeyError: 'x' (in {at})"),
        (AssertionError(), "AssertionError (in {at})"),
        (SystemExit(3), "SystemExit: 3 (in {at})"),
        (ValueError("odd"), "ValueError: odd (in {at})"),
        (ConnectionRefusedError("connection refused"), "connection refused"),
        (TimeoutError(), "TimeoutError"),
        (SourceError("no such space; create it", FailureType.PERMANENT), "no such space; create it"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, BaseException) else "",
)
def test_a_failure_with_its_place_names_class_and_line_if_its_words_say_little(error: BaseException, told: str) -> None:
    at = f"{__file__}:{raised.__code__.co_firstlineno + 2}"
    failure = failures.failure_with_place(raised(error))
    assert failure.message == told.format(at=at)
    assert structs.replace(failure, message="") == structs.replace(failure_from(error), message="")


def test_the_place_is_in_the_module_of_ones_own_and_not_in_the_library_that_it_calls() -> None:
    def own() -> None:
        json.loads("{")

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - json's own, whose frames are what matters
        own()
    assert failures.raised_at(caught.value) == f"{__file__}:{own.__code__.co_firstlineno + 1}"
    assert failures.raised_at(ValueError("never raised")) == ""


def test_a_group_tells_of_its_first_exception_with_no_secret_and_bounded() -> None:
    two = BaseExceptionGroup("two of them", [raised(KeyError("x")), ValueError("y")])
    found = failures.failure_with_place(raised(two))
    assert found.message.startswith("ExceptionGroup: two of them (2 sub-exceptions): KeyError: 'x' (in ")
    redactor.add_secrets(["hush-hush-4711"])
    try:
        message = failures.failure_with_place(raised(KeyError("hush-hush-4711" + "x" * 10_000))).message
    finally:
        redactor.remove_secrets(["hush-hush-4711"])
    assert "hush-hush" not in message
    assert (len(message) <= 4096, message.endswith(")")) == (True, True)


def bug(order: dict[str, Any]) -> Any:
    return order["price"]


def plain(inputs: dict[str, Any], context: rk.BlockContext) -> dict[str, Any]:
    return {"price": bug(inputs)}


async def awaited(inputs: dict[str, Any], context: rk.BlockContext) -> dict[str, Any]:
    return {"price": bug(inputs)}


@rk.retry(attempts=2, base_delay=0, on=KeyError)
async def retried(inputs: dict[str, Any], context: rk.BlockContext) -> dict[str, Any]:
    return {"price": bug(inputs)}


async def grouped(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    async def one() -> None:
        bug(inputs)

    async with asyncio.TaskGroup() as group:
        group.create_task(one())


async def in_thread(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    await asyncio.to_thread(bug, inputs)


async def misused(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    rk.RetryPolicy(max_attempts=0)


async def chained(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    try:
        bug(inputs)
    except KeyError as error:
        raise ValueError("a bad order") from error


@pytest.mark.parametrize("function", [plain, awaited, retried, grouped, in_thread, misused, chained])
async def test_the_traceback_begins_in_the_users_file(shop: Shop, function: Callable[..., Any]) -> None:
    await shop.worker("w1", PythonBlock("test.step", function))
    await shop.send(work("a", retry_count=0))
    async with asyncio.timeout(60):
        while not shop.results:  # noqa: ASYNC110 - a result sets no event
            await asyncio.sleep(0.01)
    lines = (await kept_failure(shop))["traceback"].splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    assert heads[0] == 0
    for number in heads:
        assert lines[number + 1].startswith(f'  File "{__file__}", line '), "\n".join(lines)


def test_a_wrong_decorator_is_told_with_its_line_when_it_is_loaded(tmp_path: Path) -> None:
    for number, (line, words) in enumerate(
        (
            ('@rk.block("mistakes.one", atempts=3)', "no such option; did you mean 'attempts'?"),
            ('@rk.block("Mistakes Two")', "a name in lower case"),
            ('@rk.block("mistakes.three", timeout="soon")', "timeout='soon'"),
        )
    ):
        file = tmp_path / f"mistakes_{number}.py"
        file.write_text(f"import reefknot as rk\n\n{line}\ndef step(inputs, context): ...\n")
        with pytest.raises(ConfigurationError) as caught:
            user_modules.import_user_module(file.stem, path=str(tmp_path))
        assert f"cannot be imported: {file}:3: Parameter" in str(caught.value)
        assert words in str(caught.value)
