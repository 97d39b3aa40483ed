"""The GitHub connector, over HTTP, on a server that answers like GitHub from a real git repository."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors import github_api, github_content, github_repository
from reefknot.ingest.connectors.github_content import Conversation, listing_query
from reefknot.ingest.connectors.github_repository import GithubRepository
from reefknot.ingest.port import Document, FetchRequest, KnownItem, Page, SourceContext
from reefknot.testing import virtual_time
from tests.github_server import SECONDARY_MESSAGE, GithubServer, Reply, refusal

CERTIFICATE = Path(__file__).with_name("localhost.pem")
CANARY = "ghp_canary0123456789"
T = TypeVar("T")


class Kept:
    """A sink in memory that refuses what a sink must not be given: a version twice, two documents in one place."""

    def __init__(self) -> None:
        self.cursor = ""
        self.documents: dict[str, Document] = {}
        self.failures: dict[str, Exception] = {}
        self.pages: list[Page] = []

    def keep(self, page: Page) -> None:
        ids = [one.id for one in page.documents]
        assert len(set(ids)) == len(ids), "an id twice in a page"
        assert not set(ids) & set(page.deleted), "kept and deleted at once"
        for one in page.documents:
            before = self.documents.get(one.id)
            assert before is None or (before.version, before.location) != (one.version, one.location), one.location
            self.documents[one.id] = one
        for gone in page.deleted:
            assert gone in self.documents, "a deletion of nothing"
            del self.documents[gone]
        places = [one.location for one in self.documents.values()]
        assert len(set(places)) == len(places), "two documents in one place"
        self.failures |= {one.location: one.error for one in page.failures}
        self.cursor = page.cursor
        self.pages.append(page)

    async def at(self, locations: Sequence[str]) -> dict[str, KnownItem]:
        wanted = set(locations)
        return {one.location: known(one) for one in self.documents.values() if one.location in wanted}

    async def like(self, fingerprint: str) -> list[KnownItem]:
        return [known(one) for one in self.documents.values() if one.fingerprint == fingerprint][:100]

    async def after(self, location: str, limit: int, *, prefix: str = "") -> list[KnownItem]:
        found = [known(one) for one in self.documents.values() if one.location > location]
        return sorted((one for one in found if one.location.startswith(prefix)), key=lambda one: one.location)[:limit]

    @property
    def texts(self) -> dict[str, str]:
        return {one.location: one.text for one in self.documents.values()}

    @property
    def ids(self) -> dict[str, str]:
        return {one.location: one.id for one in self.documents.values()}


def known(one: Document) -> KnownItem:
    return KnownItem(one.id, one.location, one.version, one.fingerprint)


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


async def sync(source: GithubRepository, kept: Kept, *, limit: int = 100, most: int = 10_000) -> Kept:
    """One sync to its end, or at most so many pages of it."""
    for _ in range(most):
        page = await source.fetch(FetchRequest(kept.cursor, kept, limit))
        assert len(page.documents) <= limit
        kept.keep(page)
        if page.is_last:
            break
    return kept


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(work())


def synced(server: GithubServer, kept: Kept | None = None, *, limit: int = 100, **settings: Any) -> Kept:
    async def work() -> Kept:
        source = connector(server, **settings)
        try:
            return await sync(source, kept or Kept(), limit=limit)
        finally:
            await source.close()

    return run(work)


def failure(server: GithubServer, kept: Kept | None = None, **settings: Any) -> SourceError:
    """The failure that a sync ends with, however many pages it takes to meet it."""
    with pytest.raises(SourceError) as failed:
        synced(server, kept, **settings)
    return failed.value


def write(server: GithubServer, **files: str) -> None:
    for name, content in files.items():
        server.git.files[name.replace("__", "/") + ".md"] = content.encode()
    server.git.commit()


def fill(server: GithubServer, *, files: int = 7, issues: int = 5, pulls: int = 3) -> None:
    write(server, **{f"folder{n % 3}__file{n}": f"text {n}" for n in range(files)})
    for number in range(1, issues + pulls + 1):
        server.tick()
        server.add_issue(number, is_pull=number > issues, body=f"body {number}")
        if number % 2:
            server.add_comment(number, f"comment on {number}")
    server.tick(300)


# ---- a first sync ----------------------------------------------------------------------------------------------------


def test_files_issues_and_pull_requests_become_documents(server: GithubServer) -> None:
    write(server, docs__read="# Hello")
    server.add_issue(7, "It leaks", body="Water everywhere.")
    server.add_comment(7, "Same here.")
    server.add_issue(8, "Mend it", is_pull=True)
    server.add_comment(8, "Looks good.")
    server.add_comment(8, "A typo.", path="docs/read.md")
    server.tick()

    kept = synced(server)

    assert kept.texts["files/docs/read.md"] == "# Hello"
    issue, pull = (
        next(one for one in kept.documents.values() if one.id == name) for name in ("issues/7", "pull_requests/8")
    )
    assert issue.text.splitlines()[:3] == ["# It leaks", "", "Water everywhere."]
    assert "Same here." in issue.text
    assert (issue.title, issue.metadata["author"], issue.metadata["labels"]) == ("It leaks", "ada", ["bug"])
    assert "Looks good." in pull.text
    assert "docs/read.md:\n\nA typo." in pull.text
    assert (pull.metadata["base"], pull.metadata["head"]) == ("main", "topic-8")
    assert set(kept.texts) == {"files/docs/read.md", "issues/7", "pull_requests/8"}
    file = next(one for one in kept.documents.values() if one.location == "files/docs/read.md")
    assert file.media_type == "text/markdown"
    assert file.metadata["url"] == "https://github.example/octo/demo/blob/main/docs/read.md"
    msgspec.json.encode(file.metadata)


def test_a_page_has_at_most_its_limit_and_the_cursor_is_small(server: GithubServer) -> None:
    fill(server, files=20, issues=10, pulls=10)

    kept = synced(server, limit=6)

    assert len(kept.documents) == 40
    assert max(len(page.documents) for page in kept.pages) == 6
    assert max(len(page.cursor) for page in kept.pages) < 1500


def test_300_issues_come_over_several_pages(server: GithubServer) -> None:
    for number in range(1, 331):
        server.tick(7)
        server.add_issue(number)
    server.tick(300)

    kept = synced(server, content=["issues"])

    assert len(kept.documents) == 330
    assert len(server.paths("/issues$")) <= 9


def test_300_issues_of_the_same_second_come_too(server: GithubServer) -> None:
    for number in range(1, 331):
        server.add_issue(number)
    server.tick(300)

    assert len(synced(server, content=["issues"]).documents) == 330


def test_200_pull_requests_come_over_several_pages(server: GithubServer) -> None:
    for number in range(1, 206):
        server.tick(7)
        server.add_issue(number, is_pull=True)
    server.tick(300)

    assert len(synced(server, content=["pull_requests"]).documents) == 205
    assert len(server.paths("/pulls$")) == 3


def test_comments_are_read_to_their_bound(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github_content, "MOST_COMMENTS", 200)
    server.add_issue(1)
    server.add_issue(2)
    for number in range(250):
        server.add_comment(1, f"comment {number}.")
    for number in range(150):
        server.add_comment(2, f"comment {number}.")
    server.tick()

    kept = synced(server, content=["issues"])

    assert "comment 199." in kept.texts["issues/1"]
    assert "comment 200." not in kept.texts["issues/1"]
    assert kept.documents["issues/1"].problem == "only the first 200 comments were read"
    assert "comment 149." in kept.texts["issues/2"]
    assert kept.documents["issues/2"].problem == ""


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

    assert sorted(kept.texts) == [
        f"files/docs/{name}" for name in ("a.md", "big.md", "data", "latin.md", "picture.png")
    ]
    by_name = {one.title: one for one in kept.documents.values()}
    assert "max_bytes: 100" in by_name["big.md"].problem
    assert (by_name["picture.png"].text, by_name["picture.png"].media_type) == ("", "application/octet-stream")
    assert (by_name["data"].text, by_name["data"].media_type) == ("", "application/octet-stream")
    assert by_name["latin.md"].text == "K\ufffdse"
    assert "UTF-8" in by_name["latin.md"].problem
    assert len(server.paths("/git/blobs/")) == 3, "neither the large file nor the picture was fetched"


def test_symbolic_links_and_submodules_are_no_documents(server: GithubServer) -> None:
    server.git.files["a.md"] = b"a"
    server.git.commit()
    entries = [
        {
            "path": "a.md",
            "mode": "100644",
            "type": "blob",
            "sha": "2e65efe2a145dda7ee51d1741299f848e5bf752e",
            "size": 1,
        },
        {"path": "link", "mode": "120000", "type": "blob", "sha": "0" * 40, "size": 9},
        {"path": "module", "mode": "160000", "type": "commit", "sha": "1" * 40},
    ]
    server.on("/git/trees/", Reply(body=msgspec.json.encode({"tree": entries, "truncated": False})))

    assert synced(server, content=["files"]).texts == {"files/a.md": "a"}


def test_another_branch_is_read_when_it_is_named(server: GithubServer) -> None:
    write(server, a="main")
    server.git.files = {"b.md": b"branch"}
    server.git.commit(branch="work/next", parent="")

    assert synced(server, content=["files"]).texts == {"files/a.md": "main"}
    assert synced(server, content=["files"], branch="work/next").texts == {"files/b.md": "branch"}


def test_an_empty_repository_has_no_files(server: GithubServer) -> None:
    server.add_issue(1)
    server.tick()

    assert set(synced(server).texts) == {"issues/1"}


def test_a_repository_without_issues_still_has_pull_requests(server: GithubServer) -> None:
    server.has_issues = False
    server.add_issue(1, is_pull=True)
    server.tick()

    assert set(synced(server, content=["issues", "pull_requests"]).texts) == {"pull_requests/1"}


# ---- later syncs -----------------------------------------------------------------------------------------------------


def test_an_unchanged_repository_costs_nothing_of_the_rate_limit(server: GithubServer) -> None:
    fill(server)
    kept = synced(server)
    used, asked = server.used, len(server.requests)

    synced(server, kept)

    assert [one.status for one in server.requests[asked:]] == [304] * 4
    assert server.used == used
    assert kept.pages[-1].documents == ()
    assert kept.pages[-1].deleted == ()
    assert [sum(page.seen for page in kept.pages)] == [15], "each item was looked at once"


def test_only_what_changed_is_fetched(server: GithubServer) -> None:
    fill(server)
    kept = synced(server)
    asked = len(server.requests)
    server.git.files["folder1/file1.md"] = b"changed"
    server.git.files["new.md"] = b"new"
    server.git.commit()
    server.tick()
    server.change_issue(2, title="Another title")
    server.tick()
    server.add_comment(7, "Once more.")
    server.tick(300)

    synced(server, kept)

    assert kept.texts["files/folder1/file1.md"] == "changed"
    assert kept.texts["files/new.md"] == "new"
    assert kept.texts["issues/2"].startswith("# Another title")
    assert "Once more." in kept.texts["pull_requests/7"]
    later = [one.path for one in server.requests[asked:]]
    assert len([one for one in later if "/git/blobs/" in one]) == 2
    changed = [one.location for page in kept.pages[1:] for one in page.documents]
    assert sorted(changed) == ["files/folder1/file1.md", "files/new.md", "issues/2", "pull_requests/7"]


def test_a_renamed_file_stays_the_same_document(server: GithubServer) -> None:
    write(server, z="moving", a="staying")
    kept = synced(server, content=["files"])
    before = kept.ids["files/z.md"]

    server.git.files = {"b/moved.md": b"moving", "a.md": b"staying"}
    server.git.commit()
    synced(server, kept, content=["files"])
    assert kept.ids == {"files/a.md": kept.ids["files/a.md"], "files/b/moved.md": before}

    server.git.files["z.md"] = b"moving"  # the old place, taken by another file with the same content
    server.git.commit()
    synced(server, kept, content=["files"])
    assert kept.ids["files/b/moved.md"] == before
    assert kept.ids["files/z.md"] != before


def test_a_copy_is_another_document(server: GithubServer) -> None:
    write(server, a="text")
    kept = synced(server, content=["files"])
    write(server, a="text", b="text")

    synced(server, kept, content=["files"])

    assert len(set(kept.ids.values())) == 2


def test_two_files_that_swap_their_places_are_both_changed(server: GithubServer) -> None:
    write(server, a="one", b="two")
    kept = synced(server, content=["files"])
    write(server, a="two", b="one")

    synced(server, kept, content=["files"])

    assert kept.texts == {"files/a.md": "two", "files/b.md": "one"}


def test_a_deleted_file_is_deleted(server: GithubServer) -> None:
    fill(server)
    kept = synced(server)
    gone = kept.ids["files/folder0/file3.md"]
    del server.git.files["folder0/file3.md"]
    server.git.commit()

    synced(server, kept)

    assert gone not in kept.documents
    assert len(kept.documents) == 14


def test_a_repository_that_was_emptied_has_no_documents_of_files(server: GithubServer) -> None:
    write(server, a="a", b="b")
    kept = synced(server, content=["files"])
    server.git.files.clear()
    server.git.commit()

    assert synced(server, kept, content=["files"]).documents == {}


def test_deleted_and_transferred_issues_go_within_a_day(server: GithubServer) -> None:
    for number in range(1, 6):
        server.tick()
        server.add_issue(number)
    server.tick(300)

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

    assert sorted(kept.texts) == ["issues/1", "issues/3", "issues/4"]


def test_an_issue_that_a_listing_leaves_out_is_not_deleted_when_it_is_there(server: GithubServer) -> None:
    server.add_issue(1)
    server.tick(300)
    with virtual_time() as time:
        kept = synced(server, content=["issues"])
        time.advance(90_000)
        server.on("sort=created", Reply(body=b"[]"))

        synced(server, kept, content=["issues"])

    assert set(kept.texts) == {"issues/1"}


def test_other_settings_are_applied_to_what_is_kept(server: GithubServer) -> None:
    fill(server)
    server.git.files["big.md"] = b"x" * 50
    server.git.commit()
    kept = synced(server, max_bytes=20)
    asked = len(server.paths("/git/blobs/"))

    synced(server, kept, content=["files", "pull_requests"], exclude=["folder2"], max_bytes=100)

    kinds = sorted({location.partition("/")[0] for location in kept.texts})
    assert kinds == ["files", "pull_requests"]
    assert not [location for location in kept.texts if "folder2" in location]
    assert kept.texts["files/big.md"] == "x" * 50
    assert len(server.paths("/git/blobs/")) == asked + 1, "what is kept was not fetched again"


# ---- changes while a sync is under way -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_a_sync_that_is_interrupted_after_every_page_keeps_the_same_documents(server: GithubServer, limit: int) -> None:
    fill(server)
    whole = synced(server)

    async def work() -> Kept:
        kept = Kept()
        while not kept.pages or not kept.pages[-1].is_last:
            source = connector(server)  # another process, which knows the cursor alone
            await sync(source, kept, limit=limit, most=1)
            await source.close()
        return kept

    assert run(work).documents == whole.documents


@pytest.mark.parametrize("lost_pages", [0, 1, 2, 3, 4, 5, 6, 7])
def test_a_page_that_was_read_and_not_kept_is_read_again(server: GithubServer, lost_pages: int) -> None:
    fill(server)
    whole = synced(server)

    async def work() -> Kept:
        source, kept = connector(server), Kept()
        await sync(source, kept, limit=2, most=lost_pages)
        await source.fetch(FetchRequest(kept.cursor, kept, 2))  # the process died before it was kept
        await source.close()
        again = connector(server)
        await sync(again, kept, limit=2)
        await again.close()
        return kept

    assert run(work).documents == whole.documents


@pytest.mark.parametrize("is_forced", [True, False])
def test_a_push_between_pages_begins_the_files_anew(server: GithubServer, is_forced: bool) -> None:
    write(server, a="a1", b="b1", c="c1", d="d1")

    async def work() -> Kept:
        source = connector(server, content=["files"])
        kept = await sync(source, Kept(), limit=2, most=1)
        old = server.git.head("main")
        server.git.files = {"a.md": b"a2", "c.md": b"c1", "e.md": b"e1"}
        server.git.commit(parent="" if is_forced else None)
        if is_forced:
            server.git.forget(old)
        await sync(source, kept, limit=2)
        await source.close()
        return kept

    kept = run(work)
    assert kept.texts == {"files/a.md": "a2", "files/c.md": "c1", "files/e.md": "e1"}


def test_a_push_while_a_page_is_read_leaves_nothing_of_the_old_commit(server: GithubServer) -> None:
    write(server, a="a1", b="b1", c="c1")
    old = server.git.head("main")

    def push(server: GithubServer) -> None:
        server.git.files = {"b.md": b"b2", "c.md": b"c1", "d.md": b"a1"}
        server.git.commit(parent="")
        server.git.forget(old)

    server.on("/git/blobs/", lambda server: None, push)

    assert synced(server, content=["files"]).texts == {"files/b.md": "b2", "files/c.md": "c1", "files/d.md": "a1"}


def test_an_issue_that_changes_between_pages_is_not_lost(server: GithubServer) -> None:
    for number in range(1, 151):
        server.tick()
        server.add_issue(number)

    def change(server: GithubServer) -> None:
        server.tick()
        server.change_issue(1, title="Changed early")  # moves to the end; all others move up
        server.change_issue(120, title="Changed late")
        del server.issues[50]

    server.on("/issues.*sort=updated", lambda server: None, change)
    server.tick(300)

    kept = synced(server, content=["issues"])

    assert kept.texts["issues/1"] == "# Changed early"
    assert kept.texts["issues/120"] == "# Changed late"
    assert len(kept.documents) == 150, "the deleted one was read before, and goes with the next look for lost ones"


def test_a_pull_request_that_changes_between_pages_is_not_lost(server: GithubServer) -> None:
    for number in range(1, 131):
        server.tick()
        server.add_issue(number, is_pull=True)

    def change(server: GithubServer) -> None:
        server.tick()
        server.change_issue(5, title="Changed meanwhile")

    server.on("/pulls.*sort=updated", lambda server: None, change)
    server.tick(300)

    kept = synced(server, content=["pull_requests"])
    synced(server, kept, content=["pull_requests"])

    assert len(kept.documents) == 130
    assert kept.texts["pull_requests/5"] == "# Changed meanwhile"


def test_an_issue_that_changes_twice_in_a_second_is_read_twice(server: GithubServer) -> None:
    server.add_issue(1, "First")
    kept = synced(server, content=["issues"])  # in the very second of the change
    server.change_issue(1, title="Second")
    server.tick(300)

    synced(server, kept, content=["issues"])

    assert kept.texts["issues/1"] == "# Second"


# ---- trees that GitHub does not list at once -------------------------------------------------------------------------


def tree_files() -> dict[str, bytes]:
    names = [f"{top}/{middle}/{n}.md" for top in ("a", "b") for middle in ("x", "y") for n in range(8)]
    return {name: name.encode() for name in (*names, "a.md", "a-b.md", "a0.md", "z.md")}


@pytest.mark.parametrize("limit", [100, 3])
def test_a_truncated_tree_is_read_folder_by_folder(server: GithubServer, limit: int) -> None:
    server.git.files = tree_files()
    server.git.commit()
    server.largest_tree = 12

    kept = synced(server, content=["files"], limit=limit)

    assert kept.texts == {f"files/{path}": path for path in tree_files()}
    order = [one.location for page in kept.pages for one in page.documents]
    assert order == sorted(order)


def test_renames_and_deletions_are_seen_in_a_truncated_tree(server: GithubServer) -> None:
    server.git.files = tree_files()
    server.git.commit()
    server.largest_tree = 12
    kept = synced(server, content=["files"])
    moved = kept.ids["files/b/y/3.md"]
    server.git.files["a/x/new.md"] = server.git.files.pop("b/y/3.md")
    del server.git.files["a/y/1.md"]
    server.git.commit()
    asked = len(server.paths("/git/blobs/"))

    synced(server, kept, content=["files"])

    assert kept.ids["files/a/x/new.md"] == moved
    assert len(kept.documents) == len(tree_files()) - 1
    assert len(server.paths("/git/blobs/")) == asked + 1


def test_a_folder_with_more_entries_than_github_lists_is_a_permanent_failure(server: GithubServer) -> None:
    write(server, a="a")
    tree = Reply(body=b'{"tree": [], "truncated": true}')
    server.on("/git/trees/", *([tree] * 4))

    failed = failure(server)

    assert failed.failure_type is FailureType.PERMANENT
    assert "more entries than GitHub lists" in str(failed)


def test_listings_beyond_the_bound_are_dropped(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github_content.CommitTree, "MOST_ENTRIES", 10)
    server.git.files = tree_files()
    server.git.commit()
    server.largest_tree = 12

    async def work() -> int:
        source = connector(server, content=["files"])
        await sync(source, Kept(), limit=3, most=5)
        held = sum(map(len, source._tree._listings.values()))
        await source.close()
        return held

    assert run(work) <= 10


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_permanent_and_told_so(server: GithubServer) -> None:
    server.token = "another"

    failed = failure(server, token=CANARY)

    assert failed.failure_type is FailureType.PERMANENT
    assert "the token is not valid" in str(failed)
    assert server.requests[0].headers["authorization"] == f"Bearer {CANARY}"


@pytest.mark.parametrize("right", ["contents", "issues", "pulls"])
def test_a_token_without_a_right_is_told_what_it_needs(server: GithubServer, right: str) -> None:
    fill(server)
    server.token = CANARY
    server.rights.remove(right)

    failed = failure(server, token=CANARY)

    assert failed.failure_type is FailureType.PERMANENT
    assert "read access to Contents, Issues and Pull requests" in str(failed)


def test_a_repository_that_nobody_sees_is_told_with_what_to_check(server: GithubServer) -> None:
    server.token = "secret"

    without, with_token = failure(server), failure(server, token="secret", repository="octo/other")

    assert (without.failure_type, with_token.failure_type) == (FailureType.PERMANENT, FailureType.PERMANENT)
    assert "a private one needs the setting `token`, such as env:NAME" in str(without)
    assert "check `repository: octo/other`" in str(with_token)


def test_a_branch_that_is_not_there_is_permanent(server: GithubServer) -> None:
    write(server, a="a")

    failed = failure(server, branch="mian")

    assert failed.failure_type is FailureType.PERMANENT
    assert "no branch mian" in str(failed)


def test_a_repository_that_moved_is_permanent_and_names_the_new_one(server: GithubServer) -> None:
    server.moved_to = "octo/renamed"

    failed = failure(server)

    assert failed.failure_type is FailureType.PERMANENT
    assert "has moved to octo/renamed; set `repository: octo/renamed`" in str(failed)


def test_a_spent_rate_limit_waits_until_it_is_reset(server: GithubServer) -> None:
    fill(server)
    server.limit = 8
    kept = Kept()

    with virtual_time() as time:
        server.resets_at = int(time.wall()) + 1234
        failed = failure(server, kept)
        assert failed.failure_type is FailureType.RATE_LIMITED
        assert failed.retry_after == 1234
        assert kept.documents, "what was read before is kept"
        server.used = 0
        server.limit = 100
        synced(server, kept)

    assert len(kept.documents) == 15
    assert len(server.paths("/git/blobs/", status=200)) == 7, "no blob twice"


@pytest.mark.parametrize(
    ("reply", "seconds"),
    [
        (refusal(403, SECONDARY_MESSAGE, retry_after="17"), 17),
        (refusal(429, SECONDARY_MESSAGE, retry_after="120"), 120),
        (refusal(403, SECONDARY_MESSAGE), 60),
        (refusal(403, "You have triggered an abuse detection mechanism."), 60),
        (refusal(429, "slow down"), 60),
    ],
)
def test_a_secondary_rate_limit_is_waited_for(server: GithubServer, reply: Reply, seconds: float) -> None:
    server.on("/repos/octo/demo$", reply)

    failed = failure(server)

    assert failed.failure_type is FailureType.RATE_LIMITED
    assert failed.retry_after == seconds


def test_a_403_without_any_sign_of_a_limit_is_permanent(server: GithubServer) -> None:
    """The control of the tests above."""
    server.on("/repos/octo/demo$", refusal(403, "Repository access blocked"))

    assert failure(server).failure_type is FailureType.PERMANENT


TRANSIENT = {
    "500": Reply(500, b"oops"),
    "502": refusal(502, "Bad gateway"),
    "503": refusal(503, "Unavailable", retry_after="9"),
    "408": Reply(408),
    "cut": Reply(body=b"x" * 100, cut=True),
    "too short": Reply(body=b"{}", length=500),
    "garbage": Reply(body=b"<html>Sign in</html>"),
    "other JSON": Reply(body=b"[1, 2]"),
    "not UTF-8": Reply(body=b'{"full_name": "\xff"}'),
    "broken gzip": Reply(body=b"no gzip", headers={"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("reply", TRANSIENT.values(), ids=TRANSIENT)
def test_what_a_sick_server_does_is_transient(server: GithubServer, reply: Reply) -> None:
    server.on("/repos/octo/demo$", reply)

    failed = failure(server)

    assert failed.failure_type is FailureType.TRANSIENT


@pytest.mark.parametrize("reply", [refusal(451, "Unavailable due to a notice."), Reply(422), Reply(400)])
def test_other_refusals_are_permanent(server: GithubServer, reply: Reply) -> None:
    server.on("/repos/octo/demo$", reply)

    assert failure(server).failure_type is FailureType.PERMANENT


def test_a_server_that_is_not_there_is_transient(server: GithubServer) -> None:
    server.close()

    failed = failure(server)

    assert failed.failure_type is FailureType.TRANSIENT
    assert "cannot be reached" in str(failed)


def test_a_body_that_never_ends_is_transient(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github_api, "WHOLE_S", 0.2)
    server.on("/repos/octo/demo$", Reply(body=b"x" * 100, drip=True))

    failed = failure(server)

    assert failed.failure_type is FailureType.TRANSIENT
    assert "in time" in str(failed)


@pytest.mark.parametrize("is_packed", [True, False])
def test_an_answer_is_bounded_while_it_is_read(
    server: GithubServer, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    """Packed, ten megabytes are ten kilobytes on the wire."""
    monkeypatch.setattr(github_api, "LARGEST_JSON", 5000)
    body = b" " * 10_000_000 + b"{}"
    server.on("/repos/octo/demo$", Reply(body=body, length=None if is_packed else len(body)))

    failed = failure(server)

    assert failed.failure_type is FailureType.PERMANENT
    assert "more than 5000 bytes" in str(failed)


def test_a_certificate_is_checked_and_ca_file_names_its_authority(tmp_path: Path) -> None:
    server = GithubServer(tmp_path, certificate=CERTIFICATE)
    write(server, a="a")
    try:
        refused = failure(server)
        assert refused.failure_type is FailureType.PERMANENT
        assert "set `ca_file:`" in str(refused)
        assert set(synced(server, ca_file=str(CERTIFICATE)).texts) == {"files/a.md"}
        missing = failure(server, ca_file=str(tmp_path / "none.pem"))
        assert "`ca_file:`" in str(missing)
        assert missing.failure_type is FailureType.PERMANENT
    finally:
        server.close()


def test_a_blob_that_fails_for_good_does_not_stop_the_others(server: GithubServer) -> None:
    write(server, a="a", b="b", c="c")
    server.on("/git/blobs/", lambda server: None, refusal(451, "Blocked"))

    kept = synced(server, content=["files"])

    assert set(kept.texts) == {"files/a.md", "files/c.md"}
    assert list(kept.failures) == ["files/b.md"]
    assert kept.pages[-1].is_last
    synced(server, kept, content=["files"])
    assert set(kept.texts) == {"files/a.md", "files/c.md"}, "the file's own job reads it, not the next sync"


@pytest.mark.parametrize("reply", [Reply(502), Reply(body=b"other content"), Reply(body=b"x", cut=True)])
def test_a_blob_that_alone_fails_is_an_item_of_its_own(server: GithubServer, reply: Reply) -> None:
    write(server, a="a" * 20, b="b" * 20)
    server.on("/git/blobs/", reply)

    kept = synced(server, content=["files"])

    assert set(kept.texts) == {"files/b.md"}
    failed = kept.failures["files/a.md"]
    assert isinstance(failed, SourceError)
    assert failed.failure_type in (FailureType.TRANSIENT, FailureType.PERMANENT)


def test_a_blob_that_fails_with_the_whole_server_is_no_item_failure(server: GithubServer) -> None:
    write(server, a="a", b="b", c="c")
    server.on("/git/blobs/", lambda server: None, *[Reply(503)] * 9)
    server.on("/git/ref/", lambda server: None, lambda server: None, *[Reply(503)] * 9)
    kept = Kept()

    failed = failure(server, kept, content=["files"])

    assert failed.failure_type is FailureType.TRANSIENT
    assert kept.failures == {}
    assert set(kept.texts) == {"files/a.md"}, "what was read before the outage is kept"


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_comments_that_fail_are_the_issue_s_own_failure(server: GithubServer, limit: int) -> None:
    fill(server, files=0, pulls=0)
    server.on("/issues/3/comments", *[refusal(451, "Blocked")] * 9)

    kept = synced(server, content=["issues"], limit=limit)

    assert list(kept.failures) == ["issues/3"]
    assert len(kept.documents) == 4


def test_a_server_that_gives_another_etag_each_time_does_not_hide_a_failure(server: GithubServer) -> None:
    """The control of the rule that progress is kept: an ETag is none."""
    write(server, a="a")
    replies = [Reply(body=b'{"object": {"sha": "%s"}}' % (b"1" * 40), headers={"ETag": str(n)}) for n in range(20)]
    server.on("/git/ref/", *replies)

    failed = failure(server, content=["files"])

    assert "is not there any more" in str(failed)
    assert len(server.paths("/git/ref/")) < 10


# ---- one item, and the test of a source ------------------------------------------------------------------------------


def test_one_item_is_fetched_by_itself(server: GithubServer) -> None:
    fill(server)
    kept = synced(server)

    async def work() -> list[Document | None]:
        source = connector(server)
        places = ("files/folder1/file1.md", "issues/1", "pull_requests/7")
        found = [await source.fetch_item(place, kept) for place in places]
        gone = ("files/none.md", "issues/99", "issues/7", "pull_requests/1", "issues/x", "nothing/1")
        assert [await source.fetch_item(place, kept) for place in gone] == [None] * 6
        await source.close()
        return found

    for one in run(work):
        assert one is not None
        assert one == kept.documents[one.id]


def test_the_test_of_a_source_tells_what_was_found(server: GithubServer) -> None:
    fill(server)
    commit = server.git.head("main")

    async def test(**settings: Any) -> str:
        source = connector(server, **settings)
        try:
            return await source.test()
        finally:
            await source.close()

    said = run(test)
    assert said == (
        f"octo/demo: branch main at {commit[:12]}, issues readable, pull requests readable; 4996 requests left"
    )
    server.has_issues = False
    assert run(lambda: test(content=["issues"])).startswith("octo/demo: issues disabled")
    server.rights.clear()
    with pytest.raises(SourceError, match="Pull requests"):
        run(lambda: test(content=["pull_requests"]))


# ---- the token -------------------------------------------------------------------------------------------------------


def test_the_token_stays_in(server: GithubServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fill(server)
    server.token = CANARY
    kept = synced(server, token=CANARY)
    server.echoes_token, server.token = True, "another"

    failed = failure(server, kept, token=CANARY)

    assert "Bad credentials Bearer …" in str(failed), "the server repeated it, and it was taken out"
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

        failed = failure(server, token=CANARY)

        assert failed.failure_type is FailureType.PERMANENT
        assert other.requests == []
    finally:
        other.close()


def test_a_temporary_redirect_within_the_server_is_followed(server: GithubServer) -> None:
    """The control of the test above."""
    write(server, a="a")
    server.on("/repos/octo/demo$", Reply(307, b"{}", {"Location": "/repos/octo/demo?again"}))

    assert synced(server, token=CANARY, content=["files"]).texts == {"files/a.md": "a"}


def test_redirects_in_a_circle_end(server: GithubServer) -> None:
    there = Reply(302, b"{}", {"Location": "/repos/octo/demo"})
    server.on("/repos/octo/demo$", *[there] * 9)

    assert failure(server).failure_type is FailureType.PERMANENT
    assert len(server.requests) == 3


@pytest.mark.parametrize("token", ["", "with space", "line\nbreak", "ümlaut"])
def test_what_is_no_token_is_refused_before_it_is_sent(server: GithubServer, token: str) -> None:
    async def work() -> None:
        given = {"repository": "octo/demo", "base_url": server.url, "token": "env:TOKEN"}
        source = GithubRepository(SourceContext("demo", given, Path("/"), lambda reference: token))
        await source.fetch(FetchRequest("", Kept()))

    with pytest.raises(SourceError, match="store the token alone") as failed:
        run(work)

    assert failed.value.failure_type is FailureType.PERMANENT
    assert not token or token not in str(failed.value)
    assert server.requests == []


def test_no_proxy_of_the_environment_is_used(server: GithubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    write(server, a="a")

    assert synced(server, content=["files"]).texts == {"files/a.md": "a"}


# ---- bounds of a page ------------------------------------------------------------------------------------------------


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


class PagedByNumbers(GithubRepository):
    """Reads issues page by page in the order of their changes, as one would at first."""

    async def _issues(self, draft: Any) -> None:
        listing: list[Conversation] = []
        while True:
            query = listing_query("updated", "asc", page=draft.state.page)
            answer = await self._api.get("/issues", query)
            listing += self._api.decoded(answer, list[Conversation])
            draft.state.page += 1
            if not answer.has_next:
                break
        draft.limit = 1000
        await self._add_conversations(draft, "issues", listing, answer)
        draft.state.phase = "done"


def test_the_change_between_pages_loses_an_issue_where_pages_are_numbered(server: GithubServer) -> None:
    for number in range(1, 151):
        server.tick()
        server.add_issue(number)

    def change(server: GithubServer) -> None:
        server.tick()
        server.change_issue(1, title="Changed early")

    server.on("/issues.*sort=updated", lambda server: None, change)
    server.tick(300)

    async def work() -> Kept:
        given = {"repository": "octo/demo", "base_url": server.url, "content": ["issues"]}
        source = PagedByNumbers(SourceContext("demo", given, Path("/"), lambda reference: ""))
        kept = await sync(source, Kept(), limit=1000)
        await source.close()
        return kept

    assert "issues/101" not in run(work).texts


def test_without_the_check_of_hashes_other_content_would_be_kept(
    server: GithubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(github_content, "_blob_sha", lambda body, like: like)
    write(server, a="a" * 20)
    server.on("/git/blobs/", Reply(body=b"other content"))

    assert synced(server, content=["files"]).texts == {"files/a.md": "other content"}


def test_without_the_look_for_a_push_a_sync_mixes_commits(
    server: GithubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(server, a="a1", b="b1", c="c1", d="d1")

    async def work() -> Kept:
        source = connector(server, content=["files"])
        kept = await sync(source, Kept(), limit=2, most=1)
        server.git.files = {"a.md": b"a2"}
        server.git.commit(parent="")

        async def never(state: object) -> bool:
            return False

        monkeypatch.setattr(source, "_head", never)
        await sync(source, kept, limit=2)
        await source.close()
        return kept

    assert set(run(work).texts) == {"files/a.md", "files/b.md", "files/c.md", "files/d.md"}


def test_without_the_look_for_moves_a_renamed_file_is_another_document(
    server: GithubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: object, draft: object, entry: object) -> None:
        return None

    monkeypatch.setattr(GithubRepository, "_moved_from", never)
    write(server, a="moving")
    kept = synced(server, content=["files"])
    before = kept.ids["files/a.md"]
    server.git.files = {"b.md": b"moving"}
    server.git.commit()

    assert synced(server, kept, content=["files"]).ids["files/b.md"] != before
