"""
The IMAP protocol, as far as a reader of mailboxes needs it: one connection, a command at a time, every answer bounded.

A server may be broken or hostile, and mail is: so a line, a literal, the answer to a command and its time have limits
that are checked before anything is read. Python's `imaplib`, and `imap-tools` above it, cannot be used for that: they
read a literal of any size that a server announces, keep every answer until the end, and block a thread which a
cancelled job cannot take its connection from. This client speaks asyncio, and a command that does not end as it should,
cancelled ones included, closes its connection.

Nothing is ever written to a mailbox: folders are opened by EXAMINE, messages are read by BODY.PEEK.
"""

import asyncio
import contextlib
import re
import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors.imap_failures import (
    RESPONSE_CODE,
    ImapAddress,
    ImapRefusedError,
    Tls,
    connection_failure,
    login_refused,
    refusal,
)
from reefknot.runtime.log import printable

CONNECT_S = 20.0
COMMAND_S = 60.0
MOST_LINE = 64 * 1024
MOST_SEARCH_LINE = 1024 * 1024
"""Bytes of a line that has the result of a search: the UIDs of a folder are one line."""
MOST_LITERAL = 64 * 1024
"""Bytes of a literal where no content was asked for: a name of a folder, or words of an error."""
MOST_ANSWER = 8 * 1024 * 1024
MOST_ANSWERS = 20_000
"""Untagged answers to one command that are kept: each costs more memory than its few bytes."""
MOST_LITERALS, MOST_FOUND, MOST_INFO = 100, 100_000, 1000
"""Literals of one answer, UIDs that a search finds, bytes of the size and arrival of one message."""
MOST_DEPTH, MOST_TOKENS = 20, 2000
MOST_FOLDERS = 5000
MOST_NAME = 1000
"""Bytes of the name of a folder."""

_LITERAL = re.compile(rb"\{(\d+)\+?\}\Z")
# Whatever a server sends is searched in linear time: no place is a second time the beginning of the same attempt.
_TOKEN = re.compile(rb'[()]|"((?:[^"\\]|\\.)*+)("|\\?\Z)|[^\s()"]+', re.DOTALL)
_ENCODED_NAME = re.compile(r"&([^&-]*+)(-?)")
_UNSAFE = re.compile(rb"[\r\n\x00]")

Token = bytes | list[Any] | None
"""A value of an answer: an atom, a text or a literal as bytes; a list in parentheses; NIL."""
T = TypeVar("T")


class ImapFolder(NamedTuple):
    """A folder: its name for people, its name for the server, and its flags in lower case."""

    name: str
    raw: bytes
    flags: frozenset[str]


class FolderState(NamedTuple):
    """A folder as the server tells of it when it is opened."""

    validity: int
    exists: int
    next_uid: int | None


class MessageInfo(NamedTuple):
    """Size and arrival (milliseconds UTC) of a message."""

    size: int
    arrived_at: int | None


class _Untagged(NamedTuple):
    """An untagged answer: its kind, its number if it has one, and the rest, literals as bytes of their own."""

    kind: str
    number: int
    text: bytes
    pieces: list[tuple[bytes, bytes]]
    """Each literal, and the text behind it."""

    def tokens(self) -> list[Token]:
        top: list[Token] = []
        stack = [top]
        _tokenize(self.text, stack)
        for literal, text in self.pieces:
            stack[-1].append(literal)
            _tokenize(text, stack)
        return top


