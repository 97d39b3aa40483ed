"""A command on a pseudo-terminal: what it draws, the keys it is given, and the terminal that it leaves behind."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.warm_commands import WarmCommand

PATIENCE_S = 30.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HOME, _ENTER, _LEAVE = "\x1b[H", "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class Terminal:
    """A command on a terminal of its own, of this many columns and lines."""

    def __init__(
        self,
        *words: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        lines: int = 24,
        program: str = "reefknot",
        command: Sequence[str] = (),
    ) -> None:
        """`command` is what runs instead of a Python program."""
        self.master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = self.attributes()
        kept = {name: value for name, value in (env or os.environ).items() if name not in ("COLUMNS", "NO_COLOR")}
        environment = kept | {"TERM": "xterm-256color", "PYTHONWARNINGS": "error"}
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), self._slave)
        streams |= {"cwd": cwd, "env": environment, "start_new_session": True}
        self.process: subprocess.Popen[Any]
        if command:
            # Ctrl-C is the terminal's, and this one has to be the command's.
            self.process = subprocess.Popen([*command, *words], preexec_fn=self._take, **streams)  # noqa: PLW1509
        else:
            self.process = WarmCommand([program, *words], **streams)
        self.text = ""

    def _take(self) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)

    def attributes(self) -> list[Any]:
        """The modes of the terminal: echo, lines, keys."""
        return termios.tcgetattr(self._slave)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def until(self, holds: Callable[[str], object]) -> str:
        """Read until this holds for everything that was drawn so far."""
        ends = time.monotonic() + PATIENCE_S
        while not holds(self.text):
            assert time.monotonic() < ends, f"it did not come to that:\n{self.text[-2000:]}"
            self._read(0.1)
        return self.text

    def _read(self, seconds: float) -> None:
        if select.select([self.master], [], [], seconds)[0]:
            self.text += os.read(self.master, 65536).decode("utf-8", "replace")

    def ends(self) -> int:
        """
        The exit code, as a shell says it. What it still draws is read meanwhile: a full terminal would hold it up.

        Python ends a program of `-m` by SIGINT, whatever it exits with, when the interrupt came within an `exec` of
        text, as when the module of a dataclass is loaded: to a shell that is 130 as well.
        """
        ends = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < ends, "it does not end"
            self._read(0.05)
        while select.select([self.master], [], [], 0)[0]:
            self._read(0)
        code = self.process.returncode
        return 128 + signal.SIGINT if code == -signal.SIGINT else code

    @property
    def plain(self) -> str:
        """Everything that was drawn, without escapes."""
        return _ESCAPES.sub("", self.text).replace("\r\n", "\n")

    def views(self) -> list[list[str]]:
        """The lines of every view, without escapes."""
        inside = self.text.partition(_ENTER)[2].partition(_LEAVE)[0]
        return [_ESCAPES.sub("", view).replace("\r", "").splitlines() for view in inside.split(_HOME)[1:]]

    @property
    def is_sane(self) -> bool:
        """Whether the terminal is as it was: its modes, its screen, its cursor."""
        left = self.text.rfind(_LEAVE) > self.text.rfind(_ENTER) or _ENTER not in self.text
        return left and self.attributes() == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)
