"""`reefknot store`."""

from pathlib import Path

import pytest

from reefknot.console.cli.store import PLAIN_SECTIONS
from reefknot.errors import StoreUnavailableError
from reefknot.policy.schema import Configuration
from reefknot.policy.sections import keys_of
from reefknot.stores import opening, sqlite
from reefknot.stores.sqlite.connection import VERSION
from tests.unit.console.cli import work_items
from tests.unit.console.cli.audit_events import attempt, change, recorded
from tests.unit.console.cli.running import Commands


@pytest.fixture
def store(rk: Commands) -> Path:
    return recorded(rk.folder / ".reefknot" / "state.db")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE audit SET body = '{}' WHERE sequence = 2", "event 2: "),
        (
            "INSERT INTO idempotency VALUES (1, 5, 'order-1', 'done', 'me', 1, 0, 0, '', 0, NULL, NULL, NULL, 1, 1, 1)",
            "1 idempotency keys are in the file but are not found by their hash",
        ),
    ],
    ids=["a changed event", "a key whose effect would run a second time"],
)
def test_what_was_changed_makes_the_check_fail(rk: Commands, store: Path, statement: str, said: str) -> None:
    change(store, statement)
    ended = rk("store", "check")
    assert (ended.code, said in ended.out) == (65, True)


def test_a_damaged_page_makes_the_check_fail(rk: Commands) -> None:
    store = recorded(rk.folder / ".reefknot" / "state.db", [attempt(number) for number in range(200)])
    change(store, "PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(store.read_bytes())
    for place in range(len(data) // 2, len(data) // 2 + 4096):
        data[place] = 0x5A
    store.write_bytes(data)
    assert rk("store", "check").code == 65


@pytest.mark.real_time
async def test_a_copy_that_cannot_be_written_blames_the_target(tmp_path: Path) -> None:
    async with opening.open_store(f"sqlite:{tmp_path / 'state.db'}") as kept:
        assert isinstance(kept, sqlite.SqliteStore)
        with pytest.raises(StoreUnavailableError, match=r"store sqlite:\S*nowhere/x\.db: it cannot be written"):
            await kept.backup(tmp_path / "nowhere" / "x.db")


def test_an_older_file_is_migrated_audited_and_a_dry_run_changes_nothing(rk: Commands) -> None:
    path = rk.folder / ".reefknot" / "state.db"
    path.parent.mkdir()
    path.touch()
    assert f"would be migrated from version 0 to {VERSION}" in rk("store", "migrate", "--dry-run").out
    assert path.stat().st_size == 0
    assert rk("store", "migrate", "--as", "ann", "--json").json["migrated"] is True
    assert work_items.operator_actions(path) == [("ann", "store.migrate")]


def test_a_file_of_a_newer_version_and_an_empty_one_are_refused_and_left_alone(rk: Commands, store: Path) -> None:
    rk.write("", "none.jsonl")
    change(store, "PRAGMA user_version = 99")
    for words in ("store check", "store migrate", "store compact", "run none.jsonl", "dashboard --for 0"):
        ended = rk(*words.split())
        assert (ended.code, "version 99" in ended.err, ".bak" in ended.err) == (78, True, False), words
    empty = rk.write("", "empty.db")
    for words in ("store check", "store compact", "job list", "audit verify"):
        ended = rk(*words.split(), "--engine", "sqlite:empty.db")
        assert (ended.code, "empty.db: is an empty file, not a store" in ended.err) == (69, True), words
    assert empty.read_bytes() == b"", "it is not made a store either"


def test_compacting_gives_space_back_and_a_dry_run_changes_nothing(rk: Commands, store: Path) -> None:
    change(
        store,
        "CREATE TABLE filler (x)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100)"
        " INSERT INTO filler SELECT randomblob(4000) FROM n",
        "DROP TABLE filler",
        "PRAGMA wal_checkpoint(TRUNCATE)",
    )
    told = rk("store", "compact", "--dry-run", "--json").json
    assert (told["compacted"], told["unused"] > 300_000) == (False, True)
    assert rk("store", "compact", "--json").json["freed"] > 300_000


LOOKS = ("job list", "job show x", "worker list", "router status", "top --once", "quarantine stats")


def test_where_the_store_or_the_secrets_may_be_wrong_everything_is_checked(rk: Commands) -> None:
    bad_secrets = ("secretz: {key: env:KEY}", "secrets: {key: hunter2}", "secrets: [env:KEY]")
    for mistake in (*bad_secrets, "engine: 5", "engine: nats://host:0"):
        rk.write(f"{mistake}\n")
        for words in LOOKS:
            assert rk(*words.split()).code == 78, words
    assert set(keys_of(Configuration)) - PLAIN_SECTIONS == {"nats"}, "every other section gives no warning"


def test_who_looks_finds_the_configured_store_and_hides_its_secrets(rk: Commands) -> None:
    folder = rk.folder / "below" / "deeper"
    folder.mkdir(parents=True)
    work_items.submitted(rk.folder / "kept.db", "job-of-xyzzy-4711")
    rk.environment.setenv("KEY", "xyzzy-4711")
    rk.write("engine: sqlite:kept.db\nsecrets: {key: env:KEY}\n")
    rk.environment.chdir(folder)
    ended = rk("job", "list", "--json")
    assert ([one["id"] for one in ended.json["jobs"]], "xyzzy" in ended.out) == (["job-of-[redacted]"], False)
    assert rk("job", "list", "--engine", "sqlite:kept.db").code == 69, "a path that is typed is beneath this folder"
