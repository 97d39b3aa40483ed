"""Every example runs by itself, quickly, in an empty folder, with warnings as errors."""

import asyncio
import json
import os
import shutil
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


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that the command exported from a store with a retry, text beyond ASCII and a removed beginning."""
    folder = tmp_path_factory.mktemp("original")
    engine = f"sqlite:{folder / 'state.db'}"

    async def write() -> None:
        async with rk.open_store(engine) as store:
            manager = rk.RetryManager(idempotency=store.idempotency, audit=store.audit)
            policy = rk.RetryPolicy(2, 0.00001, jitter="full")
            for name in ("α", "β", "γ"):
                with pytest.raises(rk.RetryError):
                    await manager.execute_with_retry("KV_PUT", f"put {name}", broken, policy)

    async def broken() -> None:
        raise ConnectionError('the "Straße" is closed,"hash":"x","seq":9')

    asyncio.run(write())
    assert main(["audit", "export", str(folder / "log.jsonl"), "--engine", engine]) == 0
    return folder


@pytest.fixture
def exported(original: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of that log, and of its head."""
    log, head = (Path(shutil.copy(original / name, tmp_path)) for name in ("log.jsonl", "log.jsonl.head.json"))
    return log, head


def change(log: Path, by: Callable[[list[bytes]], list[bytes]]) -> None:
    log.write_bytes(b"".join(by(log.read_bytes().splitlines(keepends=True))))


def verified(*files: Path) -> subprocess.CompletedProcess[str]:
    """The example without any package beside the standard library."""
    return run_cold(sys.executable, "-I", "-S", VERIFY_CHAIN, *files, timeout=TIMEOUT_S)


def test_an_exported_log_is_verified_with_the_standard_library_alone(exported: tuple[Path, Path]) -> None:
    log, head = exported
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


TAMPERED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], bool]] = {
    "edited": (edited, True),
    "removed": (lambda lines: [*lines[:2], *lines[3:]], True),
    "swapped": (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], True),
    "beginning removed": (lambda lines: [lines[0].replace(b'"sequence":0', b'"sequence":1'), *lines[2:]], True),
    "cut off": (lambda lines: lines[:-1], False),
    "hashed anew": (hashed_anew, False),
}
"""What was done, and whether it shows without a head."""


@pytest.mark.parametrize("done", TAMPERED)
def test_the_example_finds_what_was_done_to_a_log(exported: tuple[Path, Path], done: str) -> None:
    log, head = exported
    tamper, shows_alone = TAMPERED[done]
    change(log, tamper)
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


FORGED: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "second event": changed(1, b"}\n", b',"event":{"event_type":"fake"}}\n'),
    "second line": another_event_behind,
    "other key": lambda lines: [lines[0], lines[1].replace(b'{"event":', b'{"evenT":', 1), *lines[2:]],
    "blank": changed(1, b"}\n", b" }\n"),
    "further member": changed(1, b"}\n", b',"note":1}\n'),
    "CRLF": changed(1, b"}\n", b"}\r\n"),
    "format 1": changed(0, b'"format":2', b'"format":1'),
    "format 3": changed(0, b'"format":2', b'"format":3'),
    "second chain": changed(0, b"}\n", b',"chain":"0000000000000000"}\n'),
    "empty line": lambda lines: [*lines[:2], b"\n", *lines[2:]],
    "garbage": lambda lines: [*lines, b"\xff garbage\n"],
    "deep": lambda lines: [*lines, b"[" * 50_000 + b"\n"],
    "no line feed": lambda lines: [*lines[:-1], lines[-1].rstrip(b"\n")],
    "empty file": lambda _: [],
}


@pytest.mark.parametrize("form", FORGED)
def test_the_example_accepts_no_other_form_of_a_line(exported: tuple[Path, Path], form: str) -> None:
    log, head = exported
    change(log, FORGED[form])
    seen = verified(log, head)
    assert (seen.returncode, seen.stderr) == (1, "")
    assert "cannot be verified: " in seen.stdout


def test_the_example_accepts_the_members_that_the_format_names(exported: tuple[Path, Path]) -> None:
    """`at`, `filed` and `more`, in this order."""
    log, head = exported
    change(log, changed(1, b"}\n", b',"at":1,"filed":{"event_type":"a{\\"}","work_id":null},"more":2}\n'))
    assert verified(log, head).returncode == 0, verified(log, head)


def test_the_example_compares_with_every_head_of_the_last_chain(exported: tuple[Path, Path]) -> None:
    log, head = exported
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


def test_the_example_says_which_file_is_missing(exported: tuple[Path, Path]) -> None:
    log, head = exported
    head.unlink()
    for files in ((log, head), (head,), (log.parent,), ()):
        seen = verified(*files)
        assert (seen.returncode, seen.stderr) == (1, "")
        assert "cannot be verified: " in seen.stdout
