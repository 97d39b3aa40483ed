"""The IMAP connector on a real Dovecot: deliveries, deletions, moves and new numbers, between and during syncs."""

import asyncio
import logging
import os
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reefknot.core.failure import FailureType
from reefknot.ingest.connectors import imap_mailbox
from reefknot.ingest.connectors.imap_failures import ImapRefusedError
from reefknot.ingest.connectors.imap_mailbox import ImapMailbox
from reefknot.ingest.connectors.imap_protocol import FolderState, ImapConnection, ImapFolder
from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import FetchRequest, Position
from reefknot.runtime.clocks import SystemClock
from tests.faults.proxy import proxied
from tests.imap_servers import ImapServer, Mailbox, message, running_imap
from tests.integration.imap_sink import MemorySink, connector, made, sync
from tests.unit.ingest.connectors import memory_sink
from tests.unit.ingest.connectors.memory_sink import Synced, failing, one_page

pytestmark = pytest.mark.real_time

MANY = 2000


def commands_in(heard: bytes | bytearray) -> list[str]:
    """The commands that a client sent."""
    lines = [line.partition(" ")[2] for line in heard.decode("latin-1").splitlines()]
    return [line for line in lines if line]


@pytest.fixture
def sink() -> MemorySink:
    return MemorySink()


async def synced(mailbox: Mailbox, sink: MemorySink, *, limit: int = 100, **settings: Any) -> Synced:
    return await sync(connector(mailbox, **settings), sink, limit=limit)


async def kept(mailbox: Mailbox, sink: MemorySink, number: int, *, folder: str = "INBOX") -> list[Path]:
    """The files of so many messages, which were delivered and kept."""
    files = mailbox.deliver(*map(message, range(number)), folder=folder)
    await synced(mailbox, sink)
    return files


def titles(numbers: Iterable[int]) -> list[str]:
    return sorted(f"Message {number}" for number in numbers)


def folders_of(sink: MemorySink) -> set[str]:
    return {document.metadata["folder"] for document in sink.documents.values()}


def is_idle(done: Synced) -> bool:
    """Whether a sync looked at no message."""
    return (len(done), done.documents, done.deleted, done.failures, done.seen) == (1, [], [], {}, 0)


async def test_every_message_becomes_one_document(mailbox: Mailbox, sink: MemorySink) -> None:
    mailbox.deliver(*map(message, range(MANY)))
    done = await synced(mailbox, sink)
    assert len(done.documents) == len(sink.documents) == done.seen == MANY
    assert sink.titles() == titles(range(MANY))
    first = sink.documents[sink.ids_by_title()["Message 0"]]
    assert (first.text, first.modified_at, first.problem) == ("The text of message 0.", 1_700_000_000_000, "")
    assert (first.metadata["from"], first.metadata["folder"]) == (["Ann <ann@example.org>"], "INBOX")


async def test_messages_are_found_in_the_document_store_until_they_go(mailbox: Mailbox, tmp_path: Path) -> None:
    """The same with the sink of ingestion: its order of locations and its prefixes have to fit."""
    files = filled(mailbox).deliver(*map(message, range(100, 700)))
    store = await SqliteDocuments(tmp_path / "documents.db", SystemClock()).start()
    found = []
    try:
        for gone in (files[0], files[599], None):
            source = connector(mailbox)
            await memory_sink.sync(source, store)
            await source.close()
            hits = await store.search("text message", source="s", limit=1000)
            found.append({hit.title for hit in hits})
            if gone is not None:
                gone.unlink()
    finally:
        await store.close()
    first, second, third = found

    assert len(first) == 606
    assert (first - second, second - third) == ({"Message 100"}, {"Message 699"})


async def test_a_second_sync_asks_for_no_message_again(mailbox: Mailbox, sink: MemorySink) -> None:
    """Counted on the wire."""
    mailbox.deliver(*map(message, range(50)))
    async with proxied(mailbox.server.port) as proxy:
        await sync(connector(mailbox, port=proxy.port), sink)
        length = len(proxy.heard)
        await sync(connector(mailbox, port=proxy.port), sink)
        first, second = commands_in(proxy.heard[:length]), commands_in(proxy.heard[length:])

    assert any("BODY.PEEK" in command for command in first)
    assert [command.split()[0] for command in second[-3:]] == ["LIST", "EXAMINE", "LOGOUT"]
    assert not any(word in command for command in second for word in ("FETCH", "SEARCH"))


