"""
The comparison with tenacity, stamina and backoff, tried again.

    python tools/check_comparison.py [ROW ...]

Every cell of the table `#compared` in the guide has a probe here that calls the installed library and answers with the
cell's text. Cells that say otherwise are printed with what came out, and the exit code is 1. A row is named by the
beginning of its label. The times are real: a run takes about twenty seconds.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import backoff
import stamina
import tenacity
import trio

import reefknot as rk

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "coming-from-tenacity-stamina-backoff.md"
NONE = "–"
LIBRARIES = ("tenacity", "stamina", "backoff", "reefknot")

Decorate = Callable[..., Any]
Probe = Callable[[], str]


class RefusedError(ConnectionError):
    """The failure of every probe."""


class HintedError(RefusedError):
    """A failure with a hint, as a server gives it."""

    retry_after = 7.0


def failing(calls: list[float], error: type[RefusedError] = RefusedError) -> Callable[[], None]:
    def work() -> None:
        calls.append(time.monotonic())
        raise error("refused")

    return work


def ended(call: Callable[[], object]) -> BaseException | None:
    """The error that a call ends with, if any."""
    try:
        call()
    except BaseException as error:
        return error
    return None


@contextmanager
def skipped_sleeps() -> Iterator[list[float]]:
    """Waits of every library, skipped and recorded."""
    slept: list[float] = []
    with (
        mock.patch("time.sleep", slept.append),
        mock.patch("tenacity.nap.time.sleep", slept.append),
        rk.testing.no_wait() as clock,
    ):
        yield slept
    slept += clock.waits


# ---- decorators of each library for the same order -------------------------------------------------------------------


def by_tenacity(attempts: int = 3, wait: float = 0.0, **more: Any) -> Decorate:
    more.setdefault("stop", tenacity.stop_after_attempt(attempts))
    more.setdefault("retry", tenacity.retry_if_exception_type(Exception))
    decorate: Decorate = tenacity.retry(wait=tenacity.wait_fixed(wait), reraise=True, **more)
    return decorate


def by_stamina(attempts: int | None = 3, wait: float = 0.0, **more: Any) -> Decorate:
    more.setdefault("on", Exception)
    return stamina.retry(attempts=attempts, wait_initial=wait, wait_max=wait, wait_jitter=0, **more)


def by_backoff(attempts: int | None = 3, wait: float = 0.0, **more: Any) -> Decorate:
    kind = more.pop("on", Exception)
    return backoff.on_exception(backoff.constant, kind, max_tries=attempts, interval=wait, jitter=None, **more)


def by_reefknot(attempts: int = 3, wait: float = 0.0, **more: Any) -> Decorate:
    more.setdefault("on", Exception)
    decorate: Decorate = rk.retry(attempts=attempts, wait=[wait], log=False, **more)
    return decorate


BY: dict[str, Decorate] = {
    "tenacity": by_tenacity,
    "stamina": by_stamina,
    "backoff": by_backoff,
    "reefknot": by_reefknot,
}


# ---- probes ----------------------------------------------------------------------------------------------------------


def defaults_of(fn: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(fn).parameters.items()}


def gives_up_by_default() -> Iterator[Probe]:
    yield lambda: "never" if tenacity.Retrying().stop is tenacity.stop_never else "at some time"
    known = defaults_of(stamina.retry)
    yield lambda: f"{known['attempts']} attempts or {known['timeout']:g} s"
    ours = defaults_of(backoff.on_exception)
    yield lambda: "never" if ours["max_tries"] is None and ours["max_time"] is None else "at some time"

    def attempts() -> str:
        calls: list[float] = []
        with skipped_sleeps():
            ended(rk.retry(log=False)(failing(calls)))
        return f"{len(calls)} attempts"

    yield attempts


def seconds(call: Callable[[], object]) -> str:
    began = time.monotonic()
    ended(call)
    return f"{round((time.monotonic() - began) * 20) / 20:.2f}".rstrip("0").ljust(3, "0") + " s"


def deadline_of_a_plain_function() -> Iterator[Probe]:
    def of_tenacity() -> str:
        after = by_tenacity(wait=0.2, stop=tenacity.stop_after_delay(0.3))
        before = by_tenacity(wait=0.2, stop=tenacity.stop_before_delay(0.3))
        return f"{seconds(after(failing([])))}; {seconds(before(failing([])))} with `stop_before_delay`"

    yield of_tenacity
    yield lambda: seconds(by_stamina(None, 0.2, timeout=0.3)(failing([])))
    yield lambda: seconds(by_backoff(None, 0.2, max_time=0.3)(failing([])))
    yield lambda: seconds(by_reefknot(9, 0.2, deadline=0.3)(failing([])))


async def hanging() -> None:
    await asyncio.sleep(1)
    raise RefusedError


def deadline_of_an_attempt_that_hangs() -> Iterator[Probe]:
    limits: dict[str, Any] = {
        "tenacity": by_tenacity(wait=0.2, stop=tenacity.stop_after_delay(0.3)),
        "stamina": by_stamina(None, 0.2, timeout=0.3),
        "backoff": by_backoff(None, 0.2, max_time=0.3),
        "reefknot": by_reefknot(9, 0.2, deadline=0.3),
    }
    for decorate in limits.values():
        yield lambda decorate=decorate: seconds(lambda: asyncio.run(decorate(hanging)()))  # type: ignore[misc]


def calls_of_a_cancelled_task(decorate: Decorate) -> int:
    calls = 0

    async def work() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.05)

    async def main() -> None:
        task = asyncio.ensure_future(decorate(work)())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    return calls


def retries_a_cancelled_task() -> Iterator[Probe]:
    def answer(decorate: Decorate) -> bool:
        return calls_of_a_cancelled_task(decorate) > 1

    everything = tenacity.retry_if_exception(lambda error: True)
    yield lambda: "yes" if answer(by_tenacity(retry=everything)) else "no, never"
    yield lambda: "yes" if answer(by_stamina(on=lambda error: True)) else "no, never"

    def of_backoff() -> str:
        plain, asked = answer(by_backoff(on=Exception)), answer(by_backoff(on=BaseException))
        return "only if asked for `BaseException`" if asked and not plain else f"{plain}, {asked}"

    yield of_backoff
    yield lambda: "yes" if answer(by_reefknot(on=lambda error: True)) else "no, never"


def three_inside_three() -> Iterator[Probe]:
    def of(decorate: Decorate) -> str:
        calls: list[float] = []
        with skipped_sleeps():
            ended(decorate(3)(decorate(3)(failing(calls))))
        return f"{len(calls)} calls"

    for decorate in BY.values():
        yield lambda decorate=decorate: of(decorate)  # type: ignore[misc]


def raised_in_the_end() -> Iterator[Probe]:
    def error_of(decorate: Decorate) -> BaseException | None:
        with skipped_sleeps():
            return ended(decorate(failing([])))

    def of_tenacity() -> str:
        default = error_of(tenacity.retry(stop=tenacity.stop_after_attempt(2)))
        reraised = error_of(by_tenacity(2))
        original = "the original with `reraise=True`" if type(reraised) is RefusedError else "never the original"
        return f"`{type(default).__name__}`, or {original}"

    def of(decorate: Decorate) -> str:
        error = error_of(decorate(2))
        note = ", with a note" if getattr(error, "__notes__", None) else ""
        return f"the original{note}" if type(error) is RefusedError else type(error).__name__

    yield of_tenacity
    for name in LIBRARIES[1:]:
        yield lambda name=name: of(BY[name])  # type: ignore[misc]


def retried_by_default() -> Iterator[Probe]:
    def of_tenacity() -> str:
        everything = tenacity.Retrying().retry
        return "every `Exception`" if isinstance(everything, tenacity.retry_if_exception_type) else "something"

    def must_be_given(fn: Callable[..., Any], name: str) -> str:
        return "has to be given" if defaults_of(fn)[name] is inspect.Parameter.empty else "something"

    def of_reefknot() -> str:
        calls = [len(calls_with(error)) for error in (ConnectionError(), TimeoutError(), ValueError(), KeyError())]
        return "transient errors" if calls == [4, 4, 1, 1] else str(calls)

    def calls_with(error: Exception) -> list[int]:
        calls: list[int] = []

        def work() -> None:
            calls.append(1)
            raise error

        with skipped_sleeps():
            ended(rk.retry(log=False)(work))
        return calls

    yield of_tenacity
    yield lambda: must_be_given(stamina.retry, "on")
    yield lambda: must_be_given(backoff.on_exception, "exception")
    yield of_reefknot


def retry_after() -> Iterator[Probe]:
    def waited(decorate: Decorate) -> float:
        with skipped_sleeps() as slept:
            ended(decorate(failing([], HintedError)))
        return max(slept, default=0.0)

    yield lambda: "by hand" if waited(by_tenacity(2)) < 7 else "yes"
    hooked = by_stamina(2, on=lambda error: error.retry_after)
    yield lambda: "by a hook" if waited(by_stamina(2)) < 7 <= waited(hooked) else NONE

    def of_backoff() -> str:
        by_runtime = backoff.on_exception(
            backoff.runtime, RefusedError, value=lambda error: error.retry_after, max_tries=2, jitter=None
        )
        return "with `backoff.runtime`, by hand" if waited(by_backoff(2)) < 7 <= waited(by_runtime) else NONE

    def of_reefknot() -> str:
        bounded = waited(rk.retry(log=False, attempts=2, max_retry_after=5, max_delay=5)) == 0.0
        return "yes, bounded" if waited(rk.retry(log=False, attempts=2)) >= 7 and bounded else NONE

    yield of_backoff
    yield of_reefknot


class Client:
    """A method under each library."""

    @by_tenacity(3)
    def by_tenacity(self, path: str) -> str:
        return path

    @by_stamina(3)
    def by_stamina(self, path: str) -> str:
        return path

    @by_backoff(3)
    def by_backoff(self, path: str) -> str:
        return path

    @by_reefknot(3)
    def by_reefknot(self, path: str) -> str:
        return path


def override_for_one_call() -> Iterator[Probe]:
    client: Any = Client()

    def of_tenacity() -> str:
        changed = client.by_tenacity.retry_with(stop=tenacity.stop_after_attempt(1))
        return "`retry_with`, not on bound methods" if isinstance(ended(lambda: changed("/a")), TypeError) else "yes"

    yield of_tenacity
    yield lambda: _attributes(client.by_stamina)
    yield lambda: _attributes(client.by_backoff)
    bound = rk.using(client.by_reefknot, attempts=1)
    yield lambda: "`using`, bound methods too" if bound("/a") == "/a" else NONE


def _attributes(fn: Any) -> str:
    own = {name for name in vars(fn.__func__) if not name.startswith("__")}
    return NONE if not own else ", ".join(sorted(own))


def tests_without_waiting() -> Iterator[Probe]:
    yield lambda: "patch its sleep" if "sleep" in defaults_of(tenacity.Retrying.__init__) else NONE

    def of_stamina() -> str:
        with stamina.set_testing(True):
            return "a switch for the whole process" if stamina.is_testing() else NONE

    yield of_stamina
    yield lambda: NONE if hasattr(backoff, "testing") else "patch its sleep"

    def of_reefknot() -> str:
        with rk.testing.virtual_time() as clock:
            error = ended(by_reefknot(9, 20, deadline=30)(failing([])))
        spent = "deadline" in str(getattr(error, "__notes__", ""))
        return "virtual time, in which deadlines count" if clock.waits == [20.0] and spent else NONE

    yield of_reefknot


def breaker_and_throttle() -> Iterator[Probe]:
    for library in (tenacity, stamina, backoff):
        names = " ".join(dir(library)).lower()
        yield lambda names=names: "yes" if "breaker" in names or "throttle" in names else NONE  # type: ignore[misc]
    yield lambda: "yes" if callable(rk.CircuitBreaker) and callable(rk.RetryThrottle) else NONE


def attempt_count_of_minus_one() -> Iterator[Probe]:
    for name in LIBRARIES:

        def of(decorate: Decorate = BY[name]) -> str:
            return "an error at decoration" if ended(lambda: decorate(-1)) else "accepted"

        yield of


def because_of_a_result() -> Iterator[Probe]:
    def answers() -> Callable[[], object]:
        values = iter([None, "ready"])
        return lambda: next(values)

    def none(value: object) -> bool:
        return value is None

    def of(decorate: Decorate) -> str:
        with skipped_sleeps():
            return "yes" if decorate(answers())() == "ready" else NONE

    yield lambda: of(tenacity.retry(retry=tenacity.retry_if_result(none), stop=tenacity.stop_after_attempt(3)))
    yield lambda: "yes" if any("result" in name for name in defaults_of(stamina.retry)) else NONE
    yield lambda: of(backoff.on_predicate(backoff.constant, none, max_tries=3, interval=0, jitter=None))
    yield lambda: of(rk.retry(on_result=none))


def in_trio() -> Iterator[Probe]:
    for name in LIBRARIES:

        def of(decorate: Decorate = BY[name]) -> str:
            calls: list[float] = []
            work = failing(calls)

            async def awork() -> None:
                work()

            main: Callable[[], Awaitable[Any]] = decorate(3, 0.01)(awork)
            error = ended(lambda: trio.run(main))
            return "yes" if len(calls) == 3 and type(error) is RefusedError else NONE

        yield of


def metrics_built_in() -> Iterator[Probe]:
    yield lambda: "`statistics` of the last call" if hasattr(Client.by_tenacity, "statistics") else NONE
    hooks = stamina.instrumentation
    names = {"Prometheus": hooks.PrometheusOnRetryHook, "structlog": hooks.StructlogOnRetryHook}
    yield lambda: ", ".join(names)
    yield lambda: _attributes(Client().by_backoff)

    def of_reefknot() -> str:
        fn = by_reefknot(3)(failing([]))
        ended(fn)
        counted = (fn.statistics.calls, fn.statistics.retries, fn.statistics.give_ups)
        return "counters per function, hooks and a log line" if counted == (1, 2, 1) else str(counted)

    yield of_reefknot


def rules_that_combine() -> Iterator[Probe]:
    def of_tenacity() -> str:
        stop = tenacity.stop_after_attempt(2) | tenacity.stop_after_delay(9)
        wait = tenacity.wait_fixed(0) + tenacity.wait_random(0, 0)
        error = ended(tenacity.retry(stop=stop, wait=wait, reraise=True)(failing([])))
        return "yes" if type(error) is RefusedError else NONE

    yield of_tenacity
    yield lambda: "yes" if "stop" in defaults_of(stamina.retry) else NONE
    yield lambda: "yes" if "stop" in defaults_of(backoff.on_exception) else NONE

    def of_reefknot() -> str:
        import threading

        with rk.testing.virtual_time() as clock:
            ended(
                rk.retry(attempts=9, deadline=9, stop=threading.Event(), wait=lambda n: n + 1, log=False)(failing([]))
            )
        return "limits hold together; `wait=` is a function" if clock.waits == [2.0, 3.0] else str(clock.waits)

    yield of_reefknot


def value_instead_of_the_error() -> Iterator[Probe]:
    def of(decorate: Decorate) -> object:
        with skipped_sleeps():
            return decorate(failing([]))()

    yield lambda: "yes" if of(by_tenacity(retry_error_callback=lambda state: "cached")) == "cached" else NONE
    yield lambda: "yes" if any("back" in name for name in defaults_of(stamina.retry)) else NONE
    yield lambda: "`None` alone" if of(by_backoff(raise_on_giveup=False)) is None else NONE
    yield lambda: "yes, and its type is known" if of(by_reefknot(fallback="cached")) == "cached" else NONE


def a_predicate_without_an_argument() -> Iterator[Probe]:
    def of(decorate: Callable[[], Decorate]) -> str:
        """What becomes of the failure of the work."""
        try:
            fn = decorate()(failing([]))
        except Exception:
            return "an error at decoration"
        with skipped_sleeps():
            return "its `TypeError` is raised" if type(ended(fn)) is TypeError else "the failure of the work"

    predicate: Any = lambda: True  # noqa: E731 - as one writes it
    yield lambda: of(lambda: by_tenacity(retry=tenacity.retry_if_exception(predicate)))
    yield lambda: of(lambda: by_stamina(on=predicate))
    yield lambda: of(lambda: by_backoff(giveup=predicate))
    yield lambda: of(lambda: by_reefknot(on=predicate))


ROWS: dict[str, Callable[[], Iterator[Probe]]] = {
    "gives up by default": gives_up_by_default,
    "deadline of 0.3 s, waits of 0.2 s, plain function": deadline_of_a_plain_function,
    "deadline of 0.3 s, an async attempt that hangs for 1 s": deadline_of_an_attempt_that_hangs,
    "a predicate that accepts everything retries a cancelled task": retries_a_cancelled_task,
    "three attempts inside three attempts": three_inside_three,
    "raised in the end": raised_in_the_end,
    "retried by default": retried_by_default,
    "`Retry-After`": retry_after,
    "override for one call": override_for_one_call,
    "tests without waiting": tests_without_waiting,
    "circuit breaker, retry throttle": breaker_and_throttle,
    "an attempt count of −1": attempt_count_of_minus_one,
    "retry because of a returned value": because_of_a_result,
    "Trio": in_trio,
    "metrics built in": metrics_built_in,
    "stop and wait rules that combine": rules_that_combine,
    "a value instead of the last error": value_instead_of_the_error,
    "a predicate that takes no argument": a_predicate_without_an_argument,
}


def table(page: str) -> dict[str, list[str]]:
    """Cells of the table by the label of their row, without the heading."""
    section = page.partition("## Compared")[2]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").replace(r"\|", "¦").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows if row[0] and not set(row[0]) <= {"-"}}


def differences(page: str, wanted: list[str]) -> Iterator[str]:
    """Cells of the page that are not what came out, and rows that only one side has."""
    cells = table(page)
    named = {label: row for label, row in ROWS.items() if not wanted or any(label.startswith(one) for one in wanted)}
    if not wanted:
        labels = {next((row for row in ROWS if label.startswith(row)), label) for label in cells}
        yield from (f"{label}: no probe" for label in sorted(labels - ROWS.keys()))
    for label, probes in named.items():
        said = next((row for name, row in cells.items() if name.startswith(label)), None)
        if said is None:
            yield f"{label}: not in the table"
            continue
        for library, claim, probe in zip(LIBRARIES, said, probes(), strict=True):
            came_out = probe()
            if came_out != claim:
                yield f"{label}, {library}: the table says {claim!r}, it is {came_out!r}"


def main(arguments: list[str]) -> int:
    logging.disable(logging.CRITICAL)
    found = list(differences(PAGE.read_text(encoding="utf-8"), arguments))
    print("\n".join(found) or "every claim holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
