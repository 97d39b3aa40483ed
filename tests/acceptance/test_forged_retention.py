"""
A record whose beginning was removed: by retention it verifies, by anybody else it does not.

The forger has the store's file, knows how the chain is made, and writes an anchor as retention would. The auditor has a
head that was exported before, and the retention in force. Every column of an event, and the stored results, are covered
as well.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.audit.model.chain import Head, Removal, anchor_body, link
from reefknot.audit.model.event import OperatorAction, encode, timestamp
from reefknot.audit.port import AuditEntry
from reefknot.audit.verification import StoreSource
from reefknot.stores.opening import open_store
from tests.unit.console.cli.running import Commands, Ended

DAY_S = 86_400.0
EVENTS = 40
"""One every ten days, the last one five days ago: with a retention of 90 days, 31 of them may go."""


def entry(number: int, now: float) -> AuditEntry:
    wall = now - ((EVENTS - number) * 10 + 5) * DAY_S
    event = OperatorAction(timestamp=timestamp(wall), actor="ann", action="forget", subject=f"key {number}")
    return AuditEntry(encode(event), event.event_type, int(round(wall, 3) * 1000))


@pytest.fixture
def store(rk: Commands) -> Path:
    """A store with its events, and a head that was exported to `kept.head.json` when all of them were there."""
    path = rk.folder / ".reefknot" / "state.db"
    now = float(int(time.time()))

    async def main() -> Head:
        async with open_store(f"sqlite:{path}", tidy=False) as opened:
            return await opened.audit.append([entry(number, now) for number in range(1, EVENTS + 1)])

    head = asyncio.run(main())
    (rk.folder / "kept.head.json").write_text(json.dumps({"chain": head.chain, "sequence": EVENTS, "hash": head.hash}))
    return path


def verified(rk: Commands) -> Ended:
    return rk("audit", "verify", "--head", "kept.head.json")


class Forger:
    """Removes the beginning of a record, and writes what retention would write."""

    def __init__(self, path: Path) -> None:
        self._database = apsw.Connection(str(path))

    def row(self, sequence: int) -> tuple[str, bytes]:
        query = "SELECT hash, body FROM audit WHERE sequence = ?"
        found: Any = self._database.execute(query, (sequence,)).fetchone()
        return ("0" * 64, b"") if found is None else (found[0], found[1].encode())

    def remove_up_to(self, end: int, **lies: Any) -> None:
        execute: Any = self._database.execute
        chain, sequence, hashed = execute("SELECT chain, sequence, hash FROM audit_head").fetchall()[0]
        anchor = Head(chain, end, self.row(end)[0])
        true: dict[str, Any] = {"rule": "retention 7776000 s", "count": end, "previous": self.row(end - 1)[0]}
        now = int(time.time() * 1000)
        body = anchor_body(anchor, now, Removal(**({"last": self.row(end)[1]} | true | lies)))
        head, mine = link(Head(chain, sequence, hashed), body)
        values = (head.sequence, mine, now, "anchor", None, None, None, body.decode())
        execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        execute("DELETE FROM audit WHERE sequence <= ?", (end,))
        moved = "UPDATE audit_head SET sequence = ?, hash = ?, anchor_sequence = ?, anchor_hash = ?"
        execute(moved, (head.sequence, mine, end, anchor.hash))
        self._database.close()


def test_what_retention_removed_verifies_against_the_head(rk: Commands, store: Path) -> None:
    """The control of all below, by the product itself: 31 events are old enough."""
    assert trimmed(store, 90, "retention 7776000 s") == 31
    ended = verified(rk)
    assert (ended.code, "OK" in ended.out) == (0, True), ended.out


def trimmed(store: Path, days: int, rule: str) -> int:
    """How many events retention has removed."""

    async def trim() -> int:
        async with open_store(f"sqlite:{store}", tidy=False) as opened:
            return await opened.audit.trim(int((time.time() - days * DAY_S) * 1000), rule=rule)

    return asyncio.run(trim())


LIES: dict[str, dict[str, Any]] = {
    "honest about it": {},
    "another rule": {"rule": "retention 1 s"},
    "by size": {"rule": "max_files 3"},
    "an older event": {"last": encode(OperatorAction(timestamp="2001-01-01T00:00:00.000Z", actor="a", action="b"))},
    "as earlier versions": {"last": b"", "previous": "", "rule": "", "count": 0},
    "another count": {"count": 7},
}


@pytest.mark.parametrize("last", [33, 39, EVENTS])
@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
def test_a_beginning_that_retention_keeps_must_stay(rk: Commands, store: Path, last: int, lies: dict[str, Any]) -> None:
    """In the middle, and up to the head itself."""
    Forger(store).remove_up_to(last, **lies)
    ended = verified(rk)
    assert ended.code == 65
    assert "event " in ended.out


def test_the_same_forgery_passes_where_no_retention_is_compared(rk: Commands, store: Path) -> None:
    """The control: it is the comparison that finds it; the chain itself is whole."""
    kept = json.loads((rk.folder / "kept.head.json").read_text())
    Forger(store).remove_up_to(39)

    async def main() -> list[Any]:
        async with open_store(f"sqlite:{store}", tidy=False) as opened:
            source = StoreSource(opened.audit, await opened.audit.head(), "here")
            return (await source.verify([Head(kept["chain"], kept["sequence"], kept["hash"])]))[1]

    assert asyncio.run(main()) == []


def test_the_retention_in_force_is_the_configured_one(rk: Commands, store: Path) -> None:
    Forger(store).remove_up_to(31)
    assert verified(rk).code == 0, "an anchor like that of retention is accepted"
    rk.write(f"audit: {{retention_seconds: {200 * DAY_S:.0f}}}\n")
    assert verified(rk).code == 65
    rk.write("audit: {retention_seconds: null}\n")
    assert "for ever" in verified(rk).out
    rk.write(f"audit: {{retention_seconds: {30 * DAY_S:.0f}}}\n")
    assert verified(rk).code == 0


def test_the_anchor_says_how_many_went_by_which_rule(rk: Commands, store: Path) -> None:
    rk.write(f"audit: {{retention_seconds: {90 * DAY_S:.0f}}}\n")
    assert [trimmed(store, days, f"retention {days} days") for days in (200, 100)] == [20, 10]
    shown = rk("audit", "tail", "--type", "anchor", "--json").out.splitlines()
    anchors = [json.loads(line)["event"] for line in shown]
    said = [(one["removed"], one["removed_now"], one["rule"]) for one in anchors]
    assert said == [(20, 20, "retention 200 days"), (30, 10, "retention 100 days")]
    assert json.loads(anchors[1]["last"])["subject"] == "key 30"
    assert verified(rk).code == 0


def test_every_column_of_an_event_is_covered(rk: Commands, store: Path) -> None:
    database = apsw.Connection(str(store))
    database.execute("CREATE TEMP TABLE kept AS SELECT * FROM audit WHERE sequence = 7")
    changes = "at = at - 1|at = 0|trace_id = 'mine'|work_id = ''|correlation_id = 'x'|event_type = 'routing'"
    for change in changes.split("|"):
        assert verified(rk).code == 0
        database.execute(f"UPDATE audit SET {change} WHERE sequence = 7")
        ended = verified(rk)
        assert (ended.code, "event 7: it is filed under another" in ended.out) == (65, True), change
        column = change.partition(" ")[0]
        database.execute(f"UPDATE audit SET {column} = (SELECT {column} FROM kept) WHERE sequence = 7")
    database.close()


@pytest.mark.parametrize("kind", ["fs.blob_get", "fs.blob_put"])
def test_a_stored_result_is_covered_by_its_completed_event(rk: Commands, kind: str) -> None:
    """One that succeeds at once, and one that fails: the folder is not there."""
    rk.write("blocks: {fs: {roots: [files]}}\n")
    if kind == "fs.blob_get":
        (rk.folder / "files").mkdir()
        (rk.folder / "files" / "a.txt").write_text("ahoy")
    payload = {"path": "a.txt"} | ({} if kind == "fs.blob_get" else {"content": "x"})
    line = {"assignment_id": "a", "job": {"type": kind, "payload": payload}}
    rk.write(json.dumps(line) + "\n", "work.jsonl")
    assert rk("run", "work.jsonl").code == (0 if kind == "fs.blob_get" else 1)
    assert rk("audit", "verify").code == 0
    database = apsw.Connection(str(rk.folder / ".reefknot" / "state.db"))
    database.execute("""UPDATE work SET result = replace(result, '"a"', '"b"') WHERE id = 'a'""")
    database.close()
    ended = rk("audit", "verify")

    assert ended.code == 65
    assert "the stored result of 'a' is not the one of this event" in ended.out
