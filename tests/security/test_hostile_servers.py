"""Servers that answer with far more than was asked for: a sync, a process of its own, stays below 200 MB."""

import gzip
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.stepping import Loopback, Reply, Seen
from tests.security.socket_server import PATIENCE_S, SocketServer
from tests.warm_commands import run_cold

MEGABYTE = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
MOST_MB = 200
COMMAND = """
import atexit, re, sys
from pathlib import Path

def tell_peak():
    # Not `ru_maxrss`: that is never less than the memory of the process that started this one.
    peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
    print("PEAK", int(peak[1]) // 1024, flush=True)

atexit.register(tell_peak)
from reefknot.console.cli import main
sys.argv = ["reefknot", "source", "run", "it"]
{before}
sys.exit(main())
"""


def synced(folder: Path, source: str, before: str = "") -> tuple[int, str, int]:
    """The exit code of a sync, what it said, and its largest memory in MB. `before` is run first."""
    (folder / "reefknot.yaml").write_text(f"sources:\n  it: {source}\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REEFKNOT")}
    words = [sys.executable, "-c", COMMAND.replace("{before}", before)]
    own = {"PYTHONPATH": str(ROOT / "src"), "SECRET": "x", "MALLOC_ARENA_MAX": "2"}
    done = run_cold(*words, cwd=folder, env=kept | own, timeout=PATIENCE_S)
    peak = re.search(r"PEAK (\d+)", done.stdout)
    assert peak is not None, done.stderr[-2000:]
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return done.returncode, done.stdout + done.stderr, int(peak[1])


ISSUE = b'"number": 1, "updated_at": "2026-01-01T00:00:00Z"'
LISTINGS: dict[str, Callable[[], bytes]] = {
    "labels": lambda: b'[{%b, "labels": [%b{}]}]' % (ISSUE, b"{}," * (20 * MEGABYTE)),
    "few labels": lambda: b'[{%b, "labels": [%b{}]}]' % (ISSUE, b"{}," * (5 * MEGABYTE)),
    "wide text": lambda: b'[{%b, "body": "\xf0\x9f\xaa\xa2%b"}]' % (ISSUE, b"a" * (16 * MEGABYTE - 1000)),
}


@contextmanager
def github(listing: str, comments: bytes = b"[]") -> Iterator[str]:
    """The settings of a source whose server answers with this listing of issues, packed, and with these comments."""
    body = gzip.compress(LISTINGS[listing](), 1)

    def answer(seen: Seen) -> Reply:
        if seen.path.startswith("/repos/o/r/issues?"):
            return Reply(200, {"Content-Encoding": "gzip"}, body)
        if seen.path.startswith("/repos/o/r/issues/1/comments"):
            return Reply(200, {}, comments)
        return Reply(200, {}, b'{"full_name": "o/r", "default_branch": "main"}')

    with Loopback(answer) as server:
        yield f"{{connector: github_repository, repository: o/r, base_url: '{server.url('')}', content: [issues]}}"


def test_a_listing_of_a_great_many_objects_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """64 MB of empty labels, packed into a few kB: decoded they were gigabytes."""
    with github("labels") as source:
        code, said, peak = synced(tmp_path, source)
    assert code == 1, said
    assert "which is too large" in said
    assert peak < MOST_MB


UNBOUNDED = "from reefknot.ingest.connectors import github_api; github_api.has_more_objects = lambda body, most: False"


@pytest.mark.parametrize(
    ("listing", "comments", "told", "before"),
    [
        *(("few labels", b"[]", "", ""), ("wide text", b"[]", "", ""), ("wide text", b"{", "1 failed", "")),
        pytest.param("few labels", b"[]", "", UNBOUNDED, id="control: without a bound of objects"),
    ],
)
def test_a_listing_within_bounds_needs_little_memory(
    tmp_path: Path, listing: str, comments: bytes, told: str, before: str
) -> None:
    """An issue that fails does not keep its text."""
    with github(listing, comments) as source:
        code, said, peak = synced(tmp_path, source, before)
    assert before or told or code in (0, 1), said
    assert told in said
    assert (peak > MOST_MB) is bool(before)


