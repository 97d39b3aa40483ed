"""The chain shows every tampering, given a head that was exported."""

import json
import random
from typing import Any

import pytest

from reefknot.audit.model import chain
from reefknot.audit.model.chain import (
    GENESIS,
    ChainVerifier,
    Head,
    Link,
    Mismatch,
    Removal,
    RetentionInForce,
    anchor_body,
    anchor_in,
    file_rule,
    link,
    verify,
)
from tests.rows import for_each_row


def chain_of(number: int, start: Head | None = None) -> tuple[list[Link], Head]:
    head = start or Head("c")
    links = []
    for index in range(number):
        body = b'{"n":%d}' % index
        head, hashed = link(head, body)
        links.append(Link(head.sequence, hashed, body))
    return links, head


def test_an_untouched_chain_has_no_mismatch() -> None:
    links, head = chain_of(50)
    assert verify(links, head) == []
    assert verify([], Head("c")) == []


def test_the_same_body_at_another_place_or_in_another_chain_has_another_hash() -> None:
    first, _ = link(Head("c"), b"x")
    second, _ = link(first, b"x")
    other, _ = link(Head("d"), b"x")
    assert len({first.hash, second.hash, other.hash, GENESIS}) == 4
    _, hashed = link(Head("c"), b"{}")
    assert hashed == "a3691b98c44054285e4c1d726b7af6a9339d26c54bc7645c38a17a162b4bb57e"


def test_one_edit_is_one_finding_and_a_removed_link_is_named_by_the_number_that_is_missing() -> None:
    links, head = chain_of(20)
    links[7] = Link(8, links[7].hash, b"edited")
    assert verify(links, head) == [Mismatch(8, "the hash does not fit the body and its place")]
    del links[7]
    assert Mismatch(9, "expected number 8") in verify(links, head)


def test_a_chain_alone_does_not_show_that_its_end_was_cut_off_and_its_head_does() -> None:
    links, head = chain_of(20)
    shorter = links[:15]
    assert verify(shorter, Head("c", 15, shorter[-1].hash)) == []
    assert verify(shorter, head) == [Mismatch(16, "cut off: the head is at 20")]
    assert verify(links, Head("c", 5, links[4].hash)) == [], "an older head holds against a longer chain"


def test_a_chain_rewritten_from_its_start_does_not_fit_an_exported_head() -> None:
    _, head = chain_of(20)
    rewritten, _ = chain_of(20, Head("c", 0, "1" * 64))
    forged = [Link(one.sequence, one.hash, one.body) for one in rewritten]
    assert Mismatch(20, "the hash is not the one of the head") in verify(forged, head, start=Head("c", 0, "1" * 64))


def test_what_is_left_after_an_anchor_is_verified_from_there_and_needs_its_event() -> None:
    links, head = chain_of(20)
    anchor = Head("c", 10, links[9].hash)
    gone = [Mismatch(11, "the links before are gone, and no anchor event says so")]
    assert verify(links[10:], head, start=anchor) == gone
    head, hashed = link(head, anchor_body(anchor, 99))
    links.append(Link(head.sequence, hashed, anchor_body(anchor, 99)))
    assert verify(links[10:], head, start=anchor) == []
    assert verify(links[11:], head, start=anchor) != []


def test_a_head_from_before_the_anchor_cannot_be_compared() -> None:
    links, _ = chain_of(20)
    anchor = Head("c", 10, links[9].hash)
    _, hashed = link(Head("c", 20, links[19].hash), anchor_body(anchor, 99))
    rest = [*links[10:], Link(21, hashed, anchor_body(anchor, 99))]
    (found,) = verify(rest, Head("c", 5, links[4].hash), start=anchor)
    assert "cannot be compared" in found.problem
    assert verify(rest, Head("c", 10, "f" * 64), start=anchor) == [Mismatch(10, "the hash is not the one of the head")]
    assert verify(rest, anchor, start=anchor) == []


def test_the_anchor_says_where_the_rest_begins_and_what_is_no_anchor_vouches_for_nothing() -> None:
    body = anchor_body(Head("c", 10, "ab"), 99)
    assert anchor_in(body) == Head("c", 10, "ab")
    assert json.loads(body)["timestamp"].startswith("1970-01-01T00:00:00.099")
    none = [b"{}", b'{"event_type":"anchor"', b'{"event_type":"anchor"}']
    assert [anchor_in(one) for one in none] == [None] * 3


