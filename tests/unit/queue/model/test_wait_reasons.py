"""`why_waits`: every cause for which a job waits has a code, a sentence that names what is missing, and a remedy."""

from typing import Any

from msgspec import structs

from reefknot.queue.model import results, routing
from reefknot.queue.model import wait_reasons as causes
from reefknot.queue.model.source_health import SourceCondition
from reefknot.queue.model.wait_reasons import (
    AwaitedFacts,
    FleetFacts,
    JobFacts,
    PoolFacts,
    SourceFacts,
    WaitCode,
    unserved,
    why_waits,
)
from tests.rows import for_each_row

W = WaitCode
STEPS = frozenset({"report.render"})
JOB = JobFacts(record="r-1", kind="report.render", pool="cpu")
QUEUED = structs.replace(JOB, worker="w1")
IDLE = causes.WorkerFacts("w1", pools={"cpu": PoolFacts(0, 2)}, types=STEPS)
BUSY = structs.replace(IDLE, pools={"cpu": PoolFacts(2, 2)})
SLOT = structs.replace(IDLE, pools={"cpu": PoolFacts(1, 1)})
PAUSED = structs.replace(IDLE, state=routing.WorkerState.PAUSED)
DRAINING = structs.replace(IDLE, state=routing.WorkerState.DRAINING)
OTHER = structs.replace(IDLE, name="w2")
RETRY: dict[str, Any] = {"due_in": 12.0, "attempts": 1}


def fleet(*workers: causes.WorkerFacts, routers: int = 1, **more: Any) -> FleetFacts:
    return FleetFacts(routers=routers, workers=workers, **more)


def job(**changes: Any) -> JobFacts:
    return structs.replace(JOB, **changes)


def queued(**changes: Any) -> JobFacts:
    return structs.replace(QUEUED, **changes)


