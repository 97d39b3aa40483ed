"""Folders and stores that commands look at, made with public names and with commands alone."""

import asyncio
import json
from typing import Any

import reefknot as rk
from tests.golden.harness import Folder

RUNNING = """\
worker:
  quarantine_failed: true
  retries:
    v2:
      enabled: true
      default_policy: {max_attempts: 2, base_delay_ms: 10, max_delay_ms: 20, jitter_type: none}
      error_classification:
        network_errors: {retryable: {network_error: true}, max_attempts: 2}
  queue:
    v2: {enabled: true, max_queue_size: 100}
blocks:
  fs: {roots: [files]}
"""

MODULE = """\
from pathlib import Path

import reefknot as rk


@rk.block("own.flaky")
async def flaky(inputs, context):
    counter = Path(inputs["name"] + ".count")
    asked = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(str(asked))
    if asked <= inputs["failures"]:
        raise ConnectionError("not now")
    return {"attempt": asked}


@rk.block("own.broken")
async def broken(inputs, context):
    raise ValueError("this input is never accepted")
"""


def flaky(name: str, failures: int) -> dict[str, Any]:
    """A step that fails so many times before it succeeds."""
    job = {"type": "own.flaky", "payload": {"name": name, "failures": failures, "password": "hunter2hunter2"}}
    return {"assignment_id": name, "request_id": "r", "job": job}


def get(name: str, path: str) -> dict[str, Any]:
    """A step that reads a file."""
    return {"assignment_id": name, "request_id": "r", "job": {"type": "fs.blob_get", "payload": {"path": path}}}


def broken(name: str) -> dict[str, Any]:
    """A step that always fails for good."""
    return {"assignment_id": name, "request_id": "r", "job": {"type": "own.broken", "payload": {}}}


def write_lines(folder: Folder, name: str, *lines: dict[str, Any] | str) -> None:
    """A file of assignments."""
    folder.write(name, "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))


def prepared(folder: Folder) -> None:
    """A configuration, a file to read, steps of one's own, and files of assignments."""
    folder.write("reefknot.yaml", RUNNING)
    folder.write("files/a.txt", "ahoy")
    folder.write("golden_steps.py", MODULE)
    write_lines(folder, "good.jsonl", get("good", "a.txt"))
    write_lines(folder, "lucky.jsonl", flaky("lucky", 1))
    write_lines(folder, "unlucky.jsonl", flaky("unlucky", 9))
    write_lines(folder, "broken.jsonl", broken("broken"))
    write_lines(folder, "gone.jsonl", get("gone", "gone.txt"))
    write_lines(folder, "odd.jsonl", {"assignment_id": "odd", "request_id": "r", "job": {"type": "no.such"}})
    folder.write("none.jsonl", "")
    write_lines(
        folder, "mixed.jsonl", get("one", "a.txt"), "not json", "[]", '{"job": {}}', '{"job": 7}', get("one", "b.txt")
    )


def keys(folder: Folder) -> None:
    """`order-7` is done, `order-8` is held for long; of the others, which were guarded, no outcome is known."""
    guarded = ("order-9", "order-10", "order-11", "order-12")

    async def fill() -> None:
        async with rk.open_store(f"sqlite:{folder.path}/.reefknot/state.db") as store:
            done = await store.idempotency.claim("order-7", owner="w1")
            result = '{"id":7,"note":"sent","password":"hunter2hunter2"}'
            await store.idempotency.finish(done.claim, rk.Done(result))  # type: ignore[union-attr]
            await store.idempotency.claim("order-8", owner="w2", lease=3600.0)
            for name in guarded:
                await store.idempotency.claim(name, owner="w3", lease=0.001, guard=True)
            await asyncio.sleep(0.02)
            for name in guarded:
                await store.idempotency.claim(name, owner="w4", guard=True)

    asyncio.run(fill())


def recorded(folder: Folder) -> None:
    """Three operations on record: one that recovered, one that was given up, one that was not retried."""

    async def fill() -> None:
        async with rk.open_store(f"sqlite:{folder.path}/.reefknot/state.db") as store:
            manager = rk.RetryManager(idempotency=store.idempotency, audit=store.audit)
            fast = rk.RetryPolicy(max_attempts=3, base_delay=0.001, jitter="none")
            left = [2]

            async def charge() -> dict[str, int]:
                left[0] -= 1
                if left[0] >= 0:
                    raise ConnectionError("the gateway hung up")
                return {"receipt": 7}

            async def never() -> None:
                raise ConnectionError("the gateway is gone")

            async def wrong() -> None:
                raise ValueError("this is no order")

            await manager.execute_with_retry("API_REQUEST", "charge", charge, fast, idempotency_key="order-7")
            for work, error in ((never, Exception), (wrong, Exception)):
                try:
                    await manager.execute_with_retry("KV_GET", work.__name__, work, fast)
                except error:
                    continue

    asyncio.run(fill())


def tampered(folder: Folder) -> None:
    """An exported log in which one event was changed, and one from which the last line was taken."""
    lines = (folder.path / "log.jsonl").read_text().splitlines(keepends=True)
    folder.write("edited.jsonl", "".join(one.replace("hung up", "hung on") for one in lines))
    folder.write("cut.jsonl", "".join(lines[:-1]))
    folder.write("swapped.jsonl", "".join([lines[0], lines[2], lines[1], *lines[3:]]))
    folder.write("prose.jsonl", "this is no log\n")
    folder.write("damaged.db", b"SQLite format 3\x00" + b"\x00" * 200)
    folder.write("text.db", "this is no store, whatever its name says\n" * 20)
    folder.write("empty.db", "")
