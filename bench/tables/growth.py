"""Every store call and every command that lists, from a thousand rows to a million: none may grow with the store."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from time import perf_counter, time
from typing import Any

import apsw

from bench.measure import FULL, Contestant, Effort, measure
from bench.table import MILLISECONDS, Run, Table
from bench.verdict import AtMostSeconds, AtMostTimes, Target
from reefknot.audit.journal import envelope
from reefknot.audit.model.event import OperatorAction, encode
from reefknot.audit.port import AuditEntry, AuditQuery
from reefknot.idempotency.model import Claimed, Done
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.work import WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Enqueue, Held, Settlement, WorkClaim, WorkFilter
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore
from reefknot.stores.sqlite.connection import add_key_hash
from reefknot.stores.sqlite.idempotency import ROWS_PER_MOVE, move_recent

SIZES = {"10³": 1_000, "10⁴": 10_000, "10⁵": 100_000, "10⁶": 1_000_000}
FEW = ("10³", "10⁴")
"""The sizes of a quick look."""
FLAT = 1.3
LONGEST_COMMAND_S = 0.4
LARGEST_COMMAND_MB = 80
LONGEST_EXAMINATION_S = 0.6
EXAMINED = "100,000 jobs of each kind"
UNBOUNDED = SubmissionRules(1 << 40)
STEP = "own.step"

_BODY = encode(OperatorAction(**envelope(wall=time()), actor="somebody", action="bench"))
_numbers = count()

# ---- stores of a size ------------------------------------------------------------------------------------------------

_SEQUENCE = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?1)"
_WORK = """
INSERT INTO work (ready, id, kind, resource_class, source, correlation_id, priority, state, due_at, created_at,
    updated_at, generation, attempts, snoozes, interruptions, crashes, owner, fence, lease_until, lease_ms, reason,
    result, budget, history, admission, pool, payload)
SELECT {ready}, lower(hex(randomblob(16))), 'demo.step' || (i % 8), '{name}', '', 'c-' || i, 0, {state}, ?2 - i, ?2 - i,
    ?2 - i, 0, 1, 0, 0, 0, '', 1, 0, 0, '{reason}', '{{"outputs":{{"n":1}}}}', '[0,null,null,null,0,null]', '[]', '',
    'io', CAST('{{"job":{{"type":"demo.step","payload":{{"n":' || i || '}}}}}}' AS BLOB) FROM n
"""
_ENDED = _WORK.format(ready=0, name="io@worker-1", state="iif(i % 20 = 0, 'failed', 'succeeded')", reason="")
_QUARANTINED = _WORK.format(ready=0, name="io@worker-1", state="'quarantined'", reason="attempts_spent")
_PENDING = _WORK.format(ready=1, name="router", state="'pending'", reason="")
# Materialized: the key and its hash have to come from one draw.
_KEYS = """
, drawn AS MATERIALIZED (SELECT i, lower(hex(randomblob(32))) AS key FROM n)
INSERT INTO idempotency (hash, key, state, owner, fence, lease_until, lease_ms, fingerprint, guard, result, created_at,
    updated_at, expires_at)
SELECT key_hash(key), key, 'done', 'somebody', i, 0, 60000, '', 0, '{"status":"charged"}', ?2, ?2, ?2 + 604800000
FROM drawn
"""
_EVENTS = """
INSERT INTO audit SELECT i + 1, lower(hex(randomblob(32))), at, type, 'c-' || (i / 4), NULL, 'w-' || (i / 4),
    json_object('event_type', type, 'event_code', '', 'event_id', hex(randomblob(8)), 'timestamp',
        strftime('%Y-%m-%dT%H:%M:%fZ', at / 1000.0, 'unixepoch'), 'actor', 'somebody', 'action', 'bench',
        'reason', 'bench', 'generation', 1)
FROM (SELECT i, ?2 - (?1 - i) * 100 AS at, iif(i % 50, 'operator_action', 'requeued') AS type FROM n)
"""
_COUNTERS = """
UPDATE counter SET keys = ?1, fence = ?1;
INSERT INTO older_key SELECT hash, seq FROM idempotency ORDER BY hash, seq;
UPDATE audit_head SET sequence = ?1, hash = (SELECT hash FROM audit WHERE sequence = ?1);
INSERT INTO audit_block SELECT sequence / 1024, max(at), min(at) FROM audit GROUP BY 1;
INSERT INTO work_count SELECT resource_class, state, count(*) FROM work GROUP BY 1, 2;
INSERT INTO quarantine_count SELECT kind, source, reason, count(*) FROM work WHERE state = 'quarantined'
    GROUP BY 1, 2, 3;
