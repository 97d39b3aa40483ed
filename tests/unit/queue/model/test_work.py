"""One piece of work, from accepted to ended."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from reefknot.core.time import Moment
from reefknot.errors import IllegalMoveError
from reefknot.queue.model.messages import Cancel, ExecAssignment, ExecResult, Job, ResultJob, ResultStatus
from reefknot.queue.model.submission import EXPIRED, OVERDUE, Stage
from reefknot.queue.model.work import (
    CRASH_LIMIT,
    LONGEST_HISTORY,
    MOVES,
    ROUTER,
    Budget,
    HistoryEntry,
    Interrupted,
    Quarantine,
    Returned,
    Settled,
    Snooze,
    TryAgain,
    WorkCancelled,
    WorkDone,
    WorkFailed,
    WorkItem,
    WorkRejected,
    WorkState,
    accepted,
    accepted_for_worker,
    assigned,
    assignment_and_tenant,
    attempts_since_progress,
    can_retry,
    cancel,
    discard,
    holds,
    is_over,
    is_suspect,
    is_unassigned,
    is_workers,
    lease_ran_out,
    moved,
    number_together,
    pool_of,
    recalled,
    record_id,
    requeue,
    settle,
    stage_of,
    started,
    step_key,
    transferred,
    visible_state,
    worker_class,
    worker_of,
)
from tests.rows import for_each_row

NOW = Moment(1_000, 50_000)
LATER = Moment(2_000, 51_000)
S = WorkState

ALLOWED = {
    (S.PENDING, S.RUNNING),
    (S.PENDING, S.CANCELLED),
    (S.PENDING, S.FAILED),
    (S.RUNNING, S.SUCCEEDED),
    (S.RUNNING, S.FAILED),
    (S.RUNNING, S.PENDING),
    (S.RUNNING, S.QUARANTINED),
    (S.RUNNING, S.CANCELLED),
    (S.FAILED, S.PENDING),
    (S.FAILED, S.QUARANTINED),
    (S.CANCELLED, S.PENDING),
    (S.QUARANTINED, S.PENDING),
    (S.QUARANTINED, S.DISCARDED),
}


def fresh() -> WorkItem:
    return accepted(WorkItem("a", "t", "io", "s", "ten", "cor", "tra", 2, deadline_at=9, payload=b"p"), NOW)


def running(**changes: object) -> WorkItem:
    item = started(fresh(), owner="w", fence=1, lease_ms=500, now=NOW)
    return structs.replace(item, **changes)


def aside() -> WorkItem:
    return settle(running(), Quarantine("bad", '"f"', '"r"'), NOW)


@for_each_row(("old", "new"), list(itertools.product(WorkState, WorkState)))
def test_the_table_allows_these_moves_and_no_other(old: WorkState, new: WorkState) -> None:
    item = structs.replace(fresh(), state=old)
    if (old, new) in ALLOWED:
        assert moved(item, new) is new
    else:
        with pytest.raises(IllegalMoveError) as caught:
            moved(item, new)
        assert (caught.value.old, caught.value.new) == (old, new)


@for_each_row(
    ("item", "gone", "seen"),
    [
        (running(), (), S.RUNNING),
        (running(), ("another",), S.RUNNING),
        (running(), ("w",), S.PENDING),
        (running(resource_class=ROUTER), (), S.PENDING),
        (running(lease_until=NOW.steady), (), S.PENDING),
        (running(lease_until=NOW.steady + 1), (), S.RUNNING),
        (running(lease_until=NOW.steady + 501), (), S.PENDING),
        (fresh(), (), S.PENDING),
        (aside(), ("w",), S.QUARANTINED),
    ],
)
def test_work_is_seen_as_running_only_while_a_worker_is_at_it(
    item: WorkItem, gone: tuple[str, ...], seen: WorkState
) -> None:
    """A lease that ends later than one of this boot can was given by an earlier one."""
    assert visible_state(item, NOW, gone=gone) is seen


def test_every_state_has_its_row_in_the_table() -> None:
    assert set(MOVES) == set(WorkState)


def test_accepted_work_is_pending_due_now_and_its_counters_are_its_own() -> None:
    forged = structs.replace(aside(), attempts=7, crashes=7, fence=7, due_at=0)
    item = accepted(forged, NOW)
    assert item == fresh()
    assert (item.state, item.due_at, item.created_at, item.updated_at) == (S.PENDING, 50_000, 50_000, 50_000)
    assert (item.priority, item.payload, item.deadline_at) == (2, b"p", 9)


def test_a_due_time_that_was_asked_for_is_kept() -> None:
    assert accepted(WorkItem("a", "t", due_at=77), NOW).due_at == 77


def test_a_claim_gives_owner_fence_and_lease() -> None:
    item = running()
    assert (item.state, item.owner, item.fence, item.lease_until, item.lease_ms) == (S.RUNNING, "w", 1, 1_500, 500)


def test_only_its_owner_with_its_fence_holds_running_work() -> None:
    assert holds(running(), owner="w", fence=1)
    assert not holds(running(), owner="v", fence=1)
    assert not holds(running(), owner="w", fence=2)
    assert not holds(fresh(), owner="", fence=0)
    assert not holds(None, owner="w", fence=1)


def test_success_counts_the_attempt_and_drops_the_budget() -> None:
    item = settle(running(budget=Budget(attempts=2), attempts=2, failure='"old"'), WorkDone('"r"'), LATER)
    assert (item.state, item.attempts, item.result, item.failure) == (S.SUCCEEDED, 3, '"r"', None)
    assert (item.budget, item.owner, item.lease_until, item.updated_at) == (Budget(), "", 0, 51_000)


def test_a_final_failure_keeps_what_is_known_and_drops_the_budget() -> None:
    item = settle(running(), WorkFailed('"f"', '"r"', "refused"), LATER)
    assert (item.state, item.attempts, item.failure, item.result) == (S.FAILED, 1, '"f"', '"r"')
    assert (item.reason, item.budget) == ("refused", Budget())
    assert item.history == (HistoryEntry(51_000, "failed", "refused"),)


def test_a_retry_is_due_at_its_time_and_its_budget_adds_up() -> None:
    again = TryAgain(60_000, '"f"', "transient", delay_ms=700, reason="network")
    once = settle(running(), again, NOW)
    assert (once.state, once.due_at, once.attempts, once.failure, once.reason) == (
        S.PENDING,
        60_000,
        1,
        '"f"',
        "network",
    )
    assert once.budget == Budget(1, "transient", 50_000, 50_000, 700, "network")
    assert once.history == (HistoryEntry(50_000, "retry", "network"),)
    twice = settle(started(once, owner="w", fence=2, lease_ms=1, now=LATER), again, LATER)
    assert twice.budget == Budget(2, "transient", 50_000, 51_000, 1_400, "network")


def test_a_retry_without_a_reason_has_no_trigger() -> None:
    assert settle(running(), TryAgain(60_000), NOW).budget.trigger is None


@pytest.mark.parametrize("reason", [EXPIRED, OVERDUE])
def test_a_deadline_that_has_passed_is_a_failure_wherever_it_was_noticed(reason: str) -> None:
    for item in (running(), structs.replace(running(), state=S.PENDING)):
        late = cancel(item, LATER, reason=reason, who="w1")
        assert (late.state, late.reason, late.history[-1].what) == (S.FAILED, reason, "failed")


def test_a_snooze_spends_nothing() -> None:
    item = settle(running(), Snooze(60_000, "cooling"), LATER)
    assert (item.state, item.due_at, item.reason) == (S.PENDING, 60_000, "cooling")
    assert (item.attempts, item.snoozes, item.interruptions, item.crashes) == (0, 1, 0, 0)
    assert (item.budget, item.history, item.updated_at) == (Budget(), (), 51_000)


def test_a_snooze_after_a_failure_that_counts_for_nothing_keeps_it_to_be_seen() -> None:
    item = settle(running(), Snooze(60_000, "down", failure="503"), LATER)
    assert (item.attempts, item.failure, item.history) == (0, "503", ())
    again = settle(structs.replace(item, state=S.RUNNING), Snooze(90_000, "down"), LATER)
    assert again.failure == "503"


def test_the_time_of_a_wait_for_somebody_elses_key_is_not_the_works_own() -> None:
    fresh = settle(running(), Snooze(60_000, "held", 5_000), LATER)
    assert fresh.budget == Budget()
    failed = structs.replace(running(), budget=Budget(1, None, 40_000, 41_000))
    assert settle(failed, Snooze(60_000, "held", 5_000), LATER).budget.first_attempt_at == 45_000


def test_a_snooze_says_which_failure_put_the_work_off_and_keeps_an_earlier_one() -> None:
    limited = settle(running(), Snooze(60_000, "limit", failure_type="rate_limited"), LATER)
    assert (limited.attempts, limited.budget.failure_type) == (0, "rate_limited")
    again = settle(structs.replace(running(), budget=limited.budget), Snooze(60_000), LATER)
    assert again.budget.failure_type == "rate_limited"


def test_progress_since_the_last_failure_gives_all_attempts_again() -> None:
    def fail(item: WorkItem, progress: int) -> WorkItem:
        return settle(structs.replace(item, state=S.RUNNING), TryAgain(60_000, progress=progress), LATER)

    stuck = fail(fail(running(), 3), 3)
    assert (stuck.attempts, stuck.budget.attempts, stuck.budget.progress) == (2, 2, 3)
    assert attempts_since_progress(stuck, 3) == 2
    assert attempts_since_progress(stuck, 4) == 0
    on = fail(stuck, 4)
    assert (on.attempts, on.budget.attempts, on.budget.progress) == (1, 1, 4)
    assert on.budget.first_attempt_at == stuck.budget.first_attempt_at, "the time of all attempts goes on"


def test_pending_work_is_transferred_with_its_due_time_or_with_another() -> None:
    item = structs.replace(running(), state=S.PENDING, due_at=7)
    over = transferred(item, "io@w", NOW)
    assert (over.resource_class, over.pool, over.due_at, over.updated_at) == ("io@w", "io", 7, NOW.wall)
    assert transferred(item, "io", NOW, due_at=9).due_at == 9


def test_work_that_was_handed_back_keeps_its_place() -> None:
    item = settle(running(), Interrupted(), LATER)
    assert (item.state, item.due_at, item.reason, item.owner, item.lease_until) == (
        S.PENDING,
        50_000,
        "shutdown",
        "",
        0,
    )
    assert (item.attempts, item.snoozes, item.interruptions, item.crashes) == (0, 0, 1, 0)


def test_quarantine_keeps_attempts_failure_and_history_and_clears_the_budget() -> None:
    item = aside()
    assert (item.state, item.reason, item.failure, item.result) == (S.QUARANTINED, "bad", '"f"', '"r"')
    assert (item.attempts, item.budget, item.owner, item.lease_until) == (1, Budget(), "", 0)
    assert item.history == (HistoryEntry(50_000, "quarantined", "bad"),)


def test_a_lease_that_ran_out_counts_a_crash_and_no_attempt() -> None:
    item = lease_ran_out(running(), LATER)
    assert (item.state, item.due_at, item.reason) == (S.PENDING, 50_000, "lease ran out")
    assert (item.attempts, item.crashes, item.owner) == (0, 1, "")
    assert item.history == (HistoryEntry(51_000, "crashed", "w"),)


def test_the_last_crash_puts_it_aside() -> None:
    item = lease_ran_out(running(crashes=CRASH_LIMIT - 1, failure='"old"'), LATER)
    assert (item.state, item.crashes) == (S.QUARANTINED, CRASH_LIMIT)
    assert (item.reason, item.failure) == ("its owner vanished 3 times", '"old"')
    assert lease_ran_out(running(), LATER, crash_limit=1).state is S.QUARANTINED


@pytest.mark.parametrize("item", [fresh(), running()])
def test_a_cancelled_item_says_who_and_why_and_how_long_it_had_run(item: WorkItem) -> None:
    called_off = cancel(item, LATER, reason="enough", who="ann")
    assert (called_off.state, called_off.reason, called_off.owner) == (S.CANCELLED, "enough", "")
    ran_ms = LATER.wall - item.updated_at if item.state is S.RUNNING else 0
    assert called_off.history == (HistoryEntry(51_000, "cancelled", "enough", "ann", ran_ms),)


def test_an_attempt_that_ran_when_the_item_was_cancelled_counts() -> None:
    """A submission that a router holds is not run."""
    held = structs.replace(running(), resource_class=ROUTER)
    for item, begun in ((fresh(), 0), (held, 0), (running(), 1), (running(attempts=2), 3)):
        assert cancel(item, LATER, reason="enough", who="ann").attempts == begun


def test_a_requeued_item_starts_anew_under_its_own_id() -> None:
    item = requeue(structs.replace(aside(), crashes=3, snoozes=1, interruptions=1), LATER, who="ann")
    assert (item.id, item.state, item.due_at, item.generation) == ("a", S.PENDING, 51_000, 1)
    assert (item.attempts, item.snoozes, item.interruptions, item.crashes) == (0, 0, 0, 0)
    assert (item.budget, item.reason, item.failure, item.result) == (Budget(), "", None, None)
    assert item.history[-1] == HistoryEntry(51_000, "requeued", "bad", "ann")
    assert item.payload == b"p"


def test_a_requeued_item_has_all_of_its_time_again_however_often_that_happens() -> None:
    item = structs.replace(aside(), deadline_at=aside().created_at + 700)
    once = requeue(item, LATER, who="ann")
    assert once.deadline_at == LATER.wall + 700
    again = requeue(structs.replace(once, state=S.QUARANTINED), Moment(LATER.steady, LATER.wall + 9000), who="ann")
    assert again.deadline_at == LATER.wall + 9700


def test_a_submission_that_failed_is_open_again_under_its_own_id() -> None:
    item = requeue(running(state=S.FAILED, result="old", reason="error"), LATER, who="ann")
    assert (item.state, item.result, item.generation) == (S.PENDING, None, 1)


def test_a_discarded_item_says_who_and_why() -> None:
    item = discard(aside(), LATER, who="ann", reason="old")
    assert (item.state, item.updated_at) == (S.DISCARDED, 51_000)
    assert item.history[-1] == HistoryEntry(51_000, "discarded", "old", "ann")


def test_what_is_not_in_quarantine_is_neither_requeued_nor_discarded() -> None:
    with pytest.raises(IllegalMoveError):
        requeue(running(state=S.SUCCEEDED), NOW, who="ann")
    with pytest.raises(IllegalMoveError):
        discard(fresh(), NOW, who="ann", reason="")


@for_each_row("settled", [WorkDone(), WorkFailed(), TryAgain(1), Snooze(1), Interrupted(), Quarantine("bad")])
def test_work_that_does_not_run_cannot_be_settled(settled: Settled) -> None:
    with pytest.raises(IllegalMoveError):
        settle(running(state=S.SUCCEEDED), settled, NOW)


def test_the_history_is_bounded_and_keeps_the_newest() -> None:
    item = running(history=tuple(HistoryEntry(number, "retry") for number in range(LONGEST_HISTORY)))
    told = cancel(item, LATER, reason="", who="").history
    assert len(told) == LONGEST_HISTORY
    assert (told[0].at, told[-1].what) == (1, "cancelled")


def test_the_budget_counts_from_the_beginning_of_the_first_attempt() -> None:
    first = settle(running(), TryAgain(9_000, began_at=1_234), Moment(0, 5_000))
    again = structs.replace(first, state=WorkState.RUNNING)
    second = settle(again, TryAgain(9_000, began_at=6_000), Moment(0, 7_000))

    assert (first.budget.first_attempt_at, first.budget.last_attempt_at) == (1_234, 5_000)
    assert (second.budget.first_attempt_at, second.budget.last_attempt_at) == (1_234, 7_000)


def test_the_budget_counts_from_the_first_start_even_if_that_was_never_reported() -> None:
    first = lease_ran_out(running(updated_at=1_500), LATER)
    again = lease_ran_out(running(updated_at=9_999, budget=first.budget), LATER)

    assert (first.budget.first_attempt_at, again.budget.first_attempt_at) == (1_500, 1_500)
    assert (first.budget.attempts, first.budget.last_attempt_at) == (0, None)


# ---- one record: from the routers to a worker -----------------------------------------------------------------------


def submission(**changes: object) -> WorkItem:
    item = WorkItem("a", "t", ROUTER, "", "ten", "cor", "tra", 2, deadline_at=9_000, payload=b"p")
    return structs.replace(accepted(item, NOW), **changes)


def to_worker(**changes: object) -> WorkItem:
    item = WorkItem(
        "a", "t", worker_class("io", "w1"), due_at=60_000, correlation_id="cor", admission="{}", payload=b"q"
    )
    return structs.replace(item, **changes)


def test_a_worker_has_a_class_of_its_own() -> None:
    assert worker_class("cpu", "worker-1") == "cpu@worker-1"
    assert [is_workers(WorkItem("a", "t", name)) for name in (ROUTER, "cpu", "cpu@w")] == [False, False, True]


@pytest.mark.parametrize("state", WorkState)
def test_only_an_open_submission_waits_for_a_worker(state: WorkState) -> None:
    assert is_unassigned(submission(state=state)) is (state in (S.PENDING, S.RUNNING))
    assert not is_unassigned(submission(state=state, resource_class="cpu@w1"))


@pytest.mark.parametrize("state", WorkState)
def test_what_is_over_has_its_result_and_quarantine_counts(state: WorkState) -> None:
    assert is_over(fresh()) is False
    assert is_over(structs.replace(fresh(), state=state)) is (state not in (S.PENDING, S.RUNNING))


@pytest.mark.parametrize("held", [False, True])
def test_a_submission_moves_to_a_worker_and_its_routers_claim_is_void(held: bool) -> None:
    before = started(submission(), owner="router#1", fence=3, lease_ms=500, now=NOW) if held else submission(fence=3)
    after = assigned(before, to_worker(), LATER)
    assert (after.id, after.resource_class, after.state) == ("a", "io@w1", S.PENDING)
    assert (after.owner, after.lease_until, after.fence, after.updated_at) == ("", 0, 3, LATER.wall)
    assert (after.due_at, after.admission) == (60_000, "{}"), "as the worker's admission has it"
    assert (after.deadline_at, after.created_at, after.priority) == (9_000, NOW.wall, 2), "as it was submitted"
    assert (after.tenant_id, after.trace_id, after.payload) == ("ten", "tra", b"p")
    assert not holds(after, owner="router#1", fence=3)


def test_a_submission_whose_payload_is_gone_takes_the_one_that_was_sent() -> None:
    assert assigned(submission(payload=b""), to_worker(), LATER).payload == b"q"


def test_what_routers_went_through_is_not_charged_to_the_worker() -> None:
    """A router that vanishes says nothing about the work, and the time budget begins with the first attempt."""
    item = submission()
    for _ in range(CRASH_LIMIT):
        held = started(item, owner="router#1", fence=1, lease_ms=500, now=NOW)
        item = lease_ran_out(held, LATER, crash_limit=1_000_000_000)
    after = assigned(item, to_worker(), LATER)
    assert (after.crashes, after.budget) == (0, Budget())
    crashed = lease_ran_out(started(after, owner="w", fence=2, lease_ms=500, now=LATER), LATER)
    assert crashed.state is S.PENDING


def test_a_router_that_stops_is_not_an_interruption_of_the_work() -> None:
    held = started(submission(), owner="router#1", fence=1, lease_ms=500, now=NOW)
    assert settle(held, Interrupted(), LATER).interruptions == 0
    worked_on = started(to_worker(), owner="w#1", fence=1, lease_ms=500, now=NOW)
    assert settle(worked_on, Interrupted(), LATER).interruptions == 1


def test_recalled_work_keeps_what_it_has_been_through_and_that_a_worker_had_accepted_it() -> None:
    item = structs.replace(to_worker(), crashes=2, attempts=1, due_at=77)
    for admission, kept in (("", "{}"), ('{"queue_depth":3}', '{"queue_depth":3}')):
        back = recalled(structs.replace(item, admission=admission), LATER)
        assert (back.resource_class, back.admission, back.updated_at) == (ROUTER, kept, LATER.wall), admission
        assert (back.crashes, back.attempts, back.due_at) == (2, 1, 77)
        assert assigned(back, to_worker(), LATER).crashes == 2


def test_an_assignment_that_is_not_there_is_accepted_as_new_work() -> None:
    item = to_worker()
    assert accepted_for_worker(None, item, NOW) == accepted(item, NOW)


@pytest.mark.parametrize("state", [S.PENDING, S.RUNNING])
def test_the_open_submission_of_an_assignment_is_accepted_by_moving_it(state: WorkState) -> None:
    known = submission(state=state)
    assert accepted_for_worker(known, to_worker(), LATER) == assigned(known, to_worker(), LATER)


@pytest.mark.parametrize(
    "known",
    [
        submission(kind="other"),
        submission(correlation_id="other"),
        submission(resource_class="io@w1"),
        submission(resource_class="io@w2", state=S.RUNNING),
        *(submission(state=state) for state in (S.SUCCEEDED, S.FAILED, S.QUARANTINED, S.CANCELLED, S.DISCARDED)),
    ],
)
def test_an_id_that_is_taken_is_not_accepted_again(known: WorkItem) -> None:
    assert accepted_for_worker(known, to_worker(), LATER) is None


def test_what_no_worker_took_ends_without_an_attempt() -> None:
    ended = settle(running(attempts=1, budget=Budget(1)), WorkRejected("{}", "timeout"), LATER)
    assert (ended.state, ended.attempts, ended.result, ended.reason) == (S.FAILED, 1, "{}", "timeout")
    assert (ended.owner, ended.budget) == ("", Budget())
    assert [(one.what, one.why) for one in ended.history] == [("rejected", "timeout")]


def test_what_was_cancelled_elsewhere_is_cancelled_with_the_result_that_tells_of_it() -> None:
    ended = settle(running(attempts=1, budget=Budget(1)), WorkCancelled("{}", "no longer wanted"), LATER)
    assert (ended.state, ended.attempts, ended.result, ended.reason) == (S.CANCELLED, 1, "{}", "no longer wanted")
    assert (ended.owner, ended.budget) == ("", Budget())
    assert [(one.what, one.why) for one in ended.history] == [("cancelled", "no longer wanted")]


@pytest.mark.parametrize("resource_class", ["io@w1", ROUTER, "io"])
def test_requeued_work_is_found_where_it_was(resource_class: str) -> None:
    item = structs.replace(aside(), resource_class=resource_class)
    assert requeue(item, LATER, who="ann").resource_class == resource_class


def test_the_worker_of_a_class_is_what_stands_behind_its_last_at_sign() -> None:
    for name, worker in (("cpu@w1", "w1"), ("gpu@eu@w1", "w1"), (ROUTER, ""), ("imap", "")):
        assert worker_of(name) == worker, name


# ---- pools and stages -----------------------------------------------------------------------------------------------


@for_each_row(
    ("resource_class", "pool"), [("io", "io"), ("io@w1", "io"), ("a@b@w1", "a@b"), (ROUTER, ROUTER), ("@w1", "@w1")]
)
def test_the_pool_of_a_class_is_the_class_without_its_worker(resource_class: str, pool: str) -> None:
    assert pool_of(resource_class) == pool


def test_accepted_work_has_the_pool_that_was_given_else_that_of_its_class() -> None:
    assert accepted(WorkItem("a", "t", ROUTER, pool="gpu"), NOW).pool == "gpu"
    assert accepted(WorkItem("a", "t", "io@w1"), NOW).pool == "io"


def test_a_submission_keeps_its_pool_with_a_worker_of_its_class_and_after_a_recall() -> None:
    submission = accepted(WorkItem("a", "t", ROUTER, pool="io"), NOW)
    moved_on = assigned(submission, WorkItem("a", "t", "io@w1"), LATER)

    assert moved_on.pool == "io"
    assert (recalled(moved_on, LATER).resource_class, recalled(moved_on, LATER).pool) == (ROUTER, "io")


def test_an_empty_tenant_is_none() -> None:
    assert accepted(WorkItem("a", "t", "io", tenant_id=""), NOW).tenant_id is None


@for_each_row(
    ("resource_class", "state", "stage"),
    [
        *((ROUTER, state, Stage.SUBMITTED) for state in (S.PENDING, S.RUNNING)),
        *((name, S.PENDING, Stage.QUEUED) for name in ("io", "io@w1")),
        *((name, S.RUNNING, Stage.RUNNING) for name in ("io", "io@w1")),
        *((name, state, None) for name in (ROUTER, "io@w1") for state in S if state not in (S.PENDING, S.RUNNING)),
    ],
)
def test_open_work_is_counted_at_its_stage_and_ended_work_at_none(
    resource_class: str, state: WorkState, stage: Stage | None
) -> None:
    assert stage_of(WorkItem("a", "t", resource_class, state=state)) is stage


# ---- ids of records -------------------------------------------------------------------------------------------------

_texts = st.text(alphabet="ab|%257C", min_size=1, max_size=8)
_tenants = st.none() | _texts


@given(name=_texts, tenant=_tenants, other_name=_texts, other_tenant=_tenants)
def test_no_two_assignments_have_the_same_record(
    name: str, tenant: str | None, other_name: str, other_tenant: str | None
) -> None:
    same = (name, tenant) == (other_name, other_tenant)
    assert (record_id(name, tenant) == record_id(other_name, other_tenant)) is same


@given(name=_texts, tenant=_tenants)
def test_a_record_tells_the_assignment_and_the_tenant_it_is_of(name: str, tenant: str | None) -> None:
    record = record_id(name, tenant)
    assert assignment_and_tenant(record) == (name, tenant)
    assert WorkItem(record, "t").assignment_id == name


@pytest.mark.parametrize(
    ("name", "tenant", "record"),
    [
        ("order-7", None, "order-7"),
        ("order-7", "", "order-7"),
        ("order-7", "acme", "acme|order-7"),
        ("acme|order-7", None, "|acme|order-7"),
        ("|", "50%|off", "50%25%7Coff||"),
    ],
)
def test_without_a_tenant_a_record_has_the_id_of_its_assignment(name: str, tenant: str | None, record: str) -> None:
    assert record_id(name, tenant) == record
    assert ExecAssignment(name, "r", Job("t"), tenant_id=tenant).record_id == record
    assert Cancel(name, tenant_id=tenant).record_id == record
    result = ExecResult(name, "r", ResultStatus.SUCCESS, "w", ResultJob("t"), tenant_id=tenant)
    assert result.record_id == record


def test_what_a_worker_cannot_run_is_a_submission_again() -> None:
    back = settle(running(resource_class="cpu@w1"), Returned("no such module"), NOW)
    assert (back.state, back.resource_class, back.attempts, back.reason) == (
        WorkState.PENDING,
        ROUTER,
        0,
        "no such module",
    )


def test_a_suspect_runs_by_itself_and_what_comes_before_it_together() -> None:
    assert is_suspect(running(resource_class="cpu@w1", crashes=1))
    assert not is_suspect(running(resource_class=ROUTER, crashes=1))
    assert [number_together(one) for one in ([False, False], [False, True], [True, False], [])] == [2, 1, 1, 0]


def test_only_work_that_ended_without_success_can_be_retried() -> None:
    states = {state for state in WorkState if can_retry(structs.replace(fresh(), state=state))}
    assert states == {WorkState.FAILED, WorkState.CANCELLED, WorkState.QUARANTINED}


def test_the_key_of_a_step_is_that_of_its_run() -> None:
    """Retries of a run share it; a requeue begins another run."""
    item = WorkItem("order-7|acme", "http.request", "io")

    assert step_key(item.id, item.generation) == "order-7|acme/0"
    assert step_key(item.id, item.generation + 1) != step_key(item.id, item.generation)