async def test_nothing_is_ever_changed_in_the_mailbox(mailbox: Mailbox, sink: MemorySink) -> None:
    mailbox.deliver(*map(message, range(5)), message(9, text="x" * 2_000_000))
    before = [file.name for file in mailbox.files()]
    async with proxied(mailbox.server.port) as proxy:
        await sync(connector(mailbox, port=proxy.port), sink)
        commands = commands_in(proxy.heard)

    assert [file.name for file in mailbox.files()] == before  # a message that was seen has an S in the name of its file
    accepted = {"CAPABILITY", "AUTHENTICATE", "LIST", "EXAMINE", "UID", "LOGOUT"}
    assert {command.split()[0] for command in commands} <= accepted
    assert all("BODY.PEEK[" in command for command in commands if "BODY" in command)


async def test_deliveries_and_deletions_are_seen_by_the_next_sync(mailbox: Mailbox, sink: MemorySink) -> None:
    files = await kept(mailbox, sink, 30)
    for file in (files[0], files[7], files[29]):
        file.unlink()
    mailbox.deliver(message(100))
    done = await synced(mailbox, sink)

    assert [document.title for document in done.documents] == ["Message 100"]
    assert len(done.deleted) == 3
    assert sink.titles() == titles((*range(1, 7), *range(8, 29), 100))
    assert is_idle(await synced(mailbox, sink))


async def test_as_many_deliveries_as_deletions_do_not_hide_them(mailbox: Mailbox, sink: MemorySink) -> None:
    """The number of messages is the same as before."""
    files = await kept(mailbox, sink, 10)
    files[3].unlink()
    files[4].unlink()
    mailbox.deliver(message(100), message(101))
    assert len((await synced(mailbox, sink)).deleted) == 2


async def test_a_moved_message_keeps_its_id_and_a_copy_gets_its_own(mailbox: Mailbox, sink: MemorySink) -> None:
    mailbox.make("Archive/2024")
    first, second = await kept(mailbox, sink, 2)
    before = sink.ids_by_title()
    mailbox.move(first, "Archive/2024")
    mailbox.deliver(second.read_bytes(), folder="Archive/2024")

    assert (await synced(mailbox, sink)).deleted == []
    assert len(sink.documents) == 3
    assert sink.documents[before["Message 0"]].metadata["folder"] == "Archive/2024"
    assert sink.documents[before["Message 1"]].metadata["folder"] == "INBOX"


@pytest.mark.parametrize(("old", "new"), [("A", "Z"), ("Z", "A")])
async def test_a_renamed_folder_keeps_its_documents(mailbox: Mailbox, sink: MemorySink, old: str, new: str) -> None:
    await kept(mailbox, sink, 20, folder=old)
    before = sink.ids_by_title()
    mailbox.path(old).rename(mailbox.path(new))
    assert (await synced(mailbox, sink)).deleted == []
    assert (sink.ids_by_title(), folders_of(sink)) == (before, {new})


async def test_the_documents_of_a_deleted_folder_are_deleted(mailbox: Mailbox, sink: MemorySink) -> None:
    for number, folder in enumerate(("INBOX", "Old", "Old/Below")):
        mailbox.deliver(message(number), folder=folder)
    await synced(mailbox, sink)
    mailbox.drop("Old")
    assert len((await synced(mailbox, sink)).deleted) == 1
    assert sink.titles() == titles((0, 2))