@for_each_row("seed", range(200))
def test_every_random_tampering_is_found(seed: int) -> None:
    dice = random.Random(seed)
    links, head = chain_of(30)
    place = dice.randrange(29)
    match seed % 5:
        case 0:
            body = bytearray(links[place].body)
            body[dice.randrange(len(body))] ^= 1 << dice.randrange(7)
            links[place] = Link(links[place].sequence, links[place].hash, bytes(body))
        case 1:
            del links[place]
        case 2:
            one, two = links[place], links[place + 1]
            links[place] = Link(one.sequence, two.hash, two.body)
            links[place + 1] = Link(two.sequence, one.hash, one.body)
        case 3:
            links.insert(place, Link(links[place].sequence, links[place].hash, b"{}"))
        case _:
            del links[dice.randrange(30) :]
    assert verify(links, head) != []


# ---- a walk in pages -------------------------------------------------------------------------------------------------


@for_each_row("page", [1, 3, 20, 100])
def test_a_walk_in_pages_finds_what_one_walk_finds(page: int) -> None:
    links, head = chain_of(20)
    links[7] = Link(8, links[7].hash, b"edited")
    del links[12]
    verifier = ChainVerifier(Head("c"), head)
    for first in range(0, len(links), page):
        verifier.add(links[first : first + page])

    assert verifier.result() == verify(links, head)
    assert verifier.sequence == 20


def test_a_walk_compares_with_every_head_it_is_given_and_two_that_say_the_same_are_one_finding() -> None:
    links, head = chain_of(20)
    old = Head("c", 5, links[4].hash)
    forged = Head("c", 7, "f" * 64), Head("c", 7, "e" * 64)
    verifier = ChainVerifier(Head("c"), head, old, *forged)
    verifier.add(links)
    assert verifier.result() == [Mismatch(7, "the hash is not the one of the head")]


def test_a_walk_that_retention_overtook_goes_on_from_the_anchor_and_needs_its_event() -> None:
    links, head = chain_of(10)
    anchor = Head("c", 6, links[5].hash)
    body = anchor_body(anchor, 0)
    end, hashed = link(head, body)
    for vouched in (True, False):
        verifier = ChainVerifier(Head("c"), head, Head("c", 2, links[1].hash))
        verifier.add(links[:3])
        verifier.resume_from(anchor, end if vouched else head)
        verifier.add([*links[6:], *([Link(11, hashed, body)] if vouched else [])])
        gone = [] if vouched else [Mismatch(7, "the links before are gone, and no anchor event says so")]

        assert verifier.result() == gone


def test_findings_are_bounded_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.audit.model.chain.MOST_FOUND", 3)
    links, head = chain_of(10)
    edited = [Link(one.sequence, one.hash, b"edited") for one in links]
    found = verify(edited, head)

    assert [one.sequence for one in found] == [1, 2, 3, 10]
    assert found[-1].problem == "and 7 more"


# ---- what an anchor proves -------------------------------------------------------------------------------------------

DAY = 86_400_000
NOW = 100 * DAY


def event_of(day: int) -> bytes:
    return json.dumps({"timestamp": f"1970-{1 + day // 31:02d}-{1 + day % 31:02d}T00:00:00.000Z"}).encode()


def trimmed(*steps: int, rule: str = "retention 30 days", **lies: Any) -> tuple[list[Link], Head, Head]:
    """
    What is left of 60 events, one a day, after these steps of retention, each up to the event of this number.

    `lies` replace fields of the last removal. Returns the links, the anchor and the head.
    """
    links, head, anchor = [], Head("c"), Head("c")
    for day in range(60):
        head, hashed = link(head, event_of(day))
        links.append(Link(head.sequence, hashed, event_of(day)))
    for number, last in enumerate(steps, 1):
        fields: dict[str, Any] = {
            "rule": rule,
            "count": last - anchor.sequence,
            "previous": links[last - 2].hash if last > 1 else GENESIS,
            "last": links[last - 1].body,
        }
        removal = Removal(**(fields | (lies if number == len(steps) else {})))
        anchor = Head("c", last, links[last - 1].hash)
        body = anchor_body(anchor, NOW, removal)
        head, hashed = link(head, body)
        links.append(Link(head.sequence, hashed, body))
    return links[anchor.sequence :], anchor, head


def problems(left: tuple[list[Link], Head, Head], in_force: RetentionInForce | None) -> list[str]:
    links, anchor, head = left
    return [one.problem for one in verify(links, head, start=anchor, in_force=in_force)]


def keeping(days: float | None, **more: Any) -> RetentionInForce:
    return RetentionInForce(None if days is None else days * 86_400, NOW, **more)


def test_an_anchor_over_events_that_retention_lets_go_is_fine() -> None:
    assert problems(trimmed(10, 20), keeping(30, needs_proof=True)) == []
    assert problems(trimmed(1), keeping(30, needs_proof=True)) == []


