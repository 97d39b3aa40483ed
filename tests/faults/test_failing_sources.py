"""
Sources that fail, from the command line: many bad items, limits, outages, and servers that never end.

`make test` has 45 items that fail where 30 can be remembered, `make faults` 1,500 and 1,000.
"""

import json
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.folder import CONFIG, Folder, until
from tests.faults.points import either
from tests.github_server import GithubServer, Reply, refusal
from tests.unit.console.cli.running import Commands

BAD, REMEMBERED, PAGE = either(45, 1500), either(30, 1000), either(10, 100)
SOURCE = """\
ingestion: {{breaker: {{cooldown_seconds: 1, max_cooldown_seconds: 60}}, max_failed_items: {most}}}
sources:
  demo:
    connector: github_repository
    repository: octo/demo
    base_url: '{url}'
    content: [{content}]
    every: {every}
    max_concurrency: 4
    page_size: {page}
    retry: {{base_delay_seconds: 1, max_delay_seconds: 1, max_attempts: 3, rate_limit_delay_seconds: 1}}
"""
SHELF = """\
import os
from reefknot.ingest.connectors.registry import connector
from reefknot.ingest.port import Document, ItemFailure, Page

BAD, PAGE = int(os.environ["BAD"]), int(os.environ["PAGE"])

@connector("shelf")
class Shelf:
    def __init__(self, context):
        pass

    def read(self, number):
        if number < BAD and not os.path.exists("mended"):
            raise PermissionError("permission denied")
        return Document(f"b{number}", f"b{number}", "1", text="a book")

    async def fetch(self, request):
        start = int(request.cursor or "0")
        documents, failures = [], []
        for number in range(start, start + PAGE):
            try:
                documents.append(self.read(number))
            except PermissionError as error:
                failures.append(ItemFailure(f"b{number}", "1", error))
        return Page(str(start + PAGE), tuple(documents), (), tuple(failures), is_last=start >= BAD)

    async def fetch_item(self, location, known):
        return self.read(int(location[1:]))

@connector("endless")
class Endless(Shelf):
    async def fetch(self, request):
        return Page(str(int(request.cursor or "0") + 1), (Document("a", "a", "1", text="again"),), is_last=False)
"""

