"""One piece of work, from accepted to ended, and its versions: the ids, and what of it the next one has."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from reefknot.core.time import Moment
from reefknot.errors import IllegalMoveError
from reefknot.queue.model import transitions
from reefknot.queue.model import work as core
from reefknot.queue.model.admission import Arrival
from reefknot.queue.model.messages import Cancel, ExecAssignment, ExecResult, Job, ResultJob, ResultStatus
from reefknot.queue.model.notes import Noted, Notes, StepProgress
from reefknot.queue.model.submission import EXPIRED, OVERDUE, Stage
from reefknot.queue.model.transitions import is_replaced, next_record, next_version, replaced, replaced_reason
from reefknot.queue.model.work import ROUTER, Budget, HistoryEntry, Snooze, WorkItem, WorkState, accepted, holds, settle
from tests.rows import for_each_row

NOW = Moment(1_000, 50_000)
LATER = Moment(2_000, 51_000)
S = WorkState
ALLOWED = {
    S.PENDING: {S.RUNNING, S.CANCELLED, S.FAILED},
    S.RUNNING: {S.SUCCEEDED, S.FAILED, S.PENDING, S.QUARANTINED, S.CANCELLED},
    S.FAILED: {S.PENDING, S.QUARANTINED},
    S.CANCELLED: {S.PENDING},
    S.QUARANTINED: {S.PENDING, S.DISCARDED},
}


def fresh() -> WorkItem:
    return accepted(WorkItem("a", "t", "io", "s", "ten", "cor", "tra", 2, deadline_at=9, payload=b"p"), NOW)


def running(**changes: object) -> WorkItem:
    return structs.replace(core.started(fresh(), owner="w", fence=1, lease_ms=500, now=NOW), **changes)


def aside() -> WorkItem:
    return settle(running(), core.Quarantine("bad", '"f"', '"r"'), NOW)


def differences(before: WorkItem, after: WorkItem) -> dict[str, Any]:
    """The fields that changed, as they are afterwards; of the history what is new."""
    fields = {name: getattr(after, name) for name in after.__struct_fields__}
    changed = {name: value for name, value in fields.items() if value != getattr(before, name)}
    if "history" in changed:
        assert after.history[: len(before.history)] == before.history
        changed["history"] = after.history[len(before.history) :]
    return changed


def settled(how: core.Settled, **given: object) -> dict[str, Any]:
    """What the end of a run changes besides its owner and its lease, which it gives up."""
    before = running(**given)
    changed = differences(before, settle(before, how, LATER))
    assert {name: changed.pop(name, None) for name in ("owner", "lease_until")} == {"owner": "", "lease_until": 0}
    assert changed.pop("updated_at") == LATER.wall
    return changed


@for_each_row(("old", "new"), list(itertools.product(WorkState, WorkState)))
def test_the_table_allows_these_moves_and_no_other(old: WorkState, new: WorkState) -> None:
    item = structs.replace(fresh(), state=old)
    assert old in core.MOVES, "every state has its row"
    if new in ALLOWED.get(old, ()):
        assert core.moved(item, new) is new
    else:
        with pytest.raises(IllegalMoveError) as caught:
            core.moved(item, new)
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
def test_work_is_seen_as_running_while_one_is_at_it(item: WorkItem, gone: tuple[str, ...], seen: WorkState) -> None:
    """A lease that ends later than one of this boot can was given by an earlier one."""
    assert core.visible_state(item, NOW, gone=gone) is seen


def test_accepted_work_is_pending_due_now_or_when_it_was_asked_for_and_its_counters_are_its_own() -> None:
    item = accepted(structs.replace(aside(), attempts=7, crashes=7, fence=7, due_at=0), NOW)
    assert item == fresh()
    assert (item.state, item.due_at, item.created_at, item.updated_at) == (S.PENDING, 50_000, 50_000, 50_000)
    assert (item.priority, item.payload, item.deadline_at) == (2, b"p", 9)
    assert accepted(WorkItem("a", "t", due_at=77), NOW).due_at == 77
    assert accepted(WorkItem("a", "t", "io", tenant_id=""), NOW).tenant_id is None


def test_a_claim_gives_owner_fence_and_lease() -> None:
    lease = {"owner": "w", "fence": 1, "lease_until": 1_500, "lease_ms": 500}
    assert differences(fresh(), running()) == {"state": S.RUNNING, **lease}


def test_only_its_owner_with_its_fence_holds_running_work() -> None:
    held = (running(), "w", 1), (running(), "v", 1), (running(), "w", 2), (fresh(), "", 0), (None, "w", 1)
    assert [holds(item, owner=owner, fence=fence) for item, owner, fence in held] == [True, *[False] * 4]


def test_an_end_keeps_what_is_known_drops_the_budget_and_counts_the_attempt_that_was_made() -> None:
    spent = {"budget": Budget(2), "attempts": 2, "failure": '"old"'}
    done = {"state": S.SUCCEEDED, "attempts": 3, "result": '"r"', "failure": None, "budget": Budget()}
    assert settled(core.WorkDone('"r"'), **spent) == done
    ended = {"attempts": 3, "failure": '"f"', "result": '"r"', "budget": Budget()}
    failed = {**ended, "state": S.FAILED, "reason": "refused", "history": (HistoryEntry(51_000, "failed", "refused"),)}
    assert settled(core.WorkFailed('"f"', '"r"', "refused"), **spent) == failed
    bad = {**ended, "state": S.QUARANTINED, "reason": "bad", "history": (HistoryEntry(51_000, "quarantined", "bad"),)}
    assert settled(core.Quarantine("bad", '"f"', '"r"'), **spent) == bad
    told = {"result": "{}", "reason": "timeout", "budget": Budget(), "failure": None}
    rejected = {**told, "state": S.FAILED, "history": (HistoryEntry(51_000, "rejected", "timeout"),)}
    assert settled(core.WorkRejected("{}", "timeout"), **spent) == rejected, "no worker took it"
    cancelled = {**told, "state": S.CANCELLED, "history": (HistoryEntry(51_000, "cancelled", "timeout"),)}
    assert settled(core.WorkCancelled("{}", "timeout"), **spent) == cancelled, "elsewhere"


def test_what_was_handed_back_put_off_or_could_not_be_run_spends_nothing() -> None:
    handed_back = {"state": S.PENDING, "interruptions": 1, "reason": "shutdown"}
    assert settled(core.Interrupted()) == handed_back, "it keeps its place"
    snoozed = {"state": S.PENDING, "due_at": 60_000, "snoozes": 1, "reason": "cooling"}
    assert settled(Snooze(60_000, "cooling")) == snoozed
    assert settled(Snooze(60_000, "cooling", failure="503")) == {**snoozed, "failure": "503"}
    again = settle(running(failure="503"), Snooze(90_000, "down"), LATER)
    assert again.failure == "503", "a failure that counts for nothing is kept to be seen"
    returned = {"state": S.PENDING, "resource_class": ROUTER, "reason": "no such module", "admission": "{}"}
    assert settled(core.Returned("no such module"), resource_class="cpu@w1") == returned


def test_a_retry_is_due_at_its_time_and_its_budget_adds_up() -> None:
    again = core.TryAgain(60_000, '"f"', "transient", delay_ms=700, reason="network")
    pending = {"state": S.PENDING, "due_at": 60_000, "attempts": 1, "failure": '"f"', "reason": "network"}
    budget = {"budget": Budget(1, "transient", 51_000, 51_000, 700, "network")}
    assert settled(again) == {**pending, **budget, "history": (HistoryEntry(51_000, "retry", "network"),)}
    once = settle(running(), again, NOW)
    twice = settle(core.started(once, owner="w", fence=2, lease_ms=1, now=LATER), again, LATER)
    assert twice.budget == Budget(2, "transient", 50_000, 51_000, 1_400, "network")
    assert settle(running(), core.TryAgain(60_000), NOW).budget.trigger is None


@for_each_row("reason", [EXPIRED, OVERDUE])
def test_a_deadline_that_has_passed_is_a_failure_wherever_it_was_noticed(reason: str) -> None:
    for item in (running(), structs.replace(running(), state=S.PENDING)):
        late = core.cancel(item, LATER, reason=reason, who="w1")
        assert (late.state, late.reason, late.history[-1].what) == (S.FAILED, reason, "failed")


def test_the_time_of_a_wait_for_the_key_of_another_is_not_the_works_own() -> None:
    assert settle(running(), Snooze(60_000, "held", 5_000), LATER).budget == Budget()
    failed = running(budget=Budget(1, None, 40_000, 41_000))
    assert settle(failed, Snooze(60_000, "held", 5_000), LATER).budget.first_attempt_at == 45_000


def test_a_snooze_says_which_failure_put_the_work_off_and_keeps_an_earlier_one() -> None:
    limited = settle(running(), Snooze(60_000, "limit", failure_type="rate_limited"), LATER)
    assert (limited.attempts, limited.budget.failure_type) == (0, "rate_limited")
    assert settle(running(budget=limited.budget), Snooze(60_000), LATER).budget.failure_type == "rate_limited"


def test_progress_since_the_last_failure_gives_all_attempts_again() -> None:
    def fail(item: WorkItem, progress: int) -> WorkItem:
        return settle(structs.replace(item, state=S.RUNNING), core.TryAgain(60_000, progress=progress), LATER)

    stuck = fail(fail(running(), 3), 3)
    assert (stuck.attempts, stuck.budget.attempts, stuck.budget.progress) == (2, 2, 3)
    assert core.attempts_since_progress(stuck, 3) == 2
    assert core.attempts_since_progress(stuck, 4) == 0
    on = fail(stuck, 4)
    assert (on.attempts, on.budget.attempts, on.budget.progress) == (1, 1, 4)
    assert on.budget.first_attempt_at == stuck.budget.first_attempt_at, "the time of all attempts goes on"


def test_pending_work_is_transferred_with_its_due_time_or_with_another() -> None:
    item = running(state=S.PENDING, due_at=7, pool="", updated_at=0)
    moved_over = {"resource_class": "io@w", "pool": "io", "updated_at": NOW.wall}
    assert differences(item, core.transferred(item, "io@w", NOW)) == moved_over
    assert core.transferred(item, "io", NOW, due_at=9).due_at == 9


def test_a_lease_that_ran_out_counts_a_crash_and_no_attempt_and_the_last_crash_puts_it_aside() -> None:
    vanished = {"updated_at": 51_000, "owner": "", "lease_until": 0, "history": (HistoryEntry(51_000, "crashed", "w"),)}
    back = {"state": S.PENDING, "crashes": 1, "reason": "lease ran out", "budget": Budget(first_attempt_at=50_000)}
    assert differences(running(), core.lease_ran_out(running(), LATER)) == {**vanished, **back}
    last = running(crashes=core.CRASH_LIMIT - 1, failure='"old"')
    poison = {"state": S.QUARANTINED, "crashes": core.CRASH_LIMIT, "reason": "its owner vanished 3 times"}
    assert differences(last, core.lease_ran_out(last, LATER)) == {**vanished, **poison}
    assert core.lease_ran_out(running(), LATER, crash_limit=1).state is S.QUARANTINED


def test_a_cancelled_item_says_who_and_why_and_how_long_it_had_run() -> None:
    """An attempt that ran counts; a submission that a router holds is not run."""
    called_off = {"state": S.CANCELLED, "reason": "enough", "updated_at": 51_000}
    for item, ran_ms in ((fresh(), 0), (running(), 1_000)):
        changed = differences(item, core.cancel(item, LATER, reason="enough", who="ann"))
        assert called_off.items() <= {name: changed[name] for name in called_off}.items()
        assert changed["history"] == (HistoryEntry(51_000, "cancelled", "enough", "ann", ran_ms),)
        assert changed.get("owner", "") == ""
    held = running(resource_class=ROUTER)
    for item, begun in ((fresh(), 0), (held, 0), (running(), 1), (running(attempts=2), 3)):
        assert core.cancel(item, LATER, reason="enough", who="ann").attempts == begun


def test_a_requeued_item_starts_from_the_beginning_under_its_own_id_and_where_it_was() -> None:
    afresh = {"state": S.PENDING, "due_at": 51_000, "updated_at": 51_000, "generation": 1, "deadline_at": 1_009}
    blank = {"reason": "", "result": None}
    item = structs.replace(aside(), crashes=3, snoozes=1, interruptions=1)
    zero = {**dict.fromkeys(("attempts", "snoozes", "interruptions", "crashes"), 0), "failure": None}
    requeued = {"history": (HistoryEntry(51_000, "requeued", "bad", "ann"),)}
    assert differences(item, core.requeue(item, LATER, who="ann")) == {**afresh, **blank, **zero, **requeued}
    failed = running(state=S.FAILED, result="old", reason="error")
    requeued = {"history": (HistoryEntry(51_000, "requeued", "error", "ann"),)}
    assert differences(failed, core.requeue(failed, LATER, who="ann")) == {**afresh, **blank, **requeued}
    for resource_class in ("io@w1", ROUTER, "io"):
        here = structs.replace(aside(), resource_class=resource_class)
        assert core.requeue(here, LATER, who="ann").resource_class == resource_class


def test_a_requeued_item_has_all_of_its_time_again_however_often_that_happens() -> None:
    once = core.requeue(structs.replace(aside(), deadline_at=aside().created_at + 700), LATER, who="ann")
    assert once.deadline_at == LATER.wall + 700
    again = core.requeue(structs.replace(once, state=S.QUARANTINED), Moment(LATER.steady, LATER.wall + 9000), who="ann")
    assert again.deadline_at == LATER.wall + 9700


def test_only_what_is_in_quarantine_is_discarded_and_what_succeeded_is_not_requeued() -> None:
    history = (HistoryEntry(51_000, "discarded", "old", "ann"),)
    gone = {"state": S.DISCARDED, "updated_at": 51_000, "history": history}
    assert differences(aside(), core.discard(aside(), LATER, who="ann", reason="old")) == gone
    with pytest.raises(IllegalMoveError):
        core.requeue(running(state=S.SUCCEEDED), NOW, who="ann")
    with pytest.raises(IllegalMoveError):
        core.discard(fresh(), NOW, who="ann", reason="")


@for_each_row(
    "how", [core.WorkDone(), core.WorkFailed(), core.TryAgain(1), Snooze(1), core.Interrupted(), core.Quarantine("bad")]
)
def test_work_that_does_not_run_cannot_be_settled(how: core.Settled) -> None:
    with pytest.raises(IllegalMoveError):
        settle(running(state=S.SUCCEEDED), how, NOW)


def test_the_history_is_bounded_and_keeps_the_newest() -> None:
    item = running(history=tuple(HistoryEntry(number, "retry") for number in range(core.LONGEST_HISTORY)))
    told = core.cancel(item, LATER, reason="", who="").history
    assert len(told) == core.LONGEST_HISTORY
    assert (told[0].at, told[-1].what) == (1, "cancelled")


def test_the_budget_counts_from_the_first_start_even_if_that_was_never_reported() -> None:
    first = settle(running(), core.TryAgain(9_000, began_at=1_234), Moment(0, 5_000))
    second = settle(structs.replace(first, state=S.RUNNING), core.TryAgain(9_000, began_at=6_000), Moment(0, 7_000))
    assert (first.budget.first_attempt_at, first.budget.last_attempt_at) == (1_234, 5_000)
    assert (second.budget.first_attempt_at, second.budget.last_attempt_at) == (1_234, 7_000)
    crashed = core.lease_ran_out(running(updated_at=1_500), LATER)
    again = core.lease_ran_out(running(updated_at=9_999, budget=crashed.budget), LATER)
    assert (crashed.budget, again.budget) == (Budget(first_attempt_at=1_500), Budget(first_attempt_at=1_500))


def submission(**changes: object) -> WorkItem:
    item = WorkItem("a", "t", ROUTER, "", "ten", "cor", "tra", 2, deadline_at=9_000, payload=b"p")
    return structs.replace(accepted(item, NOW), **changes)


def to_worker(**changes: object) -> WorkItem:
    item = WorkItem("a", "t", "io@w1", due_at=60_000, correlation_id="cor", admission="{}", payload=b"q")
    return structs.replace(item, **changes)


def test_a_worker_has_a_class_of_its_own_behind_the_last_at_sign() -> None:
    assert core.worker_class("cpu", "worker-1") == "cpu@worker-1"
    assert [core.is_workers(WorkItem("a", "t", name)) for name in (ROUTER, "cpu", "cpu@w")] == [False, False, True]
    assert [core.worker_of(name) for name in ("cpu@w1", "gpu@eu@w1", ROUTER, "imap")] == ["w1", "w1", "", ""]


@for_each_row("state", list(WorkState))
def test_only_an_open_submission_waits_for_a_worker_and_what_is_over_is_not_open(state: WorkState) -> None:
    is_open = state in (S.PENDING, S.RUNNING)
    assert core.is_unassigned(submission(state=state)) is is_open
    assert not core.is_unassigned(submission(state=state, resource_class="cpu@w1"))
    assert core.is_over(structs.replace(fresh(), state=state)) is not is_open
    assert core.can_retry(structs.replace(fresh(), state=state)) is (state in (S.FAILED, S.CANCELLED, S.QUARANTINED))


def test_a_submission_moves_to_a_worker_and_its_routers_claim_is_void() -> None:
    """Due time and admission are those of the worker, all else is as it was submitted."""
    sent = {"resource_class": "io@w1", "pool": "io", "due_at": 60_000, "admission": "{}", "updated_at": LATER.wall}
    free = submission(fence=3)
    assert differences(free, core.assigned(free, to_worker(), LATER)) == sent
    held = core.started(submission(), owner="router#1", fence=3, lease_ms=500, now=NOW)
    after = core.assigned(held, to_worker(), LATER)
    assert differences(held, after) == {**sent, "state": S.PENDING, "owner": "", "lease_until": 0}
    assert not holds(after, owner="router#1", fence=3)
    assert core.assigned(submission(payload=b""), to_worker(), LATER).payload == b"q", "if its own is gone"


def test_what_routers_went_through_is_not_charged_to_the_worker() -> None:
    """A router that vanishes says nothing about the work, and the time budget begins with the first attempt."""
    item = submission()
    for _ in range(core.CRASH_LIMIT):
        held = core.started(item, owner="router#1", fence=1, lease_ms=500, now=NOW)
        item = core.lease_ran_out(held, LATER, crash_limit=1_000_000_000)
    after = core.assigned(item, to_worker(), LATER)
    assert (after.crashes, after.budget) == (0, Budget())
    begun = core.started(after, owner="w", fence=2, lease_ms=500, now=LATER)
    assert core.lease_ran_out(begun, LATER).state is S.PENDING


def test_a_router_that_stops_is_not_an_interruption_of_the_work() -> None:
    held = core.started(submission(), owner="router#1", fence=1, lease_ms=500, now=NOW)
    assert settle(held, core.Interrupted(), LATER).interruptions == 0
    worked_on = core.started(to_worker(), owner="w#1", fence=1, lease_ms=500, now=NOW)
    assert settle(worked_on, core.Interrupted(), LATER).interruptions == 1


def test_recalled_work_keeps_what_it_has_been_through_and_that_a_worker_had_accepted_it() -> None:
    item = structs.replace(to_worker(), crashes=2, attempts=1, due_at=77)
    for admission, kept in (("", "{}"), ('{"queue_depth":3}', '{"queue_depth":3}')):
        back = core.recalled(structs.replace(item, admission=admission), LATER)
        assert (back.resource_class, back.admission, back.updated_at) == (ROUTER, kept, LATER.wall), admission
        assert (back.crashes, back.attempts, back.due_at) == (2, 1, 77)
        assert core.assigned(back, to_worker(), LATER).crashes == 2


def test_an_assignment_is_accepted_as_new_work_or_by_moving_its_open_submission() -> None:
    assert core.accepted_for_worker(None, to_worker(), NOW) == accepted(to_worker(), NOW)
    for state in (S.PENDING, S.RUNNING):
        known = submission(state=state)
        assert core.accepted_for_worker(known, to_worker(), LATER) == core.assigned(known, to_worker(), LATER)


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
    assert core.accepted_for_worker(known, to_worker(), LATER) is None


def test_the_pool_of_a_class_is_the_class_without_its_worker_unless_another_one_was_given() -> None:
    classes = ("io", "io@w1", "a@b@w1", ROUTER, "@w1")
    assert [core.pool_of(name) for name in classes] == ["io", "io", "a@b", ROUTER, "@w1"]
    assert accepted(WorkItem("a", "t", ROUTER, pool="gpu"), NOW).pool == "gpu"
    assert accepted(WorkItem("a", "t", "io@w1"), NOW).pool == "io"


def test_a_submission_keeps_its_pool_with_a_worker_of_its_class_and_after_a_recall() -> None:
    submission = accepted(WorkItem("a", "t", ROUTER, pool="io"), NOW)
    moved_on = core.assigned(submission, WorkItem("a", "t", "io@w1"), LATER)
    assert moved_on.pool == "io"
    assert (core.recalled(moved_on, LATER).resource_class, core.recalled(moved_on, LATER).pool) == (ROUTER, "io")


@for_each_row(
    ("resource_class", "state", "stage"),
    [
        *((ROUTER, state, Stage.SUBMITTED) for state in (S.PENDING, S.RUNNING)),
        *((name, S.PENDING, Stage.QUEUED) for name in ("io", "io@w1")),
        *((name, S.RUNNING, Stage.RUNNING) for name in ("io", "io@w1")),
        *((name, state, None) for name in (ROUTER, "io@w1") for state in S if state not in (S.PENDING, S.RUNNING)),
    ],
)
def test_open_work_is_counted_at_its_stage_alone(resource_class: str, state: WorkState, stage: Stage | None) -> None:
    assert core.stage_of(WorkItem("a", "t", resource_class, state=state)) is stage


def test_admission_sees_the_priority_the_time_left_and_the_tenant_of_new_work() -> None:
    assert core.arrival_of(submission(), NOW) == Arrival(2, -41_000.0, "ten")
    assert core.arrival_of(WorkItem("a", "t"), NOW) == Arrival()


_texts = st.text(alphabet="ab|%257C", min_size=1, max_size=8)
_tenants = st.none() | _texts


@given(name=_texts, tenant=_tenants, other_name=_texts, other_tenant=_tenants)
def test_assignments_share_no_record(name: str, tenant: str | None, other_name: str, other_tenant: str | None) -> None:
    same = (name, tenant) == (other_name, other_tenant)
    assert (core.record_id(name, tenant) == core.record_id(other_name, other_tenant)) is same


@given(name=_texts, tenant=_tenants)
def test_a_record_tells_the_assignment_and_the_tenant_it_is_of(name: str, tenant: str | None) -> None:
    record = core.record_id(name, tenant)
    assert core.assignment_and_tenant(record) == (name, tenant)
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
    assert core.record_id(name, tenant) == record
    assert ExecAssignment(name, "r", Job("t"), tenant_id=tenant).record_id == record
    assert Cancel(name, tenant_id=tenant).record_id == record
    assert ExecResult(name, "r", ResultStatus.SUCCESS, "w", ResultJob("t"), tenant_id=tenant).record_id == record


def test_a_suspect_runs_by_itself_and_what_comes_before_it_together() -> None:
    assert core.is_suspect(running(resource_class="cpu@w1", crashes=1))
    assert not core.is_suspect(running(resource_class=ROUTER, crashes=1))
    assert [core.number_together(one) for one in ([False, False], [False, True], [True, False], [])] == [2, 1, 1, 0]


def test_the_key_of_a_step_is_that_of_its_run() -> None:
    """Retries of a run share it; a requeue begins another run."""
    assert [core.step_key("order-7|acme", generation) for generation in (0, 1)] == ["order-7|acme/0", "order-7|acme/1"]


def test_versions_count_on_and_a_record_keeps_its_tenant() -> None:
    for name, following in (
        ("order", "order~2"),
        ("order~2", "order~3"),
        ("order~9", "order~10"),
        ("order~0", "order~0~2"),
        ("order~x", "order~x~2"),
        ("a\nb~2", "a\nb~3"),
        ("~2", "~3"),
        ("", "~2"),
    ):
        assert (next_version(name), replaced_reason(name)) == (following, f"replaced by {following}")
    assert [next_record(name) for name in ("acme|order", "|a|b~2")] == ["acme|order~2", "|a|b~3"]


def quarantined(resource_class: str) -> WorkItem:
    item = WorkItem("acme|order", "t", resource_class, "notes", "acme", "r", "tr", 3, deadline_at=6000, payload=b"\xff")
    put_aside = {"state": WorkState.QUARANTINED, "created_at": 1000, "attempts": 4, "crashes": 1, "reason": "bad"}
    return structs.replace(item, **put_aside, failure="{}", admission="{}", pool="io")


@pytest.mark.parametrize(
    ("resource_class", "expected"), [("io@w1", ROUTER), ("ingest.notes", "ingest.notes"), ("ingest.x@w1", ROUTER)]
)
def test_the_next_version_is_the_same_work_with_a_fresh_budget(resource_class: str, expected: str) -> None:
    item = quarantined(resource_class)
    old, new = replaced(item, b"new", NOW, who="ann", why="a typo")
    assert [is_replaced(one) for one in (item, old, new)] == [False, True, False]
    assert (old.state, old.payload, old.reason) == (WorkState.DISCARDED, b"\xff", "bad")
    assert [(one.what, one.why, one.who) for one in old.history] == [("discarded", "replaced by order~2", "ann")]
    assert (new.id, new.state, new.resource_class, new.payload) == ("acme|order~2", WorkState.PENDING, expected, b"new")
    assert (new.kind, new.source, new.tenant_id, new.priority, new.pool) == ("t", "notes", "acme", 3, "io")
    assert (new.correlation_id, new.trace_id, new.due_at, new.deadline_at) == ("r", "tr", 50_000, 55_000)
    assert (new.attempts, new.crashes, new.reason, new.failure, new.admission) == (0, 0, "", None, "")
    assert [(one.what, one.why, one.who) for one in new.history] == [("replaces", "order: a typo", "ann")]
    assert core.is_ingestion(new) is (expected != ROUTER)


def test_without_a_reason_the_link_is_the_id_alone_and_only_quarantined_work_is_replaced() -> None:
    item = quarantined("io@w1")
    assert replaced(item, b"", NOW, who="ann")[1].history[0].why == "order"
    with pytest.raises(IllegalMoveError):
        replaced(WorkItem("a", "t"), b"", NOW, who="ann")
    assert not is_replaced(core.discard(item, NOW, who="ann", reason="not wanted"))
    assert not is_replaced(WorkItem("a", "t", state=WorkState.DISCARDED))


def test_a_transition_applies_to_the_states_that_allow_it_and_names_what_it_touches() -> None:
    item, failed, done = aside(), running(state=S.FAILED), running(state=S.SUCCEEDED)
    again, dropped = transitions.Requeue("ann", "mended"), transitions.Discard("ann", "old")
    other, gone = transitions.Replace(b"new", "ann", "a typo"), transitions.Remove()

    def outcomes(one: WorkItem) -> list[tuple[WorkItem, ...] | None]:
        return [transitions.outcome(one, change, LATER) for change in (again, dropped, other, gone)]

    requeued, discarded = (
        core.requeue(item, LATER, who="ann", why="mended"),
        core.discard(item, LATER, who="ann", reason="old"),
    )
    assert outcomes(item) == [(requeued,), (discarded,), replaced(item, b"new", LATER, who="ann", why="a typo"), ()]
    assert outcomes(failed) == [(core.requeue(failed, LATER, who="ann", why="mended"),), None, None, None]
    assert outcomes(done) == [None] * 4
    touched = [transitions.records_of(["a", "acme|b"], change) for change in (dropped, other)]
    assert touched == [["a", "acme|b"], ["a", "acme|b", "a~2", "acme|b~2"]]


def test_the_children_of_a_family_are_named_after_its_root() -> None:
    assert [WorkItem("a", "t", extra=core.Extra(root=root)).family_id for root in ("", "first")] == ["a", "first"]


def test_the_time_that_work_was_held_at_its_router_is_not_its_own() -> None:
    """What waits for a limit keeps its reason with the worker, so that people see what it waited for."""
    sent_back = settle(running(resource_class="io@w1"), core.Returned("limit", is_held=True), NOW)
    assert (sent_back.resource_class, sent_back.extra.held_at) == (ROUTER, NOW.wall)
    assert settle(running(resource_class="io@w1"), core.Returned("no module"), NOW).extra.held_at == 0
    new = core.assigned(sent_back, to_worker(), LATER)
    assert (new.extra.held_at, new.reason, new.budget) == (0, "limit", Budget())
    tried = structs.replace(sent_back, budget=Budget(1, first_attempt_at=40_000))
    assert core.assigned(tried, to_worker(), LATER).budget.first_attempt_at == 41_000
    earlier = Moment(0, NOW.wall - 5_000)
    assert core.assigned(tried, to_worker(), earlier).budget.first_attempt_at == 40_000, "the clock was set back"


def test_work_that_waits_for_other_work_is_looked_at_again_and_spends_nothing() -> None:
    waits = {"state": S.PENDING, "due_at": 60_000, "reason": core.SCHEDULED, "extra": core.Extra(over=2)}
    assert settled(core.Waits(60_000, 2)) == waits


def test_the_notes_of_a_step_are_added_to_those_that_are_stored() -> None:
    item = running(updated_at=50_000)
    assert core.with_notes(item, None, LATER) is item
    first = core.with_notes(item, Notes(1, StepProgress(1, 3)), LATER)
    assert first.extra.notes == Noted(1, LATER.wall, 1_000, progress=StepProgress(1, 3))
    second = core.with_notes(first, Notes(1, StepProgress(2, 3)), Moment(0, 59_000))
    assert second.extra.notes == Noted(1, LATER.wall, 1_000, progress=StepProgress(2, 3)), "no new checkpoint"


def test_only_crashes_since_the_last_checkpoint_put_work_aside() -> None:
    noted = core.with_notes(running(crashes=core.CRASH_LIMIT - 1), Notes(1), LATER)
    got_on = core.lease_ran_out(noted, LATER)
    assert (got_on.state, got_on.crashes) == (S.PENDING, 1)
    stuck = running(crashes=core.CRASH_LIMIT - 1, extra=got_on.extra)
    assert core.lease_ran_out(stuck, LATER).state is S.QUARANTINED, "it made no checkpoint since"