CASES: list[tuple[WaitCode, JobFacts, FleetFacts, str, str]] = [
    (W.NO_SYSTEM, JOB, FleetFacts(), "neither router nor worker", "reefknot up"),
    (W.NO_SYSTEM, QUEUED, FleetFacts(), "neither router nor worker", "reefknot up"),
    (W.NO_ROUTER, JOB, fleet(IDLE, routers=0), "no router is running", "router start"),
    (W.NO_ROUTER, QUEUED, fleet(OTHER, routers=0), "w1, which had it, is gone, and no router", "router start"),
    (W.NO_WORKER, JOB, fleet(), "no worker is running", "worker start"),
    (W.NO_CLASS, job(pool="gpu"), fleet(IDLE), "the class gpu; there are: cpu", "the pool gpu"),
    (W.NO_TYPE, job(kind="mail.send"), fleet(IDLE), "class cpu knows the type mail.send", "--module"),
    (W.PAUSED, JOB, fleet(PAUSED), "w1 is paused", "worker resume w1"),
    (
        *(W.PAUSED, JOB, fleet(PAUSED, structs.replace(OTHER, state=routing.WorkerState.DRAINING))),
        *("every worker of the class cpu is paused: w1, w2", "`reefknot worker resume`"),
    ),
    (W.PAUSED, QUEUED, fleet(PAUSED, OTHER), "w1 is paused", "worker resume w1"),
    (W.DRAINING, JOB, fleet(DRAINING), "w1 is draining", "worker start"),
    (W.DRAINING, QUEUED, fleet(DRAINING), "w1 is draining", "worker resume w1"),
    (
        *(W.OWNER_GONE, job(holder="router-2", is_holder_gone=True), fleet(IDLE)),
        *("router-2, the router that had it, died", "router status"),
    ),
    (W.OWNER_GONE, queued(is_holder_gone=True), fleet(IDLE), "process of w1 that had it is gone", "worker list"),
    (W.OWNER_GONE, QUEUED, fleet(OTHER), "process of w1 that had it is gone", "worker list"),
    (
        *(W.OWNER_SILENT, queued(holder="w1", silent_for=12.0, lease_left=18.0), fleet(OTHER)),
        *("w1 holds it and has been silent for 12 s; its lease ends in 18 s", "log of w1"),
    ),
    (
        *(W.UNACKNOWLEDGED, JOB, fleet(IDLE, unanswered={"r-1": ("w1", 4.0)})),
        *("sent to w1 4 s ago and is not acknowledged", "log of w1"),
    ),
    (
        *(W.UNACKNOWLEDGED, JOB, fleet(unanswered={"r-1": ("", 4.0)}, is_shared=True)),
        *("sent to the subject that workers share", "workers that listen there"),
    ),
    (W.POOL_FULL, JOB, fleet(BUSY), "all 2 slots of the class cpu are busy", "max_concurrency"),
    (W.POOL_FULL, job(ahead=12), fleet(BUSY), "busy, and 12 jobs are ahead of it", "worker start"),
    (W.POOL_FULL, queued(ahead=1), fleet(SLOT), "the one slot of cpu at w1 is busy, and 1 job is ahead", ""),
    (
        *(W.TENANT_TURN, job(ahead=12, ahead_of_tenant=10, tenant="acme"), fleet(BUSY)),
        *("12 jobs are ahead of it, 10 of them of its own tenant acme: tenants take turns", "max_concurrency"),
    ),
    (W.POOL_FULL, job(ahead=12, ahead_of_tenant=3, tenant="acme"), fleet(BUSY), "12 jobs are ahead of it", ""),
    (W.SCHEDULED, job(due_in=7200.0, is_scheduled=True), fleet(), "is due in 2 h", "job cancel"),
    (W.OTHER_WORK, job(awaited=AwaitedFacts(1, 1, "a")), fleet(IDLE), "waits for another job, a", "job show a"),
    (W.OTHER_WORK, job(awaited=AwaitedFacts(1, 1, "a")), FleetFacts(), "waits for another job, a", "reefknot up"),
    (W.OTHER_WORK, job(awaited=AwaitedFacts(9, 3)), fleet(IDLE), "it waits for 3 of 9 jobs", "as there is room"),
    (W.OTHER_WORK, job(awaited=AwaitedFacts(9, 3)), FleetFacts(), "it waits for 3 of 9 jobs", "reefknot up"),
    (
        *(W.OTHER_WORK, job(awaited=AwaitedFacts(9, 1, "a b", "acme", is_quarantined=True)), fleet()),
        *("waits for 1 of 9 jobs: a b, which is in quarantine", "quarantine requeue 'a b' --tenant acme"),
    ),
    (W.SOON, job(awaited=AwaitedFacts(2, 0)), fleet(IDLE), "", ""),
    (
        *(W.RETRY, queued(**RETRY, max_attempts=4, error="connection refused"), fleet(IDLE)),
        *("attempt 2 of 4 begins in 12 s; the last one failed: connection refused", "cause"),
    ),
    (W.RETRY, job(**RETRY), fleet(IDLE), "attempt 2 begins in 12 s", "cause"),
    (W.RATE_LIMITED, queued(**RETRY, is_rate_limited=True), fleet(IDLE), "asked to wait; attempt 2", "rate"),
    (
        *(W.THROTTLED, queued(**RETRY, destination="api:443"), fleet(structs.replace(IDLE, throttled=("api:443",)))),
        *("retries of api:443 are throttled", "tokens"),
    ),
    (
        W.DESTINATION_DOWN,
        queued(due_in=32.0, waits_for=results.WaitsFor("api.example.org:443", 1_794_962_840_123, 1_794_963_000_000)),
        fleet(IDLE),
        "destination api.example.org:443 has been down since 2026-11-18 00:47:20 UTC; next probe in 32 s",
        "repair the destination: jobs that wait for it spend no attempts",
    ),
    (
        *(W.PUT_OFF, queued(due_in=3.0, reason="waiting: destination is down"), fleet(IDLE)),
        *("it was put off (waiting: destination is down) and is due in 3 s", "by itself"),
    ),
    (
        *(W.KEY_HELD, queued(key=causes.KeyFacts("order 7", "w2", 20.0)), fleet(IDLE)),
        *("the idempotency key order 7 is held by w2, whose lease ends in 20 s", "idempotency show 'order 7'"),
    ),
    (W.KEY_HELD, queued(key=causes.KeyFacts("k", "w2")), fleet(IDLE), "the idempotency key k is held by w2", "show k"),
    (
        *(
            W.QUEUE_PAUSED,
            queued(**RETRY, pause=causes.PauseFacts("tenant", "acme", "ann", "moved", 90.0)),
            fleet(IDLE),
        ),
        *("the tenant acme is paused by ann for 90 s (moved)", "`reefknot queue resume --tenant acme`"),
    ),
    (
        *(W.QUEUE_PAUSED, job(pause=causes.PauseFacts("type", "billing.*")), fleet()),
        *("the type billing.* is paused", "`reefknot queue resume --type 'billing.*'`"),
    ),
    (
        *(W.LIMITED, job(limit=causes.LimitFacts("billing.*", "10/s, burst 20", "a.yaml:2:3", 7, 3.2)), fleet(IDLE)),
        "it waits for the limit billing.* (10/s, burst 20; a.yaml:2:3), as 7 jobs do; the next one starts in 3 s",
        "raise the limit in a.yaml:2:3, then `reefknot router reload`",
    ),
    (
        *(W.LIMITED, job(limit=causes.LimitFacts("tenant acme", "5 running", "")), fleet(IDLE)),
        *("it waits for the limit tenant acme (5 running)", "waiting is right: it keeps its place"),
    ),
    (W.RUNS_ALONE, queued(due_in=1.0, is_alone=True), fleet(IDLE), "runs alone; it is tried again", "history"),
    (W.RUNS_ALONE, queued(is_alone=True), fleet(IDLE), "waits until it can run alone", "history"),
    (W.PUT_OFF, queued(due_in=5.0, reason="rescheduled"), fleet(IDLE), "put off (rescheduled)", "by itself"),
    (W.PUT_OFF, queued(due_in=5.0), fleet(IDLE), "it was put off and is due in 5 s", "by itself"),
    (W.SOON, JOB, fleet(IDLE), "about to send it", "doctor"),
    (
        *(W.QUARANTINED, queued(is_quarantined=True, reason="attempts_spent", error="refused"), fleet(IDLE)),
        *("waits for a decision of an operator (attempts_spent); the last failure: refused", "quarantine requeue ID"),
    ),
    (W.QUARANTINED, queued(is_quarantined=True, reason="x"), FleetFacts(), "an operator (x)", "discard ID"),
    (W.SOON, job(pool=""), fleet(BUSY), "about to send it", "doctor"),
    (W.SOON, JOB, fleet(is_shared=True), "about to send it", "doctor"),
    (W.SOON, QUEUED, fleet(IDLE), "w1 is about to begin it", "doctor"),
    (W.SOON, JOB, fleet(structs.replace(IDLE, types=None)), "about to send it", "doctor"),
]


