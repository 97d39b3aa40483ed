"""
An outage of a real HTTP server, met by `reefknot up` in a process of its own, at about one job a second.

`make soak` lets it last for three minutes (`OUTAGE_SECONDS=180`), `make test` for a few seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import reefknot
from tests.acceptance import folder as folders
from tests.acceptance.folder import Folder

DOWN_S = float(os.environ.get("OUTAGE_SECONDS", "8"))
PER_SECOND = 1.0 if DOWN_S > 60 else 4.0
SAMPLE = Path(reefknot.__file__).parent / "cli" / "samples" / "reefknot.yaml"


class Server(ThreadingHTTPServer):
    """A server on this host that answers 503 while it is `down`, and counts these answers."""

    down = False
    refused = 0


class Answering(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.refused += self.server.down
        self.send_response(503 if self.server.down else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Answering) as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def states(folder: Folder) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in folder.json("job", "list", "--limit", "1000")["jobs"]:
        found.setdefault(one["state"], []).append(one)
    return found


def test_jobs_of_a_server_that_is_down_wait_and_are_done_when_it_is_back(
    folder: Folder, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PATIENCE_S", 90.0)
    config = SAMPLE.read_text().replace("allow: []", "allow: [127.0.0.1]")
    (folder.path / "reefknot.yaml").write_text(config)
    folder.up()
    inputs = json.dumps({"url": f"http://127.0.0.1:{server.server_port}/"})
    server.down = True
    began, number = time.monotonic(), 0
    while time.monotonic() - began < DOWN_S or number < 12:
        assert folder("submit", "--type", "http.request", "--inputs", inputs, "--id", f"j{number}").code == 0
        number += 1
        time.sleep(max(0.0, began + number / PER_SECOND - time.monotonic()))
    folders.until(lambda: bool(folder.json("worker", "list")["workers"][0]["destinations"]))
    waiting = [one for one in states(folder)["pending"] if "waiting: destination is down" in (one.get("reason") or "")]
    assert waiting, "they say why"
    assert server.refused <= 20
    server.down = False
    folders.until(lambda: len(states(folder).get("succeeded", [])) == number)
    assert "quarantined" not in states(folder)
    assert folder("audit", "replay").code == 0
