"""`@idempotent` on a plain `def`: the store is awaited elsewhere, the work runs in the thread that called."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.app.system import running_system
from reefknot.idempotency.decorator import in_scope
from reefknot.policy.settings import load_settings
from reefknot.queue.model.messages import ExecAssignment, Job


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'state.db'}"


def counted(**options: Any) -> tuple[Any, list[tuple[str, int]]]:
    """A plain function under a key, and its effects with the thread in which each happened."""
    effects: list[tuple[str, int]] = []

    @rk.idempotent(key=lambda order, **_: order, name="plain", **options)
    def charge(order: str, *, error: Exception | None = None) -> dict[str, str]:
        effects.append((order, threading.get_ident()))
        if error is not None:
            raise error
        return {"charged": order}

    return charge, effects


def test_the_effect_happens_once_in_the_thread_of_the_caller(url: str) -> None:
    charge, effects = counted()
    with rk.connect_sync(url):
        assert charge("a") == {"charged": "a"}
        assert charge("a") == {"charged": "a"}
    with rk.connect_sync(url):
        assert charge("a") == {"charged": "a"}
        assert charge("b") == {"charged": "b"}
    assert effects == [("a", threading.get_ident()), ("b", threading.get_ident())]


def test_another_process_finds_the_record(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "import sys\n"
        "import reefknot as rk\n\n\n"
        "@rk.idempotent(key=lambda order: order)\n"
        "def charge(order):\n"
        "    print('charging')\n"
        "    return {'charged': order}\n\n\n"
        "with rk.connect_sync('sqlite:state.db'):\n"
        "    print(charge('a'))\n"
    )
    for lines in (["charging", "{'charged': 'a'}"], ["{'charged': 'a'}"]):
        command = [sys.executable, "shop.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines() == lines


def test_threads_share_a_client_given_as_the_store(url: str) -> None:
    """The threads of a web server have no scope of their own."""
    client = rk.connect_sync(url)
    charge, effects = counted(store=client)
    try:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(charge, ["a", "b"] * 8))
    finally:
        client.close()
    assert answers == [{"charged": "a"}, {"charged": "b"}] * 8
    assert sorted(order for order, _ in effects) == ["a", "b"]
    assert threading.get_ident() not in {thread for _, thread in effects}
    with pytest.raises(rk.StoreUnavailableError, match="closed"):
        charge("c")


class ReconnectingClient:
    """A client as a fork leaves it: the first call connects again, on another loop and with another store."""

    def __init__(self, before: Any, after: Any) -> None:
        self.client, self.after = before, after

    @property
    def store(self) -> Any:
        return self.client.store

    def call(self, work: Any) -> Any:
        self.client = self.after
        return self.client.call(work)


def test_a_client_that_connects_again_is_asked_for_the_store_that_it_has_then(tmp_path: Path) -> None:
    with rk.connect_sync(f"sqlite:{tmp_path}/old.db") as old, rk.connect_sync(f"sqlite:{tmp_path}/new.db") as new:
        charge, effects = counted(store=ReconnectingClient(old, new))
        assert charge("a") == {"charged": "a"}
        in_new, again = counted(store=new)
        assert in_new("a") == {"charged": "a"}
        client = ReconnectingClient(old, new)
        with in_scope(client.store, client):
            scoped, more = counted()
            assert scoped("a") == {"charged": "a"}
    assert (len(effects), again, more) == (1, [], [])


@pytest.mark.real_time
async def test_a_thread_of_async_code_reaches_the_store_that_is_open_there(url: str) -> None:
    charge, effects = counted()
    async with rk.open_store(url):
        found = list(await asyncio.gather(*(asyncio.to_thread(charge, "a") for _ in range(4))))
    assert (found, len(effects)) == ([{"charged": "a"}] * 4, 1)


def test_without_a_store_or_where_an_event_loop_runs_the_error_says_what_to_do(url: str) -> None:
    charge, effects = counted()
    with pytest.raises(rk.NoStoreError, match=r"with reefknot\.connect_sync\(url\)"):
        charge("a")
    assert effects == []
    charge, effects = counted()

    async def main() -> None:
        async with rk.open_store(url):
            charge("a")

    with pytest.raises(
        rk.EventLoopRunningError, match=r"write it as an async function.*asyncio\.to_thread\(plain, …\)"
    ):
        asyncio.run(main())
    assert effects == []


def test_an_error_is_raised_and_the_next_call_tries_again(url: str) -> None:
    charge, effects = counted(fingerprint=False)
    with rk.connect_sync(url):
        for error in (ConnectionError("down"), StopIteration("odd")):
            with pytest.raises((ConnectionError, RuntimeError)):
                charge("a", error=error)
        assert charge("a") == {"charged": "a"}
    assert len(effects) == 3


def test_an_interrupted_effect_of_mode_guard_is_of_unknown_outcome(url: str) -> None:
    charge, effects = counted(mode="guard", fingerprint=False)
    with rk.connect_sync(url):
        with pytest.raises(KeyboardInterrupt):
            charge("a", error=KeyboardInterrupt())
        with pytest.raises(rk.OutcomeUnknownError):
            charge("a")
    assert len(effects) == 1


def test_the_other_promises_of_a_key_hold(url: str) -> None:
    @rk.idempotent(key=lambda order, cents: order, mode="dedup")
    def pay(order: str, cents: int, idempotency_key: str = "") -> str:
        return f"{idempotency_key.rpartition('.')[2]} {cents}"

    class Shop:
        @rk.idempotent(key=lambda self, order: order)
        def close(self, order: str) -> str:
            return order

    with rk.connect_sync(url):
        assert pay("a", 5) == "pay:a 5"
        with pytest.raises(rk.KeyConflictError):
            pay("a", 7)
        assert Shop().close("a") == "a"
    assert (pay.__name__, pay.__wrapped__("a", 5, "k")) == ("pay", "k 5")  # type: ignore[attr-defined]


def test_retry_goes_around_it(url: str) -> None:
    effects: list[str] = []

    @rk.retry(base_delay=0)
    @rk.idempotent(key=lambda order: order)
    def charge(order: str) -> str:
        effects.append(order)
        if len(effects) < 3:
            raise ConnectionError
        return order

    with rk.connect_sync(url):
        assert [charge("a"), charge("a")] == ["a", "a"]
    assert len(effects) == 3


STEPS = """
import reefknot as rk

