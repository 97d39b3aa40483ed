"""A system that runs in a process of its own, and the commands that look at it and steer it."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.golden import stores
from tests.golden.harness import Ended, Folder, Scenario, both, played, started

UP = "up --for 60 --module golden_steps --seed 7"
LIVE = Scenario(
    "live",
    [
        *both("worker_list", "worker list"),
        *both("router_status", "router status"),
        ("worker_start_taken", "worker start --worker-id worker-1 --for 0"),
        ("worker_unknown", "worker drain worker-7"),
        *both("drain_dry", "worker drain --dry-run"),
        ("pause", "worker pause worker-1 --as ann"),
        ("worker_list_paused", "worker list"),
        ("resume_json", "worker resume worker-1 --as ann --json"),
        ("submit", "submit good.jsonl --wait"),
        ("submit_json", "submit lucky.jsonl --wait --json"),
        ("submit_failed", "submit gone.jsonl --wait"),
        ("job_list", "job list"),
        ("drain_json", "worker drain worker-1 --seconds 1 --as ann --json"),
        ("resume", "worker resume --as ann"),
    ],
)
CASES = [*LIVE.cases(), "live.up", "live.run_stdin"]


@contextmanager
def _system(folder: Folder) -> Iterator[subprocess.Popen[str]]:
    process = started(UP, folder.path)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def lived(folder: Folder) -> dict[str, str]:
    """Run `up` beside the scenario, end it by a signal, and give all texts."""
    stores.prepared(folder)
    with _system(folder) as process:
        until = time.monotonic() + 20
        while "worker-1" not in folder.run("router status").out:
            assert process.poll() is None, "the system ended by itself"
            assert time.monotonic() < until, "the system does not say that it runs"
            time.sleep(0.05)
        found = played(LIVE, folder)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    found["live.up"] = folder.golden(f"{UP}  # ended by SIGTERM", Ended(process.returncode, out, err))
    line = "run - --engine memory: --json"
    found["live.run_stdin"] = folder.golden(f"{line}  # one bad line", folder.run_apart(line, "not json\n"))
    return found
