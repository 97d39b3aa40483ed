"""The dashboard as people start it: beside a system, alone over a store, and with a store that goes away."""

import json
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.acceptance.folder import PATIENCE_S, Folder, until
from tests.warm_commands import run_cold

CERTIFICATE = Path(__file__).parents[1] / "integration" / "localhost.pem"
SERVED = {"REEFKNOT__DASHBOARD__ENABLED": "true", "REEFKNOT__DASHBOARD__PORT": "0"}


class Address(NamedTuple):
    """The address that a start has printed, and its token."""

    url: str
    token: str

    def request(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        data = None if body is None else json.dumps(body).encode()
        told = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **headers}
        asked = urllib.request.Request(f"{self.url}api/v1{path}", data, told)
        trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE_S, context=trusting) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


def served(process: subprocess.Popen[str]) -> Address:
    """The address in what a process says."""
    assert process.stderr is not None
    lines = []
    while line := process.stderr.readline():
        lines.append(line)
        if found := re.search(r"(https?://\S+/)(?:#token=(\S+))?$", line) if "dashboard" in line else None:
            return Address(found[1], found[2] or token_in(process.stderr.readline()))
    raise AssertionError(lines)


def token_in(line: str) -> str:
    """The token in the file that a line names; nothing when one is configured."""
    found = re.search(r"log in with the address in (.+), which only this user can read", line)
    return "" if found is None else Path(found[1]).read_text().strip().partition("#token=")[2]


def started(folder: Folder, *words: str) -> subprocess.Popen[str]:
    for name, value in SERVED.items():
        folder.set_variable(name, value)
    return folder.start(*words)


@pytest.mark.parametrize("words", [("up",), ("dashboard", "--port", "0")], ids=["up", "dashboard"])
def test_the_token_of_a_service_is_in_no_log_but_in_a_private_file(folder: Folder, words: tuple[str, ...]) -> None:
    """stderr is a pipe here, as that of a unit of systemd is its journal."""
    folder.wait("one")
    process = started(folder, *words)
    address = served(process)
    (file,) = (folder.path / ".reefknot").glob("dashboard-*.url")
    assert file.read_text() == f"{address.url}#token={address.token}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert address.request("/jobs")[0] == 200
    _, _, err = folder.stop(process)
    assert (address.token in err, file.exists()) == (False, False)


def test_a_system_serves_its_own_store_and_work_is_done_through_the_api(folder: Folder) -> None:
    process = started(folder, "up", "--module", "naps")
    address = served(process)

    assert address.request("/jobs")[1]["jobs"] == []
    status, workers = address.request("/workers")
    assert (status, [one["worker_id"] for one in workers["workers"]]) == (200, ["worker-1"])
    folder.wait("held")
    until(lambda: "held" in folder.begun())
    status, job = address.request("/jobs/held")
    assert (status, job["state"]) == (200, "running")
    status, answer = address.request("/jobs/held/cancel", {"because": "not needed"})
    assert (status, answer["cancelled"]) == (200, True)
    assert address.request("/jobs/held/cancel", {})[0] == 409
    assert address.request("/jobs/unknown")[0] == 404

    code, _, err = folder.stop(process, signal.SIGINT)
    assert code == 130, err
    assert "not served" not in err


def test_open_connections_do_not_keep_a_system_from_ending(folder: Folder) -> None:
    """One that says nothing, one that stops in the middle of its headers, and one that follows a live page."""
    process = started(folder, "up")
    address = served(process)
    port = int(address.url.rsplit(":", 1)[1].rstrip("/"))
    host = f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {address.token}"
    head = f"GET /live?view=overview HTTP/1.1\r\n{host}\r\n\r\n"
    with ExitStack() as stack:
        idle, halfway, live = (
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) for _ in range(3)
        )
        idle.sendall(b"")
        halfway.sendall(head[:40].encode())
        live.sendall(head.encode())
        answer = b""
        while b"event:" not in answer:
            part = live.recv(4096)
            assert part, answer
            answer += part
        assert b" 200 OK" in answer
        begun = time.monotonic()
        assert folder.stop(process, signal.SIGINT)[0] == 130
        assert time.monotonic() - begun < 10, "and not the drain of half a minute"


