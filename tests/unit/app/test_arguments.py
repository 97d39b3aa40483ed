"""What callers give is refused by name, before anything is opened or begun."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.errors import ParameterError, ParameterTypeError


async def nothing() -> None: ...


@pytest.mark.parametrize(
    ("wrong", "accepted"),
    [
        ({"retention": -1}, "retention=-1 is not accepted: a number of seconds above 0, at most"),
        ({"retention": math.nan}, "retention=nan is not accepted"),
        ({"retention": math.inf}, "retention=inf is not accepted"),
        ({"retention": "7 days"}, "retention='7 days' is not accepted"),
        ({"most_keys": "a"}, "most_keys='a' is not accepted: a whole number, 1 or more"),
        ({"most_keys": 0}, "most_keys=0 is not accepted: a whole number, 1 or more"),
        ({"largest_result": -1}, "largest_result=-1 is not accepted: a whole number, 1 or more"),
        ({"largest_result": True}, "largest_result=True is not accepted"),
        ({"url": None}, "url=None is not accepted: sqlite:PATH, nats://HOST:PORT or memory:"),
        (
            {"url": Path("state.db")},
            "url=PosixPath('state.db') is not accepted: sqlite:PATH, nats://HOST:PORT or memory:",
        ),
    ],
)
@pytest.mark.real_time
async def test_a_store_is_not_opened_with_what_means_nothing(wrong: dict[str, Any], accepted: str) -> None:
    with pytest.raises(ParameterError) as caught:
        async with rk.open_store(**{"url": "memory:", **wrong}):
            raise AssertionError("it is open")
    assert accepted in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "accepted"),
    [
        ({"size": 0}, "size=0 is not accepted: a whole number, 1 or more"),
        ({"size": 1.5}, "size=1.5 is not accepted"),
        ({"url": 5}, "url=5 is not accepted"),
        ({"create": 1}, "create=1 is not accepted: True or False"),
        ({"create": False}, "create=False is not accepted: True for a store in memory"),
        ({"config": 5}, "config=5 is not accepted: the path of a configuration file"),
        ({"url": Path("state.db")}, "url=PosixPath('state.db') is not accepted"),
    ],
)
@pytest.mark.real_time
async def test_nobody_connects_with_what_means_nothing(wrong: dict[str, Any], accepted: str) -> None:
    with pytest.raises(ParameterError) as caught:
        async with rk.connect(**{"url": "memory:", **wrong}):
            raise AssertionError("it is open")
    assert accepted in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "accepted"),
    [
        ({"lease": -1}, "lease=-1 is not accepted: a number of seconds above 0"),
        ({"lease": 0}, "lease=0 is not accepted: a number of seconds above 0"),
        ({"lease": math.inf}, "lease=inf is not accepted"),
        ({"wait_for_result": math.nan}, "wait_for_result=nan is not accepted: a number of seconds, 0 or more"),
        ({"on_audit_failure": "x"}, "on_audit_failure='x' is not accepted: one of fail_open, fail_closed"),
    ],
)
def test_a_manager_is_not_made_of_what_means_nothing(wrong: dict[str, Any], accepted: str) -> None:
    with pytest.raises(ParameterError) as caught:
        rk.RetryManager(**wrong)
    assert accepted in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "accepted"),
    [
        ({"operation": None}, "operation=None is not accepted: a text that names the operation"),
        ({"category": None}, "category=None is not accepted: a RetryCategory, or a text"),
        ({"policy": {}}, "policy={} is not accepted: a RetryPolicy, or None for the category's own"),
    ],
)
@pytest.mark.real_time
async def test_an_operation_is_refused_before_it_is_called(wrong: dict[str, Any], accepted: str) -> None:
    called = []

    async def work() -> None:
        called.append(1)

    with pytest.raises(ParameterTypeError) as caught:
        await rk.RetryManager().execute_with_retry(**{"category": "KV_PUT", "operation": "put", "coro": work, **wrong})
    assert accepted in str(caught.value)
    assert called == []
