"""
A folder of files and a vault of notes, from the disk into the document store.

    python -m bench.tables.folders local_files 100000

syncs so many files of a new folder twice, and prints one line of JSON: seconds and pages of both syncs, peak memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, sleep, time_ns
from typing import Any

from bench.measure import FULL, Effort, Timing
from bench.table import MICROSECONDS, Run, Table
from reefknot.ingest.connectors.folders import SETTLED_NS
from reefknot.ingest.connectors.local_files import LocalFiles
from reefknot.ingest.connectors.obsidian_vault import ObsidianVault
from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import Connector, FetchRequest, SourceContext
from reefknot.runtime.clocks import SystemClock

CONNECTORS = {"local_files": LocalFiles, "obsidian_vault": ObsidianVault}
SIZES = {"local_files": 100_000, "obsidian_vault": 10_000}
QUICK_DIVISOR = 50
FILES_PER_FOLDER = 250
MOST_MB = 300
WORDS = (
    "reef",
    "knot",
    "joins",
    "two",
    "ends",
    "of",
    "a",
    "line",
    "and",
    "holds",
    "while",
    "there",
    "is",
    "load",
    "on",
    "both",
)


def content_of(connector: str, number: int) -> str:
    """About a kilobyte of text, different in every file; notes have front matter, tags and links."""
    words = " ".join(WORDS[(number + index * 7) % len(WORDS)] for index in range(180))
    if connector == "local_files":
        return f"file {number}\n{words}\n"
    front = f"---\ntags: [topic/{number % 50}]\naliases: [n{number}]\nrating: {number % 5}\n---\n"
    return f"{front}# Note {number}\n[[{number + 1}|next]] ![[{number}.png]] #day{number % 31}\n{words}\n"


def fill(root: Path, connector: str, files: int) -> None:
    ending = "txt" if connector == "local_files" else "md"
    for number in range(files):
        folder = root / f"{number // FILES_PER_FOLDER:04}"
        if number % FILES_PER_FOLDER == 0:
            folder.mkdir()
        (folder / f"{number}.{ending}").write_text(content_of(connector, number))


async def synced(connector: Connector, documents: SqliteDocuments) -> tuple[float, int, int]:
    """Seconds, pages and documents of one sync."""
    began, pages, number = perf_counter(), 0, 0
    while True:
        position = await documents.position("bench")
        page = await connector.fetch(FetchRequest(position.cursor, documents.known("bench")))
        await documents.keep("bench", page, after=position)
        pages, number = pages + 1, number + len(page.documents)
        if page.is_last:
            return perf_counter() - began, pages, number


async def both(connector: str, root: Path, file: Path) -> dict[str, Any]:
    """The first sync of a folder, then one in which nothing has changed."""
    context = SourceContext("bench", {"path": os.fspath(root)}, root, str)
    documents = await SqliteDocuments(file, SystemClock()).start()
    try:
        first = await synced(CONNECTORS[connector](context), documents)
        again = await synced(CONNECTORS[connector](context), documents)
    finally:
        await documents.close()
    return {"first": first, "again": again, "peak_mb": round(peak_mb(), 1)}


def peak_mb() -> float:
    """The peak memory of this process. `getrusage` would count that of the process it was forked from, too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise LookupError("VmHWM")


def measured(connector: str, files: int) -> dict[str, Any]:
    """Both syncs in a process of their own, whose memory nothing else has used."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "folder"
        root.mkdir()
        fill(root, connector, files)
        newest = max(entry.stat().st_ctime_ns for entry in os.scandir(root))
        sleep(max(0.0, (newest + SETTLED_NS - time_ns()) / 1e9 + 0.1))  # a file that is newer is read twice
        command = [sys.executable, "-m", "bench.tables.folders", connector, name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["first"][2] == files
    assert found["again"][2] == 0
    return found


def run(effort: Effort) -> Run:
    timings: dict[str, Timing] = {}
    remarks: list[str] = []
    for connector, size in SIZES.items():
        files = size if effort is FULL else size // QUICK_DIVISOR
        small, found = measured(connector, files // 10), measured(connector, files)
        for sync, label in (("first", "first sync"), ("again", "nothing changed")):
            seconds = found[sync][0] / files
            timings[f"{connector}, {label}"] = Timing(seconds, seconds)
        remarks.append(
            f"`{connector}`: {files} files, {files / found['first'][0]:.0f} documents/s in the first sync, "
            f"{files / found['again'][0]:.0f} files/s when nothing changed; peak memory {found['peak_mb']:.0f} MB, "
            f"with a tenth of the files {small['peak_mb']:.0f} MB."
        )
        assert found["peak_mb"] < MOST_MB, f"{connector}: {found['peak_mb']} MB"
    return Run(timings, tuple(remarks))


TABLES = (
    Table(
        name="ingestion-folders",
        title="Folders and vaults into the document store",
        about="Files of one kilobyte, 250 in a folder, read, hashed, indexed for search and kept in SQLite, 100 in one "
        "transaction. Of a note, front matter, tags, links and embeds as well. Per file.",
        unit=MICROSECONDS,
        reference="",
        targets={},
        packages=(),
        run=run,
    ),
)


if __name__ == "__main__":
    kind, place = sys.argv[1:]
    if place.isdigit():
        print(json.dumps(measured(kind, int(place))))
    else:
        print(json.dumps(asyncio.run(both(kind, Path(place) / "folder", Path(place) / "documents.db"))))
