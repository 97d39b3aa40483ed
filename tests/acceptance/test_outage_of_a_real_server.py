"""An outage of a real HTTP server, met by `reefknot up`: until jobs wait, or for `OUTAGE_SECONDS` (`make soak`)."""

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

DOWN_S = float(os.environ.get("OUTAGE_SECONDS", "0"))
EVERY_S = 1.0 if DOWN_S else 0.0
MOST_JOBS = 400
SAMPLE = Path(reefknot.__file__).parent / "console" / "cli" / "samples" / "reefknot.yaml"


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


def jobs(folder: Folder) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in folder.json("job", "list", "--limit", "1000")["jobs"]}


def waiting(folder: Folder) -> list[dict[str, Any]]:
    """The answers about the jobs that wait for the destination."""
    answers = [one["waiting"] for one in jobs(folder).values() if one["waiting"]]
    return [one for one in answers if one["code"] == "destination_down"]


def submitted(folder: Folder, url: str) -> int:
    """Submit jobs, each when the one before it has met the outage, until it is over and some wait; how many."""
    began, number = time.monotonic(), 0
    while len(waiting(folder)) < 5 or time.monotonic() - began < DOWN_S:
        assert number < MOST_JOBS, "no breaker opened"
        name, inputs = f"j{number}", json.dumps({"url": url})
        assert folder("submit", "--type", "http.request", "--inputs", inputs, "--id", name).code == 0
        folders.until(lambda name=name: has_met_the_outage(jobs(folder)[name]))  # type: ignore[misc]
        number += 1
        time.sleep(max(0.0, began + number * EVERY_S - time.monotonic()))
    return number


def has_met_the_outage(job: dict[str, Any]) -> bool:
    return job["state"] == "pending" and (job["waiting"] or {}).get("code") in ("retry", "destination_down")


def test_jobs_wait_for_a_server_to_be_back(folder: Folder, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "PATIENCE_S", 240.0)  # a probe comes at least every minute, and then a slow start
    config = SAMPLE.read_text().replace("allow: []", "allow: [127.0.0.1]")
    folder.write("reefknot.yaml", config)
    folder.up()
    server.down = True
    number = submitted(folder, f"http://127.0.0.1:{server.server_port}/")
    folders.until(lambda: str(server.server_port) in str(folder.json("worker", "list")["workers"][0]["destinations"]))
    assert server.refused <= 20
    server.down = False
    folders.until(lambda: {one["state"] for one in jobs(folder).values()} == {"succeeded"})
    assert len(jobs(folder)) == number, "none is in quarantine, and none is lost"
    assert folder("audit", "replay").code == 0
