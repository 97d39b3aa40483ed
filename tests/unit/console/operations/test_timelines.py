"""The story of one job: each attempt with its decision and its wait, and nothing that no event tells."""

from hashlib import sha256
from typing import Any

import pytest
from msgspec import structs

from reefknot.audit.assignments import vanished_events
from reefknot.audit.journal import Journal
from reefknot.audit.model import event
from reefknot.console.dashboard import pages, views
from reefknot.console.operations import jobs, values
from reefknot.console.operations.jobs import job_story
from reefknot.core.decide import History, decide
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.errors import OperationError
from reefknot.policy.model.book import Request
from reefknot.queue.model.messages import AssignmentOptions, ExecAssignment, Job, encode
from reefknot.queue.model.work import WorkDone, WorkItem, record_id
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from tests.unit.console.operations.operator_scene import SECRET, OperatorScene

NOON = 1_769_342_400.0
QUARTER = "worker: {retries: {v2: {enabled: true, block_policies: {http.request: {base_delay_ms: 250}}}}}\n"
FAILURE = Failure(ErrorCode.http_error, FailureType.TRANSIENT, "the service answered 503", http_status=503)


def about(second: float) -> dict[str, Any]:
    return {"timestamp": event.timestamp(NOON + second), "work_id": "order-7"}


def decided(
    attempts: int, elapsed: float, *, policy: RetryPolicy | None = None, **failure: Any
) -> event.DecisionRecord:
    policy = policy or RetryPolicy(3, 1.0, jitter="none")
    history, failed = History(attempts, elapsed), structs.replace(FAILURE, **failure)
    return event.DecisionRecord.of(decide(policy, history, failed, 0.0), policy, history, failed, 0.0)


def retried(second: float, number: int, record: event.DecisionRecord) -> event.RetryAttempt:
    assert record.delay is not None
    told: Any = {"exception_type": "HTTP_ERROR", "exception_message": "503", "delay_seconds": record.delay}
    return event.RetryAttempt(**about(second), **told, attempt_number=number, max_attempts=3, decision=record)


def stopped(
    second: float,
    number: int,
    record: event.DecisionRecord,
    kind: type[event.RetryExhausted | event.RetryRefused] = event.RetryExhausted,
) -> event.AnyEvent:
    told: Any = {"final_exception_type": "HTTP_ERROR", "final_exception_message": "503", "reason": record.answer}
    return kind(**about(second), **told, total_attempts=number, decision=record)


BEGUN: list[event.AnyEvent] = [
    event.Submitted(**about(0), actor="ann"),
    event.Routing(**about(0.1), worker_id="worker-1"),
    event.Admission(**about(0.2), worker_id="worker-1", resource_class="io"),
]


async def told(
    scene: OperatorScene,
    events: list[event.AnyEvent],
    *,
    result: str | None = None,
    payload: Any = None,
    **options: Any,
) -> dict[str, Any]:
    store, asked = scene.world.store, AssignmentOptions(retry_count=2, **options)
    body = encode(ExecAssignment("order-7", "r", Job("http.request", payload or {"url": "x"}), options=asked))
    deadline = int(scene.world.clock.wall() * 1000) + asked.deadline_ms if asked.deadline_ms else None
    item = WorkItem("order-7", "http.request", "io@worker-1", payload=body, deadline_at=deadline)
    await store.work.assign([item], start={"order-7"}, owner="w")
    kept = await store.work.get("order-7")
    assert kept is not None
    if result is not None:
        assert await store.work.settle([Settlement("order-7", "w", kept.fence, WorkDone(result))]) == [True]
    await store.audit.append(Journal(None, redactor=scene.operator.redactor).entries(events))
    return await job_story(scene.operator, "order-7")


def holds(found: dict[str, Any], **fields: Any) -> None:
    assert {name: found[name] for name in fields} == fields


def outcomes(found: dict[str, Any]) -> list[tuple[int, str]]:
    return [(one["number"], one["outcome"]) for one in found["attempts"]]


