"""Texts of PDF, Word and HTML files and of other charsets: read in a helper process, within its limits."""

import io
import os
import zipfile
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from functools import cache
from pathlib import Path

import pytest

from reefknot.ingest.connectors import text_extraction
from reefknot.ingest.connectors.file_contents import decoded
from reefknot.ingest.connectors.local_files import LocalFiles
from reefknot.ingest.connectors.mail import read_mail
from reefknot.ingest.connectors.obsidian_vault import ObsidianVault
from reefknot.ingest.connectors.text_extraction import ExtractedText, extract
from tests.unit.ingest.connectors.memory_sink import Folder


def pdf(text: str, *, more: bytes = b"") -> bytes:
    """A PDF of one page with this text."""
    stream = f"BT /F1 24 Tf 72 720 Td ({text}) Tj ET".encode() + more
    parts = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, part)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % len(out)
    return out + b"xref\n0 6\n0000000000 65535 f \n" + table + end


def word(*paragraphs: str) -> bytes:
    """A Word file with these paragraphs, and a table."""
    import docx

    document = docx.Document()
    for one in paragraphs:
        document.add_paragraph(one)
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "left", "right"
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


@cache
def word_bomb() -> bytes:
    """A small file of 300 MiB, unpacked."""
    file = io.BytesIO(word("x"))
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        packed.writestr("word/media/zeros.bin", b"\0" * (300 << 20))
    return file.getvalue()


HTML = """<html><head><title>T</title><style>p {color: red}</style></head><body><h1>Reef knots</h1>
<p>A kn<b>ot</b> &amp; more</p><script>alert("no")</script><!-- no --><ul><li>one<li>two</ul></body></html>"""


@pytest.fixture(autouse=True, scope="module")
def _ended() -> Iterator[None]:
    yield
    text_extraction._helpers.end()


pytestmark = pytest.mark.usefixtures("text_extra")


def test_the_text_of_each_kind_is_read() -> None:
    assert extract("PDF", pdf("Reef knot")).text == "Reef knot"
    assert extract("Word", word("Reef knot", "Übung")).text == "Reef knot\nÜbung\nleft\tright"
    assert extract("HTML", HTML.encode()).text == "Reef knots\nA knot & more\none\ntwo"
    assert (
        extract("HTML", HTML.replace("more", "Größe").encode("cp1252")).text == "Reef knots\nA knot & Größe\none\ntwo"
    )


@pytest.mark.parametrize(
    ("text", "charset"),
    [
        ("Grüße aus Köln, naïve café", "cp1252"),
        ("Привет мир, это простой текст", "cp1251"),
        ("日本語のテキストです。これは例です", "cp932"),
        ("Zażółć gęślą jaźń, a to jest zwykły tekst po polsku", "cp1250"),
        ("café", "cp1252"),
    ],
)
def test_charsets_are_detected(text: str, charset: str) -> None:
    found = decoded(text.encode(charset), "a.txt")
    assert (found.text, found.charset, found.problem) == (text, charset, "")


@pytest.mark.parametrize(
    ("kind", "content", "problem"),
    [
        ("PDF", b"%PDF-1.4 no more", "damaged"),
        ("PDF", pdf(""), "it has no text: its pages may be images"),
        ("Word", b"PK\x03\x04 no more", "damaged"),
        ("Word", word_bomb, "unpacked it has more than 256 MiB"),
    ],
    ids=["pdf", "empty pdf", "word", "word bomb"],
)
def test_a_file_that_cannot_be_read_is_named_and_the_next_one_is_read(
    kind: str, content: bytes | Callable[[], bytes], problem: str
) -> None:
    """Packing a bomb takes a second, which a collection need not spend."""
    assert problem in extract(kind, content() if callable(content) else content).problem
    assert extract("PDF", pdf("next")).text == "next"


