"""The GitHub connector, over HTTP, on a server that answers like GitHub from a real git repository."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors import github_api, github_content, github_repository, text_extraction
from reefknot.ingest.connectors.github_content import Conversation, listing_query
from reefknot.ingest.connectors.github_repository import GithubRepository
from reefknot.ingest.port import FetchRequest, Page, Position, SourceContext
from reefknot.testing import virtual_time
from tests.github_server import SECONDARY_MESSAGE, GithubServer, Reply, refusal
from tests.unit.ingest.connectors.memory_sink import StrictSink, Synced, failing, one_page, sync
from tests.unit.ingest.connectors.test_text_extraction import pdf, word

pytestmark = pytest.mark.real_time

CERTIFICATE = Path(__file__).with_name("localhost.pem")
CANARY = "ghp_canary0123456789"
PERMANENT, TRANSIENT, LIMITED = FailureType.PERMANENT, FailureType.TRANSIENT, FailureType.RATE_LIMITED


class Kept(StrictSink):
    """A sink that refuses a version twice, too. `pages` are all that were kept in it."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Synced()

    async def keep(self, source: str, page: Page, *, after: Position) -> Position:
        before = {one.id: (one.version, one.location) for one in self.documents.values()}
        assert not [one for one in page.documents if before.get(one.id) == (one.version, one.location)]
        self.pages.append(page)
        return await super().keep(source, page, after=after)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GithubServer]:
    running = GithubServer(tmp_path)
    yield running
    running.close()


def connector(server: GithubServer, *, token: str = "", **settings: Any) -> GithubRepository:
    given = {"repository": "octo/demo", "base_url": server.url, **settings}
    if token:
        given["token"] = "env:TOKEN"
    return GithubRepository(SourceContext("demo", given, Path("/"), lambda reference: token))


@asynccontextmanager
async def opened(server: GithubServer, **settings: Any) -> AsyncIterator[GithubRepository]:
    source = connector(server, **settings)
    try:
        yield source
    finally:
        await source.close()


def synced(server: GithubServer, kept: Kept | None = None, *, limit: int = 100, **settings: Any) -> Kept:
    sink = kept or Kept()

    async def work() -> None:
        async with opened(server, **settings) as source:
            await sync(source, sink, limit=limit)

    asyncio.run(work())
    return sink


def failure(
    server: GithubServer, words: str = "", kind: FailureType = PERMANENT, *, kept: Kept | None = None, **settings: Any
) -> SourceError:
    """The failure that a sync ends with, however many pages it takes to meet it."""
    with failing(re.escape(words) or None, kind) as caught:
        synced(server, kept, **settings)
    return caught.value


def write(server: GithubServer, **files: str) -> None:
    for name, content in files.items():
        server.git.files[name.replace("__", "/") + ".md"] = content.encode()
    server.git.commit()


def replace(server: GithubServer, **files: str) -> None:
    """Make these the only files."""
    server.git.files.clear()
    write(server, **files)


def add_issues(server: GithubServer, number: int, *, tick: float = 10, is_pull: bool = False) -> None:
    for each in range(1, number + 1):
        server.tick(tick)
        server.add_issue(each, is_pull=is_pull)
    server.tick(300)


def fill(server: GithubServer, *, files: int = 7, issues: int = 5, pulls: int = 3) -> None:
    write(server, **{f"folder{n % 3}__file{n}": f"text {n}" for n in range(files)})
    for number in range(1, issues + pulls + 1):
        server.tick()
        server.add_issue(number, is_pull=number > issues, body=f"body {number}")
        if number % 2:
            server.add_comment(number, f"comment on {number}")
    server.tick(300)


def test_files_issues_and_pull_requests_become_documents(server: GithubServer) -> None:
    write(server, docs__read="# Hello")
    server.add_issue(7, "It leaks", body="Water everywhere.")
    server.add_comment(7, "Same here.")
    server.add_issue(8, "Mend it", is_pull=True)
    server.add_comment(8, "Looks good.")
    server.add_comment(8, "A typo.", path="docs/read.md")
    server.tick()

    kept = synced(server)

    assert set(kept.ids()) == {"files/docs/read.md", "issues/7", "pull_requests/8"}
    issue, pull = kept.documents["issues/7"], kept.documents["pull_requests/8"]
    assert issue.text.splitlines()[:3] == ["# It leaks", "", "Water everywhere."]
    assert "Same here." in issue.text
    assert (issue.title, issue.metadata["author"], issue.metadata["labels"]) == ("It leaks", "ada", ["bug"])
    assert "Looks good." in pull.text
    assert "docs/read.md:\n\nA typo." in pull.text
    assert (pull.metadata["base"], pull.metadata["head"]) == ("main", "topic-8")
    file = kept.by_location()["files/docs/read.md"]
    assert (file.text, file.media_type) == ("# Hello", "text/markdown")
    assert file.metadata["url"] == "https://github.example/octo/demo/blob/main/docs/read.md"
    msgspec.json.encode(file.metadata)


