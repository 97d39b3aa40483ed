"""Follow-ups: what a step may ask for, the items and ids that come of it, and the jobs that a submission waits for."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from msgspec import structs

from reefknot.core.time import Moment
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.queue.model import follow_ups
from reefknot.queue.model.admission import Reject, RejectReason
from reefknot.queue.model.follow_ups import (
    DEEPEST,
    GROUP,
    MOST_AFTER,
    MOST_CHILDREN,
    MOST_STORED,
    FollowUp,
    Gather,
    Origin,
    RefusedFollowUp,
    admitted,
    after_ids,
    awaited,
    child_id,
    child_items,
    children_ids,
    follow_ups_in,
    gather,
    items_of,
    then,
    unpacked_children,
    with_children,
)
from reefknot.queue.model.messages import LONGEST_ID, ExecAssignment, Job
from reefknot.queue.model.results import assignment_of
from reefknot.queue.model.submission import BatchAdmission, OpenWork, Stage, SubmissionRules
from reefknot.queue.model.work import ROUTER, SCHEDULED, Extra, WorkItem, record_id
from tests.rows import for_each_row

NOW = Moment(1_000, 50_000)
MAIL = then("flow.mail", {"to": "ops"})
PARENT = WorkItem("site", "flow.start", "io@w", correlation_id="r1", created_at=40_000)
SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROOM = SubmissionRules(size=1000)


def origin(parent: WorkItem = PARENT, **given: Any) -> Origin:
    return Origin(parent, 50.0, **given)


def pages(number: int) -> list[FollowUp]:
    return [then("flow.page", {"n": n}) for n in range(number)]


def arrivals(*rows: tuple[Stage, int, str, int]) -> BatchAdmission:
    """Admission to classes in which this work is open."""
    return BatchAdmission(lambda _: (OpenWork(rows), None))


# ---- what a step asks for --------------------------------------------------------------------------------------------


def test_a_delay_counts_from_the_end_of_the_parent_and_a_time_does_not() -> None:
    assert then("a.b").due_at(50.0) == 50_000
    assert then("a.b", delay=timedelta(seconds=5)).due_at(50.0) == 55_000
    at = datetime(2030, 1, 1, tzinfo=UTC)
    assert {then("a.b", at=at).due_at(wall) for wall in (50.0, 2e9)} == {int(at.timestamp() * 1000)}


@for_each_row(
    ("options", "name"),
    [
        ({"delay": 1, "at": datetime(2030, 1, 1, tzinfo=UTC)}, "at"),
        ({"at": 7}, "at"),
        ({"delay": -1}, "delay"),
        ({"assignment_id": "mine"}, "assignment_id"),
        ({"tenant_id": "acme"}, "tenant_id"),
        ({"priority": "urgent-ish"}, "priority"),
    ],
)
def test_a_follow_up_takes_no_id_no_tenant_and_no_wrong_option(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ParameterError) as refused:
        then("a.b", **options)
    assert refused.value.parameter == name


def test_a_gather_without_a_job_of_its_own_is_a_group() -> None:
    assert gather(MAIL).then.assignment.job.type == GROUP
    found = gather(*pages(2), then=MAIL, return_failures=True)
    assert found == Gather(tuple(pages(2)), FollowUp(MAIL.assignment), return_failures=True)


@for_each_row(
    ("children", "last", "kind", "name"),
    [
        ([], None, ParameterTypeError, "children"),
        ([MAIL, "flow.mail"], None, ParameterTypeError, "children"),
        ([gather(MAIL)], None, ParameterTypeError, "children"),
        ([MAIL], "flow.mail", ParameterTypeError, "then"),
        ([MAIL], then("a.b", delay=1), ParameterError, "then"),
        ([MAIL], then("a.b", at=datetime(2030, 1, 1, tzinfo=UTC)), ParameterError, "then"),
        ([MAIL] * (MOST_CHILDREN + 1), None, ParameterError, "children"),
    ],
)
def test_a_gather_is_of_one_or_more_follow_ups_and_one_that_is_due_when_they_have_ended(
    children: list[Any], last: Any, kind: type[ParameterError], name: str
) -> None:
    with pytest.raises(ParameterError) as refused:
        gather(*children, then=last)
    assert (type(refused.value), refused.value.parameter) == (kind, name)


def test_an_answer_is_follow_ups_only_if_all_of_it_is() -> None:
    both = gather(MAIL)
    assert (follow_ups_in(MAIL), follow_ups_in(both)) == ([MAIL], [both])
    assert follow_ups_in([MAIL, both]) == follow_ups_in((MAIL, both)) == [MAIL, both]
    others: list[object] = [None, {}, [], (), "text", [MAIL, {}]]
    assert [follow_ups_in(one) for one in others] == [None] * 6


# ---- ids -------------------------------------------------------------------------------------------------------------


def test_a_child_has_its_parents_id_and_tenant_and_a_number() -> None:
    assert child_id("site", 2) == "site:2"
    assert child_id(record_id("site", "acme"), 10_000) == record_id("site:10000", "acme")


def test_a_childs_id_is_never_too_long_and_tells_two_parents_apart() -> None:
    longest = "x" * (LONGEST_ID - 6)
    assert child_id(longest, MOST_CHILDREN) == f"{longest}:{MOST_CHILDREN}"
    beyond = [child_id("x" * (LONGEST_ID - 6) + end, 1) for end in ("y", "z")]
    assert len(set(beyond)) == 2
    assert {len(one) for one in beyond} == {34}


def test_an_item_waits_for_its_gathers_children_stored_or_not_and_for_the_jobs_it_was_told() -> None:
    item = structs.replace(PARENT, extra=Extra(children=1, gathers=2, after=("b", "acme|c")))
    assert children_ids(item) == ["site:1"]
    assert awaited(item) == ["site:1", "site:2", "b", "acme|c"]
    later = structs.replace(item, id="site~2", extra=structs.replace(item.extra, root="site"))
    assert (children_ids(later), awaited(later)) == (children_ids(item), awaited(item)), "the ids are of the first"


def test_stored_children_are_counted_on() -> None:
    assert with_children(with_children(PARENT, 2), 3) == structs.replace(PARENT, extra=Extra(children=5))


# ---- from a step's answer to items -----------------------------------------------------------------------------------


def test_follow_ups_are_submissions_numbered_behind_the_children_that_are_stored() -> None:
    parent = structs.replace(with_children(PARENT, 3), extra=Extra(children=3, depth=4))
    late, early = items_of(origin(parent), [then("a.b", delay=5, deadline=60), MAIL])
    assert [(one.id, one.due_at, one.deadline_at) for one in (late, early)] == [
        ("site:4", 55_000, 115_000),
        ("site:5", 50_000, None),
    ]
    assert (early.kind, early.resource_class, early.extra) == ("flow.mail", ROUTER, Extra(parent="site", depth=5))
    assert assignment_of(early).job == Job("flow.mail", {"to": "ops"})
    assert items_of(origin(parent), []) == ()


def test_a_follow_up_has_its_parents_tenant_request_and_trace() -> None:
    parent = structs.replace(PARENT, id="acme|site", tenant_id="acme", trace_id="t1")
    (item,) = items_of(origin(parent, traceparent=SPAN), [MAIL])
    found = assignment_of(item)
    assert (item.id, item.tenant_id, item.trace_id, item.correlation_id) == ("acme|site:1", "acme", "t1", "r1")
    assert (found.assignment_id, found.request_id, found.traceparent) == ("site:1", "r1", SPAN)


def test_without_a_request_or_a_trace_of_its_parent_it_has_the_parents_id_and_none() -> None:
    (item,) = items_of(origin(structs.replace(PARENT, correlation_id=None)), [MAIL])
    assert (item.correlation_id, assignment_of(item).correlation) == ("site", None)
    (traced,) = items_of(origin(traceparent=SPAN), [MAIL])
    assert assignment_of(traced).trace_id == SPAN.split("-")[1]


def test_a_follow_up_is_counted_in_the_class_that_its_router_gives_it() -> None:
    (named,) = items_of(origin(), [then("a.b", resource_class="gpu")])
    (given,) = items_of(origin(class_of=lambda _: "disk"), [then("a.b", resource_class="gpu")])
    assert (named.pool, given.pool) == ("gpu", "disk")


def test_a_gather_is_one_item_with_its_children_in_its_payload() -> None:
    given = gather(*pages(30), then=MAIL, return_failures=True)
    (item,) = items_of(origin(), [given])
    assert (item.id, item.extra) == ("site:1", Extra(parent="site", depth=1, gathers=30, return_failures=True))
    assert assignment_of(item).job == MAIL.assignment.job
    assert unpacked_children(item) == list(given.children)


def test_more_children_than_a_message_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_ups, "LARGEST_CHILDREN", 10)
    with pytest.raises(ParameterError, match="at most 10 bytes of inputs in all"):
        items_of(origin(), [gather(*pages(3))])


def test_a_gathers_children_are_stored_in_their_order_from_the_first_that_is_not() -> None:
    (item,) = items_of(origin(), [gather(*pages(5))])
    children = unpacked_children(item)
    first = child_items(origin(item), children, 2)
    rest = child_items(origin(with_children(item, 2)), children, 100)
    assert [one.id for one in (*first, *rest)] == [f"site:1:{number}" for number in range(1, 6)]
    assert [assignment_of(one).job.payload for one in (*first, *rest)] == [{"n": n} for n in range(5)]
    assert {one.extra for one in (*first, *rest)} == {Extra(parent="site:1", depth=1)}, "as deep as their gather"
    assert child_items(origin(with_children(item, 5)), children, 100) == ()


def test_more_follow_ups_than_are_stored_with_their_parent_become_one_group_behind_its_gathers() -> None:
    both = gather(MAIL)
    assert len(items_of(origin(), pages(MOST_STORED))) == MOST_STORED
    first, group = items_of(origin(), [*pages(MOST_STORED), both])
    assert (first.kind, first.extra.gathers) == (GROUP, 1)
    assert group.extra == Extra(parent="site", depth=1, gathers=MOST_STORED, return_failures=True)
    assert unpacked_children(group) == pages(MOST_STORED)


@for_each_row(
    ("parent", "given", "text"),
    [
        (PARENT, [MAIL] * (MOST_CHILDREN + 1), f"at most {MOST_CHILDREN} children"),
        (PARENT, [gather(*[MAIL] * MOST_CHILDREN), MAIL], f"at most {MOST_CHILDREN} children"),
        (PARENT, [gather(MAIL)] * (MOST_STORED + 1), f"at most {MOST_STORED} gathers"),
        (PARENT, [*[gather(MAIL)] * MOST_STORED, MAIL], f"at most {MOST_STORED} gathers"),
        (structs.replace(PARENT, extra=Extra(depth=DEEPEST)), [MAIL], f"at most {DEEPEST} follow-ups in a row"),
    ],
)
def test_what_exceeds_a_bound_is_refused_with_it(parent: WorkItem, given: list[FollowUp | Gather], text: str) -> None:
    with pytest.raises(ParameterError, match=text) as refused:
        items_of(origin(parent), given)
    assert refused.value.parameter == "follow-ups"


def test_the_last_follow_up_in_a_row_is_as_deep_as_the_bound() -> None:
    (item,) = items_of(origin(structs.replace(PARENT, extra=Extra(depth=DEEPEST - 1))), [MAIL])
    assert item.extra.depth == DEEPEST


# ---- at the door -----------------------------------------------------------------------------------------------------


def test_follow_ups_that_have_a_place_are_stored_as_accepted_and_what_is_due_later_as_scheduled() -> None:
    items = items_of(origin(), [MAIL, then("a.b", delay=5)])
    found = admitted(PARENT, items, {}, arrivals(), ROOM, NOW)
    assert isinstance(found, list)
    assert [(one.id, one.created_at, one.reason) for one in found] == [
        ("site:1", NOW.wall, ""),
        ("site:2", NOW.wall, SCHEDULED),
    ]


def test_what_the_same_parent_has_stored_before_is_passed_by() -> None:
    items = items_of(origin(), [MAIL, MAIL])
    there = structs.replace(items[0], created_at=PARENT.created_at)
    found = admitted(PARENT, items, {"site:1": there}, arrivals(), ROOM, NOW)
    assert isinstance(found, list)
    assert [one.id for one in found] == ["site:2"]


@for_each_row("changes", [{"extra": Extra(parent="other")}, {"extra": Extra()}, {"created_at": 39_999}])
def test_other_work_under_an_id_or_that_of_an_earlier_parent_refuses_all(changes: dict[str, Any]) -> None:
    items = items_of(origin(), [MAIL, MAIL])
    there = structs.replace(items[1], **{"created_at": 50_000, **changes})
    assert admitted(PARENT, items, {"site:2": there}, arrivals(), ROOM, NOW) == RefusedFollowUp(items[1])


def test_one_follow_up_without_a_place_refuses_all_and_is_named() -> None:
    items = items_of(origin(), [MAIL, MAIL])
    found = admitted(PARENT, items, {}, arrivals(), SubmissionRules(size=1), NOW)
    assert isinstance(found, RefusedFollowUp)
    assert found.item == items[1]
    assert found.verdict is not None
    assert found.verdict.reason is RejectReason.QUEUE_FULL


def test_a_follow_up_takes_no_other_works_place_whatever_its_priority() -> None:
    (item,) = items_of(origin(), [then("a.b", priority=90)])
    full = arrivals((Stage.SUBMITTED, 0, "", 1))
    found = admitted(PARENT, [item], {}, full, SubmissionRules(size=1), NOW)
    expected = Reject(RejectReason.QUEUE_FULL, "Queue full, rejecting assignment", 1000)
    assert found == RefusedFollowUp(item, expected)


# ---- after other jobs ------------------------------------------------------------------------------------------------


class Named:
    """A job by its id and tenant, as a handle is."""

    def __init__(self, assignment_id: str, tenant_id: str | None) -> None:
        self.assignment_id = assignment_id
        self.tenant_id = tenant_id


OWN = ExecAssignment("own", "r", Job("a.b"), tenant_id="acme")


def test_an_id_is_of_the_submissions_tenant_and_a_handle_of_its_own() -> None:
    assert after_ids(["a", Named("a", None), Named("b", "other")], OWN) == ("acme|a", "a", "other|b")
    assert (after_ids(None, OWN), after_ids([], OWN)) == ((), ())


def test_a_job_that_is_named_twice_is_waited_for_once_at_its_first_place() -> None:
    assert after_ids(["b", "a", Named("b", "acme")], OWN) == ("acme|b", "acme|a")
    assert len(after_ids([*map(str, range(MOST_AFTER)), "0"], OWN)) == MOST_AFTER


@for_each_row(
    ("given", "kind", "name"),
    [
        ("a", ParameterTypeError, "after"),
        (7, ParameterTypeError, "after"),
        ({"a"}, ParameterTypeError, "after"),
        (["a", ""], ParameterTypeError, "after[1]"),
        (["a", "b", None], ParameterTypeError, "after[2]"),
        ([*map(str, range(MOST_AFTER + 1))], ParameterError, "after"),
        (["own"], ParameterError, "after"),
        ([Named("own", "acme")], ParameterError, "after"),
    ],
)
def test_what_names_no_jobs_too_many_or_itself_is_refused(given: object, kind: type[ParameterError], name: str) -> None:
    with pytest.raises(ParameterError) as refused:
        after_ids(cast("list[str]", given), OWN)
    assert (type(refused.value), refused.value.parameter) == (kind, name)


def test_the_same_id_of_another_tenant_is_no_cycle() -> None:
    assert after_ids([Named("own", None)], OWN) == ("own",)
