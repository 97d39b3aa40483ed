"""
Messages of a mailbox: their locations, how their bytes are fetched, and the documents that are made of them.

Small messages are asked for together, large ones in chunks, too large ones by their headers alone; sizes that a server
announces are never trusted. A message that cannot be fetched becomes a failure of its own.
"""

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import accumulate, takewhile
from math import inf
from sys import getsizeof

from msgspec import Struct

from reefknot import clock
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors.imap_failures import ImapRefusedError
from reefknot.ingest.connectors.imap_protocol import ImapConnection, MessageInfo, ranges
from reefknot.ingest.connectors.imap_settings import ImapSettings
from reefknot.ingest.connectors.mail import problem_text, read_mail
from reefknot.ingest.port import Document, ItemFailure, Page
from reefknot.runtime.log import printable

CHUNK = 512 * 1024
"""Bytes of a message that are asked for at once."""
GROUP_MESSAGES = 50
GROUP_BYTES = 4 * 1024 * 1024
"""Messages that are asked for together."""
PAGE_BYTES = 16 * 1024 * 1024
PAGE_S = 20.0
"""Bytes of messages, or of their texts in memory, and seconds after which a page ends."""
ATTACHMENTS_S = 40.0
"""Time in which attached files of messages that were fetched together are begun to be read."""
MOST_HEADERS = 256 * 1024

_LOCATION = re.compile(r"(.*);UIDVALIDITY=(\d{1,10})/;UID=(\d{10})", re.DOTALL)


class Draft(Struct):
    """A page while it is filled."""

    ends_at: float
    room: int
    documents: list[Document] = []
    deleted: list[str] = []
    failures: list[ItemFailure] = []
    seen: int = 0
    checked: int = 0
    size: int = 0

    def is_full(self) -> bool:
        is_late = asyncio.get_running_loop().time() >= self.ends_at
        return self.room <= 0 or self.size >= PAGE_BYTES or is_late

    def page(self, cursor: str, *, is_last: bool) -> Page:
        return Page(
            cursor=cursor,
            documents=tuple(self.documents),
            deleted=tuple(self.deleted),
            failures=tuple(self.failures),
            is_last=is_last,
            seen=self.seen,
            checked=self.checked,
        )

    def fail(self, location: str, version: str, error: Exception) -> None:
        self.failures.append(ItemFailure(location, version, error))
        self.room -= 1


