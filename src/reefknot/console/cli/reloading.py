"""
`--reload` of `up` and `worker start`: a process that starts the command again whenever a file of its steps has changed.

The command itself runs as a child, without `--reload`. A change ends it as SIGTERM does: what runs has a moment to end,
and the rest goes back to the store, where the next child finds it. A child that cannot start has said why, with file
and line; the next change starts another one. Files are looked at several times a second, which works on every file
system and needs no library.

`python -m reefknot.console.cli.reloading FD WORD …` is the child: it ends when the other end of the pipe FD is closed,
so that none is left behind by a parent that was killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, Signals, signal
from time import monotonic
from typing import Any

from reefknot.console.cli.app import CommandError, Exit, command_words
from reefknot.console.cli.output import relative, say

LOOK_EVERY_S = 0.25
SETTLE_S = 0.1
DRAIN_S = 2.0
"""Seconds that running steps get at a change, unless `--drain` says otherwise."""
STOP_S = 10.0
"""Time beyond the drain after which a child that has not ended is asked again, and then killed."""
MOST_FILES = 5000
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})
_OF_SIGNALS = (Exit.INTERRUPTED, Exit.TERMINATED, Exit.HUNG_UP)

Seen = Mapping[str, tuple[int, int, int]]
"""Files as they were at one moment: time of change, size and number."""


# ---- files -----------------------------------------------------------------------------------------------------------


class WatchedFiles:
    """The Python files of some modules: all of their packages, or of their folder, and single files besides."""

    def __init__(self, modules: Sequence[str], others: Sequence[Path] = ()) -> None:
        """Modules are named as `--module` does. `CommandError` when nothing of them is beneath the working folder."""
        self._cwd = Path.cwd()
        self._others = [one for one in others if one.is_relative_to(self._cwd)]
        self._trees: set[Path] = set()
        self._folders: set[Path] = set()
        for name in modules:
            self._add(name)
        if not self._trees and not self._folders:
            which = f"no file of {', '.join(modules)} is beneath {self._cwd}" if modules else "there is no --module"
            raise CommandError(
                f"--reload: {which}, so there is nothing to watch; accepted: --module steps, or steps.py"
            )

    def _add(self, name: str) -> None:
        if name.endswith(".py") or os.sep in name:
            file = Path(os.path.normpath(self._cwd / name))
            parts = file.relative_to(self._cwd).parts if file.is_relative_to(self._cwd) else ()
        else:
            parts = (name.partition(".")[0], *name.split(".")[1:])
        if len(parts) > 1 or (parts and (self._cwd / parts[0]).is_dir()):
            self._trees.add(self._cwd / parts[0])
        elif parts and ((self._cwd / parts[0]).with_suffix(".py").exists() or not _is_elsewhere(parts[0])):
            self._folders.add(self._cwd)

    def look(self) -> Seen:
        """The files as they are now."""
        seen: dict[str, tuple[int, int, int]] = {}
        for path in self._paths():
            try:
                found = os.stat(path)
            except OSError:
                continue
            seen[path] = (found.st_mtime_ns, found.st_size, found.st_ino)
            if len(seen) >= MOST_FILES:
                break
        return seen

    def _paths(self) -> Iterator[str]:
        yield from map(str, self._others)
        for folder in self._folders:
            yield from (str(one) for one in folder.glob("*.py"))
        for tree in self._trees:
            for place, folders, names in os.walk(tree):
                folders[:] = [one for one in folders if one not in _LEFT_OUT and not one.startswith(".")]
                yield from (os.path.join(place, one) for one in names if one.endswith(".py"))


def _is_elsewhere(name: str) -> bool:
    """Whether Python finds the module outside the working folder: an installed package."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def changes(before: Seen, now: Seen) -> str:
    """The files that have changed, in words; an empty text when none has."""
    changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    names = [relative(one) for one in changed[:3]]
    return f"{', '.join(names)} and {len(changed) - 3} more" if len(changed) > 3 else " and ".join(names)


# ---- the parent ------------------------------------------------------------------------------------------------------


