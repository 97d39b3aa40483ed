"""A damaged file, a newer one, a foreign one, a place nobody may write: named, with an exit code and the way out."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from reefknot.console.cli.app import exit_for
from reefknot.errors import StoreCorruptError, StoreError, StoreUnavailableError, StoreVersionError
from reefknot.idempotency.model import Claimed, Done
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.opening import open_store
from reefknot.stores.sqlite import SqliteStore
from tests.faults.points import spread
from tests.faults.story import stored_keys, told

PAGE = 4096
NUMBER = 60


@pytest.fixture
def store_file(tmp_path: Path) -> Path:
    """A store in use, closed in good order."""
    path = tmp_path / "state.db"

    async def fill() -> None:
        async with open_store(f"sqlite:{path}") as store:
            names = [f"{number:03}" for number in range(NUMBER)]
            await store.work.enqueue([WorkItem(name, "t", payload=b"p" * 500) for name in names])
            for item in await store.work.claim(NUMBER // 2, WorkClaim(owner="me")):
                report = Settlement(item.id, "me", item.fence, WorkDone('"ok"'), (told("settled", item.id),))
                await store.work.settle([report])
                answer = await store.idempotency.claim(item.id, owner="me")
                assert isinstance(answer, Claimed)
                await store.idempotency.finish(answer.claim, Done('"ok"'))

    asyncio.run(fill())
    return path


async def use_everything(path: Path) -> list[str]:
    """What a store says about itself after every part of it was used. Empty: it says that it is fine."""
    store = await SqliteStore(path, VirtualClock(), inline=True).start()
    try:
        found = await store.check()
        await store.work.search(limit=1000)
        await stored_keys(store)
        await store.audit.read()
        await store.work.claim(5, WorkClaim(owner="you"))
        await store.idempotency.claim("new", owner="you")
        return [*found.problems, *(mismatch.problem for mismatch in found.mismatches)]
    finally:
        await store.close()


def used(path: Path) -> tuple[str, BaseException | None]:
    try:
        problems = asyncio.run(use_everything(path))
    except Exception as error:
        return "refused", error
    return ("found" if problems else "silent"), None


def test_noise_in_any_page_is_found_or_refused_by_name(store_file: Path, tmp_path: Path) -> None:
    whole = store_file.read_bytes()
    copy = tmp_path / "copy.db"
    dice = random.Random(1)
    ends = []
    for page in spread(range(len(whole) // PAGE), 60):
        damaged = whole[: page * PAGE] + dice.randbytes(PAGE) + whole[(page + 1) * PAGE :]
        copy.write_bytes(damaged)
        end, error = used(copy)
        ends.append(end)
        assert end != "silent", page
        assert error is None or isinstance(error, StoreCorruptError), (page, error)
        for suffix in ("-wal", "-shm"):
            Path(f"{copy}{suffix}").unlink(missing_ok=True)
    assert len(ends) > 10
    assert used(store_file) == ("silent", None), "the control: a whole file says that it is fine"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_file_that_was_cut_short_is_found_or_refused_by_name(store_file: Path, share: float) -> None:
    whole = store_file.read_bytes()
    store_file.write_bytes(whole[: int(len(whole) * share)])
    end, error = used(store_file)
    assert end != "silent"
    assert error is None or isinstance(error, StoreCorruptError)


def execute(path: Path, statement: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(statement)
    connection.close()


def newer(path: Path) -> None:
    execute(path, "PRAGMA user_version = 99")


def foreign(path: Path) -> None:
    path.unlink()
    execute(path, "CREATE TABLE theirs (x)")


def no_database(path: Path) -> None:
    path.write_bytes(b"Dear diary, " * 1000)


@pytest.mark.parametrize(
    ("spoil", "kind", "code", "way_out"),
    [
        (newer, StoreVersionError, 78, "use a newer reefknot"),
        (foreign, StoreVersionError, 78, "name another file"),
        (no_database, StoreCorruptError, 65, "restore a backup"),
    ],
)
def test_a_file_we_cannot_work_with_is_refused_and_left_as_it_is(
    store_file: Path, spoil: Callable[[Path], None], kind: type[StoreError], code: int, way_out: str
) -> None:
    spoil(store_file)
    before = store_file.read_bytes()
    end, error = used(store_file)
    assert end == "refused"
    assert isinstance(error, kind)
    assert way_out in str(error)
    assert exit_for(error)[0] == code
    if spoil is not foreign:  # whose journal mode SQLite notes in its header
        assert store_file.read_bytes() == before


@pytest.mark.parametrize("place", ["{file}/state.db", "/proc/nobody/may/write/here/state.db"])
def test_a_place_that_cannot_be_written_is_named_with_the_way_out(store_file: Path, place: str) -> None:
    end, error = used(Path(place.format(file=store_file)))
    assert end == "refused"
    assert isinstance(error, StoreUnavailableError)
    assert "this user" in str(error)
    assert exit_for(error)[0] == 69
