"""Real IMAP servers for tests, as fixtures. A server that does not start is an error, never a skip."""

from collections.abc import Iterator

import pytest

from tools.imap_server import CERTIFICATE, PASSWORD, ImapServer, Mailbox, encoded_name, message, running_imap

__all__ = ["CERTIFICATE", "PASSWORD", "ImapServer", "Mailbox", "encoded_name", "message", "running_imap"]


@pytest.fixture(scope="session")
def imap_server() -> Iterator[ImapServer]:
    """A server that is started when a test first asks for it. Each test takes a mailbox of its own."""
    with running_imap() as server:
        yield server


@pytest.fixture
def mailbox(imap_server: ImapServer) -> Mailbox:
    return imap_server.mailbox()
