"""Small answers that unpack to large ones are refused quickly, and never held in memory."""

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import Iterator

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.steps.addresses import HttpSettings, read_allowed
from reefknot.steps.http import HttpRequest
from tests.integration.stepping import Loopback, Reply, step
from tests.pace import within

MEGABYTE = 1 << 20
LARGEST_MEMORY = 32 * MEGABYTE
LONGEST = 1.0


def deflated(megabytes: int, pattern: bytes = b"\0", *, wbits: int) -> bytes:
    """So many megabytes of a pattern. One block is packed, and its packed form repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = (pattern * MEGABYTE)[:MEGABYTE]
    body = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    stream = body * megabytes + zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS).flush()
    if wbits < 0:
        return stream
    if wbits > zlib.MAX_WBITS:
        return b"\x1f\x8b\x08\0\0\0\0\0\x02\xff" + stream + b"\0" * 8
    return b"\x78\xda" + stream + b"\0" * 4


GZIP, ZLIB, BARE = zlib.MAX_WBITS | 16, zlib.MAX_WBITS, -zlib.MAX_WBITS
BOMBS: dict[str, Reply] = {
    "10 MB of zeros": Reply(200, {"Content-Encoding": "gzip"}, deflated(10, wbits=GZIP)),
    "100 MB of zeros": Reply(200, {"Content-Encoding": "gzip"}, deflated(100, wbits=GZIP)),
    "1 GB of zeros": Reply(200, {"Content-Encoding": "gzip"}, deflated(1024, wbits=GZIP)),
    "10 GB of zeros": Reply(200, {"Content-Encoding": "gzip"}, deflated(10_240, wbits=GZIP)),
    "1 GB as zlib": Reply(200, {"Content-Encoding": "deflate"}, deflated(1024, wbits=ZLIB)),
    "1 GB as bare deflate": Reply(200, {"Content-Encoding": "deflate"}, deflated(1024, wbits=BARE)),
    "under the old name": Reply(200, {"Content-Encoding": "x-gzip"}, deflated(512, wbits=GZIP)),
    "in capitals": Reply(200, {"Content-Encoding": "GZIP"}, deflated(512, wbits=GZIP)),
    "of a pattern": Reply(200, {"Content-Encoding": "gzip"}, deflated(512, b"lorem ipsum ", wbits=GZIP)),
    "of JSON brackets": Reply(200, {"Content-Encoding": "gzip"}, deflated(512, b"[", wbits=GZIP)),
    "of spaces": Reply(200, {"Content-Encoding": "gzip", "Content-Type": "text/html"}, deflated(512, b" ", wbits=GZIP)),
    "packed twice": Reply(200, {"Content-Encoding": "gzip, gzip"}, gzip.compress(deflated(512, wbits=GZIP))),
    "packed thrice": Reply(200, {"Content-Encoding": "gzip, deflate, gzip"}, gzip.compress(b"x")),
    "packed ten times": Reply(200, {"Content-Encoding": ",".join(["gzip"] * 10)}, gzip.compress(b"x")),
    "as brotli": Reply(200, {"Content-Encoding": "br"}, b"\xcf\xff\xff\x7f\xf8" * 100),
    "as zstd": Reply(200, {"Content-Encoding": "zstd"}, b"\x28\xb5\x2f\xfd" * 100),
    "identity that is gzip": Reply(200, {"Content-Encoding": "identity, gzip"}, deflated(512, wbits=GZIP)),
    "cut short": Reply(200, {"Content-Encoding": "gzip"}, deflated(512, wbits=GZIP)[:300_000]),
    "damaged late": Reply(200, {"Content-Encoding": "gzip"}, deflated(64, wbits=GZIP)[:-5000] + b"\xff" * 9000),
    "large without packing": Reply(200, {}, b"x" * (4 * MEGABYTE)),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Loopback]:
    names = list(BOMBS)
    assert len(names) == 20
    with Loopback(lambda seen: BOMBS[names[int(seen.path[1:])]]) as running:
        yield running


def fetched(url: str, most: int = MEGABYTE) -> tuple[StepResult, int]:
    """The result, and the memory that Python had at its peak."""

    async def main() -> tuple[StepResult, int]:
        block = HttpRequest(HttpSettings((read_allowed("127.0.0.1"),), most))
        tracemalloc.start()
        try:
            result = await step(block, 30.0, url=url)
            return result, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            await block.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_quickly_and_in_little_memory(server: Loopback, name: str) -> None:
    result, memory = within(LONGEST, lambda: fetched(server.url(f"/{list(BOMBS).index(name)}")))
    assert result.error_code is ErrorCode.execution_failed, result.error_message
    assert memory < LARGEST_MEMORY


@pytest.mark.parametrize("name", ["100 MB of zeros", "1 GB as zlib"])
def test_a_generous_limit_is_no_way_around_the_ratio(server: Loopback, name: str) -> None:
    url = server.url(f"/{list(BOMBS).index(name)}")
    result, memory = within(LONGEST, lambda: fetched(url, 64 * MEGABYTE))
    assert result.error_code is ErrorCode.execution_failed
    assert "100-fold" in result.error_message
    assert memory < LARGEST_MEMORY


def test_unpacking_without_a_bound_takes_all_the_memory() -> None:
    """The control: the same kind of bytes, unpacked the plain way."""
    packed = gzip.compress(bytes(64 * MEGABYTE), 1)
    tracemalloc.start()
    try:
        gzip.decompress(packed)
        assert tracemalloc.get_traced_memory()[1] > LARGEST_MEMORY
    finally:
        tracemalloc.stop()


def test_an_ordinary_answer_is_not_taken_for_a_bomb() -> None:
    """The other control: text that packs well, and no more than text does."""
    body = b"".join(b'{"id": %d, "name": "somebody", "tags": ["a", "b"]}\n' % number for number in range(10_000))
    with Loopback(lambda seen: Reply(200, {"Content-Encoding": "gzip"}, gzip.compress(body, 9))) as running:
        result, _ = fetched(running.url())
    assert result.outputs["body"].encode() == body
