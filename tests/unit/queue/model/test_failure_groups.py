"""Fingerprints of failures, and the groups that they make."""

import json
import time

import pytest

from reefknot.queue.model import failure_groups
from reefknot.queue.model.failure_groups import FailureGroups, failure_summary, fingerprint_of, has_error, normalised
from reefknot.queue.model.work import WorkItem, vanished_reason
from tests.rows import for_each_row


def item(message: str = "", *, name: str = "a", at: int = 1, source: str = "", **failure: object) -> WorkItem:
    body = {"failure_type": "permanent", "code": "HTTP_ERROR", "message": message, **failure}
    return WorkItem(name, "imap", source=source, updated_at=at, reason="not_retryable", failure=json.dumps(body))


@for_each_row(
    ("one", "other"),
    [
        ("HTTP 503 after 12 tries", "HTTP 503 after 7 tries"),
        ("waited 1.5 s of 30", "waited 12,75 s of 1000"),
        ("no folder 'Work'", "no folder 'Home/2024'"),
        ('no field "a" in `b`', 'no field "title" in `front matter`'),
        ("cannot read /home/ann/notes/a.md: denied", "cannot read /srv/b.txt: denied"),
        ("cannot read notes/a b.md", "cannot read work/c b.md"),
        (r"cannot read C:\notes\a.md", r"cannot read D:\b.md"),
        ("commit 1f3a9c2d7 is gone", "commit 0be2211f9aa is gone"),
        ("job 6f9619ff-8b86-d011-b42d-00cf4fc964ff ended", "job 00000000-8b86-d011-b42d-00cf4fc964aa ended"),
        ("object at 0x7f3a11", "object at 0xffff"),
        ("at 2024-05-01T10:00:00Z it was shut", "at 2026-11-16 09:36:39.120+02:00 it was shut"),
        ("shut since 09:36", "shut since 10:00:01"),
        ("https://a.example/x?y=1 does not answer", "imaps://mail.example:993 does not answer"),
        ("10.0.0.1:993 refused", "mail.example.org:143 refused"),
        ("[::1]:80 refused", "[fe80::2] refused"),
        ("ann@example.org may not", "bob.b+x@mail.example.com may not"),
        ("a  line\nand another", "a line and another"),
    ],
)
def test_what_differs_from_job_to_job_does_not_count(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)
    assert fingerprint_of(item(one)) == fingerprint_of(item(other))


@for_each_row(
    "message",
    ["it can't be read and isn't there", "the folder is missing", "login failed: wrong password", "decade of cafe"],
)
def test_words_stay_as_they_are(message: str) -> None:
    assert normalised(message) == message


def test_type_code_status_exception_and_words_make_the_difference() -> None:
    one = item("it failed")
    others = [
        item("it broke"),
        item("it failed", failure_type="transient"),
        item("it failed", code="NETWORK_ERROR"),
        item("it failed", http_status=404),
        item("it failed", exceptions=["builtins.OSError", "builtins.Exception"]),
    ]
    found = [fingerprint_of(each) for each in (one, *others)]
    assert (len(set(found)), {len(each) for each in found}) == (6, {failure_groups.DIGITS})
    assert found[0] == "46a9df25ed46", "it is the same in every process and version"


def test_without_a_message_the_reason_is_the_message() -> None:
    for failure in (None, "no json", '{"code": 1}', '{"message": ""}', '{"message": "\ud800"}'):
        found = failure_summary(WorkItem("a", "t", reason="no worker knows its type: x", failure=failure))
        assert found.message == "no worker knows its type: x"


def test_an_owner_that_vanished_hides_the_failure_of_an_attempt_before_it() -> None:
    lost = WorkItem("a", "t", crashes=3, reason=vanished_reason(3), failure='{"message": "an old failure"}')
    failed_later = WorkItem("a", "t", crashes=1, reason="attempts_spent", failure='{"message": "its own failure"}')

    assert failure_summary(lost).message == "its owner vanished 3 times"
    assert failure_summary(failed_later).message == "its own failure"


def test_groups_are_counted_with_their_times_sources_and_the_newest_message() -> None:
    items = [
        item("no 'a'", name="1", at=5, source="notes"),
        item("no 'b'", name="2", at=9, source="mail"),
        item("no 'c'", name="3", at=7, source="mail"),
        item("another", name="4", at=1),
    ]
    first, second = FailureGroups(items).groups()
    assert (first.count, first.message, first.oldest_at, first.newest_at) == (3, "no 'b'", 5, 9)
    assert (second.count, second.message, second.oldest_at, second.newest_at) == (1, "another", 1, 1)
    assert (first.sources, first.kinds, second.sources) == (("mail", "notes"), ("imap",), ())
    assert first.fingerprint == fingerprint_of(items[0])


def test_what_is_kept_of_many_groups_and_sources_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_groups, "MOST_GROUPS", 2)
    monkeypatch.setattr(failure_groups, "MOST_SOURCES", 1)
    words = ["one", "two", "three", "one", "four"]
    found = FailureGroups(item(word * 400, source=word + str(at), at=at) for at, word in enumerate(words))

    assert [(one.count, one.sources) for one in found.groups()] == [(2, ("one0",)), (1, ("two1",))]
    assert (found.ungrouped, len(found.groups()[0].message)) == (2, failure_groups.LONGEST_EXAMPLE)


@pytest.mark.parametrize("piece", ["a.", "'", "a-", "0a", "/", "a@", "1:", "~/.", "x://", "1.1.1."])
def test_no_message_takes_long(piece: str) -> None:
    began = time.process_time()
    normalised(piece * 100_000)

    assert time.process_time() - began < 1.0


def test_a_text_is_looked_for_in_the_reason_and_in_what_a_failure_says() -> None:
    found = item("it answered 503")
    assert all(has_error(found, text) for text in ("not_retry", "HTTP_ERROR", "permanent", "Http_Error", "IT ANSWERED"))
    assert has_error(found, "answered 503")
    assert not any(has_error(found, text) for text in ("answered 504", "message", "imap"))
    for failure in (None, "no JSON"):
        odd = WorkItem("a", "t", reason="gone", failure=failure)
        assert (has_error(odd, "gone"), has_error(odd, "JSON")) == (True, False)
