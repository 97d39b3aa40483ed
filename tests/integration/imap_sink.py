"""A strict sink in memory for the tests of the IMAP connector, and connectors of a mailbox."""

from collections.abc import Callable
from typing import Any

from reefknot.ingest.connectors.imap_mailbox import ImapMailbox
from reefknot.ingest.port import SourceContext
from tests.imap_servers import CERTIFICATE, PASSWORD, Mailbox
from tests.unit.ingest.connectors import memory_sink
from tests.unit.ingest.connectors.memory_sink import StrictSink, Synced


class MemorySink(StrictSink):
    """The documents and the cursor of one mailbox."""

    def titles(self) -> list[str]:
        return sorted(document.title for document in self.documents.values())

    def ids_by_title(self) -> dict[str, str]:
        return {document.title: document.id for document in self.documents.values()}


def connector(mailbox: Mailbox, *, port: int | None = None, password: str = PASSWORD, **settings: Any) -> ImapMailbox:
    """A connector of a mailbox, unencrypted unless said otherwise."""
    return made(
        {"host": "127.0.0.1", "port": port or mailbox.server.port, "tls": "none", "user": mailbox.user, **settings},
        password,
    )


def made(settings: dict[str, Any], password: str = PASSWORD) -> ImapMailbox:
    context = SourceContext(
        "mail", {"password": "env:MAIL_PASSWORD", **settings}, CERTIFICATE.parent, lambda reference: password
    )
    return ImapMailbox(context)


async def sync(
    connector: ImapMailbox, sink: MemorySink, *, limit: int = 100, between: Callable[[], object] = lambda: None
) -> Synced:
    """Keep pages up to the last, and close the connector."""
    done = await memory_sink.sync(connector, sink, limit=limit, between=between)
    await connector.close()
    return done
