"""Messages as people send them, and what is read of them."""

from base64 import b64encode
from email.message import EmailMessage

import pytest

from reefknot.ingest.connectors.file_contents import text_of_html
from reefknot.ingest.connectors.mail import (
    MOST_ATTACHMENTS,
    MOST_DEPTH,
    MOST_PARTS,
    MOST_RECIPIENTS,
    MOST_REFERENCES,
    MOST_TEXT,
    MOST_TITLE,
    read_mail,
)


def built(**headers: str) -> EmailMessage:
    message = EmailMessage()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return message


MIXED = "Content-Type: multipart/mixed; boundary=b"


def with_headers(*lines: str, body: bytes = b"Text.") -> bytes:
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def test_subject_addresses_date_and_text_are_read() -> None:
    message = built(
        From="Jürgen <j@example.org>",
        To='"Doe, Jane" <jane@example.org>, bob@example.org',
        Cc="x@example.org",
        Subject="Grüße aus Köln",
        Date="Tue, 14 Nov 2023 22:13:20 +0100",
        Message_ID="<1@example.org>",
    )
    message.set_content("Liebe Jane,\n\nbis später.\n")

    mail = read_mail(message.as_bytes())

    assert mail.title == "Grüße aus Köln"
    assert mail.text == "Liebe Jane,\n\nbis später."
    assert mail.sent_at == 1_699_996_400_000
    assert mail.problems == ()
    assert mail.metadata == {
        "from": ["Jürgen <j@example.org>"],
        "to": ["Doe, Jane <jane@example.org>", "bob@example.org"],
        "cc": ["x@example.org"],
        "message_id": "<1@example.org>",
        "date": "2023-11-14T21:13:20+00:00",
    }


def test_html_is_read_only_where_the_same_is_not_there_as_text() -> None:
    alone = built(Subject="x")
    alone.set_content("<p>html <b>words</b></p><p>second</p>", subtype="html")
    assert read_mail(alone.as_bytes()).text == "html words\nsecond"

    for plain, read in (("plain words", "plain words"), ("\n", "html words")):
        both = built(Subject="x")
        both.set_content(plain)
        both.add_alternative("<p>html words</p>", subtype="html")
        assert read_mail(both.as_bytes()).text == read


def with_attachments() -> EmailMessage:
    message = built(Subject="x")
    message.set_content("See below.")
    message.add_attachment(b"a,b\n1,2\n", maintype="text", subtype="csv", filename="Zahlen für Köln.csv")
    message.add_attachment(bytes(1000), maintype="application", subtype="pdf", filename="../../etc/report.pdf")
    return message


def test_attachments_are_named_with_their_sizes_and_those_of_text_are_read() -> None:
    mail = read_mail(with_attachments().as_bytes())

    assert mail.text == "See below.\n\na,b\n1,2"
    assert mail.metadata["attachments"] == [
        {"name": "Zahlen für Köln.csv", "media_type": "text/csv", "bytes": 8},
        {"name": "report.pdf", "media_type": "application/pdf", "bytes": 1000},
    ]
    names_only = read_mail(with_attachments().as_bytes(), with_attachments=False)
    assert (names_only.text, len(names_only.metadata["attachments"])) == ("See below.", 2)


