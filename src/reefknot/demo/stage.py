"""
The setting of the show: a folder with a configuration, files and a database, and a service that fails on purpose.

The configuration is the recommended one with a short queue, quarantine for failed work, and the three resources that
the steps may reach.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from reefknot.cli.config import recommended
from reefknot.demo.tour import DOWN, LOOPBACK, OK, Response, Service

QUEUE_SIZE = 12
_POOLS = "      resource_pools:\n        io: {max_queue_size: 5, max_concurrency: 4}\n"
CHANGES = (
    ("worker:\n", "worker:\n  quarantine_failed: true # failed work waits for an operator\n"),
    (
        "      max_queue_size: 1000\n",
        f"      max_queue_size: {QUEUE_SIZE} # short, to show a full queue\n{_POOLS}",
    ),
    ("        http:\n          max_attempts: 5\n", "        http:\n          max_attempts: 3\n"),
)
"""Replacements in the file that `reefknot init` writes."""


class FlakyService(Service):
    """
    A weather service: `/unlucky/place-N` fails N times first, `/slow/…` takes long, `/gone/…` is 404.

    While `down`, every request gets 503. Once `repaired`, `/gone/…` is there.
    """

    def __init__(self, slow: float) -> None:
        super().__init__()
        self.down = False
        self.repaired = False
        self.answered = 0
        self._slow = slow
        self._asked: Counter[str] = Counter()
        self._counting = threading.Lock()

    def respond(self, path: str) -> Response:
        with self._counting:
            self._asked[path] += 1
            self.requests += 1
            earlier = self._asked[path] - 1
        if self.down:
            return DOWN
        if path.startswith("/slow/"):
            time.sleep(self._slow)
        elif path.startswith("/gone/") and not self.repaired:
            return Response(404)
        elif path.startswith("/unlucky/") and earlier < int(path.rpartition("-")[2]):
            return DOWN
        with self._counting:
            self.answered += 1
        return OK


def set_up(folder: Path, port: int) -> Path:
    """Write files, a database and the configuration, and return the path of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "files").mkdir(exist_ok=True)
    (folder / "files" / "greeting.txt").write_text("ahoy\n", encoding="utf-8")
    with closing(sqlite3.connect(folder / "weather.db")) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS report (id INTEGER PRIMARY KEY, place TEXT, said TEXT)")
        connection.commit()
    path = folder / "reefknot.yaml"
    path.write_text(configuration(port), encoding="utf-8")
    return path


def configuration(port: int) -> str:
    """The recommended file with the replacements of the show."""
    text = recommended()
    for old, new in CHANGES:
        if text.count(old) != 1:
            raise LookupError(f"the recommended configuration has {text.count(old)} times {old!r}, once was expected")
        text = text.replace(old, new)
    return (
        f"{text}\nblocks:\n  http:\n    allow: ['{LOOPBACK}:{port}']\n  fs:\n    roots: [files]\n"
        "  sql:\n    connections:\n      weather: {url: 'sqlite:weather.db', access: write}\n"
    )
