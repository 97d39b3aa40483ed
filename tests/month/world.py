"""
The world around a system that lives for a month: four sources that change every hour, and fail now and then.

A folder, an Obsidian vault, a mailbox on a real IMAP server, and a repository on a server that answers like GitHub. The
world knows which documents there have to be, and which items cannot be read until a person has mended them.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from tests.github_server import GithubServer, Reply, refusal
from tools.imap_server import CERTIFICATE, PASSWORD, Mailbox, message, running_imap

ON_A_DISK = ("folder", "vault")
CONFIGURATION = """\
engine: sqlite:state.db
worker:
  quarantine_failed: true
  retention_seconds: {retention}
  retries: {{v2: {{enabled: true, default_policy: {{max_attempts: 3, base_delay_ms: 1000}}}}}}
  queue: {{v2: {{enabled: true}}}}
audit: {{retention_seconds: {retention}}}
idempotency: {{retention_seconds: {retention}}}
schedules:
  nightly:
    cron: "30 2 * * *"
    time_zone: Europe/Berlin
    assignment: {{job: {{type: month.count}}}}
sources:
  folder: {{connector: local_files, path: folder, every: 1h}}
  vault: {{connector: obsidian_vault, path: vault, every: 1h}}
  mail:
    connector: imap_mailbox
    host: localhost
    port: {imap_port}
    tls_ca: {certificate}
    user: {imap_user}
    password: env:MONTH_PASSWORD
    every: 1h
  code:
    connector: github_repository
    repository: octo/demo
    base_url: '{github_url}'
    token: env:MONTH_TOKEN
    content: [files]
    every: 1h
"""


class Repository(GithubServer):
    """A server of a repository that can be down, limit its rate, and hold files that it cannot read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.token = "month-canary-token"
        self.is_down = False
        self.unreadable: set[str] = set()
        self.met: set[str] = set()
        """Trouble that was met since the last look."""

    def reply(self, target: str, headers: Mapping[str, str]) -> Reply:
        if self.is_down:
            return refusal(503, "Service Unavailable")
        if any(sha in target for sha in self.unreadable):
            self.met.add("code unreadable")
            return refusal(500, "Server Error")
        self.requests.clear()
        found = super().reply(target, headers)
        if found.status == 403:
            self.met.add("code limited")
        return found


