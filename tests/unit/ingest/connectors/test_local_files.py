"""`local_files`: what is read, what is told apart, and what is never done to the documents that are kept."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reefknot.core.failure import FailureType
from reefknot.errors import ParameterError, SourceError, StalePositionError
from reefknot.ingest.connectors import folders, local_files
from reefknot.ingest.connectors.local_files import LocalFiles
from reefknot.ingest.port import Connector, ConnectorFactory, FetchRequest, Position, WatchingConnector
from tests.unit.ingest.connectors.memory_sink import MemorySink, Synced, context, peak_of, put, sync

LONG_AGO = -(10**15)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as if they had been written long ago."""
    monkeypatch.setattr(folders, "SETTLED_NS", LONG_AGO)


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names that this user may not open, whoever it is: permissions do not hold root back."""
    names: set[str] = set()
    opened = os.open

    def refusing(path: Any, *arguments: Any, **options: Any) -> int:
        if os.path.basename(os.fspath(path)) in names:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    yield names
    names.clear()


def run(connector: Connector, sink: MemorySink, **options: Any) -> Synced:
    return asyncio.run(sync(connector, sink, **options))


def source(root: Path, **settings: Any) -> LocalFiles:
    return LocalFiles(context(root, **settings))


def texts(sink: MemorySink) -> dict[str, str]:
    return {location: document.text for location, document in sorted(sink.by_location().items())}


def test_the_class_is_a_factory_of_connectors_that_watch(root: Path) -> None:
    factory: ConnectorFactory = LocalFiles
    watching: WatchingConnector = LocalFiles(context(root))

    assert isinstance(factory(context(root)), LocalFiles)
    assert watching is not None


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_files_are_read_in_the_order_of_their_locations_with_name_size_type_and_time(root: Path) -> None:
    for location in ("a/b.txt", "a.txt", "a-b.txt", "a0.txt", "b.txt", "a/a/x.txt"):
        put(root, location, location)
    os.utime(root / "a.txt", (1_700_000_000, 1_700_000_000.5))
    sink = MemorySink()

    pages = run(source(root), sink, limit=2)

    assert pages.locations == sorted(texts(sink)) == ["a-b.txt", "a.txt", "a/a/x.txt", "a/b.txt", "a0.txt", "b.txt"]
    assert sum(page.seen for page in pages) == 6
    document = sink.by_location()["a.txt"]
    assert (document.title, document.text, document.media_type) == ("a.txt", "a.txt", "text/plain")
    assert document.metadata == {"name": "a.txt", "size": 5}
    assert document.modified_at == 1_700_000_000_500
    assert len(document.fingerprint) == 64


@pytest.mark.usefixtures("settled")
def test_a_second_sync_reads_nothing_and_a_third_what_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "a.txt", "one")
    put(root, "b.txt", "two")
    sink = MemorySink()
    connector = source(root)
    run(connector, sink)
    ids = sink.ids()
    monkeypatch.setattr(folders.OpenFolder, "read", lambda self, parts: pytest.fail(f"read {parts}"))
    assert run(connector, sink).documents == []
    monkeypatch.undo()

    put(root, "b.txt", "TWO")
    pages = run(source(root), sink)

    assert pages.locations == ["b.txt"]
    assert texts(sink) == {"a.txt": "one", "b.txt": "TWO"}
    assert sink.ids() == ids


@pytest.mark.usefixtures("settled")
def test_a_change_that_keeps_size_and_time_of_modification_is_seen(root: Path) -> None:
    file = put(root, "a.txt", "one")
    sink = MemorySink()
    run(source(root), sink)
    times = file.stat()

    file.write_text("two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    run(source(root), sink)

    assert texts(sink) == {"a.txt": "two"}


@pytest.mark.parametrize("is_racy", [True, False])
def test_a_change_within_the_granularity_of_the_times_is_seen(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_racy: bool
) -> None:
    """A file system whose times tick every hour. The control trusts the times of a file that changed just now."""
    precise = folders.times_of

    def coarse(about: os.stat_result) -> str:
        return f"{about.st_size}-hour-hour-{about.st_ino}"

    monkeypatch.setattr(folders, "times_of", coarse)
    monkeypatch.setattr(local_files, "times_of", coarse)
    if not is_racy:
        monkeypatch.setattr(folders, "SETTLED_NS", LONG_AGO)
    file = put(root, "a.txt", "one")
    sink = MemorySink()
    run(source(root), sink)

    file.write_text("two")
    run(source(root), sink)

    assert texts(sink) == {"a.txt": "two" if is_racy else "one"}
    assert precise(file.stat())


def test_a_file_that_changes_while_it_is_read_is_read_again_next_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SETTLED_NS", 0)
    file = put(root, "log.txt", "1")
    real = os.read
    changes = iter(range(2, 100))

    def reading(descriptor: int, number: int) -> bytes:
        content = real(descriptor, number)
        if content:
            file.write_text(str(next(changes)) * 3)
        return content

    monkeypatch.setattr(os, "read", reading)
    sink = MemorySink()
    run(source(root), sink)
    monkeypatch.setattr(os, "read", real)
    file.write_text("end")
    run(source(root), sink)

    assert texts(sink) == {"log.txt": "end"}


def test_a_file_that_vanishes_before_it_is_read_is_no_document(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "a.txt", "a")
    put(root, "b.txt", "b")
    real = folders.OpenFolder.read

    def reading(self: folders.OpenFolder, parts: tuple[str, ...]) -> Any:
        (root / "b.txt").unlink(missing_ok=True)
        return real(self, parts)

    monkeypatch.setattr(folders.OpenFolder, "read", reading)
    sink = MemorySink()
    pages = run(source(root), sink)

    assert texts(sink) == {"a.txt": "a"}
    assert pages.failures == {}


@pytest.mark.parametrize(
    ("content", "text", "problem"),
    [
        ("Grüße".encode(), "Grüße", ""),
        (b"\xef\xbb\xbfbom", "bom", ""),
        ("Grüße".encode("utf-16"), "Grüße", ""),
        (b"\xfe\xff" + "Grüße".encode("utf-16-be"), "Grüße", ""),
        ("Grüße".encode("utf-32"), "Grüße", ""),
        ("ein paar Grüße".encode("latin-1"), "ein paar Gr��e", "not UTF-8 from byte 12 on"),
        ("a\0b".encode("utf-16"), "a�b", ""),
        (b"\xff\xfea\0b", "a�", "not UTF-16-LE from byte 5 on"),
    ],
)
def test_text_is_decoded_by_its_mark_or_as_utf_8(root: Path, content: bytes, text: str, problem: str) -> None:
    put(root, "a.txt", content)
    sink = MemorySink()
    run(source(root), sink)
    document = sink.by_location()["a.txt"]

    assert document.text == text
    assert document.problem.startswith(problem)
    assert bool(document.problem) is bool(problem)


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n\0\0", bytes(range(1, 256)) * 9, b"GIF89a\xff\xff\xff\xff\xff\xff\xff"]
)
def test_a_binary_file_is_kept_without_text_and_is_found_by_its_name(root: Path, content: bytes) -> None:
    put(root, "holiday.png", content)
    sink = MemorySink()
    run(source(root), sink)
    document = sink.by_location()["holiday.png"]

    assert (document.title, document.text, document.problem) == ("holiday.png", "", "")
    assert document.media_type == "image/png"
    assert document.metadata["size"] == len(content)
    assert document.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "media_type"),
    [
        ("a.md", b"# x", "text/markdown"),
        ("a.json", b"{}", "application/json"),
        ("a.svg", b"<svg/>", "image/svg+xml"),
        ("a.ts", b"let x", "text/plain"),
        ("a.txt", b"\0", "application/octet-stream"),
        ("a.tar.gz", b"\x1f\x8b\0", "application/octet-stream"),
        ("noname", b"x", "text/plain"),
    ],
)
def test_the_media_type_fits_name_and_content(root: Path, name: str, content: bytes, media_type: str) -> None:
    put(root, name, content)
    sink = MemorySink()
    run(source(root), sink)

    assert sink.by_location()[name].media_type == media_type


@pytest.mark.usefixtures("settled")
def test_a_file_that_is_too_large_is_kept_without_its_text_until_the_limit_is_raised(root: Path) -> None:
    put(root, "a.txt", "x" * 100)
    put(root, "b.txt", "y" * 99)
    sink = MemorySink()
    run(source(root, max_bytes=99), sink)
    large = sink.by_location()["a.txt"]

    assert (large.text, large.fingerprint, large.metadata["size"]) == ("", "", 100)
    assert "it has 100 bytes, and max_bytes is 99; raise max_bytes" in large.problem
    assert run(source(root, max_bytes=100), sink).locations == ["a.txt"]
    assert sink.by_location()["a.txt"].text == "x" * 100


def test_a_page_ends_when_it_has_much_content(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "PAGE_CHARACTERS", 1000)
    monkeypatch.setattr(local_files, "READ_BYTES", 500)
    for number in range(10):
        put(root, f"{number}.txt", "x" * 400)
    sink = MemorySink()

    pages = run(source(root), sink)

    assert len(sink.documents) == 10
    assert max(len(page.documents) for page in pages) <= 4


def test_a_sync_that_is_interrupted_continues_behind_its_last_page_in_another_process(root: Path) -> None:
    for number in range(30):
        put(root, f"{number % 3}/{number:02}.txt", str(number))
    sink = MemorySink()

    async def pages() -> list[str]:
        read: list[str] = []
        for _ in range(50):
            request = FetchRequest(sink.place.cursor, sink, 4)
            page = await source(root).fetch(request)
            await sink.keep("s", page, after=sink.place)
            read += [document.location for document in page.documents]
            if page.is_last:
                return read
        raise AssertionError

    read = asyncio.run(pages())

    assert read == sorted(read)
    assert len(read) == len(sink.documents) == 30


async def test_a_page_that_was_overtaken_is_fetched_again(root: Path) -> None:
    for number in range(6):
        put(root, f"{number}.txt", str(number))
    sink = MemorySink()
    connector = source(root)

    start = sink.place
    first = await connector.fetch(FetchRequest("", sink, 2))
    await sink.keep("s", first, after=start)
    second = await connector.fetch(FetchRequest(first.cursor, sink, 2))
    with pytest.raises(StalePositionError):
        await sink.keep("s", second, after=start)
    again = await connector.fetch(FetchRequest(first.cursor, sink, 2))
    assert again.documents == second.documents
    run(connector, sink, limit=2)
    assert sorted(texts(sink).values()) == list("012345")


@pytest.mark.usefixtures("settled")
def test_a_forgotten_cursor_has_every_file_read_again_once(root: Path) -> None:
    for number in range(9):
        put(root, f"{number}.txt", str(number))
    sink = MemorySink()
    run(source(root), sink)
    ids = sink.ids()
    sink.place = Position()

    assert len(run(source(root), sink, limit=2).documents) == 9
    assert run(source(root), sink).documents == []
    assert sink.ids() == ids


def test_a_cursor_that_cannot_be_read_begins_anew(root: Path) -> None:
    put(root, "a.txt", "a")
    sink = MemorySink()

    page = asyncio.run(source(root).fetch(FetchRequest("nonsense", sink)))

    assert [document.location for document in page.documents] == ["a.txt"]


def test_names_that_are_no_text_are_read_and_found_again(root: Path) -> None:
    for name in (b"a\xffb", b"new\nline", b"back\\slash", b"x" * 255, "ü".encode()):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_text("x")
    sink = MemorySink()
    connector = source(root)
    run(connector, sink)

    assert len(sink.documents) == 5
    for location in texts(sink):
        assert location.encode().decode() == location
        found = asyncio.run(connector.fetch_item(location, sink))
        assert found is not None
        assert found.id == sink.ids()[location]
    assert run(connector, sink).deleted == []


# ---- moves -----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_moved_keeps_its_identity(root: Path) -> None:
    put(root, "z/a.txt", "content")
    sink = MemorySink()
    run(source(root), sink)
    before = sink.ids()["z/a.txt"]

    (root / "b").mkdir()
    (root / "z/a.txt").rename(root / "b/c.txt")
    pages = run(source(root), sink)

    assert sink.ids() == {"b/c.txt": before}
    assert pages.deleted == []


def test_a_moved_folder_keeps_the_identity_of_every_file_in_it(root: Path) -> None:
    for number in range(20):
        put(root, f"z/x/{number}.txt", f"content {number}")
    sink = MemorySink()
    run(source(root), sink)
    before = sink.ids()

    (root / "z").rename(root / "a")
    run(source(root), sink, limit=3)

    assert sink.ids() == {"a" + location[1:]: one for location, one in before.items()}


def test_copies_are_documents_of_their_own(root: Path) -> None:
    put(root, "a.txt", "same")
    sink = MemorySink()
    run(source(root), sink)
    before = sink.ids()["a.txt"]

    for name in ("b.txt", "c.txt"):
        shutil.copy(root / "a.txt", root / name)
    run(source(root), sink)
    assert len(set(sink.ids().values())) == 3
    assert sink.ids()["a.txt"] == before

    (root / "a.txt").rename(root / "d.txt")
    shutil.copy(root / "b.txt", root / "e.txt")
    run(source(root), sink)
    assert len(set(sink.ids().values())) == len(sink.ids()) == 4
    assert before in (sink.ids()["d.txt"], sink.ids()["e.txt"])


@pytest.mark.parametrize("tells_generations", [True, False])
def test_a_rename_together_with_an_edit_keeps_the_identity_where_inodes_can_be_told_apart(
    root: Path, monkeypatch: pytest.MonkeyPatch, tells_generations: bool
) -> None:
    monkeypatch.setattr(folders, "generation_of", lambda descriptor: "7" if tells_generations else "")
    put(root, "a.txt", "first")
    put(root, "other.txt", "other")
    sink = MemorySink()
    run(source(root), sink)
    before = sink.ids()["a.txt"]

    (root / "a.txt").rename(root / "b.txt")
    (root / "b.txt").write_text("first, and more")
    run(source(root), sink)

    assert (sink.ids()["b.txt"] == before) is tells_generations
    assert set(sink.ids()) == {"b.txt", "other.txt"}


def test_a_new_file_with_the_inode_of_a_deleted_one_is_another_document(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = iter("12345678")
    monkeypatch.setattr(folders, "generation_of", lambda descriptor: next(generations))
    put(root, "a.txt", "first")
    sink = MemorySink()
    run(source(root), sink)
    before = sink.ids()["a.txt"]

    (root / "a.txt").unlink()
    put(root, "b.txt", "unrelated")
    run(source(root), sink)

    assert before not in sink.ids().values()
    assert set(sink.ids()) == {"b.txt"}


def test_an_empty_file_is_not_held_for_another_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "generation_of", lambda descriptor: "")
    put(root, "a.txt", "")
    sink = MemorySink()
    run(source(root), sink)
    before = sink.ids()["a.txt"]

    (root / "a.txt").unlink()
    put(root, "b.txt", "")
    run(source(root), sink)

    assert sink.ids()["b.txt"] != before


@pytest.mark.parametrize("rounds", [local_files.MOST_ROUNDS, 1])
def test_a_file_that_moves_backwards_during_a_scan_keeps_its_identity(
    root: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """From where the scan has not been to where it will not come again. The control prunes after one round."""
    monkeypatch.setattr(local_files, "MOST_ROUNDS", rounds)
    for number in range(40):
        put(root, f"m/{number:02}.txt", f"content {number}")
    put(root, "z.txt", "moving")
    sink = MemorySink()
    run(source(root), sink)
    before = sink.ids()["z.txt"]
    for number in range(40):
        put(root, f"m/{number:02}.txt", f"new {number}")

    def move() -> None:
        if (root / "z.txt").exists():
            (root / "z.txt").rename(root / "a.txt")

    pages = run(source(root), sink, limit=10, between=move)

    assert (sink.ids().get("a.txt") == before) is (rounds > 1)
    assert (before in pages.deleted) is (rounds == 1)


# ---- deletions -------------------------------------------------------------------------------------------------------


def test_what_is_gone_or_not_wanted_any_more_is_deleted(root: Path) -> None:
    for location in ("a.txt", "b.txt", "x/c.txt", "x/d.md"):
        put(root, location, location)
    sink = MemorySink()
    run(source(root), sink)
    ids = sink.ids()

    (root / "a.txt").unlink()
    pages = run(source(root, exclude=["x/*.txt"]), sink)

    assert sorted(pages.deleted) == sorted([ids["a.txt"], ids["x/c.txt"]])
    assert set(sink.ids()) == {"b.txt", "x/d.md"}


def test_a_folder_that_is_missing_is_an_error_and_deletes_nothing(root: Path) -> None:
    put(root, "a.txt", "a")
    sink = MemorySink()
    run(source(root), sink)
    root.rename(root.with_name("elsewhere"))

    with pytest.raises(SourceError, match=r"does not exist: create it, mount its disk, or correct `path`") as caught:
        run(source(root), sink)

    assert caught.value.failure_type is FailureType.PERMANENT
    assert len(sink.documents) == 1
    for call in (source(root).test(), source(root).fetch_item("a.txt", sink)):
        with pytest.raises(SourceError, match="does not exist"):
            asyncio.run(call)


def test_a_path_to_a_file_is_an_error(root: Path) -> None:
    put(root, "a.txt", "a")

    with pytest.raises(SourceError, match="is no folder"):
        run(source(root / "a.txt"), MemorySink())


def test_a_folder_that_may_not_be_read_is_a_permanent_failure(root: Path, forbidden: set[str]) -> None:
    forbidden.add(root.name)

    with pytest.raises(SourceError, match="may not be read by this user") as caught:
        run(source(root), MemorySink())

    assert caught.value.failure_type is FailureType.PERMANENT


def test_an_empty_mount_point_does_not_delete_the_documents_of_its_disk(root: Path) -> None:
    """A disk that is not mounted leaves an empty folder, with another identity than the disk's."""
    put(root, "a.txt", "a")
    sink = MemorySink()
    run(source(root), sink)
    root.rename(root.with_name("disk"))
    root.mkdir()

    with pytest.raises(SourceError, match=r"mount its disk.*allow_empty: true") as caught:
        run(source(root), sink)
    assert caught.value.failure_type is FailureType.PERMANENT
    assert set(sink.ids()) == {"a.txt"}

    root.rmdir()
    root.with_name("disk").rename(root)
    put(root, "b.txt", "b")
    run(source(root), sink)
    assert set(sink.ids()) == {"a.txt", "b.txt"}


