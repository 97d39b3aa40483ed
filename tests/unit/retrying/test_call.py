"""A failing call: nested retries, why it ended, waits, log lines and hooks."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

import reefknot as rk
from reefknot.retrying.exhaustion import MARK
from reefknot.retrying.failures import failure_from
from reefknot.retrying.types import RetryEvent
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.log import LogBudget
from tests.unit.retrying.flaky import Always, AsyncAlways, AsyncFlaky, Flaky


class Wrapped(Exception):
    """What a layer of an application raises in place of what it got."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def nested(levels: int, work: Callable[[], object], *, wrap: bool = False) -> Callable[[], object]:
    """`work` under that many retries of three attempts each."""
    call: Callable[[], object] = work
    for level in range(levels):
        inner = call

        def layer(inner: Callable[[], object] = inner) -> object:
            try:
                return inner()
            except Exception as error:
                if wrap:
                    raise Wrapped("from below") from error
                raise

        call = rk.retry(on=Exception, attempts=3, name=f"level {level}")(layer)
    return call


# ---- layers do not multiply ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [False, True])
def test_three_levels_of_three_attempts_are_three_calls(wrap: bool, no_wait: VirtualClock) -> None:
    fn = Always()
    with pytest.raises(Exception, match="from below" if wrap else "call 3"):
        nested(3, fn, wrap=wrap)()
    assert fn.calls == 3


