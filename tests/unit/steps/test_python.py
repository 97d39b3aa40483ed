"""Functions as blocks, and the names under which a worker finds its blocks."""

import asyncio
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.errors import ConfigurationError, ParameterError, ParameterTypeError
from reefknot.queue.model.messages import StepResult, StepStatus
from reefknot.steps import python
from reefknot.steps.port import Block, BlockContext
from reefknot.steps.python import (
    ALIASES,
    BlockRegistry,
    PythonBlock,
    block,
    by_name,
    load_entry_points,
    load_module,
    standard_blocks,
)

CONTEXT = BlockContext("a", 1, "a/0", 5.0)


def run(one: Block, **inputs: Any) -> StepResult:
    return asyncio.run(one.run(inputs, CONTEXT))


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> BlockRegistry:
    """The process's registry is left as it was."""
    fresh = BlockRegistry()
    monkeypatch.setattr(python, "registry", fresh)
    return fresh


def test_an_async_function_becomes_a_block_and_a_plain_one_runs_in_another_thread(own_registry: BlockRegistry) -> None:
    @block("invoice.render")
    async def render(inputs: Mapping[str, Any], context: BlockContext) -> dict[str, Any]:
        return {"page": inputs["id"], "key": context.idempotency_key}

    made = own_registry.blocks()["invoice.render"]

    assert run(made, id=7).outputs == {"page": 7, "key": "a/0"}
    assert made.destination({}) == "invoice.render"
    assert asyncio.run(render({"id": 8}, CONTEXT)) == {"page": 8, "key": "a/0"}

    @block("slow.sum", destination="calculator")
    def total(inputs: Mapping[str, Any], context: BlockContext) -> dict[str, Any]:
        return {"thread": threading.get_ident()}

    made = own_registry.blocks()["slow.sum"]

    assert run(made).outputs["thread"] != threading.get_ident()
    assert made.destination({}) == "calculator"


@dataclass
class Page:
    number: int


@pytest.mark.parametrize(
    ("answer", "outputs"),
    [(None, {}), ({}, {}), ({"a": [1, 2]}, {"a": [1, 2]}), ({"a": Page(1)}, {"a": {"number": 1}})],
)
def test_an_answer_becomes_outputs_in_terms_of_json(answer: Any, outputs: dict[str, Any]) -> None:
    result = run(PythonBlock("x", lambda inputs, context: answer))

    assert (result.status, result.outputs) == (StepStatus.OK, outputs)


def test_a_step_result_is_given_on_as_it_is_and_what_a_function_raises_goes_up() -> None:
    given = StepResult(StepStatus.ERROR, ErrorCode.quota_exceeded, error_message="no more")
    assert run(PythonBlock("x", lambda inputs, context: given)) is given

    def fail(inputs: Mapping[str, Any], context: BlockContext) -> None:
        raise ConnectionError("down")

    with pytest.raises(ConnectionError, match="down"):
        run(PythonBlock("x", fail))


@pytest.mark.parametrize("answer", [[], "text", 7, {"a": object()}, {"a": {1j}}])
def test_an_answer_of_another_kind_is_a_failure_that_names_the_block(answer: Any) -> None:
    result = run(PythonBlock("my.type", lambda inputs, context: answer))

    assert result.error_code is ErrorCode.execution_failed
    assert "my.type returned" in result.error_message


@pytest.mark.parametrize("name", ["", "Invoice", "a b", "a..b", ".a", "a.", "a/b", "x" * 65, "ä"])
def test_a_type_is_a_plain_name(name: str) -> None:
    with pytest.raises(ParameterError, match=r"invoice\.render"):
        block(name)


