"""
`SqliteQueries`: helper processes for statements of SQLite, started on demand, reused, and killed when they do not end.

A statement shares no memory with the worker and cannot hold up others: SQLite's own functions cannot be interrupted,
and some take minutes for one megabyte. A helper gets neither the environment nor the folder of the worker, and answers
one message for one message. A thread waits for each that is busy.
"""

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from threading import Lock, Timer

import msgspec

from reefknot.core.failure import ErrorCode
from reefknot.steps.inputs import Refusal
from reefknot.steps.sql_rows import Access, Parameters, Rows, SqlConnection, SqlSettings
from reefknot.steps.sql_sqlite import SqliteReply, SqliteRequest, read_frame, write_frame

GRACE_S = 0.25
"""The time that a cancelled statement has to undo its changes by itself."""
RECOVERY_S = 10.0
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from reefknot.steps.sql_sqlite import main; main(int(sys.argv[1]))"
_KEPT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")


class SqliteQueries:
    """Statements of SQLite in at most `most` processes at once."""

    def __init__(self, most: int = 8) -> None:
        self._threads = ThreadPoolExecutor(most, "reefknot-sqlite")
        self._lock = Lock()
        self._idle: list[Helper] = []
        self._busy: set[Helper] = set()
        self._closed = False

    async def run(
        self, connection: SqlConnection, query: str, parameters: Parameters, *, limits: SqlSettings, seconds: float
    ) -> Rows:
        """The rows of one statement; cancelled, it ends at once, by force if it has to."""
        call = _Call(_request(connection, query, parameters, limits), time.monotonic() + seconds)
        try:
            reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._reply, call)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if reply.refused is not None:
            raise Refusal(reply.refused, reply.message, **reply.metadata)
        found = Rows(limits)
        found.rows, found.affected = reply.rows, reply.affected
        return found

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for helper in self._busy:
                helper.stop()
        for helper in idle:
            helper.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _reply(self, call: "_Call") -> SqliteReply:
        helper = self._take()
        try:
            reply = call.reply_of(helper)
        finally:
            self._give_back(helper)
        if reply is not None:
            return reply
        if call.request.writes and os.path.exists(f"{call.request.path}-journal"):
            self._recover(call.request)
        text = "connection: the process of the statement ended before it answered"
        return SqliteReply(refused=ErrorCode.resource_unavailable, message=text)

    def _recover(self, request: SqliteRequest) -> None:
        """Undo what a killed statement wrote: until then a connection for reading cannot open the file."""
        again = SqliteRequest(request.path, "SELECT 1", writes=True)
        helper = self._take()
        try:
            _Call(again, time.monotonic() + RECOVERY_S).reply_of(helper)
        finally:
            self._give_back(helper)

    def _take(self) -> "Helper":
        with self._lock:
            helper = self._idle.pop() if self._idle else None
            if helper is None:
                try:
                    helper = Helper()
                except OSError as error:
                    text = f"connection: a process for the statement cannot be started: {error}"
                    raise Refusal(ErrorCode.resource_unavailable, text) from error
            self._busy.add(helper)
            return helper

    def _give_back(self, helper: "Helper") -> None:
        with self._lock:
            self._busy.discard(helper)
            if helper.is_usable and not self._closed:
                self._idle.append(helper)
                return
        helper.end()


def _request(connection: SqlConnection, query: str, parameters: Parameters, limits: SqlSettings) -> SqliteRequest:
    path = os.path.abspath(connection.sqlite_path or "")
    writes = connection.access is Access.WRITE
    return SqliteRequest(path, query, parameters, writes, limits.max_rows, limits.max_bytes)


class _Call:
    """A request on its way to a helper, which its caller may cancel at any time."""

    def __init__(self, request: SqliteRequest, until: float) -> None:
        self.request = request
        self._until = until
        self._lock = Lock()
        self._helper: Helper | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._helper is not None:
                self._helper.stop()

    def reply_of(self, helper: "Helper") -> SqliteReply | None:
        """The helper's answer; None when it ended without one."""
        with self._lock:
            if self._is_cancelled:
                return None
            self._helper = helper
        left = self._until - time.monotonic()
        request = msgspec.structs.replace(self.request, seconds=None if left == inf else max(0.0, left))
        try:
            return helper.ask(request)
        finally:
            with self._lock:
                self._helper = None


class Helper:
    """A process that runs one statement at a time. Once stopped it is not used again."""

    def __init__(self) -> None:
        paths = [os.path.abspath(path) for path in sys.path]
        self._process = subprocess.Popen(  # noqa: S603 - this Python, with a program of ours
            [sys.executable, "-I", "-c", _PROGRAM, str(os.getpid()), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            cwd=os.sep,
            start_new_session=True,  # Ctrl-C is for the worker, which lets steps finish
        )
        self.pid = self._process.pid
        self.is_usable = True
        self._killer: Timer | None = None

    def ask(self, request: SqliteRequest) -> SqliteReply | None:
        """The answer to one request; None when the helper gave none and can no longer be used."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            write_frame(self._process.stdin, request)
            most = 4 * request.max_bytes + (1 << 20)  # a character of UTF-8 has at most four bytes
            body = read_frame(self._process.stdout, most)
            reply = None if body is None else msgspec.msgpack.decode(body, type=SqliteReply)
        except UnicodeEncodeError:
            text = "params: a text that cannot be written as UTF-8"
            return SqliteReply(refused=ErrorCode.invalid_input, message=text)
        except (OSError, ValueError):  # the process is gone, or its reply makes no sense
            reply = None
        if reply is None:
            self.is_usable = False
        return reply

    def stop(self) -> None:
        """Ask the statement to end, and kill the process if it does not within a moment."""
        self.is_usable = False
        if self._killer is None:
            self._process.terminate()
            self._killer = Timer(GRACE_S, self._process.kill)
            self._killer.daemon = True
            self._killer.start()

    def end(self) -> None:
        """Kill the process, and leave nothing of it."""
        self.is_usable = False
        self._process.kill()
        self._process.wait()
        if self._killer is not None:
            self._killer.cancel()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request that it did not read any more
                pipe.close()
