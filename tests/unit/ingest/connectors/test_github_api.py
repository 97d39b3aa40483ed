"""Refusals of GitHub's API as failures, and its trees in order."""

import asyncio
import gzip
import random
import zlib
from collections.abc import AsyncIterator

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors.github_api import ApiAnswer, GithubApi, _bounded_body, failure_of, origin_of
from reefknot.ingest.connectors.github_content import CommitTree, TreeEntry
from reefknot.retrying.failures import failure_from
from reefknot.runtime.addresses import is_loopback
from reefknot.testing import virtual_time


def refused(status: int, said: str = "", **headers: str) -> SourceError:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return failure_of(ApiAnswer(status, names), said, where="/repos/a/b", repository="a/b", has_token=True)


PERMANENT, TRANSIENT, LIMITED = FailureType.PERMANENT, FailureType.TRANSIENT, FailureType.RATE_LIMITED


@pytest.mark.parametrize(
    ("failed", "kind", "seconds"),
    [
        (refused(401), PERMANENT, None),
        (refused(403, x_ratelimit_remaining="10"), PERMANENT, None),
        (refused(404, x_ratelimit_remaining="0", retry_after="5"), PERMANENT, None),
        (refused(403, retry_after="0"), LIMITED, 1),
        (refused(403, retry_after="soon"), LIMITED, 60),
        (refused(403, x_ratelimit_remaining="0"), LIMITED, 60),
        (refused(403, "API rate limit exceeded"), LIMITED, 60),
        (refused(503, retry_after="30"), TRANSIENT, 30),
    ],
)
def test_a_refusal_has_its_kind_and_its_wait(failed: SourceError, kind: FailureType, seconds: float | None) -> None:
    assert failed.failure_type is kind
    assert getattr(failed, "retry_after", None) == seconds
    read = failure_from(failed)
    assert (read.failure_type, read.retry_after) == (kind, seconds), "the orchestrator reads the same"
    assert read.message == str(failed), "no word of it looks like a secret"


def test_a_spent_limit_waits_for_its_reset() -> None:
    with virtual_time() as time:
        failed = refused(403, x_ratelimit_remaining="0", x_ratelimit_reset=str(int(time.wall()) + 600))

    assert getattr(failed, "retry_after", None) == 600


class Dripping(httpx2.AsyncByteStream):
    """A body in parts, which counts those that were asked for."""

    def __init__(self, first: bytes, *, part: bytes, parts: int) -> None:
        self.first, self.part, self.parts, self.given = first, part, parts, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.first
        for _ in range(self.parts):
            self.given += 1
            yield self.part


def packed(body: Dripping) -> httpx2.Response:
    return httpx2.Response(200, headers={"content-encoding": "gzip"}, stream=body)


def test_bytes_behind_the_end_of_a_packed_body_are_not_read() -> None:
    body = Dripping(gzip.compress(b"{}"), part=b"x" * 1024, parts=100)

    with pytest.raises(zlib.error, match="behind the end"):
        asyncio.run(_bounded_body(packed(body), 1000, cut=False))
    assert body.given == 1


def test_a_body_that_packs_nothing_has_an_end() -> None:
    nothing = b"\x00\x00\x00\xff\xff" * 2000  # stored blocks without content
    body = Dripping(gzip.compress(b"")[:10], part=nothing, parts=100)

    with pytest.raises(SourceError, match="too large"):
        asyncio.run(_bounded_body(packed(body), 1000, cut=False))
    assert body.given == 7


def test_a_packed_body_is_read() -> None:
    words = random.Random(1).randbytes(100_000)
    body = Dripping(gzip.compress(words), part=b"", parts=1)

    assert asyncio.run(_bounded_body(packed(body), 100_000, cut=False)) == words


@pytest.mark.parametrize("depth", [2000, 1_000_000])
def test_deeply_nested_json_is_a_failure_of_the_source(depth: int) -> None:
    api = GithubApi("http://127.0.0.1:1", "octo/demo")

    with pytest.raises(SourceError, match="did not answer with what GitHub's API answers"):
        api.decoded(ApiAnswer(200, {}, b'{"x":' + b"[" * depth), TreeEntry)


def test_origins_are_compared_by_scheme_host_and_port() -> None:
    from urllib.parse import urlsplit

    same = {origin_of(urlsplit(url)) for url in ("https://A.example/x", "https://a.example:443/y")}
    assert len(same) == 1
    hosts = (
        "http://a.example",
        "https://a.example:444",
        "https://a.example.evil",
        "https://a.example:x",
        "//a.example",
    )
    assert not same & {origin_of(urlsplit(url)) for url in hosts}


@pytest.mark.parametrize(
    ("host", "is_it"), [("localhost", True), ("127.1.2.3", True), ("::1", True), ("10.0.0.1", False)]
)
def test_loopback_is_told_by_name_and_address(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it
    assert not is_loopback(f"{host}.example")


class Folders(CommitTree):
    """A tree of a set of paths, which is listed at once up to `largest` entries."""

    def __init__(self, paths: set[str], largest: int) -> None:
        super().__init__(GithubApi("http://localhost", "a/b"), "/")
        self._paths = paths
        self._largest = largest

    async def _tree(self, sha: str, *, recursive: bool = False) -> object:  # type: ignore[override]  # of the same fields
        prefix = sha.removeprefix("/")
        beneath = {path.removeprefix(prefix) for path in self._paths if path.startswith(prefix)}
        files = [TreeEntry(path, "0", "100644", "blob", 1) for path in beneath]
        is_truncated = recursive and len(files) > self._largest
        if not recursive:
            files = [one for one in files if "/" not in one.path]
            folders = {path.partition("/")[0] for path in beneath if "/" in path}
            files += [TreeEntry(name, f"/{prefix}{name}/", "040000", "tree") for name in folders]
        return type("Listed", (), {"tree": files, "truncated": is_truncated})


NAMES = st.text(st.sampled_from("ab0-./é"), min_size=1, max_size=8)


def as_files(paths: set[str]) -> set[str]:
    """Paths that may be files beside each other: without empty names, none of them the folder of another."""
    clean = {"/".join(filter(None, path.split("/"))) for path in paths} - {""}
    return {path for path in clean if not any(other.startswith(f"{path}/") for other in clean)}


@given(st.sets(NAMES, max_size=30).map(as_files), st.integers(0, 30), st.integers(1, 5))
def test_a_tree_is_walked_in_order_however_it_is_listed(paths: set[str], largest: int, limit: int) -> None:
    async def walk() -> list[str]:
        tree, found = Folders(paths, largest), [""]
        while batch := await tree.next_files(found[-1], limit):
            assert len(batch) <= limit
            found += [one.path for one in batch]
        for path in paths:
            entry = await tree.find(path)
            assert entry is not None
            assert entry.path == path
            assert await tree.find(f"{path}/x") is None
            assert await tree.find(f"{path}x") is None or f"{path}x" in paths
        return found[1:]

    assert asyncio.run(walk()) == sorted(paths)


def test_only_a_token_that_is_refused_is_forbidden() -> None:
    assert refused(401).forbidden
    assert refused(403).forbidden
    assert not refused(404).forbidden
    assert not refused(403, x_ratelimit_remaining="0").forbidden
