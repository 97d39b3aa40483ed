"""The audit log for operators: what a search finds, and what verification and replay cover."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reefknot.audit.model import event as audited
from reefknot.audit.model.event import Admission, AnyEvent, BookStored, BreakerEvent, Completed, OperatorAction, encode
from reefknot.audit.port import AuditQuery
from reefknot.console import cli, operations
from reefknot.console.operations.audit import EventQuery, audit_head, replay_events, search_events, verify_events
from reefknot.console.operations.operator import Operator
from reefknot.console.words.events import in_words
from reefknot.core.redaction import Redactor
from reefknot.errors import ParameterError
from reefknot.policy.model.book import content_hash
from reefknot.policy.settings import load_settings
from reefknot.stores import opening
from reefknot.stores.sqlite.transaction import EVENTS_PER_BLOCK
from reefknot.testing.conformance.harness import event
from tests.unit.console.cli.audit_events import NOON, STORY, at, attempt, change, decision, recorded
from tests.unit.console.operations.operator_scene import asked

BOOK: dict[str, Any] = {"operations": {"KV_GET": {"max_attempts": 9}}}


def job(number: int, tenant: str) -> list[AnyEvent]:
    common: dict[str, Any] = {"work_id": f"job-{number}", "tenant_id": tenant, "correlation_id": f"r{number}"}
    return [
        audited.Submitted(timestamp=at(number), actor="ann", **common),
        audited.Routing(timestamp=at(number + 0.1), worker_id="worker-1", **common),
        Admission(timestamp=at(number + 0.2), worker_id="worker-1", resource_class="io", **common),
        Completed(timestamp=at(number + 0.3), status="success", operation="x", worker_id="worker-1", **common),
    ]


TRAIL: list[AnyEvent] = [
    *(event for number in range(10) for event in job(number, "acme" if number % 3 else "blue")),
    attempt(11, number=1, message="the door of Müller's depot is shut"),
    audited.IdempotencyEvent(timestamp=at(12), idempotency_key="order-7", action="record"),
    OperatorAction(timestamp=at(13), actor="bob", os_user="root", action="job.cancel", subject="job-3"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recorded(tmp_path / "state.db", TRAIL)


def pages(path: Path, **given: Any) -> list[dict[str, Any]]:
    """The pages of a search, one after the other, to its end."""

    async def walk(operator: Operator) -> list[dict[str, Any]]:
        found = [await search_events(operator, EventQuery(**given))]
        while found[-1]["next"] is not None:
            found.append(await search_events(operator, EventQuery(**given, after=found[-1]["next"])))
            assert len(found) <= len(TRAIL) + 1, "the search ends"
        return found

    return asked(path, walk)


def numbers(found: list[dict[str, Any]]) -> list[int]:
    return [one["sequence"] for page in found for one in page["events"]]


def wanted(**fields: Any) -> list[int]:
    """The numbers of the events with these fields, newest first."""
    return [
        number
        for number, event in reversed(list(enumerate(TRAIL, 1)))
        if all(getattr(event, name, None) == value for name, value in fields.items())
    ]


FILTERS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, wanted()),
    ({"type": "completed"}, wanted(event_type="completed")),
    ({"work": "job-4"}, wanted(work_id="job-4")),
    ({"correlation": "r5", "type": "routing"}, [22]),
    ({"trace": "t1"}, [41]),
    ({"tenant": "blue"}, wanted(tenant_id="blue")),
    ({"tenant": "blue", "type": "submitted"}, wanted(tenant_id="blue", event_type="submitted")),
    ({"tenant": "nobody"}, []),
    ({"actor": "root"}, [43]),
    ({"key": "order-7"}, [42]),
    ({"category": "kv.get"}, [41]),
    ({"text": "MÜLLER"}, [41]),
    ({"since": at(11)}, [43, 42, 41]),
    ({"until": at(1)}, [4, 3, 2, 1]),
    ({"since": at(1), "until": at(2), "type": "admission"}, [7]),
]


def test_a_search_finds_each_event_once_newest_first_by_its_cursor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page may look at five events at most; nothing is left out where it ends without any."""
    for given, found in FILTERS:
        for limit in (1, 3, 50):
            assert numbers(pages(path, **given, limit=limit)) == found, given
    monkeypatch.setattr(operations.audit, "SCANNED", 5)
    monkeypatch.setattr(operations.audit, "SCAN_S", 0.0)
    for given, found in FILTERS:
        looked = pages(path, **given, limit=50)
        assert numbers(looked) == found, given
        if given.keys() & {"tenant", "actor", "key", "category", "text", "until"}:
            assert max(one["looked_at"] for one in looked) <= 5, given
        else:
            assert len(looked) == 1, "an index finds them at once"


