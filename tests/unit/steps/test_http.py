"""A body is read within bounds, however it is packed; and the client is there before it is needed."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reefknot.app.blocks import start_preparing
from reefknot.policy.settings import load_settings
from reefknot.steps.addresses import HttpSettings, Unreachable
from reefknot.steps.http import BodyRefused, HttpRequest, read_body

SETTINGS = load_settings(environ={}, cwd=Path("/"))
TEXT = b"a line of text, and another one\n" * 500


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def read(data: bytes, encoding: str = "", *, size: int = 1000, most: int = 1 << 20) -> bytes:
    return asyncio.run(_read(data, encoding, size, most))


async def _read(data: bytes, encoding: str, size: int, most: int) -> bytes:
    return await read_body(pieces(data, size), encoding, most=most)


def bare(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        *((TEXT, encoding) for encoding in ("", "identity")),
        *((gzip.compress(TEXT), encoding) for encoding in ("gzip", " X-GZIP ")),
        *((pack(TEXT), "deflate") for pack in (zlib.compress, bare)),
    ],
    ids=["none", "identity", "gzip", "x-gzip", "zlib", "bare deflate"],
)
def test_a_body_is_read_whole_whatever_the_pieces(packed: bytes, encoding: str, size: int) -> None:
    assert read(packed, encoding, size=size) == TEXT


def test_a_body_is_read_up_to_the_limit_and_refused_before_it_when_it_grows_out_of_proportion() -> None:
    assert read(b"", "gzip") == b""
    assert read(b"x" * 100, most=100) == b"x" * 100
    assert read(gzip.compress(bytes(60_000)), "gzip") == bytes(60_000)

    with pytest.raises(BodyRefused, match="100-fold"):
        read(gzip.compress(bytes(50 << 20)), "gzip", most=60 << 20)


@pytest.mark.parametrize(
    ("packed", "encoding"), [(b"x" * 101, ""), (gzip.compress(b"x" * 101), "gzip")], ids=["plain", "gzip"]
)
def test_one_byte_more_is_refused_and_the_beginning_kept(packed: bytes, encoding: str) -> None:
    with pytest.raises(BodyRefused, match="larger than 100 bytes") as refused:
        read(packed, encoding, most=100)
    assert refused.value.kept == b"x" * 100


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_all_members_of_a_gzip_body_are_read(size: int) -> None:
    assert read(gzip.compress(TEXT) + gzip.compress(b"more") + bytes(9), "gzip", size=size) == TEXT + b"more"


@pytest.mark.parametrize(
    ("packed", "encoding", "says"),
    [
        (b"not gzip at all", "gzip", "damaged"),
        (gzip.compress(TEXT) + b"and then", "gzip", "damaged"),
        (zlib.compress(TEXT) + b"and then", "deflate", "damaged"),
        (zlib.compress(TEXT)[:-4] + b"\0\0\0\0", "deflate", "damaged"),
        (gzip.compress(TEXT)[:-9], "gzip", "too early"),
        (gzip.compress(gzip.compress(TEXT)), "gzip, gzip", "one layer"),
        *((b"whatever", encoding, encoding) for encoding in ("br", "zstd", "compress", "rot13")),
    ],
    ids=[
        *("no gzip", "bytes after gzip", "bytes after zlib", "a wrong sum", "it ends too early", "packed twice"),
        *("br", "zstd", "compress", "rot13"),
    ],
)
def test_a_damaged_body_and_an_unknown_encoding_are_refused_by_name(packed: bytes, encoding: str, says: str) -> None:
    with pytest.raises(BodyRefused, match=says):
        read(packed, encoding)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.app.blocks.LOADED_AFTER_S", 0.0)


def test_what_a_system_prepares_has_its_client_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    block = HttpRequest()
    start_preparing(SETTINGS, [block]).join(10)
    monkeypatch.setattr("reefknot.steps.http.import_module", None)
    assert block.load() is not None


def test_certificates_that_cannot_be_read_are_named_at_the_first_request_and_do_not_stop_a_start(
    tmp_path: Path,
) -> None:
    block = HttpRequest(HttpSettings(ca_file=str(tmp_path / "none.pem")))
    start_preparing(SETTINGS, [block]).join(10)
    with pytest.raises(Unreachable, match=r"`blocks.http.ca_file` .*none.pem cannot be used: .* PEM certificates"):
        block.load()