class World:
    """The sources on this machine, and the documents that they should lead to."""

    def __init__(self, home: Path, repository: Repository, mailbox: Mailbox, *, kept_hours: int) -> None:
        self.home = home
        self._kept_hours = kept_hours
        self.repository = repository
        self.mailbox = mailbox
        self.texts: dict[str, set[str]] = {"folder": set(), "vault": set(), "mail": set(), "code": set()}
        """By source, the word by which each item is known."""
        self.mounted: list[str] = []
        """Sources whose disk is there again, until a person has asked for a sync of them."""
        self._is_mended = False
        self._mails: dict[str, Path] = {}
        self._trouble: list[tuple[datetime, Callable[[], None]]] = []
        (home / "folder").mkdir()
        (home / "vault" / ".obsidian").mkdir(parents=True)

    def hour(self, number: int) -> None:
        """Something new in each source, something changed, and an old item deleted: what is kept does not grow."""
        word, old = f"hour{number:04d}", f"hour{number - self._kept_hours:04d}"
        folder, vault = self._place("folder"), self._place("vault")
        (folder / f"{word}.txt").write_text(f"{word} in the folder")
        (vault / f"{word}.md").write_text(f"---\ntags: [{word}]\n---\n{word} in the vault")
        (vault / "always.md").write_text(f"changed in hour {number}")
        (self._mails[word],) = self.mailbox.deliver(message(number, text=f"{word} in the mailbox"))
        self.repository.git.files[f"{word}.txt"] = f"{word} in the repository".encode()
        for texts in self.texts.values():
            texts.add(word)
        self.texts["vault"].add("always")
        if old in self.texts["mail"]:
            (folder / f"{old}.txt").unlink()
            (vault / f"{old}.md").unlink()
            self._delete_mail(old)
            del self.repository.git.files[f"{old}.txt"]
            for texts in self.texts.values():
                texts.remove(old)
        self.repository.git.commit()

    def add_poison(self, day: int) -> None:
        """A file in the repository that its server cannot read, until a person has seen to that."""
        if self._is_mended:
            return
        word, content = f"poison{day:02d}", f"poison{day:02d} in the repository".encode()
        sha = hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()
        self.repository.unreadable.add(sha)
        self.repository.git.files[f"{word}.txt"] = content
        self.texts["code"].add(word)

    def mend(self) -> None:
        """A person has mended what could not be read."""
        self.repository.unreadable.clear()
        self._is_mended = True

    def _delete_mail(self, word: str) -> None:
        """Servers change the name of a message's file with its flags."""
        begin = self._mails.pop(word).name.partition(":")[0]
        for file in self.mailbox.files():
            if file.name.startswith(begin):
                file.unlink()

    # ---- trouble -----------------------------------------------------------------------------------------------------

    def plan(self, begin: datetime, length: timedelta) -> None:
        """Outages and a rate limit, each at its part of the month."""

        def at(part: float, hours: float, start: Callable[[], None], end: Callable[[], None]) -> None:
            moment = begin + length * part
            lasts = max(timedelta(hours=1), min(timedelta(hours=hours), length / 10))
            self._trouble += [(moment, start), (moment + lasts, end)]

        repository = self.repository
        at(0.10, 6, lambda: setattr(repository, "is_down", True), lambda: setattr(repository, "is_down", False))
        at(0.25, 3, lambda: setattr(repository, "limit", repository.used + 2), self._lift_limit)
        at(0.40, 5, self.mailbox.server.stop, self.mailbox.server.start)
        at(0.55, 3, self._unmount, self._mount)
        at(0.62, 4, lambda: setattr(repository, "is_down", True), lambda: setattr(repository, "is_down", False))
        self._trouble.sort(key=lambda one: one[0])

    def trouble(self, now: datetime) -> None:
        """Let begin and end what is due; the server counts requests by the hour."""
        self.repository.resets_at = int((now + timedelta(hours=1)).timestamp())
        if self.repository.limit == 5000:
            self.repository.used = 0
        while self._trouble and self._trouble[0][0] <= now:
            self._trouble.pop(0)[1]()

    def calm(self) -> None:
        """End all trouble that is still planned."""
        while self._trouble:
            self._trouble.pop(0)[1]()

    def _lift_limit(self) -> None:
        self.repository.limit, self.repository.used = 5000, 0

    def _unmount(self) -> None:
        """The disk of the folder and the vault is away."""
        for name in ON_A_DISK:
            (self.home / name).rename(self._away(name))

    def _mount(self) -> None:
        for name in self.unmounted:
            self._away(name).rename(self.home / name)
            self.mounted.append(name)

    @property
    def unmounted(self) -> list[str]:
        """The sources whose disk is away; each has a sync that waits for a person."""
        return [name for name in ON_A_DISK if self._away(name).exists()]

    def _away(self, name: str) -> Path:
        return self.home / f"{name}-unmounted"

    def _place(self, name: str) -> Path:
        """Where the files of a source are at this moment."""
        return self._away(name) if name in self.unmounted else self.home / name


@contextmanager
def living_world(home: Path, *, retention: timedelta) -> Iterator[World]:
    """A world with running servers, and the configuration of a system that reads it."""
    home.mkdir(parents=True, exist_ok=True)
    repository = Repository(home)
    before = {name: os.environ.get(name) for name in ("MONTH_PASSWORD", "MONTH_TOKEN")}
    os.environ |= {"MONTH_PASSWORD": PASSWORD, "MONTH_TOKEN": repository.token}
    try:
        with running_imap() as server:
            mailbox = server.mailbox()
            (home / "reefknot.yaml").write_text(
                CONFIGURATION.format(
                    retention=int(retention.total_seconds()),
                    imap_port=server.tls_port,
                    imap_user=mailbox.user,
                    certificate=CERTIFICATE,
                    github_url=repository.url,
                )
            )
            yield World(home, repository, mailbox, kept_hours=int(retention / timedelta(hours=1)))
    finally:
        repository.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