@pytest.mark.real_time
async def test_a_search_until_a_time_begins_where_the_events_before_it_end(tmp_path: Path) -> None:
    """Also where one of them was written much later, as by a system whose log was away for a while."""
    noon, late = int(NOON * 1000), 4 * EVENTS_PER_BLOCK
    async with opening.open_store(f"sqlite:{tmp_path / 'state.db'}") as store:
        operator = Operator(store, Redactor(()))
        await store.audit.append([event("a", at=noon + number) for number in range(late)])
        found = await search_events(operator, EventQuery(until="2026-01-25T12:00:00.050Z", limit=3))
        assert [one["sequence"] for one in found["events"]] == [50, 49, 48]
        assert found["looked_at"] <= EVENTS_PER_BLOCK
        assert (await search_events(operator, EventQuery(until="2026-01-25T11:00:00Z")))["looked_at"] == 0
        await store.audit.append([event("late", at=noon + 7)])
        newest = await store.audit.read(AuditQuery(until=noon + 50, newest_first=True, limit=2))
        assert [one.sequence for one in newest] == [late + 1, 50]
        assert [one.sequence for one in await store.audit.read(AuditQuery(until=noon + 2))] == [1, 2]


def test_every_event_has_its_fields_and_a_sentence(path: Path) -> None:
    (page,) = pages(path, type="retry_attempt")
    (found,) = page["events"]
    assert (found["kind"], found["event"]["attempt_number"], len(found["hash"])) == ("retry", 1, 64)
    assert found["sentence"].startswith("attempt 1 failed: ConnectionError: the door of Müller")
    more = [BookStored(timestamp="", book_hash="ab", content={}), BreakerEvent(timestamp="", name="api", state="open")]
    said = [in_words(encode(event)) for event in [*TRAIL, *STORY, *more]]
    assert all(kind and words for kind, words in said)
    assert ("submitted", "by ann on , process 0") in said
    damaged = "the event was changed, or is of another version; see `audit verify`"
    assert in_words(b"nonsense") == ("unreadable", damaged)


def test_a_damaged_event_is_shown_as_one_and_a_secret_is_not_shown(path: Path) -> None:
    change(path, "UPDATE audit SET body = 'nonsense' WHERE sequence = 43")
    found = asked(path, lambda operator: search_events(operator, EventQuery(limit=3)), secrets=("depot is shut",))
    assert [one["kind"] for one in found["events"]] == ["unreadable", "idempotency", "retry"]
    assert found["events"][0]["event"]["event_type"] == "operator_action"
    assert "depot" not in json.dumps(found)


@pytest.mark.parametrize(
    ("given", "parameter", "said"),
    [
        ({"type": "complted"}, "type", "did you mean 'completed'?"),
        ({"since": "yesterday"}, "since", "an age: 90s, 15m, 2h, 7d"),
        ({"since": "1h", "until": "2h"}, "until", "accepted: a later time"),
        ({"tenant": " "}, "tenant", "a text to select by"),
        ({"limit": 0}, "limit", "from 1 to 1000"),
        ({"limit": 1001}, "limit", "from 1 to 1000"),
        ({"after": "'; --"}, "after", "the cursor that a page gave"),
        ({"after": "٣"}, "after", "the cursor that a page gave"),
    ],
)
def test_a_filter_that_is_not_accepted_is_named(path: Path, given: dict[str, Any], parameter: str, said: str) -> None:
    with pytest.raises(ParameterError) as refused:
        pages(path, **given)
    assert (refused.value.parameter, said in str(refused.value)) == (parameter, True), str(refused.value)