def test_a_type_has_one_block_whose_function_may_register_again(own_registry: BlockRegistry) -> None:
    def same(inputs: Mapping[str, Any], context: BlockContext) -> None: ...
    def other(inputs: Mapping[str, Any], context: BlockContext) -> None: ...

    block("x.y")(same)
    block("x.y")(same)
    assert list(own_registry.blocks()) == ["x.y"]
    with pytest.raises(ParameterError, match=r"no other block has; this one is of tests\.unit\.steps\."):
        block("x.y")(other)
    with pytest.raises(ParameterTypeError, match=r"a function of \(inputs, context\)"):
        block("x.z")(lambda inputs: None)  # type: ignore[type-var] # what this test is about


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "steps_of_mine.py"
    for name in ("steps_of_mine", "pack_of_mine.steps", "pack_of_mine"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "no function under"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        (None, "there is no module steps_of_mine here; accepted: a name such as pkg.steps, or a file: steps.py"),
        ("import os\n\nimport no_such_module", "steps_of_mine.py:3: ModuleNotFoundError: No module named 'no_such_m"),
        ("x = 1\n\ny = x +", "steps_of_mine.py:3: SyntaxError: invalid syntax"),
        ("import json\njson.loads('{')", "steps_of_mine.py:2: JSONDecodeError: "),
        ("def f():\n    1 / 0\n\nf()", "steps_of_mine.py:2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_brings_nothing_is_a_configuration_error(module: Path, text: str | None, problem: str) -> None:
    if text is not None:
        module.write_text(text)

    with pytest.raises(ConfigurationError, match=f"--module steps_of_mine: .*{problem}"):
        load_module("steps_of_mine", path=str(module.parent))


STEP = "from reefknot.steps.python import block\n@block('a.b')\ndef step(inputs, context): return {}\n"


@pytest.mark.parametrize(
    ("given", "place"),
    [
        *((f"{here}{place}", place) for here in ("", "./") for place in ("steps_of_mine.py", "pack_of_mine/steps.py")),
        ("pack_of_mine/../steps_of_mine.py", "steps_of_mine.py"),
        ("../elsewhere/steps_of_mine.py", "../elsewhere/steps_of_mine.py"),
    ],
)
def test_a_module_may_be_named_by_its_file(module: Path, given: str, place: str) -> None:
    folder = module.parent / "here"
    for one in (folder / "pack_of_mine", module.parent / "elsewhere"):
        one.mkdir(parents=True)
    (folder / place).write_text(STEP)

    assert list(load_module(given, path=str(folder))) == ["a.b"]
    assert list(load_module(str(folder / place), path=str(folder))) == ["a.b"], "the whole path"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("gone.py", "there is no such file; accepted: a file such as steps.py, or a name: pkg.steps"),
        ("pack/", "is a folder; name a file in it"),
        ("json.py", "the name json is taken by .*; give the file another name"),
    ],
)
def test_a_file_that_cannot_be_a_module_is_refused_in_a_sentence(module: Path, given: str, problem: str) -> None:
    (module.parent / "pack").mkdir()
    (module.parent / "json.py").write_text(STEP)

    with pytest.raises(ConfigurationError, match=f"--module {given}: {problem}"):
        load_module(given, path=str(module.parent))


def double(inputs: Mapping[str, Any], context: BlockContext) -> dict[str, Any]:
    return {"n": inputs["n"] * 2}


class Own:
    type = "own.type"

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return "own"

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        return StepResult(outputs={"own": True})

    async def close(self) -> None: ...


READY = Own()


def entry(name: str, attribute: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{attribute}", python.GROUP)


def test_entry_points_bring_functions_blocks_and_classes_and_every_broken_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, sys.modules[Own.__module__]))
    brought = load_entry_points([entry("math.double", "double"), entry("a", "READY"), entry("b", "Own")])
    assert load_entry_points() == {}, "none without installed packages"
    assert sorted(brought) == ["math.double", "own.type"]
    assert run(brought["math.double"], n=4).outputs == {"n": 8}
    assert run(brought["own.type"]).outputs == {"own": True}

    with pytest.raises(ConfigurationError) as wrong:
        load_entry_points([entry("a.b", "nothing"), EntryPoint("c.d", "no_such_module:x", python.GROUP)])
    assert [str(one).partition(" = ")[0] for one in wrong.value.problems] == ["entry point a.b", "entry point c.d"]


def test_the_standard_blocks_are_there_under_all_their_names() -> None:
    blocks = by_name(standard_blocks())

    names = "http.request fs.blob_put fs.blob_get fs.delete sql.query http fs_blob_put fs_blob_get sql"
    assert sorted(blocks) == sorted(names.split())
    assert all(blocks[alias] is blocks[name] for alias, name in ALIASES.items())
    assert all(block.type == name for name, block in standard_blocks().items())


@pytest.mark.parametrize("taken", ["http.request", "http"])
def test_a_name_that_is_taken_is_a_configuration_error(taken: str) -> None:
    own = PythonBlock(taken, lambda inputs, context: None)

    with pytest.raises(ConfigurationError, match=f"block {taken}: there is another block"):
        by_name(standard_blocks(), {taken: own})


def test_without_its_library_an_http_step_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpcore2", None)
    block = by_name(standard_blocks())["http"]

    step = asyncio.run(block.run({"url": "https://example.org"}, CONTEXT))

    assert step.error_code is ErrorCode.execution_failed
    assert step.error_message == "http.request needs the extra 'http': pip install '.[http]' in a checkout"
