"""
A sink in memory for the tests of the IMAP connector, and a sync that keeps page after page as ingestion does.

It refuses what no sink may be given: a document twice on a page, two documents at one place, a deletion of what is not
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reefknot.ingest.connectors.imap_mailbox import ImapMailbox
from reefknot.ingest.port import Document, FetchRequest, ItemFailure, KnownItem, Page, SourceContext
from tests.imap_servers import CERTIFICATE, PASSWORD, Mailbox

MOST_PAGES = 2000


class MemorySink:
    """The documents and the cursor of one source."""

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}
        self.cursor = ""

    def keep(self, page: Page) -> None:
        ids = [document.id for document in page.documents]
        assert len(ids) == len(set(ids)), "a document twice on one page"
        for document in page.documents:
            self.documents[document.id] = document
        for gone in page.deleted:
            del self.documents[gone]
        self.cursor = page.cursor
        places = [document.location for document in self.documents.values()]
        assert len(places) == len(set(places)), "two documents at one place"

    def _items(self) -> list[KnownItem]:
        found = [KnownItem(one.id, one.location, one.version, one.fingerprint) for one in self.documents.values()]
        return sorted(found, key=lambda item: item.location)

    async def at(self, locations: Sequence[str]) -> dict[str, KnownItem]:
        wanted = set(locations)
        return {item.location: item for item in self._items() if item.location in wanted}

    async def like(self, fingerprint: str) -> list[KnownItem]:
        return [
            KnownItem(one.id, one.location, one.version, one.fingerprint)
            for one in self.documents.values()
            if one.fingerprint == fingerprint
        ][:100]

    async def after(self, location: str, limit: int, *, prefix: str = "") -> list[KnownItem]:
        return [one for one in self._items() if one.location > location and one.location.startswith(prefix)][:limit]

    def titles(self) -> list[str]:
        return sorted(document.title for document in self.documents.values())


@dataclass
class Synced:
    """The pages of a sync, added up."""

    pages: int = 0
    documents: list[Document] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    failures: list[ItemFailure] = field(default_factory=list)
    seen: int = 0


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
    connector: ImapMailbox, sink: MemorySink, *, limit: int = 100, between: Callable[[int], object] = lambda page: None
) -> Synced:
    """Keep pages up to the last. `between` is called before each page with its number."""
    done = Synced()
    while True:
        between(done.pages)
        page = await connector.fetch(FetchRequest(sink.cursor, sink, limit))
        assert len(page.documents) <= limit
        sink.keep(page)
        done.pages += 1
        done.documents += page.documents
        done.deleted += page.deleted
        done.failures += page.failures
        done.seen += page.seen
        if page.is_last:
            await connector.close()
            return done
        assert done.pages < MOST_PAGES, "it never ends"