def test_a_file_that_takes_too_long_is_given_up_and_its_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that are nested 300,000 deep take more than 20 s."""
    extract("PDF", pdf("warm"))
    monkeypatch.setattr(text_extraction, "EXTRACTION_S", 0.3)
    late = "its text was not read as HTML: it took more than 0.3 s"
    assert extract("HTML", b"<div>" * 300_000) == ExtractedText(None, late)
    assert text_extraction._helpers._idle == []
    monkeypatch.setattr(text_extraction, "EXTRACTION_S", 20.0)
    assert extract("PDF", pdf("next")).text == "next"


def test_a_pdf_bomb_is_named() -> None:
    """A stream that is packed three times: a few hundred bytes of file, 64 MiB of content."""
    import zlib

    inner = zlib.compress(b"\0" * (64 << 20), 9)
    for _ in range(2):
        inner = zlib.compress(inner, 9)
    bomb = pdf("x").replace(b"/Length", b"/Filter[/FlateDecode/FlateDecode/FlateDecode]/Length", 1)
    stream = bomb[bomb.index(b"stream\n") + 7 : bomb.index(b"\nendstream")]
    found = extract("PDF", bomb.replace(stream, inner))
    assert found.text in (None, "")
    assert found.problem
    assert extract("PDF", pdf("next")).text == "next"


def test_a_process_that_has_ended_while_it_was_idle_is_replaced() -> None:
    assert extract("PDF", pdf("one")).text == "one"
    (helper,) = text_extraction._helpers._idle
    helper._process.kill()
    helper._process.wait()
    assert extract("PDF", pdf("two")).text == "two"


def test_a_helper_has_no_environment_and_writes_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_PASSWORD", "hunter2")
    extract("PDF", pdf("one"))
    (helper,) = text_extraction._helpers._idle
    place = Path(f"/proc/{helper._process.pid}")
    assert b"hunter2" not in (place / "environ").read_bytes()
    assert os.readlink(place / "cwd") == "/"
    limits = (place / "limits").read_text()
    assert next(line for line in limits.splitlines() if line.startswith("Max file size")).split()[3] == "0"


@pytest.mark.parametrize("connector", [LocalFiles, ObsidianVault])
def test_a_hostile_file_costs_itself_and_the_sync_goes_on(tmp_path: Path, connector: type[LocalFiles]) -> None:
    folder = Folder(tmp_path / "root", connector)
    contents: dict[str, str | bytes] = {"a.pdf": pdf("Reef knot"), "b.docx": word("Sheet bend"), "c.html": HTML}
    contents |= {"e.pdf": "only named so", "d.txt": "Größe".encode("latin-1")}
    contents |= {"bomb.docx": word_bomb(), "broken.pdf": b"%PDF-1.7 broken"}
    for name, content in contents.items():
        folder.put(name, content)

    assert folder.sync().failures == {}
    found = folder.sink.by_location()
    assert (found["a.pdf"].text, found["a.pdf"].media_type) == ("Reef knot", "application/pdf")
    assert found["b.docx"].text.startswith("Sheet bend")
    assert (found["c.html"].text[:10], found["c.html"].media_type) == ("Reef knots", "text/html")
    assert (found["d.txt"].text, found["d.txt"].metadata["charset"]) == ("Größe", "cp1252")
    assert (found["e.pdf"].text, found["e.pdf"].problem) == ("only named so", "")
    for name, problem in (("bomb.docx", "more than 256 MiB"), ("broken.pdf", "damaged")):
        assert found[name].text == ""
        assert problem in found[name].problem


def test_what_was_kept_without_the_extra_is_read_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path / "root", LocalFiles)
    folder.put("a.pdf", pdf("Reef knot", more=b"\0"))
    with monkeypatch.context() as without:
        without.setattr(text_extraction, "PACKAGES", ("no_such_package",))
        folder.sync()
        assert (folder.document("a.pdf").text, folder.document("a.pdf").media_type) == ("", "application/pdf")
        assert "pip install '.[text]' in a checkout" in text_extraction.installation_note()
    folder.sync()
    assert folder.texts() == {"a.pdf": "Reef knot"}
    assert "is read" in text_extraction.installation_note()


def test_attachments_of_mails_are_read() -> None:
    mail = EmailMessage()
    mail["Subject"] = "Plan"
    mail.set_content("Hello")
    mail.add_attachment(pdf("Reef knot"), maintype="application", subtype="pdf", filename="plan.pdf")
    mail.add_attachment(b"%PDF-1.4 x", maintype="application", subtype="pdf", filename="broken.pdf")
    mail.add_attachment(word("Sheet bend"), maintype="application", subtype="octet-stream", filename="a.docx")
    found = read_mail(mail.as_bytes())

    assert found.text == "Hello\n\nReef knot\n\nSheet bend\nleft\tright"
    (problem,) = found.problems
    assert problem.startswith("broken.pdf: its text was not read as PDF")
    assert read_mail(mail.as_bytes(), with_attachments=False).text == "Hello"


def test_attachments_that_come_too_late_are_named_and_not_read() -> None:
    mail = EmailMessage()
    mail.set_content("Hello")
    mail.add_attachment(pdf("Reef knot"), maintype="application", subtype="pdf", filename="plan.pdf")
    found = read_mail(mail.as_bytes(), until=0.0)
    late = "plan.pdf: its text was not read: attachments before it took too long"
    assert (found.text, found.problems) == ("Hello", (late,))
