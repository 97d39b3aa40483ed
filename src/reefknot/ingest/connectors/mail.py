"""
Mail: the bytes of a message become subject, text, addresses and attachments, within fixed bounds.

A message is written by a stranger. Its header block, single headers, parts, nesting and text are cut to a limit before
anything decodes them, and each cut is named in `problems`; the work is linear in what is left. Python's own parsers
are not: `email` follows a thousand nested parts by recursion and needs ten seconds for 32,000 recipients, `html.parser`
needs twelve for 160 kB of unclosed comments. So parts are split and HTML is stripped here, and only short headers are
given to `email`. Nothing raises: what cannot be read is left out, and said.
"""

import binascii
import codecs
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from email.errors import MessageError
from email.header import decode_header
from email.utils import collapse_rfc2231_value, decode_params, getaddresses, parsedate_to_datetime
from functools import partial
from math import inf
from typing import Any, NamedTuple

from msgspec import Struct

from reefknot.ingest.connectors.file_contents import attached_texts, text_of_html
from reefknot.ingest.connectors.text_extraction import is_installed

MOST_HEADER_LINES = 40_000
MOST_PART_LINES = 100
"""Lines of the headers of a message, and of a part."""
MOST_HEADER = 8 * 1024
"""Bytes of one header."""
MOST_RECIPIENTS = 100
MOST_REFERENCES = 100
MOST_PARTS = 500
MOST_DEPTH = 20
MOST_ATTACHMENTS = 100
MOST_FALSE_BOUNDARIES = 10_000
"""Lines of one part that look like its boundary, and are not."""
MOST_TEXT = 1_000_000
"""Characters of a document's text."""
MOST_ENCODED = 3 * MOST_TEXT
"""Bytes of all text parts together, before they are decoded."""
MOST_HTML = 500_000
"""Characters of all HTML together, before its tags are left out."""
MOST_TITLE = 500
MOST_NAME = 255
MOST_PROBLEM = 500

