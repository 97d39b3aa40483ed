"""
The tables of `docs/states.md` are the moves that the core makes: none is missing, and none is made up.

The page of the HTTP API has every route of the table with its summary, and that of messages on NATS names what is on
the wire, with its figures.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import pytest
from msgspec import structs

from reefknot.console.dashboard.api_routes import ROUTES
from reefknot.console.dashboard.security import KINDS
from reefknot.console.dashboard.site import STATUS_OF_KIND
from reefknot.core.breaker import Breaker, Permit
from reefknot.core.time import Moment
from reefknot.idempotency.model import (
    Claimed,
    ClaimRequest,
    Done,
    Failed,
    KeyRecord,
    KeyState,
    Lost,
    Released,
    Uncertain,
    Unknown,
    claim,
    finish,
    is_spent,
    renew,
    resolve,
)
from reefknot.queue.model import messages
from reefknot.queue.model.admission import SHORTEST_WAIT_MS
from reefknot.queue.model.routing import WorkerState
from reefknot.queue.model.source_health import SourceCondition
from reefknot.queue.model.work import MOVES
from reefknot.queue.worker import admission
from reefknot.stores.jetstream import assignments, listeners, transport

PAGE = Path(__file__).resolve().parents[2] / "docs" / "states.md"
Move = tuple[str, str]

NOW = Moment(steady=1_000, wall=1_000)
ABSENT = "absent"


def moves_on_the_page(title: str, text: str | None = None) -> set[Move]:
    """The first two columns of the table in one section."""
    text = PAGE.read_text(encoding="utf-8") if text is None else text
    _, _, rest = text.partition(f"\n## {title}\n")
    section = rest.partition("\n## ")[0]
    rows = [line.strip("| \n").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[0][:2] == ["from", "to"], section
    moves = [(row[0], row[1]) for row in rows[2:]]
    assert len(moves) == len(set(moves)), "a move is listed twice"
    return set(moves)


def moves_of_a_key() -> Iterator[Move]:
    """Whatever can happen to a record of any state: held or not, guarded or not, remembered or not."""
    ours = ClaimRequest("k", "me", "", 100)
    first = claim(None, ours, fence=1, now=NOW, retention_ms=1)
    assert isinstance(first, Claimed)
    yield ABSENT, first.record.state.value
    for state, guard, lease_until, expires_at in product(KeyState, (False, True), (900, 1_100), (900, 1_100)):
        record = structs.replace(first.record, state=state, guard=guard, lease_until=lease_until, expires_at=expires_at)
        if is_spent(record, NOW):
            yield state.value, ABSENT
            continue
        for changed in changes(record, first):
            if changed is not record:
                yield state.value, changed.state.value


def changes(record: KeyRecord, first: Claimed) -> Iterator[KeyRecord]:
    asked = claim(record, ClaimRequest("k", "another", "", 100), fence=2, now=NOW, retention_ms=1)
    if isinstance(asked, Claimed | Uncertain):
        yield asked.record
    endings = (Done("1"), Failed("1"), Released(), Unknown())
    for answer in (
        renew(record, first.claim, now=NOW, lease_ms=200, retention_ms=1),
        *(finish(record, first.claim, ending, now=NOW, retention_ms=1) for ending in endings),
        *(resolve(record, ending, now=NOW, retention_ms=1) for ending in endings),
    ):
        if not isinstance(answer, Lost):
            yield answer


def moves_of_a_breaker() -> set[Move]:
    """Every sequence of six steps: ask, succeed, fail, let go, wait."""
    found: set[Move] = set()
    for steps in product("asflw", repeat=6):
        breaker, now, permit = Breaker("x", failures=1, cooldown=10.0), 0.0, Permit(0)
        for step in steps:
            before = breaker.state(now)
            match step:
                case "a":
                    asked = breaker.admit(now)
                    permit = asked if isinstance(asked, Permit) else permit
                case "s":
                    breaker.succeeded(permit)
                case "f":
                    breaker.failed(permit, now)
                case "l":
                    breaker.released(permit)
                case _:
                    now += 10.0
            found.add((before.value, breaker.state(now).value))
    return {(old, new) for old, new in found if old != new}


def test_the_page_has_every_move_of_a_piece_of_work() -> None:
    table = {(old.value, new.value) for old, targets in MOVES.items() for new in targets}

    assert moves_on_the_page("A piece of work") == table


@pytest.mark.parametrize(("title", "states"), [("A worker", WorkerState), ("A source", SourceCondition)])
def test_the_page_has_every_state(title: str, states: Iterable[object]) -> None:
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| \n").split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    assert rows[2:] == [str(state) for state in states]


def test_the_page_has_every_move_of_a_key() -> None:
    found = {move for move in moves_of_a_key() if move != (KeyState.UNKNOWN, KeyState.UNKNOWN)}

    assert moves_on_the_page("An idempotency key") == found


def test_the_page_has_every_move_of_a_breaker() -> None:
    assert moves_on_the_page("A circuit breaker") == moves_of_a_breaker()


@pytest.mark.parametrize("title", ["A piece of work", "An idempotency key", "A circuit breaker"])
def test_a_row_that_is_taken_out_is_missed(title: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, heading, section = text.partition(f"\n## {title}\n")
    lines = section.splitlines(keepends=True)
    first_row = next(number for number, line in enumerate(lines) if line.startswith("| --- ")) + 1
    del lines[first_row]

    assert moves_on_the_page(title, before + heading + "".join(lines)) < moves_on_the_page(title)


API = Path(__file__).resolve().parents[2] / "docs" / "reference" / "http-api.md"


def rows() -> list[tuple[str, str]]:
    return re.findall(r"^\| `((?:GET|POST) /\S*)` \| (.*) \|$", API.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_of_the_api_lists_every_route_with_its_summary() -> None:
    assert rows() == [(f"{route.method} {route.path}", route.summary) for route in ROUTES]


def test_the_page_of_the_api_has_every_kind_of_error_with_its_status() -> None:
    listed = {
        (int(status), kind)
        for status, kinds in re.findall(r"^\| (\d{3}) \| (.*?) \|", API.read_text(encoding="utf-8"), re.MULTILINE)
        for kind in re.findall(r"`(\w+)`", kinds)
    }

    assert {(status, kind) for kind, status in STATUS_OF_KIND.items()} <= listed
    assert set(KINDS.items()) <= listed


MESSAGES = " ".join((Path(__file__).parents[2] / "docs/reference/nats-messages.md").read_text(encoding="utf-8").split())


def test_the_page_of_messages_has_every_name_and_figure() -> None:
    names = (
        *(messages.ASSIGN, messages.ACK, messages.RESULT, messages.CANCEL, messages.HEARTBEAT, messages.FLEET),
        messages.assign_subject("WORKER"),
        *(transport.MESSAGE_ID, transport.MARK, transport.HEADERS, assignments.CONSUMER),
    )
    figures = (
        f"at most {assignments.MOST_ASSIGNMENTS:,} messages",
        f"within {assignments.ACK_WAIT_S:g} s",
        f"not heard of for {listeners.FORGET_AFTER_S:g} s",
        f"up to {transport.LARGEST >> 20} MiB",
        f"beyond {transport.MOST_UNREAD:,} unread",
        f"at most {admission.LOOKS_PER_S} a second",
        f"for {SHORTEST_WAIT_MS / 1000:g} s to {admission.MOST_BACK_S:g} s",
    )
    assert [text for text in (*(f"`{name}`" for name in names), *figures) if text not in MESSAGES] == []