@for_each_row(("code", "facts", "system", "text", "remedy"), CASES)
def test_a_cause_has_its_remedy(code: WaitCode, facts: JobFacts, system: FleetFacts, text: str, remedy: str) -> None:
    found = why_waits(facts, system)
    assert found.code is code
    assert text in found.text
    assert remedy in found.remedy
    assert found.sentence == f"{found.text}; {found.remedy}"


SYNCED = fleet(sources=frozenset({"mail"}))
SOURCES: list[tuple[WaitCode, JobFacts, FleetFacts, SourceFacts, str]] = [
    (
        *(W.SOURCE_PAUSED, JOB, SYNCED, SourceFacts("mail", SourceCondition.PAUSED, why="by ann: moving")),
        "the source mail is paused (by ann: moving); resume it with `reefknot source resume mail`",
    ),
    (W.SOURCE_COOLING, JOB, SYNCED, SourceFacts("mail", SourceCondition.COOLING, 90.0), "cools for 90 s"),
    (W.SOURCE_RESTING, JOB, SYNCED, SourceFacts("mail", SourceCondition.RESTING, 30.0), "rests for 30 s"),
    (W.NO_SYNC, JOB, fleet(), SourceFacts("mail"), "no running system syncs the source mail"),
    (W.RETRY, job(**RETRY), SYNCED, SourceFacts("mail"), "attempt 2 begins in 12 s"),
    (W.SOURCE_PROBED, JOB, SYNCED, SourceFacts("mail", SourceCondition.PROBING), "one job tries whether"),
    (W.SOURCE_BUSY, JOB, SYNCED, SourceFacts("mail", running=1), "1 job of the source mail runs"),
    (W.SOURCE_BUSY, JOB, SYNCED, SourceFacts("mail", running=2), "2 jobs of the source mail run"),
    (W.SOON, JOB, SYNCED, SourceFacts("mail"), "about to begin"),
]


