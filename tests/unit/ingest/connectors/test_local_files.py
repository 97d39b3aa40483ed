"""`local_files`: what is read, what is told apart, and what is never done to the documents that are kept."""

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.core.failure import FailureType
from reefknot.errors import ParameterError, StalePositionError
from reefknot.ingest.connectors import folders, local_files
from reefknot.ingest.connectors.local_files import LocalFiles
from reefknot.ingest.port import ConnectorFactory, FetchRequest, Position, WatchingConnector
from tests.unit.ingest.connectors.memory_sink import Folder, MemorySink, context, failing, one_page, peak_of, put, sync

pytestmark = pytest.mark.real_time

LONG_AGO = -(10**15)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "folder", LocalFiles)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as if they had been written long ago."""
    monkeypatch.setattr(folders, "SETTLED_NS", LONG_AGO)


def before_each_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen between the look at a file and its reading."""
    real = folders.OpenFolder.read

    def reading(self: folders.OpenFolder, parts: tuple[str, ...]) -> Any:
        act()
        return real(self, parts)

    monkeypatch.setattr(folders.OpenFolder, "read", reading)


def test_the_class_is_a_factory_of_connectors_that_watch(tmp_path: Path) -> None:
    factory: ConnectorFactory = LocalFiles
    watching: WatchingConnector = LocalFiles(context(tmp_path))

    assert isinstance(factory(context(tmp_path)), LocalFiles)
    assert watching is not None


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_files_are_read_in_the_order_of_their_locations_with_name_size_type_and_time(folder: Folder) -> None:
    for location in ("a/b.txt", "a.txt", "a-b.txt", "a0.txt", "b.txt", "a/a/x.txt"):
        folder.put(location)
    os.utime(folder / "a.txt", (1_700_000_000, 1_700_000_000.5))

    pages = folder.sync(limit=2)

    assert pages.locations == sorted(folder.texts()) == ["a-b.txt", "a.txt", "a/a/x.txt", "a/b.txt", "a0.txt", "b.txt"]
    assert pages.seen == 6
    document = folder.document("a.txt")
    assert (document.title, document.text, document.media_type) == ("a.txt", "a.txt", "text/plain")
    assert document.metadata == {"name": "a.txt", "size": 5}
    assert document.modified_at == 1_700_000_000_500
    assert len(document.fingerprint) == 64


@pytest.mark.usefixtures("settled")
def test_a_second_sync_reads_nothing_and_a_third_what_changed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = folder.synced("a.txt", "b.txt")
    monkeypatch.setattr(folders.OpenFolder, "read", lambda self, parts: pytest.fail(f"read {parts}"))
    assert folder.sync().documents == []
    monkeypatch.undo()

    folder.put("b.txt", "B.TXT")
    assert folder.sync().locations == ["b.txt"]
    assert folder.texts() == {"a.txt": "a.txt", "b.txt": "B.TXT"}
    assert folder.ids() == ids