ODD = """\
from reefknot.ingest.connectors.registry import connector

@connector("odd")
class Odd:
    def __init__(self, context):
        pass

    async def fetch(self, request):
        raise ValueError("odd")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Folder]:
    (tmp_path / "user").mkdir()
    made = Folder(tmp_path / "user", Commands(tmp_path / "user", monkeypatch, capsys))
    made.set_variable("BAD", str(BAD))
    made.set_variable("PAGE", str(PAGE))
    yield made
    made.end()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GithubServer]:
    (tmp_path / "server").mkdir()
    running = GithubServer(tmp_path / "server")
    running.limit = 1_000_000
    yield running
    running.close()


def configure(folder: Folder, server: GithubServer, *, content: str = "files", every: str = "1h") -> None:
    text = SOURCE.format(url=server.url, content=content, every=every, most=REMEMBERED, page=PAGE)
    (folder.path / "reefknot.yaml").write_text(CONFIG + text)


def source(folder: Folder, name: str = "demo") -> dict[str, Any]:
    (found,) = [one for one in folder.json("source", "list")["sources"] if one["name"] == name]
    assert isinstance(found, dict)
    return found


# ---- nothing is forgotten --------------------------------------------------------------------------------------------


def test_of_many_items_that_fail_in_one_sync_every_one_comes_back(folder: Folder) -> None:
    (folder.path / "shelf.py").write_text(SHELF)
    config = folder.path / "reefknot.yaml"
    config.write_text(f"{CONFIG}ingestion: {{max_failed_items: {REMEMBERED}}}\n")
    words = ("--connector", "shelf", "--module", "shelf")
    assert folder("source", "add", "shelf", *words).code == 0
    run = ("source", "run", "shelf", "--module", "shelf")
    done = folder(*run)
    assert done.code == 75
    assert f"{REMEMBERED} items of shelf could not be read, and more fail: the sync stops before those" in done.out
    listed = source(folder, "shelf")
    assert (listed["state"], listed["documents"], listed["quarantined"]) == ("stopped", 0, REMEMBERED)
    assert listed["cursor"] == str(REMEMBERED)
    assert "keeps its place" in folder("source", "show", "shelf").out
    assert "reefknot quarantine requeue --source shelf" in folder("source", "list").out
    assert "the sync stops before those" in folder("job", "show", listed["sync_job"]).out
    examined = folder("doctor", "--json")
    assert examined.code == 1
    assert any("its sync has stopped" in one["text"] for one in examined.json["findings"])

    (folder.path / "mended").touch()
    assert folder("quarantine", "requeue", "--source", "shelf", "--because", "mended").code == 0
    assert folder(*run).code == 0
    listed = source(folder, "shelf")
    in_all = (BAD + PAGE - 1) // PAGE * PAGE + PAGE
    assert (listed["state"], listed["documents"], listed["quarantined"]) == ("healthy", in_all, 0)
    assert folder("doctor").code == 0


def test_files_that_a_server_refuses_for_now_all_come_back(folder: Folder, server: GithubServer) -> None:
    files = {f"{n // 100:02}/{n:04}.md": f"file {n}".encode() for n in range(BAD + 20)}
    server.git.files = dict(files)
    server.git.commit()
    bad = {f"file {n}".encode() for n in range(BAD)}
    is_bad = True

    def interfere(target: str) -> Reply | None:
        name = target.rpartition("/")[2]
        if is_bad and "/git/blobs/" in target and server.git.blob(name) in bad:
            return refusal(451, "not for now")
        return None

    server.interfere = interfere
    configure(folder, server)
    assert folder("source", "run", "demo").code == 75
    assert source(folder)["state"] == "stopped"
    is_bad = False
    assert folder("quarantine", "requeue", "--source", "demo", "--because", "mended").code == 0
    done = folder("source", "run", "demo")
    assert done.code == 0, done.out + done.err
    found = source(folder)
    assert (found["documents"], found["quarantined"], found["state"]) == (len(files), 0, "healthy")


# ---- limits and outages ----------------------------------------------------------------------------------------------


def test_a_first_sync_outlives_limits_and_an_outage_without_quarantine(folder: Folder, server: GithubServer) -> None:
    """Four limits in a row, each after some progress; then nothing but 503 for some probes; one job does it all."""
    server.git.files = {f"{n:04}.md": f"file {n}".encode() for n in range(120)}
    server.git.commit()
    answered, is_down, asked_while_down = 0, False, 0

    def interfere(target: str) -> Reply | None:
        nonlocal answered, asked_while_down
        if is_down:
            asked_while_down += 1
            return refusal(503, "down for maintenance")
        answered += 1
        if answered % 20 == 0 and answered <= 80:
            return refusal(403, "API rate limit exceeded", retry_after="1", x_ratelimit_remaining="0")
        return None

    server.interfere = interfere
    configure(folder, server)
    folder.up()
    until(lambda: answered > 85)
    is_down = True
    until(lambda: asked_while_down >= 4 and source(folder)["state"] in ("resting", "probing"))
    found = source(folder)
    assert found["quarantined"] == 0
    story = folder("job", "show", found["sync_job"]).out
    assert "503" in story
    is_down = False
    until(lambda: source(folder)["state"] == "healthy" and source(folder)["documents"] == 120)
    job = folder.json("job", "show", source(folder)["sync_job"])
    assert job["state"] == "succeeded"
    assert job["attempts"] <= 3, "two failures before it rested, and the success: limits spent nothing"


def test_a_source_that_is_down_is_asked_ever_less_and_quarantines_nothing(folder: Folder, server: GithubServer) -> None:
    """A timetable of one second asks for nothing more."""
    asked: list[float] = []

    def interfere(target: str) -> Reply:
        asked.append(time.monotonic())
        return refusal(503, "down")

    server.interfere = interfere
    configure(folder, server, every="1s")
    folder.up()
    until(lambda: len(asked) >= 6)
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[3] >= 1.8, "2 s after the first probe"
    assert pauses[4] >= 3.6, "4 s after the second"
    until(lambda: source(folder)["state"] == "resting")
    found = source(folder)
    assert (found["quarantined"], found["sync_state"]) == (0, "retrying")
    assert len(folder.json("job", "list", "--source", "demo")["jobs"]) == 1


# ---- servers and connectors that never end ---------------------------------------------------------------------------


def test_a_listing_that_always_has_a_next_page_ends_for_good(folder: Folder, server: GithubServer) -> None:
    for number in range(1, 4):
        server.add_issue(number)
    real = json.dumps(list(server.issues.values())).encode()
    link = {"Link": f'<{server.url}/issues?page=2>; rel="next"'}
    server.interfere = lambda target: Reply(200, real, link) if "/issues?" in target else None
    configure(folder, server, content="issues")
    done = folder("source", "run", "demo")
    assert done.code == 1
    assert "it would never end" in done.out
    assert len(server.requests) < 20


def test_trees_within_trees_end_for_good(folder: Folder, server: GithubServer) -> None:
    server.git.files = {"a.md": b"a"}
    server.git.commit()

    def interfere(target: str) -> Reply | None:
        if "/git/trees/" not in target:
            return None
        name = target.rpartition("/")[2].partition("?")[0]
        deeper = {"path": "d", "mode": "040000", "type": "tree", "sha": f"{(int(name, 16) + 1) % 16**40:040x}"}
        return Reply(200, json.dumps({"tree": [deeper], "truncated": "recursive" in target}).encode())

    server.interfere = interfere
    configure(folder, server)
    done = folder("source", "run", "demo")
    assert done.code == 1
    assert "folders within each other" in done.out


def test_a_connector_that_returns_the_same_document_for_ever_ends_and_its_state_is_told(folder: Folder) -> None:
    (folder.path / "shelf.py").write_text(SHELF)
    words = ("--connector", "endless", "--every", "1h", "--module", "shelf")
    assert folder("source", "add", "endless", *words).code == 0
    done = folder("source", "run", "endless", "--module", "shelf")
    assert done.code == 1
    assert "the connector endless makes no progress: 100 pages in a row" in done.out
    found = source(folder, "endless")
    assert (found["state"], found["last_sync"], found["sync_state"]) == ("needs attention", None, "quarantined")
    assert " quarantined " in folder("source", "list").out


def test_the_lines_of_a_retry_name_source_and_time(folder: Folder) -> None:
    (folder.path / "odd.py").write_text(ODD)
    assert folder("source", "add", "odd", "--connector", "odd", "--module", "odd").code == 0
    config = folder.path / "reefknot.yaml"
    config.write_text(f"{config.read_text()}    retry: {{max_attempts: 1, base_delay_seconds: 1, jitter_factor: 0}}\n")
    done = folder("source", "run", "odd", "--module", "odd")
    assert done.code == 75
    (line,) = [one for one in done.err.splitlines() if "Scheduling retry" in one]
    assert re.match(r"\d{4}-\d\d-\d\dT[0-9:.+Z-]+ INFO reefknot: Scheduling retry: odd odd@\S+: attempt 1 \(", line)
    assert "attempt 1 (1 retry allowed) failed with" in line
    assert "trying again in 1 s" in line
