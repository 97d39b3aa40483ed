"""
Hostile messages by number: each number is always the same message, made of several attacks at once.

The attacks are those that have stopped readers of mail before: thousands of recipients, parts and levels, endless
headers, boundaries that never match or match everywhere, charsets and encodings that lie, HTML that never closes.
"""

from base64 import b64encode
from collections.abc import Callable
from random import Random

LARGEST = 2_000_000
"""Bytes of a body, about. Some messages are of the size of the largest that is read."""


def hostile(number: int) -> bytes:
    draw = Random(number)
    headers = b"".join(draw.choice(_HEADERS)(draw) for _ in range(draw.randint(1, 6)))
    raw = headers + draw.choice(_BODIES)(draw)
    if draw.random() < 0.3:
        raw = _damaged(raw, draw)
    if draw.random() < 0.02:
        raw += raw[-1000:] * (24_000_000 // 1000)
    return raw


def _damaged(raw: bytes, draw: Random) -> bytes:
    data = bytearray(raw)
    for _ in range(min(len(data), 200)):
        data[draw.randrange(len(data))] = draw.choice(b'\x00\r\n "=?<>()&;:,\xff\xc3')
    return bytes(data)


WORDS = (b"x", b"=?utf-8?q?", b"=?", b"((", b"\\", b'"', b"<", b"@", b",", b"\xff", b"\x00", b"[", b":;")
LINES = (b"A: b\r\n", b" c\r\n", b"nonsense\r\n", b"Content-Type: text/html\r\n")
PARAMETERS = (b"; a=b", b'; filename*0*="x', b"; name*%d*=utf-8''%%ff", b'; boundary="', b";;;", b"; charset*=x'y'z")
PARTS = (
    *(b"--b\r\n\r\nx\r\n", b"--b\r\n", b"--b\r\nContent-Type: text/html\r\n\r\n<p>\r\n", b"--bb\r\n", b"\n--b\n--b--"),
)
TAGS = (
    *(b"<!--", b"<", b"<a ", b"<script>", b"</", b"&#x", b"&amp", b"<p>", b"<!", b"<![CDATA[", b"<style"),
    b"&" + b"#9" * 500,
)
CHARSETS = (
    *("punycode", "idna", "zlib", "rot13", "unicode_escape", "utf-7", "hz", "iso2022_jp", "utf-16", "x" * 5000),
    *("..", "undefined"),
)


MULTIPART = b"Content-Type: multipart/mixed; boundary=b\r\n\r\n"
SUBTYPES = (b"mixed", b"alternative", b"related", b"digest")
DATES = (b"Tue, 14 Nov 99999 22:13:20 +9999", b"9" * 5000, b"0", b"Tue, 00 Jan 0000 99:99:99 -9999", b"\xff" * 100)
NAMES = (b"Subject", b"To", b"Content-Type", b"Date", b"Content-Disposition", b"X-Other", b"From")
TEXTS = (b"xn--a-", b"+AAA", b"~{", b"\x1b$B", b"\xff\xfe", b"\\x41")
ENCODINGS = (b"base64", b"quoted-printable", b"x-uuencode", b"BASE64 ")
ENCODED = (b"=" * 999, b"=\r\n", b"=4", b64encode(bytes(600)), b"!", b"A", b"=ZZ")
BLANKS = (b"\n", b" ", b"\r", b"\n ", b"\x00", b"\t\n", b"\xc2\xa0")
Attack = Callable[[Random], bytes]


def _times(draw: Random, piece: bytes, most: int = LARGEST) -> bytes:
    return piece * max(1, draw.randint(1, most) // len(piece))


def _recipients(draw: Random) -> bytes:
    between = draw.choice((b", ", b",\r\n ", b";", b",,,"))
    return draw.choice((b"To: ", b"Cc: ", b"From: ")) + between.join(b"u%d@e.org" % n for n in range(32_000)) + b"\r\n"


def _wide(draw: Random) -> bytes:
    kind, part = draw.choice(SUBTYPES), draw.choice(PARTS)
    return b"Content-Type: multipart/" + kind + b"; boundary=b\r\n\r\n" + part * draw.choice((10, 10_000, 100_000))


def _deep(draw: Random) -> bytes:
    if draw.random() < 0.5:
        return b"Content-Type: message/rfc822\r\n\r\n" * draw.choice((50, 1000, 10_000)) + b"\r\nend"
    levels = draw.choice((15, 1000, 5000))
    return b"".join(b"Content-Type: multipart/mixed; boundary=b%d\r\n\r\n--b%d\r\n" % (n, n) for n in range(levels))


def _many_html(draw: Random) -> bytes:
    part = b"--b\r\nContent-Type: text/html\r\n\r\n" + draw.choice((b"<", b"<!--", b"&#")) * 5_000 + b"\r\n"
    return MULTIPART + part * 400


def _charset(draw: Random) -> bytes:
    start = f'Content-Type: text/plain; charset="{draw.choice(CHARSETS)}"\r\n\r\n'.encode()
    return start + _times(draw, draw.choice(TEXTS))


def _encoded(draw: Random) -> bytes:
    start = b"Content-Transfer-Encoding: " + draw.choice(ENCODINGS) + b"\r\n\r\n"
    return start + _times(draw, draw.choice(ENCODED))


_HEADERS: tuple[Attack, ...] = (
    _recipients,
    lambda draw: draw.choice(NAMES) + b": " + _times(draw, draw.choice(WORDS), 1_000_000) + b"\r\n",
    lambda draw: _times(draw, draw.choice(LINES), 1_000_000),
    lambda draw: b"Content-Disposition: attachment" + _times(draw, draw.choice(PARAMETERS), 100_000) + b"\r\n",
    lambda draw: b"Date: " + draw.choice(DATES) + b"\r\n",
)
_BODIES: tuple[Attack, ...] = (
    *(_wide, _deep),
    lambda draw: (MULTIPART + b"--b\r\n") * draw.choice((10, 1000, 30_000)),
    lambda draw: b"Content-Type: text/html\r\n\r\n" + _times(draw, draw.choice(TAGS)),
    *(_many_html, _charset, _encoded),
    lambda draw: b"\r\n" + _times(draw, draw.choice(BLANKS)),
)
