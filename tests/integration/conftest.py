"""The servers that the integration tests share, one of each kind for the whole session, and peers on NATS."""

from tests.imap_servers import imap_server, mailbox
from tests.integration.peers import folder, peer
from tests.integration.postgres import postgres

__all__ = ["folder", "imap_server", "mailbox", "peer", "postgres"]
