"""
A large first sync of a GitHub-like server in virtual time: limits, files that fail, restarts; everything is there.

`make test` reads 1,500 files, `make faults` 50,000 at GitHub's own 5,000 requests an hour.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from reefknot import clock
from reefknot.ingest.assembly import running_ingestion
from reefknot.ingest.configured_sources import open_documents
from reefknot.ingest.connectors.github_api import ApiAnswer, GithubApi
from reefknot.ingest.jobs import JobQueue
from reefknot.ingest.sources import SourceRecords, remembered_jobs
from reefknot.policy.settings import load_settings
from reefknot.queue.model.work import WorkState
from reefknot.stores.opening import open_store, options_of
from tests.faults.points import either
from tests.github_server import GithubServer, Reply, refusal

FILES, LIMIT = either(1_500, 50_000), either(250, 5_000)
EVERY = 50
"""One file of so many fails, 2 % of them."""
HOUR = 3600.0
LATENCY = 0.02


class HourlyServer(GithubServer):
    """A server without sockets, whose limit is by the hour of the virtual clock. Some files fail twice each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.limit = LIMIT
        self.resets_at = 0
        self.limited = 0
        self.failed: Counter[str] = Counter()
        self.bad: set[str] = set()
        self.interfere = self._failing
        self.wanted: float = 0
        self.reached = asyncio.Event()

    def _failing(self, target: str) -> Reply | None:
        name = target.rpartition("/")[2]
        if name in self.bad and self.used < self.limit and self.failed[name] < 2:
            self.failed[name] += 1
            self.used += 1
            return refusal(503, "unavailable")
        return None

    async def send(self, url: str, etag: str, accept: str) -> ApiAnswer:
        await asyncio.sleep(LATENCY)
        if clock.wall() >= self.resets_at:
            self.used, self.resets_at = 0, int(clock.wall() + HOUR)
        sent = {"accept": accept} | ({"if-none-match": etag} if etag else {})
        reply = self.reply(url.removeprefix(self.url), sent)
        self.limited += reply.status == 403
        if len(self.requests) >= self.wanted:
            self.reached.set()
        return ApiAnswer(reply.status, {name.lower(): value for name, value in reply.headers.items()}, reply.body)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HourlyServer]:
    (tmp_path / "server").mkdir()
    made = HourlyServer(tmp_path / "server")
    made.git.files = {f"{n // 500:03}/{n:05}.md": f"file {n}".encode() for n in range(FILES)}
    made.git.commit()
    tree = made.git.tree(made.git.head("main"), recursive=True)
    assert tree is not None
    blobs = [one["sha"] for one in tree if one["type"] == "blob"]
    made.bad = set(blobs[::EVERY])

    async def send(self: GithubApi, url: str, etag: str, accept: str, most: int) -> ApiAnswer:
        return await made.send(url, etag, accept)

    monkeypatch.setattr(GithubApi, "_send", send)
    yield made
    made.close()


async def test_everything_is_there_after_limits_failures_and_restarts(server: HourlyServer, tmp_path: Path) -> None:
    config = tmp_path / "reefknot.yaml"
    source = f"{{connector: github_repository, repository: octo/demo, base_url: '{server.url}', content: [files]}}"
    config.write_text(f"sources: {{demo: {source}}}\n")
    settings = load_settings(str(config), environ={}, cwd=tmp_path)
    url = f"sqlite:{tmp_path / 'state.db'}"
    hours = FILES / LIMIT

    async def run(*, requests: float) -> bool:
        """A process that runs until so many requests were sent, or all is done; whether it is."""
        async with (
            open_store(url, **options_of(settings)) as store,
            running_ingestion(store, settings, url, drain=0) as orchestrator,
        ):
            assert orchestrator is not None
            if not (await SourceRecords(store).read("demo")).sync_job:
                await orchestrator.request_sync("demo", trigger="manual", job_id="demo@1")
            ends = clock.now() + 5 * hours * HOUR
            server.wanted = requests
            server.reached.clear()
            while clock.now() < ends:
                with suppress(TimeoutError):
                    async with asyncio.timeout(60):
                        await server.reached.wait()
                    return False
                if await remembered_jobs(store, "demo") == 0:
                    return True
        raise AssertionError("it did not come to that")

    for part in (0.13, 0.5, 0.83):
        assert not await run(requests=part * FILES)
    assert await run(requests=10 * FILES)
    async with open_store(url, **options_of(settings)) as store:
        sync = await JobQueue(store).get("demo@1")
        assert sync is not None
        assert (sync.state, sync.attempts) == (WorkState.SUCCEEDED, 1), "limits and restarts spent nothing"
        assert sync.snoozes >= hours - 2
        assert sync.interruptions == 3
        assert await store.quarantine.count() == {}
    async with open_documents(tmp_path / "documents.db", create=False) as documents:
        counts = (await documents.counts())["demo"]
    assert (counts.documents, counts.problems) == (FILES, 0)
    print(f"{FILES} files, {server.limited} limits, {len(server.requests)} requests, {clock.now() / HOUR:.1f} h")
    assert len(server.failed) == FILES // EVERY