def test_control_without_the_mark_they_are_twenty_seven(no_wait: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.retrying.call._EXHAUSTED", frozenset())
    fn = Always()
    with pytest.raises(ConnectionError):
        nested(3, fn)()
    assert fn.calls == 27


def test_the_outer_retry_says_that_an_inner_one_gave_up(no_wait: VirtualClock) -> None:
    with pytest.raises(ConnectionError) as raised:
        nested(2, Always())()
    assert [note.split(":")[0] for note in raised.value.__notes__] == ["reefknot[level 0]", "reefknot[level 1]"]
    assert "an inner retry already gave up" in raised.value.__notes__[1]


async def test_a_group_of_exhausted_retries_is_not_multiplied() -> None:
    fn = AsyncAlways()

    @rk.retry(attempts=3)
    async def outer() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(rk.retry(attempts=3)(fn)())

    with pytest.raises(ExceptionGroup) as raised:
        await outer()
    assert fn.calls == 3
    assert "an inner retry already gave up" in raised.value.__notes__[0]


async def test_an_inner_deadline_is_an_exhausted_inner_retry_and_an_inner_refusal_is_not() -> None:
    outcome = await rk.Retrier(on=TimeoutError).arun(rk.retry(on=TimeoutError, deadline=2)(asyncio.sleep), 60)
    assert (outcome.attempts, outcome.reason) == (1, rk.Reason.INNER_EXHAUSTED)
    assert asyncio.get_running_loop().time() == pytest.approx(2)

    fn = Flaky(KeyError, KeyError)
    with rk.testing.no_wait():
        assert rk.retry(on=KeyError)(rk.retry(on=ConnectionError)(fn))() == "ok"
    assert fn.calls == 3, "the inner one did not think it worth it; the outer one does, and nothing was multiplied"


def test_an_exception_object_used_again_and_again_is_not_exhausted_in_a_later_call(no_wait: VirtualClock) -> None:
    singleton = ConnectionError("always the same object")
    singleton.add_note("somebody else's")
    for _ in range(3):
        fn = Flaky(*[singleton] * 9)
        with pytest.raises(ConnectionError):
            rk.retry(attempts=4, name="x")(fn)()
        assert fn.calls == 4
        assert len(singleton.__notes__) == 2, "notes do not pile up"
        assert singleton.__notes__[0] == "somebody else's"
    assert failure_from(singleton, 0).exhausted  # the old mark is there, and did not count
    assert getattr(singleton, MARK)[0] > 0


# ---- one exception object, several callers ---------------------------------------------------------------------------

ATTEMPTS = (2, 5, 3)
Fail = Callable[[], None]


def raised_again(error: Exception) -> Fail:
    def fail() -> None:
        raise error

    return fail


def shared_result(error: Exception) -> Fail:
    future: Future[None] = Future()
    future.set_exception(error)
    return future.result


async def spent_in_tasks() -> dict[int, int]:
    """Attempts of callers in tasks of their own that await one failed future, by the attempts they may make."""
    spent: dict[int, int] = {}
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_exception(ConnectionError("shared"))

    async def caller(attempts: int) -> None:
        fn = AsyncFlaky()

        @rk.retry(attempts=attempts, base_delay=1.0 / attempts, jitter="none")
        async def work() -> None:
            await fn()
            await future

        with suppress(ConnectionError):
            await work()
        spent[attempts] = fn.calls

    await asyncio.gather(*(caller(attempts) for attempts in ATTEMPTS))
    return spent


def spent_in_threads(fail: Fail) -> dict[int, int]:
    """The same in threads. All have begun before one gives up, and those with fewer attempts give up first."""
    spent: dict[int, int] = {}
    begun = threading.Barrier(len(ATTEMPTS))
    given_up = {attempts: threading.Event() for attempts in ATTEMPTS}

    def caller(attempts: int) -> None:
        fn = Flaky()

        @rk.retry(attempts=attempts, base_delay=0)
        def work() -> None:
            fn()
            if fn.calls == 1:
                begun.wait(10)
            if fn.calls == 2:
                for fewer in ATTEMPTS:
                    if fewer < attempts:
                        given_up[fewer].wait(10)
            fail()

        with suppress(ConnectionError):
            work()
        spent[attempts] = fn.calls
        given_up[attempts].set()

    threads = [threading.Thread(target=caller, args=(attempts,)) for attempts in ATTEMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return spent


ALL_SPENT = {attempts: attempts for attempts in ATTEMPTS}


async def test_callers_in_tasks_or_threads_that_share_an_exception_have_all_of_their_attempts() -> None:
    assert await spent_in_tasks() == ALL_SPENT
    for share in (raised_again, shared_result):
        assert spent_in_threads(share(ConnectionError("shared"))) == ALL_SPENT


async def test_a_mark_that_counts_for_every_caller_costs_some_of_them_their_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: one scope for everybody."""
    monkeypatch.setattr("reefknot.retrying.exhaustion.current_scope", lambda: 1)
    assert (await spent_in_tasks())[5] < 5
    assert spent_in_threads(raised_again(ConnectionError("shared")))[5] < 5


@pytest.mark.parametrize("way", ["await", "task", "wait_for", "to_thread", "executor", "thread", "cause"])
def test_an_inner_retry_in_a_task_or_a_thread_of_its_own_is_not_multiplied(way: str) -> None:
    fn = Always()
    plain = rk.retry(attempts=3, base_delay=0)(fn)

    @rk.retry(attempts=3, base_delay=0)
    async def inner() -> None:
        fn()

    async def caused() -> None:
        try:
            await inner()
        except ConnectionError as error:
            raise ConnectionError("another") from error

    @rk.retry(attempts=3, base_delay=0)
    async def outer() -> None:
        match way:
            case "await":
                await inner()
            case "task":
                await asyncio.create_task(inner())
            case "wait_for":
                await asyncio.wait_for(inner(), 60)
            case "to_thread":
                await asyncio.to_thread(plain)
            case "executor":
                await asyncio.get_running_loop().run_in_executor(None, plain)
            case "cause":
                await asyncio.create_task(caused())
            case _:
                rk.retry(attempts=3, base_delay=0, in_thread=True)(plain)()

    with pytest.raises(ConnectionError):
        asyncio.run(outer())
    assert fn.calls == 3


# ---- why it ended ----------------------------------------------------------------------------------------------------


def test_the_note_says_why_how_often_how_long_and_under_which_policy(virtual_time: VirtualClock) -> None:
    with pytest.raises(ConnectionError) as raised:
        rk.retry(attempts=3, base_delay=1, jitter="none", deadline=60, name="fetch")(Always())()
    (note,) = raised.value.__notes__
    assert note == (
        "reefknot[fetch]: gave up: all attempts are spent (3 attempts, 3 s; policy: 3 attempts (1 + 2 retries), "
        "1 s x2 each time, at most 30 s, jitter none, 60 s in all)"
    )


@pytest.mark.parametrize(
    ("error", "reason", "says"),
    [
        (ValueError("bug"), rk.Reason.NOT_RETRYABLE, "this failure is not retryable"),
        (rk.RetryAfter(301), rk.Reason.HINT_TOO_LONG, "the server asked for 301 s"),
        (rk.RetryAfter(200), rk.Reason.BUDGET_SPENT, "would not fit into the deadline"),
    ],
)
def test_the_first_attempts_end_is_told(
    error: Exception, reason: rk.Reason, says: str, virtual_time: VirtualClock
) -> None:
    outcome = rk.Retrier(deadline=100).run(Flaky(error))
    assert (outcome.ok, outcome.error, outcome.attempts, outcome.reason) == (False, error, 1, reason)
    assert says in error.__notes__[0]
    assert virtual_time.waits == []


class Busy(Exception):
    retry_after = 40


@pytest.mark.parametrize(
    ("on", "errors", "waits"),
    [
        (KeyError, [rk.RetryAfter(20)], [20]),  # whatever on= says
        (Busy, [Busy()], [40]),
        (lambda error: 10.0, [Busy()], [40]),  # the longer of the predicate's seconds and the server's hint stands
        (lambda error: 60.0, [Busy(), Busy()], [60, 60]),
    ],
)
def test_retry_after_of_an_error_is_heard(
    on: Any, errors: list[Exception], waits: list[float], virtual_time: VirtualClock
) -> None:
    assert rk.retry(on=on, base_delay=0, max_delay=0)(Flaky(*errors))() == "ok"
    for waited, least in zip(virtual_time.waits, waits, strict=True):
        assert least <= waited <= least + 1


# ---- waits -----------------------------------------------------------------------------------------------------------


def waits_of(retrier: rk.Retrier) -> list[float]:
    with rk.testing.no_wait() as clock:
        retrier.run(Always())
    return clock.waits


def test_a_seed_makes_waits_reproducible_that_differ_from_call_to_call() -> None:
    first = waits_of(rk.Retrier(seed=7))
    assert waits_of(rk.Retrier()) != waits_of(rk.Retrier()), "without a seed, and nothing moves for the others"
    seeded = rk.Retrier(seed=7)
    assert waits_of(seeded) == first
    assert waits_of(seeded) != first
    assert waits_of(rk.Retrier(seed=8)) != first


# ---- log lines and hooks ---------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "reefknot" and record.levelno == level]


def test_a_retry_logs_one_line(caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock) -> None:
    rk.retry(attempts=3, base_delay=0.5, jitter="none", name="fetch")(Flaky(ConnectionError("refused")))()
    assert lines(caplog) == ["fetch: attempt 1 of 3 failed with ConnectionError: refused; trying again in 0.5 s"]
    extra = vars(caplog.records[0])
    fields = {"decision": "retry", "operation": "fetch", "attempt": 1, "max_attempts": 3, "wait_s": 0.5, "reason": None}
    fields |= {"error_code": "NETWORK_ERROR", "failure_type": "transient", "trace_id": None}
    assert {name: extra[name] for name in fields} == fields


def test_who_debugs_sees_recoveries_and_ends_as_one_line_each(
    caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    with caplog.at_level(logging.DEBUG, "reefknot"):
        rk.retry(attempts=3, name="fetch")(Flaky(ConnectionError("refused")))()
        rk.Retrier(attempts=1, name="fetch").run(Always())
        rk.Retrier(attempts=1, name="quiet", log=False).run(Always())
        rk.retry(name="fine")(Flaky())()
    told = [(one.levelname, vars(one)["decision"], vars(one)["reason"]) for one in caplog.records]
    assert told == [("WARNING", "retry", None), ("DEBUG", "recovered", None), ("DEBUG", "give_up", "attempts_spent")]
    assert [one.getMessage() for one in caplog.records[1:]] == [
        "fetch: succeeded at attempt 2",
        "fetch: attempt 1 failed with ConnectionError: call 1; gave up: all attempts are spent",
    ]


def test_neither_success_nor_the_last_failure_logs_a_line_and_none_has_arguments(
    caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    rk.retry(Flaky())()
    rk.Retrier(attempts=1).run(Always())
    assert lines(caplog) == []

    texts: list[str] = []
    hook: Any = lambda event: texts.extend((repr(event), str(event), f"{event}"))  # noqa: E731
    rk.retry(on_retry=hook, on_recover=hook)(Flaky(ConnectionError("refused")))("CANARY", key="CANARY")
    assert (len(lines(caplog)), len(texts)) == (1, 6)
    assert "ConnectionError" in texts[0]
    assert "CANARY" not in "".join([caplog.text, *texts])


def test_secrets_are_redacted_in_lines_records_and_callback_reports(
    caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    def broken(event: RetryEvent) -> None:
        raise ValueError("password=CANARY")

    error = ConnectionError("https://me:CANARY@db/?token=CANARY Authorization: Bearer CANARY")
    outcome = rk.Retrier(on_retry=broken, attempts=2).run(Flaky(error, error))
    assert lines(caplog)
    assert "CANARY" not in "".join([caplog.text, repr(outcome.history), *error.__notes__])


def test_a_message_is_cut_and_its_control_characters_cannot_forge_a_line(
    caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    rk.retry(name="my\nname")(Flaky(ConnectionError("a\nERROR forged\r\x1b[31mred\x00\u2028")))()
    rk.retry(Flaky(ConnectionError("x" * 100_000)))()
    forged, long = lines(caplog)
    assert forged.isprintable()
    assert r"a\nERROR forged\r\x1b[31mred\x00\u2028" in forged
    assert len(long) < 500


TWICE = rk.Retrier(attempts=2, wait=[0])


def test_lines_are_bounded_a_burst_of_ten_then_one_a_second(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines_after(seconds: float, failures: int) -> list[str]:
        virtual_time.advance(seconds)
        for _ in range(failures):
            TWICE.run(Always())
        return lines(caplog)

    assert len(lines_after(0, 100)) == 10
    told = lines_after(1, 50)
    assert (len(told), told[-1].endswith("(90 such lines left out)")) == (11, True)
    assert lines_after(1, 1)[-1].endswith("(49 such lines left out)")
    assert len(lines_after(3600, 100)) == 22
    monkeypatch.setattr("reefknot.runtime.log._MAX_BUDGETS", 2)
    monkeypatch.setattr("reefknot.runtime.log._rest", LogBudget())
    caplog.clear()
    for number in range(50):
        rk.Retrier(attempts=2, wait=[0], name=f"name {number}").run(Always())
    assert len(lines(caplog)) == 1 + 10, "names beyond the thousandth share a budget"


def test_the_bound_holds_for_an_unnamed_retrier_and_for_overrides_per_request(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock
) -> None:
    """The name has the budget, not the object: retriers that are made where they are used share it."""

    def refused() -> None:
        raise ConnectionError

    def in_a_loop() -> None:
        for attempt in rk.Retrier(attempts=2, wait=[0]).attempts():
            with attempt:
                raise ConnectionError

    fetch = rk.retry(policy=TWICE, name="fetch")(Always())
    ways: list[list[Callable[[], object]]] = [
        [lambda: TWICE.run(Always())],
        [lambda: fetch.using(deadline=5)()],
        [lambda: rk.Retrier(attempts=2, wait=[0]).run(refused), lambda: rk.retry(attempts=2, wait=[0])(refused)()],
        [in_a_loop],
    ]
    for number, same in enumerate(ways, 1):
        for way in same * 100:
            with suppress(ConnectionError):
                way()
        assert len(lines(caplog)) == number * 10


def test_a_loop_has_the_name_of_the_function_that_it_is_in(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock
) -> None:
    def collect(retrier: rk.Retrier) -> None:
        for attempt in retrier.attempts():
            with attempt:
                if attempt.number == 1:
                    raise ConnectionError

    collect(rk.Retrier())
    collect(rk.Retrier(name="mine"))
    here = "test_a_loop_has_the_name_of_the_function_that_it_is_in.<locals>.collect"
    assert [line.partition(":")[0] for line in lines(caplog)] == [here, "mine"]


def test_a_requested_wait_is_no_warning_and_lines_that_are_not_seen_take_nothing_from_the_budget(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock
) -> None:
    """Polling by `RetryAfter` is no failure; its lines inform those who want to know."""
    with caplog.at_level(logging.INFO, "reefknot"):
        rk.retry(name="poll")(Flaky(rk.RetryAfter(5, "still running")))()
    assert lines(caplog) == []
    (line,) = lines(caplog, logging.INFO)
    assert line.startswith("poll: attempt 1 of 4 asked to try again: RetryAfter: still running; trying again in 5")
    virtual_time.advance(60)
    caplog.set_level(logging.WARNING, "reefknot")
    rk.Retrier(name="poll", attempts=50).run(Always(lambda text: rk.RetryAfter(0, text)))  # type: ignore[arg-type]
    rk.Retrier(name="poll", attempts=11, wait=[0]).run(Always())
    assert len(lines(caplog)) == 10


def test_log_turns_lines_off_or_gives_them_a_level_or_a_logger(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock
) -> None:
    caplog.set_level(logging.DEBUG)
    mine = logging.getLogger("mine")
    for log in (False, "debug", logging.ERROR, mine, logging.LoggerAdapter(mine, {}), True):
        rk.retry(log=log)(Flaky(ConnectionError()))()
    retries = [record for record in caplog.records if "trying again" in record.getMessage()]
    of_ours = [("reefknot", "DEBUG"), ("reefknot", "ERROR"), ("mine", "WARNING"), ("mine", "WARNING")]
    assert [(record.name, record.levelname) for record in retries] == [*of_ours, ("reefknot", "WARNING")]


@pytest.mark.parametrize("value", ["loud", -1, 1.5, object(), None])
def test_what_is_neither_level_nor_logger_is_refused(value: Any) -> None:
    with pytest.raises(rk.ParameterError, match=r"^log=.*a level"):
        rk.retry(log=value)


def test_hooks_are_told_of_every_retry_recovery_and_end_and_of_no_success_at_first(virtual_time: VirtualClock) -> None:
    events: list[tuple[str, RetryEvent]] = []
    names = {"on_retry": "retry", "on_recover": "recover", "on_give_up": "give up"}
    hooks: Any = {hook: lambda event, name=name: events.append((name, event)) for hook, name in names.items()}
    call = rk.retry(attempts=3, base_delay=1, jitter="none", name="fetch", **hooks)
    error = ConnectionError("refused")
    call(Flaky())()
    assert events == []
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


@pytest.mark.parametrize("broken", [ValueError("broken\nhook"), Unspeakable()])
@pytest.mark.parametrize("is_async", [False, True])
def test_hooks_that_raise_change_nothing_and_are_reported(
    broken: Exception, is_async: bool, caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    def hook(event: RetryEvent) -> None:
        raise broken

    async def ahook(event: RetryEvent) -> None:
        raise broken

    def ended(fn: Any) -> object:
        return rk.testing.run_virtual(call(fn)()) if inspect.iscoroutinefunction(fn.__call__) else call(fn)()

    given: Any = ahook if is_async else hook
    call = rk.retry(attempts=2, on_retry=given, on_recover=given, on_give_up=given)
    ways: list[tuple[Any, Any]] = [(AsyncFlaky(ConnectionError), AsyncAlways())]
    ways += [] if is_async else [(Flaky(ConnectionError), Always())]
    for flaky, always in ways:
        caplog.clear()
        assert ended(flaky) == "ok"
        with pytest.raises(ConnectionError, match="call 2"):
            ended(always)
        reports = lines(caplog, logging.ERROR)
        assert [report.split()[0] for report in reports] == ["on_retry=", "on_recover=", "on_retry=", "on_give_up="]
        assert all("the outcome is unchanged" in report and report.isprintable() for report in reports)


def test_control_flow_raised_by_a_hook_is_not_swallowed_and_an_error_that_cannot_be_shown_is_retried(
    caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    def hook(event: RetryEvent) -> None:
        raise KeyboardInterrupt

    assert rk.retry(on=Unspeakable)(Flaky(Unspeakable()))() == "ok"
    assert "<Unspeakable cannot be shown>" in lines(caplog)[0]
    with pytest.raises(KeyboardInterrupt):
        rk.retry(on_retry=hook)(Flaky(ConnectionError))()


def test_hooks_have_the_arguments_of_the_call_and_may_act_on_self(no_wait: VirtualClock) -> None:
    class Client:
        token = "old"

        def renew(event: rk.RetryEvent) -> None:  # type: ignore[misc]
            event.args[0].token = "new"

        @rk.retry(on=PermissionError, on_retry=renew)
        def get(self, path: str, *, size: int) -> str:
            if self.token == "old":
                raise PermissionError(path)
            return self.token

    assert Client().get("/a", size=3) == "new"

    seen: list[tuple[Any, Any]] = []

    def hook(event: rk.RetryEvent) -> None:
        seen.append((event.args, event.kwargs))

    hooks: Any = {"on_retry": hook, "on_recover": hook, "on_give_up": hook}
    for options in ({}, {"throttle": True}, {"in_thread": True}, {"deadline": 60}):
        rk.retry(**options, **hooks)(Flaky(ConnectionError()))(1, b=2)
        rk.Retrier(**options, **hooks).run(Flaky(ConnectionError()), 1, b=2)
    rk.Retrier(attempts=1, **hooks).run(Always(), 1, b=2)
    rk.testing.run_virtual(rk.Retrier(**hooks).acall(AsyncFlaky(ConnectionError()), 1, b=2))
    assert seen == [((1,), {"b": 2})] * (4 * 4 + 1 + 2)


# ---- async hooks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["plain", "breaker", "throttle"])
async def test_async_hooks_are_awaited_before_the_wait_and_before_the_end(option: str) -> None:
    loop = asyncio.get_running_loop()
    told: list[tuple[str, float]] = []

    def hook(name: str) -> Callable[[RetryEvent], Any]:
        async def tell(event: RetryEvent) -> None:
            await asyncio.sleep(1)
            told.append((name, loop.time()))

        return tell

    options: Any = {"breaker": {"breaker": rk.CircuitBreaker("x", failures=99)}, "throttle": {"throttle": True}}
    hooks: Any = {"on_retry": hook("retry"), "on_recover": hook("recover"), "on_give_up": hook("give up")}
    call = rk.retry(wait=[10], attempts=2, **hooks, **options.get(option, {}))
    await call(AsyncFlaky(ConnectionError()))()
    assert [(name, round(when, 3)) for name, when in told] == [("retry", 1), ("recover", 12)]
    with pytest.raises(ConnectionError):
        await call(AsyncAlways())()
    assert [name for name, _ in told[2:]] == ["retry", "give up"]
    assert loop.time() == told[-1][1], "raised after the hook has ended"


async def test_a_function_that_returns_an_awaitable_is_an_async_hook_and_sees_a_call_that_was_stopped() -> None:
    told: list[tuple[int, rk.Reason | None]] = []

    async def tell(event: RetryEvent) -> None:
        told.append((event.attempt, event.reason))

    await rk.Retrier(on_retry=lambda event: tell(event)).acall(AsyncFlaky(ConnectionError()))
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(1, stop.set)
    await rk.Retrier(stop=stop, wait=[30], on_give_up=tell).arun(AsyncAlways())
    assert told == [(1, None), (1, rk.Reason.STOPPED)]