def test_a_message_inside_a_message_is_read() -> None:
    inner = built(Subject="inner")
    inner.set_content("inner words")
    outer = built(Subject="outer")
    outer.set_content("outer words")
    outer.add_attachment(inner)

    assert read_mail(outer.as_bytes()).text == "outer words\n\ninner words"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("a<br>b", "a\nb"),
        ("<p>a &amp; b&nbsp;c</p>", "a & b c"),
        ("<head><title>t</title></head>a", "a"),
        ("<SCRIPT>if (a < b) { run('</p>') }</SCRIPT >a<style>p { x }</style>b", "ab"),
        ("a<!-- <p>no</p> -->b", "ab"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
        ("<a href='x'>link</a>, <b>bold</b>", "link, bold"),
        ("a<script>never closed", "a"),
        ("a<!-- never closed", "a"),
        ("a<b never closed", "a"),
        ("<ul><li>one<li>two</ul>", "one\ntwo"),
        ("", ""),
        ("İ<script>x</script>y", "İy"),  # a letter that is longer in lower case
    ],
)
def test_a_page_of_html_is_read_as_people_see_it(html: str, text: str) -> None:
    assert text_of_html(html) == text


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "the message is empty"),
        (with_headers("Date: Tue, 99 Foo 20233 22:13:20"), "the header Date is no date"),
        (with_headers("Date: Tue, 14 Nov 1066 22:13:20 +0000"), "the header Date is no date"),
        (with_headers("To: a@b.c", *[" ,"] * 5000), "the header To is longer than 8 kB"),
        (with_headers("Subject: " + "x" * 3000), f"the subject is longer than {MOST_TITLE}"),
        (with_headers("Subject: " + "x" * 1_000_000), "the header Subject is longer than 8 kB"),
        (with_headers(*["X-A: b"] * 40_001), "the headers have more than 40000 lines"),
        (with_headers("Subject: x", "nonsense"), "a line among the headers is no header"),
        (with_headers("Content-Type: multipart/mixed"), "a part of several has no boundary"),
        (with_headers(MIXED), "a boundary of the message is never used"),
        (with_headers(MIXED, body=b"--b\r\n\r\nText."), "the last part has no end"),
        (with_headers("Content-Type: text/plain; charset=punycode"), "not what the charset says"),
        (with_headers("Content-Type: text/plain; charset=utf-8", body=b"Text.\xff"), "not what the charset says"),
        (with_headers(body=b"word " * 300_000), f"the text is longer than {MOST_TEXT}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_message_is_read_as_far_as_it_goes_and_says_so(raw: bytes, problem: str) -> None:
    mail = read_mail(raw)

    assert any(one.startswith(problem) or problem in one for one in mail.problems), mail.problems
    assert not raw or mail.text.startswith(("Text.", "word"))


def test_only_some_of_32000_recipients_are_kept() -> None:
    many = ", ".join(f"user{number}@example.org" for number in range(32_000))
    mail = read_mail(with_headers(f"To: {many}", "Subject: party"))

    assert len(mail.metadata["to"]) == MOST_RECIPIENTS
    assert mail.metadata["to"][0] == "user0@example.org"
    assert any("To has more than 100 addresses" in problem for problem in mail.problems)
    assert (mail.title, mail.text) == ("party", "Text.")


def test_parts_depth_and_attachments_have_a_limit() -> None:
    wide = with_headers(MIXED, body=b"--b\r\n\r\nx\r\n" * 10_000 + b"--b--")
    levels = [f"Content-Type: multipart/mixed; boundary=b{n}\r\n\r\n--b{n}\r\n".encode() for n in range(1000)]
    files = b"--b\r\nContent-Disposition: attachment; filename=a.bin\r\n\r\nx\r\n" * (MOST_ATTACHMENTS + 1) + b"--b--"

    assert f"the message has more than {MOST_PARTS} parts" in read_mail(wide).problems
    assert f"parts are nested more than {MOST_DEPTH} levels deep" in read_mail(b"".join(levels)).problems
    mail = read_mail(with_headers(MIXED, body=files))
    assert len(mail.metadata["attachments"]) == MOST_ATTACHMENTS


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("=?utf-8?q?J=C3=BCrgen?=", "Jürgen"),
        ("=?utf-8?b?SsO8cmdlbg==?=", "Jürgen"),
        ("=?utf-8?b?not base64!?=", "=?utf-8?b?not base64!?="),
        ("=?no-such?q?J=FCrgen?=", "J\ufffdrgen"),
        ("=?iso-8859-1?q?J=FCrgen?= =?iso-8859-1?q?_und?=", "Jürgen und"),
        ("a\tb\x00c\x1b[31md", "a b c [31md"),
    ],
)
def test_encoded_words_are_decoded_or_left_as_they_are(written: str, read: str) -> None:
    assert read_mail(with_headers(f"Subject: {written}")).title == read


@pytest.mark.parametrize("broken", [b"V2Vs\r\nbGU=", b"V2Vs!!bGU", b"V2VsbGU=====", b"  V2VsbGU\x00"])
def test_broken_base64_is_decoded_as_far_as_it_goes(broken: bytes) -> None:
    mail = read_mail(with_headers("Content-Transfer-Encoding: base64", body=broken))

    assert mail.text == "Welle"


def test_a_text_in_another_charset_is_decoded() -> None:
    headers = ('Content-Type: text/plain; charset="windows-1251"', "Content-Transfer-Encoding: base64")
    assert read_mail(with_headers(*headers, body=b64encode("Привет".encode("cp1251")))).text == "Привет"


def test_zero_bytes_and_control_characters_do_not_reach_the_text() -> None:
    mail = read_mail(with_headers("Subject: a\x00b", body=b"a\x00b\x1bc\nd\te"))

    assert (mail.title, mail.text) == ("a b", "a b c\nd\te")


def test_references_are_kept_in_order() -> None:
    mail = read_mail(
        with_headers("References: <1@a.org>", " <2@a.org>\t<3@a.org>,<4@a.org> junk", "In-Reply-To: <4@a.org>")
    )

    assert mail.metadata["references"] == ["<1@a.org>", "<2@a.org>", "<3@a.org>", "<4@a.org>"]
    assert mail.metadata["in_reply_to"] == "<4@a.org>"
    assert "references" not in read_mail(with_headers("References: none")).metadata


def test_of_many_references_the_first_and_the_newest_are_kept_and_the_rest_is_said() -> None:
    mail = read_mail(with_headers("References: " + " ".join(f"<{number}@a.org>" for number in range(300))))

    assert len(mail.metadata["references"]) == MOST_REFERENCES
    assert mail.metadata["references"][0] == "<0@a.org>"
    assert mail.metadata["references"][-1] == "<299@a.org>"
    assert mail.problems == (f"References has more than {MOST_REFERENCES} ids, or very long ones",)