def test_a_page_has_at_most_its_limit_and_the_cursor_is_small(server: GithubServer) -> None:
    fill(server, files=20, issues=10, pulls=10)
    kept = synced(server, limit=6)
    assert len(kept.documents) == 40
    assert max(len(page.documents) for page in kept.pages) == 6
    assert max(len(page.cursor) for page in kept.pages) < 1500


@pytest.mark.parametrize(
    ("kind", "number", "tick", "requests"),
    [("issues", 330, 7, 9), ("issues", 330, 0, 9), ("pull_requests", 205, 7, 3)],
    ids=["issues", "issues of one second", "pull requests"],
)
def test_hundreds_take_several_pages(server: GithubServer, kind: str, number: int, tick: float, requests: int) -> None:
    add_issues(server, number, tick=tick, is_pull=kind == "pull_requests")
    assert len(synced(server, content=[kind]).documents) == number
    assert 3 <= len(server.paths("/issues$|/pulls$")) <= requests


def test_comments_are_read_to_their_bound(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github_content, "MOST_COMMENTS", 200)
    add_issues(server, 2)
    for issue, comments in ((1, 250), (2, 150)):
        for number in range(comments):
            server.add_comment(issue, f"comment {number}.")
    server.tick()

    first, second = synced(server, content=["issues"]).documents.values()

    assert "comment 199." in first.text
    assert "comment 200." not in first.text
    assert "comment 149." in second.text
    assert (first.problem, second.problem) == ("only the first 200 comments were read", "")


def test_include_exclude_and_size_choose_the_files(server: GithubServer) -> None:
    server.git.files |= {
        "docs/a.md": b"a",
        "docs/old/b.md": b"b",
        "src/c.py": b"c",
        "docs/big.md": b"x" * 200,
        "docs/picture.png": b"\x89PNG",
        "docs/data": b"\0\1\2",
        "docs/latin.md": "Käse".encode("latin-1"),
    }
    server.git.commit()

    kept = synced(server, content=["files"], include=["docs/**"], exclude=["old"], max_bytes=100)

    found = {location.removeprefix("files/docs/"): one for location, one in kept.by_location().items()}
    assert {name: (one.text, one.media_type) for name, one in found.items()} == {
        "a.md": ("a", "text/markdown"),
        "big.md": ("", "text/markdown"),
        "data": ("", "application/octet-stream"),
        "latin.md": ("K\ufffdse", "text/markdown"),
        "picture.png": ("", "application/octet-stream"),
    }
    assert "max_bytes: 100" in found["big.md"].problem
    assert "UTF-8" in found["latin.md"].problem
    assert len(server.paths("/git/blobs/")) == 3, "neither the large file nor the picture was fetched"


def test_the_texts_of_pdf_word_and_html_files_are_read(server: GithubServer) -> None:
    server.git.files = {
        "guide.pdf": pdf("A bowline for mooring"),
        "guide.docx": word("A sheet bend for hammocks"),
        "guide.html": b"<html><body><h1>Hitches</h1><p>A clove <b>hit</b>ch</p><script>no()</script></body></html>",
        "damaged.pdf": b"%PDF-1.4 no more",
    }
    server.git.commit()
    kept = synced(server, content=["files"])
    text_extraction._helpers.end()

    assert {location.removeprefix("files/"): text for location, text in kept.texts().items()} == {
        "damaged.pdf": "",
        "guide.docx": "A sheet bend for hammocks\nleft\tright",
        "guide.html": "Hitches\nA clove hitch",
        "guide.pdf": "A bowline for mooring",
    }
    assert "damaged" in kept.by_location()["files/damaged.pdf"].problem


