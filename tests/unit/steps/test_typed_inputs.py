"""The annotated type of a step's inputs: they are read into it first, or the step fails by the names of its fields."""

import asyncio
import dataclasses
import json
import os
from collections.abc import Mapping, MutableMapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import pydantic
import pytest

from reefknot.core.failure import ErrorCode
from reefknot.errors import ParameterTypeError
from reefknot.queue.model.messages import StepResult
from reefknot.steps.port import BlockContext
from reefknot.steps.python import BlockRegistry, block
from tests.rows import for_each_row
from tests.warm_commands import run_warm

CONTEXT = BlockContext("a", 1, "a/0", 30.0)


@dataclasses.dataclass
class Line:
    name: str
    count: int = 1


@dataclasses.dataclass
class DataclassOrder:
    amount: int
    lines: list[Line] = dataclasses.field(default_factory=list)


class StructOrder(msgspec.Struct):
    amount: int
    lines: list[Line] = []
    due: datetime | None = None


class ModelOrder(pydantic.BaseModel):
    amount: int = pydantic.Field(ge=1)
    lines: list[Line] = []


class DictOrder(TypedDict):
    amount: int
    lines: NotRequired[list[Line]]


@pydantic.dataclasses.dataclass
class CheckedOrder:
    amount: int
    lines: list[Line] = dataclasses.field(default_factory=list)


def run(function: Any, inputs: dict[str, Any]) -> StepResult:
    """The result of one attempt of this function as a step."""
    registry = BlockRegistry()
    block("order.pay", into=registry)(function)
    (step,) = registry.blocks().values()
    return asyncio.run(step.run(inputs, CONTEXT))


def step_for(kind: Any, seen: list[Any]) -> Any:
    """An async step whose inputs have this type."""

    async def pay(inputs: Any, context: BlockContext) -> None:
        seen.append(inputs)

    pay.__annotations__["inputs"] = kind
    return pay


TYPED = [DataclassOrder, StructOrder, ModelOrder, DictOrder, CheckedOrder]


@pytest.mark.parametrize("kind", TYPED)
def test_inputs_that_fit_are_read_into_the_type(kind: Any) -> None:
    seen: list[Any] = []

    assert run(step_for(kind, seen), {"amount": 7, "lines": [{"name": "rope"}]}).ok
    (order,) = seen
    if kind is DictOrder:
        assert order == {"amount": 7, "lines": [Line("rope", 1)]}
    else:
        assert isinstance(order, kind)
        assert (order.amount, order.lines) == (7, [Line("rope", 1)])


@pytest.mark.parametrize("kind", TYPED)
@for_each_row(
    ("inputs", "field"),
    [
        ({"amount": "seven"}, "inputs.amount: "),
        ({}, "inputs.amount: "),
        ({"amount": 7, "lines": [{"name": "a"}, {"name": 5}]}, "inputs.lines"),
        ({"amount": 7, "lines": "rope"}, "inputs.lines: "),
    ],
)
def test_inputs_that_do_not_fit_fail_for_good_by_the_field(kind: Any, inputs: dict[str, Any], field: str) -> None:
    seen: list[Any] = []
    result = run(step_for(kind, seen), inputs)

    assert (result.error_code, seen) == (ErrorCode.invalid_input, [])
    assert result.error_message.startswith(field), result.error_message
    assert "rope" not in result.error_message, "values may be secret"


def test_a_model_of_pydantic_has_its_own_rules_and_many_mistakes_are_named_up_to_a_number() -> None:
    message = run(step_for(ModelOrder, []), {"amount": 0}).error_message
    assert message == "inputs.amount: Input should be greater than or equal to 1"

    many = pydantic.create_model("Many", **{f"f{n}": (int, ...) for n in range(9)})  # type: ignore[call-overload]
    message = run(step_for(many, []), {}).error_message
    assert message.count("Field required") == 5
    assert message.endswith("; and 4 more")


@pytest.mark.parametrize(
    "kind",
    [
        *(Any, object, dict, Mapping, MutableMapping, dict[str, Any], dict[str, int], Mapping[str, Any]),
        *(MutableMapping[str, str], Annotated[dict[str, Any], "order"], "dict[str, Any]", "Mapping[str, object]"),
        "only_for_checkers.Mapping[str, Any]",
    ],
)
def test_plain_mappings_are_passed_as_they_are(kind: Any) -> None:
    seen: list[Any] = []
    given = {"amount": "seven"}

    assert run(step_for(kind, seen), given).ok
    assert seen == [given]
    assert run(lambda inputs, context: {"got": inputs["a"]}, {"a": 1}).outputs == {"got": 1}, "nor without one"