def printed(capsys: pytest.CaptureFixture[str], path: Path, verb: str) -> Any:
    capsys.readouterr()
    cli.main(["audit", verb, "--engine", f"sqlite:{path}", "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("number", [None, 2, 42])
def test_a_log_is_verified_and_replayed_as_printed(path: Path, capsys: pytest.CaptureFixture[str], number: Any) -> None:
    if number is not None:
        change(path, f"UPDATE audit SET body = replace(body, '\"', ' \"') WHERE sequence = {number}")
    verified, again = asked(path, verify_events), asked(path, replay_events)
    assert printed(capsys, path, "verify").items() <= verified.items()
    assert verified["ok"] is (number is None)
    assert printed(capsys, path, "replay").items() <= again.items()
    assert verified["covered"] == again["covered"] == {"events": 43, "first": 1, "last": 43, "whole": True}


@pytest.mark.parametrize(
    ("statement", "number", "problem"),
    [
        ("UPDATE audit SET body = replace(body, 'bob', 'eve') WHERE sequence = 43", 43, "the hash does not fit"),
        ("DELETE FROM audit WHERE sequence = 40", 41, "expected number 40"),
        ("UPDATE audit SET event_type = 'breaker' WHERE sequence = 42", 42, "filed under another event_type"),
        ("UPDATE audit SET trace_id = NULL WHERE sequence = 41", 41, "filed under another trace_id"),
        ("UPDATE audit SET correlation_id = 'new' WHERE sequence = 43", 43, "filed under another correlation_id"),
        ("DELETE FROM audit WHERE sequence = 43", 43, "the log does not end with its head"),
        ("UPDATE audit SET body = replace(body, 'ann', 'eve') WHERE sequence = 1", None, ""),
    ],
    ids=["edited", "removed", "filed", "of no trace", "of a correlation", "cut off", "edited before the newest"],
)
def test_only_the_newest_events_are_verified(path: Path, statement: str, number: int | None, problem: str) -> None:
    """The last case is the control: an older event is not covered, and the answer does not say that it is."""
    change(path, statement)
    found = asked(path, lambda operator: verify_events(operator, most=10))
    assert found["covered"] == {"events": 10, "first": 34, "last": 43, "whole": False}
    assert [one["sequence"] for one in found["mismatches"][:1]] == ([] if number is None else [number])
    assert all(problem in one["problem"] for one in found["mismatches"][:1])
    assert asked(path, lambda operator: verify_events(operator, most=None))["ok"] is False


def test_heads_that_were_kept_are_compared_where_they_are_covered(tmp_path: Path, path: Path) -> None:
    """A writer of the newest event and of its hash is found by the head alone."""
    (tmp_path / "reefknot.yaml").write_text("audit: {heads: {path: kept.jsonl}}\n")
    settings = load_settings(str(tmp_path / "reefknot.yaml"), environ={}, cwd=tmp_path)
    file = tmp_path / "kept.jsonl"
    (head,) = asked(path, audit_head)["heads"]

    def newest(**changes: Any) -> dict[str, Any]:
        file.write_text(json.dumps(head | changes) + "\n")
        return asked(path, lambda operator: verify_events(operator, most=10), settings=settings)

    missing = asked(path, lambda operator: verify_events(operator, most=10), settings=settings)
    assert missing["heads_missing"] == str(file)
    found = newest()
    assert (found["ok"], found["proven_up_to"], found["heads_missing"]) == (True, 43, None)
    assert [one["problem"] for one in newest(hash="0" * 64)["mismatches"]] == ["the hash is not the one of the head"]
    older = newest(sequence=5)
    assert (older["ok"], older["proven_up_to"], older["compared_with"]) == (True, None, None), "it is not covered"


def test_an_empty_log_is_verified_replayed_and_searched_too(tmp_path: Path) -> None:
    path = recorded(tmp_path / "empty.db", [])
    assert (asked(path, verify_events)["ok"], asked(path, replay_events)["ok"]) == (True, True)
    assert pages(path) == [{"events": [], "next": None, "looked_at": 0}]


def test_the_newest_decisions_are_decided_again_with_the_books_of_earlier_events(tmp_path: Path) -> None:
    stored = BookStored(timestamp=at(0), book_hash=content_hash(BOOK), content=BOOK)
    of_book = msgspec.structs.replace(decision(1), book_hash=stored.book_hash)
    decided = [msgspec.structs.replace(attempt(second), decision=of_book) for second in range(1, 9)]
    path = recorded(tmp_path / "state.db", [stored, *decided])

    def newest() -> dict[str, Any]:
        return asked(path, lambda operator: replay_events(operator, most=4))

    found = newest()
    assert (found["ok"], found["events"], found["decisions"], found["books_missing"]) == (True, 4, 4, [])
    assert found["covered"] == {"events": 4, "first": 6, "last": 9, "whole": False}
    change(path, """UPDATE audit SET body = replace(body, '"delay":1.0', '"delay":9.0') WHERE sequence IN (2, 8)""")
    assert [one["sequence"] for one in newest()["differences"]] == [8], "the second event is not covered"


@pytest.mark.real_time
async def test_a_replay_lets_others_have_their_turn() -> None:
    """The events are there at once, so that only the replay itself can give way."""
    body = encode(attempt(1))

    async def events() -> AsyncIterator[tuple[int, bytes]]:
        for number in range(1000):
            yield number, body

    replaying, turns = asyncio.create_task(operations.audit.replayed("here", events())), 0
    while not replaying.done():
        await asyncio.sleep(0)
        turns += 1
    assert replaying.result()["decisions"] == 1000
    assert turns >= 10
