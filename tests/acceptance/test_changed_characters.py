"""One character of one event is changed: each verifying command ends with 65, names the event, and finds all others."""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw
import pytest

from reefknot.stores.sqlite import audit
from tests.acceptance.folder import Folder

JOBS = 60
EDITS = 120
ALONE = 36
COLUMNS = ("body", "body", "body", "hash", "event_type", "work_id")
CHARACTERS = 'abcxyz0189{}[]":,\\ \t~éß☃\x00'


@pytest.fixture
def recorded(folder: Folder) -> Folder:
    """A folder in which some jobs of two tenants have succeeded and some have failed, its log exported."""
    steps = [{"type": "fs.blob_get", "payload": {"path": name}} for name in ("none.txt", *["a.txt"] * 3)]
    tenants = ("acme", "zeta", None)
    jobs = [{"assignment_id": f"job-{n}", "tenant_id": tenants[n % 3], "job": steps[n % 4]} for n in range(JOBS)]
    folder.write_lines("work.jsonl", *jobs)
    assert folder("run", "work.jsonl").code == 1, "some fail"
    assert folder("audit", "export", "log.jsonl").code == 0
    folder.write("kept.json", folder("audit", "head").out)
    return folder


@contextmanager
def rows_of(folder: Folder) -> Iterator[apsw.Connection]:
    connection = apsw.Connection(str(folder.store))
    connection.execute("PRAGMA synchronous = OFF")
    try:
        yield connection
    finally:
        connection.close()


def edited(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text))
    return text[:place] + dice.choice([one for one in CHARACTERS if one != text[place]]) + text[place + 1 :]


def edit_row(connection: apsw.Connection, sequence: int, dice: random.Random) -> tuple[str, str]:
    """Change one character of an event; the column, and what it held."""
    row: Any = None
    while not row:
        column = dice.choice(COLUMNS)
        row = connection.execute(f"SELECT {column} FROM audit WHERE sequence = ?", (sequence,)).get
    connection.execute(f"UPDATE audit SET {column} = ? WHERE sequence = ?", (edited(row, dice), sequence))
    return column, row


def named(out: str) -> set[int]:
    """The events in an answer. One whose number was changed is named by the number that was expected in its place."""
    return {int(a or b) for a, b in re.findall(r"^event (\d+):|expected number (\d+)", out, re.MULTILINE)}


VERIFYING = (("audit", "verify"), ("audit", "verify", "--head", "kept.json"), ("store", "check"))


def test_a_hundred_and_twenty_changed_events_are_all_named_by_each_command(recorded: Folder) -> None:
    dice = random.Random(1)
    with rows_of(recorded) as connection:
        last: Any = connection.execute("SELECT max(sequence) FROM audit").get
        changed = dice.sample(range(1, last + 1), EDITS)
        for sequence in changed:
            edit_row(connection, sequence, dice)

    for words in VERIFYING:
        done = recorded(*words)
        assert done.code == 65, done.err
        assert set(changed) <= named(done.out), words


def test_each_change_alone_is_found_with_its_number(recorded: Folder) -> None:
    """The commands take turns."""
    with rows_of(recorded) as connection:
        ends: Any = connection.execute("SELECT sequence FROM audit WHERE event_type = 'completed'").fetchall()
        last: Any = connection.execute("SELECT max(sequence) FROM audit").get
        missed = []
        for number in range(ALONE):
            dice = random.Random(number)
            sequence = dice.choice(ends)[0] if number % 2 else dice.randint(1, last)
            column, before = edit_row(connection, sequence, dice)
            done = recorded(*VERIFYING[number % 3])
            if done.code != 65 or sequence not in named(done.out):
                missed.append((number, column, done))
            connection.execute(f"UPDATE audit SET {column} = ? WHERE sequence = ?", (before, sequence))
    assert missed == []
    assert recorded("audit", "verify", "--head", "kept.json").code == 0, "the control: put back, it verifies"


def test_bytes_that_are_no_text_are_found_like_any_other_change(recorded: Folder) -> None:
    with rows_of(recorded) as connection:
        for sequence, column in ((3, "body"), (5, "hash"), (7, "event_type")):
            spoilt = f"UPDATE audit SET {column} = CAST(x'ff' || {column} AS TEXT) WHERE sequence = ?"
            connection.execute(spoilt, (sequence,))
    for words in VERIFYING:
        done = recorded(*words)
        assert (done.code, done.err.count("damaged or no database")) == (65, 0)
        assert {3, 5, 7} <= named(done.out)
    assert recorded("audit", "tail").code == 0, "looking at them is no mistake"


def test_an_export_with_a_hundred_and_twenty_changed_lines_names_them_all(recorded: Folder) -> None:
    dice = random.Random(2)
    lines = (recorded.path / "log.jsonl").read_text().splitlines()
    changed = dice.sample(range(1, len(lines), 2), EDITS)  # a line whose number is changed misleads about the next one
    for number in changed:
        event, found, filed = lines[number].partition(',"filed":')  # by which it is found: no part of the event
        lines[number] = edited(event, dice) + found + filed
    recorded.write("log.jsonl", "\n".join(lines) + "\n")
    for words in (("audit", "verify", "log.jsonl"), ("audit", "verify", "log.jsonl", "--head", "kept.json")):
        done = recorded(*words)
        assert done.code == 65
        assert sorted(set(changed) - named(done.out)) == [], words


def test_control_reading_every_end_stops_at_the_first(recorded: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did before: the database refused the statement, and nothing was listed."""
    trusting = audit._RESULTS.replace("CASE WHEN json_valid(body) THEN ", "(").replace(" ELSE true END", ")")
    assert trusting != audit._RESULTS
    with rows_of(recorded) as connection:
        end = "(SELECT max(sequence) FROM audit WHERE event_type = 'completed')"
        connection.execute(f"UPDATE audit SET body = '{{' || body WHERE sequence = {end}")
    assert recorded("audit", "verify").code == 65
    monkeypatch.setattr(audit, "_RESULTS", trusting)
    assert recorded("audit", "verify").code == 69
