"""
A store of a size as operators meet it, and how long each of their questions takes on it.

`filled` makes a store with so many jobs, of several states, types, tenants and sources, and so many events, which tell
of those jobs; `percentiles` asks a question many times. The bodies of the events are real ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter, time
from typing import Any, NamedTuple

import apsw

from reefknot.audit.model.event import (
    Admission,
    Completed,
    DecisionRecord,
    Event,
    IdempotencyEvent,
    RetryAttempt,
    RetryRecovered,
    Routing,
    Submitted,
    TimeoutOccurred,
    encode,
)
from reefknot.console.operations.jobs import JobQuery, job_counts, job_story, list_jobs
from reefknot.console.operations.operator import Operator
from reefknot.console.operations.quarantine import (
    QuarantineQuery,
    list_quarantined,
    quarantine_groups,
    quarantine_stats,
    requeue_jobs,
)
from reefknot.core.decide import Again, History
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore
from reefknot.stores.sqlite.connection import add_key_hash

ITEMS = 100_000
EVENTS = 1_000_000
RARE_TENANT, RARE_SOURCE, RARE_ERROR = "tenant-rare", "source-rare", "the rare failure"
"""What few of the oldest jobs have: the longest way for a filter."""

_ID = "@ID@"
_AT = "@AT@"

# ---- a store of a size -----------------------------------------------------------------------------------------------

_SEQUENCE = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?1)"
# One job in twenty failed, one in twenty is in quarantine, one in fifty is pending; one in ten is of a source.
_WORK = """
, made AS (
    SELECT i, CASE WHEN i % 20 = 7 THEN 'failed' WHEN i % 20 = 9 THEN 'quarantined' WHEN i % 50 = 1 THEN 'pending'
        ELSE 'succeeded' END AS state, i % 10 = 3 AS is_ingestion, i < 10 AS is_rare,
        CASE WHEN i < 10 THEN 'tenant-rare' WHEN i % 2 THEN 'tenant-' || (i % 100) END AS tenant FROM n
)
INSERT INTO work (ready, id, kind, resource_class, source, tenant_id, correlation_id, trace_id, priority, state, due_at,
    created_at, updated_at, generation, attempts, snoozes, interruptions, crashes, owner, fence, lease_until, lease_ms,
    reason, failure, result, budget, history, admission, pool, payload)
SELECT state = 'pending', iif(tenant IS NULL, '', tenant || '|') || 'job-' || i,
    iif(is_ingestion, 'local_files', 'demo.step' || (i % 8)),
    CASE WHEN is_ingestion THEN 'ingest.' || iif(is_rare, 'source-rare', 'notes') WHEN state = 'pending' THEN 'router'
        ELSE 'io@worker-1' END,
    iif(is_ingestion, iif(is_rare, 'source-rare', 'notes'), ''), tenant, 'c-' || i, NULL, 0, state,
    ?2 - (?1 - i) * 100, ?2 - (?1 - i) * 100, ?2 - (?1 - i) * 100 + 40, 0, 1, 0, 0, 0, '', 1, 0, 0,
    iif(state IN ('failed', 'quarantined'), 'attempts_spent', ''),
    iif(state IN ('failed', 'quarantined'), json_object('code', 'HTTP_ERROR', 'failure_type', 'transient',
        'http_status', 503, 'message',
        iif(is_rare, 'the rare failure', 'the service answered 503 (' || (i % 40) || ')')), NULL),
    iif(state = 'succeeded', '{"outputs":{"n":1}}', NULL), '[0,null,null,null,0,null]',
    '[[' || (?2 - (?1 - i) * 100) || ',"attempt 1","transient","worker-1"]]', '', 'io',
    CAST('{"assignment_id":"job-' || i || '","request_id":"c-' || i || '","job":{"type":"demo.step","payload":{"n":'
        || i || ',"text":"' || hex(zeroblob(100)) || '"}}}' AS BLOB)
FROM made
"""
_EVENTS = """
, told AS (
    SELECT i, i * ?3 / ?1 AS job, ?2 - (?1 - i) * ?3 * 100 / ?1 AS at, template.body, template.type
    FROM n JOIN template ON template.place = i % ?4
)
INSERT INTO audit SELECT i + 1, lower(hex(randomblob(32))), at, type, 'c-' || job, NULL, 'job-' || job,
    replace(replace(body, '@ID@', 'job-' || job), '@AT@', strftime('%Y-%m-%dT%H:%M:%fZ', at / 1000.0, 'unixepoch'))
FROM told
"""
_COUNTERS = """
UPDATE audit_head SET sequence = (SELECT max(sequence) FROM audit), hash = (SELECT hash FROM audit ORDER BY 1 DESC);
DELETE FROM audit_block;
INSERT INTO audit_block SELECT sequence / 1024, max(at), min(at) FROM audit GROUP BY 1;
INSERT INTO work_count SELECT resource_class, state, count(*) FROM work GROUP BY 1, 2;
INSERT INTO quarantine_count SELECT kind, source, reason, count(*) FROM work WHERE state = 'quarantined'
    GROUP BY 1, 2, 3;
INSERT INTO open_work SELECT 'io', 'submitted', 0, ifnull(tenant_id, ''), count(*) FROM work WHERE state = 'pending'
    GROUP BY 4;
