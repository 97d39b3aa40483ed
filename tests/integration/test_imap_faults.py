"""
The IMAP connector when the network or the server misbehaves: cut, reset and frozen connections at every stage, and
answers that no sane server gives.

Every failure is transient here, every sync ends when the trouble does, and no document is lost or there twice.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors import imap_protocol
from reefknot.ingest.connectors.imap_mailbox import ImapMailbox
from reefknot.ingest.connectors.imap_protocol import ImapConnection
from reefknot.ingest.port import FetchRequest
from tests.faults.proxy import Fault, Trouble, Way, nobody_accepts, nobody_there, proxied
from tests.imap_servers import Mailbox, message
from tests.integration.imap_sink import MemorySink, connector, made, sync
from tests.unit.ingest.connectors.memory_sink import Synced, failing, one_page

pytestmark = pytest.mark.real_time

MESSAGES = 25
LIMITS = 0.4
"""Seconds that a command may take here, where one is meant to take too long."""


async def synced_at_last(source: ImapMailbox, sink: MemorySink, *, most: int = 8) -> list[SourceError]:
    """Sync again and again until it works, as ingestion does. Returns what went wrong."""
    errors: list[SourceError] = []
    while True:
        try:
            async with asyncio.timeout(60):
                await sync(source, sink, limit=10)
            return errors
        except SourceError as error:
            errors.append(error)
            assert len(errors) <= most, errors


def source_at(port: int, password: str = "canary-77", **settings: Any) -> ImapMailbox:
    return made({"host": "127.0.0.1", "port": port, "tls": "none", "user": "ann", **settings}, password)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imap_protocol, "COMMAND_S", LIMITS)
    monkeypatch.setattr(imap_protocol, "CONNECT_S", LIMITS)


@pytest.fixture
def delivered(mailbox: Mailbox) -> Mailbox:
    mailbox.deliver(*map(message, range(MESSAGES)))
    return mailbox


ALL = sorted(f"Message {number}" for number in range(MESSAGES))


@pytest.mark.parametrize("way", [Way.DOWN, Way.UP])
@pytest.mark.parametrize("fault", [Fault.CUT, Fault.RESET])
def test_a_connection_may_break_at_every_stage(delivered: Mailbox, fault: Fault, way: Way) -> None:
    stages = range(0, 9000, 600) if way is Way.DOWN else range(0, 700, 50)

    async def run(at: int) -> list[SourceError]:
        sink = MemorySink()
        async with proxied(delivered.server.port, Trouble(fault, way, at, times=1)) as proxy:
            errors = await synced_at_last(connector(delivered, port=proxy.port), sink)
        assert sink.titles() == ALL, at
        assert all(error.failure_type is FailureType.TRANSIENT for error in errors), (at, errors)
        return errors

    broken = sum(bool(asyncio.run(run(at))) for at in stages)
    assert broken >= len(stages) // 2, "the trouble comes too late to be felt"


@pytest.mark.parametrize(("fault", "at"), [(Fault.STALL, at) for at in (0, 300, 2500, 6000)] + [(Fault.SLOW, 2500)])
async def test_a_frozen_or_slow_server_is_left(delivered: Mailbox, impatient: None, fault: Fault, at: int) -> None:
    """Slow: a byte every 50 ms, for ever. A limit for each read would never end that."""
    sink = MemorySink()
    async with proxied(delivered.server.port, Trouble(fault, Way.DOWN, at, times=1)) as proxy:
        # On a busy machine the healthy connection may be slower than the limits, too.
        errors = await synced_at_last(connector(delivered, port=proxy.port), sink, most=50)
    assert sink.titles() == ALL
    assert "did not answer within" in str(errors[0])
    assert all(error.failure_type is FailureType.TRANSIENT for error in errors)


async def test_nobody_there_and_nobody_accepting_are_transient(impatient: None) -> None:
    for place in (nobody_there, nobody_accepts):
        with place() as port, failing(kind=FailureType.TRANSIENT):
            await source_at(port).test()


@pytest.mark.parametrize("at", [0, 40, 700])
async def test_a_handshake_that_is_cut_is_transient(mailbox: Mailbox, at: int) -> None:
    async with proxied(mailbox.server.tls_port, Trouble(Fault.CUT, Way.DOWN, at)) as proxy:
        with failing(kind=FailureType.TRANSIENT):
            await source_at(proxy.port, host="localhost", tls="implicit", tls_ca="localhost.pem").test()


async def command_sent(source: ImapMailbox) -> None:
    """Wait until the source has sent one more command on its connection."""
    assert source._link is not None
    link, before = source._link, source._link._number
    async with asyncio.timeout(30):
        while link._number == before:  # noqa: ASYNC110 - the connection tells nobody when it sends
            await asyncio.sleep(0)


async def test_a_cancelled_fetch_gives_its_connection_up_and_the_next_one_works(delivered: Mailbox) -> None:
    sink = MemorySink()
    async with proxied(delivered.server.port) as proxy:
        source = connector(delivered, port=proxy.port)
        await one_page(source, sink, 5)
        proxy.hold(Way.DOWN)
        late = asyncio.create_task(source.fetch(FetchRequest(sink.cursor, sink, 5)))
        waiting = asyncio.create_task(source.fetch(FetchRequest(sink.cursor, sink, 5)))
        await command_sent(source)
        for task in (waiting, late):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        proxy.release()  # the answer to the cancelled command comes now
        await sync(source, sink, limit=5)
        assert proxy.connections == 2
    assert sink.titles() == ALL


async def test_closing_ends_a_fetch_that_is_under_way(delivered: Mailbox) -> None:
    async with proxied(delivered.server.port) as proxy:
        source = connector(delivered, port=proxy.port)
        await source.fetch(FetchRequest("", MemorySink(), 1))
        proxy.hold()
        late = asyncio.create_task(source.fetch(FetchRequest("", MemorySink(), 1)))
        await command_sent(source)
        await source.close()
        with pytest.raises(SourceError):
            async with asyncio.timeout(20):
                await late


Script = Callable[[str], bytes | None]
"""The answer to a command without its tag, with `TAG` in place of it; None: the usual answer."""

HELLO = b"* OK hello\r\n"
MAIL = message(1)
ONLY = "INBOX;UIDVALIDITY=5/;UID=0000000001"
"""The place of the only message."""
USUAL: tuple[tuple[str, bytes], ...] = (
    ("CAPABILITY", b"* CAPABILITY IMAP4rev1 AUTH=PLAIN\r\nTAG OK done\r\n"),
    ("AUTHENTICATE", b"+ \r\n"),
    ("LIST", b'* LIST () "/" INBOX\r\nTAG OK done\r\n'),
    ("EXAMINE", b"* 1 EXISTS\r\n* OK [UIDVALIDITY 5] x\r\n* OK [UIDNEXT 2] x\r\nTAG OK done\r\n"),
    ("UID SEARCH", b"* SEARCH 1\r\nTAG OK done\r\n"),
    ("UID FETCH 1 (UID RFC822.SIZE", b"* 1 FETCH (UID 1 RFC822.SIZE %d)\r\nTAG OK done\r\n" % len(MAIL)),
    ("UID FETCH 1 (UID BODY", b"* 1 FETCH (UID 1 BODY[]<0> {%d}\r\n%b)\r\nTAG OK done\r\n" % (len(MAIL), MAIL)),
    ("LOGOUT", b"* BYE\r\nTAG OK done\r\n"),
)


class ScriptedServer:
    """A server with one message that answers by a script. `heard` is everything that it was told."""

    def __init__(self, script: Script, greeting: bytes) -> None:
        self._script = script
        self._greeting = greeting
        self.heard: list[str] = []
        self.port = 0
        self.tasks: list[asyncio.Task[object] | None] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._greeting)
        while line := await reader.readline():
            self.heard.append(line.decode("latin-1").rstrip("\r\n"))
            tag, _, command = self.heard[-1].partition(" ")
            answer = self._script(command)
            if answer is None:
                answer = next((usual for start, usual in USUAL if command.startswith(start)), b"TAG BAD what?\r\n")
            writer.write(answer.replace(b"TAG", tag.encode()))
            if command.startswith("AUTHENTICATE") and answer.startswith(b"+"):
                await reader.readline()
                writer.write(f"{tag} OK in\r\n".encode())
            await writer.drain()
            if b"* BYE" in answer:
                writer.close()
                await writer.wait_closed()
                break


@asynccontextmanager
async def scripted(script: Script, greeting: bytes = HELLO) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(script, greeting)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for task in server.tasks:
            assert task is not None
            task.cancel()
        await asyncio.gather(*(task for task in server.tasks if task), return_exceptions=True)


def answering(start: str, answer: bytes) -> Script:
    return lambda command: answer if command.startswith(start) else None


class Outcome(NamedTuple):
    """What a sync with a scripted server kept, its pages, and what the server was told."""

    titles: list[str]
    pages: Synced
    heard: list[str]

    @property
    def searches(self) -> list[str]:
        return [line for line in self.heard if "UID SEARCH" in line]


async def outcome(script: Script = lambda command: None, greeting: bytes = HELLO, **settings: Any) -> Outcome:
    sink = MemorySink()
    async with scripted(script, greeting) as server:
        source = source_at(server.port, **settings)
        try:
            async with asyncio.timeout(30):
                pages = await sync(source, sink)
        finally:
            await source.close()
        return Outcome(sink.titles(), pages, server.heard)


async def failure(script: Script = lambda command: None, greeting: bytes = HELLO, **settings: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        await outcome(script, greeting, **settings)
    assert "canary" not in str(caught.value)
    return caught.value


async def test_the_scripted_server_is_read_when_it_behaves() -> None:
    assert (await outcome()).titles == ["Message 1"]


@pytest.mark.parametrize(
    ("start", "answer", "kind"),
    [
        ("AUTHENTICATE", b"TAG NO [UNAVAILABLE] later\r\n", FailureType.TRANSIENT),
        ("AUTHENTICATE", b"TAG NO [ALERT] Too many simultaneous connections. (Failure)\r\n", FailureType.RATE_LIMITED),
        ("AUTHENTICATE", b"* BYE [ALERT] Account exceeded command or bandwidth limits\r\n", FailureType.RATE_LIMITED),
        ("AUTHENTICATE", b"TAG NO [AUTHENTICATIONFAILED] canary-77 is wrong\r\n", FailureType.PERMANENT),
        ("AUTHENTICATE", b"TAG NO AGFubgBjYW5hcnktNzc= is wrong\r\n", FailureType.PERMANENT),
        ("LIST", b"TAG NO [LIMIT] slow down\r\n", FailureType.RATE_LIMITED),
        ("LIST", b"TAG OK done\r\n", FailureType.TRANSIENT),
        ("EXAMINE", b"* BYE shutting down\r\n", FailureType.TRANSIENT),
        ("EXAMINE", b"* 1 EXISTS\r\nTAG OK done\r\n", FailureType.PERMANENT),
        ("UID SEARCH", b"TAG NO [INUSE] locked\r\n", FailureType.TRANSIENT),
        ("UID FETCH 1 (UID BODY", b"TAG NO [OVERQUOTA] bandwidth\r\n", FailureType.RATE_LIMITED),
        ("UID FETCH 1 (UID BODY", b"* 1 FETCH (UID 1 BODY[]<0> {10000000000}\r\nabc", FailureType.TRANSIENT),
        ("UID FETCH 1 (UID BODY", b"* 1 FETCH (UID 1 BODY[]<0> {%d}\r\nabc" % 10**23, FailureType.TRANSIENT),
        ("UID SEARCH", b"* SEARCH " + b"1" * 2_000_000, FailureType.TRANSIENT),
        ("UID SEARCH", (b"* OK " + b"x" * 1000 + b"\r\n") * 10_000, FailureType.TRANSIENT),
        ("LIST", b"* LIST " + b"(" * 10_000 + b"\r\nTAG OK done\r\n", FailureType.TRANSIENT),
    ],
    ids=range(16),
)
async def test_an_answer_is_sorted_by_what_helps(start: str, answer: bytes, kind: FailureType) -> None:
    assert (await failure(answering(start, answer))).failure_type is kind


@pytest.mark.parametrize(
    ("greeting", "kind"),
    [
        (b"* BYE [ALERT] Too many connections from your address\r\n", FailureType.RATE_LIMITED),
        (b"* BYE [UNAVAILABLE] maintenance\r\n", FailureType.TRANSIENT),
        (b"220 smtp.example.org ESMTP\r\n", FailureType.PERMANENT),
        (b"x" * 2_000_000, FailureType.TRANSIENT),
    ],
    ids=range(4),
)
async def test_a_greeting_is_sorted_by_what_helps(greeting: bytes, kind: FailureType) -> None:
    assert (await failure(greeting=greeting)).failure_type is kind


async def test_a_line_is_long_only_where_it_has_the_result_of_a_search() -> None:
    long = imap_protocol.MOST_LINE + 1
    refused = await failure(answering("LIST", b'* LIST () "/" "' + b"a" * long + b'"\r\n'))
    assert "more than was asked for" in str(refused)
    found = b"* SEARCH" + b" 1" * long + b" " + b"9" * 5000 + b"\r\nTAG OK done\r\n"
    assert (await outcome(answering("UID SEARCH", found))).titles == ["Message 1"]


async def test_a_literal_is_not_read_before_its_size_is_known_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's name of 100 kB is refused; the control with a larger limit reads it."""
    two = b'* LIST () "/" INBOX\r\n* LIST () "/" {100000}\r\n'
    script = answering("LIST", two + b"x" * 100_000 + b"\r\nTAG OK x\r\n")
    assert "more than was asked for" in str(await failure(script))
    command = ImapConnection._command
    defaults = {**(command.__kwdefaults__ or {}), "literal": 1_000_000}
    monkeypatch.setattr(command, "__kwdefaults__", defaults)
    assert (await outcome(script)).titles == ["Message 1"]


