"""Packs of events: what is written comes back, and whatever is changed in one is found."""

import zlib
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from reefknot.audit.port import AuditEntry, AuditQuery, ChainReport
from reefknot.stores.jetstream import events
from reefknot.stores.jetstream.events import POSITIONS, AuditWriter, Pack, Verification
from reefknot.stores.jetstream.reads import StreamMessage
from reefknot.stores.jetstream.streams import Names
from reefknot.testing.conformance.harness import event

NAMES = Names("store")
OTHER_BYTES = (b"0", b"}", b" ")
ENTRIES = [
    AuditEntry(
        b'{"event_type":"submitted","timestamp":"2023-11-14T22:13:20.123Z","correlation_id":"c","trace_id":"t",'
        b'"work_id":"a"}',
        *("submitted", 1_700_000_000_123, "c", "t", "a"),
    ),
    AuditEntry(b" not json", "odd", 10**18),
    AuditEntry(
        '{"event_type":"completed","timestamp":"2023-11-14T22:13:20.124Z","work_id":"ö"}'.encode(),
        *("completed", 1_700_000_000_124, None, None, "ö"),
    ),
]


def writer() -> AuditWriter:
    connection: Any = SimpleNamespace(max_payload=1 << 20, options=SimpleNamespace(shown="nats://here/store"))
    return AuditWriter(connection, NAMES)


def stored(audit: AuditWriter, *batches: list[AuditEntry]) -> list[StreamMessage]:
    """The packs of these batches, one message of something else between each."""
    messages: list[StreamMessage] = []
    for batch in batches:
        sealed = audit.seal(batch)
        messages += [StreamMessage(one.subject, 2 * len(messages) + 2, one.body) for one in sealed.packs]
        audit.stored(sealed, messages[-1].sequence)
    return messages


def verified(audit: AuditWriter, messages: list[StreamMessage]) -> list[ChainReport]:
    verification = Verification([audit.head], [], None)
    for one in messages:
        verification.add(NAMES, Pack(one))
    return verification.reports()


@pytest.mark.parametrize("compressed", [False, True])
def test_one_changed_byte_of_a_pack_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch, compressed: bool) -> None:
    monkeypatch.setattr(events, "COMPRESSED_FROM", 0 if compressed else 1 << 20)
    audit = writer()
    says_its_time = [one for one in ENTRIES if b"timestamp" in one.body]
    messages = stored(audit, [event("before")], says_its_time, [event("after")])
    body = messages[1].body
    text = Pack(messages[1]).text
    assert (body == text) is not compressed
    assert [one.mismatches for one in verified(audit, messages)] == [[]]
    for place in range(len(body)):
        for other in OTHER_BYTES:
            changed = body[:place] + other + body[place + 1 :]
            messages[1] = structs.replace(messages[1], body=changed)
            found = [each for report in verified(audit, messages) for each in report.mismatches]
            is_same = Pack(messages[1]).text == text  # what is left of the last byte of compressed text says nothing
            assert found or is_same, (place, body[place - 40 : place + 10])


@pytest.mark.parametrize(
    "changed",
    [b"", b"[]", b"{}", b"[1]", b"junk", zlib.compress(b"[]") + b"more", zlib.compress(b"[" + b" " * (2 << 20) + b"]")],
)
def test_what_is_no_pack_is_shown_as_it_is_and_found(changed: bytes) -> None:
    audit = writer()
    messages = stored(audit, [event("before")], ENTRIES, [event("after")])
    messages[1] = structs.replace(messages[1], body=changed)
    problems = [each.problem for each in verified(audit, messages)[0].mismatches]
    assert any(one.startswith("the message at position 4000 is no pack of events") for one in problems)
    shown = [one.entry.body for one in Pack(messages[1]).kept(AuditQuery())]
    assert shown == ([] if changed == b"[]" else [changed])


def test_positions_ascend_and_the_last_event_of_a_pack_has_that_of_its_message() -> None:
    audit = writer()
    messages = stored(audit, [event("a")], ENTRIES, [event("b")] * 3)
    positions = [one.sequence for message in messages for one in Pack(message).kept(AuditQuery())]
    assert positions == [2000, 3998, 3999, 4000, 5998, 5999, 6000]
    assert audit.position == positions[-1]
    of_two = Pack(messages[1]).kept(AuditQuery(after=3998, before=4000))
    assert [(one.sequence, one.entry) for one in of_two] == [(3999, ENTRIES[1])]


def test_a_pack_has_no_more_events_than_positions() -> None:
    audit = writer()
    messages = stored(audit, [event("a")] * 1200)
    assert [len(Pack(one).events()) for one in messages] == [500, 500, 200]
    many = b",".join(
        [messages[0].body[1:-1] if messages[0].body[:1] == b"[" else zlib.decompress(messages[0].body)[1:-1]] * 3
    )
    forged = Pack(structs.replace(messages[0], body=zlib.compress(b"[%s]" % many)))
    assert len(forged.events()) == POSITIONS
    assert not forged.is_in_place(NAMES, forged.events())


@pytest.mark.parametrize(
    "query",
    [
        AuditQuery(work_id="a"),
        AuditQuery(work_id="ö"),
        AuditQuery(correlation_id="c"),
        AuditQuery(trace_id="t"),
        AuditQuery(event_type="odd"),
        AuditQuery(event_type="completed", work_id="ö"),
        AuditQuery(event_type="completed", work_id="a"),
        AuditQuery(work_id="b"),
        AuditQuery(since=1_700_000_000_124),
    ],
)
def test_a_pack_that_is_passed_over_without_decoding_has_no_event_that_matches(query: AuditQuery) -> None:
    (message,) = stored(writer(), ENTRIES)
    expected = [one for one in ENTRIES if query.matches(one)]
    assert [one.entry for one in Pack(message).kept(query)] == expected


def test_events_that_were_refused_give_their_numbers_back() -> None:
    audit = writer()
    first, again = audit.seal(ENTRIES), audit.seal([event("b")])
    assert (first.head.sequence, again.head.sequence, audit.head.sequence) == (3, 1, 0)
    audit.stored(again, 7)
    assert audit.head == again.head
    assert audit.seal(ENTRIES).packs[0].subject == f"store.audit.{audit.head.chain}.2._"