def test_an_emptied_folder_deletes_its_documents(root: Path) -> None:
    put(root, "a.txt", "a")
    sink = MemorySink()
    run(source(root), sink)
    (root / "a.txt").unlink()

    run(source(root), sink)

    assert sink.documents == {}


def test_an_empty_folder_in_the_place_of_another_is_accepted_when_it_is_allowed(root: Path) -> None:
    put(root, "a.txt", "a")
    sink = MemorySink()
    run(source(root), sink)
    root.rename(root.with_name("old"))
    root.mkdir()

    run(source(root, allow_empty=True), sink)

    assert sink.documents == {}


def test_a_folder_that_is_unmounted_between_two_pages_deletes_nothing(root: Path) -> None:
    for number in range(10):
        put(root, f"{number}.txt", str(number))
    sink = MemorySink()
    run(source(root), sink)

    def unmount() -> None:
        if not root.with_name("disk").exists():
            root.rename(root.with_name("disk"))
            root.mkdir()

    with pytest.raises(SourceError, match="mount its disk"):
        run(source(root), sink, limit=2, between=unmount)

    assert len(sink.documents) == 10


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def test_a_file_that_may_not_be_read_fails_alone_and_its_document_is_kept(root: Path, forbidden: set[str]) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        put(root, name, name)
    sink = MemorySink()
    run(source(root), sink)
    put(root, "b.txt", "changed")
    forbidden.add("b.txt")

    pages = run(source(root), sink)

    (failure,) = [failure for page in pages for failure in page.failures]
    assert isinstance(failure.error, SourceError)
    assert failure.error.failure_type is FailureType.PERMANENT
    assert "b.txt: permission denied: allow this user to read it, or `exclude` it" in str(failure.error)
    assert failure.version
    assert texts(sink)["b.txt"] == "b.txt"
    assert pages.deleted == []
    with pytest.raises(SourceError, match="permission denied"):
        asyncio.run(source(root).fetch_item("b.txt", sink))
    forbidden.clear()
    found = asyncio.run(source(root).fetch_item("b.txt", sink))
    assert found is not None
    assert (found.text, found.id) == ("changed", sink.ids()["b.txt"])


