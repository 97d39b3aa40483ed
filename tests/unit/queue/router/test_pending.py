"""The table of what is on its way: order of lines, deadlines, and that nothing piles up in it."""

import pytest

from reefknot.queue.model.messages import AssignmentOptions, ExecAssignment, Job
from reefknot.queue.port.work_queue import Held
from reefknot.queue.router.pending import ClaimedSubmission, Pending, PendingTable


def taken(name: str, priority: int = 0, deadline_at: int | None = None, tenant: str | None = None) -> ClaimedSubmission:
    assignment = ExecAssignment(name, "r", Job("t"), options=AssignmentOptions(priority=priority), tenant_id=tenant)
    return ClaimedSubmission(assignment, Held(name, "o", 1), deadline_at)


def line(table: PendingTable, name: str = "cpu") -> list[str]:
    """Everybody who stands there, in order; the line is empty afterwards."""
    found: list[str] = []
    for one, stand in table.lines():
        while one == name and (pending := stand.next()) is not None:
            found.append(pending.assignment.assignment_id)
    return found


def put(table: PendingTable, name: str, now: float = 0.0, priority: int = 0, deadline_at: int | None = None) -> Pending:
    return table.add(taken(name, priority, deadline_at), "cpu", now)


@pytest.fixture
def table() -> PendingTable:
    return PendingTable()


def test_a_line_goes_by_priority_and_then_by_age(table: PendingTable) -> None:
    for name, now, priority in (("young", 2.0, 0), ("old", 1.0, 0), ("urgent", 3.0, 9), ("last", 0.0, -5)):
        put(table, name, now, priority)
    assert line(table) == ["urgent", "old", "young", "last"]


def tenants(table: PendingTable, *names: str, priority: int = 0) -> dict[str, Pending]:
    """One after the other; the first letter is the tenant."""
    ages = enumerate(names, start=len(table))
    return {name: table.add(taken(name, priority, tenant=name[0]), "cpu", float(age)) for age, name in ages}


def test_within_a_priority_tenants_take_turns_each_by_age(table: PendingTable) -> None:
    tenants(table, "a1", "a2", "a3", "a4", "b1", "b2", "c1")
    tenants(table, "a5", "b3", "a6", priority=1)
    assert line(table) == ["a5", "b3", "a6", "a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_tenant_without_anything_left_stands_behind_the_others_when_it_comes_again(table: PendingTable) -> None:
    tenants(table, "a1", "b1", "b2", "b3")
    stand = dict(table.lines())["cpu"]
    assert [one.assignment.assignment_id for _ in range(2) if (one := stand.next())] == ["a1", "b1"]
    tenants(table, "a2", "a3")
    assert line(table) == ["b2", "a2", "b3", "a3"]


def test_entries_that_were_removed_cost_a_tenant_no_turn(table: PendingTable) -> None:
    one = tenants(table, "a1", "a2", "a3", "a4", "b1", "b2")
    for name in ("a1", "a2"):
        table.remove(one[name])
    assert line(table) == ["a3", "b1", "a4", "b2"]


def test_who_comes_back_stands_where_its_age_puts_it_and_only_once(table: PendingTable) -> None:
    first, second = put(table, "first", 1.0), put(table, "second", 2.0)
    table.sent(first, "w", 3.0)
    assert (table.waiting, table.waits(first), table.waits(second)) == (1, False, True)
    table.back(first)
    table.back(first)
    assert (table.waiting, line(table)) == (2, ["first", "second"])


def test_who_has_ended_does_not_come_back_and_who_was_called_off_is_noted(table: PendingTable) -> None:
    one, other = put(table, "one"), put(table, "other")
    table.sent(one, "w", 1.0)
    assert [table.remove(one) for _ in range(2)] == [True, False]
    table.back(one)
    assert (table.waiting, len(table), line(table)) == (1, 1, ["other"])
    assert not table.unacked
    table.sent(other, "w", 0.0)
    other.cancel_reason = "enough"
    table.back(other)
    assert table.cancelled == [other]


def test_deadlines_are_looked_at_when_they_are_over_wherever_their_assignments_are(table: PendingTable) -> None:
    here, gone, sent = (put(table, name, deadline_at=100) for name in ("here", "gone", "sent"))
    away, late = put(table, "away"), put(table, "late", deadline_at=300)
    table.remove(gone)
    table.sent(sent, "w", 0.0)
    assert [table.overdue(at) for at in (99, 100, 100)] == [[], [here, sent], []], "once"
    table.back(sent)
    assert table.overdue(150) == [], "it was looked at"
    table.check_deadline_at(sent, 200)
    assert table.overdue(300) == [sent, late]
    assert table.waits(away)


def test_those_who_ended_are_not_kept_for_their_deadlines_or_their_places(table: PendingTable) -> None:
    stays = put(table, "stays", deadline_at=10**15)
    for number in range(20_000):
        table.remove(put(table, f"a{number}", deadline_at=10**14))
    assert len(table._looks) < 3000
    assert sum(one._entries for one in table._lines.values()) < 3000
    assert line(table) == ["stays"]
    assert table.waits(stays)


def test_classes_without_work_are_forgotten(table: PendingTable) -> None:
    for number in range(100):
        table.remove(table.add(taken(f"a{number}"), f"class-{number}", 0.0))
    assert (list(table.lines()), len(table._lines), len(table.of_class)) == ([], 0, 0)
