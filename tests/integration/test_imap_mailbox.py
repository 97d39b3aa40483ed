"""The IMAP connector on a real Dovecot: deliveries, deletions, moves and new numbers, between and during syncs."""

from __future__ import annotations

import asyncio
import logging
import os
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors import imap_mailbox
from reefknot.ingest.connectors.imap_failures import ImapRefusedError
from reefknot.ingest.connectors.imap_mailbox import ImapMailbox
from reefknot.ingest.connectors.imap_protocol import FolderState, ImapConnection, ImapFolder
from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import FetchRequest
from reefknot.runtime.clocks import SystemClock
from tests.faults.proxy import NO_TROUBLE, Proxy, Trouble, Way
from tests.imap_servers import ImapServer, Mailbox, message, running_imap
from tests.integration.imap_sink import MemorySink, Synced, connector, made, sync

MANY = 2000


class RecordingProxy(Proxy):
    """A proxy that keeps what the client says."""

    def __init__(self, port: int, trouble: Trouble = NO_TROUBLE) -> None:
        super().__init__(port, trouble)
        self.heard = b""

    async def _carry(
        self,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        trouble: Trouble,
    ) -> None:
        if way is Way.UP:
            read = reader.read

            async def recorded(n: int = -1) -> bytes:
                data = await read(n)
                self.heard += data
                return data

            reader.read = recorded  # type: ignore[method-assign]
        await super()._carry(way, reader, writer, client, trouble)

    @property
    def commands(self) -> list[str]:
        lines = [line.partition(" ")[2] for line in self.heard.decode("latin-1").splitlines()]
        return [line for line in lines if line]


