"""What PostgreSQL says, in our words."""

import psycopg
import pytest
from psycopg.errors import lookup

from reefknot.core.classify import retryable_code
from reefknot.core.failure import ErrorCode
from reefknot.steps.sql_postgres import refusal_for

PASSING = ("08000", "08006", "40001", "40P01", "53300", "53200", "55P03", "57014", "57P01", "57P03", "58030")
LASTING = {
    **dict.fromkeys(("22012", "22P02", "23505", "23503", "42601", "42P01", "42703", "0A000", "54001"), "invalid_input"),
    **dict.fromkeys(("42501", "25006", "28000", "28P01"), "permission_denied"),
    **dict.fromkeys(("08P01", "P0001", "57P04"), "execution_failed"),
    "XX000": "internal_error",
}


def error_of(state: str) -> psycopg.Error:
    try:
        return lookup(state)("it says so")
    except KeyError:
        error = psycopg.DatabaseError("it says so")
        error.sqlstate = state
        return error


@pytest.mark.parametrize("state", PASSING)
def test_what_passes_is_told_by_a_code_that_is_retried(state: str) -> None:
    assert retryable_code(refusal_for(error_of(state)).code)


@pytest.mark.parametrize(("state", "code"), LASTING.items())
def test_what_stays_is_told_by_a_code_that_is_not(state: str, code: str) -> None:
    refusal = refusal_for(error_of(state))

    assert refusal.code is ErrorCode[code]
    assert not retryable_code(refusal.code)
    assert refusal.metadata == {"sqlstate": state}


def test_a_server_that_cannot_be_reached_and_parameters_that_do_not_fit_are_told_apart() -> None:
    assert refusal_for(psycopg.OperationalError("connection refused")).code is ErrorCode.network_error
    refusal = refusal_for(psycopg.ProgrammingError("the query has 2 placeholders but 1 parameters were passed"))
    assert refusal.code is ErrorCode.invalid_input
    assert str(refusal).startswith("params: ")
