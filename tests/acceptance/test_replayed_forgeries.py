"""
A forger changes one field of the record of a real store and makes the chain anew: `audit replay` notices.

Every field but the facts is changed in turn, in every event of a log that has seen everything. A fact follows from
nothing else in the log: only the chain and its heads vouch for it, and for an end its stored result.
"""

import json
from collections import Counter
from typing import Any

import apsw

from reefknot.audit.model.chain import Head, LogLine, event_line, link, read_line
from reefknot.audit.model.replay import replay
from tests.acceptance.folder import PATIENCE_S, Folder, events_in, rehash

MODULE = """\
import asyncio
import os
import reefknot as rk

def is_first(name):
    try:
        open(name, "x").close()
        return True
    except FileExistsError:
        return False

@rk.block("own.flaky")
async def flaky(inputs, context):
    if is_first("flaky"):
        raise ConnectionError("no route")
    return {}

@rk.block("own.down")
async def down(inputs, context):
    raise ConnectionError("nobody answers")

@rk.block("own.bad")
async def bad(inputs, context):
    if is_first("bad"):
        raise ValueError("a seven is missing")
    return {}

@rk.block("own.slow")
async def slow(inputs, context):
    await asyncio.sleep(0 if not is_first("slow") else 60)
    return {}

@rk.block("own.deadly")
async def deadly(inputs, context):
    if is_first("deadly"):
        os._exit(9)
    return {}
"""
STEPS = ("own.flaky", "own.down", "own.bad", "own.slow")
ENVELOPE = {"timestamp", "event_id", "tenant_id", "correlation_id", "trace_id", "work_id", "event_type", "operation"}
_RETRY = {"additional_context", "retry_category"}
FACTS: dict[str, set[str]] = {
    "submitted": {"actor", "host", "process"},
    "routing": {"inputs"},
    "admission": {"inputs", "worker_id"},
    "completed": {"duration_ms", "worker_id", "result_hash", "attempt_seconds"},
    "timeout_occurred": {"timeout_seconds", "whole", "additional_context", "retry_category"},
    **dict.fromkeys(("retry_attempt", "retry_exhausted", "retry_refused"), _RETRY | {"attempt_seconds"}),
    "retry_recovered": _RETRY,
    "quarantined": set(),
    "requeued": {"reason", "generation", "attempt_seconds"},
    "operator_action": {"actor", "os_user", "host", "process", "action", "subject", "details"},
    "rules_stored": {"version"},
    "book_stored": set(),
    "breaker": {"name", "state", "wait_seconds"},
}
"""By type: fields that follow from nothing else in the log. `inputs` are changed in unit tests, where they matter."""
ENDS = ("success", "error", "timeout", "cancelled")
LEFT_OUT: dict[str, dict[str, Any]] = {
    "admission": {"status": "accepted", "overload_status": "healthy", "queue_depth": 0},
    "routing": {"reason": "chosen"},
}


def lines(folder: Folder, name: str, *steps: str) -> str:
    """A file of assignments, each with its type as its id; a slow one may take a tenth of a second."""
    options = {"attempt_timeout_ms": 500, "timeout_ms": 20_000}
    folder.write("steps.py", MODULE)
    folder.write_lines(name, *({"assignment_id": one, "job": {"type": one}, "options": options} for one in steps))
    return name


def recorded(folder: Folder) -> list[dict[str, Any]]:
    """The events of a store that has seen everything."""
    work, deadly = lines(folder, "work.jsonl", *STEPS), lines(folder, "deadly.jsonl", "own.deadly")
    folder.ends(folder.start("run", work, "--module", "steps"))
    assert folder.start("run", deadly, "--module", "steps").wait(PATIENCE_S) == 9
    assert folder("submit", "--type", "own.flaky", "--id", "unwanted").code == 0
    assert folder("job", "cancel", "unwanted", "--as", "ann").code == 0
    assert folder("quarantine", "requeue", "own.bad", "--as", "ann").code == 0
    folder.ends(folder.start("run", lines(folder, "again.jsonl", "own.bad", "own.deadly"), "--module", "steps"))
    return events_in(folder.store)