class Reloader:
    """Runs a command as a child, and another one after each change of its files."""

    def __init__(self, words: Sequence[str], files: WatchedFiles, *, seconds: float | None, drain: float) -> None:
        self._words = list(words)
        self._files = files
        self._drain = drain
        self._ends = None if seconds is None else monotonic() + seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: Signals | None = None
        self._woken = threading.Event()

    def run(self) -> int:
        """Run until a signal, or the end of the time; the exit code is that of the last child."""
        before = {one: signal(one, self._on_signal) for one in (SIGINT, SIGTERM, SIGHUP)}
        try:
            return self._run()
        finally:
            self._kill()
            for one, handler in before.items():
                signal(one, handler)

    def _run(self) -> int:
        seen = self._files.look()
        self._start()
        while True:
            self._wait(LOOK_EVERY_S)
            if (code := self._end()) is not None:
                return code
            if changes(seen, now := self._files.look()):
                now = self._settled(now)
                say(f"{changes(seen, now) or 'a file'} changed; restarting the steps")
                seen = now
                self._stop()
                if self._end() is None:
                    self._start()

    def _settled(self, now: Seen) -> Seen:
        """The files once they have not changed for a moment: an editor may still be writing."""
        while True:
            self._wait(SETTLE_S)
            if (latest := self._files.look()) == now:
                return now
            now = latest

    def _end(self) -> int | None:
        """The exit code, once there is a reason to end; None otherwise."""
        if self._child is None:
            is_over = self._asked is not None or (self._ends is not None and monotonic() >= self._ends)
            return (128 + self._asked if self._asked else Exit.FINE) if is_over else None
        code = self._child.poll()
        if code is None:
            return None
        self._child = None
        if self._asked is not None or code in (Exit.FINE, *_OF_SIGNALS):
            return code
        text = f"the steps ended with exit code {code}; waiting for the next change of their files (Ctrl-C ends)"
        say(text, level="error")
        return None

    def _on_signal(self, number: int, _frame: object) -> None:
        """Hand the signal on. The child has a process group of its own, so a terminal's Ctrl-C reaches it only so."""
        if number != SIGHUP:
            self._asked = Signals(number)
        if self._child is not None:
            self._child.send_signal(number)
        elif number == SIGHUP and any(stream.isatty() for stream in (sys.stdin, sys.stdout)):
            self._asked = Signals(number)
        self._woken.set()

    def _wait(self, seconds: float) -> None:
        self._woken.wait(seconds)
        self._woken.clear()

    def _start(self) -> None:
        reading, writing = os.pipe()
        left = [] if self._ends is None else ["--for", f"{max(0.001, self._ends - monotonic()):.3f}"]
        command = [sys.executable, "-m", "reefknot.console.cli.reloading", str(reading), *self._words, *left]
        # Python tells by whole seconds and the size whether a compiled file is up to date: an edit may fit into both.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        try:
            self._child = subprocess.Popen(  # noqa: S603 - this Python, with the words of this command
                command, env=environment, pass_fds=[reading], process_group=0
            )
        finally:
            os.close(reading)
        self._pipe = writing

    def _stop(self) -> None:
        """End the child in order; one that does not end in time is stopped at once, and gives its work back."""
        for patience in (self._drain + STOP_S, STOP_S):
            if self._child is None or self._child.poll() is not None:
                break
            self._child.send_signal(SIGTERM)
            until = monotonic() + patience
            while self._child.poll() is None and monotonic() < until:
                self._wait(0.05)
        self._kill()

    def _kill(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait(STOP_S)
        if self._child is not None or hasattr(self, "_pipe"):
            self._child = None
            os.close(self._pipe)
            del self._pipe


def run_reloading(modules: Sequence[str], *, config: str | None, engine: str | None, **times: Any) -> int:
    """Run this command without `--reload`, again after each change. `times` are its `seconds` and its `drain`."""
    path = _checked_configuration(config, engine)
    files = WatchedFiles(modules, [] if path is None else [path])
    words = without(command_words(), "--reload", takes_value=False)
    drain = times["drain"]
    if drain is None:
        words += ["--drain", f"{DRAIN_S:g}"]
    words = without(words, "--for")
    return Reloader(words, files, seconds=times["seconds"], drain=DRAIN_S if drain is None else drain).run()


def _checked_configuration(config: str | None, engine: str | None) -> Path | None:
    """The configuration's file. A store in memory is refused: the next child would find nothing of the last one's."""
    from reefknot.console.cli.options import load
    from reefknot.errors import ConfigurationError
    from reefknot.stores.opening import store_url
    from reefknot.stores.port.engines import accepted_urls, is_shared

    try:
        found = load(config)
    except ConfigurationError:  # the child says so, with the line
        return None
    if not is_shared(store_url(found, engine)):
        text = "--reload: a memory: store ends with its process, and so would all jobs at each change"
        raise CommandError(f"{text}; accepted: {accepted_urls(shared_only=True)}")
    return found.path


def without(words: Sequence[str], flag: str, *, takes_value: bool = True) -> list[str]:
    """The words of a command without a flag and its value."""
    left: list[str] = []
    skips = False
    for word in words:
        if skips:
            skips = False
        elif word == flag:
            skips = takes_value
        elif not word.startswith(f"{flag}="):
            left.append(word)
    return left


# ---- the child -------------------------------------------------------------------------------------------------------


def _end_with_parent(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), SIGTERM)


def _main() -> int:
    from reefknot.console.cli import main

    pipe, *words = sys.argv[1:]
    sys.argv[1:] = words
    threading.Thread(target=_end_with_parent, args=(int(pipe),), name="parent", daemon=True).start()
    return main()


if __name__ == "__main__":
    sys.exit(_main())