@asynccontextmanager
async def recording(port: int) -> AsyncIterator[RecordingProxy]:
    proxy = RecordingProxy(port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


def synced(mailbox: Mailbox, sink: MemorySink, **settings: Any) -> Synced:
    return asyncio.run(sync(connector(mailbox, **settings), sink))


def ids_by_title(sink: MemorySink) -> dict[str, str]:
    return {document.title: document.id for document in sink.documents.values()}


def test_every_message_becomes_one_document(mailbox: Mailbox) -> None:
    mailbox.deliver(*(message(number) for number in range(MANY)))
    sink = MemorySink()

    done = synced(mailbox, sink)

    assert len(done.documents) == len(sink.documents) == done.seen == MANY
    assert sink.titles() == sorted(f"Message {number}" for number in range(MANY))
    first = next(one for one in sink.documents.values() if one.title == "Message 0")
    assert first.text == "The text of message 0."
    assert first.metadata["from"] == ["Ann <ann@example.org>"]
    assert first.metadata["folder"] == "INBOX"
    assert first.modified_at == 1_700_000_000_000
    assert first.problem == ""


def test_messages_are_found_in_the_store_of_documents_and_deletions_leave_it(mailbox: Mailbox, tmp_path: Path) -> None:
    """The same with the sink of ingestion: its order of locations and its prefixes have to fit."""
    files = filled(mailbox).deliver(*(message(number) for number in range(100, 700)))

    async def run() -> list[list[str]]:
        store = await SqliteDocuments(tmp_path / "documents.db", SystemClock()).start()
        found = []
        try:
            for gone in (files[0], files[599], None):
                source, position = connector(mailbox), await store.position("mail")
                while True:
                    page = await source.fetch(FetchRequest(position.cursor, store.known("mail"), 100))
                    position = await store.keep("mail", page, after=position)
                    if page.is_last:
                        break
                await source.close()
                hits = await store.search("text message", source="mail", limit=1000)
                found.append(sorted(hit.title for hit in hits))
                if gone is not None:
                    gone.unlink()
        finally:
            await store.close()
        return found

    first, second, third = asyncio.run(run())

    assert len(first) == 606
    assert set(first) - set(second) == {"Message 100"}
    assert set(second) - set(third) == {"Message 699"}


def test_a_second_sync_asks_for_no_message_again(mailbox: Mailbox) -> None:
    """Counted on the wire."""
    mailbox.deliver(*(message(number) for number in range(50)))
    sink = MemorySink()

    async def run() -> tuple[list[str], list[str]]:
        async with recording(mailbox.server.port) as proxy:
            await sync(connector(mailbox, port=proxy.port), sink)
            first, proxy.heard = proxy.commands, b""
            await sync(connector(mailbox, port=proxy.port), sink)
            return first, proxy.commands

    first, second = asyncio.run(run())

    assert any("BODY.PEEK" in command for command in first)
    assert [command.split()[0] for command in second[-3:]] == ["LIST", "EXAMINE", "LOGOUT"]
    assert not any(word in command for command in second for word in ("FETCH", "SEARCH"))


def test_nothing_is_ever_changed_in_the_mailbox(mailbox: Mailbox) -> None:
    mailbox.deliver(*(message(number) for number in range(5)))
    mailbox.deliver(message(9, text="x" * 2_000_000))
    before = [file.name for file in mailbox.files()]

    async def run() -> list[str]:
        async with recording(mailbox.server.port) as proxy:
            await sync(connector(mailbox, port=proxy.port), MemorySink())
            return proxy.commands

    commands = asyncio.run(run())

    assert [file.name for file in mailbox.files()] == before  # a message that was seen has an S in the name of its file
    assert {command.split()[0] for command in commands} <= {
        *("CAPABILITY", "AUTHENTICATE", "LIST", "EXAMINE", "UID", "LOGOUT"),
    }
    assert all("BODY.PEEK[" in command for command in commands if "BODY" in command)


def test_deliveries_and_deletions_are_seen_by_the_next_sync(mailbox: Mailbox) -> None:
    files = mailbox.deliver(*(message(number) for number in range(30)))
    sink = MemorySink()
    synced(mailbox, sink)
    for file in (files[0], files[7], files[29]):
        file.unlink()
    mailbox.deliver(message(100))

    done = synced(mailbox, sink)

    assert [document.title for document in done.documents] == ["Message 100"]
    assert len(done.deleted) == 3
    assert sink.titles() == sorted(f"Message {n}" for n in (*range(1, 7), *range(8, 29), 100))
    assert synced(mailbox, sink) == Synced(pages=1)


def test_as_many_deliveries_as_deletions_do_not_hide_them(mailbox: Mailbox) -> None:
    """The number of messages is the same as before."""
    files = mailbox.deliver(*(message(number) for number in range(10)))
    sink = MemorySink()
    synced(mailbox, sink)
    files[3].unlink()
    files[4].unlink()
    mailbox.deliver(message(100), message(101))

    assert len(synced(mailbox, sink).deleted) == 2


def test_a_moved_message_keeps_its_id_and_a_copy_gets_its_own(mailbox: Mailbox) -> None:
    first, second = mailbox.deliver(message(1), message(2))
    mailbox.make("Archive/2024")
    sink = MemorySink()
    synced(mailbox, sink)
    before = ids_by_title(sink)
    mailbox.move(first, "Archive/2024")
    mailbox.deliver(second.read_bytes(), folder="Archive/2024")

    done = synced(mailbox, sink)

    assert done.deleted == []
    assert len(sink.documents) == 3
    moved = sink.documents[before["Message 1"]]
    assert moved.metadata["folder"] == "Archive/2024"
    assert sink.documents[before["Message 2"]].metadata["folder"] == "INBOX"


@pytest.mark.parametrize(("old", "new"), [("A", "Z"), ("Z", "A")])
def test_a_renamed_folder_keeps_its_documents(mailbox: Mailbox, old: str, new: str) -> None:
    mailbox.deliver(*(message(number) for number in range(20)), folder=old)
    sink = MemorySink()
    synced(mailbox, sink)
    before = ids_by_title(sink)
    mailbox.path(old).rename(mailbox.path(new))

    assert synced(mailbox, sink).deleted == []

    assert ids_by_title(sink) == before
    assert {document.metadata["folder"] for document in sink.documents.values()} == {new}


def test_the_documents_of_a_deleted_folder_are_deleted(mailbox: Mailbox) -> None:
    mailbox.deliver(message(1), folder="Old")
    mailbox.deliver(message(2), folder="Old/Below")
    mailbox.deliver(message(3))
    sink = MemorySink()
    synced(mailbox, sink)
    mailbox.drop("Old")

    assert len(synced(mailbox, sink).deleted) == 1
    assert sink.titles() == ["Message 2", "Message 3"]


# ---- new numbers -----------------------------------------------------------------------------------------------------


def renumbered(mailbox: Mailbox, sink: MemorySink) -> tuple[dict[str, str], Synced]:
    """Sync, let UIDVALIDITY change while messages come and go, and sync again."""
    files = mailbox.deliver(*(message(number) for number in range(250)), message(0))  # one of them twice
    synced(mailbox, sink)
    before = ids_by_title(sink)
    mailbox.renumber()
    files[5].unlink()
    mailbox.deliver(message(1000))
    return before, synced(mailbox, sink)


def test_documents_keep_their_ids_when_uidvalidity_changes(mailbox: Mailbox) -> None:
    sink = MemorySink()
    before, done = renumbered(mailbox, sink)

    after = ids_by_title(sink)
    assert len(sink.documents) == 251
    assert len(done.deleted) == 1
    same = [title for title in before if title in after and title != "Message 0"]
    assert len(same) == 248
    assert all(before[title] == after[title] for title in same)


def test_a_connector_that_does_not_look_for_the_old_ids_is_noticed(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""

    async def nothing_is_gone(*_: object) -> set[str]:
        return set()

    monkeypatch.setattr(ImapMailbox, "_gone", nothing_is_gone)
    sink = MemorySink()
    before, done = renumbered(mailbox, sink)

    assert len(done.deleted) > 1
    assert set(before.values()).isdisjoint(ids_by_title(sink).values())


def test_uidvalidity_may_change_during_a_sync(mailbox: Mailbox) -> None:
    mailbox.deliver(*(message(number) for number in range(60)))
    sink = MemorySink()

    async def run() -> None:
        for page in range(3):
            source = connector(mailbox)
            sink.keep(await source.fetch(FetchRequest(sink.cursor, sink, 10)))
            await source.close()
            if page == 1:
                mailbox.renumber()
        await sync(connector(mailbox), sink, limit=10)

    asyncio.run(run())

    assert sink.titles() == sorted(f"Message {number}" for number in range(60))


# ---- pages and cursors -----------------------------------------------------------------------------------------------


def lost_pages(mailbox: Mailbox, *, keeps_cursor: bool) -> MemorySink:
    """A sync in which every other page is lost after it was fetched, with the process; messages move meanwhile."""
    files = mailbox.deliver(*(message(number) for number in range(90)))
    sink = MemorySink()

    async def run() -> None:
        for number in range(1000):
            source = connector(mailbox)
            page = await source.fetch(FetchRequest(sink.cursor, sink, 7))
            await source.close()
            if number % 2:
                sink.keep(page)
                if page.is_last:
                    return
            elif keeps_cursor:
                sink.cursor = page.cursor
            if number in (3, 9):
                mailbox.move(files.pop(), "Archive")
                mailbox.move(files.pop(0), "Zoo")
        raise AssertionError("it never ends")

    asyncio.run(run())
    asyncio.run(sync(connector(mailbox), sink, limit=7))
    return sink


def test_pages_that_were_lost_are_fetched_again_and_no_document_is_there_twice(mailbox: Mailbox) -> None:
    sink = lost_pages(mailbox, keeps_cursor=False)

    assert sink.titles() == sorted(f"Message {number}" for number in range(90))


def test_a_cursor_ahead_of_its_documents_is_noticed(mailbox: Mailbox) -> None:
    """The control of the test above."""
    sink = lost_pages(mailbox, keeps_cursor=True)

    assert len(sink.documents) < 90


def test_messages_come_and_go_between_the_pages_of_a_sync(mailbox: Mailbox) -> None:
    files = mailbox.deliver(*(message(number) for number in range(100)))
    sink = MemorySink()

    def between(page: int) -> None:
        if 0 < page <= 5:
            files.pop(0).unlink()
            mailbox.move(files.pop(), "Archive")
            mailbox.deliver(message(1000 + page))

    asyncio.run(sync(connector(mailbox), sink, limit=10, between=between))
    synced(mailbox, sink)

    kept = [*range(5, 100), *range(1001, 1006)]
    assert sink.titles() == sorted(f"Message {number}" for number in kept)
    assert synced(mailbox, sink) == Synced(pages=1)


def test_two_requests_at_once_share_one_connection(mailbox: Mailbox) -> None:
    mailbox.deliver(*(message(number) for number in range(20)))
    sink = MemorySink()
    synced(mailbox, sink)
    places = [document.location for document in sink.documents.values()]

    async def run() -> int:
        async with recording(mailbox.server.port) as proxy:
            source = connector(mailbox, port=proxy.port)
            found = await asyncio.gather(*(source.fetch_item(place, sink) for place in places))
            await source.close()
            assert {document.id for document in found if document} == set(sink.documents)
            return proxy.connections

    assert asyncio.run(run()) == 1


def test_an_item_that_is_gone_is_none(mailbox: Mailbox) -> None:
    (file,) = mailbox.deliver(message(1))
    sink = MemorySink()
    synced(mailbox, sink)
    (place,) = (document.location for document in sink.documents.values())
    file.unlink()

    async def run(location: str) -> object:
        source = connector(mailbox)
        try:
            return await source.fetch_item(location, sink)
        finally:
            await source.close()

    for location in (place, place.replace("INBOX", "Gone"), place.replace("VALIDITY=1", "VALIDITY=2"), "nonsense"):
        assert asyncio.run(run(location)) is None


def test_a_forgotten_cursor_reads_all_folders_and_fetches_only_what_changed(mailbox: Mailbox) -> None:
    mailbox.deliver(*(message(number) for number in range(20)), message(50, text="long " * 1000))
    sink = MemorySink()
    synced(mailbox, sink)
    sink.cursor = ""

    again = synced(mailbox, sink)
    smaller = synced(mailbox, sink, max_message_bytes=1024)

    assert (again.seen, again.documents) == (21, [])
    assert [document.title for document in smaller.documents] == ["Message 50"]
    assert smaller.documents[0].text == ""


def test_a_cursor_of_somebody_else_is_refused(mailbox: Mailbox) -> None:
    with pytest.raises(SourceError, match="forget it") as caught:
        asyncio.run(connector(mailbox).fetch(FetchRequest("nonsense", MemorySink())))
    assert caught.value.failure_type is FailureType.PERMANENT


# ---- large and broken messages ---------------------------------------------------------------------------------------


def test_large_messages_come_in_chunks_and_too_large_ones_by_their_headers(mailbox: Mailbox) -> None:
    words = "words and more\r\n" * 100_000
    mailbox.deliver(message(1), message(2, text=words), message(3, text=words * 2), message(4))
    sink = MemorySink()
    synced(mailbox, sink, max_message_bytes=2_000_000)
    found = {document.title: document for document in sink.documents.values()}

    assert found["Message 2"].text.count("words and more") > 60_000
    assert found["Message 2"].metadata["size"] == len(message(2, text=words))
    assert found["Message 3"].text == ""
    assert "more than max_message_bytes (2000000): only its headers were read" in found["Message 3"].problem
    assert found["Message 4"].problem == ""


def test_a_message_that_cannot_be_parsed_is_kept_with_its_problem(mailbox: Mailbox) -> None:
    many = ", ".join(f"user{number}@example.org" for number in range(32_000))
    mailbox.deliver(f"To: {many}\r\nSubject: party\r\n\r\nCome!\r\n".encode(), b"", b"\x00\xff" * 100)
    sink = MemorySink()
    synced(mailbox, sink)

    assert len(sink.documents) == 3
    party = next(document for document in sink.documents.values() if document.title == "party")
    assert len(party.metadata["to"]) == 100
    assert "To has more than 100 addresses" in party.problem


def test_a_message_at_which_the_server_hangs_up_does_not_hold_up_the_others(mailbox: Mailbox) -> None:
    """The name of its file says another size than it has: Dovecot begins to send it, and ends the connection."""
    mailbox.deliver(message(1), message(2))
    broken = mailbox.path("INBOX") / "cur" / f"{1_700_000_000 + 900_000}.M5.test,S=5000,W=5100:2,"
    broken.write_bytes(message(3))
    os.chmod(broken, 0o644)
    mailbox.deliver(message(4))
    sink = MemorySink()
    kinds = []

    async def run() -> Synced:
        source = connector(mailbox)
        for _ in range(5):
            try:
                return await sync(source, sink)
            except SourceError as error:
                kinds.append(error.failure_type)
        raise AssertionError(f"it never gets on: {kinds}")

    done = asyncio.run(run())

    assert kinds == [FailureType.TRANSIENT] * 2
    assert sink.titles() == ["Message 1", "Message 2", "Message 4"]
    assert len(done.failures) == 1
    assert synced(mailbox, sink) == Synced(pages=1)


def test_a_refused_message_becomes_a_failure_and_the_others_are_kept(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox.deliver(*(message(number) for number in range(10)))
    content = ImapConnection.content

    async def refused(self: ImapConnection, uids: list[int], section: str, **more: int) -> dict[int, bytes]:
        if 4 in uids:
            raise ImapRefusedError("refused FETCH: [SERVERBUG] Internal error", FailureType.TRANSIENT)
        return await content(self, uids, section, **more)

    monkeypatch.setattr(ImapConnection, "content", refused)
    sink = MemorySink()
    done = synced(mailbox, sink)

    assert len(done.documents) == 9
    (failure,) = done.failures
    assert failure.location.endswith(";UID=0000000004")
    monkeypatch.undo()
    assert asyncio.run(_item(mailbox, failure.location, sink)) == "Message 3"


async def _item(mailbox: Mailbox, location: str, sink: MemorySink) -> str:
    source = connector(mailbox)
    document = await source.fetch_item(location, sink)
    await source.close()
    assert document is not None
    return document.title


# ---- folders ---------------------------------------------------------------------------------------------------------

NAMES = [
    "INBOX",
    "Entwürfe & mehr",
    'with "quotes" and \\',
    "日本語/Unterordner",
    "line\nbreak",
    "Trash",
    "Junk",
    "Drafts",
]


def filled(mailbox: Mailbox) -> Mailbox:
    for number, name in enumerate(NAMES):
        mailbox.deliver(message(number), folder=name)
    return mailbox


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({}, [0, 1, 2, 3, 4, 7]),  # Trash and Junk are named as such by the server, Drafts is not
        ({"exclude": ["Entw*", "日本語/*"]}, [0, 2, 4, 7]),
        ({"folders": ["inbox", "Trash"]}, [0, 5]),
        ({"folders": ["*"], "exclude": ["INBOX"]}, [1, 2, 3, 4, 5, 6, 7]),
        ({"folders": ['with "quotes" and \\']}, [2]),
    ],
)
def test_folders_are_chosen_by_their_names_and_their_use(
    mailbox: Mailbox, settings: dict[str, list[str]], numbers: list[int]
) -> None:
    sink = MemorySink()
    synced(filled(mailbox), sink, **settings)

    assert sink.titles() == [f"Message {number}" for number in numbers]


def test_the_documents_of_a_folder_that_is_left_out_now_are_deleted(mailbox: Mailbox) -> None:
    sink = MemorySink()
    synced(filled(mailbox), sink)
    synced(mailbox, sink, folders=["INBOX"])

    assert sink.titles() == ["Message 0"]


def test_only_messages_since_a_date_are_read(mailbox: Mailbox) -> None:
    old, _ = mailbox.deliver(message(1), message(2))
    os.utime(old, (1_600_000_000, 1_600_000_000))
    sink = MemorySink()
    synced(mailbox, sink, since="2022-01-01")
    assert sink.titles() == ["Message 2"]

    synced(mailbox, sink)  # without a date the old one is read, too
    assert sink.titles() == ["Message 1", "Message 2"]


def test_a_folder_that_is_not_there_is_a_permanent_failure_that_names_those_that_are(mailbox: Mailbox) -> None:
    mailbox.make("Archive")

    with pytest.raises(SourceError, match="no folder 'Arhive'; it has Archive, INBOX") as caught:
        synced(mailbox, MemorySink(), folders=["INBOX", "Arhive"])

    assert caught.value.failure_type is FailureType.PERMANENT


# ---- logging in ------------------------------------------------------------------------------------------------------


def settings(server: ImapServer, user: str, tls: str, **more: object) -> dict[str, object]:
    port = server.tls_port if tls == "implicit" else server.port
    return {"host": "localhost", "port": port, "tls": tls, "tls_ca": "localhost.pem", "user": user, **more}


@pytest.mark.parametrize("tls", ["implicit", "starttls"])
def test_a_mailbox_is_read_over_tls(mailbox: Mailbox, tls: str) -> None:
    mailbox.deliver(*(message(number) for number in range(300)), message(300, text="words " * 500_000))
    sink = MemorySink()
    asyncio.run(sync(made(settings(mailbox.server, mailbox.user, tls)), sink))

    assert len(sink.documents) == 301


@pytest.mark.parametrize("tls", ["implicit", "starttls"])
def test_a_certificate_that_is_not_trusted_is_a_permanent_failure(mailbox: Mailbox, tls: str) -> None:
    without = {**settings(mailbox.server, mailbox.user, tls), "tls_ca": None}

    with pytest.raises(SourceError, match="name the file with the authority's certificate in tls_ca") as caught:
        asyncio.run(made(without).test())
    assert caught.value.failure_type is FailureType.PERMANENT


def test_a_certificate_of_another_host_is_a_permanent_failure(mailbox: Mailbox) -> None:
    other = {**settings(mailbox.server, mailbox.user, "implicit"), "host": "127.0.0.1"}

    with pytest.raises(SourceError, match="is not trusted") as caught:
        asyncio.run(made(other).test())
    assert caught.value.failure_type is FailureType.PERMANENT


def test_a_file_of_certificates_that_is_not_there_is_a_permanent_failure(mailbox: Mailbox) -> None:
    wrong = settings(mailbox.server, mailbox.user, "implicit", tls_ca="no-such.pem")

    with pytest.raises(SourceError, match=r"tls_ca: .*no-such\.pem cannot be read") as caught:
        asyncio.run(made(wrong).test())
    assert caught.value.failure_type is FailureType.PERMANENT


def test_a_port_without_tls_is_a_permanent_failure_that_names_the_ports(mailbox: Mailbox) -> None:
    wrong = {**settings(mailbox.server, mailbox.user, "implicit"), "port": mailbox.server.port}

    with pytest.raises(SourceError, match="993 goes with implicit") as caught:
        asyncio.run(made(wrong).test())
    assert caught.value.failure_type is FailureType.PERMANENT


def test_a_wrong_password_is_a_permanent_failure_that_says_what_to_do(mailbox: Mailbox) -> None:
    with pytest.raises(SourceError, match="app password") as caught:
        asyncio.run(connector(mailbox, password="wrong horse").test())
    assert caught.value.failure_type is FailureType.PERMANENT
    assert "wrong horse" not in str(caught.value)


@pytest.mark.parametrize("password", ['quo"te\\', "ünï cødé", "a{3}", "x" * 200])
def test_passwords_with_unusual_letters_work(imap_server: ImapServer, password: str) -> None:
    assert "logged in" in asyncio.run(connector(imap_server.mailbox(password), password=password).test())


def test_too_many_connections_cool_the_source() -> None:
    """Dovecot's own limit."""

    async def run(mailbox: Mailbox) -> None:
        first, second = connector(mailbox), connector(mailbox)
        await first.fetch(FetchRequest("", MemorySink(), 1))
        try:
            with pytest.raises(SourceError, match="sync less often") as caught:
                await second.test()
            assert caught.value.failure_type is FailureType.RATE_LIMITED
        finally:
            await first.close()

    with running_imap(connections=1) as server:
        mailbox = server.mailbox()
        mailbox.deliver(message(1), message(2))
        asyncio.run(run(mailbox))


def test_a_test_of_the_source_tells_the_folders_and_reads_nothing(mailbox: Mailbox) -> None:
    filled(mailbox)

    told = asyncio.run(connector(mailbox).test())

    assert f"logged in as {mailbox.user}; folders to read: " in told
    assert "INBOX" in told
    assert "\n" not in told


def test_the_password_is_in_no_document_error_log_or_cursor(
    imap_server: ImapServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "canary-3fe1c77ab0"
    mailbox = imap_server.mailbox(canary)
    filled(mailbox)
    sink = MemorySink()
    texts = [asyncio.run(connector(mailbox, password=canary).test())]
    asyncio.run(sync(connector(mailbox, password=canary), sink))
    with pytest.raises(SourceError) as caught:
        asyncio.run(connector(mailbox, password=canary + "x").test())
    texts += [repr(caught.value), str(caught.value), sink.cursor, caplog.text]
    texts += [msgspec.json.encode(document).decode() for document in sink.documents.values()]

    assert not leaks(canary, texts)
    assert leaks(canary, [f"a {b64encode(canary.encode()).decode()} b"])  # the control


def leaks(secret: str, texts: list[str]) -> list[str]:
    forms = [
        secret,
        b64encode(secret.encode()).decode().rstrip("="),
        b64encode(f"\0u\0{secret}".encode()).decode()[8:20],
    ]
    return [text for text in texts if any(form in text for form in forms)]


def test_the_server_of_the_tests_leaves_nothing_behind() -> None:
    with running_imap() as server:
        folder: Path = server.folder
        assert folder.exists()
    assert not folder.exists()


def test_more_folders_than_a_cursor_can_name_are_refused(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imap_mailbox, "MOST_CURSOR", 300)

    with pytest.raises(SourceError, match="choose some with folders or exclude") as caught:
        synced(filled(mailbox), MemorySink())
    assert caught.value.failure_type is FailureType.PERMANENT


# ---- many moves ------------------------------------------------------------------------------------------------------

MOVED = 300


def moved_with(mailbox: Mailbox, examined: list[str]) -> MemorySink:
    """The documents after all messages were moved to another folder, which is read in pages of 20."""
    sink = MemorySink()
    files = mailbox.deliver(*(message(number) for number in range(MOVED)))
    synced(mailbox, sink)
    ids = set(sink.documents)
    for file in files:
        mailbox.move(file, "Archive")
    examined.clear()
    done = asyncio.run(sync(connector(mailbox), sink, limit=20))
    assert set(sink.documents) == ids
    assert {document.metadata["folder"] for document in sink.documents.values()} == {"Archive"}
    assert (len(done.documents), done.deleted) == (MOVED, [])
    return sink


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of folders in the order in which they are opened."""
    names, examine = list[str](), ImapConnection.examine

    async def counted(self: ImapConnection, folder: ImapFolder) -> FolderState:
        names.append(folder.name)
        return await examine(self, folder)

    monkeypatch.setattr(ImapConnection, "examine", counted)
    return names


def test_many_moves_open_each_folder_a_few_times_and_not_for_every_page(mailbox: Mailbox, examined: list[str]) -> None:
    """Opening a large folder, and the first fetch behind it, is most of the work of a sync after many moves."""
    moved_with(mailbox, examined)

    assert len(examined) <= 7, examined


def test_a_look_at_the_old_folder_for_every_page_opens_two_folders_for_every_page(
    mailbox: Mailbox, examined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(ImapMailbox, "_alive_of_many", ImapMailbox._alive)
    moved_with(mailbox, examined)

    assert len(examined) >= 2 * MOVED // 20


def test_a_message_that_stays_is_a_copy_and_keeps_its_id_on_every_page(mailbox: Mailbox) -> None:
    """Half of the messages are moved and half are copied, page by page mixed."""
    sink = MemorySink()
    files = mailbox.deliver(*(message(number) for number in range(60)))
    synced(mailbox, sink)
    before = {document.title: document.id for document in sink.documents.values()}
    for number, file in enumerate(files):
        if number % 2:
            mailbox.move(file, "Archive")
        else:
            mailbox.deliver(message(number), folder="Archive")
    asyncio.run(sync(connector(mailbox), sink, limit=7))

    assert len(sink.documents) == 90
    for number in range(60):
        kept = sink.documents[before[f"Message {number}"]]
        assert kept.metadata["folder"] == ("Archive" if number % 2 else "INBOX")
