"""Every example runs by itself, quickly, in an empty folder, with warnings as errors."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import reefknot as rk
from reefknot.audit.model.chain import Head, LogLine, event_line, link, read_line
from reefknot.console.cli import main
from tests.warm_commands import run_cold

ROOT = Path(__file__).resolve().parents[2]
VERIFY_CHAIN = ROOT / "examples" / "verify_chain.py"
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {VERIFY_CHAIN})
"""Those that run by themselves; `verify_chain.py` is given a log."""
TIMEOUT_S = 30


def run_example(example: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    own = os.environ | {"PYTHONWARNINGS": "error"}
    return run_cold(sys.executable, example, cwd=folder, env=own, timeout=TIMEOUT_S)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    done = run_example(example, tmp_path)

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_broken_example_is_caught(tmp_path: Path) -> None:
    example = tmp_path / "broken.py"
    example.write_text("assert 1 == 2\n")

    assert run_example(example, tmp_path).returncode != 0


# ---- verify_chain.py -------------------------------------------------------------------------------------------------


def exported(folder: Path) -> tuple[Path, Path]:
    """A log that the command exported from a store with a retry, text beyond ASCII and a removed beginning."""

    async def write() -> None:
        async with rk.open_store(f"sqlite:{folder / 'state.db'}") as store:
            manager = rk.RetryManager(idempotency=store.idempotency, audit=store.audit)
            policy = rk.RetryPolicy(2, 0.00001, jitter="full")
            for name in ("α", "β", "γ"):
                with pytest.raises(rk.RetryError):
                    await manager.execute_with_retry("KV_PUT", f"put {name}", broken, policy)

    async def broken() -> None:
        raise ConnectionError('the "Straße" is closed,"hash":"x","seq":9')

    asyncio.run(write())
    assert main(["audit", "export", str(folder / "log.jsonl"), "--engine", f"sqlite:{folder / 'state.db'}"]) == 0
    return folder / "log.jsonl", folder / "log.jsonl.head.json"


def verified(*files: Path) -> subprocess.CompletedProcess[str]:
    """The example without any package beside the standard library."""
    return run_cold(sys.executable, "-I", "-S", VERIFY_CHAIN, *files, timeout=TIMEOUT_S)


def test_an_exported_log_is_verified_with_the_standard_library_alone(tmp_path: Path) -> None:
    log, head = exported(tmp_path)

    assert (verified(log).returncode, verified(log, head).returncode) == (0, 0), verified(log, head)
    assert verified(log, head).stdout == f"{log}: the chain fits its head\n"


def edited(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2].replace(b'"total_attempts":2', b'"total_attempts":1'), *lines[3:]]


def hashed_anew(lines: list[bytes]) -> list[bytes]:
    """An edit by somebody who knows the format: every hash from there on is computed again."""
    header = json.loads(lines[0])
    head = Head(header["chain"], header["sequence"], header["hash"])
    made = [lines[0]]
    for line in edited(lines)[1:]:
        body = bytes(msgspec.json.decode(line, type=dict[str, msgspec.Raw])["event"])
        head, _ = link(head, body)
        made.append(event_line(head, body))
    return made


@pytest.mark.parametrize(
    ("tamper", "shows_alone"),
    [
        (edited, True),
        (lambda lines: [*lines[:2], *lines[3:]], True),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], True),
        (lambda lines: [lines[0].replace(b'"sequence":0', b'"sequence":1'), *lines[2:]], True),
        (lambda lines: lines[:-1], False),
        (hashed_anew, False),
    ],
    ids=["edited", "removed", "swapped", "beginning removed", "cut off", "hashed anew"],
)
def test_the_example_finds_what_was_done_to_a_log(
    tmp_path: Path, tamper: Callable[[list[bytes]], list[bytes]], shows_alone: bool
) -> None:
    log, head = exported(tmp_path)
    log.write_bytes(b"".join(tamper(log.read_bytes().splitlines(keepends=True))))

    assert verified(log, head).returncode == 1, "with a head that was kept elsewhere, everything shows"
    assert verified(log).returncode == int(shows_alone), "and without one, accidents do"


# ---- the exact form of a line ----------------------------------------------------------------------------------------


def changed(number: int, old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    """Replaces bytes of one line that no hash covers."""

    def change(lines: list[bytes]) -> list[bytes]:
        assert old in lines[number]
        return [*lines[:number], new.join(lines[number].rsplit(old, 1)), *lines[number + 1 :]]

    return change


def another_event_behind(lines: list[bytes]) -> list[bytes]:
    """The whole line again behind its own members: a reader of JSON sees the second event."""
    fake = lines[1].replace(b'"operation":"put ', b'"operation":"get ')
    return [lines[0], lines[1].removesuffix(b"}\n") + b"," + fake[1:], *lines[2:]]


@pytest.mark.parametrize(
    "forge",
    [
        changed(1, b"}\n", b',"event":{"event_type":"fake"}}\n'),
        another_event_behind,
        lambda lines: [lines[0], lines[1].replace(b'{"event":', b'{"evenT":', 1), *lines[2:]],
        changed(1, b"}\n", b" }\n"),
        changed(1, b"}\n", b',"note":1}\n'),
        changed(1, b"}\n", b"}\r\n"),
        changed(0, b'"format":2', b'"format":1'),
        changed(0, b'"format":2', b'"format":3'),
        changed(0, b"}\n", b',"chain":"0000000000000000"}\n'),
        lambda lines: [*lines[:2], b"\n", *lines[2:]],
        lambda lines: [*lines, b"\xff garbage\n"],
        lambda lines: [*lines, b"[" * 50_000 + b"\n"],
        lambda lines: [*lines[:-1], lines[-1].rstrip(b"\n")],
        lambda _: [],
    ],
    ids=[
        "second event",
        "second line",
        "other key",
        "blank",
        "further member",
        "CRLF",
        "format 1",
        "format 3",
        "second chain",
        "empty line",
        "garbage",
        "deep",
        "no line feed",
        "empty file",
    ],
)
def test_the_example_accepts_no_other_form_of_a_line(
    tmp_path: Path, forge: Callable[[list[bytes]], list[bytes]]
) -> None:
    log, head = exported(tmp_path)
    log.write_bytes(b"".join(forge(log.read_bytes().splitlines(keepends=True))))
    seen = verified(log, head)

    assert (seen.returncode, seen.stderr) == (1, "")
    assert "cannot be verified: " in seen.stdout


def test_the_example_accepts_the_members_that_the_format_names(tmp_path: Path) -> None:
    """`at`, `filed` and `more`, in this order."""
    log, head = exported(tmp_path)
    tail = b',"at":1,"filed":{"event_type":"a{\\"}","work_id":null},"more":2}\n'
    log.write_bytes(b"".join(changed(1, b"}\n", tail)(log.read_bytes().splitlines(keepends=True))))

    assert verified(log, head).returncode == 0, verified(log, head)


def test_the_example_compares_with_every_head_of_the_last_chain(tmp_path: Path) -> None:
    log, head = exported(tmp_path)
    own = json.loads(head.read_bytes())
    before = {"chain": "0" * 16, "sequence": 0, "hash": "0" * 64}
    first = read_line(log.read_bytes().splitlines(keepends=True)[1])
    assert isinstance(first, LogLine)
    middle = {"at": "2026-01-01T00:00:00Z", "chain": own["chain"], "sequence": 1, "hash": first.hash}

    def with_heads(*heads: dict[str, object]) -> int:
        head.write_text("".join(f"{json.dumps(one)}\n" for one in heads))
        seen = verified(log, head)
        assert seen.stderr == ""
        return seen.returncode

    assert with_heads(before, middle, own) == 0
    assert with_heads(middle | {"hash": "1" * 64}, own) == 1
    assert with_heads(before) == 1, "the start of another chain"
    assert with_heads() == 1
    assert with_heads({"chain": own["chain"]}) == 1


def test_the_example_says_which_file_is_missing(tmp_path: Path) -> None:
    log, head = exported(tmp_path)
    head.unlink()
    for files in ((log, head), (head,), (tmp_path,), ()):
        seen = verified(*files)
        assert (seen.returncode, seen.stderr) == (1, "")
        assert "cannot be verified: " in seen.stdout