async def test_each_attempt_has_its_decision_its_wait_and_what_is_known_of_its_time(scene: OperatorScene) -> None:
    events = [
        *BEGUN,
        retried(1.0, 1, decided(1, 0.75)),
        event.TimeoutOccurred(**about(3.0), attempt_number=2, timeout_seconds=0.5),
        retried(3.0, 2, decided(2, 2.5, retry_after=30.0)),
        event.IdempotencyEvent(**about(34), idempotency_key="charge:7", action="record"),
        event.Completed(**about(34.5), status="success", attempts=3, duration_ms=34_500),
    ]
    found = await told(scene, events, result='{"latency_ms": 1250.0}')
    first, second, third = found["attempts"]
    holds(first, number=1, started_at=event.timestamp(NOON + 0.25), ended_at=event.timestamp(NOON + 1), duration_s=0.75)
    holds(first, outcome="retried", decision="again", reason=None, wait_s=1.0, wait_from="own backoff")
    holds(first, code="HTTP_ERROR", failure_type="transient", http_status=503, classification="network")
    holds(second, due_at=event.timestamp(NOON + 2), started_at=None, duration_s=None)
    holds(second, wait_from="server hint", timed_out_after_s=0.5)
    holds(third, outcome="succeeded", started_at=event.timestamp(NOON + 33.25), duration_s=1.25)
    holds(found, state="succeeded", idempotency_key="charge:7", worker="worker-1", is_cut=False)
    assert (first["worker_id"], found["ended_at"] is not None) == ("worker-1", True)
    assert [one["event_type"] for one in found["events"]][:3] == ["submitted", "routing", "admission"]
    assert "to worker-1" in [one["sentence"] for one in found["lines"]]


async def test_attempts_that_failed_after_progress_share_a_number_and_are_each_told(scene: OperatorScene) -> None:
    again = [
        event.RetryAttempt(
            **about(second),
            exception_type="HTTP_ERROR",
            exception_message="503",
            delay_seconds=1.0,
            attempt_number=number,
            max_attempts=3,
            decision=decided(1, 0.75),
            attempt_seconds=0.5,
        )
        for second, number in ((1.0, 1), (3.0, 2), (5.0, 2))
    ]
    end = event.Completed(**about(7), status="success", attempts=2, duration_ms=7_000)
    found = await told(scene, [*BEGUN, *again, end], result='{"latency_ms": 500.0}')
    assert outcomes(found)[:3] == [(1, "retried"), (2, "retried"), (2, "retried")]


@pytest.mark.parametrize("scene", [QUARTER], indirect=True)
async def test_a_wait_that_the_server_asked_for_is_decided_by_its_hint(scene: OperatorScene) -> None:
    assert scene.operator.settings is not None
    policy = scene.operator.settings.book.resolve("block:http.request", FAILURE, request=Request(retries=2))
    plain = policy.replace(jitter="none")
    asked, shorter = (decided(1, 0.5, policy=plain, retry_after=hint) for hint in (20.0, 0.01))
    odd = structs.replace(asked, policy=structs.replace(asked.policy, strategy="lunar"))
    found = await told(scene, [*BEGUN, retried(1, 1, asked), retried(2, 2, shorter), retried(3, 3, odd)])
    assert [(one["field"], one["layer"], one["wait_from"]) for one in found["attempts"][:3]] == [
        ("retry_after", "server hint", "server hint"),
        ("base_delay", "target", "own backoff"),
        (None, None, None),
    ]


async def test_a_wait_that_a_breaker_made_longer_says_so(scene: OperatorScene) -> None:
    def put_off(second: float, seconds: float) -> event.AnyEvent:
        return event.BreakerEvent(**about(second), name="block:http", state="open", wait_seconds=seconds)

    waits = [put_off(2.0, 10.0), put_off(12.0, 3.5)]
    retries = retried(1.0, 1, decided(1, 0.5)), retried(16.0, 2, decided(2, 1.0))
    found = await told(scene, [*BEGUN, put_off(0.3, 0.2), retries[0], *waits, retries[1]])
    first, second, _ = found["attempts"]
    assert (first["wait_s"], first["put_off_s"], second["put_off_s"]) == (1.0, 13.5, None)
    assert second["due_at"] == event.timestamp(NOON + 15.5)
    page = pages.environment().get_template("job.html")
    shown = page.new_context({"job": found, "rows": views.timeline_rows(found), "can_act": False})
    assert "then put off by the breaker: 13.5 s" in "".join(page.blocks["live"](shown))


