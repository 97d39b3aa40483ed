"""A mailbox on a Dovecot of this machine: the first sync, the next one without news, and the memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import apsw

from bench.measure import FULL, Effort, Timing
from bench.table import MICROSECONDS, Run, Table
from reefknot.ports.connector import KnownItem, Page
from tools.imap_server import PASSWORD, Mailbox, message, running_imap

FIRST = "first sync"
NEXT = "next sync, nothing new"
MESSAGES = 50_000
FEW = 2_000
WORDS = "Some words that a person could have written to another one. " * 30
PAGE = 100

_CHILD = """
import asyncio, json, resource, sys, time
from pathlib import Path
from bench.tables.imap import PAGE, ItemTable
from reefknot.connectors.imap_mailbox import ImapMailbox
from reefknot.ports.connector import FetchRequest, SourceContext

settings, password, file = json.loads(sys.argv[1])

async def sync(items):
    source = ImapMailbox(SourceContext("mail", settings, Path("."), lambda reference: password))
    began, documents, peaks = time.perf_counter(), 0, []
    while True:
        page = await source.fetch(FetchRequest(items.cursor, items, PAGE))
        items.keep(page)
        documents += len(page.documents)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        if page.is_last:
            await source.close()
            return time.perf_counter() - began, documents, peaks[len(peaks) // 10], peaks[-1]

items = ItemTable(file)
print(json.dumps([asyncio.run(sync(items)), asyncio.run(sync(items))]))
"""


class ItemTable:
    """What a connector asks of a sink, in a file: the documents without their content, and the cursor."""

    def __init__(self, file: str) -> None:
        self.cursor = ""
        self._rows = apsw.Connection(file)
        self._rows.execute(
            "PRAGMA synchronous = OFF;"
            "CREATE TABLE item (id TEXT PRIMARY KEY, location TEXT UNIQUE, version TEXT, fingerprint TEXT);"
            "CREATE INDEX likeness ON item (fingerprint)"
        )

    def keep(self, page: Page) -> None:
        rows = [(one.id, one.location, one.version, one.fingerprint) for one in page.documents]
        with self._rows:
            self._rows.executemany("INSERT OR REPLACE INTO item VALUES (?, ?, ?, ?)", rows)
            self._rows.executemany("DELETE FROM item WHERE id = ?", [(gone,) for gone in page.deleted])
        self.cursor = page.cursor

    def _items(self, condition: str, *values: str | int) -> list[KnownItem]:
        return [
            KnownItem(*map(str, row)) for row in self._rows.execute(f"SELECT * FROM item WHERE {condition}", values)
        ]

    async def at(self, locations: Sequence[str]) -> dict[str, KnownItem]:
        found = self._items("location IN (SELECT value FROM json_each(?))", json.dumps(list(locations)))
        return {item.location: item for item in found}

    async def like(self, fingerprint: str) -> list[KnownItem]:
        return self._items("fingerprint = ? LIMIT 100", fingerprint)

    async def after(self, location: str, limit: int, *, prefix: str = "") -> list[KnownItem]:
        end = prefix + "\U0010ffff"
        return self._items(
            "location > max(?, ?) AND location < ? ORDER BY location LIMIT ?", location, prefix, end, limit
        )


def fill(mailbox: Mailbox, messages: int) -> None:
    """Messages of about 2 kB."""
    for first in range(0, messages, 1000):
        mailbox.deliver(*(message(number, text=f"{number} {WORDS}") for number in range(first, first + 1000)))


def run(effort: Effort) -> Run:
    messages = MESSAGES if effort is FULL else FEW
    with running_imap() as server, tempfile.TemporaryDirectory() as folder:
        mailbox = server.mailbox()
        fill(mailbox, messages)
        address = {"host": "127.0.0.1", "port": server.port, "tls": "none"}
        settings = {**address, "user": mailbox.user, "password": "env:MAIL_PASSWORD"}
        given = json.dumps([settings, PASSWORD, str(Path(folder) / "items.db")])
        done = subprocess.run([sys.executable, "-c", _CHILD, given], capture_output=True, text=True, check=True)
    (first, documents, early, late), (again, news, _, _) = json.loads(done.stdout)
    assert (documents, news) == (messages, 0)
    timings = {FIRST: Timing(first / messages, first / messages), NEXT: Timing(again / messages, again / messages)}
    remarks = (
        f"{messages:,} messages: {messages / first:,.0f} documents each second; the next sync takes {again * 1e3:,.0f} ms.",
        f"Peak memory (RSS): {late:,.0f} MB at the end, {early:,.0f} MB after a tenth of the pages.",
    )
    return Run(timings, remarks)


TABLES = (
    Table(
        name="imap",
        title="Reading a mailbox",
        about=(
            f"A process of its own reads a mailbox of {MESSAGES:,} messages of 2 kB from a Dovecot on this machine, in "
            f"pages of {PAGE}, and keeps ids and fingerprints in a file; the text is read and left. The figures are for "
            "one message."
        ),
        unit=MICROSECONDS,
        reference=FIRST,
        targets={},
        packages=("reefknot",),
        run=run,
    ),
)
