"""
Overload, brown-outs and fairness in virtual time: the promises of `tests/faults/test_outside.py`, for many seeds.

`make test` runs one seed of each scenario and three loads of six, `make soak` fifty of all (`LOAD_SEEDS=<n>`); every
eighth is on SQLite, the others in memory. Every promise has its control: the same scenario with one decision of the
product broken.
"""

import os
from typing import Any

import pytest
from msgspec import structs

from reefknot.queue.model.admission import Rules
from tests.faults import broken
from tests.faults.outside_load import KINDS, Stream, p99, percentile, served, summary, two_kinds
from tests.simulation.overload import Accounts, Load

pytestmark = pytest.mark.slow

SEEDS = range(1, 1 + int(os.environ.get("LOAD_SEEDS", "1")))
DEADLINE_S = 2.0
SERVICES = {20: (2, 0.1, 5.0), 100: (8, 0.08, 3.0)}
"""By requests a second: how many at once, seconds for each, and for how many seconds too many come."""
REST_S = 2.0


def wrong_under_overload(seed: int, rate: int, times: int) -> list[str]:
    """Which promises a run breaks: too many requests from a cold start, a rest, and too many once more."""
    at_once, service_s, seconds = SERVICES[rate]
    again = seconds + REST_S
    cold = Stream("cold", rate * times, seconds, 0, DEADLINE_S)
    streams = cold, Stream("rest", rate / 2, REST_S, 0, DEADLINE_S, begins_s=seconds)
    load = Load(seed, [*streams, structs.replace(cold, name="warm", begins_s=again)], at_once, service_s).run()
    found = [one for requests in load.found.values() for one in requests]
    wrong = []
    for name, begin in (("cold", 0.0), ("warm", again)):
        share = load.goodput(begin, begin + seconds) / load.capacity(begin, begin + seconds)
        print(f"seed {seed}, {times} times {rate}/s, {name}: goodput {share:.3f}, {summary(load.found[name])}")
        if share < 0.9:
            wrong.append(f"{name}: goodput {share:.3f} of what the service can do")
    submit_s = percentile([one.submit_s for one in found], 0.99)
    if submit_s > 0.2:
        wrong.append(f"submit took {submit_s:.2f} s")
    kept = [one for one in found if not one.status.startswith("refused")]
    if served(kept) < 0.9:
        wrong.append(f"of what was accepted, {served(kept):.2f} succeeded")
    return wrong


TRIED = (
    [(20, 2), (20, 10), (100, 5)] if len(SEEDS) == 1 else [(rate, times) for rate in SERVICES for times in (2, 5, 10)]
)


@pytest.mark.parametrize(("rate", "times"), TRIED)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_cold_and_a_warm_system_under_overload_lose_only_the_excess(seed: int, times: int, rate: int) -> None:
    assert wrong_under_overload(seed, rate, times) == []


def test_control_admission_by_count_alone_accepts_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    broken.break_product("no_time_bound", monkeypatch.setattr)
    assert wrong_under_overload(1, 20, 10)


# ---- what is on record ----------------------------------------------------------------------------------------------

SIZES = [500] if len(SEEDS) == 1 else [50, 500]
SOON_S, RISE_S, LOADED_S = 1.0, 0.5, 3.0
"""The deadline; what the queue takes to fill, and the system to learn how fast the service is; the length of a load."""

LAST = Stream("last", 1000, 0.6, 0, SOON_S)
"""Refusals are told once a second, with their number: these come when all others are due to be told."""


def accounts(seed: int, times: int, size: int, **changes: Any) -> Accounts:
    streams = Stream("load", 100 * times, LOADED_S, 0, SOON_S), structs.replace(LAST, begins_s=LOADED_S + 1.5)
    settings = {"rules": Rules(size=size), **changes.pop("settings", {})}
    return Accounts(seed, streams, *SERVICES[100][:2], settings=settings, **changes).run()


def wrong_with(load: Accounts) -> list[str]:
    """Which of the promises to those who were accepted a run broke."""
    share = load.goodput(RISE_S, LOADED_S) / load.capacity(RISE_S, LOADED_S)
    kept = [one for one in load.found["load"] if one.status != "refused"]
    slow = p99([one for one in kept if one.came >= RISE_S])
    slowest = max(one.took for one in kept)
    print(f"goodput {share:.3f}, p99 {slow:.2f} s, slowest {slowest:.2f} s, {summary(load.found['load'])}")
    wrong = [] if share >= 0.9 else [f"goodput {share:.3f} of the capacity"]
    wrong += [] if slow <= SOON_S else [f"p99 of what was accepted {slow:.2f} s"]
    return wrong + ([] if slowest <= SOON_S + 0.5 else [f"an answer after {slowest:.2f} s"])