async def test_a_hint_that_is_shorter_than_the_own_backoff_is_not_what_is_waited_for(scene: OperatorScene) -> None:
    found = await told(scene, [*BEGUN, retried(1.0, 1, decided(1, 0.5, retry_after=0.25))])
    first, running = found["attempts"]
    holds(first, wait_from="own backoff", wait_s=1.0)
    now = event.timestamp(scene.world.clock.wall())
    holds(running, outcome="running", number=1, started_at=now, ended_at=None)
    assert found["ended_at"] is None


async def test_the_end_of_a_job_that_gave_up_is_told_once_a_requeue_begins_a_generation(scene: OperatorScene) -> None:
    events = [
        *BEGUN,
        stopped(9, 3, decided(3, 9.0)),
        event.Completed(**about(9), status="error", attempts=3),
        event.Requeued(**about(60), reason="by ann", generation=1),
        event.Completed(**about(61), status="success", attempts=1),
    ]
    one, two = (await told(scene, events, result='{"latency_ms": "odd"}'))["attempts"]
    holds(one, generation=0, outcome="failed", decision="stop", reason="attempts_spent", field="max_attempts")
    holds(two, generation=1, number=1, outcome="succeeded")
    assert two["started_at"] is None, "a result that cannot be read tells no time"


async def test_an_attempt_that_was_cancelled_while_it_ran_is_told(scene: OperatorScene) -> None:
    ended = event.Completed(**about(12), status="cancelled", attempts=2, attempt_seconds=9.5)
    _, cancelled = (await told(scene, [*BEGUN, retried(1.0, 1, decided(1, 0.5)), ended], result="{}"))["attempts"]
    holds(cancelled, number=2, outcome="cancelled", duration_s=9.5)
    holds(cancelled, started_at=event.timestamp(NOON + 2.5), ended_at=event.timestamp(NOON + 12))


async def test_a_run_that_crashed_is_an_attempt_of_its_own_and_the_next_has_its_number(scene: OperatorScene) -> None:
    """Effects may have happened in it. Its start is on record if it was the first; before anybody has noticed, too."""
    store, journal = scene.world.store, Journal(None)
    item = WorkItem("order-7", "http.request", "io@worker-1", payload=b"{}")
    await store.work.assign([item], start={"order-7"}, owner="w@h:999999999:1")
    begun = await store.work.get("order-7")
    assert begun is not None

    def crash_events(one: WorkItem) -> Any:
        return journal.entries(vanished_events(one, scene.world.clock.wall()))

    for owner, crashes in (("w2", 1), ("w3", 2)):
        await store.leases.end(await store.leases.owners())
        (item,) = await store.work.claim(1, WorkClaim(owner=owner, classes=("io@worker-1",), crash_events=crash_events))
        found = await job_story(scene.operator, "order-7")
        assert outcomes(found) == [*[(1, "crashed")] * crashes, (1, "running")]
        holds(found["attempts"][0], message="its worker vanished", started_at=values.time_text(begun.updated_at))
        assert [one["started_at"] for one in found["attempts"][1:-1]] == [None] * (crashes - 1)

    done = Settlement("order-7", item.owner, item.fence, WorkDone("{}"))
    ended = journal.entries([event.Completed(**about(1), status="success", attempts=1)])
    assert await store.work.settle([structs.replace(done, events=tuple(ended))]) == [True]
    found = await job_story(scene.operator, "order-7")
    assert outcomes(found) == [*[(1, "crashed")] * 2, (1, "succeeded")]


