"""
Plain text behind the answer to STARTTLS is never taken for the server's words inside TLS.

An attacker on the line writes a whole forged conversation: in the packet of the answer, a few microseconds later, and
exactly between the client's look and the handshake. The real server has a trusted certificate and one message.
"""

import asyncio
import json
import socket
import ssl
import threading
import time
from typing import Any

import pytest
from nats.aio.transport import TcpTransport

from reefknot.errors import SourceError, StoreUnavailableError
from reefknot.ingest.connectors.imap_protocol import ImapConnection
from reefknot.stores.jetstream.connection import Connection, NatsOptions
from tests.imap_servers import CERTIFICATE, message
from tests.integration.imap_sink import MemorySink, made, sync
from tests.security.socket_server import SocketServer

GAPS_US = (0, 2, 5, 10, 15, 20, 25, 30, 40, 50)
TIMES = 3
PATIENCE_S = 30.0


def conversation(title: str, first: int) -> list[bytes]:
    """The answers of a server with one message to all commands behind STARTTLS, tagged from `first` on."""
    mail = message(1).replace(b"Message 1", title.encode())
    answers = [
        b"* CAPABILITY IMAP4rev1 AUTH=PLAIN\r\nTAG OK done\r\n",
        b"+ \r\nTAG OK in\r\n",
        b"* CAPABILITY IMAP4rev1 AUTH=PLAIN\r\nTAG OK done\r\n",
        b'* LIST () "/" INBOX\r\nTAG OK done\r\n',
        b'* LIST () "/" INBOX\r\nTAG OK done\r\n',
        b"* 1 EXISTS\r\n* OK [UIDVALIDITY 5] x\r\n* OK [UIDNEXT 2] x\r\nTAG OK done\r\n",
        b"* SEARCH 1\r\nTAG OK done\r\n",
        b"* 1 FETCH (UID 1 RFC822.SIZE %d)\r\nTAG OK done\r\n" % len(mail),
        b"* 1 FETCH (UID 1 BODY[]<0> {%d}\r\n%b)\r\nTAG OK done\r\n" % (len(mail), mail),
        b"* BYE\r\nTAG OK done\r\n",
    ]
    return [answer.replace(b"TAG", b"r%d" % number) for number, answer in enumerate(answers, first)]


FORGED = b"".join(conversation("Forged", 2))


class TamperedServer(SocketServer):
    """An IMAP server; `injected` is written on its line `gap` seconds behind the answer to STARTTLS."""

    def __init__(self, injected: bytes = FORGED) -> None:
        super().__init__()
        self._injected = injected
        self.gap: float | None = None
        """None: in one packet with the answer."""
        self.now: threading.Event | None = None
        """Waited for instead of the gap."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(CERTIFICATE)

    def serve(self, link: socket.socket) -> None:
        link.sendall(b"* OK hello\r\n")
        link.recv(1000)
        answer = b"r1 OK begin\r\n"
        if self.now is not None:
            link.sendall(answer)
            self.now.wait(PATIENCE_S)
            link.sendall(self._injected)
        elif self.gap is None:
            link.sendall(answer + self._injected)
        else:
            link.sendall(answer)
            ends = time.perf_counter() + self.gap
            while time.perf_counter() < ends:
                pass
            link.sendall(self._injected)
        with self._context.wrap_socket(link, server_side=True) as inside:
            for line in conversation("Honest", 2):
                command = inside.recv(10_000)
                inside.sendall(line)
                if b"AUTHENTICATE" in command:
                    inside.recv(10_000)


def synced(server: TamperedServer) -> MemorySink:
    """A sync with a server whose certificate is checked."""
    sink = MemorySink()
    settings = {"host": "localhost", "port": server.port, "tls": "starttls", "tls_ca": str(CERTIFICATE), "user": "ann"}

    async def run() -> None:
        source = made(settings)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await sync(source, sink)
        finally:
            await source.close()

    asyncio.run(run())
    return sink


@pytest.fixture
def in_the_window(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set between the client's look at what is there and its handshake, which waits for the words."""
    event, start_tls = threading.Event(), asyncio.StreamWriter.start_tls

    async def late(self: Any, *args: Any, **more: Any) -> None:
        event.set()
        while not self._reader._buffer:  # noqa: ASYNC110 - a reader gives no sign when words arrive
            await asyncio.sleep(0)
        await start_tls(self, *args, **more)

    monkeypatch.setattr(asyncio.StreamWriter, "start_tls", late)
    return event


def test_a_server_that_is_not_tampered_with_is_read() -> None:
    with TamperedServer(b"") as server:
        assert synced(server).titles() == ["Honest"]


def test_words_in_the_packet_of_the_answer_or_microseconds_later_end_the_connection() -> None:
    with TamperedServer() as server:
        for gap in (None, *(gap / 1e6 for gap in GAPS_US)):
            server.gap = gap
            for _ in range(TIMES):
                with pytest.raises(SourceError):
                    synced(server)


def test_words_between_the_look_and_the_handshake_end_the_connection(in_the_window: threading.Event) -> None:
    with TamperedServer() as server:
        server.now = in_the_window
        with pytest.raises(SourceError, match="sent more than its answer before TLS began"):
            synced(server)


def test_one_look_keeps_the_forged_message(in_the_window: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the second look is left out."""
    refuse, looks = ImapConnection._refuse_plain_text, list[None]()

    async def once(self: ImapConnection, reader: asyncio.StreamReader) -> None:
        looks.append(None)
        if len(looks) == 1:
            await refuse(self, reader)

    monkeypatch.setattr(ImapConnection, "_refuse_plain_text", once)
    with TamperedServer() as server:
        server.now = in_the_window
        assert synced(server).titles() == ["Forged"]


# ---- NATS, the other protocol that begins in plain text --------------------------------------------------------------


class TamperedNats(TamperedServer):
    """A NATS server that answers every client with an error inside TLS; `injected` stands behind its first line."""

    def serve(self, link: socket.socket) -> None:
        about = {"version": "2.15.0", "max_payload": 1 << 20, "tls_required": True, "proto": 1, "headers": True}
        link.sendall(b"INFO %b\r\n%b" % (json.dumps(about).encode(), self._injected))
        with self._context.wrap_socket(link, server_side=True) as inside:
            heard = b""
            while b"PING" not in heard:
                if not (words := inside.recv(10_000)):
                    return
                heard += words
            inside.sendall(b"-ERR 'refused inside'\r\n")


def connected(port: int, patience: float) -> bool:
    """Whether a store on NATS takes its server for connected."""
    options = NatsOptions((f"tls://localhost:{port}",), tls_ca=str(CERTIFICATE), patience=patience)

    async def run() -> bool:
        connection = Connection(options)
        try:
            await connection.open()
        except StoreUnavailableError:
            return False
        async with asyncio.timeout(PATIENCE_S):
            await connection.close()
        return True

    return asyncio.run(run())


def test_words_behind_the_greeting_of_nats_are_not_taken_for_encrypted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py reads TLS by a reader of its own. The control keeps the one of the greeting, and is deceived."""

    async def with_the_same_reader(self: Any, uri: Any, ssl_context: Any, *_: Any) -> None:
        await self._io_writer.start_tls(ssl_context, server_hostname="localhost")

    with TamperedNats(b"PONG\r\n") as server:
        assert not connected(server.port, 0.5)
        monkeypatch.setattr(TcpTransport, "connect_tls", with_the_same_reader)
        assert connected(server.port, PATIENCE_S)