INSERT INTO open_work SELECT 'io', 'submitted', 0, '', count(*) FROM work WHERE state = 'pending';
"""


def fill(path: Path, size: int) -> None:
    """
    Fill a new store: so many ended, quarantined and pending jobs, keys, and events of the last 100 ms each.

    Indexes and counters are made at the end, which is many times faster than row by row.
    """
    connection = _opened(path)
    connection.execute("BEGIN")
    made: Any = connection.execute(
        "SELECT type, name, sql FROM sqlite_schema WHERE type IN ('index', 'trigger') AND sql IS NOT NULL"
    ).fetchall()
    for kind, name, _ in made:
        connection.execute(f"DROP {kind} {name}")
    for statement in (_ENDED, _QUARANTINED, _PENDING, _KEYS, _EVENTS):
        connection.execute(_SEQUENCE + statement, (size, int(time() * 1000)))
    connection.execute(_COUNTERS.replace("?1", str(size)))
    for _, _, text in made:
        connection.execute(text)
    connection.execute("COMMIT; PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def fill_keys(path: Path, size: int) -> None:
    """Put so many ended keys into a new store, a few at a time, so that its pages lie as they do after long use."""
    connection = _opened(path)
    for number in range(0, size, ROWS_PER_MOVE):
        connection.execute(_SEQUENCE + _KEYS, (min(ROWS_PER_MOVE, size - number), int(time() * 1000)))
        move_recent(connection, number, min(number + ROWS_PER_MOVE, size))
    connection.execute("UPDATE counter SET keys = ?1, fence = ?1", (size,))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def _opened(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA synchronous = OFF; PRAGMA cache_size = -500000")
    add_key_hash(connection)
    return connection


async def made(path: Path) -> None:
    """Create an empty store."""
    store = await SqliteStore(path, SystemClock()).start()
    await store.close()


# ---- store calls -----------------------------------------------------------------------------------------------------

Call = Callable[[], Awaitable[object]]


async def found(store: SqliteStore) -> tuple[list[str], list[str]]:
    """The ids of some ended and of some quarantined jobs."""
    ended = (await store.work.search(WorkFilter(state=WorkState.SUCCEEDED), limit=100)).items
    return [item.id for item in ended], [item.id for item in await store.quarantine.find(limit=1000)]


def reading(store: SqliteStore, ended: list[str], quarantined: list[str]) -> dict[str, Call]:
    """The calls that only read, by name."""
    work, audit, since = store.work, store.audit, int(time() * 1000) - 3000
    return {
        "work.get": lambda: work.get(ended[next(_numbers) % 100]),
        "work.find": lambda: work.search(limit=10),
        "work.find(state=running)": lambda: work.search(WorkFilter(state=WorkState.RUNNING), limit=10),
        "work.find(state=failed, kind=…)": lambda: work.search(
            WorkFilter(state=WorkState.FAILED, kind="demo.step4"), limit=5
        ),
        "work.find(classes=…)": lambda: work.search(
            WorkFilter(state=WorkState.PENDING, classes=("io@worker-1",)), limit=10
        ),
        "work.find(since, oldest first)": lambda: work.search(WorkFilter(since=since), oldest_first=True, limit=10),
        "work.find(state=failed, since)": lambda: work.search(
            WorkFilter(state=WorkState.FAILED, since=since), limit=10
        ),
        "work.find(visible pending)": lambda: work.search(WorkFilter(state=WorkState.PENDING, gone=("w",)), limit=10),
        "work.find(visible running)": lambda: work.search(WorkFilter(state=WorkState.RUNNING, gone=("w",)), limit=10),
        "work.snapshot": work.snapshot,
        "work.open_classes": work.open_classes,
        "work.wait": lambda: work.wait(0, classes=("io@worker-1",)),
        "leases.owners": store.leases.owners,
        "quarantine.find": lambda: store.quarantine.find(limit=10),
        "quarantine.show": lambda: store.quarantine.show(quarantined[0]),
        "quarantine.count": store.quarantine.count,
        "quarantine.stats": store.quarantine.stats,
        "audit.read(newest_first)": lambda: audit.read(AuditQuery(limit=20, newest_first=True)),
        "audit.read(since)": lambda: audit.read(AuditQuery(since=since, limit=20)),
        "audit.read(event_type)": lambda: audit.read(AuditQuery(event_type="requeued", limit=10)),
        "audit.read(correlation_id)": lambda: audit.read(AuditQuery(correlation_id="c-7")),
        "idempotency.get": lambda: store.idempotency.get("no such key"),
        "control.reports": store.control.reports,
    }


def writing(store: SqliteStore, quarantined: list[str]) -> dict[str, Call]:
    """The calls that write, each alone and on disk, by name."""

    async def enqueue() -> str:
        name = f"{os.urandom(16).hex()}"
        await store.work.enqueue([WorkItem(name, "demo.step1", "router", pool="io")], Enqueue(rules=UNBOUNDED))
        return name

    async def claim_renew_settle() -> None:
        (item,) = await store.work.claim(1, WorkClaim(owner="me", classes=("router",)))
        await store.work.renew([Held(item.id, item.owner, item.fence)])
        await store.work.settle([Settlement(item.id, item.owner, item.fence, WorkDone("1"))])

    async def enqueue_cancel() -> None:
        await store.work.cancel(await enqueue())

    async def once() -> None:
        claimed = await store.idempotency.claim(os.urandom(32).hex(), owner="me")
        assert isinstance(claimed, Claimed)
        await store.idempotency.finish(claimed.claim, Done("1"))

    def requeue() -> Awaitable[object]:
        return store.quarantine.requeue(WorkFilter(ids=(quarantined.pop(),)), who="me")

    return {
        "work.enqueue, with a limit": enqueue,
        "work.claim, renew, settle": claim_renew_settle,
        "work.enqueue, cancel": enqueue_cancel,
        "quarantine.requeue": requeue,
        "idempotency.claim, finish": once,
        "audit.append": lambda: store.audit.append([AuditEntry(_BODY, "operator_action", int(time() * 1000))]),
    }


def calling(name: str, runner: asyncio.Runner, call: Call) -> Contestant:
    async def all_of(times: int) -> float:
        began = perf_counter()
        for _ in range(times):
            await call()
        return perf_counter() - began

    return Contestant(name, lambda times: float(runner.run(all_of(times))))


# ---- commands --------------------------------------------------------------------------------------------------------

COMMANDS = (
    ("job", "list"),
    ("job", "list", "--state", "running"),
    ("job", "list", "--state", "pending", "--since", "1h", "--sort", "oldest"),
    ("job", "show", "{ended}"),
    ("quarantine", "list"),
    ("quarantine", "stats"),
    ("quarantine", "requeue", "--all", "--dry-run"),
    ("audit", "tail"),
    ("audit", "tail", "--since", "1m"),
    ("audit", "tail", "--type", "requeued"),
    ("audit", "analyse", "--since", "1m"),
    ("worker", "list"),
    ("router", "status"),
    ("idempotency", "show", "{ended}"),
)
DOCTOR = ("doctor",)
RUN = ("run", "{folder}/one.jsonl", "--module", "steps")
_STEPS = f"""
import reefknot

