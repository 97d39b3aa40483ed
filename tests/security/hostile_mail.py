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


def _times(draw: Random, piece: bytes, most: int = LARGEST) -> bytes:
    return piece * max(1, draw.randint(1, most) // len(piece))


def _recipients(draw: Random) -> bytes:
    between = draw.choice((b", ", b",\r\n ", b";", b",,,"))
    return draw.choice((b"To: ", b"Cc: ", b"From: ")) + between.join(b"u%d@e.org" % n for n in range(32_000)) + b"\r\n"


def _long_header(draw: Random) -> bytes:
    name = draw.choice((b"Subject", b"To", b"Content-Type", b"Date", b"Content-Disposition", b"X-Other", b"From"))
    return name + b": " + _times(draw, draw.choice(WORDS), 1_000_000) + b"\r\n"


def _many_headers(draw: Random) -> bytes:
    return _times(draw, draw.choice(LINES), 1_000_000)


def _parameters(draw: Random) -> bytes:
    return b"Content-Disposition: attachment" + _times(draw, draw.choice(PARAMETERS), 100_000) + b"\r\n"


def _date(draw: Random) -> bytes:
    dates = (b"Tue, 14 Nov 99999 22:13:20 +9999", b"9" * 5000, b"0", b"Tue, 00 Jan 0000 99:99:99 -9999", b"\xff" * 100)
    return b"Date: " + draw.choice(dates) + b"\r\n"


def _wide(draw: Random) -> bytes:
    kind = draw.choice((b"mixed", b"alternative", b"related", b"digest"))
    part = draw.choice(PARTS)
    return b"Content-Type: multipart/" + kind + b"; boundary=b\r\n\r\n" + part * draw.choice((10, 10_000, 100_000))


def _deep(draw: Random) -> bytes:
    if draw.random() < 0.5:
        return b"Content-Type: message/rfc822\r\n\r\n" * draw.choice((50, 1000, 10_000)) + b"\r\nend"
    levels = draw.choice((15, 1000, 5000))
    return b"".join(b"Content-Type: multipart/mixed; boundary=b%d\r\n\r\n--b%d\r\n" % (n, n) for n in range(levels))


def _same_boundary(draw: Random) -> bytes:
    return b"Content-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\n" * draw.choice((10, 1000, 30_000))


def _html(draw: Random) -> bytes:
    return b"Content-Type: text/html\r\n\r\n" + _times(draw, draw.choice(TAGS))


def _many_html(draw: Random) -> bytes:
    part = b"--b\r\nContent-Type: text/html\r\n\r\n" + draw.choice((b"<", b"<!--", b"&#")) * 5_000 + b"\r\n"
    return b"Content-Type: multipart/mixed; boundary=b\r\n\r\n" + part * 400


def _charset(draw: Random) -> bytes:
    start = f'Content-Type: text/plain; charset="{draw.choice(CHARSETS)}"\r\n\r\n'.encode()
    return start + _times(draw, draw.choice((b"xn--a-", b"+AAA", b"~{", b"\x1b$B", b"\xff\xfe", b"\\x41")))


def _encoded(draw: Random) -> bytes:
    kind = draw.choice((b"base64", b"quoted-printable", b"x-uuencode", b"BASE64 "))
    body = draw.choice((b"=" * 999, b"=\r\n", b"=4", b64encode(bytes(600)), b"!", b"A", b"=ZZ"))
    return b"Content-Transfer-Encoding: " + kind + b"\r\n\r\n" + _times(draw, body)


def _blank(draw: Random) -> bytes:
    return b"\r\n" + _times(draw, draw.choice((b"\n", b" ", b"\r", b"\n ", b"\x00", b"\t\n", b"\xc2\xa0")))


_HEADERS: tuple[Callable[[Random], bytes], ...] = (_recipients, _long_header, _many_headers, _parameters, _date)
_BODIES: tuple[Callable[[Random], bytes], ...] = (
    *(_wide, _deep, _same_boundary, _html, _many_html, _charset, _encoded, _blank),
)