effects = []

@rk.idempotent(key=lambda order: order, name="plain-step")
def charge(order):
    effects.append(order)
    return {"charged": order}

@rk.block("plain.charge")
def step(inputs, context):
    return {"answer": charge(inputs["order"]), "effects": len(effects)}
"""


@pytest.mark.real_time
async def test_a_plain_step_reaches_the_store_of_its_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_steps.py").write_text(STEPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = load_settings(None, environ={}, cwd=tmp_path)
    async with running_system("memory:", settings, modules=("plain_steps",), drain=0) as system:
        jobs = [ExecAssignment(f"a{number}", "r", Job("plain.charge", {"order": "o-7"})) for number in (1, 2)]
        found = [(await (await system.submit(job))).output for job in jobs]
    assert found == [{"answer": {"charged": "o-7"}, "effects": 1}] * 2


def test_what_cannot_be_guarded_is_refused_at_decoration(url: str) -> None:
    def items() -> Any:
        yield 1

    async def work() -> None: ...

    for wrong in (items, 5):
        with pytest.raises(rk.ParameterTypeError, match=r"^fn=.* a function that returns its result"):
            rk.idempotent(key=str)(wrong)  # type: ignore[arg-type]  # that is the test
    with (
        rk.connect_sync(url) as client,
        pytest.raises(rk.ParameterTypeError, match=r"^store=.*a sync client for a plain"),
    ):
        rk.idempotent(key=str, store=client)(work)