def test_a_plain_function_an_annotated_type_and_a_class_of_the_function_around_are_read_the_same() -> None:
    class Local(msgspec.Struct):
        amount: int

    def pay(inputs: Annotated[StructOrder, "of a shop"], context: BlockContext) -> dict[str, int]:
        return {"paid": inputs.amount}

    async def pay_local(inputs: Local, context: BlockContext) -> dict[str, int]:
        return {"paid": inputs.amount}

    assert run(pay, {"amount": 7}).outputs == {"paid": 7}
    assert run(pay, {"amount": None}).error_message.startswith("inputs.amount: ")
    registry = BlockRegistry()
    block("order.local", into=registry)(pay_local)
    (step,) = registry.blocks().values()
    assert asyncio.run(step.run({"amount": 3}, CONTEXT)).outputs == {"paid": 3}


class OpenOrder(msgspec.Struct):
    amount: int
    place: Path


class Odd:
    """No record of any kind."""


@for_each_row(
    ("kind", "words"),
    [
        (int, ("inputs='int'", "a mapping (dict[str, Any])", "a pydantic model, a dataclass, a msgspec.Struct")),
        (Odd, ("inputs='Odd'", "a TypedDict")),
        (list[int], ("inputs=", "list", "a dataclass")),
        (StructOrder | None, ("inputs=", "StructOrder | None")),
        ("Unknwon", ("inputs='Unknwon'", "NameError: name 'Unknwon' is not defined")),
        (OpenOrder, ("inputs.place='Path'", "a type that JSON can be read into")),
    ],
)
def test_an_annotation_that_is_not_understood_is_refused_when_the_step_is_decorated(
    kind: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(ParameterTypeError) as caught:
        block("order.pay", into=BlockRegistry())(step_for(kind, []))
    for one in words:
        assert one in str(caught.value)


# ---- outputs ---------------------------------------------------------------------------------------------------------


@for_each_row(
    ("answer", "outputs"),
    [
        (Line("rope", 2), {"name": "rope", "count": 2}),
        (StructOrder(7, [Line("rope")]), {"amount": 7, "lines": [{"name": "rope", "count": 1}], "due": None}),
        (ModelOrder(amount=7), {"amount": 7, "lines": []}),
        (CheckedOrder(amount=7), {"amount": 7, "lines": []}),
    ],
)
def test_a_model_is_the_outputs_that_it_says(answer: Any, outputs: dict[str, Any]) -> None:
    assert run(lambda inputs, context: answer, {}).outputs == outputs


def test_a_model_inside_of_other_outputs_is_written_too_and_what_json_cannot_hold_fails_the_step() -> None:
    @dataclasses.dataclass
    class Holder:
        order: object

    @dataclasses.dataclass
    class Both:
        order: ModelOrder

    order = {"amount": 7, "lines": []}
    assert run(lambda inputs, context: {"orders": [ModelOrder(amount=7)]}, {}).outputs == {"orders": [order]}
    assert run(lambda inputs, context: Both(ModelOrder(amount=7)), {}).outputs == {"order": order}
    assert "returned what JSON cannot say" in str(run(lambda inputs, context: Holder(object()), {}))


# ---- from outside ----------------------------------------------------------------------------------------------------

STEPS = """\
import pydantic
import reefknot as rk

class Order(pydantic.BaseModel):
    amount: int

@rk.block("order.pay", attempts=5, base_delay=0.01)
async def pay(inputs: Order, context: rk.BlockContext) -> Order:
    return inputs
"""


def test_a_bad_input_spends_no_retries_and_its_message_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "reefknot.yaml").write_text("worker: {retries: {v2: {enabled: true}}, queue: {v2: {enabled: true}}}\n")
    jobs = [
        {"assignment_id": name, "job": {"type": "order.pay", "payload": payload}}
        for name, payload in (("good", {"amount": 7}), ("bad", {"amount": "much"}))
    ]
    (tmp_path / "work.json").write_text(json.dumps(jobs))
    words = ("run", "work.json", "--module", "steps", "--results", "results.jsonl")

    ran = run_warm(*words, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)})

    assert ran.returncode == 1, ran.stderr
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    results = {one["assignment_id"]: one for one in map(json.loads, lines)}
    assert results["good"]["output"] == {"amount": 7}
    bad = results["bad"]
    assert (bad["error_code"], bad["retries_used"]) == ("INVALID_INPUT", 0)
    assert bad["error_message"].startswith("inputs.amount: Input should be a valid integer")