_TEXT_TYPES = frozenset({"application/json", "application/xml", "application/x-yaml", "application/yaml"})
_PART_HEADERS = frozenset({"content-type", "content-disposition", "content-transfer-encoding"})
_HEADERS = _PART_HEADERS | {
    *("from", "to", "cc", "reply-to", "subject", "date", "message-id", "in-reply-to", "references", "list-id"),
}
"""Headers that are read; the others are passed over."""
_CHARSETS = re.compile(
    r"ascii|utf-?_?(8|16|32)(-?[bl]e)?(-sig)?|utf-7|iso8859-\d+|cp\d+|koi8-[rtu]|mac-\w+|big5\w*|gb\w+|hz|"
    r"euc_\w+|shift_jis\w*|iso2022_\w+|johab|tis-620|ptcp154|kz1048|hp-roman8"
)
"""Names of codecs for text. Others are slow on purpose (punycode), or no text (zlib)."""
_CHARSET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,39}")
_CONTROL = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(127, 160), 0x2028, 0x2029), " ")
_NOT_BASE64 = bytes(set(range(256)) - set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"))
_ADDRESS = re.compile(r"[^\s<>,;:\"()\[\]@]{1,64}@[^\s<>,;:\"()\[\]@]{1,255}")
_MESSAGE_ID = re.compile(r"<[^<>\s]{1,998}>")
_BREAKS = re.compile(r"\n\s*\n\s*")


class MailText(Struct, frozen=True):
    """The readable part of a message."""

    title: str
    text: str
    metadata: dict[str, Any]
    sent_at: int | None
    """The time of the header `Date`, milliseconds UTC."""
    problems: tuple[str, ...]


class _Part(NamedTuple):
    """A part without parts: its headers, the place of its body in the message, and the `alternative` it belongs to."""

    headers: dict[str, str]
    start: int
    end: int
    alternative: int

    @property
    def media_type(self) -> str:
        kind = self.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
        return kind if "/" in kind else "text/plain"

    @property
    def name(self) -> str:
        """The name of the file, without a folder."""
        for header, parameter in (("content-disposition", "filename"), ("content-type", "name")):
            if given := _parameter(self.headers.get(header, ""), parameter):
                return _line(re.split(r"[/\\]", _decoded(given))[-1], MOST_NAME)
        return ""

    @property
    def is_attachment(self) -> bool:
        disposition = self.headers.get("content-disposition", "").lstrip().lower()
        return disposition.startswith("attachment") or bool(self.name) or not self.media_type.startswith("text/")

    @property
    def is_encoded(self) -> bool:
        return self.headers.get("content-transfer-encoding", "").strip().lower() in ("base64", "quoted-printable")

    @property
    def is_text(self) -> bool:
        return self.media_type.startswith("text/") or self.media_type in _TEXT_TYPES


def read_mail(raw: bytes, *, with_attachments: bool = True, headers_only: bool = False, until: float = inf) -> MailText:
    """
    The readable part of a message.

    `with_attachments` adds the text of text attachments to the text, and that of PDF, Word and HTML files that can be
    begun `until` a time of the clock; `headers_only` says that `raw` has no body.
    """
    problems: set[str] = set()
    if not raw or raw.isspace():
        problems.add("the message is empty")
    headers, body = _headers(raw, 0, len(raw), problems, is_part=False)
    metadata: dict[str, Any] = {"from": _addresses(headers, "from", problems)}
    for name in ("to", "cc", "reply-to"):
        if addresses := _addresses(headers, name, problems):
            metadata[name.replace("-", "_")] = addresses
    for name in ("message-id", "in-reply-to", "list-id"):
        if value := _line(headers.get(name, ""), MOST_NAME):
            metadata[name.replace("-", "_")] = value
    if references := _references(headers.get("references", ""), problems):
        metadata["references"] = references
    sent_at = _date(headers, problems)
    if sent_at is not None:
        metadata["date"] = datetime.fromtimestamp(sent_at / 1000, UTC).isoformat()
    text = ""
    if not headers_only:
        parts = list(_parts(raw, headers, body, problems))
        text = _text(raw, parts, with_attachments=with_attachments, problems=problems, until=until)
        if attachments := _attachments(raw, parts, problems):
            metadata["attachments"] = attachments
    subject = _decoded(headers.get("subject", ""))
    if len(subject) > MOST_TITLE:
        problems.add(f"the subject is longer than {MOST_TITLE} characters")
    return MailText(_line(subject, MOST_TITLE), text, metadata, sent_at, tuple(sorted(problems)))


def problem_text(problems: tuple[str, ...]) -> str:
    """All problems in one line."""
    return _cut("; ".join(problems), MOST_PROBLEM)


# ---- headers ---------------------------------------------------------------------------------------------------------


def _headers(
    raw: bytes, start: int, end: int, problems: set[str], *, is_part: bool = True
) -> tuple[dict[str, str], int]:
    """The headers of a message or part by their lower-case names, the first of each, and where its body begins."""
    wanted, most = (_PART_HEADERS, MOST_PART_LINES) if is_part else (_HEADERS, MOST_HEADER_LINES)
    headers: dict[str, str] = {}
    place, name, pieces, size = start, "", list[bytes](), 0
    body = None
    for number in range(most + 1):
        if place >= end:
            break
        newline = raw.find(b"\n", place, end)
        after = end if newline < 0 else newline + 1
        line = raw[place : min(after, place + MOST_HEADER + 2)]
        if line in (b"\n", b"\r\n"):
            body = after
            break
        if number == most:
            problems.add(f"the headers have more than {most} lines")
            body = _after_headers(raw, place, end)
            break
        if line[:1] not in b" \t":
            _keep(headers, name, pieces)
            name, pieces, size = "", [], 0
            given, colon, value = line.partition(b":")
            if colon and given.strip():
                name, line = given[:100].strip().decode("latin-1").lower(), value
                name = name if name in wanted else ""
            elif number == 0:  # no header at all: everything is the body
                body = place
                break
            else:
                problems.add("a line among the headers is no header")
        if name and size < MOST_HEADER:
            pieces.append(line[: MOST_HEADER - size])
        size += after - place
        if name and size > MOST_HEADER + 200:
            problems.add(f"the header {name.title()} is longer than {MOST_HEADER // 1024} kB")
        place = after
    _keep(headers, name, pieces)
    return headers, end if body is None else body


def _after_headers(raw: bytes, place: int, end: int) -> int:
    """The beginning of the body behind a header block that is too long to be read."""
    ends = [
        found + size for blank, size in ((b"\n\r\n", 3), (b"\n\n", 2)) if (found := raw.find(blank, place, end)) >= 0
    ]
    return min(ends, default=end)


def _keep(headers: dict[str, str], name: str, pieces: list[bytes]) -> None:
    if name and name not in headers:
        headers[name] = _text_of(b"".join(pieces)).strip()


def _text_of(data: bytes) -> str:
    """Bytes of a header as text. They should be ASCII; UTF-8 is what programs send otherwise."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _decoded(value: str) -> str:
    """A header with its encoded words (`=?utf-8?q?…?=`) decoded; as it is written, where that is impossible."""
    value = value[:MOST_HEADER]
    if "=?" not in value:
        return value
    try:
        words = decode_header(value)
    except (MessageError, ValueError, IndexError):
        return value
    return "".join(word if isinstance(word, str) else _as_text(word, charset or "ascii")[0] for word, charset in words)


def _parameter(value: str, name: str) -> str:
    """A parameter of a header such as `Content-Type`; empty when there is none."""
    if name not in value.lower():
        return ""
    pairs = [("", "")]
    for item in _split_parameters(value[:MOST_HEADER])[:50]:
        key, _, given = item.partition("=")
        pairs.append((key.strip().lower(), given.strip()))
    try:
        for key, value_found in decode_params(pairs):
            if key.lower() == name:
                found = collapse_rfc2231_value(value_found)
                return found[1:-1] if found[:1] == '"' == found[-1:] and len(found) > 1 else found
    except (ValueError, LookupError, TypeError, IndexError):
        pass
    plain = dict(pairs).get(name, "")
    return plain.strip('"')


def _split_parameters(value: str) -> list[str]:
    """The parameters behind the first semicolon; one inside quotation marks does not count."""
    items, begin, quoted, escaped = list[str](), 0, False, False
    for place, letter in enumerate(value):
        if escaped:
            escaped = False
        elif letter == "\\" and quoted:
            escaped = True
        elif letter == '"':
            quoted = not quoted
        elif letter == ";" and not quoted:
            items.append(value[begin:place])
            begin = place + 1
    return [*items, value[begin:]][1:]


def _addresses(headers: dict[str, str], name: str, problems: set[str]) -> list[str]:
    """The addresses of a header, at most `MOST_RECIPIENTS`, as `name <address>`."""
    value = headers.get(name, "")
    if len(value) >= MOST_HEADER - 2:
        value = value.rpartition(",")[0] or value
    try:
        pairs = getaddresses([value]) if value.count("(") <= 50 else []  # comments are followed by recursion
    except (ValueError, IndexError, TypeError, RecursionError):
        pairs = []
    found = [(label, address) for label, address in pairs if "@" in address]
    if not found and "@" in value:
        found = [("", address) for address in _ADDRESS.findall(value)]
    if len(found) > MOST_RECIPIENTS or len(headers.get(name, "")) >= MOST_HEADER - 2:
        problems.add(f"{name.title()} has more than {MOST_RECIPIENTS} addresses, or very long ones")
    shown = []
    for label, address in found[:MOST_RECIPIENTS]:
        words, address = _line(_decoded(label), MOST_NAME), _line(address, MOST_NAME)
        shown.append(f"{words} <{address}>" if words else address)
    return shown


def _references(value: str, problems: set[str]) -> list[str]:
    """The ids of the messages that one answers, the oldest first; of very many the first and the newest ones."""
    found = [_line(one, MOST_NAME) for one in _MESSAGE_ID.findall(value)]
    if len(found) > MOST_REFERENCES or len(value) >= MOST_HEADER - 2:
        problems.add(f"References has more than {MOST_REFERENCES} ids, or very long ones")
    return found if len(found) <= MOST_REFERENCES else [found[0], *found[1 - MOST_REFERENCES :]]


def _date(headers: dict[str, str], problems: set[str]) -> int | None:
    value = headers.get("date", "")
    if not value:
        return None
    try:
        when = parsedate_to_datetime(value[:200])
        sent_at = int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, TypeError, IndexError, OverflowError):
        sent_at = -1
    if not 0 <= sent_at < 4_102_444_800_000:  # 1970 to 2100
        problems.add("the header Date is no date between 1970 and 2100")
        return None
    return sent_at


# ---- parts -----------------------------------------------------------------------------------------------------------


def _parts(raw: bytes, headers: dict[str, str], start: int, problems: set[str]) -> Iterator[_Part]:
    """The parts that have no parts themselves, in their order."""
    todo = [(_Part(headers, start, len(raw), 0), 0)]
    count = 0
    while todo:
        part, depth = todo.pop()
        count += 1
        if count > MOST_PARTS:
            problems.add(f"the message has more than {MOST_PARTS} parts")
            return
        is_message = part.media_type == "message/rfc822" and not part.is_encoded
        boundary = _boundary(part) if part.media_type.startswith("multipart/") else b""
        if depth >= MOST_DEPTH and (boundary or is_message):
            problems.add(f"parts are nested more than {MOST_DEPTH} levels deep")
            continue
        if is_message:
            inner, body = _headers(raw, part.start, part.end, problems)
            todo.append((_Part(inner, body, part.end, part.alternative), depth + 1))
        elif boundary:
            alternative = count if part.media_type == "multipart/alternative" else part.alternative
            places = list(_places(raw, boundary, part, problems))
            for begin, end in reversed(places):
                inner, body = _headers(raw, begin, end, problems)
                todo.append((_Part(inner, body, end, alternative), depth + 1))
        else:
            if part.media_type.startswith("multipart/"):
                problems.add("a part of several has no boundary")
                part = part._replace(headers=part.headers | {"content-type": "text/plain"})
            yield part


def _boundary(part: _Part) -> bytes:
    given = _parameter(part.headers.get("content-type", ""), "boundary").rstrip()[:200]
    return given.encode("utf-8", "replace") if given else b""


def _places(raw: bytes, boundary: bytes, part: _Part, problems: set[str]) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of the parts of a multipart; at most as many as a message may have."""
    line = b"--" + boundary
    begin, place, count, false = -1, part.start, 0, 0
    while (found := raw.find(line, place, part.end)) >= 0:
        place = found + len(line)
        false += 1
        if false > MOST_FALSE_BOUNDARIES:
            problems.add("a part has too many lines that look like its boundary")
            break
        if found > part.start and raw[found - 1 : found] != b"\n":
            continue
        is_last = raw[place : place + 2] == b"--"
        newline = raw.find(b"\n", place, part.end)
        if not is_last and raw[place : newline if newline >= 0 else part.end][:80].strip():
            continue  # the boundary of another part, which begins like this one
        if begin >= 0:
            yield begin, max(begin, found - (2 if raw[found - 2 : found] == b"\r\n" else 1))
            count += 1
        begin = -1 if is_last or newline < 0 else newline + 1
        if is_last or newline < 0 or count > MOST_PARTS:
            break
        place = max(place, newline)  # the next one may begin at once
    if begin >= 0 and count <= MOST_PARTS:
        problems.add("the last part has no end")
        yield begin, part.end
    elif count == 0:
        problems.add("a boundary of the message is never used")
        yield part.start, part.end


def _payload(raw: bytes, part: _Part, most: int) -> bytes:
    """The decoded body of a part, as far as `most` encoded bytes go."""
    data = raw[part.start : min(part.end, part.start + most)]
    match part.headers.get("content-transfer-encoding", "").strip().lower():
        case "base64":
            return _from_base64(data)
        case "quoted-printable":
            return binascii.a2b_qp(data)
        case _:
            return data


def _from_base64(data: bytes) -> bytes:
    letters = data.translate(None, _NOT_BASE64)
    letters = letters[: len(letters) - (len(letters) % 4 == 1)]
    return binascii.a2b_base64(letters + b"=" * (-len(letters) % 4))


def _as_text(data: bytes, charset: str) -> tuple[str, bool]:
    """Bytes as text, and whether they were what the charset says."""
    try:
        codec = codecs.lookup(charset).name if _CHARSET_NAME.fullmatch(charset) else ""
    except (LookupError, ImportError, ValueError):
        codec = ""
    if not _CHARSETS.fullmatch(codec):
        return data.decode("utf-8", "replace"), False
    if codec == "ascii":  # what programs write that do not know
        codec = "utf-8"
    try:
        return data.decode(codec), True
    except (UnicodeError, ValueError):
        return data.decode(codec, "replace"), False


# ---- text and attachments --------------------------------------------------------------------------------------------


def _text(raw: bytes, parts: list[_Part], *, with_attachments: bool, problems: set[str], until: float) -> str:
    """The text of all parts: HTML only where the same is not there as plain text, attachments at the end."""
    inline = [part for part in parts if not part.is_attachment]
    texts: dict[int, str] = {}
    budget = _Budget()
    has_plain: set[int] = set()
    files = [part for part in parts if part.is_attachment and part.is_text] if with_attachments else []
    plain = [part for part in inline if part.media_type != "text/html"]
    for part in (*plain, *(part for part in inline if part.media_type == "text/html"), *files):
        if part.media_type == "text/html" and part.alternative in has_plain and not part.is_attachment:
            continue
        texts[part.start] = found = _part_text(raw, part, budget, problems)
        if budget.is_spent:
            problems.add(f"the text is longer than {MOST_TEXT} characters, or has more than {MOST_HTML} of HTML")
            break
        if part.alternative and found and part.media_type != "text/html":
            has_plain.add(part.alternative)
    ordered = [texts.get(part.start, "") for part in (*inline, *files)]
    if with_attachments and is_installed():
        packed = ((part.name, partial(_payload, raw, part, len(raw))) for part in parts if not part.is_text)
        ordered += attached_texts(packed, budget.text, problems, until=until)
    return "\n\n".join(filter(None, ordered))


def _part_text(raw: bytes, part: _Part, budget: "_Budget", problems: set[str]) -> str:
    """The text of a part, as far as the budget of the message goes."""
    data = _payload(raw, part, budget.encoded)
    budget.encoded -= part.end - part.start
    text, is_whole = _as_text(data, _parameter(part.headers.get("content-type", ""), "charset") or "ascii")
    if not is_whole:
        problems.add("some letters are not what the charset says")
    if part.media_type == "text/html":
        html, budget.html = text[: max(0, budget.html)], budget.html - len(text)
        text = text_of_html(html)
    text = _BREAKS.sub("\n\n", text.replace("\r\n", "\n").translate(_CONTROL)).strip()
    found, budget.text = _cut(text, max(1, budget.text)), budget.text - len(text)
    return found


class _Budget:
    """The work that is left for the text of one message."""

    def __init__(self) -> None:
        self.encoded, self.html, self.text = MOST_ENCODED, MOST_HTML, MOST_TEXT

    @property
    def is_spent(self) -> bool:
        return min(self.encoded, self.html, self.text) < 0


def _attachments(raw: bytes, parts: list[_Part], problems: set[str]) -> list[dict[str, Any]]:
    """Names, types and sizes."""
    found = [part for part in parts if part.is_attachment]
    if len(found) > MOST_ATTACHMENTS:
        problems.add(f"the message has more than {MOST_ATTACHMENTS} attachments")
    return [
        {"name": part.name, "media_type": _line(part.media_type, 100), "bytes": _size(raw, part)}
        for part in found[:MOST_ATTACHMENTS]
    ]


def _size(raw: bytes, part: _Part) -> int:
    """The number of bytes of an attachment, decoded; of a base64 one by its length."""
    size = part.end - part.start
    if part.headers.get("content-transfer-encoding", "").strip().lower() != "base64":
        return size
    tail = raw[max(part.start, part.end - 8) : part.end].rstrip()
    breaks = raw.count(b"\n", part.start, part.end) + raw.count(b"\r", part.start, part.end)
    return max(0, (size - breaks) * 3 // 4 - tail.count(b"="))


def _line(text: str, most: int) -> str:
    """A text in one line without control characters."""
    return _cut(" ".join(text.translate(_CONTROL).split()), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