def test_a_folder_that_may_not_be_listed_fails_alone_and_keeps_its_documents(root: Path, forbidden: set[str]) -> None:
    for location in ("a/1.txt", "b/2.txt", "b/x/3.txt", "c/4.txt"):
        put(root, location, location)
    sink = MemorySink()
    run(source(root), sink)
    forbidden.add("b")
    put(root, "c/4.txt", "changed")

    pages = run(source(root), sink, limit=2)

    assert list(pages.failures) == ["b/"]
    assert "permission denied" in str(pages.failures["b/"])
    assert set(sink.ids()) == {"a/1.txt", "b/2.txt", "b/x/3.txt", "c/4.txt"}
    assert texts(sink)["c/4.txt"] == "changed"
    with pytest.raises(SourceError, match="permission denied"):
        asyncio.run(source(root).fetch_item("b/", sink))
    forbidden.clear()
    assert asyncio.run(source(root).fetch_item("b/", sink)) is None


AS_USER = """
import asyncio, sys
from pathlib import Path
from reefknot.ingest.connectors.local_files import LocalFiles
from reefknot.ingest.port import Position
from tests.unit.ingest.connectors.memory_sink import MemorySink, context, sync
pages = asyncio.run(sync(LocalFiles(context(Path(sys.argv[1]))), MemorySink()))
print(sorted(pages.locations), sorted(pages.failures), {str(error.failure_type) for error in pages.failures.values()})
"""


