"""The formats of an exported log: files of format 1 are read as ever, and in both formats a change is named."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.folder import Folder
from tests.warm_commands import run_cold

OUTSIDE = Path(__file__).parents[2] / "examples" / "verify_chain.py"
OLD = Path(__file__).parent / "stores" / "export_format_1.jsonl"
"""An export of three assignments, one of which failed and was retried, by a version that wrote format 1."""
WORK = [{"assignment_id": f"work-{n}", "job": {"type": "own.nap", "payload": {"seconds": 0}}} for n in range(4)]
LOG, HEAD = "log.jsonl", "log.jsonl.head.json"


@pytest.fixture(params=[1, 2])
def exported(folder: Folder, request: pytest.FixtureRequest) -> Folder:
    """A folder with an exported log and its head."""
    if request.param == 1:
        shutil.copy(OLD, folder.path / LOG)
        shutil.copy(f"{OLD}.head.json", folder.path / HEAD)
    else:
        folder.write_lines("work.jsonl", *WORK)
        assert folder.ends(folder.start("run", "work.jsonl", "--module", "naps"))[0] == 0
        assert folder("audit", "export", LOG).code == 0
    assert json.loads(lines_of(folder)[0])["format"] == request.param
    return folder


def lines_of(folder: Folder) -> list[bytes]:
    return (folder.path / LOG).read_bytes().splitlines(keepends=True)


def outside(folder: Folder) -> tuple[int, str]:
    done = run_cold(sys.executable, "-I", "-S", OUTSIDE, LOG, HEAD, cwd=folder.path)
    return done.returncode, done.stdout + done.stderr


def test_every_command_reads_an_untouched_file(exported: Folder) -> None:
    head = json.loads((exported.path / HEAD).read_bytes())
    verified = exported.json("audit", "verify", LOG)
    events = len(lines_of(exported)) - 1

    assert (verified["ok"], verified["proven_up_to"], verified["hash"]) == (True, events, head["hash"])
    assert json.loads(exported("audit", "head", LOG).out) == head, "hexadecimal digits in both formats"
    replayed = exported.json("audit", "replay", LOG)
    assert (replayed["ok"], replayed["events"], replayed["undecided"]) == (True, events, 0)
    assert exported.json("audit", "analyse", LOG)["events"] == events
    assert outside(exported) == (0, f"{LOG}: the chain fits its head\n")


def test_a_file_of_format_1_is_decided_and_searched_as_ever(folder: Folder) -> None:
    shutil.copy(OLD, folder.path / LOG)
    submitted = next(json.loads(line)["event"] for line in lines_of(folder) if b'"submitted"' in line)
    assert folder.json("audit", "replay", LOG)["decisions_by_kind"] == {"admission": 3, "retry": 3, "routing": 3}
    assert folder.json("audit", "analyse", LOG)["overall"]["ended"] == {"error": 1, "success": 2}
    assert folder.json("audit", "analyse", LOG, "--correlation", submitted["correlation_id"])["events"] == 4


def another_letter(line: bytes) -> bytes:
    """The line with another first character of its hash."""
    before, hashed = line.rsplit(b'"hash":"', 1)
    return before + b'"hash":"' + (b"1" if hashed[:1] != b"1" else b"2") + hashed[1:]


TAMPERED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], list[int]]] = {
    "changed": (lambda lines: [*lines[:5], lines[5].replace(b'"timestamp":"2', b'"timestamp":"3'), *lines[6:]], [5]),
    "changed hash": (lambda lines: [*lines[:5], another_letter(lines[5]), *lines[6:]], [5, 6]),
    "removed": (lambda lines: [*lines[:5], *lines[6:]], [6]),
    "swapped": (lambda lines: [*lines[:5], lines[6], lines[5], *lines[7:]], [5, 6, 7]),
    "inserted": (lambda lines: [*lines[:6], lines[5], *lines[6:]], [5]),
    "cut off": (lambda lines: lines[:-2], []),
}


def test_a_tampered_line_is_named_by_its_number(exported: Folder) -> None:
    """One change is found where it is, and not in all lines after it."""
    original = lines_of(exported)
    for name, (tamper, numbers) in TAMPERED.items():
        tampered = tamper(original)
        assert tampered != original
        (exported.path / LOG).write_bytes(b"".join(tampered))
        done = exported("audit", "verify", LOG, "--json")
        found = sorted({one["sequence"] for one in done.json["mismatches"]})
        assert (done.code, found) == (65, numbers or [len(original) - 2]), (name, done.json["mismatches"])
        code, text = outside(exported)
        assert (code, all(f"event {number}: " in text for number in numbers)) == (1, True), (name, text)


def test_a_log_that_is_appended_to_stays_in_format_1(folder: Folder) -> None:
    """Programs that ship its lines, and older processes, go on reading it."""
    folder.configure("audit: {jsonl: {path: copy.jsonl}}\n")
    folder.write("work.jsonl", json.dumps(WORK[0]) + "\n")
    assert folder.ends(folder.start("run", "work.jsonl", "--module", "naps"))[0] == 0
    header, *lines = map(json.loads, (folder.path / "copy.jsonl").read_bytes().splitlines())
    assert (header["format"], [line["sequence"] for line in lines]) == (1, list(range(1, len(lines) + 1)))
    assert folder("audit", "verify", "copy.jsonl").code == 0
