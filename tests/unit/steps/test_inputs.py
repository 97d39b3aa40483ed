"""What is wrong with a block's inputs is said by name."""

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepStatus
from reefknot.steps.inputs import Inputs, Refusal, text_or_base64


def test_an_unknown_and_a_missing_input_are_named_with_what_is_accepted() -> None:
    with pytest.raises(Refusal, match="colour: no such input; accepted: url, method, timeout_ms") as refused:
        Inputs({"colour": 1}, "url", "method")
    assert refused.value.code is ErrorCode.invalid_input
    with pytest.raises(Refusal, match="url: missing; accepted: a URL") as refused:
        Inputs({"url": None}, "url").text("url", accepted="a URL")
    assert refused.value.code is ErrorCode.missing_required_field


def test_a_refusal_is_a_result_with_its_facts_and_bytes_go_out_as_base64() -> None:
    result = Refusal(ErrorCode.permission_denied, "no", errno=13).result
    said = (result.status, result.error_code, result.error_message, result.metadata)
    assert said == (StepStatus.ERROR, ErrorCode.permission_denied, "no", {"errno": 13})

    assert text_or_base64("é".encode(), text="body", base64="raw") == {"body": "é"}
    assert text_or_base64(b"\xff", text="body", base64="raw") == {"raw": "/w=="}


@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_a_flag_has_a_default_and_is_true_or_false_and_nothing_like_it(value: object) -> None:
    for given, expected in (({}, True), ({"x": None}, True), ({"x": False}, False)):
        assert Inputs(given, "x").flag("x", default=True) is expected
    with pytest.raises(Refusal, match=r"x: .* accepted: true or false"):
        Inputs({"x": value}, "x").flag("x", default=True)


@pytest.mark.parametrize("value", ["not base64!", "YQ", 7])
def test_bytes_come_as_base64(value: object) -> None:
    assert Inputs({"x": "YQ=="}, "x").base64_bytes("x") == b"a"
    with pytest.raises(Refusal, match=r"x: .* accepted: base64 text"):
        Inputs({"x": value}, "x").base64_bytes("x")


@pytest.mark.parametrize("value", [0, -1, "5", True, float("nan"), float("inf")])
def test_the_time_limit_is_the_shorter_of_two_and_a_number_above_nothing(value: object) -> None:
    for given, seconds in (({"timeout_ms": 500}, 0.5), ({"timeout_ms": 50_000}, 10.0), ({}, 10.0)):
        assert Inputs(given).seconds(10.0) == seconds
    with pytest.raises(Refusal, match="timeout_ms"):
        Inputs({"timeout_ms": value}).seconds(10.0)