@reefknot.block("{STEP}")
async def step(inputs, context):
    return {{}}
"""


_SPAWNER = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    words, folder = json.loads(line)
    began, silent = time.perf_counter(), subprocess.DEVNULL
    process = subprocess.Popen(words, cwd=folder, stdin=silent, stdout=silent, stderr=silent)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    print(json.dumps([process.returncode, time.perf_counter() - began, used.ru_maxrss]), flush=True)
"""


class Spawner:
    """Starts commands from a small process: the kernel counts the memory of whoever starts a process as its own."""

    def __init__(self, stack: ExitStack) -> None:
        program = (sys.executable, "-c", _SPAWNER)
        compiled = stack.enter_context(tempfile.TemporaryDirectory())
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = stack.enter_context(
            subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment, "PYTHONPYCACHEPREFIX": compiled},  # an installed package has its byte code
            )
        )
        self.largest: dict[str, int] = {}
        """Most memory of each command, in kilobytes."""

    def command(self, name: str, words: tuple[str, ...], path: Path) -> Contestant:
        """A command from its start to its end."""
        program = (sys.executable, "-m", "reefknot", *words, "--engine", f"sqlite:{path}")

        def batch(times: int) -> float:
            taken = 0.0
            for _ in range(times):
                if words[0] == "run":
                    line = f'{{"assignment_id":"{os.urandom(8).hex()}","request_id":"r","job":{{"type":"{STEP}"}}}}\n'
                    (path.parent / "one.jsonl").write_text(line, encoding="utf-8")
                code, seconds, memory = self._ended(program, path.parent)
                assert code in (0, 1, 69), (words, code)
                self.largest[name] = max(self.largest.get(name, 0), memory)
                taken += seconds
            return taken

        return Contestant(name, batch)

    def _ended(self, program: tuple[str, ...], folder: Path) -> tuple[int, float, int]:
        """The command's exit code, seconds and kilobytes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([program, str(folder)]), file=self._process.stdin, flush=True)
        code, seconds, memory = json.loads(self._process.stdout.readline())
        return code, seconds, memory


# ---- the table -------------------------------------------------------------------------------------------------------


def _close(runner: asyncio.Runner, store: SqliteStore) -> None:
    runner.run(store.close())


def run(effort: Effort) -> Run:
    sizes = {name: SIZES[name] for name in (SIZES if effort is FULL else FEW)}
    calls: list[Contestant] = []
    commands: list[Contestant] = []
    targets: dict[str, tuple[Target, ...]] = {}
    first, last = next(iter(sizes)), list(sizes)[-1]
    with ExitStack() as stack:
        spawner = Spawner(stack)
        runner = stack.enter_context(asyncio.Runner())
        for size, number in sizes.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            path = folder / "state.db"
            (folder / "steps.py").write_text(_STEPS, encoding="utf-8")
            runner.run(made(path))
            fill(path, number)
            store = runner.run(SqliteStore(path, SystemClock()).start())
            stack.callback(_close, runner, store)
            ended, quarantined = runner.run(found(store))
            for name, call in {**reading(store, ended, quarantined), **writing(store, quarantined[50:])}.items():
                calls.append(calling(f"{name}, {size}", runner, call))
                targets[f"{name}, {last}"] = (AtMostTimes(FLAT, f"{name}, {first}"),)
            for words in (*COMMANDS, RUN):
                said = tuple(word.format(ended=ended[0], folder=folder) for word in words)
                name = "`" + " ".join(words).format(ended="…", folder=".") + "`"
                commands.append(spawner.command(f"{name}, {size}", said, path))
                flat = (AtMostTimes(FLAT, f"{name}, {first}"),) if words is RUN else ()
                targets[f"{name}, {last}"] = (AtMostSeconds(LONGEST_COMMAND_S), *flat)
        timings = measure(calls, rounds=max(10, effort.rounds // 5), batch_seconds=effort.batch_seconds)
        timings |= measure(commands, rounds=max(2, effort.process_rounds // 5), batch_seconds=None)
    most = max((memory, name) for name, memory in spawner.largest.items() if not name.startswith("`run"))
    verdict = "met" if most[0] <= LARGEST_COMMAND_MB * 1000 else "MISSED"
    memory = (
        f"The largest of the commands that list had {most[0] / 1000:.0f} MB ({most[1]}); ≤ {LARGEST_COMMAND_MB} MB: "
    )
    return Run(timings, (memory + verdict + ".",), targets=targets, columns=tuple(sizes))


def run_doctor(effort: Effort) -> Run:
    with ExitStack() as stack:
        spawner, folder = Spawner(stack), Path(stack.enter_context(tempfile.TemporaryDirectory()))
        new, full = folder / "new.db", folder / "full.db"
        asyncio.run(made(new))
        asyncio.run(made(full))
        fill(full, 100_000 if effort is FULL else 10_000)
        contestants = [spawner.command("a new store", DOCTOR, new), spawner.command(EXAMINED, DOCTOR, full)]
        return Run(measure(contestants, rounds=max(3, effort.process_rounds // 2), batch_seconds=None))


TABLES = (
    Table(
        name="doctor",
        title="Examining a store",
        about=(
            "`reefknot doctor`, from its start to its end. It reads the whole file: as many ended jobs, pending jobs, "
            "jobs in quarantine, keys and events (a tenth of them in a quick look)."
        ),
        unit=MILLISECONDS,
        reference="a new store",
        targets={EXAMINED: (AtMostSeconds(LONGEST_EXAMINATION_S),)},
        packages=("reefknot", "apsw"),
        run=run_doctor,
    ),
    Table(
        name="growth",
        title="A store that grows",
        about=(
            "Calls and commands over a store with 10³ to 10⁶ ended, pending and quarantined jobs each, as many "
            "keys, and as many events. A call that writes is alone, and on disk before it returns. A command is the "
            "whole life of its process. What reads the whole record by its nature is not here: `audit verify`, "
            "`replay` and `export`, `store check`, `backup` and `compact`, `idempotency stats`, and bulk actions "
            "without `--dry-run`, which go in pages."
        ),
        unit=MILLISECONDS,
        reference="",
        targets={},
        packages=("reefknot", "apsw"),
        run=run,
    ),
)
