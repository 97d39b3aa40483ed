"""
Commands as processes of their own that do not have to import anything: `WarmCommand` starts one, as `Popen` would.

Most of the CPU time of a short command is spent on imports, and tests start hundreds of them. Here a small process of
one thread imports everything once, and each command is a fork of it: with its own id, folder, environment, streams and
signals. It is the child of that process, which says how it ended.

With `start_new_session` a terminal on its stdin is its own. A test of a cold start, or of what a command imports,
starts `python -m reefknot` instead.
"""

import atexit
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES, MOST_FILES = 200_000, 4096
PATH = "PYTHONPATH"
SOURCES = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]
"""Those of this checkout are imported, wherever reefknot is installed from."""
NOT_IMPORTED = ("reefknot.__main__", "reefknot.demo", "reefknot.testing", "reefknot.simulation")
LIBRARIES = ("cyclopts", "httpx2", "nats", "psycopg", "rich.live", "rich.table", "yaml")
"""What modules of the product import where they use it."""


class WarmCommand(subprocess.Popen[str]):
    """A `Popen` of `python -m MODULE WORDS`, as a fork of a process that has imported reefknot; it needs an `env`."""

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        """Replace the fork and exec of `Popen`, which made the streams before this and uses them after it."""
        _, _, _, _, cwd, env, _, _, _, *streams = given
        child, _, _, out, _, err = ends = [int(fd) for fd in streams[:6]]
        *_, session, _ = streams
        self._status, status = os.pipe()
        self._ended = b""
        asked = {"args": list(args), "cwd": str(cwd), "environment": dict(env), "session": bool(session)}
        request = json.dumps(asked).encode()
        assert len(request) < MOST_BYTES
        own = [mine if fd < 0 else fd for mine, fd in enumerate((child, out, err))]
        socket.send_fds(_launcher(env), [request], [*own, status])
        os.close(status)
        self.pid = int.from_bytes(os.read(self._status, 4), "little")
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Answer as `waitpid` does."""
        if not self._ended:
            if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
                return 0, 0
            self._ended = os.read(self._status, 4)
            assert self._ended, "the process that starts commands has died"
            os.close(self._status)
        return self.pid, int.from_bytes(self._ended, "little")

    def _internal_poll(self, *_given: Any, **_named: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run_warm(
    *words: str, cwd: Path, env: Mapping[str, str], timeout: float = 120.0, program: str = "reefknot"
) -> subprocess.CompletedProcess[str]:
    """Run `python -m PROGRAM WORDS` to its end, as `subprocess.run` would, without input."""
    args = [program, *words]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmCommand(args, cwd=cwd, env=env, text=True, **streams) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def run_cold(*words: str | Path, check: bool = False, **given: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, without input and with what it says as text; more as for `subprocess.run`."""
    usual: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120.0}
    return subprocess.run([str(word) for word in words], check=check, **(usual | given))


_launchers: dict[tuple[tuple[str, str], ...], socket.socket] = {}


def _launcher(env: Mapping[str, str]) -> socket.socket:
    """The process that forks commands whose Python is set up as this environment says; it ends with this process."""
    setup = tuple(sorted((name, value) for name, value in env.items() if name.startswith("PYTHON") and name != PATH))
    if setup not in _launchers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, __file__, str(theirs.fileno())]
        own = {name: value for name, value in env.items() if name != PATH}  # each command gets that of its own request
        process = subprocess.Popen(words, env=own, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        process.returncode = 0  # it is not waited for
        theirs.close()
        atexit.register(ours.close)
        _launchers[setup] = ours
    return _launchers[setup]


# ---- the process that forks ------------------------------------------------------------------------------------------


def _import_everything() -> None:
    import reefknot

    for found in pkgutil.walk_packages(reefknot.__path__, "reefknot.", onerror=print):
        if not found.name.startswith(NOT_IMPORTED):
            importlib.import_module(found.name)
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _forked(requests: socket.socket) -> dict[str, Any]:
    """Serve requests, and return in each fork with its own; this process ends with the one that asks."""
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), waking], [], [])
        if waking in ready:
            os.read(waking, 4096)
            _tell_of_ends(running)
        if requests.fileno() not in ready:
            continue
        body, fds, _, _ = socket.recv_fds(requests, MOST_BYTES, 4)
        if not body:
            requests.close()
            sys.exit()
        *streams, status = fds
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, fd in enumerate(streams):
                os.dup2(fd, number)
            requests.detach()
            os.closerange(3, MOST_FILES)
            return dict(json.loads(body))
        os.write(status, pid.to_bytes(4, "little"))
        running[pid] = status
        for fd in streams:
            os.close(fd)


def _tell_of_ends(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = running.pop(pid)
        with suppress(BrokenPipeError):  # nobody waits for it any more
            os.write(pipe, status.to_bytes(4, "little"))
        os.close(pipe)


def _stream(fd: int, mode: str, errors: str, *, lines: bool = False) -> io.TextIOWrapper:
    """A standard stream as Python makes it at its start, for what `fd` is now."""
    raw = os.environ.get("PYTHONUNBUFFERED", "") != "" and mode == "w"
    opened = open(fd, f"{mode}b", closefd=False, buffering=0 if raw else -1)  # noqa: SIM115 - it lives as long as we
    lines = (lines or os.isatty(fd)) and not raw
    made = io.TextIOWrapper(opened, "utf-8", errors, line_buffering=lines, write_through=raw)
    made.mode = mode  # type: ignore[misc]
    return made


def _python_path() -> list[str]:
    return [os.path.abspath(one) for one in os.environ.get(PATH, "").split(os.pathsep) if one]


def _become(request: dict[str, Any]) -> NoReturn:
    if request["session"]:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # what is typed there is for this command, Ctrl-C too
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[: len(SOURCES)] = [request["cwd"], *_python_path()]
    sys.stdin = sys.__stdin__ = _stream(0, "r", "surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace", lines=True)  # type: ignore[misc]
    sys.argv = request["args"]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        _end(ended.code)
    _end(0)


def _end(code: int) -> NoReturn:
    """End as Python does, but do not take apart what was imported: that would take longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    sys.path[:1] = SOURCES
    _import_everything()
    _become(_forked(socket.socket(fileno=int(sys.argv[1]))))
