"""
A message at which the mail server hangs up, on the command line, each command a process of its own.

The server is a real one. The name of a file says another size than the message has: Dovecot begins to send it, and ends
the connection.
"""

import pytest

from reefknot.ingest.connectors import imap_mailbox
from tests.acceptance.folder import Folder
from tests.imap_servers import PASSWORD, Mailbox, imap_server, mailbox, message

__all__ = ["imap_server", "mailbox"]

MESSAGES = 120
BROKEN = 60
CONFIGURATION = """\
retry_policies:
  imap_mailbox: {{max_attempts: 1, transient_max_attempts: 1, base_delay_seconds: 1, jitter_factor: 0}}
sources:
  mail: {{connector: imap_mailbox, host: 127.0.0.1, port: {port}, tls: none, user: {user}, password: "env:MAIL"}}
"""


@pytest.fixture
def mail(folder: Folder, mailbox: Mailbox) -> Folder:
    """A folder with a source of 120 messages, one of which ends the connection."""
    files = mailbox.deliver(*(message(number) for number in range(MESSAGES)))
    size, lying = len(message(BROKEN)), files[BROKEN]
    lying.write_bytes(message(BROKEN)[:100])
    lying.rename(lying.with_name(lying.name.replace(":2,", f",S={size},W={size}:2,")))
    text = CONFIGURATION.format(port=mailbox.server.port, user=mailbox.user)
    folder.write("reefknot.yaml", text)
    folder.set_variable("MAIL", PASSWORD)
    return folder


def synced(folder: Folder, wanted: int, *, most: int = 8) -> list[int]:
    """The number of documents after each sync, each in a process of its own, until there are as many as wanted."""
    counts: list[int] = []
    while not counts or counts[-1] < wanted:
        assert len(counts) < most, counts
        code, _, err = folder.ends(folder.start("source", "run", "mail"))
        assert code in (0, 1, 75), err
        counts.append(folder.json("source", "show", "mail")["documents"])
    return counts


def in_quarantine(folder: Folder) -> list[str]:
    return [one["id"] for one in folder.json("quarantine", "list")["items"]]


def test_a_message_at_which_the_server_hangs_up_is_quarantined_alone(mail: Folder, mailbox: Mailbox) -> None:
    assert len(synced(mail, MESSAGES - 1)) == 3, "the third hang-up is the last"
    runs = 0
    while not (left := in_quarantine(mail)):  # its retry is due a second later
        synced(mail, 0)
        runs += 1
        assert runs < 30
    assert "UID=0000000061" in left[0]
    assert len(left) == 1
    reason = mail("quarantine", "show", left[0]).out
    assert "the connection breaks when this message is fetched" in " ".join(reason.split())

    next(file for file in mailbox.files() if ",S=" in file.name).write_bytes(message(BROKEN))
    assert mail("quarantine", "requeue", left[0], "--because", "the file is whole again").code == 0
    assert synced(mail, MESSAGES, most=3)
    assert in_quarantine(mail) == []


def test_hang_ups_not_counted_in_the_cursor_stop_the_mailbox(mail: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each attempt begins without a suspicion, as one does that keeps them in its connector."""
    decoded = imap_mailbox._decoded

    def forgetful(cursor: str) -> imap_mailbox._Cursor:
        found = decoded(cursor)
        found.suspects = {}
        return found

    monkeypatch.setattr(imap_mailbox, "_decoded", forgetful)
    for _ in range(5):
        assert mail("source", "run", "mail").code in (1, 75)
    assert mail.json("source", "show", "mail")["documents"] == 50
