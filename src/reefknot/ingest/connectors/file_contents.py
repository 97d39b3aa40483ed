"""
The contents of files as text, and their media types.

Nothing is guessed from a language or a locale: text is what its byte order mark says, else UTF-8, and a file that is
neither is replaced where it cannot be read, or is no text at all. With the extra `text`, its charset is detected, and
the text of PDF, Word and HTML files is extracted.
"""

import codecs
import mimetypes
import re
from collections.abc import Callable, Iterable, Iterator
from html import unescape
from itertools import islice
from pathlib import PurePath
from typing import NamedTuple

from reefknot import clock
from reefknot.ingest.connectors import text_extraction

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins like that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_TEXT_TYPES = frozenset({"application/json", "application/xml", "application/javascript", "application/x-sh"})
_TYPES = mimetypes.MimeTypes()  # those that Python knows, whatever this system has
_TYPES.add_type("text/markdown", ".md")
_SAMPLE = 8192
MOST_ATTACHED = 10
"""Attachments of a message whose texts are extracted."""
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f]")
"""Bytes that no text has, whatever its charset."""
_ODD = frozenset(map(chr, range(32))) - set("\t\n\r\f\x1b") | {"\N{REPLACEMENT CHARACTER}"}

_BLOCKS = frozenset(
    {
        *("address", "article", "blockquote", "br", "dd", "div", "dl", "dt", "footer", "h1", "h2", "h3", "h4", "h5"),
        *("h6", "header", "hr", "li", "ol", "p", "pre", "section", "table", "td", "th", "tr", "ul"),
    }
)
_SILENT = frozenset({"script", "style", "head", "title", "template", "svg", "noscript"})
"""Elements whose content is not shown."""
_OPENING = re.compile(r"<(?=[A-Za-z/!?])")
"""The beginning of a tag or a comment; any other `<` is a sign of its own."""
_TAG_NAME = re.compile(r"/?([A-Za-z][A-Za-z0-9]{0,20})")
_BLANKS = re.compile(r"[ \t\r\xa0]+")


class DecodedFile(NamedTuple):
    """The text of a file; None for a binary file. `problem` says what was lost, `charset` what was detected."""

    text: str | None
    problem: str = ""
    charset: str = ""
    is_extracted: bool = False
    """Whether the file itself is no text, but holds one."""


def extracted(name: str, content: bytes) -> DecodedFile | None:
    """The text of a PDF, Word or HTML file; None for any other, and without the extra `text`."""
    kind = text_extraction.kind_of(name, content)
    if not kind:
        return None
    found = text_extraction.extract(kind, content)
    return DecodedFile(found.text, found.problem, found.charset, is_extracted=kind != "HTML")


def attached_texts(
    files: Iterable[tuple[str, Callable[[], bytes]]], most: int, problems: set[str], *, until: float
) -> Iterator[str]:
    """
    The texts of the first few attachments that are PDF, Word or HTML files, together at most `most` characters.

    `until` is the time, by the clock, after which none is read any more: hostile ones may take the limit of each.
    """
    packed = ((name, content) for name, content in files if PurePath(name).suffix.lower() in text_extraction.KINDS)
    for name, content in islice(packed, MOST_ATTACHED):
        if clock.now() >= until:
            problems.add(f"{name}: its text was not read: attachments before it took too long")
            continue
        found = extracted(name, content()) if most > 0 else None
        if found is None:
            continue
        if found.problem:
            problems.add(f"{name}: {found.problem}")
        text = (found.text or "").strip()
        yield text[:most]
        if len(text) > most:
            problems.add(f"{name}: only a part of its text is kept")
        most -= len(text)


def decoded(content: bytes, name: str = "") -> DecodedFile:
    """The content as text: by its byte order mark, else UTF-8. What is neither, and no binary file, is replaced."""
    if (found := extracted(name, content)) is not None:
        return found
    mark, encoding = next((bom for bom in _BOMS if content.startswith(bom[0])), (b"", "utf-8"))
    if not mark and b"\0" in content:
        return DecodedFile(None)
    body = content[len(mark) :]
    try:
        return DecodedFile(body.decode(encoding).replace("\0", "\N{REPLACEMENT CHARACTER}"))
    except UnicodeDecodeError as error:
        if not mark and text_extraction.is_installed() and not _CONTROL.search(content[:_SAMPLE]):
            guessed = text_extraction.extract("charset", content)
            if guessed.text is not None:
                return DecodedFile(guessed.text, charset=guessed.charset)
        if not mark and _looks_binary(body):
            return DecodedFile(None)
        place = f"byte {len(mark) + error.start + 1}"
        problem = f"not {encoding.upper()} from {place} on: what could not be read was replaced; save it as UTF-8"
        return DecodedFile(body.decode(encoding, "replace").replace("\0", "\N{REPLACEMENT CHARACTER}"), problem)


def _looks_binary(content: bytes) -> bool:
    """Whether more than three characters in ten of the beginning are no text."""
    sample = content[:_SAMPLE].decode("utf-8", "replace")
    odd = sum(1 for letter in sample if letter in _ODD)
    return odd * 10 > len(sample) * 3


def media_type_of(name: str, *, is_text: bool) -> str:
    """The media type by the name, unless the content is known to be of another kind."""
    guessed, packed = _TYPES.guess_type(f"x/{name}", strict=False)
    if packed or guessed is None:
        return "text/plain" if is_text else "application/octet-stream"
    if (guessed.startswith("text/") or guessed in _TEXT_TYPES or guessed.endswith(("+xml", "+json"))) != is_text:
        return "text/plain" if is_text else "application/octet-stream"
    return guessed


def text_of_html(html: str) -> str:
    """
    The text that a reader of an HTML page sees: no tags, no scripts, no styles, a line for each block.

    Linear for any input: every search either finds its end and goes on behind it, or ends the work.
    """
    found: list[str] = []
    lower = html.lower() if len(html.lower()) == len(html) else html  # the length of some letters differs
    place = 0
    while (opening := _OPENING.search(html, place)) is not None:
        start = opening.start()
        found.append(html[place:start])
        if html.startswith("<!--", start):
            place, closing = html.find("-->", start + 4), 3
        elif (tag := _TAG_NAME.match(html, start + 1)) is not None:
            place, closing = html.find(">", tag.end()), 1
            name = tag[1].lower()
            if name in _SILENT and html[start + 1] != "/" and place >= 0 and html[place - 1] != "/":
                place, closing = lower.find(f"</{name}", place), 0
            found.append("\n" if name in _BLOCKS else "")
        else:
            place, closing = html.find(">", start), 1
        if place < 0:
            break
        place += closing
    else:
        found.append(html[place:])
    text = _BLANKS.sub(" ", unescape("".join(found)))
    return "\n".join(line for line in map(str.strip, text.split("\n")) if line)