def test_real_permissions_are_told_apart(root: Path) -> None:
    for location in ("open.txt", "closed.txt", "folder/x.txt"):
        put(root, location, location)
    (root / "closed.txt").chmod(0)
    (root / "folder").chmod(0)
    plain = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []

    done = subprocess.run(
        [*plain, sys.executable, "-c", AS_USER, str(root)], capture_output=True, text=True, timeout=60, check=False
    )
    (root / "folder").chmod(0o700)

    assert done.stdout.strip() == "['open.txt'] ['closed.txt', 'folder/'] {'permanent'}", done.stderr


def test_a_disk_with_an_error_is_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "a.txt", "a")

    def failing(self: folders.OpenFolder, parts: tuple[str, ...]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folders.OpenFolder, "read", failing)
    pages = run(source(root), MemorySink())

    error = pages.failures["a.txt"]
    assert isinstance(error, SourceError)
    assert error.failure_type is FailureType.TRANSIENT


def test_a_process_without_free_descriptors_is_a_failure_of_the_source(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, "a.txt", "a")

    def failing(self: folders.OpenFolder, parts: tuple[str, ...]) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(folders.OpenFolder, "read", failing)
    with pytest.raises(SourceError, match="can open no more files") as caught:
        run(source(root), MemorySink())

    assert caught.value.failure_type is FailureType.TRANSIENT