@pytest.mark.usefixtures("settled")
def test_a_change_that_keeps_size_and_time_of_modification_is_seen(folder: Folder) -> None:
    file = folder.put("a.txt", "one")
    folder.sync()
    times = file.stat()

    file.write_text("two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    folder.sync()

    assert folder.texts() == {"a.txt": "two"}


@pytest.mark.parametrize("is_racy", [True, False])
def test_a_change_within_the_granularity_of_the_times_is_seen(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, is_racy: bool
) -> None:
    """A file system whose times tick every hour. The control trusts the times of a file that changed just now."""
    for module in (folders, local_files):
        monkeypatch.setattr(module, "times_of", lambda about: f"{about.st_size}-hour-hour-{about.st_ino}")
    if not is_racy:
        monkeypatch.setattr(folders, "SETTLED_NS", LONG_AGO)
    file = folder.put("a.txt", "one")
    folder.sync()

    file.write_text("two")
    folder.sync()

    assert folder.texts() == {"a.txt": "two" if is_racy else "one"}


def test_a_file_that_changes_while_it_is_read_is_read_again_next_time(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SETTLED_NS", 0)
    file = folder.put("log.txt", "1")
    real = os.read
    changes = iter(range(2, 100))

    def reading(descriptor: int, number: int) -> bytes:
        content = real(descriptor, number)
        if content:
            file.write_text(str(next(changes)) * 3)
        return content

    monkeypatch.setattr(os, "read", reading)
    folder.sync()
    monkeypatch.setattr(os, "read", real)
    file.write_text("end")
    folder.sync()

    assert folder.texts() == {"log.txt": "end"}


def test_a_file_that_vanishes_before_it_is_read_is_no_document(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.put("a.txt")
    folder.put("b.txt")
    before_each_read(monkeypatch, lambda: (folder / "b.txt").unlink(missing_ok=True))

    assert folder.sync().failures == {}
    assert folder.texts() == {"a.txt": "a.txt"}


PNG, GIF = b"\x89PNG\r\n\x1a\n\0\0", b"GIF89a\xff\xff\xff\xff\xff\xff\xff"
BINARY = "application/octet-stream"
LATIN_1 = "ein paar Grüße".encode("latin-1")


@pytest.mark.parametrize(
    ("name", "content", "media_type", "text", "problem"),
    [
        ("a.txt", "Grüße".encode(), "text/plain", "Grüße", ""),
        ("a.txt", b"\xef\xbb\xbfbom", "text/plain", "bom", ""),
        ("a.txt", "Grüße".encode("utf-16"), "text/plain", "Grüße", ""),
        ("a.txt", b"\xfe\xff" + "Grüße".encode("utf-16-be"), "text/plain", "Grüße", ""),
        ("a.txt", "Grüße".encode("utf-32"), "text/plain", "Grüße", ""),
        ("a.txt", LATIN_1, "text/plain", "ein paar Gr\ufffd\ufffde", "not UTF-8 from byte 12 on"),
        ("a.txt", "a\0b".encode("utf-16"), "text/plain", "a\ufffdb", ""),
        ("a.txt", b"\xff\xfea\0b", "text/plain", "a\ufffd", "not UTF-16-LE from byte 5 on"),
        ("a.md", b"# x", "text/markdown", "# x", ""),
        ("a.json", b"{}", "application/json", "{}", ""),
        ("a.svg", b"<svg/>", "image/svg+xml", "<svg/>", ""),
        ("a.ts", b"let x", "text/plain", "let x", ""),
        ("noname", b"x", "text/plain", "x", ""),
        ("a.txt", b"\0", BINARY, "", ""),
        ("a.tar.gz", b"\x1f\x8b\0", BINARY, "", ""),
        ("holiday.png", PNG, "image/png", "", ""),
        ("holiday.png", bytes(range(1, 256)) * 9, "image/png", "", ""),
        ("holiday.png", GIF, "image/png", "", ""),
    ],
    ids=range(18),
)
def test_text_is_decoded_by_its_mark_or_as_utf_8_and_a_binary_file_is_kept_without(
    folder: Folder, name: str, content: bytes, media_type: str, text: str, problem: str
) -> None:
    folder.put(name, content)
    folder.sync()
    found = folder.document(name)

    assert (found.title, found.text, found.media_type) == (name, text, media_type)
    assert found.problem.startswith(problem)
    assert bool(found.problem) is bool(problem)
    assert (found.metadata["size"], bool(found.fingerprint)) == (len(content), True)


@pytest.mark.usefixtures("settled")
def test_a_file_that_is_too_large_is_kept_without_its_text_until_the_limit_is_raised(folder: Folder) -> None:
    folder.put("a.txt", "x" * 100)
    folder.put("b.txt", "y" * 99)
    folder.sync(max_bytes=99)
    large = folder.document("a.txt")

    assert (large.text, large.fingerprint, large.metadata["size"]) == ("", "", 100)
    assert "it has 100 bytes, and max_bytes is 99; raise max_bytes" in large.problem
    assert folder.sync(max_bytes=100).locations == ["a.txt"]
    assert folder.document("a.txt").text == "x" * 100


def test_a_page_ends_when_it_has_much_content(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "PAGE_CHARACTERS", 1000)
    monkeypatch.setattr(local_files, "READ_BYTES", 500)
    for number in range(10):
        folder.put(f"{number}.txt", "x" * 400)

    assert max(len(page.documents) for page in folder.sync()) <= 4
    assert len(folder.ids()) == 10


async def test_a_sync_that_is_interrupted_continues_behind_its_last_page_in_another_process(folder: Folder) -> None:
    for number in range(30):
        folder.put(f"{number % 3}/{number:02}.txt")
    pages = await folder.in_processes(limit=4)

    assert pages.locations == sorted(pages.locations)
    assert len(pages.locations) == len(folder.ids()) == 30


async def test_a_page_that_was_overtaken_is_fetched_again(folder: Folder) -> None:
    for number in range(6):
        folder.put(f"{number}.txt")
    connector, sink = folder.source(), folder.sink
    start = sink.place
    first = await one_page(connector, sink, 2)
    second = await connector.fetch(FetchRequest(first.cursor, sink, 2))
    with pytest.raises(StalePositionError):
        await sink.keep("s", second, after=start)
    assert (await connector.fetch(FetchRequest(first.cursor, sink, 2))).documents == second.documents
    await sync(connector, sink, limit=2)

    assert list(folder.texts()) == [f"{number}.txt" for number in range(6)]


@pytest.mark.usefixtures("settled")
def test_a_forgotten_cursor_has_every_file_read_again_once(folder: Folder) -> None:
    ids = folder.synced(*(f"{number}.txt" for number in range(9)))
    folder.sink.place = Position()

    assert len(folder.sync(limit=2).documents) == 9
    assert folder.sync().documents == []
    assert folder.ids() == ids


async def test_a_cursor_that_cannot_be_read_begins_anew(folder: Folder) -> None:
    folder.put("a.txt")
    page = await folder.source().fetch(FetchRequest("nonsense", folder.sink))

    assert [document.location for document in page.documents] == ["a.txt"]


def test_names_that_are_no_text_are_read_and_found_again(folder: Folder) -> None:
    for name in (b"a\xffb", b"new\nline", b"back\\slash", b"x" * 255, "ü".encode()):
        Path(os.fsdecode(os.fsencode(folder.root) + b"/" + name)).write_text("x")
    folder.sync()

    assert len(folder.ids()) == 5
    for location, known in folder.ids().items():
        assert location.encode().decode() == location
        found = folder.item(location)
        assert found is not None
        assert found.id == known
    assert folder.sync().deleted == []


# ---- moves -----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_moved_keeps_its_identity(folder: Folder) -> None:
    before = folder.synced("z/a.txt")["z/a.txt"]
    (folder / "b").mkdir()
    (folder / "z/a.txt").rename(folder / "b/c.txt")

    assert folder.synced() == {"b/c.txt": before}


def test_a_moved_folder_keeps_the_identity_of_every_file_in_it(folder: Folder) -> None:
    before = folder.synced(*(f"z/x/{number}.txt" for number in range(20)))
    (folder / "z").rename(folder / "a")

    assert folder.sync(limit=3).deleted == []
    assert folder.ids() == {"a" + location[1:]: one for location, one in before.items()}


def test_copies_are_documents_of_their_own(folder: Folder) -> None:
    before = folder.synced("a.txt")["a.txt"]
    for name in ("b.txt", "c.txt"):
        shutil.copy(folder / "a.txt", folder / name)
    folder.sync()
    assert len(set(folder.ids().values())) == 3
    assert folder.ids()["a.txt"] == before

    (folder / "a.txt").rename(folder / "d.txt")
    shutil.copy(folder / "b.txt", folder / "e.txt")
    folder.sync()
    assert len(set(folder.ids().values())) == len(folder.ids()) == 4
    assert before in (folder.ids()["d.txt"], folder.ids()["e.txt"])


@pytest.mark.parametrize("tells_generations", [True, False])
def test_a_rename_together_with_an_edit_keeps_the_identity_where_inodes_can_be_told_apart(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tells_generations: bool
) -> None:
    monkeypatch.setattr(folders, "generation_of", lambda descriptor: "7" if tells_generations else "")
    before = folder.synced("a.txt", "other.txt")["a.txt"]
    (folder / "a.txt").rename(folder / "b.txt")
    (folder / "b.txt").write_text("first, and more")
    folder.sync()

    assert (folder.ids()["b.txt"] == before) is tells_generations
    assert set(folder.ids()) == {"b.txt", "other.txt"}


def test_a_new_file_with_the_inode_of_a_deleted_one_is_another_document(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = iter("12345678")
    monkeypatch.setattr(folders, "generation_of", lambda descriptor: next(generations))
    before = folder.synced("a.txt")["a.txt"]
    (folder / "a.txt").unlink()
    folder.synced("b.txt")

    assert before not in folder.ids().values()
    assert set(folder.ids()) == {"b.txt"}


def test_an_empty_file_is_not_held_for_another_one(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "generation_of", lambda descriptor: "")
    folder.put("a.txt", "")
    folder.sync()
    before = folder.ids()["a.txt"]
    (folder / "a.txt").unlink()
    folder.put("b.txt", "")
    folder.sync()

    assert folder.ids()["b.txt"] != before


@pytest.mark.parametrize("rounds", [local_files.MOST_ROUNDS, 1])
def test_a_file_that_moves_backwards_during_a_scan_keeps_its_identity(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """From where the scan has not been to where it will not come again. The control prunes after one round."""
    monkeypatch.setattr(local_files, "MOST_ROUNDS", rounds)
    for number in range(40):
        folder.put(f"m/{number:02}.txt", f"content {number}")
    before = folder.synced("z.txt")["z.txt"]
    for number in range(40):
        folder.put(f"m/{number:02}.txt", f"new {number}")

    def move() -> None:
        if (folder / "z.txt").exists():
            (folder / "z.txt").rename(folder / "a.txt")

    pages = folder.sync(limit=10, between=move)

    assert (folder.ids().get("a.txt") == before) is (rounds > 1)
    assert (before in pages.deleted) is (rounds == 1)


# ---- deletions -------------------------------------------------------------------------------------------------------


def test_what_is_gone_or_not_wanted_any_more_is_deleted(folder: Folder) -> None:
    ids = folder.synced("a.txt", "b.txt", "x/c.txt", "x/d.md")
    (folder / "a.txt").unlink()
    pages = folder.sync(exclude=["x/*.txt"])

    assert set(pages.deleted) == {ids["a.txt"], ids["x/c.txt"]}
    assert set(folder.ids()) == {"b.txt", "x/d.md"}


def test_a_folder_that_is_missing_is_an_error_and_deletes_nothing(folder: Folder) -> None:
    folder.synced("a.txt")
    folder.root.rename(folder.root.with_name("elsewhere"))

    with failing("does not exist: create it, mount its disk, or correct `path`"):
        folder.sync()
    assert set(folder.ids()) == {"a.txt"}
    with failing("does not exist"):
        folder.test()
    with failing("does not exist"):
        folder.item("a.txt")


def test_a_path_to_a_file_is_an_error(folder: Folder) -> None:
    folder.put("a.txt")
    with failing("is no folder"):
        folder.sync(path=str(folder / "a.txt"))


def test_a_folder_that_may_not_be_read_is_a_permanent_failure(folder: Folder, forbidden: set[str]) -> None:
    forbidden.add(folder.root.name)
    with failing("may not be read by this user"):
        folder.sync()


def test_an_empty_mount_point_does_not_delete_the_documents_of_its_disk(folder: Folder) -> None:
    """A disk that is not mounted leaves an empty folder, with another identity than the disk's."""
    folder.synced("a.txt")
    disk = folder.root.rename(folder.root.with_name("disk"))
    folder.root.mkdir()

    with failing(r"mount its disk.*allow_empty: true"):
        folder.sync()
    assert set(folder.ids()) == {"a.txt"}

    folder.root.rmdir()
    disk.rename(folder.root)
    assert set(folder.synced("b.txt")) == {"a.txt", "b.txt"}


def test_an_emptied_folder_deletes_its_documents(folder: Folder) -> None:
    folder.synced("a.txt")
    (folder / "a.txt").unlink()

    assert folder.synced() == {}


def test_an_empty_folder_in_the_place_of_another_is_accepted_when_it_is_allowed(folder: Folder) -> None:
    folder.synced("a.txt")
    folder.root.rename(folder.root.with_name("old"))
    folder.root.mkdir()
    folder.sync(allow_empty=True)

    assert folder.ids() == {}


def test_a_folder_that_is_unmounted_between_two_pages_deletes_nothing(folder: Folder) -> None:
    ids = folder.synced(*(f"{number}.txt" for number in range(10)))

    def unmount() -> None:
        if not folder.root.with_name("disk").exists():
            folder.root.rename(folder.root.with_name("disk"))
            folder.root.mkdir()

    with failing("mount its disk"):
        folder.sync(limit=2, between=unmount)
    assert folder.ids() == ids


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def test_a_file_that_may_not_be_read_fails_alone_and_its_document_is_kept(folder: Folder, forbidden: set[str]) -> None:
    ids = folder.synced("a.txt", "b.txt", "c.txt")
    folder.put("b.txt", "changed")
    forbidden.add("b.txt")
    pages = folder.sync()

    (failure,) = [failure for page in pages for failure in page.failures]
    assert failure.version
    with failing("b.txt: permission denied: allow this user to read it, or `exclude` it"):
        raise failure.error
    assert (folder.texts()["b.txt"], pages.deleted) == ("b.txt", [])
    with failing("permission denied"):
        folder.item("b.txt")
    forbidden.clear()
    found = folder.item("b.txt")
    assert found is not None
    assert (found.text, found.id) == ("changed", ids["b.txt"])


def test_a_folder_that_may_not_be_listed_fails_alone_and_keeps_its_documents(
    folder: Folder, forbidden: set[str]
) -> None:
    ids = folder.synced("a/1.txt", "b/2.txt", "b/x/3.txt", "c/4.txt")
    forbidden.add("b")
    folder.put("c/4.txt", "changed")

    pages = folder.sync(limit=2)

    assert list(pages.failures) == ["b/"]
    assert "permission denied" in str(pages.failures["b/"])
    assert folder.ids() == ids
    assert folder.texts()["c/4.txt"] == "changed"
    with failing("permission denied"):
        folder.item("b/")
    forbidden.clear()
    assert folder.item("b/") is None


AS_USER = """
import asyncio, sys
from pathlib import Path
from reefknot.ingest.connectors.local_files import LocalFiles
from reefknot.ingest.port import Position
from tests.unit.ingest.connectors.memory_sink import MemorySink, context, sync
pages = asyncio.run(sync(LocalFiles(context(Path(sys.argv[1]))), MemorySink()))
print(sorted(pages.locations), sorted(pages.failures), {str(error.failure_type) for error in pages.failures.values()})
"""


def test_real_permissions_are_told_apart(folder: Folder) -> None:
    for location in ("open.txt", "closed.txt", "folder/x.txt"):
        folder.put(location)
    (folder / "closed.txt").chmod(0)
    (folder / "folder").chmod(0)
    plain = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []

    command = [*plain, sys.executable, "-c", AS_USER, str(folder.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (folder / "folder").chmod(0o700)

    assert done.stdout.strip() == "['open.txt'] ['closed.txt', 'folder/'] {'permanent'}", done.stderr


@pytest.mark.parametrize(("number", "of_the_source"), [(errno.EIO, False), (errno.EMFILE, True)])
def test_an_error_that_may_pass_is_tried_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, number: int, of_the_source: bool
) -> None:
    """A process without free descriptors reads no file at all: that is a failure of the source."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    folder.put("a.txt")
    before_each_read(monkeypatch, fail)
    with failing("can open no more files" if of_the_source else None, FailureType.TRANSIENT):
        raise folder.sync().failures["a.txt"]


async def test_a_disk_that_does_not_answer_is_a_transient_failure(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "STUCK_S", 0.05)
    release = threading.Event()
    monkeypatch.setattr(LocalFiles, "_identity", lambda self: release.wait(60))
    try:
        with failing("did not answer within", FailureType.TRANSIENT):
            await folder.source().fetch(FetchRequest("", folder.sink))
    finally:
        release.set()


def test_special_files_are_passed_over_and_never_block(folder: Folder) -> None:
    os.mkfifo(folder / "pipe.txt")
    folder.put("a.txt")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder.root)  # the path of a socket must be short
        try:
            server.bind("socket.txt")
        finally:
            os.chdir(here)
        assert folder.sync().failures == {}

    assert set(folder.ids()) == {"a.txt"}
    assert folder.item("pipe.txt") is None


def test_a_file_that_becomes_a_pipe_is_deleted(folder: Folder) -> None:
    folder.synced("a.txt", "b.txt")
    (folder / "a.txt").unlink()
    os.mkfifo(folder / "a.txt")

    assert set(folder.synced()) == {"b.txt"}


def test_a_folder_that_is_nested_too_deep_fails_alone(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "DEEPEST", 3)
    folder.put("a/b/c/file.txt", "x")
    folder.put("a/b/c/d/file.txt", "x")

    pages = folder.sync()

    assert set(folder.ids()) == {"a/b/c/file.txt"}
    assert "is nested too deep" in str(pages.failures["a/b/c/d/"])
    with failing("is nested too deep"):
        folder.item("a/b/c/d/")


# ---- symbolic links --------------------------------------------------------------------------------------------------


def test_links_are_not_followed(folder: Folder, tmp_path: Path) -> None:
    put(tmp_path, "outside/secret.txt", "secret")
    folder.put("a.txt")
    (folder / "link.txt").symlink_to(folder / "a.txt")
    (folder / "folder").symlink_to(tmp_path / "outside")

    assert set(folder.synced()) == {"a.txt"}
    for location in ("link.txt", "folder/secret.txt", "../outside/secret.txt"):
        assert folder.item(location) is None


def test_a_file_that_becomes_a_link_between_look_and_read_is_not_followed(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "outside/a.txt", "secret")
    folder.put("x/a.txt", "a")

    def replace() -> None:
        if not (folder / "x").is_symlink():
            (folder / "x").rename(folder.root.with_name("x"))
            (folder / "x").symlink_to(tmp_path / "outside")

    before_each_read(monkeypatch, replace)

    assert folder.synced() == {}


def test_followed_links_stay_within_the_folder_and_what_is_allowed(folder: Folder, tmp_path: Path) -> None:
    put(tmp_path, "outside/secret.txt", "secret")
    put(tmp_path, "shared/x/b.txt", "shared")
    folder.put("a.txt", "a")
    folder.put("d/c.txt", "c")
    (folder / "link.txt").symlink_to("a.txt")
    (folder / "linked").symlink_to("d")
    (folder / "out").symlink_to(tmp_path / "outside")
    (folder / "shared").symlink_to(tmp_path / "shared")
    (folder / "dangling").symlink_to("nowhere")

    pages = folder.sync(follow_symlinks=True, link_targets=["shared"])

    found = {"a.txt": "a", "d/c.txt": "c", "link.txt": "a", "linked/c.txt": "c", "shared/x/b.txt": "shared"}
    assert folder.texts() == found
    assert list(pages.failures) == ["out"]
    assert "leads out of the folder: add its target to `link_targets`" in str(pages.failures["out"])
    with failing("leads out of the folder"):
        folder.item("out", follow_symlinks=True)
    assert folder.sync(follow_symlinks=True, link_targets=["shared"]).deleted == []
    assert set(folder.synced()) == {"a.txt", "d/c.txt"}


def test_loops_of_links_end(folder: Folder) -> None:
    folder.put("d/x/a.txt", "a")
    (folder / "d/up").symlink_to(folder.root)
    (folder / "d/self").symlink_to(folder / "d")
    (folder / "d/x/back").symlink_to(folder / "e")
    (folder / "e").mkdir()
    (folder / "e/forth").symlink_to(folder / "d")
    (folder / "round").symlink_to("round")

    folder.sync(follow_symlinks=True)

    assert {"d/x/a.txt", "e/forth/x/a.txt"} < set(folder.ids())
    assert len(folder.ids()) < 10


# ---- other calls -----------------------------------------------------------------------------------------------------


def test_an_item_that_is_new_gets_the_identity_that_a_sync_would_give_it(folder: Folder) -> None:
    folder.put("a.txt")
    found = folder.item("a.txt")

    assert found is not None
    assert folder.synced() == {"a.txt": found.id}
    assert folder.item("gone.txt") is None
    assert folder.item("a.txt", exclude=["*.txt"]) is None


def test_a_test_of_the_source_counts_its_files(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        folder.put(f"{number}.txt", "x")

    assert folder.test() == f"{folder.root}: 5 files"
    monkeypatch.setattr(local_files, "MOST_COUNTED", 3)
    monkeypatch.setattr(local_files, "BATCH", 1)
    assert folder.test() == f"{folder.root}: 3 files or more"


def test_an_unknown_setting_is_refused_when_the_connector_is_made(folder: Folder) -> None:
    with pytest.raises(ParameterError, match="did you mean 'exclude'"):
        folder.source(excludes=[])


def test_a_large_folder_is_listed_in_parts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_LISTED", 7)
    for number in range(60):
        folder.put(f"{number % 4 or 'x'}{number}/f.txt" if number % 3 == 0 else f"{number}.txt", str(number))

    pages = folder.sync(limit=9)

    assert len(folder.ids()) == 60
    assert pages.locations == sorted(pages.locations)


async def test_a_walk_through_many_unwanted_folders_makes_progress_from_page_to_page(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that took its time without a file: its cursor names the folder that was passed."""
    monkeypatch.setattr(folders, "TAKEN_S", -1.0)
    monkeypatch.setattr(local_files, "PAGE_S", -1.0)
    for number in range(50):
        folder.put(f"{number:02}/x.log", "x")
    folder.put("zz/a.md", "a")

    pages = await folder.in_processes(include=["*.md"])

    assert 50 < len(pages) == len({page.cursor for page in pages}) < 60
    assert set(folder.ids()) == {"zz/a.md"}


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


async def test_changes_of_wanted_files_are_noticed(folder: Folder) -> None:
    changes = LocalFiles(context(folder.root)).watch()
    await _next_change(changes, lambda number: folder.put("x/a.txt", str(number)))
    await changes.aclose()  # type: ignore[attr-defined]


async def test_watching_ends_when_the_folder_vanishes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "WATCH_TIMEOUT_MS", 50)
    changes = LocalFiles(context(folder.root)).watch()
    await _next_change(changes, lambda number: folder.put("a.txt", str(number)))
    shutil.rmtree(folder.root)
    async with asyncio.timeout(60):
        async for _ in changes:
            pass


async def test_watching_without_its_package_names_the_extra(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    with failing(r"pip install '\.\[ingest\]' in a checkout"):
        await anext(LocalFiles(context(folder.root)).watch())


# ---- many files ------------------------------------------------------------------------------------------------------


def filled(root: Path, files: int) -> LocalFiles:
    for number in range(files):
        put(root, f"{number % 50:02}/{number}.txt", f"file {number} " * 20)
    return LocalFiles(context(root))


def test_five_thousand_files_take_no_more_memory_than_five_hundred(tmp_path: Path) -> None:
    few, many = (peak_of(filled(tmp_path / str(files), files), files) for files in (500, 5000))

    assert many < few * 1.5 + 500_000
    assert many < 8_000_000


@pytest.mark.usefixtures("settled")
async def test_five_thousand_files_are_synced_and_then_only_looked_at(tmp_path: Path) -> None:
    connector, sink = filled(tmp_path, 5000), MemorySink(keeps_text=False)
    begun = time.monotonic()
    first, again = await sync(connector, sink), await sync(connector, sink)

    assert (len(first.documents), again.documents, again.seen) == (5000, [], 5000)
    assert time.monotonic() - begun < 60  # about two seconds; a limit for a machine under load
