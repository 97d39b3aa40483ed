"""The public tools for tests: `virtual_time`, `no_wait`, `run_virtual`, and the fixtures."""

import asyncio
import time
from importlib.metadata import entry_points

import pytest

import reefknot as rk
from reefknot import clock as timing
from reefknot.runtime.clocks import SkippingClock, VirtualClock
from tests.unit.retrying.flaky import Always, AsyncAlways, AsyncFlaky, Flaky

pytest_plugins = ["pytester"]


def test_virtual_time_counts_waits_and_deadlines_and_takes_none() -> None:
    began = time.perf_counter()
    with rk.testing.virtual_time() as clock:
        outcome = rk.Retrier(attempts=999, base_delay=30, jitter="none", deadline=3600).run(Always())
    assert time.perf_counter() - began < 60, "an hour in virtual time is no hour"
    assert outcome.reason is rk.Reason.BUDGET_SPENT
    assert clock.waited == outcome.elapsed == 3570.0


@pytest.mark.real_time
async def test_virtual_time_works_in_async_code() -> None:
    with rk.testing.virtual_time() as clock:
        await rk.retry(base_delay=30, jitter="none")(AsyncFlaky(ConnectionError))()
    assert clock.waits == [30.0]


def test_a_slow_attempt_is_told_by_advancing_the_clock() -> None:
    with rk.testing.virtual_time(start=50) as clock:
        assert clock.now() == 50
        outcome = rk.Retrier(deadline=5).run(lambda: clock.advance(3))
    assert outcome.elapsed == 3


def test_no_wait_counts_waits_and_brings_no_deadline_nearer() -> None:
    with rk.testing.no_wait() as clock:
        outcome = rk.Retrier(attempts=20, base_delay=30, jitter="none", deadline=60).run(Always())
    assert (outcome.attempts, outcome.elapsed) == (20, 0.0)
    assert clock.waits == [30.0] * 19


def test_run_virtual_gives_the_value_or_the_error_and_is_scoped_to_its_loop() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return timing.now()

    assert rk.testing.run_virtual(main()) == 3600.0
    assert timing.now is time.monotonic
    with pytest.raises(ConnectionError, match="call 4"):
        rk.testing.run_virtual(rk.retry(AsyncAlways())())


async def test_a_thousand_retries_wait_side_by_side() -> None:
    """Each waits 1 + 2 + 4 s; together they take no longer than one."""
    call = rk.retry(base_delay=1, jitter="none")
    await asyncio.gather(*(call(AsyncFlaky(*[ConnectionError] * 3))() for _ in range(1000)))

    assert timing.now() == 7.0


@pytest.mark.parametrize(("fixture", "now"), [("virtual_time", 1030.0), ("no_wait", 1000.0)])
def test_a_fixture_is_the_clock_that_counts(request: pytest.FixtureRequest, fixture: str, now: float) -> None:
    clock: VirtualClock | SkippingClock = request.getfixturevalue(fixture)
    rk.retry(base_delay=30, jitter="none")(Flaky(ConnectionError))()
    assert (clock.waits, timing.now()) == ([30.0], now)


def test_the_fixtures_end_with_their_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import time
        from reefknot import clock as timing
        from reefknot.retrying.plan import retry_switch

        def test_inside(virtual_time):
            assert timing.now() == 1000.0

        def test_after():
            assert timing.now is time.monotonic

        def test_no_wait(no_wait):
            timing.sleep(3600)
            assert no_wait.waits == [3600]

        def test_after_that():
            assert timing.now is time.monotonic

        def test_no_retry(no_retry):
            assert retry_switch.is_off

        def test_after_all():
            assert not retry_switch.is_off
        """
    )
    # Hypothesis loads Trio, which does not take being loaded twice in one process.
    only_ours = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    pytester.runpytest_inprocess(*only_ours).assert_outcomes(passed=6)


def test_the_fixtures_are_there_by_installing_and_the_public_names_load() -> None:
    (plugin,) = [entry for entry in entry_points(group="pytest11") if entry.name == "reefknot"]
    assert plugin.value == "reefknot.testing.pytest_plugin"
    assert all(getattr(rk.testing, name) for name in rk.testing.__all__)


def test_attempts_may_be_limited_for_the_code_inside() -> None:
    def refused() -> None:
        raise ConnectionError

    with rk.testing.no_wait(), rk.testing.no_retry(attempts=2):
        assert rk.Retrier(attempts=9).run(refused).attempts == 2
        outcome = rk.Retrier(attempts=1).run(refused)
        with rk.testing.no_retry():
            assert rk.Retrier(attempts=9).run(refused).attempts == 1
    assert outcome.attempts == 1
    with rk.testing.no_wait():
        assert rk.Retrier(attempts=9).run(refused).attempts == 9
    with pytest.raises(rk.ParameterError, match=r"^attempts=0 "), rk.testing.no_retry(attempts=0):
        pass
