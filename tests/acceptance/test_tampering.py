"""
Rewriting the record: a thousand random ways, each of them found, in an exported file and in a SQLite store.

Some of the hands make the chain anew after their change; only the head that was exported before shows those.
"""

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.audit.model.chain import Head, LogLine, Mismatch, event_line, link, read_line, verify_lines
from reefknot.audit.model.event import OperatorAction, encode, timestamp_ms
from reefknot.audit.port import AuditEntry
from reefknot.audit.verification import StoreSource
from reefknot.console.cli.audit_files import exported
from reefknot.stores.opening import open_store
from tests.acceptance.folder import rehash

Original = tuple[Path, list[bytes], Head]
EVENTS = 60
EACH = 500


def entries() -> list[AuditEntry]:
    fixed: dict[str, Any] = {"timestamp": "2026-01-25T21:15:00.000Z", "action": "forget"}
    events = [
        OperatorAction(actor=f"actor {n}", subject=f"key {n}", correlation_id=f"c{n % 7}", work_id=f"w{n}", **fixed)
        for n in range(EVENTS)
    ]
    at = timestamp_ms(events[0].timestamp) or 0
    return [AuditEntry(encode(one), one.event_type, at, one.correlation_id, None, one.work_id) for one in events]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A store, its exported lines, and the head that was exported with them."""
    path = tmp_path_factory.mktemp("record") / "state.db"

    async def main() -> tuple[list[bytes], Head]:
        async with open_store(f"sqlite:{path}") as store:
            await store.audit.append(entries())
            head = await store.audit.head()
            return b"".join([part async for part in exported(store.audit, head)]).splitlines(keepends=True), head

    lines, head = asyncio.run(main())
    return path, lines, head


# Hands that change a file: each takes the lines and dice, and answers other lines.

Lines = list[bytes]


def edit_a_byte(lines: Lines, dice: random.Random) -> Lines:
    at = dice.randrange(len(lines))
    place = dice.randrange(len(lines[at]))
    other = dice.choice([byte for byte in range(256) if byte != lines[at][place]])
    lines[at] = lines[at][:place] + bytes([other]) + lines[at][place + 1 :]
    return b"".join(lines).splitlines(keepends=True)


def edit_a_word(lines: Lines, dice: random.Random) -> Lines:
    at = dice.randrange(1, len(lines))
    lines[at] = lines[at].replace(b'"actor":"actor', b'"actor":"somebody', 1)
    return lines


def delete_some(lines: Lines, dice: random.Random) -> Lines:
    """Anywhere but at the very end, which is cutting off."""
    at = dice.randrange(0, len(lines) - 1)
    del lines[at : at + dice.randint(1, min(5, len(lines) - 1 - at))]
    return lines


def swap_two(lines: Lines, dice: random.Random) -> Lines:
    one, other = dice.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]
    return lines


def swap_two_events(lines: Lines, dice: random.Random) -> Lines:
    """The events change places, the numbers and hashes stay."""
    one, other = dice.sample(range(1, len(lines)), 2)
    first, second = _line(lines[one]), _line(lines[other])
    lines[one] = event_line(Head("", first.sequence, first.hash), second.body)
    lines[other] = event_line(Head("", second.sequence, second.hash), first.body)
    return lines


def insert_a_copy(lines: Lines, dice: random.Random) -> Lines:
    lines.insert(dice.randrange(len(lines) + 1), dice.choice(lines[1:]))
    return lines


def insert_a_forged_event(lines: Lines, dice: random.Random) -> Lines:
    """Well made for its place; what comes after it does not know it."""
    at = dice.randrange(1, len(lines))
    before = _line(lines[at - 1]) if at > 1 else None
    chain = _chain(lines)
    head = Head(chain) if before is None else Head(chain, before.sequence, before.hash)
    forged = dice.choice(entries()).body.replace(b"actor ", b"nobody ")
    head, _ = link(head, forged)
    lines.insert(at, event_line(head, forged))
    return lines


def cut_off(lines: Lines, dice: random.Random) -> Lines:
    return lines[: dice.randrange(0, len(lines))]


def cut_off_in_a_line(lines: Lines, dice: random.Random) -> Lines:
    text = b"".join(lines)
    return text[: dice.randrange(1, len(text))].splitlines(keepends=True)


def rewrite_and_chain_anew(lines: Lines, dice: random.Random) -> Lines:
    """An event is changed, and everything from there on gets the hashes that fit."""
    at = dice.randrange(1, len(lines))
    bodies = [_line(text).body for text in lines[1:]]
    bodies[at - 1] = bodies[at - 1].replace(b"actor ", b"nobody ")
    return chained(lines[0], bodies)


def drop_and_chain_anew(lines: Lines, dice: random.Random) -> Lines:
    bodies = [_line(text).body for text in lines[1:]]
    del bodies[dice.randrange(len(bodies))]
    return chained(lines[0], bodies)


def chained(opening: bytes, bodies: list[bytes]) -> Lines:
    head, lines = Head(_chain([opening])), [opening]
    for body in bodies:
        head, _ = link(head, body)
        lines.append(event_line(head, body))
    return lines


def _line(text: bytes) -> LogLine:
    line = read_line(text)
    assert isinstance(line, LogLine)
    return line


def _chain(lines: Lines) -> str:
    opening = read_line(lines[0])
    assert opening is not None
    assert not isinstance(opening, LogLine)
    return opening.chain


Hand = Callable[[Lines, random.Random], Lines]
HANDS: list[Hand] = [
    *(edit_a_byte, edit_a_word, delete_some, swap_two, swap_two_events, insert_a_copy, insert_a_forged_event),
    *(cut_off, cut_off_in_a_line, rewrite_and_chain_anew, drop_and_chain_anew),
]


def test_every_tampering_with_an_exported_file_is_found(original: Original) -> None:
    _, lines, head = original
    assert verify_lines(lines, head) == verify_lines(lines) == [], "the control: untouched, it verifies"
    missed = []
    for seed in range(EACH):
        hand = HANDS[seed % len(HANDS)]
        changed = hand(list(lines), random.Random(seed))
        assert changed != lines, "a hand that does nothing shows nothing"
        if not verify_lines(changed, head):
            missed.append((seed, hand.__name__))
    assert missed == []


@pytest.mark.parametrize("hand", [cut_off, rewrite_and_chain_anew, drop_and_chain_anew])
def test_without_a_head_a_chain_alone_does_not_show_these(original: Original, hand: Hand) -> None:
    """The control: it is the head that finds them, which is why it has to be kept elsewhere."""
    _, lines, _ = original
    for seed in range(20):
        changed = hand(list(lines), random.Random(seed))
        if changed:
            assert verify_lines(changed) == []


# Hands that change a store, as somebody with the file and the sqlite3 program would.

Execute = Callable[..., Any]
SAME_ROW = "INSERT INTO audit SELECT ?, hash, at, event_type, correlation_id, trace_id, work_id, body FROM audit"


def _some(dice: random.Random) -> int:
    return dice.randint(1, EVENTS)


def edit_a_body(execute: Execute, dice: random.Random) -> None:
    execute("UPDATE audit SET body = replace(body, 'actor ', 'nobody ') WHERE sequence = ?", (_some(dice),))


def edit_a_hash(execute: Execute, dice: random.Random) -> None:
    execute("UPDATE audit SET hash = ? WHERE sequence = ?", (f"{dice.getrandbits(256):064x}", _some(dice)))


def edit_what_it_is_found_by(execute: Execute, dice: random.Random) -> None:
    column, value = dice.choice(
        [("event_type", "breaker"), ("correlation_id", "other"), ("correlation_id", None), ("work_id", "other")]
    )
    execute(f"UPDATE audit SET {column} = ? WHERE sequence = ?", (value, _some(dice)))


def delete_rows(execute: Execute, dice: random.Random) -> None:
    first = dice.randint(1, EVENTS - 1)
    execute("DELETE FROM audit WHERE sequence BETWEEN ? AND ?", (first, min(EVENTS - 1, first + dice.randint(0, 4))))


def delete_the_beginning_and_say_it_was_retention(execute: Execute, dice: random.Random) -> None:
    """Without the anchor event that retention writes."""
    last = dice.randint(1, EVENTS - 1)
    execute(
        "UPDATE audit_head SET anchor_sequence = ?1, anchor_hash = (SELECT hash FROM audit WHERE sequence = ?1)",
        (last,),
    )
    execute("DELETE FROM audit WHERE sequence <= ?", (last,))


def swap_bodies(execute: Execute, dice: random.Random) -> None:
    one, other = dice.sample(range(1, EVENTS + 1), 2)
    rows = dict(execute("SELECT sequence, body FROM audit WHERE sequence IN (?, ?)", (one, other)).fetchall())
    execute("UPDATE audit SET body = ? WHERE sequence = ?", (rows[other], one))
    execute("UPDATE audit SET body = ? WHERE sequence = ?", (rows[one], other))


def append_a_row(execute: Execute, dice: random.Random) -> None:
    """A copy under the next number, with the stored head moved along."""
    execute(f"{SAME_ROW} WHERE sequence = ?", (EVENTS + 1, _some(dice)))
    execute("UPDATE audit_head SET sequence = ?1, hash = (SELECT hash FROM audit WHERE sequence = ?1)", (EVENTS + 1,))


def insert_and_renumber(execute: Execute, dice: random.Random) -> None:
    at = _some(dice)
    execute("UPDATE audit SET sequence = -sequence - 1 WHERE sequence >= ?", (at,))
    execute("UPDATE audit SET sequence = -sequence WHERE sequence < 0")
    execute(f"{SAME_ROW} WHERE sequence = ?", (at, at + 1))


def cut_off_rows(execute: Execute, dice: random.Random) -> None:
    """The end goes, and the stored head with it."""
    last = dice.randint(1, EVENTS - 1)
    execute("DELETE FROM audit WHERE sequence > ?", (last,))
    execute("UPDATE audit_head SET sequence = ?1, hash = (SELECT hash FROM audit WHERE sequence = ?1)", (last,))


def chain_rows_anew(execute: Execute, dice: random.Random) -> None:
    edit_a_body(execute, dice)
    rehash(execute.__self__)  # type: ignore[attr-defined] # a method of the connection


def name_another_chain(execute: Execute, dice: random.Random) -> None:
    execute("UPDATE audit_head SET chain = ?", (f"{dice.getrandbits(64):x}",))


StoreHand = Callable[[Execute, random.Random], None]
STORE_HANDS: list[StoreHand] = [
    *(edit_a_body, edit_a_hash, edit_what_it_is_found_by, delete_rows, delete_the_beginning_and_say_it_was_retention),
    *(swap_bodies, append_a_row, insert_and_renumber, cut_off_rows, chain_rows_anew, name_another_chain),
]


class Bench:
    """One store that is changed, verified and put back."""

    def __init__(self, path: Path) -> None:
        self._connection = apsw.Connection(str(path))
        self._connection.execute("PRAGMA synchronous = OFF; CREATE TEMP TABLE kept AS SELECT * FROM audit")
        self._connection.execute("CREATE TEMP TABLE kept_head AS SELECT * FROM audit_head")

    @contextmanager
    def changed(self, hand: StoreHand, dice: random.Random) -> Iterator[None]:
        with self._connection:
            hand(self._connection.execute, dice)
        try:
            yield
        finally:
            with self._connection:
                for table, kept in (("audit", "kept"), ("audit_head", "kept_head")):
                    self._connection.execute(f"DELETE FROM {table}; INSERT INTO {table} SELECT * FROM temp.{kept}")

    async def verified(self, store: Any, *heads: Head) -> list[Mismatch]:
        return (await StoreSource(store.audit, await store.audit.head(), "here").verify(list(heads)))[1]


def on_a_copy(original: Original, tmp_path: Path, story: Callable[[Bench, Any, Head], Any]) -> Any:
    path, _, head = original
    copy = tmp_path / "state.db"
    shutil.copy(path, copy)

    async def main() -> Any:
        async with open_store(f"sqlite:{copy}") as store:
            return await story(Bench(copy), store, head)

    return asyncio.run(main())


def test_every_tampering_with_a_store_is_found(original: Original, tmp_path: Path) -> None:
    async def story(bench: Bench, store: Any, head: Head) -> list[tuple[int, str]]:
        assert await bench.verified(store, head) == []
        missed = []
        for seed in range(EACH):
            hand = STORE_HANDS[seed % len(STORE_HANDS)]
            with bench.changed(hand, random.Random(seed)):
                if not await bench.verified(store, head):
                    missed.append((seed, hand.__name__))
        assert await bench.verified(store, head) == [], "the control: put back, it verifies again"
        return missed

    assert on_a_copy(original, tmp_path, story) == []


@pytest.mark.parametrize("hand", [cut_off_rows, chain_rows_anew])
def test_a_store_without_an_exported_head_hides_these(original: Original, tmp_path: Path, hand: StoreHand) -> None:
    async def story(bench: Bench, store: Any, head: Head) -> list[Mismatch]:
        with bench.changed(hand, random.Random(4)):
            return await bench.verified(store)

    assert on_a_copy(original, tmp_path, story) == []