async def test_a_crash_that_ends_in_quarantine_is_told_and_the_failure_before_it_once(scene: OperatorScene) -> None:
    crash = {"crashes": 3, "limit": 3, "attempts": 1}
    aside = event.Quarantined(**about(9), reason="its owner vanished 3 times", inputs=crash)
    ended = event.Completed(**about(9), status="error", attempts=1)
    found = await told(scene, [*BEGUN, retried(1.0, 1, decided(1, 0.5)), aside, ended], result="{}")
    assert outcomes(found) == [(1, "retried"), (2, "crashed")]


@pytest.mark.parametrize(
    ("payload", "key"),
    [
        ({"url": "x"}, ("order-7/0", "step")),
        ({"url": "x", "headers": {"Idempotency-Key": "mine-1"}}, ("mine-1", "header")),
        ({"url": "x", "headers": ["odd"]}, ("order-7/0", "step")),
    ],
)
async def test_the_key_is_the_one_that_the_request_sends(scene: OperatorScene, payload: Any, key: Any) -> None:
    found = await told(scene, BEGUN, payload=payload)
    assert (found["idempotency_key"], found["idempotency_key_from"]) == key
    assert found["assignment"]["job"]["payload"] == payload


async def test_a_key_that_is_not_ascii_is_shown_beside_the_hash_that_the_request_sends(scene: OperatorScene) -> None:
    kinds = {"märz-7": "http.request", "märz-8": "own.step", "march-7": "http.request"}
    for name, kind in kinds.items():
        body = encode(ExecAssignment(name, "r", Job(kind, {"url": "x"})))
        await scene.world.store.work.assign([WorkItem(name, kind, "io@w", payload=body)], start=(), owner="w")
    found = [await job_story(scene.operator, name) for name in kinds]
    sent = sha256("märz-7/0".encode()).hexdigest()
    keys = [(one["idempotency_key"], one["idempotency_key_sent"]) for one in found]
    assert keys == [("märz-7/0", sent), ("märz-8/0", None), ("march-7/0", None)]


@pytest.mark.parametrize("tenant", [None, "acme"])
async def test_a_cancellation_names_who_asked_and_who_carried_it_out(scene: OperatorScene, tenant: str | None) -> None:
    """The event of the worker is filed under the job, that of the operator only under its own."""
    store, name = scene.world.store, record_id("order-7", tenant)
    await store.work.enqueue([WorkItem(name, "http.request", tenant_id=tenant or "")])
    wall, why = scene.world.clock.wall(), {"reason": "enough"}
    asked = [
        event.OperatorAction(
            timestamp=event.timestamp(wall), details=why, actor="ann", action="job.cancel", subject=job, tenant_id=of
        )
        for job, of in (("order-7", tenant), ("order-8", tenant), ("order-7", "globex"))
    ]
    of_job: Any = {"work_id": "order-7", "subject": "order-7", "tenant_id": tenant, "details": why}
    carried = event.OperatorAction(**of_job, timestamp=event.timestamp(wall + 1), actor="worker-1", action="cancel")
    journal = Journal(None, redactor=scene.operator.redactor)
    await store.audit.append(journal.entries(asked))
    assert (await job_story(scene.operator, "order-7", tenant))["lines"] == []
    assert await store.work.cancel(name, reason="enough", events=journal.entries([carried]))
    found = await job_story(scene.operator, "order-7", tenant)
    assert [(one["what"], one["sentence"]) for one in found["lines"]] == [
        ("cancelled", "enough"),
        ("operator_action", "ann: job.cancel order-7: enough"),
        ("operator_action", "carried out by worker-1: cancel order-7: enough"),
    ]


async def test_history_and_events_are_told_in_sentences_by_time(scene: OperatorScene) -> None:
    """A worker's admission is written before the router's choice, which it follows."""
    submitted, routing, admission = BEGUN
    routing = structs.replace(routing, timestamp=admission.timestamp)
    found = await told(scene, [submitted, admission, routing, retried(1.0, 1, decided(1, 0.75))])
    assert [(one["what"], one["sentence"]) for one in found["lines"]] == [
        ("submitted", "by ann on , process 0"),
        ("routing", "to worker-1"),
        ("admission", "accepted by worker-1, 0 waiting"),
        ("retry_attempt", "attempt 1 failed: HTTP_ERROR: 503; again in 1.00 s"),
    ]
    assert found["lines"][0]["at"] == event.timestamp(NOON)