MESSAGES = 50
REAL_BYTES = 6_000_000
CHUNK = 512 * 1024
LARGE = b"Subject: x\r\nContent-Type: application/octet-stream\r\n\r\n"
WIDE = b"Subject: x\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n\xf0\x9f\xaa\xa2" + b"a" * (CHUNK - 1000)


HOLDING = """
from reefknot.ingest.connectors.imap_messages import MessageReader
held, document = [], MessageReader.document
MessageReader.document = lambda self, *values, **more: (held.append(values[-1]), document(self, *values, **more))[1]
"""


class LyingServer(SocketServer):
    """An IMAP server with messages of 100 bytes, as it says; `attack` is how it goes on."""

    def __init__(self, attack: str) -> None:
        super().__init__()
        self._attack = attack

    def serve(self, link: socket.socket) -> None:
        link.sendall(b"* PREAUTH hello\r\n")
        commands = link.makefile("rb")
        while line := commands.readline():
            tag, _, command = line.decode().rstrip().partition(" ")
            for part in self._answer(command):
                link.sendall(part)
            link.sendall(f"{tag} OK done\r\n".encode())

    def _answer(self, command: str) -> Iterator[bytes]:
        if command.startswith("LIST"):
            yield b'* LIST () "/" INBOX\r\n'
            if self._attack == "folders":
                yield from (b"* LIST\r\n" * 10_000 for _ in range(100))
        elif command.startswith("EXAMINE"):
            yield b"* %d EXISTS\r\n* OK [UIDVALIDITY 5] x\r\n* OK [UIDNEXT %d] x\r\n" % (MESSAGES, MESSAGES + 1)
        elif command.startswith("UID SEARCH"):
            yield b"* SEARCH %b\r\n" % b" ".join(b"%d" % uid for uid in range(1, MESSAGES + 1))
        elif "RFC822.SIZE" in command:
            yield from (b"* 1 FETCH (UID %d RFC822.SIZE 100)\r\n" % uid for uid in self._uids(command))
        elif "BODY.PEEK" in command:
            yield from self._bodies(command)

    def _bodies(self, command: str) -> Iterator[bytes]:
        for uid in self._uids(command):
            if self._attack == "words":
                yield from (b"* 1 FETCH (UID %d %b)\r\n" % (uid, b"a " * 30_000) for _ in range(8))
            elif self._attack == "literals":
                yield b"* 1 FETCH (UID %d BODY[]<0> {0}\r\n%b)\r\n" % (uid, b" {0}\r\n" * 80_000)
            else:
                start, count = map(int, command.partition("<")[2].rstrip(">)").split("."))
                size = min(count, max(0, REAL_BYTES - start))
                body = WIDE if self._attack == "wide texts" else LARGE.ljust(size, b"a")[:size]
                section = "HEADER" if "HEADER" in command else ""
                yield b"* 1 FETCH (UID %d BODY[%b]<0> {%d}\r\n%b)\r\n" % (uid, section.encode(), len(body), body)

    def _uids(self, command: str) -> list[int]:
        found: list[int] = []
        for one in command.split()[2].split(","):
            first, _, last = one.partition(":")
            found += range(int(first), int(last or first) + 1)
        return found


@contextmanager
def lying(attack: str) -> Iterator[str]:
    with LyingServer(attack) as server:
        settings = f"host: 127.0.0.1, port: {server.port}, tls: none, user: ann, password: 'env:SECRET'"
        yield f"{{connector: imap_mailbox, {settings}}}"


@pytest.mark.parametrize("attack", ["sizes", "wide texts", "words", "literals", "folders", "control: held"])
def test_a_mail_server_that_lies_about_sizes_costs_little_memory(tmp_path: Path, attack: str) -> None:
    """
    Messages of 6 MB that were announced with 100 bytes; texts that are large in memory; a great many small parts.

    The control holds messages until all of a group are read: as announced, fifty of them are small.
    """
    is_control = attack == "control: held"
    with lying("sizes" if is_control else attack) as source:
        code, said, peak = synced(tmp_path, source, HOLDING if is_control else "")
    assert is_control or code == (0 if attack in ("sizes", "wide texts") else 75), said
    assert (peak > MOST_MB) is is_control
