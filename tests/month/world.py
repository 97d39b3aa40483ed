"""
The world around a system that lives for a month: four sources that change every hour, and fail now and then.

A folder, an Obsidian vault, a mailbox on a real IMAP server, and a repository on a server that answers like GitHub. The
world knows which documents there have to be, and which items cannot be read until a person has mended them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from tests.github_server import GithubServer, Reply, refusal
from tools.imap_server import CERTIFICATE, PASSWORD, Mailbox, message, running_imap

KEPT_HOURS = 48
"""Hours after which the world deletes an item again: what is kept does not grow."""
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

    def reply(self, target: str, headers: Mapping[str, str]) -> Reply:
        if self.is_down:
            return refusal(503, "Service Unavailable")
        if any(sha in target for sha in self.unreadable):
            return refusal(500, "Server Error")
        self.requests.clear()
        return super().reply(target, headers)


class World:
    """The sources on this machine, and the documents that they should lead to."""

    def __init__(self, home: Path, repository: Repository, mailbox: Mailbox) -> None:
        self.home = home
        self.repository = repository
        self.mailbox = mailbox
        self.texts: dict[str, dict[str, str]] = {"folder": {}, "vault": {}, "mail": {}, "code": {}}
        """By source, the word by which each item is known, and where it lies."""
        self.poison: dict[str, str] = {}
        """The word of each item that cannot be read, and its hash."""
        self._mails: dict[str, Path] = {}
        self._trouble: list[tuple[datetime, Callable[[], None]]] = []
        (home / "folder").mkdir()
        (home / "vault" / ".obsidian").mkdir(parents=True)

    def hour(self, number: int) -> None:
        """Something new in each source, something changed, and the item of two days ago deleted."""
        word = f"hour{number:04d}"
        (self.home / "folder" / f"{word}.txt").write_text(f"{word} in the folder")
        (self.home / "vault" / f"{word}.md").write_text(f"---\ntags: [{word}]\n---\n{word} in the vault")
        (self.home / "vault" / "always.md").write_text(f"changed in hour {number}")
        (self._mails[word],) = self.mailbox.deliver(message(number, text=f"{word} in the mailbox"))
        self.repository.git.files[f"{word}.txt"] = f"{word} in the repository".encode()
        for source in self.texts:
            self.texts[source][word] = word
        self.texts["vault"]["always"] = "always"
        old = f"hour{number - KEPT_HOURS:04d}"
        if old in self.texts["mail"]:
            (self.home / "folder" / f"{old}.txt").unlink()
            (self.home / "vault" / f"{old}.md").unlink()
            self._delete_mail(old)
            del self.repository.git.files[f"{old}.txt"]
            for source in self.texts:
                del self.texts[source][old]
        self.repository.git.commit()

    def add_poison(self, day: int) -> None:
        """A file in the repository that its server cannot read."""
        word, content = f"poison{day:02d}", f"poison{day:02d} in the repository".encode()
        sha = hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()
        self.repository.unreadable.add(sha)
        self.repository.git.files[f"{word}.txt"] = content
        self.poison[word] = sha
        self.texts["code"][word] = word

    def mend(self) -> None:
        """A person has mended what could not be read."""
        self.repository.unreadable.clear()

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
            self._trouble += [(moment, start), (moment + min(timedelta(hours=hours), length / 10), end)]

        repository = self.repository
        at(0.10, 6, lambda: setattr(repository, "is_down", True), lambda: setattr(repository, "is_down", False))
        at(0.25, 3, lambda: setattr(repository, "limit", repository.used + 2), self._lift_limit)
        at(0.40, 5, self.mailbox.server.stop, self.mailbox.server.start)
        at(0.55, 3, self._hide_folder, self._show_folder)
        at(0.70, 4, lambda: setattr(repository, "is_down", True), lambda: setattr(repository, "is_down", False))
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

    def _hide_folder(self) -> None:
        (self.home / "folder").rename(self.home / "folder-unmounted")

    def _show_folder(self) -> None:
        (self.home / "folder-unmounted").rename(self.home / "folder")


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
            yield World(home, repository, mailbox)
    finally:
        repository.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