def test_symbolic_links_and_submodules_are_no_documents(server: GithubServer) -> None:
    write(server, a="a")
    blob = "2e65efe2a145dda7ee51d1741299f848e5bf752e"
    entries = [
        {"path": "a.md", "mode": "100644", "type": "blob", "sha": blob, "size": 1},
        {"path": "link", "mode": "120000", "type": "blob", "sha": "0" * 40, "size": 9},
        {"path": "module", "mode": "160000", "type": "commit", "sha": "1" * 40},
    ]
    server.on("/git/trees/", Reply(body=msgspec.json.encode({"tree": entries, "truncated": False})))

    assert synced(server, content=["files"]).texts() == {"files/a.md": "a"}


def test_another_branch_is_read_when_it_is_named(server: GithubServer) -> None:
    write(server, a="main")
    server.git.files = {"b.md": b"branch"}
    server.git.commit(branch="work/next", parent="")
    assert synced(server, content=["files"]).texts() == {"files/a.md": "main"}
    assert synced(server, content=["files"], branch="work/next").texts() == {"files/b.md": "branch"}


def test_an_empty_repository_has_no_files(server: GithubServer) -> None:
    add_issues(server, 1)
    assert set(synced(server).ids()) == {"issues/1"}


def test_a_repository_without_issues_still_has_pull_requests(server: GithubServer) -> None:
    server.has_issues = False
    add_issues(server, 1, is_pull=True)
    assert set(synced(server, content=["issues", "pull_requests"]).ids()) == {"pull_requests/1"}


def test_an_unchanged_repository_costs_nothing_of_the_rate_limit(server: GithubServer) -> None:
    fill(server)
    kept = synced(server)
    used, asked = server.used, len(server.requests)
    synced(server, kept)
    assert [one.status for one in server.requests[asked:]] == [304] * 4
    assert server.used == used
    assert (kept.pages[-1].documents, kept.pages[-1].deleted) == ((), ())
    assert kept.pages.seen == 15, "each item was looked at once"


def test_only_what_changed_is_fetched(server: GithubServer) -> None:
    fill(server)
    kept = synced(server)
    asked = len(server.requests)
    write(server, folder1__file1="changed", new="new")
    server.tick()
    server.change_issue(2, title="Another title")
    server.tick()
    server.add_comment(7, "Once more.")
    server.tick(300)

    synced(server, kept)

    texts = kept.texts()
    assert (texts["files/folder1/file1.md"], texts["files/new.md"]) == ("changed", "new")
    assert texts["issues/2"].startswith("# Another title")
    assert "Once more." in texts["pull_requests/7"]
    later = [one.path for one in server.requests[asked:]]
    assert len([one for one in later if "/git/blobs/" in one]) == 2
    found = sorted(Synced(kept.pages[1:]).locations)
    assert found == ["files/folder1/file1.md", "files/new.md", "issues/2", "pull_requests/7"]