class ImapConnection:
    """A connection to a server. Made by `open_connection`."""

    def __init__(self, address: ImapAddress) -> None:
        self.address = address
        self.selected: ImapFolder | None = None
        self._state = FolderState(0, 0, None)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0
        self._capabilities: frozenset[str] = frozenset()
        self._hidden: tuple[str, ...] = ()
        self._farewell = ""

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    # ---- opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> bool:
        """Connect and read the greeting. Returns whether the server wants no login."""
        return await self._bounded(self._open, CONNECT_S, "connecting")

    async def _open(self) -> bool:
        address = self.address
        context = None if address.tls is Tls.NONE else address.trust()
        self._reader, self._writer = await asyncio.open_connection(
            address.host, address.port, limit=MOST_SEARCH_LINE, ssl=context if address.tls is Tls.IMPLICIT else None
        )
        if address.tls is Tls.NONE and not ip_address(self._writer.get_extra_info("peername")[0]).is_loopback:
            raise SourceError(
                f"{address} is not on this machine and tls is 'none', so the password would be sent in the clear; "
                "set tls to implicit or starttls",
                FailureType.PERMANENT,
            )
        greeting = await self._line(MOST_LINE)
        kind, _, words = greeting.removeprefix(b"* ").partition(b" ")
        match kind.upper():
            case b"OK":
                is_ready = False
            case b"PREAUTH":
                is_ready = True
            case b"BYE":
                self.abort()
                raise refusal(self._shown(words), f"{address} ended the connection", is_bye=True)
            case _:
                raise SourceError(
                    f"{address} does not answer like an IMAP server; check host, port and tls", FailureType.PERMANENT
                )
        if address.tls is Tls.STARTTLS:
            if is_ready:
                raise SourceError(
                    f"{address} wants no TLS, and tls is starttls; set tls to implicit", FailureType.PERMANENT
                )
            await self._start_tls(context)
        return is_ready

    async def _start_tls(self, context: ssl.SSLContext | None) -> None:
        try:
            await self._converse([b"STARTTLS"], MOST_LITERAL, MOST_ANSWER)
        except ImapRefusedError:
            raise SourceError(
                f"{self.address} does not offer STARTTLS; set tls to implicit, with the port for it (usually 993)",
                FailureType.PERMANENT,
            ) from None
        assert self._reader is not None
        assert self._writer is not None
        assert context is not None
        await self._refuse_plain_text(self._reader)
        await self._writer.start_tls(context, server_hostname=self.address.host)
        # The same reader goes on inside TLS, with all that came before the handshake: also what came a moment after
        # the first look. The client speaks first there, so a server's words in the buffer are never TLS's.
        await self._refuse_plain_text(self._reader)

    async def _refuse_plain_text(self, reader: asyncio.StreamReader) -> None:
        """End the connection if something is buffered that was never asked for: it came unencrypted."""
        injected = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):  # returns at once when something is there, and is stopped when not
                injected = await reader.read(1)
        if injected:
            raise SourceError(
                f"{self.address} sent more than its answer before TLS began: the connection may be intercepted",
                FailureType.PERMANENT,
            )

    async def login(self, user: str, password: str) -> None:
        """Log in. The password appears in no message."""
        plain = b64encode(b"\0".join((b"", user.encode(), password.encode())))
        self._hidden = (password, b64encode(password.encode()).decode().rstrip("="), plain.decode())
        await self._learn()
        try:
            if "AUTH=PLAIN" in self._capabilities:
                await self._command("AUTHENTICATE", b"PLAIN", then=plain)
            elif "LOGINDISABLED" in self._capabilities:
                raise SourceError(
                    f"{self.address} allows no password on this connection; set tls to implicit or starttls",
                    FailureType.PERMANENT,
                )
            else:
                await self._command("LOGIN", quoted(user.encode()), quoted(password.encode()))
        except ImapRefusedError as error:
            raise login_refused(error, user) from None
        await self._learn()

    async def _learn(self) -> None:
        answers = await self._command("CAPABILITY", take=("CAPABILITY",), most=MOST_LINE)
        words = b" ".join(answer.text for answer in answers)
        self._capabilities = frozenset(words.decode("ascii", "replace").upper().split())

    async def logout(self) -> None:
        """Log out and close; errors are ignored."""
        if self._writer is not None:
            try:
                async with asyncio.timeout(5.0):
                    await self._converse([b"LOGOUT"], MOST_LITERAL, MOST_ANSWER)
            except (SourceError, OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError):
                pass
            finally:
                self.abort()

    def abort(self) -> None:
        """Close at once. Whatever is under way on this connection fails."""
        writer, self._writer, self._reader, self.selected = self._writer, None, None, None
        if writer is not None:
            writer.transport.abort()

    # ---- commands ----------------------------------------------------------------------------------------------------

    async def folders(self) -> list[ImapFolder]:
        """All folders, in the order of their names."""
        extended = {"SPECIAL-USE", "LIST-EXTENDED"} <= self._capabilities
        arguments = [b'""', b'"*"', *([b"RETURN", b"(SPECIAL-USE)"] if extended else [])]
        found: dict[str, ImapFolder] = {}
        for answer in await self._command("LIST", *arguments, take=("LIST",)):
            await asyncio.sleep(0)  # a server may send thousands of long ones
            tokens = answer.tokens()
            if len(tokens) < 3 or not isinstance(tokens[0], list) or not isinstance(raw := tokens[2], bytes):
                continue
            flags = frozenset(str(flag, "latin-1").lower() for flag in tokens[0] if isinstance(flag, bytes))
            if not _UNSAFE.search(raw) and 0 < len(raw) <= MOST_NAME:
                folder = ImapFolder(decoded_name(raw), raw, flags)
                found.setdefault(folder.name, folder)
            if len(found) > MOST_FOLDERS:
                raise SourceError(f"{self.address} has more than {MOST_FOLDERS} folders", FailureType.PERMANENT)
        if not found:  # a mailbox has an INBOX at least: better to wait than to take everything for deleted
            raise SourceError(f"{self.address} lists no folders", FailureType.TRANSIENT)
        return [found[name] for name in sorted(found)]

    async def examine(self, folder: ImapFolder) -> FolderState:
        """Open a folder for reading."""
        self.selected = None
        answers = await self._command("EXAMINE", quoted(folder.raw), take=("EXISTS", "OK"))
        exists = next((answer.number for answer in answers if answer.kind == "EXISTS"), 0)
        codes = dict[str, int]()
        for answer in answers:
            code = RESPONSE_CODE.match(answer.text.decode("ascii", "replace"))
            if code is not None and code[2].strip().isdigit():
                codes[code[1].upper()] = int(code[2])
        if not 0 <= codes.get("UIDVALIDITY", -1) < 2**32:
            raise SourceError(
                f"{self.address} has no lasting numbers (UIDVALIDITY) for messages", FailureType.PERMANENT
            )
        self.selected = folder
        self._state = FolderState(codes["UIDVALIDITY"], exists, codes.get("UIDNEXT"))
        return self._state

    async def state_of(self, folder: ImapFolder) -> FolderState:
        """The state of a folder, which is open afterwards; of the open one as it was when it was opened."""
        if self.selected is not None and self.selected.raw == folder.raw:
            return self._state
        return await self.examine(folder)

    async def search(self, uids: str, *criteria: str) -> list[int]:
        """The UIDs among these, such as `1:5,9`, that the open folder has, in ascending order."""
        words = [b"UID", uids.encode("ascii"), *(word.encode("ascii") for word in criteria)]
        found: set[int] = set()
        for answer in await self._command("UID SEARCH", *words, take=("SEARCH",)):
            await asyncio.sleep(0)
            found.update(int(word) for word in answer.text.split() if word.isdigit() and len(word) <= 10)
            if len(found) > MOST_FOUND:
                raise self._too_large()
        return sorted(found)

    async def infos(self, uids: Iterable[int]) -> dict[int, MessageInfo]:
        """Sizes and arrivals of messages of the open folder; of a message that is gone, none."""
        asked = set(uids)
        found: dict[int, MessageInfo] = {}
        most = MOST_INFO * len(asked) + MOST_LITERAL
        async for values in self._fetch(asked, b"(UID RFC822.SIZE INTERNALDATE)", MOST_INFO, most):
            uid, size = _number(values.get("UID")), _number(values.get("RFC822.SIZE"))
            if uid is not None and uid in asked and size is not None:
                found[uid] = MessageInfo(size, _arrival(values.get("INTERNALDATE")))
        return found

    async def content(self, uids: Sequence[int], section: str, *, start: int, count: int) -> dict[int, bytes]:
        """`count` bytes from `start` on of a section of messages of the open folder: `""` all, `HEADER` the headers."""
        asked = f"(UID BODY.PEEK[{section}]<{start}.{count}>)".encode("ascii")
        found: dict[int, bytes] = {}
        async for values in self._fetch(uids, asked, count, (count + MOST_INFO) * len(uids) + MOST_LITERAL):
            uid = _number(values.get("UID"))
            for name, value in values.items():
                if uid is not None and uid in uids and name.startswith(f"BODY[{section}]"):
                    found[uid] = value if isinstance(value, bytes) else b""
        return found

    async def _fetch(
        self, uids: Iterable[int], asked: bytes, literal: int, most: int
    ) -> AsyncIterator[dict[str, Token]]:
        """The values of each message, one after another: the parts of all of them would need far more memory."""
        words = (ranges(uids).encode("ascii"), asked)
        answers = await self._command("UID FETCH", *words, take=("FETCH",), literal=literal, most=most)
        for answer in answers:
            await asyncio.sleep(0)
            tokens = answer.tokens()
            if tokens and isinstance(tokens[0], list):
                names = [str(name, "latin-1").upper() if isinstance(name, bytes) else "" for name in tokens[0][::2]]
                yield dict(zip(names, tokens[0][1::2], strict=False))

    async def _command(
        self,
        name: str,
        *arguments: bytes,
        take: tuple[str, ...] = (),
        then: bytes = b"",
        literal: int = MOST_LITERAL,
        most: int = MOST_ANSWER,
    ) -> list[_Untagged]:
        words = [name.encode("ascii"), *arguments]
        return await self._bounded(
            lambda: self._converse(words, literal, most, take=take, then=then), COMMAND_S, f"at {name}"
        )

    # ---- the wire ----------------------------------------------------------------------------------------------------

    async def _bounded(self, work: Callable[[], Awaitable[T]], seconds: float, doing: str) -> T:
        """The result of work on the wire. A refusal leaves the connection open; whatever else happens closes it."""
        try:
            async with asyncio.timeout(seconds):
                return await work()
        except ImapRefusedError:
            raise
        except TimeoutError:
            self.abort()
            raise SourceError(
                f"{self.address} did not answer within {seconds:g} s ({doing})", FailureType.TRANSIENT
            ) from None
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            self.abort()
            raise connection_failure(error, self.address, doing) from None
        except BaseException:
            self.abort()
            raise

    async def _converse(
        self, words: list[bytes], literal: int, most: int, *, take: tuple[str, ...] = (), then: bytes = b""
    ) -> list[_Untagged]:
        """Send a command, and read up to its end. Returns the untagged answers of the kinds to `take`."""
        for word in words:
            if _UNSAFE.search(word):
                raise SourceError(
                    "a name has a line break or a zero byte, which IMAP cannot carry; nothing was sent",
                    FailureType.PERMANENT,
                )
        self._number += 1
        tag = b"r%d" % self._number
        await self._send(b" ".join((tag, *words)))
        found: list[_Untagged] = []
        while True:
            line = await self._line(most)
            most -= len(line)
            if line.startswith(b"+"):
                await self._send(then)
                then = b""
            elif line.startswith(b"* "):
                answer = await self._answer(line[2:], literal, most)
                most -= sum(len(one) + len(text) for one, text in answer.pieces)
                if answer.kind == "BYE" and words != [b"LOGOUT"]:
                    self.abort()
                    raise refusal(self._shown(answer.text), f"{self.address} ended the connection", is_bye=True)
                if answer.kind in take:
                    found.append(answer)
                    if len(found) > MOST_ANSWERS:
                        raise self._too_large()
            elif line.startswith(tag + b" "):
                kind, _, text = line[len(tag) + 1 :].partition(b" ")
                if kind.upper() == b"OK":
                    return found
                raise refusal(
                    self._shown(text),
                    f"{self.address} refused {words[0].decode('ascii')}",
                    is_bad=kind.upper() == b"BAD",
                )
            if most < 0:
                raise self._too_large()

    async def _send(self, line: bytes) -> None:
        if self._writer is None:
            raise ConnectionResetError("the connection is closed")
        self._writer.write(line + b"\r\n")
        await self._writer.drain()

    async def _line(self, most: int) -> bytes:
        if self._reader is None:
            raise ConnectionResetError("the connection is closed")
        line = await self._reader.readuntil(b"\n")
        is_search = line[:9].upper().startswith((b"* SEARCH", b"* ESEARCH"))
        if len(line) > min(most, MOST_SEARCH_LINE if is_search else MOST_LINE):
            raise self._too_large()
        return line.rstrip(b"\r\n")

    async def _answer(self, line: bytes, literal: int, most: int) -> _Untagged:
        """An untagged answer with its literals, none of which is read before its size is known to be right."""
        first, _, rest = line.partition(b" ")
        number = -1
        if first.isdigit():
            number, (first, _, rest) = int(first[:12]), rest.partition(b" ")
        pieces: list[tuple[bytes, bytes]] = []
        last, text = line, rest
        texts = len(line)
        while (announced := _LITERAL.search(last)) is not None:
            size = int(announced[1][:20])
            most -= size
            if size > literal or most < 0:
                raise self._too_large()
            assert self._reader is not None
            content = await self._reader.readexactly(size)
            last = await self._line(most)
            most -= len(last)
            texts += len(last)
            if texts > MOST_LINE or len(pieces) == MOST_LITERALS:
                raise self._too_large()
            pieces.append((content, _LITERAL.sub(b"", last)))
        return _Untagged(first.decode("ascii", "replace").upper(), number, _LITERAL.sub(b"", text), pieces)

    def _too_large(self) -> SourceError:
        self.abort()
        return SourceError(
            f"{self.address} sent or announced more than was asked for; the connection was closed",
            FailureType.TRANSIENT,
        )

    def _shown(self, text: bytes) -> str:
        """Words of the server for a message: one short line, without the password."""
        words = text.decode("utf-8", "replace")
        for hidden in self._hidden:
            words = words.replace(hidden, "***") if hidden else words
        return printable(words, most=200)


