"""
Incidents of a month, with real processes at the month's time: kills, a full disk, upgrades and a rollback.

Each incident hands in work of its own and sees to it that all of it ends. `Incidents.broken` lists what did not hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
JOBS = 20
COMMANDS = {
    "job list": ("job", "list"),
    "job list, failed": ("job", "list", "--state", "failed"),
    "quarantine list": ("quarantine", "list"),
    "source list": ("source", "list"),
    "worker list": ("worker", "list"),
    "doctor": ("doctor",),
    "audit tail": ("audit", "tail"),
}


@dataclass
class Incidents:
    """Commands over the month's folder, and what went wrong."""

    home: Path
    versions: int = 0
    """Made-up versions that the installed reefknot has."""
    done: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    accepted: int = 0
    ended: int = 0
    _names: int = 0

    def command(self, now: datetime, *words: str, flag: str = "", versions: int | None = None) -> list[str]:
        """The words that start a command at this time, of the installed version or another one."""
        ahead = now.timestamp() - time.time()
        version = self.versions if versions is None else versions
        return [sys.executable, "-m", "tests.month.at", str(ahead), str(version), flag, *words]

    def call(self, now: datetime, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """A command, run to its end."""
        return subprocess.run(
            self.command(now, *words, **more),
            cwd=self.home,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def start(self, now: datetime, *words: str, **more: Any) -> subprocess.Popen[str]:
        """A part of a system that has started."""
        process = subprocess.Popen(
            self.command(now, *words, **more),
            cwd=self.home,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(("up ", "worker", "router")):
                break
        else:
            self.broken.append(f"{' '.join(words)} did not start")
        return process

    def _environment(self) -> dict[str, str]:
        shown = {"REEFKNOT_LOG_FORMAT": "text", "REEFKNOT__DASHBOARD__ENABLED": "false"}
        return os.environ | shown | {"PYTHONPATH": f"{ROOT}:{self.home}"}

    # ---- incidents ---------------------------------------------------------------------------------------------------

    def killed_worker(self, now: datetime) -> None:
        """A worker is killed in the middle of its work, and started again."""
        parts = [self.start(now, "router", "start"), self.start(now, "worker", "start", "--module", "month_steps")]
        names = self._hand_in(now)
        self._kill(parts.pop())
        parts.append(self.start(now, "worker", "start", "--module", "month_steps"))
        self._all_end(now, names, "a killed worker")
        self._end(parts)

    def killed_router(self, now: datetime) -> None:
        """A router is killed while work waits for it, and started again."""
        parts = [self.start(now, "worker", "start", "--module", "month_steps"), self.start(now, "router", "start")]
        self._kill(parts.pop())
        names = self._hand_in(now)
        parts.append(self.start(now, "router", "start"))
        self._all_end(now, names, "a killed router")
        self._end(parts)

    def full_disk(self, now: datetime) -> None:
        """The disk is full for a moment: what is refused is not kept, what was accepted ends."""
        flag = self.home / "disk-is-full"
        system = self.start(now, "up", "--module", "month_steps", flag=str(flag))
        names = self._hand_in(now)
        flag.touch()
        refused = self.call(now, "submit", "--type", "month.count", "--id", "refused", flag=str(flag))
        if refused.returncode != 69 or "the disk is full" not in refused.stderr:
            self.broken.append(f"a full disk: submit ended with {refused.returncode}: {refused.stderr[-200:]}")
        flag.unlink()
        if system.poll() is not None:  # a system may end with 69; a supervisor starts it again
            system = self.start(now, "up", "--module", "month_steps")
        self._all_end(now, names, "a full disk")
        self._end([system])

    def upgrade(self, now: datetime) -> None:
        """A newer version is installed; it migrates when a system starts, and keeps the file as it was."""
        before = self.versions
        looked = self.call(now, "job", "list", versions=before + 1)
        if looked.returncode not in (0, 78):
            self.broken.append(f"upgrade: a look ended with {looked.returncode}: {looked.stderr[-200:]}")
        if self.call(now, "job", "list").returncode != 0:
            self.broken.append("upgrade: a look of the newer version locked the older one out")
        copies = len(list(self.home.glob("*.bak")))
        self.versions = before + 1
        self._serve(now, f"upgrade {self.versions}")
        if len(list(self.home.glob("*.bak"))) <= copies:
            self.broken.append(f"upgrade {self.versions}: no copy of the older file was kept")
        self.done.append("upgrade")

    def rollback(self, now: datetime) -> None:
        """The newest version is taken back: the older one runs on the copies that the migration has kept."""
        refused = self.call(now, "job", "list", versions=self.versions - 1)
        if refused.returncode != 78:
            self.broken.append(f"rollback: the older version read a newer file ({refused.returncode})")
        self.versions -= 1
        for name in ("state.db", "documents.db"):
            copies = sorted(self.home.glob(f"{name}.v*.bak"), key=lambda one: one.stat().st_mtime)
            if not copies:
                self.broken.append(f"rollback: there is no copy of {name}")
                continue
            for left in self.home.glob(f"{name}-*"):
                if left.name.endswith(("-wal", "-shm")):
                    left.unlink()
            copies[-1].replace(self.home / name)
        self._serve(now, "after a rollback")
        self.done.append("rollback")

    def commands(self, now: datetime) -> dict[str, float]:
        """The CPU seconds of each command that a person looks with: the shortest of three runs."""
        taken = {}
        for name, words in COMMANDS.items():
            times = []
            for _ in range(3):
                before = os.times()
                ended = self.call(now, *words)
                after = os.times()
                times.append(
                    after.children_user + after.children_system - before.children_user - before.children_system
                )
                if ended.returncode not in (0, 1):
                    self.broken.append(f"{name} ended with {ended.returncode}: {ended.stderr[-300:]}")
            taken[name] = min(times)
        return taken

    def check(self, now: datetime, *words: str) -> None:
        """A command that has to end with 0."""
        ended = self.call(now, *words)
        if ended.returncode != 0:
            self.broken.append(
                f"{' '.join(words)} ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-400:]}"
            )

    # ---- parts of them -----------------------------------------------------------------------------------------------

    def _serve(self, now: datetime, what: str) -> None:
        system = self.start(now, "up", "--module", "month_steps")
        self._all_end(now, self._hand_in(now), what)
        self._end([system])

    def _hand_in(self, now: datetime) -> list[str]:
        """Jobs that were accepted, by their ids."""
        self._names += 1
        names = [f"incident-{self._names}-{one}" for one in range(JOBS)]
        file = self.home / "incident.jsonl"
        file.write_text(
            "".join(json.dumps({"assignment_id": one, "job": {"type": "month.count"}}) + "\n" for one in names)
        )
        ended = self.call(now, "submit", str(file), "--json")
        if ended.returncode != 0:
            self.broken.append(f"submit ended with {ended.returncode}: {ended.stderr[-300:]}")
            return []
        self.accepted += len(names)
        return names

    def _all_end(self, now: datetime, names: list[str], what: str) -> None:
        missing, until = set(names), time.monotonic() + PATIENCE_S
        while missing and time.monotonic() < until:
            listed = self.call(now, "job", "list", "--state", "succeeded", "--limit", "1000", "--json")
            found = {one["id"] for one in json.loads(listed.stdout)["jobs"]} if listed.returncode == 0 else set()
            missing -= found
        self.ended += len(names) - len(missing)
        if missing:
            self.broken.append(f"{what}: {len(missing)} of {len(names)} accepted jobs did not end")
        self.done.append(what)

    def _kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        self._ended(process)

    def _end(self, processes: list[subprocess.Popen[str]]) -> None:
        for process in processes:
            process.terminate()
        for process in processes:
            self._ended(process)

    def _ended(self, process: subprocess.Popen[str]) -> None:
        process.communicate(timeout=PATIENCE_S)