@for_each_row(("code", "facts", "system", "source", "text"), SOURCES)
def test_a_job_says_what_becomes_of_its_source(code: Any, facts: JobFacts, system: Any, source: Any, text: str) -> None:
    found = why_waits(facts, system, source)
    assert found.code is code
    assert text in found.sentence


def test_every_code_is_walked() -> None:
    assert {case[0] for case in CASES} | {case[0] for case in SOURCES} == set(WaitCode)


def test_a_long_error_is_one_line_and_is_cut_and_so_are_many_names() -> None:
    found = why_waits(queued(**RETRY, error="boom\n" * 100), fleet(IDLE))
    assert ("\n" in found.text, found.text[-1]) == (False, "…")
    workers = [structs.replace(PAUSED, name=f"w{number}") for number in range(7)]
    assert why_waits(JOB, fleet(*workers)).text.endswith("w0, w1, w2, w3, w4 and 2 more")


def test_a_time_is_told_in_the_unit_that_people_would_choose() -> None:
    told = ["0 s", "0 s", "1 s", "59 s", "119 s", "2 min", "2 h", "2 d"]
    assert [causes.span(seconds) for seconds in (-1, 0, 0.2, 59, 119, 120, 7200, 2e5)] == told


def counted(waiting: dict[str, int], left: int, system: FleetFacts) -> list[tuple[WaitCode, int]]:
    return [(one.code, one.jobs) for one in unserved(waiting, left, system)]


def test_jobs_without_a_router_or_a_worker_of_their_class_are_counted() -> None:
    assert counted({"cpu": 2}, 1, FleetFacts()) == [(W.NO_SYSTEM, 3)]
    assert counted({"cpu": 2}, 1, fleet(IDLE, routers=0)) == [(W.NO_ROUTER, 3)]
    assert counted({"cpu": 2, "gpu": 1}, 0, fleet(IDLE, routers=0)) == [(W.NO_ROUTER, 3), (W.NO_CLASS, 1)]
    assert counted({"cpu": 2}, 0, fleet()) == [(W.NO_WORKER, 2)]
    assert counted({"cpu": 2, "gpu": 1}, 0, fleet(IDLE)) == [(W.NO_CLASS, 1)]


def test_jobs_that_are_served_or_may_be_are_not_counted() -> None:
    assert counted({}, 0, FleetFacts()) == []
    assert counted({"": 2}, 0, fleet(IDLE)) == [], "a class that is not known may be there"
    assert counted({"cpu": 2}, 0, fleet(PAUSED)) == [], "it has the class, and says by itself that it is paused"
    assert counted({}, 3, fleet(IDLE)) == [], "a router brings them back"
    assert counted({"gpu": 1}, 0, fleet(is_shared=True)) == [], "workers that do not report themselves may have it"


def test_the_sentence_about_unserved_jobs_has_their_number() -> None:
    (one,), (many,) = unserved({"cpu": 1}, 0, fleet()), unserved({"gpu": 2}, 0, fleet(IDLE))
    assert one.text == "1 job waits: no worker is running"
    assert many.text.startswith("2 jobs wait: no running worker has the class gpu")
    assert "the pool gpu" in many.remedy
