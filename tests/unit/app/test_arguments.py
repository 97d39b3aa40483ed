"""What callers give is refused by name, before anything is opened or begun."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.errors import ParameterError, ParameterTypeError
from tests.unit.retrying.flaky import AsyncFlaky

URLS = "sqlite:PATH, nats://HOST:PORT or memory:"
WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (rk.open_store, {"retention": -1}, "retention=-1 is not accepted: a number of seconds above 0, at most"),
    (rk.open_store, {"retention": math.nan}, "retention=nan is not accepted"),
    (rk.open_store, {"retention": math.inf}, "retention=inf is not accepted"),
    (rk.open_store, {"retention": "7 days"}, "retention='7 days' is not accepted"),
    (rk.open_store, {"most_keys": "a"}, "most_keys='a' is not accepted: a whole number, 1 or more"),
    (rk.open_store, {"most_keys": 0}, "most_keys=0 is not accepted: a whole number, 1 or more"),
    (rk.open_store, {"largest_result": -1}, "largest_result=-1 is not accepted: a whole number, 1 or more"),
    (rk.open_store, {"largest_result": True}, "largest_result=True is not accepted"),
    (rk.open_store, {"url": None}, f"url=None is not accepted: {URLS}"),
    (rk.open_store, {"url": Path("state.db")}, f"url=PosixPath('state.db') is not accepted: {URLS}"),
    (rk.connect, {"size": 0}, "size=0 is not accepted: a whole number, 1 or more"),
    (rk.connect, {"size": 1.5}, "size=1.5 is not accepted"),
    (rk.connect, {"url": 5}, "url=5 is not accepted"),
    (rk.connect, {"create": 1}, "create=1 is not accepted: True or False"),
    (rk.connect, {"create": False}, "create=False is not accepted: True for a store in memory"),
    (rk.connect, {"config": 5}, "config=5 is not accepted: the path of a configuration file"),
    (rk.connect, {"url": Path("state.db")}, "url=PosixPath('state.db') is not accepted"),
    (rk.RetryManager, {"lease": -1}, "lease=-1 is not accepted: a number of seconds above 0"),
    (rk.RetryManager, {"lease": 0}, "lease=0 is not accepted: a number of seconds above 0"),
    (rk.RetryManager, {"lease": math.inf}, "lease=inf is not accepted"),
    (rk.RetryManager, {"wait_for_result": math.nan}, "wait_for_result=nan is not accepted: a number of seconds, 0 or"),
    (rk.RetryManager, {"on_audit_failure": "x"}, "on_audit_failure='x' is not accepted: one of fail_open, fail_closed"),
]


@pytest.mark.parametrize(("make", "wrong", "accepted"), WRONG)
@pytest.mark.real_time
async def test_nothing_is_made_of_arguments_that_mean_nothing(make: Any, wrong: dict[str, Any], accepted: str) -> None:
    with pytest.raises(ParameterError) as caught:
        async with make(**wrong if make is rk.RetryManager else {"url": "memory:", **wrong}):
            raise AssertionError("it is open")
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
    work = AsyncFlaky()
    with pytest.raises(ParameterTypeError) as caught:
        await rk.RetryManager().execute_with_retry(**{"category": "KV_PUT", "operation": "put", "coro": work, **wrong})
    assert (accepted in str(caught.value), work.calls) == (True, 0)
