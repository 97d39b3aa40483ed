"""Limits as arithmetic: texts become rules, rules give keys, and a bucket counts starts when they take place."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.core import limits
from reefknot.core.limits import MOST_KEYS, Grant, LimitState, LimitTable, limit_rule, parse_rate
from reefknot.errors import ParameterError


@pytest.mark.parametrize(
    ("text", "per_second"), [("10/s", 10), ("0.5/s", 0.5), ("120/min", 2), ("7200/h", 2), (" 3 / min ", 0.05)]
)
def test_a_rate_is_a_number_in_a_time(text: str, per_second: float) -> None:
    assert parse_rate(text).per_second == per_second


@pytest.mark.parametrize(
    "text", ["", "10", "/s", "0/s", "-1/s", "10/d", "10/sec", "ten/s", "1e9/s", "10/s/s", 10, None]
)
def test_any_other_text_is_refused_with_what_is_accepted(text: object) -> None:
    with pytest.raises(ParameterError, match="/s"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("name", "work", "key"),
    [
        ("billing.*", ("billing.charge", "", "", {}), "billing.*"),
        ("billing.*", ("mail.send", "", "", {}), None),
        ("*", ("anything", "", "", {}), "*"),
        ("tenant", ("x", "acme", "", {}), "tenant acme"),
        ("tenant", ("x", "", "", {}), None),
        ("tenant:acme", ("x", "acme", "", {}), "tenant acme"),
        ("tenant:acme", ("x", "other", "", {}), None),
        ("destination", ("x", "", "api.example.com:443", {}), "destination api.example.com:443"),
        ("destination:api.*", ("x", "", "api.example.com", {}), "destination api.example.com"),
        ("inputs.account", ("x", "", "", {"account": 7}), "inputs.account 7"),
        ("inputs.card.bank", ("x", "", "", {"card": {"bank": "b"}}), "inputs.card.bank b"),
        ("inputs.account", ("x", "", "", {"account": ["a"]}), None),
        ("inputs.account", ("x", "", "", {}), None),
    ],
)
def test_the_key_says_with_what_work_is_counted(name: str, work: tuple[Any, ...], key: str | None) -> None:
    kind, tenant, destination, inputs = work
    rule = limit_rule(name, running=1)
    assert (rule.key_of(tenant, destination, inputs) if rule.fits(kind) else None) == key


def test_a_limit_of_types_may_hold_for_each_of_something() -> None:
    rule = limit_rule("billing.*", rate="1/s", per="inputs.account")
    assert rule.key_of("", "", {"account": "a"}) == "billing.* a"


@pytest.mark.parametrize("name", ["", "a b", "tenant:", "other:x", "x" * 201, "inputs.", "inputs..a", "\n"])
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    if name == "inputs.":  # a type of this name
        assert limit_rule(name, running=1).types == name
        return
    if name == "inputs..a":
        assert limit_rule(name, running=1).types == name
        return
    with pytest.raises(ParameterError, match="a job type"):
        limit_rule(name, running=1)


def test_of_two_limits_for_a_tenant_the_one_that_names_it_holds() -> None:
    table = LimitTable([limit_rule("tenant:acme", running=50), limit_rule("tenant", running=5)])
    (state,) = table.states("x", 0.0, tenant="acme", destination="", inputs={})
    assert state.rule.running == 50


@given(
    st.lists(st.tuples(st.floats(0, 0.3), st.sampled_from(["ask", "start", "refuse"]), st.floats(0, 2)), max_size=300)
)
def test_no_second_has_more_starts_than_the_rate_and_the_burst(steps: list[tuple[float, str, float]]) -> None:
    """However late what was granted begins, and in whatever order."""
    state = LimitState(limit_rule("x", rate="20/s", burst=5), "x", 0.0)
    now, granted, starts = 0.0, list[Grant](), list[float]()
    for passed, what, _ in steps:
        now += passed
        if what == "ask":
            while state.wait(now) == 0:
                granted.append(Grant((state,), "a"))
        elif granted and what == "start":
            granted.pop(0).started()
            starts.append(now)
        elif granted:
            granted.pop().refused()
        state.tokens(now)  # the look of the next pass
    assert all(sum(at <= one < at + 1.0 for one in starts) <= 25 for at in starts)
    assert state.tokens(now) >= -1e-6


def test_control_a_bucket_that_counts_grants_is_exceeded_by_late_starts() -> None:
    state, now, starts = LimitState(limit_rule("x", rate="20/s", burst=5), "x", 0.0), 0.0, list[float]()
    waiting = 0
    for _ in range(100):
        now += 0.05
        while state.wait(now) == 0:
            Grant((state,), "a").started()  # counted when it is granted, and begun when its worker gets to it
            waiting += 1
        if now > 2.0:
            starts += [now] * waiting
            waiting = 0
    assert max(sum(at <= one < at + 1.0 for one in starts) for at in starts) > 25


def test_what_was_granted_and_not_begun_waits_without_a_time() -> None:
    state = LimitState(limit_rule("x", rate="1/s", burst=1), "x", 0.0)
    first = Grant((state,), "a")
    assert state.wait(5.0) == inf
    first.started()
    assert state.wait(5.0) == pytest.approx(1.0)
    assert state.wait(5.5) == pytest.approx(0.5)


def test_a_limit_of_what_runs_counts_until_the_end_and_once() -> None:
    state = LimitState(limit_rule("x", running=2), "x", 0.0)
    grants = [Grant((state,), name) for name in "ab"]
    assert (state.wait(0), state.room(0)) == (inf, 0)
    for _ in range(2):
        grants[0].ended()
    assert (state.wait(0), state.room(0)) == (0, 1)


def test_other_numbers_keep_what_runs_and_give_no_tokens_away() -> None:
    table = LimitTable([limit_rule("x", rate="1/s", burst=1, running=3)])
    (state,) = table.states("x", 0.0, tenant="", destination="", inputs={})
    Grant((state,), "a").started()
    state.tokens(0.0)
    table.follow([limit_rule("x", rate="10/s", burst=100, running=3)])
    (after,) = table.states("x", 0.0, tenant="", destination="", inputs={})
    assert (after.running, after.tokens(0.0)) == ({"a"}, 0.0)


def test_a_key_that_another_router_used_begins_without_a_token() -> None:
    table = LimitTable([limit_rule("tenant", rate="1/s", burst=4)])
    table.spent_before, table.since = {"tenant acme"}, 10.0
    waits = [
        table.states("x", 10.0, tenant=name, destination="", inputs={})[0].wait(10.0) for name in ("acme", "fresh")
    ]
    assert waits == [1.0, 0.0]


def test_the_number_of_keys_is_bounded_and_what_runs_is_not_forgotten() -> None:
    table = LimitTable([limit_rule("tenant", rate="1/h", burst=2, running=5)])
    (kept,) = table.states("x", 0.0, tenant="kept", destination="", inputs={})
    Grant((kept,), "a").started()
    for number in range(2 * MOST_KEYS):
        (state,) = table.states("x", 0.0, tenant=f"t{number}", destination="", inputs={})
        grant = Grant((state,), "b")
        grant.ended()
    assert len(table.all()) <= MOST_KEYS
    assert table.states("x", 0.0, tenant="kept", destination="", inputs={}) == (kept,)


def test_a_rate_above_the_highest_is_refused() -> None:
    assert parse_rate("100000/s").per_second == limits.MOST_PER_SECOND
    with pytest.raises(ParameterError, match="at most 100000/s"):
        parse_rate("100001/s")


def test_a_limit_is_shown_with_the_numbers_it_has() -> None:
    both = limit_rule("x", rate="10/min", burst=3, running=5)
    assert str(both) == "10/min, burst 3, 5 running"
    assert [str(limit_rule("x", **one)) for one in ({"rate": "0.5/s"}, {"running": 5})] == [
        "0.5/s, burst 1",
        "5 running",
    ]


@pytest.mark.parametrize(
    ("name", "given", "refused"),
    [
        ("tenant", {"running": 1, "per": "destination"}, "per"),
        ("inputs.account", {"running": 1, "per": "tenant"}, "per"),
        ("x", {"running": 1, "per": "account"}, "per"),
        ("x", {}, "rate"),
        ("x", {"burst": 5}, "rate"),
        ("x", {"running": 1, "burst": 5}, "burst"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(name: str, given: dict[str, Any], refused: str) -> None:
    with pytest.raises(ParameterError, match=rf"\b{refused}\b"):
        limit_rule(name, **given)


def test_what_is_remembered_of_types_and_patterns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_KEYS", 3)
    monkeypatch.setattr(limits, "_patterns", {})
    table = LimitTable([limit_rule("a.*", running=1)])
    for number in range(10):
        assert limits.globbed(f"a*{number}", f"a-{number}")
        assert [len(table.of_type(f"{word}.{number}")) for word in "ab"] == [1, 0]
    assert len(limits._patterns) <= 3
    assert len(table._of_type) <= 3


def test_the_room_is_what_both_the_tokens_and_what_runs_leave() -> None:
    state = LimitState(limit_rule("x", rate="1/s", burst=3, running=5), "x", 0.0)
    assert state.room(0.0) == 3
    Grant((state,), "a")
    assert state.room(0.0) == 2
    assert LimitState(limit_rule("x", rate="1/s", burst=9, running=5), "x", 0.0).room(0.0) == 5


def test_a_bucket_is_full_until_a_token_is_spent_and_again_when_it_has_come_back() -> None:
    state = LimitState(limit_rule("x", rate="1/s", burst=2), "x", 0.0)
    assert state.is_full(0.0)
    Grant((state,), "a").started()
    assert [state.is_full(now) for now in (0.0, 0.5, 1.0)] == [False, False, True]
    without = LimitState(limit_rule("x", running=1), "x", 0.0)
    Grant((without,), "a").started()
    assert without.is_full(0.0), "without a rate it has no token to spend"


def test_a_start_that_took_place_cannot_be_refused_any_more() -> None:
    state = LimitState(limit_rule("x", rate="1/s", burst=2), "x", 0.0)
    grant = Grant((state,), "a")
    grant.started()
    grant.refused()
    assert (state.reserved, state.tokens(0.0)) == (0, 1.0)


def test_a_limit_that_is_not_there_any_more_or_holds_for_something_else_is_forgotten() -> None:
    table = LimitTable([limit_rule("x", running=1), limit_rule("y", running=1), limit_rule("z", running=1)])
    for kind in "xyz":
        (state,) = table.states(kind, 0.0, tenant="", destination="", inputs={})
        Grant((state,), "a").started()
    table.follow([limit_rule("x", running=2), limit_rule("y", running=1, per="tenant")])
    assert [one.key for one in table.all()] == ["x"]
    known = table.get("x")
    assert known is not None
    assert known.running == {"a"}
    assert table.get("z") is None


def test_idle_keys_are_forgotten_before_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_KEYS", 10)
    table = LimitTable([limit_rule("tenant", rate="1/h", burst=2)])
    (spent,) = table.states("x", 0.0, tenant="spent", destination="", inputs={})
    Grant((spent,), "a").started()
    for number in range(10):
        table.states("x", 0.0, tenant=f"t{number}", destination="", inputs={})
    assert [one.key for one in table.all()] == ["tenant spent", "tenant t9"]


def test_an_emptied_table_gives_no_start_before_a_token_has_come_back() -> None:
    table = LimitTable([limit_rule("x", rate="1/s", burst=5)])
    (state,) = table.states("x", 0.0, tenant="", destination="", inputs={})
    table.empty(10.0)
    assert [state.wait(now) for now in (10.0, 11.0)] == [1.0, 0.0]
