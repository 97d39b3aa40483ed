"""
A response's body, read with a bound at every step.

One layer of gzip or deflate is undone piece by piece, and the reading stops as soon as the result is too large, or
grows out of proportion to what came over the wire: a bomb is never held in memory, only its beginning.
"""

import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator

MOST_GROWTH = 100
FREE_GROWTH = 64 * 1024
"""Small texts may shrink by more than the ratio without being bombs."""
_STEP = 64 * 1024
_ACCEPTED = "gzip, deflate or none, one layer"
ACCEPT_ENCODING = "gzip, deflate"


class BodyRefused(Exception):  # noqa: N818 - it reads as what happened
    """The body is too large, a bomb, or in an encoding that is not undone. `kept` is what was read until then."""

    def __init__(self, message: str, kept: bytes) -> None:
        super().__init__(message)
        self.kept = kept


async def read_body(parts: AsyncIterator[bytes], encoding: str, *, most: int) -> bytes:
    """All of it, decoded, within bounds."""
    inflate = _inflater(encoding)
    kept = bytearray()
    wire = 0
    async for part in parts:
        wire += len(part)
        if inflate is None:
            _take(kept, part, most)
            continue
        for piece in _undone(inflate, part, kept):
            _take(kept, piece, most)
            if len(kept) > FREE_GROWTH and len(kept) > wire * MOST_GROWTH:
                text = f"the body grows more than {MOST_GROWTH}-fold when it is unpacked; it was not unpacked further"
                raise BodyRefused(text, bytes(kept))
    if inflate is not None and wire and not inflate.eof:
        raise BodyRefused("the compressed body ends too early", bytes(kept))
    return bytes(kept)


def _take(kept: bytearray, piece: bytes, most: int) -> None:
    kept += piece[: most - len(kept) + 1]
    if len(kept) > most:
        del kept[most:]
        raise BodyRefused(
            f"the body is larger than {most} bytes, the limit of blocks.http.max_response_bytes", bytes(kept)
        )


class _Inflater:
    """zlib, gzip, or the bare deflate that some servers mean by it."""

    def __init__(self, kind: str) -> None:
        self._first = kind == "deflate"
        self._wbits = zlib.MAX_WBITS | (16 if kind == "gzip" else 0)
        self._zlib = zlib.decompressobj(self._wbits)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    def step(self, data: bytes) -> tuple[bytes, bytes]:
        """A bounded piece, and what is still to be undone."""
        if self._first and data:
            self._first = False
            if data[0] & 0x0F != 8:
                self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
        piece = self._zlib.decompress(data, _STEP)
        rest = self._zlib.unused_data.lstrip(b"\0")  # zeros after the end are padding
        if not rest:
            return piece, self._zlib.unconsumed_tail
        if self._wbits == zlib.MAX_WBITS:
            raise zlib.error("bytes follow its end")
        self._zlib = zlib.decompressobj(self._wbits)  # gzip may have several members, one after the other
        return piece, rest


def _undone(inflate: _Inflater, part: bytes, kept: bytearray) -> Iterator[bytes]:
    rest, piece = part, b""
    while rest or len(piece) == _STEP:  # a full piece: there may be more without more input
        try:
            piece, rest = inflate.step(rest)
        except zlib.error as error:
            raise BodyRefused(f"the compressed body is damaged: {error}", bytes(kept)) from error
        yield piece


def _inflater(encoding: str) -> _Inflater | None:
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return None
    if kind in ("gzip", "x-gzip", "deflate"):
        return _Inflater("deflate" if kind == "deflate" else "gzip")
    raise BodyRefused(f"the body is encoded as {kind[:60]!r}; accepted: {_ACCEPTED}", b"")


def as_output(body: bytes, name: str = "body") -> dict[str, str]:
    """Text as text, anything else as base64 under a name that says so."""
    try:
        return {name: body.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(body).decode()}