@pytest.mark.parametrize("is_control", [False, True], ids=["", "control: without the look for the old ids"])
async def test_documents_keep_their_ids_when_uidvalidity_changes(
    mailbox: Mailbox, sink: MemorySink, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    """While messages come and go."""

    async def nothing_is_gone(*_: object) -> set[str]:
        return set()

    if is_control:
        monkeypatch.setattr(ImapMailbox, "_gone", nothing_is_gone)
    files = mailbox.deliver(*map(message, range(250)), message(0))  # one of them twice
    await synced(mailbox, sink)
    before = sink.ids_by_title()
    mailbox.renumber()
    files[5].unlink()
    mailbox.deliver(message(1000))
    done = await synced(mailbox, sink)

    if is_control:
        assert len(done.deleted) > 1
        assert set(before.values()).isdisjoint(sink.documents)
        return
    after = sink.ids_by_title()
    assert (len(sink.documents), len(done.deleted)) == (251, 1)
    same = [title for title in before if title in after and title != "Message 0"]
    assert len(same) == 248
    assert all(before[title] == after[title] for title in same)


async def test_uidvalidity_may_change_during_a_sync(mailbox: Mailbox, sink: MemorySink) -> None:
    mailbox.deliver(*map(message, range(60)))
    for page in range(3):
        source = connector(mailbox)
        await one_page(source, sink, 10)
        await source.close()
        if page == 1:
            mailbox.renumber()
    await synced(mailbox, sink, limit=10)

    assert sink.titles() == titles(range(60))


@pytest.mark.parametrize("is_control", [False, True], ids=["", "control: the cursor is ahead of its documents"])
async def test_lost_pages_are_fetched_without_doubles(mailbox: Mailbox, sink: MemorySink, is_control: bool) -> None:
    """Every other page is lost after it was fetched, with the process; messages move meanwhile."""
    files = mailbox.deliver(*map(message, range(90)))
    for number in range(1000):
        source = connector(mailbox)
        page = await source.fetch(FetchRequest(sink.cursor, sink, 7))
        await source.close()
        if number % 2:
            await sink.keep("s", page, after=sink.place)
            if page.is_last:
                break
        elif is_control:
            sink.place = Position(page.cursor)
        if number in (3, 9):
            mailbox.move(files.pop(), "Archive")
            mailbox.move(files.pop(0), "Zoo")
    else:
        raise AssertionError("it never ends")
    await synced(mailbox, sink, limit=7)

    assert len(sink.documents) < 90 if is_control else sink.titles() == titles(range(90))


async def test_messages_come_and_go_between_the_pages_of_a_sync(mailbox: Mailbox, sink: MemorySink) -> None:
    files = mailbox.deliver(*map(message, range(100)))
    arrivals = iter(range(1000, 1005))

    def between() -> None:
        if arrival := next(arrivals, None):
            files.pop(0).unlink()
            mailbox.move(files.pop(), "Archive")
            mailbox.deliver(message(arrival))

    await sync(connector(mailbox), sink, limit=10, between=between)
    await synced(mailbox, sink)

    assert sink.titles() == titles((*range(5, 100), *range(1000, 1005)))
    assert is_idle(await synced(mailbox, sink))


async def test_two_requests_at_once_share_one_connection(mailbox: Mailbox, sink: MemorySink) -> None:
    await kept(mailbox, sink, 20)
    async with proxied(mailbox.server.port) as proxy:
        source = connector(mailbox, port=proxy.port)
        found = await asyncio.gather(*(source.fetch_item(place, sink) for place in sink.ids()))
        await source.close()
        assert {document.id for document in found if document} == set(sink.documents)
        assert proxy.connections == 1


async def test_an_item_that_is_gone_is_none(mailbox: Mailbox, sink: MemorySink) -> None:
    (file,) = await kept(mailbox, sink, 1)
    (place,) = sink.ids()
    file.unlink()
    source = connector(mailbox)
    for location in (place, place.replace("INBOX", "Gone"), place.replace("VALIDITY=1", "VALIDITY=2"), "nonsense"):
        assert await source.fetch_item(location, sink) is None
    await source.close()


async def test_a_forgotten_cursor_reads_all_folders_and_fetches_changes(mailbox: Mailbox, sink: MemorySink) -> None:
    mailbox.deliver(*map(message, range(20)), message(50, text="long " * 1000))
    await synced(mailbox, sink)
    sink.place = Position()
    again = await synced(mailbox, sink)
    smaller = await synced(mailbox, sink, max_message_bytes=1024)
    assert (again.seen, again.documents) == (21, [])
    assert [(document.title, document.text) for document in smaller.documents] == [("Message 50", "")]


async def test_a_cursor_of_somebody_else_is_refused(mailbox: Mailbox, sink: MemorySink) -> None:
    with failing("forget it"):
        await connector(mailbox).fetch(FetchRequest("nonsense", sink))


async def test_large_messages_come_in_chunks_and_larger_ones_by_headers(mailbox: Mailbox, sink: MemorySink) -> None:
    words = "words and more\r\n" * 100_000
    mailbox.deliver(message(1), message(2, text=words), message(3, text=words * 2), message(4))
    await synced(mailbox, sink, max_message_bytes=2_000_000)
    found = {document.title: document for document in sink.documents.values()}

    assert found["Message 2"].text.count("words and more") > 60_000
    assert found["Message 2"].metadata["size"] == len(message(2, text=words))
    assert found["Message 3"].text == ""
    assert "more than max_message_bytes (2000000): only its headers were read" in found["Message 3"].problem
    assert found["Message 4"].problem == ""


async def test_a_message_that_cannot_be_parsed_is_kept_with_its_problem(mailbox: Mailbox, sink: MemorySink) -> None:
    many = ", ".join(f"user{number}@example.org" for number in range(32_000))
    mailbox.deliver(f"To: {many}\r\nSubject: party\r\n\r\nCome!\r\n".encode(), b"", b"\x00\xff" * 100)
    await synced(mailbox, sink)
    assert len(sink.documents) == 3
    party = sink.documents[sink.ids_by_title()["party"]]
    assert len(party.metadata["to"]) == 100
    assert "To has more than 100 addresses" in party.problem


async def test_a_refused_message_becomes_a_failure_and_the_others_are_kept(
    mailbox: Mailbox, sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = ImapConnection.content

    async def refused(self: ImapConnection, uids: list[int], section: str, **more: int) -> dict[int, bytes]:
        if 4 in uids:
            raise ImapRefusedError("refused FETCH: [SERVERBUG] Internal error", FailureType.TRANSIENT)
        return await content(self, uids, section, **more)

    monkeypatch.setattr(ImapConnection, "content", refused)
    mailbox.deliver(*map(message, range(10)))
    done = await synced(mailbox, sink)

    assert len(done.documents) == 9
    (location,) = done.failures
    assert location.endswith(";UID=0000000004")
    monkeypatch.undo()
    source = connector(mailbox)
    document = await source.fetch_item(location, sink)
    await source.close()
    assert document is not None
    assert document.title == "Message 3"


QUOTED = 'with "quotes" and \\'
NAMES = ["INBOX", "Entwürfe & mehr", QUOTED, "日本語/Unterordner", "line\nbreak", "Trash", "Junk", "Drafts"]


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
        ({"folders": [QUOTED]}, [2]),
    ],
)
async def test_folders_are_chosen_by_their_names_and_their_use(
    mailbox: Mailbox, sink: MemorySink, settings: dict[str, Any], numbers: list[int]
) -> None:
    await synced(filled(mailbox), sink, **settings)
    assert sink.titles() == titles(numbers)


