"""The connectors that are built in, number by number."""

from typing import Any

import pytest

from reefknot.core.retry.defaults import CONNECTORS, OTHER_CONNECTORS, JobType

ROWS = [
    ("local_files", 3, 30, 300, 0.2, None, None),
    ("obsidian_vault", 3, 30, 300, 0.2, None, None),
    ("imap_mailbox", 5, 120, 1800, 0.3, 7, 600),
    ("github_repository", 5, 300, 3600, 0.25, None, 900),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_a_connector_has_the_documented_numbers(row: tuple[Any, ...]) -> None:
    assert tuple(CONNECTORS[JobType(row[0])]) == row[1:]


def test_every_job_type_has_numbers_of_its_own() -> None:
    assert [job_type.value for job_type in JobType] == [row[0] for row in ROWS]
    assert list(CONNECTORS) == list(JobType)


def test_any_other_connector_gets_three_retries_from_one_minute_to_thirty() -> None:
    other = OTHER_CONNECTORS

    assert (other.max_attempts, other.base_delay_seconds, other.max_delay_seconds) == (3, 60, 1800)
    assert (other.jitter_factor, other.transient_max_attempts, other.rate_limit_delay_seconds) == (0.2, None, None)