def test_looks_at_the_health_leave_a_system_its_store(folder: Folder) -> None:
    """The look must not give back the locks on the file: the next outside client would take its log away."""
    process = started(folder, "up")
    address = served(process)
    page = urllib.request.Request(f"{address.url}health", headers={"Authorization": f"Bearer {address.token}"})
    with urllib.request.urlopen(page, timeout=PATIENCE_S) as answer:
        assert answer.status == 200
    assert address.request("/doctor")[0] == 200
    look = "c.execute('SELECT count(*) FROM work'); c.close()"
    run_cold(sys.executable, "-c", f"import sqlite3; c = sqlite3.connect('{folder.store}'); {look}", check=True)

    assert (folder.path / ".reefknot" / "state.db-wal").exists()
    assert address.request("/jobs", {"assignment_id": "after", "job": {"type": "fs.blob_get"}})[0] == 200
    until(lambda: address.request("/jobs/after")[1]["state"] not in ("pending", "running"))
    assert folder.stop(process, signal.SIGINT)[0] == 130


def test_a_store_that_goes_away_is_told_and_found_again_when_it_is_back(folder: Folder) -> None:
    folder.submit("fs.blob_get", "kept")
    process = started(folder, "dashboard")
    address = served(process)
    assert address.request("/jobs/kept")[0] == 200
    store, away = folder.path / ".reefknot", folder.path / "away"
    shutil.copytree(store, away)
    shutil.rmtree(store)
    until(lambda: address.request("/jobs/kept")[0] == 503)
    status, answer = address.request("/jobs/kept")
    assert (status, answer["error"]["kind"]) == (503, "unreachable")
    assert "state.db" in answer["error"]["message"]

    away.rename(store)
    until(lambda: address.request("/jobs/kept")[0] == 200)
    assert folder.stop(process)[0] == 143


def test_a_wrong_token_host_or_filter_is_told_with_what_to_do_and_a_reader_may_not_act(folder: Folder) -> None:
    folder.submit("fs.blob_get", "kept")
    address = served(started(folder, "dashboard", "--read-only"))
    assert address.request("/jobs/kept")[0] == 200
    status, answer = address.request("/jobs/kept/cancel", {})
    assert (status, answer["error"]["kind"]) == (403, "forbidden")
    assert folder.state("kept") == "pending"
    wrong = address._replace(token="wrong")
    for (status, answer), expected, kind, message in (
        (wrong.request("/jobs"), 401, "unauthorized", "this token is not accepted"),
        (address.request("/jobs", Authorization=""), 401, "unauthorized", "a token is needed"),
        (address.request("/jobs?state=nosuch"), 400, "invalid", "state: 'nosuch' is unknown; accepted: "),
        (address.request("/jobs", Host="evil.example"), 403, "forbidden", "add the name to dashboard.allowed_hosts"),
        (address.request("/jobs?since=yesterday"), 400, "invalid", "an age: 90s, 15m, 2h, 7d"),
        (address.request("/jobs?status=failed"), 400, "invalid", "accepted here: state, type"),
    ):
        told = (status, answer["error"]["kind"], message in answer["error"]["message"])
        assert told == (expected, kind, True), answer


def test_over_tls_with_a_configured_token_it_is_served_on_another_address(folder: Folder) -> None:
    assert folder("submit", "--type", "fs.blob_get", "--id", "kept").code == 0
    folder.set_variable("TOKEN", "a-token-that-is-long-enough")
    folder.write(
        "reefknot.yaml",
        f"dashboard: {{host: 0.0.0.0, port: 0, allowed_hosts: [localhost], operator_token: env:TOKEN, "
        f"tls_certificate: {CERTIFICATE}, tls_key: {CERTIFICATE}}}\n",
    )
    process = folder.start("dashboard")
    found = served(process)
    assert (found.url.startswith("https://0.0.0.0:"), found.token) == (True, "")

    address = Address(found.url.replace("0.0.0.0", "localhost"), "a-token-that-is-long-enough")
    assert address.request("/jobs/kept")[0] == 200
    assert address._replace(token="wrong").request("/jobs")[0] == 401