def forged_values(name: str, value: Any) -> list[Any]:
    """Other values that a field might have had."""
    if name == "status" and value in ENDS:
        return [one for one in ENDS if (one == "success") is not (value == "success")]
    if name == "status":
        return ["rejected"]
    if name == "overload_status":
        return [one for one in ("healthy", "degraded", "overloaded", "critical") if one != value]
    if name == "reason":
        reasons = ("not_retryable", "attempts_spent", "its owner vanished 2 times", "probe")
        return [one for one in reasons if one != value]
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int | float):
        return [value + 7]
    if isinstance(value, str):
        return [f"{value} indeed"]
    if name == "history":
        return [value | {"attempts": value["attempts"] + 1}]
    if name == "failure":
        return [value | {"message": "all is well"}]
    if name == "decision":
        return [value | {"answer": "stopped", "delay": None}]
    return [value | {"size": 7}] if name == "content" else []


def as_bodies(events: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(one, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() for one in events]


def has_failed(events: list[dict[str, Any]], at: int) -> bool:
    """Whether something before an end tells of its attempts and its status."""
    own = [one["event_type"] for one in events[:at] if one.get("work_id") == events[at]["work_id"]]
    since = own[::-1].index("completed") if "completed" in own else len(own)
    return not set(own[len(own) - since :]) <= {"submitted", "routing", "admission", "requeued", "operator_action"}


def test_every_field_that_follows_from_the_log_is_noticed_when_it_is_forged(folder: Folder) -> None:
    events = recorded(folder)
    original = as_bodies(events)
    seen = replay(original)
    assert seen.differences == (), "the control: nothing was forged"
    types = Counter(one["event_type"] for one in events)
    assert {"retry_recovered", "retry_exhausted", "retry_refused", "timeout_occurred", "quarantined"} <= set(types)
    assert {"requeued", "operator_action", "rules_stored", "book_stored"} <= set(types)
    unnoticed = []
    for at, event in enumerate(events):
        kind = event["event_type"]
        facts = ENVELOPE | FACTS[kind]
        if kind == "completed" and not has_failed(events, at):
            facts |= {"status", "attempts"}
        for name, value in (LEFT_OUT.get(kind, {}) | event).items():
            for other in forged_values(name, value) if name not in facts else ():
                forged = [*original]
                (forged[at],) = as_bodies([event | {name: other}])
                if not replay(forged).differences:
                    unnoticed.append(f"{kind}.{name}: {value!r} → {other!r}")
    assert not unnoticed, "\n".join(unnoticed)
    the_command_line_notices(folder)


def the_command_line_notices(folder: Folder) -> None:
    """An export whose chain was made anew: it verifies without its head, and `audit replay` still tells."""
    assert folder("audit", "export", "log.jsonl").code == 0
    file = folder.path / "log.jsonl"
    header, *rest = file.read_bytes().splitlines(keepends=True)
    assert folder("audit", "replay", "log.jsonl").code == 0, "the control"
    head, anew = Head(json.loads(header)["chain"]), [header]
    for line in rest:
        read = read_line(line)
        assert isinstance(read, LogLine)
        body = read.body
        if b'"event_type":"quarantined"' in body:
            body = body.replace(b'"reason":"not_retryable"', b'"reason":"attempts_spent"')
        head, _ = link(head, body)
        anew.append(event_line(head, body))
    file.write_bytes(b"".join(anew))
    (folder.path / "log.jsonl.head.json").unlink()
    assert folder("audit", "verify", "log.jsonl").code == 0
    done = folder("audit", "replay", "log.jsonl")
    told = "recorded: reason 'attempts_spent'; decided now: reason 'not_retryable'"
    assert (done.code, told in done.out) == (65, True)


def test_a_forged_end_is_noticed_by_its_stored_result(folder: Folder) -> None:
    """Of a success at the first try nothing in the log tells the status; the result in the store does."""
    folder.ends(folder.start("run", lines(folder, "work.jsonl", "own.flaky"), "--module", "steps"))
    connection = apsw.Connection(str(folder.store))
    before = str(connection.execute("SELECT body FROM audit WHERE event_type = 'completed'").get)

    def write(body: str) -> None:
        connection.execute("UPDATE audit SET body = ? WHERE event_type = 'completed'", (body,))
        rehash(connection)

    for old, new in (('"success"', '"error"'), ('"attempts":2', '"attempts":3')):
        write(before)
        assert folder("audit", "verify").code == 0, "the control"
        write(before.replace(old, new))
        done = folder("audit", "verify")
        assert (done.code, "is of another end than this event" in done.out) == (65, True), done.out
    connection.close()