def _tokenize(text: bytes, stack: list[list[Token]]) -> None:
    for number, found in enumerate(_TOKEN.finditer(text)):
        token = found[0]
        if len(stack) > MOST_DEPTH or number > MOST_TOKENS:
            raise SourceError("the server's answer is nested too deep, or has too many values", FailureType.TRANSIENT)
        if token == b"(":
            inner: list[Token] = []
            stack[-1].append(inner)
            stack.append(inner)
        elif token == b")":
            if len(stack) > 1:
                stack.pop()
        elif token.startswith(b'"'):
            # A text without an end is no value: a folder has no such name.
            stack[-1].append(re.sub(rb"\\(.)", rb"\1", found[1]) if found[2] == b'"' else None)
        else:
            stack[-1].append(None if token.upper() == b"NIL" else token)


def _number(value: Token) -> int | None:
    return int(value[:20]) if isinstance(value, bytes) and value.isdigit() else None


def _arrival(value: Token) -> int | None:
    """The milliseconds of `17-Jul-1996 02:44:25 -0700`."""
    if not isinstance(value, bytes):
        return None
    try:
        day, _, rest = value.decode("ascii").strip()[:40].partition(" ")
        return int(parsedate_to_datetime(f"{day.replace('-', ' ')} {rest}").timestamp() * 1000)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def quoted(text: bytes) -> bytes:
    """A text between quotation marks. One with a line break is refused when it is sent."""
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def decoded_name(raw: bytes) -> str:
    """The name of a folder, which travels in modified UTF-7: `Entw&APw-rfe` is `Entwürfe`. A broken one is kept."""

    def letters(found: re.Match[str]) -> str:
        if not found[2]:
            raise ValueError("it does not end")
        code = found[1].replace(",", "/")
        return b64decode(code + "=" * (-len(code) % 4), validate=True).decode("utf-16-be") if code else "&"

    text = raw.decode("utf-8", "replace")
    try:
        return _ENCODED_NAME.sub(letters, text)
    except ValueError:
        return text


def ranges(uids: Iterable[int]) -> str:
    """UIDs as a set of IMAP: `1:3,7`."""
    spans: list[list[int]] = []
    for uid in sorted(uids):
        if spans and uid <= spans[-1][1] + 1:
            spans[-1][1] = uid
        else:
            spans.append([uid, uid])
    return ",".join(str(first) if first == last else f"{first}:{last}" for first, last in spans)
