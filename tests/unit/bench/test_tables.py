"""The real tables run, and every retrier in them does what it was ordered to do."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from bench import peers
from bench.measure import Effort, Timing
from bench.table import filled
from bench.tables import retry_failing, retry_success, starting

LEAST = Effort(rounds=1, batch_seconds=0.0001, process_rounds=1)
RETRIERS = {"hand loop": peers.hand_loop, "terse": peers.terse_loop, "any": peers.loop_for_any, "reefknot": peers.ours}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with peers.silence():
        yield


class Service:
    """Fails so often, then answers; counts how often it was asked."""

    def __init__(self, failures: int, error: type[Exception] = ConnectionError) -> None:
        self.calls = 0
        self._failures = failures
        self._error = error

    def __call__(self, x: int) -> int:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error("refused")
        return x


@pytest.mark.parametrize("name", [*RETRIERS, *peers.SYNC_PEERS])
def test_every_retrier_makes_three_executions_and_repeats_no_error_that_is_not_in_its_list(name: str) -> None:
    decorate = (RETRIERS | peers.SYNC_PEERS)[name]
    cases = [(Service(2), None, 3), (Service(1, KeyError), KeyError, 1), (Service(99), ConnectionError, 3)]
    for service, error, calls in cases[: 2 if name == "google-api-core" else 3]:  # which does not count

        def work(x: int, service: Service = service) -> int:
            """As a function: not every peer wraps an object."""
            return service(x)

        with pytest.raises(error) if error else nullcontext():
            assert decorate(work)(7) == 7
        assert service.calls == calls


@pytest.mark.parametrize("decorate", [peers.hand_loop_async, peers.ours, *peers.ASYNC_PEERS.values()])
def test_every_async_retrier_succeeds_at_the_third_execution(decorate: Callable[[Any], Any]) -> None:
    service = Service(failures=2)

    async def work(x: int) -> int:
        return service(x)

    assert asyncio.run(decorate(work)(7)) == 7
    assert service.calls == 3


@pytest.mark.parametrize("table", [*retry_success.TABLES, *retry_failing.TABLES], ids=lambda table: table.name)
def test_every_table_of_calls_fills(table: Any) -> None:
    result = filled(table, table.run(LEAST))

    assert all(row.seconds > 0 for row in result.rows)
    assert {row.name for row in result.rows} >= set(table.targets)


def test_an_import_that_fails_is_an_error_and_no_figure() -> None:
    with pytest.raises(Exception, match="non-zero exit status 1"):
        starting.starting("broken", "import no_such_module_anywhere").batch(1)


def test_the_price_of_a_feature_is_the_difference_to_the_bare_retrier() -> None:
    timings = {"reefknot": Timing(1e-6, 1e-6), "reefknot, deadline": Timing(1.25e-6, 1e-6)}

    assert retry_success.price(timings, ("reefknot, deadline",)).endswith("bare retrier: deadline +0.25 µs.")


def test_the_first_failure_is_told_together_with_what_the_import_saved() -> None:
    """Import 10 ms above empty and 40 ms at the first failure, against 30 and 1."""
    timings = {"empty": 0.010, starting.OURS: 0.020, starting.TENACITY: 0.040}
    first = {"reefknot": 0.040, "tenacity": 0.001}
    text = starting.first_failure(*({name: Timing(s, s) for name, s in one.items()} for one in (timings, first)))
    assert "takes 40.0 ms (tenacity: 1.0 ms)" in text
    assert "reefknot 50.0 ms, tenacity 31.0 ms" in text


def test_loggers_are_as_before_after_a_silence() -> None:
    logger = logging.getLogger("reefknot")
    before = (logger.handlers, logger.propagate)
    with peers.silence():
        assert logger.handlers is not before[0]
        assert not logger.propagate
    assert (logger.handlers, logger.propagate) == before
