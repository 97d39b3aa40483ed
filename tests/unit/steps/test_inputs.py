"""What is wrong with a block's inputs is said by name."""

from __future__ import annotations

from typing import Any

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepStatus
from reefknot.steps.inputs import Inputs, Refusal, text_or_base64


def test_an_unknown_input_is_named_with_the_known_ones() -> None:
    with pytest.raises(Refusal, match="colour: no such input; accepted: url, method, timeout_ms") as refused:
        Inputs({"colour": 1}, "url", "method")
    assert refused.value.code is ErrorCode.invalid_input


def test_a_missing_input_is_named_with_what_is_accepted() -> None:
    with pytest.raises(Refusal, match="url: missing; accepted: a URL") as refused:
        Inputs({"url": None}, "url").text("url", accepted="a URL")
    assert refused.value.code is ErrorCode.missing_required_field


def test_a_refusal_is_a_result_with_its_facts() -> None:
    result = Refusal(ErrorCode.permission_denied, "no", errno=13).result

    assert (result.status, result.error_code, result.error_message) == (
        StepStatus.ERROR,
        ErrorCode.permission_denied,
        "no",
    )
    assert result.metadata == {"errno": 13}


@pytest.mark.parametrize(("given", "expected"), [({}, True), ({"x": None}, True), ({"x": False}, False)])
def test_a_flag_has_a_default(given: dict[str, Any], expected: bool) -> None:
    assert Inputs(given, "x").flag("x", default=True) is expected


@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_a_flag_is_true_or_false_and_nothing_like_it(value: object) -> None:
    with pytest.raises(Refusal, match=r"x: .* accepted: true or false"):
        Inputs({"x": value}, "x").flag("x", default=True)


@pytest.mark.parametrize("value", ["not base64!", "YQ", 7])
def test_bytes_come_as_base64(value: object) -> None:
    assert Inputs({"x": "YQ=="}, "x").base64_bytes("x") == b"a"
    with pytest.raises(Refusal, match=r"x: .* accepted: base64 text"):
        Inputs({"x": value}, "x").base64_bytes("x")


def test_the_time_limit_is_the_shorter_of_two() -> None:
    assert Inputs({"timeout_ms": 500}).seconds(10.0) == 0.5
    assert Inputs({"timeout_ms": 50_000}).seconds(10.0) == 10.0
    assert Inputs({}).seconds(10.0) == 10.0


@pytest.mark.parametrize("value", [0, -1, "5", True, float("nan"), float("inf")])
def test_a_time_limit_is_a_number_above_nothing(value: object) -> None:
    with pytest.raises(Refusal, match="timeout_ms"):
        Inputs({"timeout_ms": value}).seconds(10.0)


def test_text_goes_out_as_text_and_bytes_as_base64() -> None:
    assert text_or_base64("é".encode(), text="body", base64="raw") == {"body": "é"}
    assert text_or_base64(b"\xff", text="body", base64="raw") == {"raw": "/w=="}
