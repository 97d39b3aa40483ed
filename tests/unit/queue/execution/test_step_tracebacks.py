"""The traceback of a failed step begins in the user's own file, whatever called the step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.errors import ConfigurationError
from reefknot.runtime.user_modules import import_user_module
from reefknot.steps.python import PythonBlock
from tests.unit.queue.shops import stored
from tests.workshop import Shop, work


def bug(order: dict[str, Any]) -> Any:
    return order["price"]


def plain(inputs: dict[str, Any], context: rk.BlockContext) -> dict[str, Any]:
    return {"price": bug(inputs)}


async def awaited(inputs: dict[str, Any], context: rk.BlockContext) -> dict[str, Any]:
    return {"price": bug(inputs)}


@rk.retry(attempts=2, base_delay=0, on=KeyError)
async def retried(inputs: dict[str, Any], context: rk.BlockContext) -> dict[str, Any]:
    return {"price": bug(inputs)}


async def grouped(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    async def one() -> None:
        bug(inputs)

    async with asyncio.TaskGroup() as group:
        group.create_task(one())


async def in_thread(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    await asyncio.to_thread(bug, inputs)


async def misused(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    rk.RetryPolicy(max_attempts=0)


async def chained(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    try:
        bug(inputs)
    except KeyError as error:
        raise ValueError("a bad order") from error


@pytest.mark.parametrize("function", [plain, awaited, retried, grouped, in_thread, misused, chained])
async def test_it_begins_in_the_users_file(shop: Shop, function: Callable[..., Any]) -> None:
    await shop.worker("w1", PythonBlock("test.step", function))
    await shop.send(work("a", retry_count=0))
    for _ in range(500):
        if shop.results:
            break
        await asyncio.sleep(0.01)
    item = await stored(shop, "a")
    lines = json.loads(item.failure or "{}")["traceback"].splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    assert heads[0] == 0
    for number in heads:
        assert lines[number + 1].startswith(f'  File "{__file__}", line '), "\n".join(lines)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('@rk.block("mistakes.one", atempts=3)', "no such option; did you mean 'attempts'?"),
        ('@rk.block("Mistakes Two")', "a name in lower case"),
        ('@rk.block("mistakes.three", timeout="soon")', "timeout='soon'"),
    ],
)
def test_a_wrong_decorator_is_told_with_its_line_when_it_is_loaded(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / f"mistakes_{abs(hash(line))}.py"
    file.write_text(f"import reefknot as rk\n\n{line}\ndef step(inputs, context): ...\n")

    with pytest.raises(ConfigurationError) as caught:
        import_user_module(file.stem, path=str(tmp_path))

    assert f"cannot be imported: {file}:3: Parameter" in str(caught.value)
    assert words in str(caught.value)