async def test_a_disk_that_does_not_answer_is_a_transient_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "STUCK_S", 0.05)
    release = threading.Event()
    monkeypatch.setattr(LocalFiles, "_identity", lambda self: release.wait(60))

    with pytest.raises(SourceError, match="did not answer within") as caught:
        try:
            await source(root).fetch(FetchRequest("", MemorySink()))
        finally:
            release.set()

    assert caught.value.failure_type is FailureType.TRANSIENT


def test_special_files_are_passed_over_and_never_block(root: Path) -> None:
    os.mkfifo(root / "pipe.txt")
    put(root, "a.txt", "a")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(root)  # the path of a socket must be short
        try:
            server.bind("socket.txt")
        finally:
            os.chdir(here)
        sink = MemorySink()
        pages = run(source(root), sink)

    assert set(sink.ids()) == {"a.txt"}
    assert pages.failures == {}
    assert asyncio.run(source(root).fetch_item("pipe.txt", sink)) is None


def test_a_file_that_becomes_a_pipe_is_deleted(root: Path) -> None:
    put(root, "a.txt", "a")
    put(root, "b.txt", "b")
    sink = MemorySink()
    run(source(root), sink)
    (root / "a.txt").unlink()
    os.mkfifo(root / "a.txt")

    run(source(root), sink)

    assert set(sink.ids()) == {"b.txt"}