async def test_what_another_version_wrote_is_told_as_far_as_it_is_understood(scene: OperatorScene) -> None:
    known = decided(1, 0.5, retry_after=2.0)
    failure = structs.replace(known.failure, code="OUT_OF_LUCK")
    policy = structs.replace(known.policy, strategy="lunar", base_delay=77.0)
    found = await told(scene, [*BEGUN, retried(1, 1, structs.replace(known, failure=failure, policy=policy))])
    holds(found["attempts"][0], code="OUT_OF_LUCK", classification=None, wait_s=2.0, wait_from=None)


@pytest.mark.parametrize("status", ["error", "cancelled"])
async def test_a_job_refused_or_cancelled_without_an_attempt_has_none(scene: OperatorScene, status: str) -> None:
    record = decided(1, 0.0, failure_type=FailureType.PERMANENT, policy=RetryPolicy(1, 1.0, retryable=False))
    refused = [stopped(1, 0, record, event.RetryRefused)] if status == "error" else []
    ended = event.Completed(**about(12), status=status, attempts=0)
    found = await told(scene, [*BEGUN, *refused, ended], result="{}")
    assert (found["attempts"], found["events"][-1]["event_type"]) == ([], "completed")


@pytest.mark.parametrize("scene", [QUARTER], indirect=True)
async def test_the_layer_is_that_of_the_configured_book_if_it_is_the_one_that_decided(scene: OperatorScene) -> None:
    assert scene.operator.settings is not None
    book = scene.operator.settings.book
    again = decided(1, 0.5, policy=book.resolve("block:http.request", FAILURE, request=Request(retries=2)))
    other = structs.replace(again, book_hash="0" * 64)
    changed = structs.replace(again, policy=structs.replace(again.policy, base_delay=77.0))
    found = await told(scene, [*BEGUN, retried(1, 1, again), retried(2, 2, other), retried(3, 3, changed)])
    layers = [(one["field"], one["layer"]) for one in found["attempts"][:3]]
    assert layers == [("base_delay", "target"), ("base_delay", None), ("base_delay", None)]


@pytest.mark.parametrize(
    ("options", "seconds", "decided_by"),
    [
        ({}, 30.0, ("time_budget", "builtin")),
        ({"timeout_ms": 12_000}, 12.0, ("time_budget", "request")),
        ({"deadline_ms": 9_000}, 8.5, ("deadline", "request")),
        ({}, 12.0, ("time_budget", None)),
    ],
)
async def test_the_time_is_that_of_the_request_only_if_it_sets_one(
    scene: OperatorScene, options: dict[str, Any], seconds: float, decided_by: tuple[str, str | None]
) -> None:
    assert scene.operator.settings is not None
    policy = scene.operator.settings.book.resolve("block:http.request", FAILURE)
    spent = decided(1, seconds, policy=policy.replace(time_budget=seconds))
    assert spent.answer == "budget_spent"
    found = await told(scene, [*BEGUN, stopped(40, 1, spent)], **options)
    assert (found["attempts"][0]["field"], found["attempts"][0]["layer"]) == decided_by


async def test_a_story_is_bounded_redacted_and_private(scene: OperatorScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MOST_EVENTS", 4)
    events = [retried(n, n, decided(1, 0.5, message=f"no entry with {SECRET}")) for n in range(1, 7)]
    found = await told(scene, [*[structs.replace(one, tenant_id="acme") for one in events], *events])
    assert (len(found["events"]), found["is_cut"]) == (4, True)
    assert [one["number"] for one in found["attempts"]][:4] == [1, 2, 3, 4]
    assert SECRET not in str(found)
    with pytest.raises(OperationError, match="no job 'order-7' of tenant 'acme'") as absent:
        await job_story(scene.operator, "order-7", "acme")
    assert absent.value.kind == "not_found"