async def test_the_documents_of_a_folder_that_is_left_out_now_are_deleted(mailbox: Mailbox, sink: MemorySink) -> None:
    await synced(filled(mailbox), sink)
    await synced(mailbox, sink, folders=["INBOX"])
    assert sink.titles() == ["Message 0"]


async def test_only_messages_since_a_date_are_read(mailbox: Mailbox, sink: MemorySink) -> None:
    old, _ = mailbox.deliver(message(1), message(2))
    os.utime(old, (1_600_000_000, 1_600_000_000))
    await synced(mailbox, sink, since="2022-01-01")
    assert sink.titles() == titles([2])
    await synced(mailbox, sink)  # without a date the old one is read, too
    assert sink.titles() == titles([1, 2])


async def test_a_missing_folder_is_permanent_and_names_the_others(mailbox: Mailbox, sink: MemorySink) -> None:
    mailbox.make("Archive")
    with failing("no folder 'Arhive'; it has Archive, INBOX"):
        await synced(mailbox, sink, folders=["INBOX", "Arhive"])


async def test_excess_folders_are_refused(mailbox: Mailbox, sink: MemorySink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imap_mailbox, "MOST_CURSOR", 300)
    with failing("choose some with folders or exclude"):
        await synced(filled(mailbox), sink)


def settings(server: ImapServer, user: str, tls: str, **more: object) -> dict[str, object]:
    port = server.tls_port if tls == "implicit" else server.port
    return {"host": "localhost", "port": port, "tls": tls, "tls_ca": "localhost.pem", "user": user, **more}


@pytest.mark.parametrize("tls", ["implicit", "starttls"])
async def test_a_mailbox_is_read_over_tls(mailbox: Mailbox, sink: MemorySink, tls: str) -> None:
    mailbox.deliver(*map(message, range(300)), message(300, text="words " * 500_000))
    await sync(made(settings(mailbox.server, mailbox.user, tls)), sink)
    assert len(sink.documents) == 301


