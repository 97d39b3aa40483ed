"""
Real NATS servers for tests, as fixtures, and what may happen to one: killed, restarted, frozen.

`nats_server` is shared by the tests of a session and must not be harmed; a test that harms a server takes
`own_nats_server` or `nats_cluster`. A server that does not start is an error, never a skip.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nats.aio.client import Client

    from reefknot.console.nats_servers import NatsServer


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Started when a test first asks for it; every process of xdist has its own."""
    from reefknot.console.nats_servers import running_nats

    with running_nats(tmp_path_factory.mktemp("nats")) as (server,):
        yield server


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that syncs each message, for one test to harm."""
    from reefknot.console.nats_servers import running_nats

    with running_nats(tmp_path / "nats", sync_interval="always") as (server,):
        yield server


@pytest.fixture
def nats_cluster(tmp_path: Path) -> Iterator[list[NatsServer]]:
    """Three servers with a leader, for one test to harm."""
    from reefknot.console.nats_servers import running_nats

    with running_nats(tmp_path / "nats", count=3) as servers:
        yield servers


def addresses(url: str) -> list[str]:
    """The URL of each server in a URL of several, as nats-py takes them."""
    return [f"nats://{one}" for one in url.removeprefix("nats://").split(",")]


def kill(server: NatsServer) -> None:
    """As `kill -9` does; it is gone when this returns."""
    os.kill(server.pid, SIGKILL)
    server.wait_until_ended(10.0)


def restart(server: NatsServer) -> None:
    """On the same port, over the same data."""
    server.start()
    server.wait_until_ready()


@contextmanager
def frozen(server: NatsServer) -> Iterator[None]:
    """Inside, it neither answers nor ends: its connections stay open."""
    os.kill(server.pid, SIGSTOP)
    try:
        _wait_until_stopped(server.pid)
        yield
    finally:
        os.kill(server.pid, SIGCONT)


def _wait_until_stopped(pid: int) -> None:
    """The kernel stops threads one by one, and one that still runs would answer."""
    ends, tasks = time.monotonic() + 10.0, Path(f"/proc/{pid}/task")
    while {path.read_text().rpartition(")")[2].split()[0] for path in tasks.glob("*/stat")} != {"T"}:
        assert time.monotonic() < ends, "it goes on"
        time.sleep(0.01)


async def round_trip(client: Client) -> None:
    """
    Return when the server has read everything that a raw client sent before.

    Not by `client.flush()`: its ping overtakes what is not written yet, so that its answer proves nothing.
    """
    await client.request("$JS.API.INFO", timeout=10)
