"""
The smoke test of an installed package: what works with the extras that are there, and what says which one is missing.

    ENVIRONMENT/bin/python -I smoke_test.py [EXTRA,EXTRA]

It is run by the environment's own interpreter, in an empty folder, and imports nothing of the repository. A feature of
each extra is tried: one that is installed has to work, and one that is not has to name its extra. With one extra alone,
its own feature is tried and that of another one, which is missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socket import socket
from threading import Thread
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

COMMAND = str(Path(sys.executable).parent / "reefknot")
TIMEOUT_S = 120
SETTLED = "worker: {retries: {v2: {enabled: true}}, queue: {v2: {enabled: true}}}\n"


def ran(*words: str, code: int | None = 0, **environment: str) -> str:
    """All that a command prints; its exit code has to be `code`, None for any."""
    done = subprocess.run(
        [COMMAND, *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | environment, check=False
    )
    printed = done.stdout + done.stderr
    assert code is None or done.returncode == code, f"{' '.join(words)}: exit code {done.returncode}\n{printed[-3000:]}"
    return printed


def free_port() -> int:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def result_of(job: Mapping[str, object], configuration: str) -> str:
    """The result of one job under this configuration, as JSON."""
    Path("reefknot.yaml").write_text(SETTLED + configuration)
    Path("job.jsonl").write_text(json.dumps({"job": job, "options": {"retry_count": 0}}) + "\n")
    ran("run", "job.jsonl", "--engine", "memory:", "--new", "--results", "result.jsonl", "--force", code=None)
    return Path("result.jsonl").read_text()


# ---- without extras --------------------------------------------------------------------------------------------------


def core(installed: set[str]) -> None:
    """The decorator, a store, jobs, a system that stays up, and the doctor who knows the extras."""
    import reefknot as rk

    calls: list[int] = []

    @rk.retry(attempts=3, base_delay=0.001)
    def flaky() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionResetError("reset by peer")
        return "here"

    assert (flaky(), len(calls)) == ("here", 3)
    assert rk.__version__ in ran("--version")
    ran("init")
    ran("config", "check")
    inputs = {"path": "a.txt", "content": "ahoy"}
    Path("work.jsonl").write_text(json.dumps({"job": {"type": "fs.blob_put", "payload": inputs}}) + "\n")
    assert "1 succeeded" in ran("run", "work.jsonl")
    assert Path("files/a.txt").read_text() == "ahoy"
    ran("submit", "--type", "fs.blob_get", "--inputs", '{"path": "a.txt"}', "--id", "later")
    assert "1 succeeded" in ran("up", "--for", "1")
    assert "ahoy" in ran("job", "show", "later", "--json")
    ran("audit", "verify")
    (extras,) = (one for one in json.loads(_stdout("doctor", "--json"))["findings"] if one["check"] == "extras")
    missing = sorted(set(FEATURES) - installed)
    assert ("not installed" in extras["text"]) is bool(missing), extras
    assert not missing or f"not installed: {', '.join(missing)}" in extras["text"], extras
    assert (Path(rk.__file__).parent / "py.typed").is_file()


def _stdout(*words: str) -> str:
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout


# ---- one feature of each extra ---------------------------------------------------------------------------------------


class Hello(BaseHTTPRequestHandler):
    """Answers every request alike."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *about: object) -> None:
        """Write no line."""


def http() -> str:
    server = HTTPServer(("127.0.0.1", 0), Hello)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        job = {"type": "http.request", "payload": {"url": f"http://127.0.0.1:{server.server_port}/"}}
        return result_of(job, f"blocks: {{http: {{allow: ['127.0.0.1:{server.server_port}']}}}}\n")
    finally:
        server.shutdown()
        server.server_close()


def sql() -> str:
    url = f"postgresql://nobody@127.0.0.1:{free_port()}/nowhere?connect_timeout=2"
    job = {"type": "sql.query", "payload": {"connection": "shop", "query": "SELECT 1"}}
    return result_of(job, f"blocks: {{sql: {{connections: {{shop: '{url}'}}}}}}\n")


def nats() -> str:
    Path("reefknot.yaml").write_text(SETTLED)
    return ran("doctor", "--engine", f"nats://127.0.0.1:{free_port()}", code=69)


def ingest() -> str:
    settings = "connector: github_repository, repository: acme/product, every: 1h"
    Path("reefknot.yaml").write_text(f"sources: {{product: {{{settings}}}}}\n")
    return ran("config", "check", code=None)


def text() -> str:
    Path("notes").mkdir(exist_ok=True)
    Path("notes/a.txt").write_text("ahoy")
    Path("reefknot.yaml").write_text("sources: {notes: {connector: local_files, path: notes}}\n")
    return ran("source", "test", "notes")


def metrics() -> str:
    import reefknot as rk
    from reefknot.console.operations.metrics import metrics_text
    from reefknot.console.operations.operator import Operator
    from reefknot.core.redaction import Redactor
    from reefknot.errors import OperationError

    async def text() -> str:
        async with rk.open_store("memory:") as store:
            return (await metrics_text(Operator(store, Redactor(())))).decode()

    try:
        return asyncio.run(text())
    except OperationError as error:
        return str(error)


def otel() -> str:
    Path("files").mkdir(exist_ok=True)
    Path("reefknot.yaml").write_text(SETTLED + "blocks: {fs: {roots: [files]}}\n")
    job = {"type": "fs.blob_put", "payload": {"path": "b.txt", "content": "aye"}}
    Path("put.jsonl").write_text(json.dumps({"job": job}) + "\n")
    return ran("run", "put.jsonl", "--engine", "memory:", "--new", OTEL_TRACES_EXPORTER="console")


def dashboard() -> str:
    """The page of a dashboard, or what the command prints instead."""
    Path("reefknot.yaml").write_text(SETTLED)
    ran("submit", "--type", "own.hello")
    port = free_port()
    words = [COMMAND, "dashboard", "--port", str(port), "--for", str(TIMEOUT_S)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while process.poll() is None:
            try:
                with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/login", timeout=TIMEOUT_S) as answer:
                    return f"{answer.status}: {answer.read().decode()}"
            except URLError:
                time.sleep(0.05)
        return process.communicate(timeout=TIMEOUT_S)[0]
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


FEATURES: dict[str, tuple[Callable[[], str], str]] = {
    "dashboard": (dashboard, "200: "),
    "http": (http, '"body":"hello"'),
    "ingest": (ingest, "reefknot.yaml: OK"),
    "metrics": (metrics, "# TYPE reefknot_"),
    "nats": (nats, "cannot be reached"),
    "otel": (otel, '"trace_id"'),
    "sql": (sql, "connection"),
    "text": (text, "is read"),
}
"""By extra: a feature of it, and what is in its answer when it works."""


def main(given: str) -> None:
    names = list(FEATURES)
    if given in FEATURES:
        assert "reefknot" in ran("--version")
        check(given, is_there=True)
        check("nats" if given == "sql" else "sql", is_there=False)
        return
    core(set(names) if given == "all" else set())
    for extra in names:
        check(extra, is_there=given == "all")


def check(extra: str, *, is_there: bool) -> None:
    """Try the feature of an extra."""
    feature, answer = FEATURES[extra]
    said = feature()
    is_named = f"reefknot[{extra}]" in said
    if is_there:
        assert answer in said, f"{extra} is installed and does not work:\n{said[-3000:]}"
        assert not is_named, f"{extra} is installed, and is said to be missing:\n{said[-3000:]}"
    else:
        assert is_named, f"{extra} is not installed, and nothing says so:\n{said[-3000:]}"


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