def test_an_event_that_retention_keeps_cannot_be_removed_by_any_anchor() -> None:
    """Day 80 of a hundred, a retention of 50 days: whatever the anchor calls its rule."""
    (found,) = problems(trimmed(55, rule="retention 1 second"), keeping(50))
    kept = "an event of 1970-02-24T00:00:00.000Z was removed, and the retention in force keeps events for 4.32e+06 s"
    assert found == kept
    (found,) = problems(trimmed(10), keeping(None))
    assert "for ever" in found


@pytest.mark.parametrize("lies", [{"last": event_of(3)}, {"previous": GENESIS}])
def test_an_anchor_cannot_show_another_event_than_the_last_one(lies: dict[str, Any]) -> None:
    (found,) = problems(trimmed(55, **lies), None)
    assert found == "the last removed event that the anchor shows is not the one that was there"


def test_an_anchor_without_its_last_event_proves_nothing() -> None:
    """As earlier versions wrote them: accepted, unless the chain is compared with a head from elsewhere."""
    bare = trimmed(55, rule="", last=b"", previous="", count=0)
    assert problems(bare, keeping(50)) == []
    (found,) = problems(bare, keeping(50, needs_proof=True))
    assert found == "the anchor does not show what was removed, so its age is not known"


def test_a_log_that_keeps_a_number_of_files_removes_by_size() -> None:
    left = trimmed(55, rule=file_rule(3))
    assert problems(left, keeping(50, files=3)) == []
    assert len(problems(left, keeping(50, files=4))) == 1
    assert len(problems(left, keeping(50))) == 1


def test_an_anchor_continues_the_count() -> None:
    (found,) = problems(trimmed(10, 20, count=15), None)
    assert found == "the anchor does not continue the count of removed events"
    assert problems(trimmed(10, 20, 20), None) == [], "a crash may write it twice"


@pytest.mark.parametrize("body", [b"[]", b"{}", b"no json", b'{"timestamp":"soon"}'])
def test_the_age_of_a_body_that_is_no_event_is_not_known(body: bytes) -> None:
    first, hashed = link(Head("c"), body)
    anchor = anchor_body(first, NOW, Removal("by hand", 1, GENESIS, body))
    head, second = link(first, anchor)
    assert verify([Link(2, second, anchor)], head, start=first, in_force=keeping(30, needs_proof=True)) == []
    assert hashed == first.hash


def test_an_anchor_may_be_an_event_of_another_chain() -> None:
    """Where every process has its own chain, the one that removes writes the anchors of all."""
    links, head = chain_of(30)
    start = Head("c", 10, links[9].hash)
    body = anchor_body(start, NOW, Removal("by hand", 10, links[8].hash, links[9].body))

    def found(*bodies: bytes) -> list[str]:
        verifier = ChainVerifier(start, head)
        for one in bodies:
            verifier.confirm(one)
        verifier.add(links[10:])
        return [one.problem for one in verifier.result()]

    assert found(body) == []
    assert found() == ["the links before are gone, and no anchor event says so"]
    assert found(anchor_body(Head("other", 10, links[9].hash), NOW), b"{}") == found()


def test_an_anchor_of_another_chain_does_not_count_in_this_one() -> None:
    head, links = Head("c"), []
    for body in (b"{}", anchor_body(Head("other", 7, "a" * 64), NOW, Removal("by hand", 7)), b"{}"):
        head, hashed = link(head, body)
        links.append(Link(head.sequence, hashed, body))
    own = anchor_body(Head("c", 2, links[1].hash), NOW, Removal("by hand", 2))
    head, hashed = link(head, own)
    assert verify([*links, Link(head.sequence, hashed, own)], head) == []


def test_anchors_of_a_chain_that_others_trim_too_need_not_continue_each_other() -> None:
    links, anchor, head = trimmed(10, 20, count=15)
    elsewhere = anchor_body(Head("c", 5, "a" * 64), NOW, Removal("by hand", 5))
    assert verify(links, head, start=anchor, anchors=[elsewhere]) == []
    assert len(verify(links, head, start=anchor)) == 1, "the control"


def test_an_event_that_is_filed_under_another_field_is_a_mismatch_with_its_number() -> None:
    body = b'{"event_type":"breaker","timestamp":"2026-01-25T21:15:00.000Z","work_id":"a"}'
    at = 1769375700000
    assert chain.index_mismatch(7, body, chain.EventIndex("breaker", None, None, "a"), at) is None
    wrong = chain.index_mismatch(7, body, chain.EventIndex("breaker", None, None, "b"), at)
    assert wrong == chain.Mismatch(7, "it is filed under another work_id than its own")
