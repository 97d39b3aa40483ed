"""A mailbox on a Dovecot of this machine: the first sync, the next one without news, and the memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import FULL, Effort, Timing
from bench.table import MICROSECONDS, Run, Table
from tools.imap_server import PASSWORD, Mailbox, message, running_imap

FIRST = "first sync"
NEXT = "next sync, nothing new"
MESSAGES = 50_000
FEW = 2_000
WORDS = "Some words that a person could have written to another one. " * 30
PAGE = 100

_CHILD = """
import asyncio, json, re, sys, time
from pathlib import Path
from bench.tables.imap import PAGE
from reefknot.ingest.connectors.imap_mailbox import ImapMailbox
from reefknot.runtime.clocks import SystemClock
from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import FetchRequest, SourceContext

settings, password, file = json.loads(sys.argv[1])

async def sync():
    store = await SqliteDocuments(file, SystemClock()).start()
    source = ImapMailbox(SourceContext("mail", settings, Path("."), lambda reference: password))
    position, known = await store.position("mail"), store.known("mail")
    began, documents, peaks = time.perf_counter(), 0, []
    while True:
        page = await source.fetch(FetchRequest(position.cursor, known, PAGE))
        position = await store.keep("mail", page, after=position)
        documents += len(page.documents)
        # Not `ru_maxrss`: that is never less than the memory of whoever started this process.
        peaks.append(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
        if page.is_last:
            break
    taken = time.perf_counter() - began
    await source.close()
    await store.close()
    return taken, documents, peaks[len(peaks) // 10], peaks[-1]

print(json.dumps([asyncio.run(sync()), asyncio.run(sync())]))
"""


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
        given = json.dumps([settings, PASSWORD, str(Path(folder) / "documents.db")])
        done = subprocess.run([sys.executable, "-c", _CHILD, given], capture_output=True, text=True, check=True)
    (first, documents, early, late), (again, news, _, _) = json.loads(done.stdout)
    assert (documents, news) == (messages, 0)
    timings = {FIRST: Timing(first / messages, first / messages), NEXT: Timing(again / messages, again / messages)}
    remarks = (
        f"{messages:,} messages: {messages / first:,.0f} documents each second; the next sync: {again * 1e3:,.0f} ms.",
        f"Peak memory (RSS): {late:,.0f} MB at the end, {early:,.0f} MB after a tenth of the pages.",
    )
    return Run(timings, remarks)


TABLES = (
    Table(
        name="imap",
        title="Reading a mailbox",
        about=(
            f"A process of its own reads a mailbox of {MESSAGES:,} messages of 2 kB from a Dovecot on this machine, in "
            f"pages of {PAGE}, and keeps each page with its cursor in a store of documents with full-text search. The "
            "figures are for one message."
        ),
        unit=MICROSECONDS,
        reference=FIRST,
        targets={},
        packages=("reefknot", "apsw"),
        run=run,
    ),
)