"""


def _templates() -> list[Event]:
    """The ten events of a job that failed three times and then succeeded."""
    about: dict[str, Any] = {"timestamp": _AT, "work_id": _ID}
    policy = RetryPolicy(max_attempts=5, base_delay=0.5)
    failure = Failure(ErrorCode.http_error, FailureType.TRANSIENT, "the service answered 503", http_status=503)
    retries = []
    for number in range(1, 4):
        history = History(number, number * 0.7, 0.5)
        record = DecisionRecord.of(Again(0.5), policy, history, failure, 0.5)
        retries.append(
            RetryAttempt(
                **about,
                attempt_number=number,
                max_attempts=5,
                delay_seconds=0.5,
                exception_type="HTTPError",
                exception_message="the service answered 503",
                operation="demo.step",
                decision=record,
            )
        )
    return [
        Submitted(**about, actor="ann", host="here", process=7),
        Routing(**about, worker_id="worker-1"),
        Admission(**about, worker_id="worker-1", resource_class="io"),
        TimeoutOccurred(**about, attempt_number=1, timeout_seconds=0.5, operation="demo.step"),
        *retries,
        IdempotencyEvent(**about, idempotency_key=_ID, action="record"),
        RetryRecovered(**about, total_attempts=4, elapsed_seconds=2.2),
        Completed(**about, status="success", operation="demo.step", attempts=4, duration_ms=2300),
    ]


def fill(path: Path, items: int, events: int) -> None:
    """
    Fill a new store with so many jobs and events, some 100,000 a second.

    Indexes and counters are made at the end, which is many times faster than row by row. The hashes of the events are
    no chain: `audit verify` reports them.
    """
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA synchronous = OFF; PRAGMA cache_size = -500000")
    add_key_hash(connection)
    connection.execute("BEGIN")
    schema = "SELECT type, name, sql FROM sqlite_schema WHERE type IN ('index', 'trigger') AND sql IS NOT NULL"
    made: list[Any] = connection.execute(schema).fetchall()
    for kind, name, _ in made:
        connection.execute(f"DROP {kind} {name}")
    connection.execute("CREATE TEMP TABLE template (place INTEGER PRIMARY KEY, type TEXT, body TEXT)")
    bodies = [(place, one.event_type, encode(one).decode()) for place, one in enumerate(_templates())]
    connection.executemany("INSERT INTO template VALUES (?, ?, ?)", bodies)
    now = int(time() * 1000)
    connection.execute(_SEQUENCE + _WORK, (items, now))
    connection.execute(_SEQUENCE + _EVENTS, (events, now, items, len(bodies)))
    connection.execute(_COUNTERS)
    for _, _, text in made:
        connection.execute(text)
    connection.execute("COMMIT; PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


async def filled(folder: Path, *, items: int = ITEMS, events: int = EVENTS) -> Path:
    """The file of a new store in this folder, with so many jobs and events."""
    path = folder / "state.db"
    store = await SqliteStore(path, SystemClock()).start()
    await store.close()
    fill(path, items, events)
    return path


# ---- questions -------------------------------------------------------------------------------------------------------

Question = Callable[[Operator], Awaitable[dict[str, Any]]]

FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"state": "succeeded"},
    {"state": "pending"},
    {"type": "demo.step1"},
    {"tenant": "tenant-1"},
    {"tenant": RARE_TENANT},
    {"tenant": RARE_TENANT, "state": "succeeded"},
    {"tenant": RARE_TENANT, "type": "demo.step1"},
    {"source": "notes"},
    {"source": RARE_SOURCE},
    {"connector": "local_files"},
    {"error": "answered 503"},
    {"error": RARE_ERROR},
    {"error": RARE_ERROR, "state": "failed"},
    {"since": "1h"},
    {"before": "1h", "tenant": RARE_TENANT},
    {"sort": "oldest", "error": "of none"},
)


def _listing(fields: dict[str, Any]) -> Question:
    return lambda operator: list_jobs(operator, JobQuery(**fields))


def questions(items: int = ITEMS) -> dict[str, Question]:
    """The questions about work and quarantine, by name, for a store with so many jobs."""
    lists = {"jobs by " + (" and ".join(map(" ".join, fields.items())) or "nothing"): fields for fields in FILTERS}
    middle, all_ = f"job-{items // 20 * 10}", QuarantineQuery(all=True)
    return {
        **{name: _listing(fields) for name, fields in lists.items()},
        "counts of jobs": job_counts,
        "story of a job": lambda operator: job_story(operator, middle),
        "quarantine list": lambda operator: list_quarantined(operator, QuarantineQuery()),
        "quarantine groups": lambda operator: quarantine_groups(operator, QuarantineQuery()),
        "quarantine stats": quarantine_stats,
        "requeue of all, as a dry run": lambda operator: requeue_jobs(operator, all_, dry_run=True),
    }


class Percentiles(NamedTuple):
    """Seconds of a question."""

    p50: float
    p95: float


async def percentiles(ask: Callable[[], Awaitable[object]], times: int) -> Percentiles:
    """The seconds of a question that is asked so often, after once for the caches."""
    await ask()
    taken = []
    for _ in range(times):
        began = perf_counter()
        await ask()
        taken.append(perf_counter() - began)
    taken.sort()
    return Percentiles(taken[len(taken) // 2], taken[min(len(taken) - 1, len(taken) * 95 // 100)])
