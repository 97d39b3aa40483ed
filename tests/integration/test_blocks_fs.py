"""`fs.blob_put`, `fs.blob_get` and `fs.delete` on a real file system."""

import errno
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.steps import fs
from reefknot.steps.fs import BlobGet, BlobPut, Delete, Folders, FsSettings
from reefknot.steps.port import Block
from tests.integration.stepping import refused, run, step
from tests.pace import within

pytestmark = pytest.mark.real_time


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def folders(root: Path, *more: Path) -> Folders:
    return Folders(FsSettings((root, *more), 1000))


def put(root: Path, **inputs: Any) -> StepResult:
    return run(BlobPut(folders(root)), **inputs)


def get(root: Path, path: str) -> StepResult:
    return run(BlobGet(folders(root)), path=path)


def delete(root: Path, path: str) -> StepResult:
    return run(Delete(folders(root)), path=path)


def each_of(root: Path, path: str) -> tuple[StepResult, ...]:
    """The answers of all three steps for a path."""
    return put(root, path=path, content="a"), get(root, path), delete(root, path)


def test_a_file_is_kept_and_read_again(root: Path) -> None:
    kept = put(root, path="a/b/c.txt", content="täxt")
    read = get(root, "a/b/c.txt")
    assert kept.outputs == {"path": "a/b/c.txt", "size": 5, "created": True}
    assert (read.outputs["content"], read.outputs["size"]) == ("täxt", 5)
    assert abs(datetime.fromisoformat(read.outputs["modified"]) - datetime.now(UTC)).total_seconds() < 60


def test_bytes_go_in_and_out_as_base64(root: Path) -> None:
    put(root, path="x", base64="/wA=")
    assert (root / "x").read_bytes() == b"\xff\x00"
    assert get(root, "x").outputs["base64"] == "/wA="


def test_a_second_put_overwrites_so_that_an_attempt_can_be_repeated_unless_it_must_not(root: Path) -> None:
    put(root, path="x", content="one")
    assert put(root, path="x", content="two").outputs["created"] is False
    refused(put(root, path="x", content="three", overwrite=False), ErrorCode.execution_failed, "overwrite is false")
    assert (root / "x").read_text() == "two"
    assert put(root, path="y", content="new", overwrite=False).ok


def test_an_absolute_path_inside_a_root_is_taken(root: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    assert run(BlobPut(folders(root, second)), path=str(second / "x"), content="a").ok
    assert (second / "x").read_text() == "a"


def test_a_root_may_itself_be_reached_over_a_link(root: Path, tmp_path: Path) -> None:
    """The configuration is trusted; what lies beneath the root is not."""
    (tmp_path / "link").symlink_to(root)
    assert put(tmp_path / "link", path=str(root / "x"), content="a").ok
    assert put(tmp_path / "link", path=str(tmp_path / "link" / "y"), content="a").ok


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/passwd", "/", "a/..", "/tmp/../etc/passwd", "..", "./../x"]
)
def test_a_path_outside_is_denied(root: Path, path: str) -> None:
    for result in each_of(root, path):
        assert result.error_code in (ErrorCode.permission_denied, ErrorCode.invalid_input)
        assert result.error_message.startswith("path: ")


def test_a_root_is_no_prefix_of_its_neighbour(root: Path, tmp_path: Path) -> None:
    (tmp_path / "root-2").mkdir()
    assert put(root, path=str(tmp_path / "root-2" / "x"), content="a").error_code is ErrorCode.permission_denied


def test_links_are_denied_wherever_they_lead(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)

    for path in ("link", "folder/secret", "folder/new"):
        assert put(root, path=path, content="a").error_code is ErrorCode.permission_denied
    for path in ("link", "folder/secret"):
        assert get(root, path).error_code is ErrorCode.permission_denied
    assert delete(root, "folder/secret").error_code is ErrorCode.permission_denied
    assert (tmp_path / "secret").read_text() == "secret"
    assert not (tmp_path / "new").exists()


def test_what_is_not_there_is_not_found_and_not_retried(root: Path) -> None:
    refused(get(root, "no/such/file"), ErrorCode.execution_failed, "not found")


def test_a_delete_succeeds_twice(root: Path) -> None:
    put(root, path="x", content="a")
    assert delete(root, "x").outputs == {"path": "x", "deleted": True}
    assert delete(root, "x").outputs == {"path": "x", "deleted": False}
    assert delete(root, "no/such/folder").outputs["deleted"] is False


def test_only_regular_files(root: Path) -> None:
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    for result in (*each_of(root, "folder"), *within(1, lambda: each_of(root, "pipe"))):  # a pipe never blocks
        refused(result, ErrorCode.permission_denied, "not a regular file")


