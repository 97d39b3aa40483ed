"""Tests of code that retries, without waiting. With pytest, the fixtures `virtual_time` and `no_wait` do the same."""

import asyncio
import time
from contextlib import suppress

import reefknot as rk


@rk.retry(on=ConnectionError, attempts=4, base_delay=60, max_delay=3600, jitter="none", deadline=600)
def nightly() -> None:
    raise ConnectionError("the archive sleeps")


def test_it_waits_one_two_and_four_minutes() -> None:
    with rk.testing.virtual_time() as clock:
        with suppress(ConnectionError):
            nightly()
        assert clock.waits == [60, 120, 240]


def test_its_deadline_leaves_no_room_after_a_slow_start() -> None:
    with rk.testing.virtual_time() as clock:
        retrier = rk.Retrier(attempts=4, base_delay=60, max_delay=3600, jitter="none", deadline=600)

        def slow() -> None:
            clock.advance(570)
            raise ConnectionError("after nine and a half minutes")

        outcome = retrier.run(slow)
        assert outcome.attempts == 1
        assert outcome.reason is rk.Reason.BUDGET_SPENT


def test_a_thousand_tasks_wait_side_by_side() -> None:
    async def flaky(failures: list[int]) -> str:
        if failures.pop():
            raise ConnectionError
        return "done"

    async def main() -> tuple[list[str], float]:
        retrier = rk.Retrier(attempts=3, base_delay=3600, max_delay=3600, jitter="none")
        answers = await asyncio.gather(*(retrier.acall(flaky, [0, 1, 1]) for _ in range(1000)))
        return answers, asyncio.get_running_loop().time()

    answers, hours = rk.testing.run_virtual(main())
    assert answers == ["done"] * 1000
    assert hours == 7200


started = time.monotonic()
for test in (
    test_it_waits_one_two_and_four_minutes,
    test_its_deadline_leaves_no_room_after_a_slow_start,
    test_a_thousand_tasks_wait_side_by_side,
):
    test()
    print(f"{test.__name__.replace('_', ' ')}: yes")
print(f"more than two hours took {time.monotonic() - started:.2f} s")