def test_a_folder_that_is_nested_too_deep_fails_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "DEEPEST", 3)
    put(root, "a/b/c/file.txt", "x")
    put(root, "a/b/c/d/file.txt", "x")
    sink = MemorySink()

    pages = run(source(root), sink)

    assert set(sink.ids()) == {"a/b/c/file.txt"}
    assert "is nested too deep" in str(pages.failures["a/b/c/d/"])
    with pytest.raises(SourceError, match="is nested too deep"):
        asyncio.run(source(root).fetch_item("a/b/c/d/", sink))


# ---- symbolic links --------------------------------------------------------------------------------------------------


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    put(tmp_path, "outside/secret.txt", "secret")
    put(root, "a.txt", "a")
    (root / "link.txt").symlink_to(root / "a.txt")
    (root / "folder").symlink_to(tmp_path / "outside")
    sink = MemorySink()
    connector = source(root)

    run(connector, sink)

    assert set(sink.ids()) == {"a.txt"}
    for location in ("link.txt", "folder/secret.txt", "../outside/secret.txt"):
        assert asyncio.run(connector.fetch_item(location, sink)) is None


def test_a_file_that_becomes_a_link_between_look_and_read_is_not_followed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "outside/a.txt", "secret")
    put(root, "x/a.txt", "a")
    real = folders.OpenFolder.read

    def reading(self: folders.OpenFolder, parts: tuple[str, ...]) -> Any:
        if not (root / "x").is_symlink():
            (root / "x").rename(root.with_name("x"))
            (root / "x").symlink_to(tmp_path / "outside")
        return real(self, parts)

    monkeypatch.setattr(folders.OpenFolder, "read", reading)
    sink = MemorySink()
    run(source(root), sink)

    assert sink.documents == {}


