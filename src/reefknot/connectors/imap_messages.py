"""
Messages of a mailbox: their locations, how their bytes are fetched, and the documents that are made of them.

Small messages are asked for together, large ones in chunks, too large ones by their headers alone; sizes that a server
announces are never trusted. A message that cannot be fetched becomes a failure of its own. One at which the connection
breaks is asked for alone the next time, and when that breaks it again, is put aside: it must not hold up the others.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from math import inf

from msgspec import Struct

from reefknot import clock
from reefknot.connectors.imap_failures import ImapRefusedError
from reefknot.connectors.imap_protocol import ImapConnection, MessageInfo
from reefknot.connectors.imap_settings import ImapSettings
from reefknot.connectors.mail import problem_text, read_mail
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ports.connector import Document, ItemFailure, Page
from reefknot.runtime.log import printable

CHUNK = 512 * 1024
"""Bytes of a message that are asked for at once."""
GROUP_MESSAGES = 50
GROUP_BYTES = 4 * 1024 * 1024
"""Messages that are asked for together."""
PAGE_BYTES = 32 * 1024 * 1024
PAGE_S = 20.0
"""Bytes and seconds after which a page ends."""
ATTACHMENTS_S = 40.0
"""Time in which attached files of messages that were fetched together are begun to be read."""
MOST_HEADERS = 256 * 1024
MOST_SUSPECTS = 10_000

_LOCATION = re.compile(r"(.*);UIDVALIDITY=(\d{1,10})/;UID=(\d{10})", re.DOTALL)


class Draft(Struct):
    """A page while it is filled."""

    ends_at: float
    room: int
    documents: list[Document] = []
    deleted: list[str] = []
    failures: list[ItemFailure] = []
    seen: int = 0
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
        )


class MessageReader:
    """Fetches messages of an open folder, and makes documents of them."""

    def __init__(self, settings: ImapSettings) -> None:
        self._settings = settings
        self._suspects: dict[str, int] = {}
        """By location: how often the connection broke while the message was fetched."""

    def group(self, uids: Sequence[int], infos: Mapping[int, MessageInfo], locations: Mapping[int, str]) -> list[int]:
        """The first of these messages that can be asked for together; a large or a suspect one comes alone."""
        group: list[int] = []
        size = 0
        for uid in uids:
            is_single = infos[uid].size >= CHUNK or locations[uid] in self._suspects
            size += infos[uid].size
            if group and (is_single or size > GROUP_BYTES):
                break
            group.append(uid)
            if is_single:
                break
        return group

    async def read(
        self, link: ImapConnection, name: str, validity: int, group: Mapping[int, MessageInfo], draft: Draft
    ) -> None:
        """Fetch messages and make documents of them; a message that cannot be fetched becomes a failure."""
        locations = {uid: location_of(name, validity, uid) for uid in group}
        found: dict[int, bytes] = {}
        for uid, location in locations.items():
            if self._suspects.get(location, 0) >= 2:
                reason = SourceError("the connection breaks whenever this message is fetched", FailureType.TRANSIENT)
                draft.failures.append(ItemFailure(location, self._settings.version(group[uid]), reason))
                draft.room -= 1
                del self._suspects[location]
                return
        try:
            if len(group) > 1:
                found = await link.content(list(group), "", start=0, count=CHUNK)
        except ImapRefusedError:
            if not link.is_open:
                raise
        except SourceError:
            self._suspect(locations.values())
            raise
        for uid, info in group.items():
            raw = found.get(uid)
            if raw is None or len(raw) >= CHUNK:  # alone, or longer than announced
                raw = await self._single(link, uid, info, locations[uid], draft)
            if raw is not None:
                found[uid] = raw
                draft.size += len(raw)
        read = partial(self.document, name, validity, until=clock.now() + ATTACHMENTS_S)
        documents = await asyncio.to_thread(
            lambda: [read(uid, group[uid], found[uid]) for uid in group if uid in found]
        )
        draft.documents += documents
        draft.room -= len(documents)

    async def _single(
        self, link: ImapConnection, uid: int, info: MessageInfo, location: str, draft: Draft
    ) -> bytes | None:
        """A message by itself; None when it is gone, or has become a failure."""
        try:
            raw = await self.content(link, uid, info)
        except ImapRefusedError as error:
            if not link.is_open or error.failure_type is FailureType.RATE_LIMITED:
                raise
            draft.failures.append(ItemFailure(location, self._settings.version(info), error))
            draft.room -= 1
            return None
        except SourceError:
            self._suspect([location])
            raise
        self._suspects.pop(location, None)
        return raw

    def _suspect(self, locations: Iterable[str]) -> None:
        if len(self._suspects) > MOST_SUSPECTS:
            self._suspects.clear()
        for location in locations:
            self._suspects[location] = self._suspects.get(location, 0) + 1

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