@pytest.mark.parametrize("times", [5] if len(SEEDS) == 1 else [2, 5, 10])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_refusal_is_on_record_and_overload_costs_only_the_excess(seed: int, size: int, times: int) -> None:
    """Whether the queue's count is little work or much: the bound in time holds."""
    load = accounts(seed, times, size)
    requests = load.found["load"]
    refused, router = summary(requests)["refused"], ("router", "", "rejected")
    assert load.recorded.pop(router) == refused + 1, "the first of the last ones brings the rest with it"
    assert load.said.pop(router) == refused + summary(load.found["last"])["refused"]
    assert load.recorded == load.said
    assert refused > len(requests) * (1 - 1 / times) * 0.7
    assert min(load.waits) > 0, "who is refused hears when to come back"
    assert load.deepest <= size
    assert wrong_with(load) == []


def test_control_the_baseline_misses_the_deadline_under_the_same_load() -> None:
    """Without the bounded queue everything is accepted, and nearly everything comes too late."""
    load = accounts(1, 5, 10_000, settings={"queue_v2": False}, told=False)
    assert "refused" not in summary(load.found["load"])
    assert load.goodput(RISE_S, LOADED_S) < 0.5 * load.capacity(RISE_S, LOADED_S)
    assert p99(load.found["load"]) > 3 * SOON_S
    assert len(wrong_with(load)) >= 2


def test_the_same_seed_gives_the_same_load() -> None:
    streams = [Stream("load", 200, 2.0, 0, DEADLINE_S)]
    assert Load(5, streams).run().found == Load(5, streams).run().found


# ---- a brown-out ----------------------------------------------------------------------------------------------------

NORMAL_S, SLOW_S, AFTER_S = 3.0, 20.0, 6.0
OFFERED = 70


def brown_out(seed: int) -> tuple[float, float]:
    """The capacity falls to a tenth and comes back. Shares of what was possible: meanwhile, and from 2 s after on."""
    back = NORMAL_S + SLOW_S + seed % 2 * 10.0
    streams = [Stream("load", OFFERED, back + AFTER_S, 0, DEADLINE_S)]
    load = Load(seed, streams, slow=(NORMAL_S, back, 10.0)).run()
    meanwhile = load.goodput(NORMAL_S, back) / load.capacity(NORMAL_S, back)
    after = served([one for one in load.found["load"] if one.came >= back + 2.0])
    last = max((one.came - back for one in load.found["load"] if one.status != "success"), default=0.0)
    print(f"seed {seed}: {meanwhile:.3f} meanwhile, {after:.3f} after, the last one lost came {last:.2f} s after")
    return meanwhile, after


@pytest.mark.parametrize("seed", SEEDS)
def test_a_brown_out_costs_only_what_is_missing_and_is_over_two_seconds_after(seed: int) -> None:
    meanwhile, after = brown_out(seed)
    assert meanwhile >= 0.8
    assert after >= 0.95


def test_control_a_brown_out_without_a_bound_in_time_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    broken.break_product("no_time_bound", monkeypatch.setattr)
    meanwhile, after = brown_out(2)
    assert meanwhile < 0.8 or after < 0.95


# ---- side by side ---------------------------------------------------------------------------------------------------

FEW = Stream("few", 5, 4.0, 0, deadline=5.0, begins_s=1.0)
MANY = Stream("many", 300, 5.0, 0, deadline=10.0)


def flooded(seed: int, kind: str) -> tuple[float, float]:
    """Few requests beside a flood of another kind: the share of the few that was served, and their p99."""
    load = Load(seed, two_kinds(kind, MANY, FEW), unwatched=frozenset({"many"})).run()
    few = load.found["few"]
    print(
        f"seed {seed}, {kind}: {served(few):.2f} of the few, p99 {p99(few):.2f} s; many: {summary(load.found['many'])}"
    )
    return served(few), p99(few)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_few_are_served_at_once_beside_a_flood_of_another_tenant_or_a_lower_priority(seed: int, kind: str) -> None:
    share, slowest = flooded(seed, kind)
    assert share == 1.0
    assert slowest < 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_control_first_come_first_served_lets_a_flood_drown_others(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    broken.break_product("first_come", monkeypatch.setattr)
    share, slowest = flooded(1, kind)
    assert share < 1.0 or slowest >= 1.0


TINY = Stream("tiny", 200, 5.0, 0, deadline=DEADLINE_S, timeout=0.001, tenant="a")
USUAL = Stream("usual", 30, 4.5, 0, deadline=DEADLINE_S, tenant="b", begins_s=0.5)
QUICK = (8, 0.02)
"""A service that has time for the abandoned requests too: what is lost is lost by the breaker."""


def beside_tiny_time_outs(seed: int) -> tuple[float, float]:
    load = Load(seed, [TINY, USUAL], *QUICK).run()
    usual = load.found["usual"]
    print(f"seed {seed}: {served(usual):.3f} of the usual, p99 {p99(usual):.3f} s, {summary(usual)}")
    return served(usual), p99(usual)


@pytest.mark.parametrize("seed", SEEDS)
def test_tiny_time_outs_of_one_tenant_do_not_harm_another(seed: int) -> None:
    share, slowest = beside_tiny_time_outs(seed)
    assert share >= 0.99
    assert slowest < 0.5


def test_control_attempts_without_hope_open_the_breaker_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    broken.break_product("begin_hopeless", monkeypatch.setattr)
    share, slowest = beside_tiny_time_outs(1)
    assert share < 0.99 or slowest >= 0.5