def test_followed_links_stay_within_the_folder_and_what_is_allowed(root: Path, tmp_path: Path) -> None:
    put(tmp_path, "outside/secret.txt", "secret")
    put(tmp_path, "shared/x/b.txt", "shared")
    put(root, "a.txt", "a")
    put(root, "d/c.txt", "c")
    (root / "link.txt").symlink_to("a.txt")
    (root / "linked").symlink_to("d")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "shared").symlink_to(tmp_path / "shared")
    (root / "dangling").symlink_to("nowhere")
    sink = MemorySink()

    pages = run(source(root, follow_symlinks=True, link_targets=["shared"]), sink)

    assert texts(sink) == {
        "a.txt": "a",
        "d/c.txt": "c",
        "link.txt": "a",
        "linked/c.txt": "c",
        "shared/x/b.txt": "shared",
    }
    assert list(pages.failures) == ["out"]
    assert "leads out of the folder: add its target to `link_targets`" in str(pages.failures["out"])
    with pytest.raises(SourceError, match="leads out of the folder"):
        asyncio.run(source(root, follow_symlinks=True).fetch_item("out", sink))
    assert run(source(root, follow_symlinks=True, link_targets=["shared"]), sink).deleted == []
    run(source(root), sink)
    assert set(sink.ids()) == {"a.txt", "d/c.txt"}


def test_loops_of_links_end(root: Path) -> None:
    put(root, "d/x/a.txt", "a")
    (root / "d/up").symlink_to(root)
    (root / "d/self").symlink_to(root / "d")
    (root / "d/x/back").symlink_to(root / "e")
    (root / "e").mkdir()
    (root / "e/forth").symlink_to(root / "d")
    (root / "round").symlink_to("round")
    sink = MemorySink()

    run(source(root, follow_symlinks=True), sink)

    assert "d/x/a.txt" in sink.ids()
    assert "e/forth/x/a.txt" in sink.ids()
    assert len(sink.ids()) < 10


# ---- other calls -----------------------------------------------------------------------------------------------------


def test_an_item_that_is_new_gets_the_identity_that_a_sync_would_give_it(root: Path) -> None:
    put(root, "a.txt", "a")
    sink = MemorySink()

    found = asyncio.run(source(root).fetch_item("a.txt", sink))
    run(source(root), sink)

    assert found is not None
    assert found.id == sink.ids()["a.txt"]
    assert asyncio.run(source(root).fetch_item("gone.txt", sink)) is None
    assert asyncio.run(source(root, exclude=["*.txt"]).fetch_item("a.txt", sink)) is None