@pytest.mark.parametrize(
    ("tls", "changes", "words"),
    [
        ("implicit", {"tls_ca": None}, "name the file with the authority's certificate in tls_ca"),
        ("starttls", {"tls_ca": None}, "name the file with the authority's certificate in tls_ca"),
        ("implicit", {"host": "127.0.0.1"}, "is not trusted"),
        ("implicit", {"tls_ca": "no-such.pem"}, r"tls_ca: .*no-such\.pem cannot be read"),
        ("implicit", {"port": "port"}, "993 goes with implicit"),
    ],
    ids=["not trusted", "not trusted after STARTTLS", "of another host", "no such file", "a port without TLS"],
)
async def test_a_certificate_that_does_not_do_is_a_permanent_failure_that_says_what_to_correct(
    mailbox: Mailbox, tls: str, changes: dict[str, object], words: str
) -> None:
    if "port" in changes:
        changes = {"port": mailbox.server.port}
    with failing(words):
        await made(settings(mailbox.server, mailbox.user, tls, **changes)).test()


async def test_a_wrong_password_is_a_permanent_failure_that_says_what_to_do(mailbox: Mailbox) -> None:
    with failing("app password") as caught:
        await connector(mailbox, password="wrong horse").test()
    assert "wrong horse" not in str(caught.value)


@pytest.mark.parametrize("password", ['quo"te\\', "ünï cødé", "a{3}", "x" * 200])
async def test_passwords_with_unusual_letters_work(imap_server: ImapServer, password: str) -> None:
    assert "logged in" in await connector(imap_server.mailbox(password), password=password).test()


async def test_too_many_connections_cool_the_source(sink: MemorySink) -> None:
    """Dovecot's own limit."""
    with running_imap(connections=1) as server:
        mailbox = server.mailbox()
        mailbox.deliver(message(1), message(2))
        first, second = connector(mailbox), connector(mailbox)
        await first.fetch(FetchRequest("", sink, 1))
        try:
            with failing("sync less often", FailureType.RATE_LIMITED):
                await second.test()
        finally:
            await first.close()


async def test_a_test_of_the_source_tells_the_folders_and_reads_nothing(mailbox: Mailbox) -> None:
    told = await connector(filled(mailbox)).test()
    assert f"logged in as {mailbox.user}; folders to read: " in told
    assert "INBOX" in told
    assert "\n" not in told


async def test_the_password_is_in_no_document_error_log_or_cursor(
    imap_server: ImapServer, sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "canary-3fe1c77ab0"
    mailbox = filled(imap_server.mailbox(canary))
    texts = [await connector(mailbox, password=canary).test()]
    await sync(connector(mailbox, password=canary), sink)
    with failing() as caught:
        await connector(mailbox, password=canary + "x").test()
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


MOVED = 300


@pytest.mark.parametrize("is_control", [False, True], ids=["", "control: a look for every page"])
async def test_many_moves_open_each_folder_a_few_times_and_not_for_every_page(
    mailbox: Mailbox, sink: MemorySink, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    """Opening a large folder, and the first fetch behind it, is most of the work of a sync after many moves."""
    examined, examine = list[str](), ImapConnection.examine

    async def counted(self: ImapConnection, folder: ImapFolder) -> FolderState:
        examined.append(folder.name)
        return await examine(self, folder)

    monkeypatch.setattr(ImapConnection, "examine", counted)
    if is_control:
        monkeypatch.setattr(ImapMailbox, "_alive_of_many", ImapMailbox._alive)
    files = await kept(mailbox, sink, MOVED)
    ids = set(sink.documents)
    for file in files:
        mailbox.move(file, "Archive")
    examined.clear()
    done = await synced(mailbox, sink, limit=20)

    assert (set(sink.documents), folders_of(sink)) == (ids, {"Archive"})
    assert (len(done.documents), done.deleted) == (MOVED, [])
    assert len(examined) >= 2 * MOVED // 20 if is_control else len(examined) <= 7, examined


async def test_a_message_that_stays_is_a_copy_and_keeps_its_id(mailbox: Mailbox, sink: MemorySink) -> None:
    """Half of the messages are moved and half are copied, page by page mixed."""
    files = await kept(mailbox, sink, 60)
    before = sink.ids_by_title()
    for number, file in enumerate(files):
        if number % 2:
            mailbox.move(file, "Archive")
        else:
            mailbox.deliver(message(number), folder="Archive")
    await synced(mailbox, sink, limit=7)

    assert len(sink.documents) == 90
    for number in range(60):
        document = sink.documents[before[f"Message {number}"]]
        assert document.metadata["folder"] == ("Archive" if number % 2 else "INBOX")