INJECTED = b"x\r\nr9 DELETE INBOX"


async def test_the_name_of_a_folder_cannot_become_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server names a folder with a line break in it, and hopes that the name comes back."""
    answer = b'* LIST () "/" INBOX\r\n* LIST () "/" {%d}\r\n%b\r\nTAG OK x\r\n' % (len(INJECTED), INJECTED)
    script = answering("LIST", answer)
    assert not any("DELETE" in line for line in (await outcome(script)).heard)
    monkeypatch.setattr(imap_protocol, "_UNSAFE", re.compile(rb"(?!)"))  # the control: nothing is unsafe
    assert any(line.startswith("r9 DELETE") for line in (await outcome(script)).heard)


@pytest.mark.parametrize("letter", ["\r", "\n", "\x00", "\r\n"])
async def test_no_command_carries_a_line_break_or_a_zero_byte(letter: str) -> None:
    """A password with one, at a server that knows LOGIN alone."""
    async with scripted(answering("CAPABILITY", b"* CAPABILITY IMAP4rev1\r\nTAG OK done\r\n")) as server:
        with failing("nothing was sent") as caught:
            await source_at(server.port, f"canary{letter}r9 DELETE INBOX").test()
    assert "canary" not in str(caught.value)
    assert [line.partition(" ")[2] for line in server.heard] == ["CAPABILITY"]


async def test_a_server_that_offers_no_starttls_never_hears_the_password() -> None:
    refused = answering("STARTTLS", b"TAG BAD unknown\r\n")
    heard: list[str] = []

    def script(command: str) -> bytes | None:
        heard.append(command)
        return refused(command)

    assert "does not offer STARTTLS" in str(await failure(script, tls="starttls"))
    assert heard == ["STARTTLS"]
    assert "wants no TLS" in str(await failure(greeting=b"* PREAUTH hello\r\n", tls="starttls"))


async def test_messages_that_were_not_asked_for_and_lies_about_sizes_do_no_harm() -> None:
    long = b"Subject: Message 1\r\n\r\n" + b"x" * 100_000
    unasked = b"* 9 FETCH (UID 77 BODY[]<0> {3}\r\nabc)\r\n* 1 FETCH (FLAGS ())\r\n"
    asked = b"* 1 FETCH (UID 1 BODY[]<0> {%d}\r\n%b)\r\nTAG OK done\r\n" % (len(long), long)
    script = answering("UID FETCH 1 (UID BODY", unasked + asked)
    assert (await outcome(script)).titles == ["Message 1"]


@pytest.mark.parametrize("next_uid", [10**15, 2**32 - 1, 2**31])
async def test_a_next_uid_far_away_costs_one_search(next_uid: int) -> None:
    """By windows of 50,000 it would be 86,000 searches, or without an end."""
    opened = b"* 1 EXISTS\r\n* OK [UIDVALIDITY 5] x\r\n* OK [UIDNEXT %d] x\r\nTAG OK done\r\n" % next_uid
    found = await outcome(answering("EXAMINE", opened))
    assert found.titles == ["Message 1"]
    assert len(found.searches) <= 3, found


async def test_uids_that_are_far_apart_are_found_at_once() -> None:
    """The last message of a folder has the largest UID there is."""
    last = 2**32 - 1
    body = b"* 1 FETCH (UID %d BODY[]<0> {%d}\r\n%b)\r\nTAG OK x\r\n" % (last, len(MAIL), MAIL)
    answers = {
        "EXAMINE": b"* 1 EXISTS\r\n* OK [UIDVALIDITY 5] x\r\nTAG OK done\r\n",
        "UID SEARCH": b"* SEARCH %d\r\nTAG OK done\r\n" % last,
        f"UID FETCH {last} (UID RFC822": b"* 1 FETCH (UID %d RFC822.SIZE %d)\r\nTAG OK x\r\n" % (last, len(MAIL)),
        f"UID FETCH {last} (UID BODY": body,
    }
    found = await outcome(lambda command: next((answers[one] for one in answers if command.startswith(one)), None))

    assert found.titles == ["Message 1"]
    assert len(found.searches) <= 3, found


@pytest.mark.parametrize("start", ["UID FETCH 1 (UID RFC822", "UID FETCH 1 (UID BODY"])
async def test_a_message_that_is_listed_and_not_handed_out_is_remembered(start: str) -> None:
    """A message that was deleted in between is missing from the next search, too: that one is passed over."""
    script = answering(start, b"TAG OK nothing\r\n")
    searches: list[str] = []

    def deleted(command: str) -> bytes | None:
        if command.startswith("UID SEARCH"):
            searches.append(command)
            return None if len(searches) == 1 else b"* SEARCH\r\nTAG OK done\r\n"
        return script(command)

    withheld, gone = (await outcome(script)).pages.failures, (await outcome(deleted)).pages.failures
    told = {ONLY: "the server lists this message and does not hand it out"}
    assert ({place: str(error) for place, error in withheld.items()}, gone) == (told, {})


async def test_an_item_that_is_withheld_or_breaks_the_connection_is_no_deleted_one() -> None:
    """`fetch_item` returns None for a message that is gone, and its document is deleted then."""

    async def fetched(script: Script) -> str:
        async with scripted(script) as server:
            source = source_at(server.port)
            try:
                found = await source.fetch_item(ONLY, MemorySink())
            except SourceError as error:
                return f"{error.failure_type.value}: {error}"
            finally:
                await source.close()
            return "" if found is None else found.title

    assert await fetched(lambda command: None) == "Message 1"
    withheld = await fetched(answering("UID FETCH", b"TAG OK nothing\r\n"))
    assert withheld == "unknown: the server lists this message and does not hand it out"
    broken = await fetched(answering("UID FETCH 1 (UID BODY", b"* BYE internal error\r\n"))
    assert broken.startswith("unknown: the connection breaks when this message is fetched")
