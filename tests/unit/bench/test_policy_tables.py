"""The policy tables measure what they say."""

import sys
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from bench.measure import Effort
from bench.table import Table, filled
from bench.tables import policy

LEAST = Effort(rounds=1, batch_seconds=0.0001, process_rounds=1)


@pytest.mark.parametrize("table", policy.TABLES[1:], ids=lambda table: table.name)
def test_every_table_of_calls_fills(table: Table) -> None:
    result = filled(table, table.run(LEAST))

    assert all(row.seconds > 0 for row in result.rows)


def test_a_policy_that_was_seen_before_costs_less_than_a_new_one() -> None:
    timings = policy.run_resolve(Effort(rounds=5, batch_seconds=0.001, process_rounds=1)).timings

    assert timings[policy.CACHED].best < timings[policy.FIRST].best / 5


def test_a_command_that_fails_is_an_error_and_no_figure(tmp_path: Path) -> None:
    with pytest.raises(CalledProcessError):
        policy.command("broken", (sys.executable, "-c", "raise SystemExit(2)"), tmp_path).batch(1)
