"""
Incidents of a month, with real processes at the month's time: kills, a full disk, upgrades and a rollback.

Each incident hands in work of its own and sees to it that all of it ends. What did not hold goes into the `Record`.
Processes are warm ones (`tests/warm_commands.py`), and each says at its end how much CPU time it took.
"""

import json
import os
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.month.at import CPU_FILE
from tests.month.judgement import Job, Record
from tests.warm_commands import WarmCommand

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
JOBS = 20
COMMANDS = {
    "job list": ("job", "list"),
    "job list, failed": ("job", "list", "--state", "failed"),
    "quarantine list": ("quarantine", "list"),
    "source list": ("source", "list"),
    "idempotency stats": ("idempotency", "stats"),
    "doctor": ("doctor",),
    "audit tail": ("audit", "tail"),
}


@dataclass
class Incidents:
    """Commands over the month's folder."""

    home: Path
    record: Record
    versions: int = 0
    """Made-up versions that the installed reefknot has."""
    hour: int = 0
    _names: int = 0

    def command(self, now: datetime, *words: str, flag: str = "", versions: int | None = None) -> list[str]:
        """The words that start a command at this time, of the installed version or another one."""
        ahead = now.timestamp() - time.time()
        version = self.versions if versions is None else versions
        return ["tests.month.at", str(ahead), str(version), flag, *words]

    def call(self, now: datetime, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """A command, run to its end."""
        command = self.command(now, *words, **more)
        with self._process(command, stdout=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(timeout=PATIENCE_S)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def start(self, now: datetime, *words: str, **more: Any) -> WarmCommand:
        """A part of a system that has started."""
        process = self._process(self.command(now, *words, **more), stdout=subprocess.DEVNULL)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(("up ", "worker", "router")):
                break
        else:
            self._fault(f"{' '.join(words)} did not start")
        return process

    def _process(self, command: list[str], *, stdout: int) -> WarmCommand:
        shown = {"REEFKNOT_LOG_FORMAT": "text", "REEFKNOT__DASHBOARD__ENABLED": "false"}
        environment = os.environ | shown | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{self.home}"}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.PIPE}
        return WarmCommand(command, cwd=self.home, env=environment, text=True, **streams)

    def _fault(self, what: str) -> None:
        self.record.broken.append(what)

    # ---- incidents ---------------------------------------------------------------------------------------------------

    def killed_worker(self, now: datetime) -> None:
        """A worker is killed in the middle of its work, and started again."""
        parts = [self.start(now, "router", "start"), self.start(now, "worker", "start", "--module", "month_steps")]
        names = self._hand_in(now)
        self._kill(parts.pop())
        parts.append(self.start(now, "worker", "start", "--module", "month_steps"))
        self._all_end(now, names, "killed worker", parts)

    def killed_router(self, now: datetime) -> None:
        """A router is killed while work waits for it, and started again."""
        parts = [self.start(now, "worker", "start", "--module", "month_steps"), self.start(now, "router", "start")]
        self._kill(parts.pop())
        names = self._hand_in(now)
        parts.append(self.start(now, "router", "start"))
        self._all_end(now, names, "killed router", parts)

    def full_disk(self, now: datetime) -> None:
        """The disk is full for a moment: what is refused is not kept, what was accepted ends."""
        flag = self.home / "disk-is-full"
        system = self.start(now, "up", "--module", "month_steps", flag=str(flag))
        names = self._hand_in(now)
        flag.touch()
        refused = self.call(now, "submit", "--type", "month.count", "--id", "refused", flag=str(flag))
        if refused.returncode != 69 or "the disk is full" not in refused.stderr:
            self._fault(f"a full disk: submit ended with {refused.returncode}: {refused.stderr[-200:]}")
        flag.unlink()
        if system.poll() is not None:  # a system may end with 69; a supervisor starts it again
            system = self.start(now, "up", "--module", "month_steps")
        self._all_end(now, names, "full disk", [system])

    def upgrade(self, now: datetime) -> None:
        """A newer version is installed; it migrates when a system starts, and keeps the file as it was."""
        before = self.versions
        looked = self.call(now, "job", "list", versions=before + 1)
        if looked.returncode not in (0, 78):
            self._fault(f"upgrade: a look ended with {looked.returncode}: {looked.stderr[-200:]}")
        if self.call(now, "job", "list").returncode != 0:
            self._fault("upgrade: a look of the newer version locked the older one out")
        copies = len(list(self.home.glob("*.bak")))
        self.versions = before + 1
        self._serve(now, "upgrade")
        if len(list(self.home.glob("*.bak"))) <= copies:
            self._fault(f"upgrade {self.versions}: no copy of the older file was kept")

    def rollback(self, now: datetime) -> None:
        """An upgrade that is regretted at once: the older version runs on the copies that the migration has kept."""
        self.upgrade(now)
        refused = self.call(now, "job", "list", versions=self.versions - 1)
        if refused.returncode != 78:
            self._fault(f"rollback: the older version read a newer file ({refused.returncode})")
        self.versions -= 1
        for name in ("state.db", "documents.db"):
            copies = sorted(self.home.glob(f"{name}.v*.bak"), key=lambda one: one.stat().st_mtime)
            if not copies:
                self._fault(f"rollback: there is no copy of {name}")
                continue
            for left in self.home.glob(f"{name}-*"):
                if left.name.endswith(("-wal", "-shm")):
                    left.unlink()
            copies[-1].replace(self.home / name)
        self._serve(now, "rollback")

    def commands(self, now: datetime) -> dict[str, float]:
        """The CPU seconds of each command that a person looks with, apart from its imports: the least of three runs."""
        taken = {}
        for name, words in COMMANDS.items():
            times = []
            for _ in range(3):
                ended = self.call(now, *words)
                times.append(float((self.home / CPU_FILE).read_text()))
                if ended.returncode not in (0, 1):
                    self._fault(f"{name} ended with {ended.returncode}: {ended.stderr[-300:]}")
            taken[name] = min(times)
        return taken

    def quarantined(self, now: datetime, *words: str) -> int:
        """Jobs and items in quarantine, as a command lists them."""
        listed = self.call(now, "quarantine", "list", "--limit", "1000", "--json", *words)
        return len(json.loads(listed.stdout)["items"]) if listed.returncode == 0 else -1

    def check(self, now: datetime, *words: str) -> None:
        """A command that has to end with 0."""
        ended = self.call(now, *words)
        if ended.returncode != 0:
            self._fault(f"{' '.join(words)} ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-400:]}")

    # ---- parts of them -----------------------------------------------------------------------------------------------

    def _serve(self, now: datetime, what: str) -> None:
        system = self.start(now, "up", "--module", "month_steps")
        self._all_end(now, self._hand_in(now), what, [system])

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
            self._fault(f"submit ended with {ended.returncode}: {ended.stderr[-300:]}")
            return []
        self.record.accepted |= dict.fromkeys(names, Job("success", self.hour))
        return names

    def _all_end(self, now: datetime, names: list[str], what: str, parts: list[WarmCommand]) -> None:
        """Wait until these jobs have ended, stop the system, and count the ends that its audit log has."""
        missing, until = set(names), time.monotonic() + PATIENCE_S
        while missing and time.monotonic() < until:
            listed = self.call(now, "job", "list", "--state", "succeeded", "--limit", "1000", "--json")
            if listed.returncode == 0:
                missing -= {one["id"] for one in json.loads(listed.stdout)["jobs"]}
        self.record.results |= dict.fromkeys(set(names) - missing, "success")
        if missing:
            self._fault(f"{what}: {len(missing)} of {len(names)} accepted jobs did not end")
        self._end(parts)
        events = self.call(now, "audit", "tail", "--type", "completed", "--lines", "1000", "--json").stdout.splitlines()
        ended = Counter(json.loads(one)["event"].get("work_id") for one in events)
        self.record.ends.update({name: ended[name] for name in names})
        self.record.happened[what] += 1

    def _kill(self, process: WarmCommand) -> None:
        process.kill()
        self._ended(process)

    def _end(self, processes: list[WarmCommand]) -> None:
        for process in processes:
            process.terminate()
        for process in processes:
            self._ended(process)

    def _ended(self, process: WarmCommand) -> None:
        process.communicate(timeout=PATIENCE_S)