@pytest.mark.parametrize(
    ("inputs", "code", "words"),
    [
        ({"content": "a"}, ErrorCode.missing_required_field, "path: missing; accepted: a path beneath"),
        ({"path": "x"}, ErrorCode.missing_required_field, "content or base64: missing"),
        ({"path": "x", "content": "a", "base64": "YQ=="}, ErrorCode.invalid_input, "content: given together"),
        ({"path": "x", "content": 7}, ErrorCode.invalid_input, "content: 7 is not accepted"),
        ({"path": "x", "base64": "!"}, ErrorCode.invalid_input, "base64: '!' is not accepted"),
        ({"path": "x", "content": "a" * 1001}, ErrorCode.invalid_input, "content: 1001 bytes; accepted: at most 1000"),
        ({"path": "x", "content": "a", "mode": 1}, ErrorCode.invalid_input, "mode: no such input; accepted: path,"),
        ({"path": "x", "content": "a", "overwrite": 1}, ErrorCode.invalid_input, "overwrite: 1"),
        ({"path": "", "content": "a"}, ErrorCode.invalid_input, "path: ''"),
        ({"path": "a\0b", "content": "a"}, ErrorCode.invalid_input, "path: "),
        ({"path": "a/", "content": "a"}, ErrorCode.invalid_input, "path: "),
        ({"path": "x" * 300, "content": "a"}, ErrorCode.invalid_input, "path: File name too long"),
        ({"path": "\ud800", "content": "a"}, ErrorCode.invalid_input, "path: "),
        ({"path": "x", "content": "\ud800"}, ErrorCode.invalid_input, "content: cannot be written"),
    ],
)
def test_bad_inputs_are_refused_by_name(root: Path, inputs: dict[str, Any], code: ErrorCode, words: str) -> None:
    refused(put(root, **inputs), code, words)
    assert list(root.iterdir()) == []


def test_a_file_beyond_the_limit_is_not_read(root: Path) -> None:
    (root / "large").write_bytes(b"x" * 1001)
    refused(get(root, "large"), ErrorCode.execution_failed, "1001 bytes; accepted: at most 1000")


def test_without_roots_everything_is_denied() -> None:
    refused(run(BlobGet(Folders()), path="x"), ErrorCode.permission_denied, "blocks.fs.roots")


def test_a_root_that_is_not_there_may_come_back(root: Path) -> None:
    assert get(root / "unmounted", "x").error_code is ErrorCode.resource_unavailable


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, ErrorCode.resource_unavailable),
        (errno.EIO, ErrorCode.resource_unavailable),
        (errno.EACCES, ErrorCode.permission_denied),
        (errno.EROFS, ErrorCode.permission_denied),
    ],
)
def test_a_failed_write_is_undone(root: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: ErrorCode) -> None:
    put(root, path="x", content="old")

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)

    refused(put(root, path="x", content="new"), code)
    assert [file.name for file in root.iterdir()] == ["x"]
    assert (root / "x").read_text() == "old"


LONG_NAMES = ("報" * 80, "報" * 85, "🪢" * 60, "🪢" * 63, "a" + "é" * 127, "x" * 255, "\udcff" * 255)


@pytest.mark.parametrize("name", LONG_NAMES, ids=range(len(LONG_NAMES)))
def test_a_name_may_have_as_many_bytes_as_the_file_system_takes(root: Path, name: str) -> None:
    kept = put(root, path=f"deep/{name}", content="ahoy")
    assert kept.error_code is ErrorCode.none, kept.error_message
    assert [file.name for file in (root / "deep").iterdir()] == [name]
    assert put(root, path=f"deep/{name}", content="again").outputs["created"] is False
    assert get(root, f"deep/{name}").outputs["content"] == "again"
    too_long = put(root, path=f"deep/{name}{'x' * (256 - len(os.fsencode(name)))}", content="ahoy")
    refused(too_long, ErrorCode.invalid_input, "File name too long")
    assert [file.name for file in (root / "deep").iterdir()] == [name]


async def test_nobody_ever_sees_half_a_file(root: Path) -> None:
    """A reader beside a writer that replaces one text by another of another length."""
    texts = {"a" * 900, "b" * 50}
    (root / "x").write_text("a" * 900)
    seen: set[str] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add((root / "x").read_text())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        block = BlobPut(Folders(FsSettings((root,))))
        for number in range(60):
            await step(block, path="x", content=sorted(texts)[number % 2])
        await block.close()
    finally:
        done.set()
        reader.join()
    assert seen == texts


async def test_a_file_system_that_does_not_answer_is_given_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(fs, "_delete", lambda place: answers.wait(10) and {})
    block = Delete(Folders(FsSettings((root,))))
    result = await step(block, 0.05, path="x")
    answers.set()
    await block.close()
    refused(result, ErrorCode.resource_unavailable, "within 0.05 s")


@pytest.mark.parametrize("kind", [BlobPut, BlobGet, Delete])
def test_the_destination_is_the_root(root: Path, kind: type[BlobPut]) -> None:
    block: Block = kind(Folders(FsSettings((root,))))
    assert block.destination({"path": "a/b"}) == f"fs:{root}"
    assert block.destination({"path": 7}) == f"fs:{root}"
    assert block.destination({}) == "fs"