def test_a_renamed_file_stays_the_same_document(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control does not look for moves."""

    async def never(self: object, draft: object, entry: object) -> None:
        return None

    write(server, z="moving", a="staying")
    kept = synced(server, content=["files"])
    before = kept.ids()

    replace(server, b__moved="moving", a="staying")
    synced(server, kept, content=["files"])
    assert kept.ids() == {"files/a.md": before["files/a.md"], "files/b/moved.md": before["files/z.md"]}

    write(server, z="moving")  # the old place, taken by another file with the same content
    synced(server, kept, content=["files"])
    assert kept.ids()["files/b/moved.md"] == before["files/z.md"] != kept.ids()["files/z.md"]

    monkeypatch.setattr(GithubRepository, "_moved_from", never)
    replace(server, c="moving")
    assert before["files/z.md"] not in synced(server, kept, content=["files"]).documents


@pytest.mark.parametrize(
    ("before", "after"),
    [({"a": "x"}, {"a": "x", "b": "x"}), ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}), ({"a": "a", "b": "b"}, {})],
    ids=["a copy", "a swap", "all deleted"],
)
def test_later_files_are_those_of_the_last_commit(server: GithubServer, before: Any, after: Any) -> None:
    write(server, **before)
    kept = synced(server, content=["files"])
    replace(server, **after)
    assert synced(server, kept, content=["files"]).texts() == {f"files/{one}.md": after[one] for one in after}


def test_a_deleted_file_is_deleted(server: GithubServer) -> None:
    fill(server)
    kept = synced(server)
    gone = kept.ids()["files/folder0/file3.md"]
    del server.git.files["folder0/file3.md"]
    server.git.commit()
    synced(server, kept)
    assert gone not in kept.documents
    assert len(kept.documents) == 14


def test_deleted_and_transferred_issues_go_within_a_day(server: GithubServer) -> None:
    add_issues(server, 5)
    with virtual_time() as time:
        kept = synced(server, content=["issues"])
        del server.issues[5]
        del server.issues[2]
        server.transferred.add(2)
        time.advance(3600)
        synced(server, kept, content=["issues"])
        assert len(kept.documents) == 5, "an hour later they are not looked for yet"
        time.advance(86_400)
        synced(server, kept, content=["issues"])

    assert sorted(kept.ids()) == ["issues/1", "issues/3", "issues/4"]


def test_an_issue_that_a_listing_leaves_out_is_not_deleted_when_it_is_there(server: GithubServer) -> None:
    add_issues(server, 1)
    with virtual_time() as time:
        kept = synced(server, content=["issues"])
        time.advance(90_000)
        server.on("sort=created", Reply(body=b"[]"))
        synced(server, kept, content=["issues"])
    assert set(kept.ids()) == {"issues/1"}


def test_other_settings_are_applied_to_what_is_kept(server: GithubServer) -> None:
    fill(server)
    write(server, big="x" * 50)
    kept = synced(server, max_bytes=20)
    asked = len(server.paths("/git/blobs/"))

    synced(server, kept, content=["files", "pull_requests"], exclude=["folder2"], max_bytes=100)

    assert {location.partition("/")[0] for location in kept.ids()} == {"files", "pull_requests"}
    assert not [location for location in kept.ids() if "folder2" in location]
    assert kept.texts()["files/big.md"] == "x" * 50
    assert len(server.paths("/git/blobs/")) == asked + 1, "what is kept was not fetched again"


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
async def test_a_sync_interrupted_after_every_page_keeps_the_same_documents(server: GithubServer, limit: int) -> None:
    fill(server)
    whole, kept = Kept(), Kept()
    async with opened(server) as source:
        await sync(source, whole)
    while not kept.pages or not kept.pages[-1].is_last:
        async with opened(server) as source:  # another process, which knows the cursor alone
            await one_page(source, kept, limit)
    assert kept.documents == whole.documents


@pytest.mark.parametrize("lost_pages", range(8))
async def test_a_page_that_was_read_and_not_kept_is_read_again(server: GithubServer, lost_pages: int) -> None:
    fill(server)
    whole, kept = Kept(), Kept()
    async with opened(server) as source:
        await sync(source, whole)
    async with opened(server) as source:
        for _ in range(lost_pages):
            await one_page(source, kept, 2)
        await source.fetch(FetchRequest(kept.cursor, kept, 2))  # the process died before it was kept
    async with opened(server) as again:
        await sync(again, kept, limit=2)

    assert kept.documents == whole.documents


@pytest.mark.parametrize(("is_forced", "is_control"), [(True, False), (False, False), (True, True)])
async def test_a_push_between_pages_begins_the_files_anew(
    server: GithubServer, monkeypatch: pytest.MonkeyPatch, is_forced: bool, is_control: bool
) -> None:
    """The control does not look for pushes, and mixes commits."""

    async def never(state: object) -> bool:
        return False

    write(server, a="a1", b="b1", c="c1", d="d1")
    kept = Kept()
    async with opened(server, content=["files"]) as source:
        await one_page(source, kept, 2)
        old = server.git.head("main")
        server.git.files = {"a.md": b"a2", "c.md": b"c1", "e.md": b"e1"}
        server.git.commit(parent="" if is_forced else None)
        if is_control:
            monkeypatch.setattr(source, "_head", never)
        elif is_forced:
            server.git.forget(old)
        await sync(source, kept, limit=2)

    new = {"files/a.md": "a2", "files/c.md": "c1", "files/e.md": "e1"}
    assert (kept.texts() == new) is not is_control
    assert not is_control or set(kept.ids()) == {"files/a.md", "files/b.md", "files/c.md", "files/d.md"}


def test_a_push_while_a_page_is_read_leaves_nothing_of_the_old_commit(server: GithubServer) -> None:
    write(server, a="a1", b="b1", c="c1")
    old = server.git.head("main")

    def push(server: GithubServer) -> None:
        server.git.files = {"b.md": b"b2", "c.md": b"c1", "d.md": b"a1"}
        server.git.commit(parent="")
        server.git.forget(old)

    server.on("/git/blobs/", lambda server: None, push)

    assert synced(server, content=["files"]).texts() == {"files/b.md": "b2", "files/c.md": "c1", "files/d.md": "a1"}


def changing_at_the_second_page(server: GithubServer, listing: str, change: Callable[[], object]) -> None:
    """Let something happen when the second page of a listing is asked for."""

    def act(server: GithubServer) -> None:
        server.tick()
        change()

    server.on(f"/{listing}.*sort=updated", lambda server: None, act)
    server.tick(300)


def test_an_issue_that_changes_between_pages_is_not_lost(server: GithubServer) -> None:
    def change() -> None:
        server.change_issue(1, title="Changed early")  # moves to the end; all others move up
        server.change_issue(120, title="Changed late")
        del server.issues[50]

    add_issues(server, 150)
    changing_at_the_second_page(server, "issues", change)
    kept = synced(server, content=["issues"])

    assert (kept.texts()["issues/1"], kept.texts()["issues/120"]) == ("# Changed early", "# Changed late")
    assert len(kept.documents) == 150, "the deleted one was read before, and goes with the next look for lost ones"


def test_a_pull_request_that_changes_between_pages_is_not_lost(server: GithubServer) -> None:
    add_issues(server, 130, is_pull=True)
    changing_at_the_second_page(server, "pulls", lambda: server.change_issue(5, title="Changed meanwhile"))
    kept = synced(server, content=["pull_requests"])
    synced(server, kept, content=["pull_requests"])
    assert len(kept.documents) == 130
    assert kept.texts()["pull_requests/5"] == "# Changed meanwhile"


def test_an_issue_that_changes_twice_in_a_second_is_read_twice(server: GithubServer) -> None:
    server.add_issue(1, "First")
    kept = synced(server, content=["issues"])  # in the very second of the change
    server.change_issue(1, title="Second")
    server.tick(300)
    synced(server, kept, content=["issues"])
    assert kept.texts()["issues/1"] == "# Second"


def tree_files() -> dict[str, bytes]:
    names = [f"{top}/{middle}/{n}.md" for top in ("a", "b") for middle in ("x", "y") for n in range(8)]
    return {name: name.encode() for name in (*names, "a.md", "a-b.md", "a0.md", "z.md")}


@pytest.fixture
def deep(server: GithubServer) -> GithubServer:
    """A repository whose tree is not listed at once."""
    server.git.files = tree_files()
    server.git.commit()
    server.largest_tree = 12
    return server


@pytest.mark.parametrize("limit", [100, 3])
def test_a_truncated_tree_is_read_folder_by_folder(deep: GithubServer, limit: int) -> None:
    kept = synced(deep, content=["files"], limit=limit)
    assert kept.texts() == {f"files/{path}": path for path in tree_files()}
    assert kept.pages.locations == sorted(kept.pages.locations)


def test_renames_and_deletions_are_seen_in_a_truncated_tree(deep: GithubServer) -> None:
    kept = synced(deep, content=["files"])
    moved = kept.ids()["files/b/y/3.md"]
    deep.git.files["a/x/new.md"] = deep.git.files.pop("b/y/3.md")
    del deep.git.files["a/y/1.md"]
    deep.git.commit()
    asked = len(deep.paths("/git/blobs/"))

    synced(deep, kept, content=["files"])

    assert kept.ids()["files/a/x/new.md"] == moved
    assert len(kept.documents) == len(tree_files()) - 1
    assert len(deep.paths("/git/blobs/")) == asked + 1


def test_a_folder_with_more_entries_than_github_lists_is_a_permanent_failure(server: GithubServer) -> None:
    write(server, a="a")
    server.on("/git/trees/", *[Reply(body=b'{"tree": [], "truncated": true}')] * 4)
    failure(server, "more entries than GitHub lists")


async def test_listings_beyond_the_bound_are_dropped(deep: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github_content.CommitTree, "MOST_ENTRIES", 10)
    kept = Kept()
    async with opened(deep, content=["files"]) as source:
        for _ in range(5):
            await one_page(source, kept, 3)
        assert sum(map(len, source._tree._listings.values())) <= 10


READ_ACCESS = "read access to Contents, Issues and Pull requests"


@pytest.mark.parametrize(
    ("of_server", "settings", "words"),
    [
        ({"token": "another"}, {"token": CANARY}, "store it where the setting `token` says"),
        ({"token": CANARY, "rights": {"issues", "pulls"}}, {"token": CANARY}, READ_ACCESS),
        ({"token": CANARY, "rights": {"contents", "pulls"}}, {"token": CANARY}, READ_ACCESS),
        ({"token": CANARY, "rights": {"contents", "issues"}}, {"token": CANARY}, READ_ACCESS),
        ({"token": "secret"}, {}, "a private one needs the setting `token`, such as env:NAME"),
        ({"token": "secret"}, {"token": "secret", "repository": "octo/other"}, "check `repository: octo/other`"),
        ({}, {"branch": "mian"}, "no branch mian"),
        ({"moved_to": "octo/renamed"}, {}, "has moved to octo/renamed; set `repository: octo/renamed`"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_what_only_a_person_can_mend_is_permanent_and_says_what_to_do(
    server: GithubServer, of_server: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    fill(server)
    for name, value in of_server.items():
        setattr(server, name, value)
    failure(server, words, **settings)


def test_a_spent_rate_limit_waits_until_it_is_reset(server: GithubServer) -> None:
    fill(server)
    server.limit = 8
    kept = Kept()

    with virtual_time() as time:
        server.resets_at = int(time.wall()) + 1234
        assert failure(server, kind=LIMITED, kept=kept).retry_after == 1234
        assert kept.documents, "what was read before is kept"
        server.used = 0
        server.limit = 100
        synced(server, kept)

    assert len(kept.documents) == 15
    assert len(server.paths("/git/blobs/", status=200)) == 7, "no blob twice"


ANSWERS: dict[str, tuple[Reply, FailureType, float | None]] = {
    "a limit with a wait": (refusal(403, SECONDARY_MESSAGE, retry_after="17"), LIMITED, 17),
    "a limit": (refusal(403, SECONDARY_MESSAGE), LIMITED, 60),
    "abuse": (refusal(403, "You have triggered an abuse detection mechanism."), LIMITED, 60),
    "a 429": (refusal(429, "slow down"), LIMITED, 60),
    "a 403 without a sign of a limit": (refusal(403, "Repository access blocked"), PERMANENT, None),
    "451": (refusal(451, "Unavailable due to a notice."), PERMANENT, None),
    "422": (Reply(422), PERMANENT, None),
    "500": (Reply(500, b"oops"), TRANSIENT, None),
    "503": (refusal(503, "Unavailable", retry_after="9"), TRANSIENT, 9),
    "408": (Reply(408), TRANSIENT, None),
    "cut": (Reply(body=b"x" * 100, cut=True), TRANSIENT, None),
    "too short": (Reply(body=b"{}", length=500), TRANSIENT, None),
    "garbage": (Reply(body=b"<html>Sign in</html>"), TRANSIENT, None),
    "other JSON": (Reply(body=b"[1, 2]"), TRANSIENT, None),
    "not UTF-8": (Reply(body=b'{"full_name": "\xff"}'), TRANSIENT, None),
    "broken gzip": (Reply(body=b"no gzip", headers={"Content-Encoding": "gzip"}), TRANSIENT, None),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_cannot_be_used_is_a_failure_of_its_kind(server: GithubServer, name: str) -> None:
    reply, kind, seconds = ANSWERS[name]
    server.on("/repos/octo/demo$", reply)
    assert getattr(failure(server, kind=kind), "retry_after", None) == seconds


def test_a_server_that_is_not_there_is_transient(server: GithubServer) -> None:
    server.close()
    failure(server, "cannot be reached", TRANSIENT)


def test_a_body_that_never_ends_is_transient(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github_api, "WHOLE_S", 0.2)
    server.on("/repos/octo/demo$", Reply(body=b"x" * 100, drip=True))
    failure(server, "in time", TRANSIENT)


@pytest.mark.parametrize("is_packed", [True, False])
def test_every_answer_is_bounded(server: GithubServer, monkeypatch: pytest.MonkeyPatch, is_packed: bool) -> None:
    """Packed, ten megabytes are ten kilobytes on the wire."""
    monkeypatch.setattr(github_api, "LARGEST_JSON", 5000)
    body = b" " * 10_000_000 + b"{}"
    server.on("/repos/octo/demo$", Reply(body=body, length=None if is_packed else len(body)))
    failure(server, "more than 5000 bytes")


def test_a_certificate_is_checked_and_ca_file_names_its_authority(tmp_path: Path) -> None:
    server = GithubServer(tmp_path, certificate=CERTIFICATE)
    write(server, a="a")
    try:
        failure(server, "set `ca_file:`")
        assert set(synced(server, ca_file=str(CERTIFICATE)).ids()) == {"files/a.md"}
        failure(server, "`ca_file:`", ca_file=str(tmp_path / "none.pem"))
    finally:
        server.close()


def test_a_blob_that_fails_for_good_does_not_stop_the_others(server: GithubServer) -> None:
    write(server, a="a", b="b", c="c")
    server.on("/git/blobs/", lambda server: None, refusal(451, "Blocked"))
    kept = synced(server, content=["files"])
    assert set(kept.ids()) == {"files/a.md", "files/c.md"}
    assert list(kept.pages.failures) == ["files/b.md"]
    synced(server, kept, content=["files"])
    assert set(kept.ids()) == {"files/a.md", "files/c.md"}, "the file's own job reads it, not the next sync"


@pytest.mark.parametrize("reply", [Reply(502), Reply(body=b"other content"), Reply(body=b"x", cut=True)])
def test_a_blob_that_fails_is_one_item(server: GithubServer, monkeypatch: pytest.MonkeyPatch, reply: Reply) -> None:
    """The control does not check the hash, and takes other content for the file's."""
    write(server, a="a" * 20, b="b" * 20)
    server.on("/git/blobs/", reply)
    kept = synced(server, content=["files"])

    assert set(kept.ids()) == {"files/b.md"}
    failed = kept.pages.failures["files/a.md"]
    assert isinstance(failed, SourceError)
    assert failed.failure_type in (TRANSIENT, PERMANENT)
    if reply.body == b"other content":
        monkeypatch.setattr(github_content, "_blob_sha", lambda body, like: like)
        server.on("/git/blobs/", reply)
        assert synced(server, content=["files"]).texts()["files/a.md"] == "other content"


def test_a_blob_that_fails_with_the_whole_server_is_no_item_failure(server: GithubServer) -> None:
    write(server, a="a", b="b", c="c")
    server.on("/git/blobs/", lambda server: None, *[Reply(503)] * 9)
    server.on("/git/ref/", lambda server: None, lambda server: None, *[Reply(503)] * 9)
    kept = Kept()
    failure(server, kind=TRANSIENT, kept=kept, content=["files"])
    assert kept.pages.failures == {}
    assert set(kept.ids()) == {"files/a.md"}, "what was read before the outage is kept"


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_comments_that_fail_are_the_issue_s_own_failure(server: GithubServer, limit: int) -> None:
    fill(server, files=0, pulls=0)
    server.on("/issues/3/comments", *[refusal(451, "Blocked")] * 9)
    kept = synced(server, content=["issues"], limit=limit)
    assert list(kept.pages.failures) == ["issues/3"]
    assert len(kept.documents) == 4


def test_a_server_that_gives_another_etag_each_time_does_not_hide_a_failure(server: GithubServer) -> None:
    """The control of the rule that progress is kept: an ETag is none."""
    write(server, a="a")
    replies = [Reply(body=b'{"object": {"sha": "%s"}}' % (b"1" * 40), headers={"ETag": str(n)}) for n in range(20)]
    server.on("/git/ref/", *replies)
    with pytest.raises(SourceError, match="is not there any more"):
        synced(server, content=["files"])
    assert len(server.paths("/git/ref/")) < 10


async def test_one_item_is_fetched_by_itself(server: GithubServer) -> None:
    fill(server)
    kept = Kept()
    async with opened(server) as source:
        await sync(source, kept)
    async with opened(server) as source:
        for place in ("files/folder1/file1.md", "issues/1", "pull_requests/7"):
            assert await source.fetch_item(place, kept) == kept.by_location()[place]
        for gone in ("files/none.md", "issues/99", "issues/7", "pull_requests/1", "issues/x", "nothing/1"):
            assert await source.fetch_item(gone, kept) is None


async def test_the_test_of_a_source_tells_what_was_found(server: GithubServer) -> None:
    fill(server)
    commit = server.git.head("main")

    async def test(**settings: Any) -> str:
        async with opened(server, **settings) as source:
            return await source.test()

    assert await test() == (
        f"octo/demo: branch main at {commit[:12]}, issues readable, pull requests readable; 4996 requests left"
    )
    server.has_issues = False
    assert (await test(content=["issues"])).startswith("octo/demo: issues disabled")
    server.rights.clear()
    with pytest.raises(SourceError, match="Pull requests"):
        await test(content=["pull_requests"])


def test_the_token_stays_in(server: GithubServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fill(server)
    server.token = CANARY
    kept = synced(server, token=CANARY)
    assert server.requests[0].headers["authorization"] == f"Bearer {CANARY}"
    server.echoes_token, server.token = True, "another"

    failed = failure(server, "Bad credentials Bearer …", kept=kept, token=CANARY)  # the server repeated it

    told = [str(failed), repr(failed), str(failed.__cause__), caplog.text, kept.cursor]
    told += [repr(one) for one in kept.documents.values()]
    assert not [text for text in told if CANARY in text]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_the_token_goes_to_no_other_server(server: GithubServer, tmp_path: Path, status: int) -> None:
    (tmp_path / "other").mkdir()
    other = GithubServer(tmp_path / "other")
    try:
        location = f"{other.url}/repositories/42"
        server.on("/repos/octo/demo$", Reply(status, b"{}", {"Location": location}))

        failure(server, token=CANARY)
        assert other.requests == []
    finally:
        other.close()


def test_a_temporary_redirect_within_the_server_is_followed(server: GithubServer) -> None:
    """The control of the test above."""
    write(server, a="a")
    server.on("/repos/octo/demo$", Reply(307, b"{}", {"Location": "/repos/octo/demo?again"}))
    assert synced(server, token=CANARY, content=["files"]).texts() == {"files/a.md": "a"}


def test_redirects_in_a_circle_end(server: GithubServer) -> None:
    there = Reply(302, b"{}", {"Location": "/repos/octo/demo"})
    server.on("/repos/octo/demo$", *[there] * 9)
    failure(server)
    assert len(server.requests) == 3


@pytest.mark.parametrize("token", ["", "with space", "line\nbreak", "ümlaut"])
async def test_what_is_no_token_is_refused_before_it_is_sent(server: GithubServer, token: str) -> None:
    given = {"repository": "octo/demo", "base_url": server.url, "token": "env:TOKEN"}
    source = GithubRepository(SourceContext("demo", given, Path("/"), lambda reference: token))
    with failing("store the token alone") as failed:
        await source.fetch(FetchRequest("", Kept()))
    assert not token or token not in str(failed.value)
    assert server.requests == []


def test_no_proxy_of_the_environment_is_used(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    write(server, a="a")
    assert synced(server, content=["files"]).texts() == {"files/a.md": "a"}


def test_a_page_is_closed_when_it_has_taken_long(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(server)
    whole = synced(server)
    monkeypatch.setattr(github_repository, "PAGE_S", 0.0)  # over before it began: each page gets on by one item
    kept = synced(server)
    assert kept.documents == whole.documents
    assert max(len(page.documents) for page in kept.pages) == 1


def test_a_page_is_closed_when_it_is_large(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github_repository, "LARGEST_PAGE", 10)
    write(server, **{f"file{n}": "12345678" for n in range(5)})
    kept = synced(server, content=["files"])
    assert max(len(page.documents) for page in kept.pages) == 2
    assert len(kept.documents) == 5


# ---- controls: what the tests above would miss without the protection ------------------------------------------------


async def numbered_pages(self: GithubRepository, draft: Any) -> None:
    """Issues, page by page in the order of their changes, as one would read them at first."""
    listing: list[Conversation] = []
    while True:
        answer = await self._api.get("/issues", listing_query("updated", "asc", page=draft.state.page))
        listing += self._api.decoded(answer, list[Conversation])
        draft.state.page += 1
        if not answer.has_next:
            break
    draft.limit = 1000
    await self._add_conversations(draft, "issues", listing, answer)
    draft.state.phase = "done"


def test_numbered_pages_lose_an_issue_that_changes(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    add_issues(server, 150)
    changing_at_the_second_page(server, "issues", lambda: server.change_issue(1, title="Changed early"))
    monkeypatch.setattr(GithubRepository, "_issues", numbered_pages)
    assert "issues/101" not in synced(server, limit=1000, content=["issues"]).ids()
