"""A move that ends at any point, and is repeated: nothing is missing, nothing is there twice, nothing runs in both."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from msgspec import structs

from reefknot.console.nats_servers import NatsServer
from reefknot.console.operations import move as flow
from reefknot.console.operations.move import Move
from reefknot.errors import OperationError
from reefknot.stores.port import MoveMark, move_mark
from tests.faults import moving, points
from tests.faults.moving import DiedError, Points

pytestmark = pytest.mark.real_time

Place = Callable[[str], str]
"""The address of a store by its name."""


@pytest.fixture(params=["sqlite to sqlite", "sqlite to nats", "nats to sqlite", "nats to nats"])
def places(request: pytest.FixtureRequest, tmp_path: Path, nats_server: NatsServer) -> tuple[Place, Place]:
    def file(name: str) -> str:
        return f"sqlite:{tmp_path / name}.db"

    def served(name: str) -> str:
        return f"{nats_server.url}/{name}-{uuid4().hex[:12]}"

    old, _, new = request.param.partition(" to ")
    kinds = {"sqlite": file, "nats": served}
    return kinds[old], kinds[new]


async def interrupted(old: str, new: str, archive: Path, at: int, how: Any = flow.move_store) -> None:
    """A move that dies at this point, is looked at, and is made again."""
    before = await moving.inventory(old)
    with pytest.raises(DiedError):
        await moving.moved(old, new, archive, Points(at), how)
    await moving.judge_a_halt(old, new)
    await moving.moved(old, new, archive)
    await moving.moved(old, new, archive)  # once more changes nothing
    await moving.judge(old, new, before, archive)


def test_a_move_that_dies_at_any_call_goes_on_and_ends_right(places: tuple[Place, Place], tmp_path: Path) -> None:
    at_old, at_new = places

    async def main() -> None:
        whole, old, new = Points(), at_old("old"), at_new("new")
        await moving.fill(old, has_large=True)
        before = await moving.inventory(old)
        await moving.moved(old, new, tmp_path / "events.jsonl", whole)
        await moving.judge(old, new, before, tmp_path / "events.jsonl")
        assert whole.reached >= 50
        for at in points.spread(range(1, whole.reached + 1), 12):
            old, new = at_old(f"old-{at}"), at_new(f"new-{at}")
            await moving.fill(old)
            await interrupted(old, new, tmp_path / f"events-{at}.jsonl", at)

    asyncio.run(main())


async def ends_first(move: Move) -> dict[str, Any]:
    """The broken variant: the stores are marked as moved before anything is copied."""
    found = await flow._inventory(move, move.source.store)
    mark = await flow._begin(move)
    await flow._mark_target(move, mark)
    heads = await move.export(move.source.store, Path(mark.archive))
    done = structs.replace(mark, ended_at=1, report={**found.counts(), "chains": len(heads)})
    answer = await flow._finish(move, done)
    await flow._copy(move, found)
    return answer


def test_a_move_that_marks_before_it_copies_is_caught(tmp_path: Path) -> None:
    """The control."""

    async def main() -> int:
        caught = 0
        for at in range(1, 200):
            old, new = (f"sqlite:{tmp_path / name}-{at}.db" for name in ("old", "new"))
            await moving.fill(old)
            try:
                await interrupted(old, new, tmp_path / f"events-{at}.jsonl", at, ends_first)
            except AssertionError:
                caught += 1
            if caught == 3:
                break
        return caught

    assert asyncio.run(main()) == 3


@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "not checked"])
async def test_a_move_that_is_given_up_by_another_process_does_not_open_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """Without the look at the marks, which is the control, both stores could be worked on."""
    old, new = (f"sqlite:{tmp_path / name}.db" for name in ("old", "new"))
    await moving.fill(old)
    copy, mark_of = flow._copy, move_mark

    async def copied(move: Move, found: flow.Inventory) -> None:
        await copy(move, found)
        mark, version = await mark_of(move.source.store)
        await flow.give_up(move)
        if not is_checked:
            assert mark is not None
            monkeypatch.setattr(flow, "move_mark", lambda store: forged(store, mark, version))

    async def forged(store: Any, mark: MoveMark, version: int) -> tuple[MoveMark | None, int]:
        known, number = await mark_of(store)
        return (structs.replace(mark, ended_at=1), version) if known is None else (known, number)

    monkeypatch.setattr(flow, "_copy", copied)
    if is_checked:
        with pytest.raises(OperationError, match="was given up meanwhile"):
            await moving.moved(old, new, tmp_path / "events.jsonl")
    else:
        await moving.moved(old, new, tmp_path / "events.jsonl")
    can = (await moving.can_be_worked_on(old), await moving.can_be_worked_on(new))
    assert can == (True, not is_checked)


def test_a_process_that_is_killed_while_it_moves_leaves_what_the_next_one_ends(
    places: tuple[Place, Place], tmp_path: Path
) -> None:
    at_old, at_new = places
    kills = points.spread(range(1, 52, points.either(2, 1)), 3)

    async def main(at: int) -> None:
        old, new, archive = at_old(f"old-{at}"), at_new(f"new-{at}"), tmp_path / f"events-{at}.jsonl"
        await moving.fill(old, more=400)
        before = await moving.inventory(old)
        words = [sys.executable, "-m", "tests.faults.moving", old, new, str(archive), str(at)]
        killed = await asyncio.to_thread(subprocess.run, words, cwd=Path(__file__).parents[2])
        assert killed.returncode == -9
        await moving.judge_a_halt(old, new)
        await moving.moved(old, new, archive)
        await moving.judge(old, new, before, archive)

    for at in kills:
        asyncio.run(main(at))