class MessageReader:
    """Fetches messages of an open folder, and makes documents of them."""

    def __init__(self, settings: ImapSettings) -> None:
        self._settings = settings

    def group(self, uids: Sequence[int], infos: Mapping[int, MessageInfo], single: Collection[int]) -> list[int]:
        """The first of these messages that can be asked for together; a large one and a `single` one come alone."""
        group: list[int] = []
        size = 0
        for uid in uids:
            is_single = infos[uid].size >= CHUNK or uid in single
            size += infos[uid].size
            if group and (is_single or size > GROUP_BYTES):
                break
            group.append(uid)
            if is_single:
                break
        return group

    async def read(
        self, link: ImapConnection, name: str, validity: int, group: Mapping[int, MessageInfo], draft: Draft
    ) -> list[int]:
        """
        Fetch messages and make documents of them; a message that the server does not hand out becomes a failure.

        Returns those that are done with: the first of the group, and maybe all. Raises when the connection breaks.
        """
        found: dict[int, bytes] = {}
        if len(group) > 1:
            try:
                found = await link.content(list(group), "", start=0, count=CHUNK)
            except ImapRefusedError:
                if not link.is_open:
                    raise
        sizes = accumulate(len(found.get(uid, b"")) for uid in group)
        together = (uid for uid, size in zip(group, sizes, strict=True) if size <= GROUP_BYTES)
        done = list(takewhile(lambda uid: uid in found and len(found[uid]) < CHUNK, together))
        if not done:  # alone, longer than announced, or not handed out with others
            uid, info = next(iter(group.items()))
            found, done = {}, [uid]
            try:
                raw = await self.content(link, uid, info)
            except ImapRefusedError as error:
                if not link.is_open or error.failure_type is FailureType.RATE_LIMITED:
                    raise
                draft.fail(location_of(name, validity, uid), self._settings.version(info), error)
                return done
            if raw is None:
                await self.fail_withheld(link, name, validity, done, draft)
                return done
            found[uid] = raw
        found = {uid: found[uid] for uid in done}
        read = partial(self.document, name, validity, until=clock.now() + ATTACHMENTS_S)
        documents = await asyncio.to_thread(lambda: [read(uid, group[uid], found[uid]) for uid in done])
        draft.documents += documents
        draft.room -= len(documents)
        draft.size += sum(max(len(found[uid]), getsizeof(one.text)) for uid, one in zip(done, documents, strict=True))
        return done

    async def fail_withheld(
        self, link: ImapConnection, name: str, validity: int, uids: Sequence[int], draft: Draft
    ) -> None:
        """Make failures of those messages without an answer that the open folder still has; the others are gone."""
        for uid in await link.search(ranges(uids)) if uids else ():
            if uid in uids:
                draft.fail(location_of(name, validity, uid), self._settings.unread_version, withheld())

    async def content(self, link: ImapConnection, uid: int, info: MessageInfo) -> bytes | None:
        """The bytes of a message, or those of its headers when it is too large. The announced size is not trusted."""
        most = self._settings.max_message_bytes
        if info.size <= most:
            pieces: list[bytes] = []
            size = 0
            while size <= most:
                piece = (await link.content([uid], "", start=size, count=CHUNK)).get(uid)
                if piece is None:
                    return None
                pieces.append(piece)
                size += len(piece)
                if len(piece) < CHUNK:
                    return b"".join(pieces)
        return (await link.content([uid], "HEADER", start=0, count=MOST_HEADERS)).get(uid)

    def document(
        self, name: str, validity: int, uid: int, info: MessageInfo, raw: bytes, *, until: float = inf
    ) -> Document:
        """The document of a message, with a new id."""
        settings = self._settings
        is_cut = info.size > settings.max_message_bytes
        mail = read_mail(raw, with_attachments=settings.reads_attachments, headers_only=is_cut, until=until)
        problems = mail.problems
        if is_cut:
            limit = settings.max_message_bytes
            text = (
                f"the message has {info.size} bytes, more than max_message_bytes ({limit}): only its headers were read"
            )
            problems = (text, *problems)
        location = location_of(name, validity, uid)
        content = raw + f"\0{info.size}".encode() if is_cut else raw
        fingerprint = sha256(content).hexdigest()
        latest = mail.sent_at is not None and (info.arrived_at is None or mail.sent_at <= info.arrived_at + 86_400_000)
        return Document(
            id=sha256(f"{location}\0{fingerprint}".encode()).hexdigest()[:32],
            location=location,
            version=settings.version(info),
            title=mail.title,
            text=mail.text,
            fingerprint=fingerprint,
            media_type="message/rfc822",
            modified_at=mail.sent_at if latest else info.arrived_at,
            metadata={"folder": printable(name, most=200), "size": info.size, **mail.metadata},
            problem=problem_text(problems),
        )


def withheld() -> SourceError:
    """The failure of a message that is listed, and that the server gives no answer for."""
    return SourceError("the server lists this message and does not hand it out", FailureType.UNKNOWN)


def prefix_of(name: str) -> str:
    """The beginning of the locations of a folder; no other folder's locations begin so."""
    return re.sub(r"[;%\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", name) + ";UIDVALIDITY="


def location_of(name: str, validity: int, uid: int) -> str:
    """The location of a message; in the order of text, those of a folder are in the order of their UIDs."""
    return f"{prefix_of(name)}{validity}/;UID={uid:010d}"


def place_of(location: str) -> tuple[str, int, int] | None:
    """Folder, UIDVALIDITY and UID of a location."""
    found = _LOCATION.fullmatch(location)
    if found is None:
        return None
    return re.sub(r"%([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), found[1]), int(found[2]), int(found[3])