def test_a_test_of_the_source_counts_its_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        put(root, f"{number}.txt", "x")

    assert asyncio.run(source(root).test()) == f"{root}: 5 files"
    monkeypatch.setattr(local_files, "MOST_COUNTED", 3)
    monkeypatch.setattr(local_files, "BATCH", 1)
    assert asyncio.run(source(root).test()) == f"{root}: 3 files or more"


def test_an_unknown_setting_is_refused_when_the_connector_is_made(root: Path) -> None:
    with pytest.raises(ParameterError, match="did you mean 'exclude'"):
        source(root, excludes=[])


def test_a_large_folder_is_listed_in_parts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_LISTED", 7)
    for number in range(60):
        put(root, f"{number % 4 or 'x'}{number}/f.txt" if number % 3 == 0 else f"{number}.txt", str(number))
    sink = MemorySink()

    pages = run(source(root), sink, limit=9)

    assert len(sink.documents) == 60
    assert pages.locations == sorted(pages.locations)


def test_a_walk_through_many_unwanted_folders_makes_progress_from_page_to_page(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that took its time without a file: its cursor names the folder that was passed."""
    monkeypatch.setattr(folders, "TAKEN_S", -1.0)
    monkeypatch.setattr(local_files, "PAGE_S", -1.0)
    for number in range(50):
        put(root, f"{number:02}/x.log", "x")
    put(root, "zz/a.md", "a")
    sink = MemorySink()

    async def story() -> list[str]:
        cursors = []
        while True:
            page = await source(root, include=["*.md"]).fetch(FetchRequest(sink.place.cursor, sink))
            await sink.keep("s", page, after=sink.place)
            cursors.append(page.cursor)
            if page.is_last:
                return cursors

    cursors = asyncio.run(story())

    assert 50 < len(cursors) == len(set(cursors)) < 60
    assert set(sink.ids()) == {"zz/a.md"}


# ---- watching --------------------------------------------------------------------------------------------------------


async def _next_change(changes: Any, change: Any) -> None:
    """Make the change, again and again: nobody can tell when the system has begun to watch."""
    waiting = asyncio.ensure_future(anext(changes))
    for number in range(600):
        change(number)
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        if done:
            waiting.result()
            return
    waiting.cancel()
    raise AssertionError("no change was noticed")


@pytest.mark.real_time
async def test_changes_of_wanted_files_are_noticed(root: Path) -> None:
    changes = source(root).watch()
    await _next_change(changes, lambda number: put(root, "x/a.txt", str(number)))
    await changes.aclose()  # type: ignore[attr-defined]


@pytest.mark.real_time
async def test_watching_ends_when_the_folder_vanishes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "WATCH_TIMEOUT_MS", 50)
    changes = source(root).watch()
    await _next_change(changes, lambda number: put(root, "a.txt", str(number)))
    shutil.rmtree(root)
    async with asyncio.timeout(60):
        async for _ in changes:
            pass


async def test_watching_without_its_package_names_the_extra(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)

    with pytest.raises(SourceError, match=r"pip install '\.\[ingest\]' in a checkout") as caught:
        await anext(source(root).watch())
    assert caught.value.failure_type is FailureType.PERMANENT


# ---- many files ------------------------------------------------------------------------------------------------------


def filled(root: Path, files: int) -> Path:
    for number in range(files):
        put(root, f"{number % 50:02}/{number}.txt", f"file {number} " * 20)
    return root


def test_five_thousand_files_take_no_more_memory_than_five_hundred(tmp_path: Path) -> None:
    few, many = (peak_of(source(filled(tmp_path / str(files), files)), files) for files in (500, 5000))

    assert many < few * 1.5 + 500_000
    assert many < 8_000_000


@pytest.mark.usefixtures("settled")
def test_five_thousand_files_are_synced_and_then_only_looked_at(root: Path) -> None:
    for number in range(5000):
        put(root, f"{number % 50:02}/{number}.txt", f"file {number}")
    sink = MemorySink(keeps_text=False)
    connector = source(root)
    begun = time.monotonic()

    assert len(run(connector, sink).documents) == 5000
    again = run(connector, sink)

    assert again.documents == []
    assert sum(page.seen for page in again) == 5000
    assert time.monotonic() - begun < 60  # about two seconds; a limit for a machine under load
