"""Arguments of a submission: what becomes of them on the wire, and which ones are refused, by the caller's names."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from reefknot.errors import NotJsonError, ParameterError, ParameterTypeError
from reefknot.queue.model.arguments import LONGEST_DELAY_S, OPTIONS, check_names, due_time, validated, written
from reefknot.queue.model.messages import (
    LARGEST_MESSAGE,
    AssignmentOptions,
    Correlation,
    ExecAssignment,
    Job,
    encode,
)
from tests.rows import for_each_row

WALL = 1_700_000_000.0
CIRCLE: dict[str, Any] = {}
CIRCLE["again"] = CIRCLE


def submitted(inputs: Any = None, job_type: Any = "test.step", **options: Any) -> ExecAssignment:
    return written(job_type, inputs, options, "own")


# ---- what is written -------------------------------------------------------------------------------------------------


def test_without_options_a_job_has_its_own_id_and_no_bounds() -> None:
    assert submitted() == submitted({}) == ExecAssignment("own", "own", Job("test.step", {}))


def test_every_option_has_its_field_and_durations_are_milliseconds() -> None:
    bounds = {"deadline": timedelta(minutes=1), "timeout": 1.5, "attempt_timeout": 2}
    names = {"assignment_id": "a", "tenant_id": "t", "trace_id": "trace", "resource_class": "gpu"}
    options = AssignmentOptions(
        priority=7, deadline_ms=60_000, timeout_ms=1_500, attempt_timeout_ms=2_000, retry_count=3
    )
    found = submitted({"n": 1}, priority=7, retries=3, **bounds, **names)
    assert found == ExecAssignment(
        *("a", "own", Job("test.step", {"n": 1})),
        tenant_id="t",
        options=options,
        resource_class="gpu",
        correlation=Correlation("trace"),
    )


def test_none_is_as_if_the_option_were_left_out() -> None:
    names = ("deadline", "timeout", "attempt_timeout", "retries", "resource_class", "assignment_id", "tenant_id")
    assert submitted(**dict.fromkeys((*names, "trace_id"))) == submitted()


def test_a_duration_below_a_millisecond_is_one_millisecond() -> None:
    assert submitted(timeout=1e-9).options.timeout_ms == 1


def test_every_json_value_travels_and_a_tuple_becomes_a_list() -> None:
    found = submitted({"a": (1, (2,)), "b": None, "c": [True, 1.5, 2**70], "d": {"e": "ü"}})
    assert found.job.payload == {"a": [1, [2]], "b": None, "c": [True, 1.5, 2**70], "d": {"e": "ü"}}


def test_the_bytes_of_a_validated_assignment_are_those_of_the_given_one() -> None:
    given = ExecAssignment("a", "r", Job("test.step", {"n": 1}), metadata={"k": "v"}, decision={"d": 1})
    assert validated(given) == (given, encode(given))


# ---- what is refused -------------------------------------------------------------------------------------------------


@for_each_row(
    ("value", "place", "problem"),
    [
        (object(), "inputs.x", "object has no JSON form"),
        (math.nan, "inputs.x", "nan has no JSON form"),
        (math.inf, "inputs.x", "inf has no JSON form"),
        (b"bytes", "inputs.x", "bytes has no JSON form"),
        ({1, 2}, "inputs.x", "set has no JSON form"),
        (datetime(2026, 1, 1, tzinfo=UTC), "inputs.x", "datetime has no JSON form"),
        ({1: "a"}, "inputs.x", "a key is text, not int"),
        ([1, [{"deep": -math.inf}]], "inputs.x[1][0].deep", "-inf has no JSON form"),
        ("\ud800", "inputs", "half a surrogate pair is not text"),
    ],
)
def test_inputs_that_json_cannot_say_are_refused_with_their_place(value: Any, place: str, problem: str) -> None:
    with pytest.raises(NotJsonError) as caught:
        submitted({"x": value})
    assert (caught.value.path, caught.value.problem) == (place, problem)


def test_inputs_that_contain_themselves_are_refused() -> None:
    with pytest.raises(NotJsonError, match=r"^inputs\.x\.again.* is not JSON: nested deeper than 64"):
        submitted({"x": CIRCLE})


@for_each_row("field", ["metadata", "decision"])
def test_the_other_free_fields_are_as_strict_as_inputs(field: str) -> None:
    given: dict[str, Any] = {field: {"x": {1, 2}}}
    with pytest.raises(NotJsonError, match=rf"^{field}\.x is not JSON: set"):
        validated(ExecAssignment("a", "r", Job("test.step"), **given))


def test_a_value_without_json_form_outside_of_the_free_fields_is_refused_too() -> None:
    with pytest.raises(NotJsonError, match=r"^the assignment is not JSON: .*object"):
        submitted(priority=object())


@for_each_row(
    ("given", "kind", "told"),
    [
        ({"job_type": ""}, ParameterError, "job_type='' is not accepted: printable text of 1 to 256 characters"),
        ({"job_type": 5}, ParameterTypeError, "job_type=5 is not accepted: Expected `str`, got `int`"),
        ({"retries": -1}, ParameterError, "retries=-1 is not accepted: a whole number from 0 to 100"),
        ({"retries": "3"}, ParameterTypeError, "retries='3' is not accepted: Expected `int | null`, got `str`"),
        ({"trace_id": 5}, ParameterTypeError, "trace_id=5 is not accepted: Expected `str | null`, got `int`"),
        (
            *({"inputs": {"timeout_ms": -1}}, ParameterError),
            "inputs.timeout_ms=-1 is not accepted: a whole number from 1 to 315360000000",
        ),
        (
            {"deadline": 0},
            ParameterError,
            "deadline=0 is not accepted: a number of seconds above 0, at most 1000000000",
        ),
        (
            *({"timeout": "1"}, ParameterTypeError),
            "timeout='1' is not accepted: a number of seconds above 0, at most 1000000000",
        ),
    ],
)
def test_a_mistake_is_told_by_the_callers_name(given: dict[str, Any], kind: type[ParameterError], told: str) -> None:
    with pytest.raises(ParameterError) as caught:
        submitted(**given)
    assert (type(caught.value), str(caught.value)) == (kind, told)


def test_without_names_a_mistake_is_told_by_the_field_of_the_wire() -> None:
    with pytest.raises(ParameterError, match=r"^job\.type='' is not accepted"):
        validated(ExecAssignment("a", "r", Job("")))


def test_a_message_that_is_too_large_is_a_mistake_of_its_inputs() -> None:
    with pytest.raises(ParameterError, match=rf"^inputs=.* is not accepted: at most {LARGEST_MESSAGE}$"):
        submitted({"x": "x" * LARGEST_MESSAGE})


@dataclass
class Data:
    n: int = 1


class Record(msgspec.Struct):
    n: int = 1


class Pydantic:
    def model_dump(self) -> None: ...


class Attrs:
    __attrs_attrs__ = ()


@for_each_row(
    ("inputs", "way"),
    [
        (Data(), "; for a dataclass pass dataclasses.asdict(value)"),
        (Record(), "; for a msgspec.Struct pass msgspec.to_builtins(value)"),
        (Pydantic(), '; for a pydantic model pass model.model_dump(mode="json")'),
        (Attrs(), "; for an attrs class pass attrs.asdict(value)"),
        (Data, ""),
        ([1], ""),
        ("text", ""),
    ],
)
def test_inputs_that_are_no_mapping_are_refused_with_the_call_that_makes_one(inputs: Any, way: str) -> None:
    with pytest.raises(ParameterTypeError) as caught:
        submitted(inputs)
    assert caught.value.accepted == f"a mapping of names to JSON values, or None{way}"


def test_every_option_that_exists_is_accepted_by_its_name() -> None:
    check_names(dict.fromkeys(OPTIONS), OPTIONS)


@for_each_row(
    ("name", "meant"),
    [("eta", "; did you mean 'at'?"), ("retrys", "; did you mean 'retries'?"), ("zzz", "")],
)
def test_an_option_that_does_not_exist_is_refused_with_the_one_that_may_be_meant(name: str, meant: str) -> None:
    with pytest.raises(ParameterTypeError) as caught:
        check_names({"retries": 1, name: 5}, OPTIONS)
    assert str(caught.value) == f"{name}=5 is not accepted: no such option{meant}; accepted: {', '.join(OPTIONS)}"


# ---- when it is due --------------------------------------------------------------------------------------------------


@for_each_row(
    ("delay", "at", "due"),
    [
        (None, None, 0),
        (0, None, 0),
        (1.5, None, 1_700_000_001_500),
        (timedelta(minutes=1), None, 1_700_000_060_000),
        (LONGEST_DELAY_S, None, 2_015_360_000_000),
        (None, datetime.fromtimestamp(WALL + 5, UTC), 1_700_000_005_000),
        (None, datetime.fromtimestamp(WALL + 5), 1_700_000_005_000),  # noqa: DTZ006 - without a zone it is local
        (None, datetime(2000, 1, 1, tzinfo=UTC), 946_684_800_000),
        (None, datetime.fromtimestamp(WALL + LONGEST_DELAY_S, UTC), 2_015_360_000_000),
    ],
)
def test_a_job_is_due_after_its_delay_or_at_its_time_else_now(delay: Any, at: Any, due: int) -> None:
    assert due_time(delay, at, WALL) == due


@for_each_row(
    ("delay", "at", "kind", "told"),
    [
        (1, datetime(2026, 1, 1, tzinfo=UTC), ParameterError, "^at=.*not together with delay; give one of them"),
        (None, "tomorrow", ParameterTypeError, "^at='tomorrow' .*a datetime; without a zone it is local"),
        (None, datetime(2040, 1, 1, tzinfo=UTC), ParameterError, "^at=.*a time within the next ten years"),
        (-1, None, ParameterError, "^delay=-1 .*a number of seconds from 0 to 315360000"),
        (LONGEST_DELAY_S + 1, None, ParameterError, "^delay=.*a number of seconds from 0 to 315360000"),
        ("5", None, ParameterTypeError, "^delay='5' .*a number of seconds"),
    ],
)
def test_a_due_time_that_is_none_is_refused(delay: Any, at: Any, kind: type[ParameterError], told: str) -> None:
    with pytest.raises(ParameterError, match=told) as caught:
        due_time(delay, at, WALL)
    assert type(caught.value) is kind
