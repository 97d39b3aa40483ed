"""
The IMAP connector: reads the messages of a mailbox, folder by folder, and notices deletions and moves.

A sync reads all folders first and looks for deletions afterwards, so that a message that was moved is found at its new
place before its old one is missed. A message of a folder is named by UIDVALIDITY and UID, which never mean another one;
the cursor keeps for each folder how far it was read. Deletions are looked for only where the number of messages does
not add up: no UID is given a second time, so what was there and is missing was deleted.

A document keeps its id when the message is found elsewhere with the same content, and is gone from where it was: moved
to another folder, in a folder that was renamed, or after UIDVALIDITY has changed.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from hashlib import sha256

import msgspec
from msgspec import Struct

from reefknot.connectors.imap_protocol import (
    FolderState,
    ImapConnection,
    ImapFolder,
    ImapRefusedError,
    MessageInfo,
    ranges,
)
from reefknot.connectors.imap_settings import ImapSettings, read_settings
from reefknot.connectors.mail import problem_text, read_mail
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ports.connector import Document, FetchRequest, ItemFailure, KnownItem, KnownItems, Page, SourceContext
from reefknot.runtime.log import logger, printable

WINDOW = 50_000
"""UIDs of one search: its answer is a line of at most half a megabyte."""
CHUNK = 512 * 1024
"""Bytes of a message that are asked for at once."""
GROUP_MESSAGES = 50
GROUP_BYTES = 4 * 1024 * 1024
"""Messages that are asked for together."""
PAGE_BYTES = 32 * 1024 * 1024
PAGE_S = 20.0
"""A page ends after so many bytes, or seconds."""
CHECKED = 400
"""Known messages that are looked for at once: their UIDs fit into a command line of 8 kB."""
IDLE_S = 30.0
"""How long a connection is kept for the next page or item."""
MOST_HEADERS = 256 * 1024
MOST_SUSPECTS = 10_000

_LOCATION = re.compile(r"(.*);UIDVALIDITY=(\d{1,10})/;UID=(\d{10})", re.DOTALL)
_VIRTUAL = frozenset({"\\flagged", "\\important"})
"""Flags of folders that show messages of other folders."""
_LEFT_OUT = frozenset({"\\trash", "\\junk", "\\drafts"})
_LEFT_OUT_NAMES = re.compile(r"trash|spam|junk( e-?mail)?|drafts?|deleted (items|messages)|bulk mail", re.IGNORECASE)


class _Mark(Struct, array_like=True):
    """The part of a folder that is read: all UIDs up to `read`. `count` messages had a UID up to `end`."""

    validity: int
    read: int
    end: int
    count: int


class _Cursor(Struct, omit_defaults=True):
    """The position of a sync. Between two syncs, only `folders` and `rules` are set."""

    folders: dict[str, _Mark] = {}
    rules: str = ""
    """The settings that decide what becomes of a message."""
    is_running: bool = False
    folder: str = ""
    """The folder that is being read; empty behind the last one."""
    is_checking: bool = False
    dirty: list[str] = []
    """Folders in which messages may have been deleted."""
    after: str = ""
    """The last location that was checked for deletion."""


class _Draft(Struct):
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

    def page(self, cursor: _Cursor, *, is_last: bool) -> Page:
        return Page(
            cursor=msgspec.json.encode(cursor).decode(),
            documents=tuple(self.documents),
            deleted=tuple(self.deleted),
            failures=tuple(self.failures),
            is_last=is_last,
            seen=self.seen,
        )


class ImapMailbox:
    """A connector of a mailbox on an IMAP server."""

    def __init__(self, context: SourceContext) -> None:
        self._settings: ImapSettings = read_settings(context.settings, context.folder)
        self._secret = context.secret
        self._name = context.name
        self._link: ImapConnection | None = None
        self._folders: list[ImapFolder] = []
        self._lock = asyncio.Lock()
        self._ahead: tuple[str, int, list[int]] = ("", 0, [])
        """Folder, UIDVALIDITY, and UIDs that were found and not read yet."""
        self._suspects: dict[str, int] = {}
        """By location: how often the connection broke while the message was fetched."""
        self._idle: asyncio.TimerHandle | None = None

    # ---- the port ----------------------------------------------------------------------------------------------------

    async def fetch(self, request: FetchRequest) -> Page:
        """The next page: messages first, then deletions."""
        async with self._session() as link:
            draft = _Draft(ends_at=asyncio.get_running_loop().time() + PAGE_S, room=max(1, request.limit))
            cursor = _decoded(request.cursor)
            if not cursor.is_running:
                self._folders = await self._chosen(link)
                cursor = self._begun(cursor)
            if not cursor.is_checking:
                cursor.is_checking = await self._read_folders(link, cursor, request.known, draft)
                await self._identify(link, draft, request.known)
            is_done = cursor.is_checking and not cursor.dirty
            if cursor.dirty and cursor.is_checking and not draft.documents and not draft.failures:
                is_done = await self._check(link, cursor, request.known, draft)  # against what was kept
            if is_done:
                cursor = _Cursor(folders=cursor.folders, rules=cursor.rules)
                await self._leave()
            return draft.page(cursor, is_last=is_done)

    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        """The message at a location, whatever its version."""
        place = _place(location)
        if place is None:
            return None
        name, validity, uid = place
        async with self._session() as link:
            folder = next((one for one in self._folders if one.name == name), None)
            if folder is None or (await link.state_of(folder)).validity != validity:
                return None
            info = (await link.infos([uid])).get(uid)
            raw = None if info is None else await self._content(link, uid, info)
            if info is None or raw is None:
                return None
            draft = _Draft(ends_at=0.0, room=1)
            draft.documents.append(await asyncio.to_thread(self._document, name, validity, uid, info, raw))
            await self._identify(link, draft, known)
            return draft.documents[0]

    async def test(self) -> str:
        """Log in, and list the folders."""
        async with self._session():
            await self._leave()
        names = ", ".join(printable(folder.name, most=40) for folder in self._folders[:5])
        more = f" and {len(self._folders) - 5} more" if len(self._folders) > 5 else ""
        return f"{self._settings.address}: logged in as {self._settings.user}; folders to read: {names or 'none'}{more}"

    async def close(self) -> None:
        """Close the connection, also one that is in use."""
        if self._link is not None and self._lock.locked():
            self._link.abort()
        await self._leave()

    # ---- the connection ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[ImapConnection]:
        """The connection, for one request at a time. An error closes it, and so does a while without requests."""
        async with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            if self._link is None or not self._link.is_open:
                self._link, self._ahead = ImapConnection(self._settings.address), ("", 0, [])
            link = self._link
            try:
                if not link.is_open:
                    await self._connect(link)
                yield link
            except BaseException:
                link.abort()
                raise
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, link.abort)

    async def _connect(self, link: ImapConnection) -> None:
        is_ready = await link.open()
        if not is_ready:
            await link.login(self._settings.user, self._secret(self._settings.password))
        self._folders = await self._chosen(link)

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if self._idle is not None:
            self._idle.cancel()
        if link is not None:
            await link.logout()

    async def _chosen(self, link: ImapConnection) -> list[ImapFolder]:
        """The folders to read, in the order of their names."""
        found = await link.folders()
        readable = [folder for folder in found if not folder.flags & {"\\noselect", "\\nonexistent"}]
        chosen = _usual(readable)
        if self._settings.folders is not None:
            for pattern in self._settings.folders:
                if not any(_fits(folder.name, [pattern]) for folder in readable):
                    names = ", ".join(printable(folder.name, most=40) for folder in readable[:20])
                    raise SourceError(
                        f"folders: the mailbox has no folder {printable(pattern, most=100)!r}; it has {names}",
                        FailureType.PERMANENT,
                    )
            chosen = [folder for folder in readable if _fits(folder.name, self._settings.folders)]
        return [folder for folder in chosen if not _fits(folder.name, self._settings.exclude)]

    # ---- new messages ------------------------------------------------------------------------------------------------

    def _begun(self, cursor: _Cursor) -> _Cursor:
        """The cursor of a new sync. Folders that are not there any more are to be checked."""
        names = {folder.name for folder in self._folders}
        marks = {name: mark for name, mark in cursor.folders.items() if name in names}
        if cursor.rules != self._settings.rules:
            marks = {name: _Mark(mark.validity, 0, mark.end, mark.count) for name, mark in marks.items()}
        gone = [name for name in cursor.folders if name not in names]
        return _Cursor(folders=marks, rules=self._settings.rules, is_running=True, dirty=gone)

    async def _read_folders(self, link: ImapConnection, cursor: _Cursor, known: KnownItems, draft: _Draft) -> bool:
        """Read messages until the page is full. Returns whether all folders are read."""
        for folder in self._folders:
            if folder.name < cursor.folder:
                continue
            try:
                state = await self._opened(link, folder, cursor, known)
            except ImapRefusedError as error:
                self._passed_over(link, folder, error)
                continue
            cursor.folder = folder.name
            mark = cursor.folders[folder.name]
            while mark.read < mark.end:
                if draft.is_full():
                    return False
                await self._read_some(link, folder, state, mark, known, draft)
        return True

    async def _opened(
        self, link: ImapConnection, folder: ImapFolder, cursor: _Cursor, known: KnownItems
    ) -> FolderState:
        """Open a folder, and decide once in a sync how far it is to be read and whether it is to be checked."""
        mark = cursor.folders.get(folder.name)
        if mark is not None and cursor.folder == folder.name:
            state = await link.state_of(folder)
            if state.validity == mark.validity:
                return state
        state = await link.examine(folder)
        end = await self._end(link, state)
        if mark is None or mark.validity != state.validity:
            cursor.folders[folder.name] = _Mark(state.validity, 0, end, state.exists)
            is_dirty = mark is not None or bool(await known.after("", 1, prefix=_prefix(folder.name)))
        else:
            came = await self._number_between(link, mark.end, end)
            is_dirty = came is None or state.exists - came != mark.count
            cursor.folders[folder.name] = _Mark(state.validity, mark.read, end, state.exists)
        if is_dirty and folder.name not in cursor.dirty:
            cursor.dirty.append(folder.name)
        return state

    async def _end(self, link: ImapConnection, state: FolderState) -> int:
        if state.next_uid is not None:
            return state.next_uid - 1
        return max(await link.search("*"), default=0) if state.exists else 0

    async def _number_between(self, link: ImapConnection, begin: int, end: int) -> int | None:
        """The number of messages with UIDs behind `begin` up to `end`; None when there are too many UIDs to look."""
        if end - begin > 20 * WINDOW:
            return None
        count = 0
        for first in range(begin + 1, end + 1, WINDOW):
            count += len(await link.search(f"{first}:{min(end, first + WINDOW - 1)}"))
        return count

    def _passed_over(self, link: ImapConnection, folder: ImapFolder, error: ImapRefusedError) -> None:
        """Go on without a folder that cannot be opened, unless it was asked for by its name. Its documents stay."""
        is_named = self._settings.folders is not None and folder.name in self._settings.folders
        if not link.is_open or is_named or error.failure_type in (FailureType.TRANSIENT, FailureType.RATE_LIMITED):
            raise error
        logger().warning("%s: the folder %s was passed over: %s", self._name, printable(folder.name, most=100), error)

    async def _read_some(
        self,
        link: ImapConnection,
        folder: ImapFolder,
        state: FolderState,
        mark: _Mark,
        known: KnownItems,
        draft: _Draft,
    ) -> None:
        """Read the next messages of the open folder, and move the mark behind them."""
        uids = await self._next_uids(link, folder, mark)
        if not uids:
            return
        uids = uids[: min(draft.room, GROUP_MESSAGES)]
        infos = await link.infos(uids)
        locations = {uid: _location(folder.name, state.validity, uid) for uid in uids}
        kept = await known.at(list(locations.values()))
        wanted = [
            uid
            for uid in uids
            if uid in infos
            and ((item := kept.get(locations[uid])) is None or item.version != self._settings.version(infos[uid]))
        ]
        position = 0
        while position < len(wanted) and (position == 0 or not draft.is_full()):  # each page gets on
            group = self._group(wanted[position:], infos, locations)
            await self._read_group(link, folder.name, state.validity, {uid: infos[uid] for uid in group}, draft)
            position += len(group)
        if position < len(wanted):  # the page is full: the rest comes with the next one
            mark.read = wanted[position] - 1
        else:
            mark.read = uids[-1]
        done = sum(uid <= mark.read for uid in uids)
        draft.seen += done
        self._ahead = (folder.name, mark.validity, self._ahead[2][done:])

    async def _next_uids(self, link: ImapConnection, folder: ImapFolder, mark: _Mark) -> list[int]:
        """UIDs behind the mark. None in a whole window: the mark is moved behind it."""
        name, validity, uids = self._ahead
        if (name, validity) == (folder.name, mark.validity) and uids and uids[0] > mark.read:
            return uids
        last = min(mark.end, mark.read + WINDOW)
        uids = await link.search(f"{mark.read + 1}:{last}", *self._settings.criteria)
        uids = [uid for uid in uids if mark.read < uid <= last]
        self._ahead = (folder.name, mark.validity, uids)
        if not uids:
            mark.read = last
        return uids

    def _group(self, uids: Sequence[int], infos: Mapping[int, MessageInfo], locations: Mapping[int, str]) -> list[int]:
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

    async def _read_group(
        self, link: ImapConnection, name: str, validity: int, group: Mapping[int, MessageInfo], draft: _Draft
    ) -> None:
        """Fetch messages and make documents of them; a message that cannot be fetched becomes a failure."""
        locations = {uid: _location(name, validity, uid) for uid in group}
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
        documents = await asyncio.to_thread(
            lambda: [self._document(name, validity, uid, group[uid], found[uid]) for uid in group if uid in found]
        )
        draft.documents += documents
        draft.room -= len(documents)

    async def _single(
        self, link: ImapConnection, uid: int, info: MessageInfo, location: str, draft: _Draft
    ) -> bytes | None:
        """A message by itself; None when it is gone, or has become a failure."""
        try:
            raw = await self._content(link, uid, info)
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

    async def _content(self, link: ImapConnection, uid: int, info: MessageInfo) -> bytes | None:
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

    def _document(self, name: str, validity: int, uid: int, info: MessageInfo, raw: bytes) -> Document:
        """The document of a message, with a new id."""
        settings = self._settings
        is_cut = info.size > settings.max_message_bytes
        mail = read_mail(raw, with_attachments=settings.reads_attachments, headers_only=is_cut)
        problems = mail.problems
        if is_cut:
            limit = settings.max_message_bytes
            text = (
                f"the message has {info.size} bytes, more than max_message_bytes ({limit}): only its headers were read"
            )
            problems = (text, *problems)
        location = _location(name, validity, uid)
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

    # ---- moves and deletions -----------------------------------------------------------------------------------------

    async def _identify(self, link: ImapConnection, draft: _Draft, known: KnownItems) -> None:
        """Give documents the ids that they had: at the same place, or at one that does not have them any more."""
        at = await known.at([document.location for document in draft.documents]) if draft.documents else {}
        candidates: dict[str, list[KnownItem]] = {}
        for document in draft.documents:
            if document.location not in at:
                like = await known.like(document.fingerprint)
                candidates[document.location] = [item for item in like if item.location != document.location]
        gone = await self._gone(link, {item.location for items in candidates.values() for item in items})
        taken: set[str] = {item.id for item in at.values()}
        for number, document in enumerate(draft.documents):
            item = at.get(document.location)
            if item is None:
                moved = (one for one in candidates[document.location] if one.location in gone and one.id not in taken)
                item = next(moved, None)
            if item is not None:
                taken.add(item.id)
                draft.documents[number] = msgspec.structs.replace(document, id=item.id)

    async def _gone(self, link: ImapConnection, locations: Iterable[str]) -> set[str]:
        """The locations among these that have no message any more."""
        gone: set[str] = set()
        by_folder: dict[str, dict[str, tuple[int, int]]] = {}
        for location in locations:
            if (place := _place(location)) is not None:
                by_folder.setdefault(place[0], {})[location] = place[1:]
        folders = {folder.name: folder for folder in self._folders}
        for name, places in by_folder.items():
            try:
                alive = await self._alive(link, folders.get(name), places.values())
            except ImapRefusedError:
                if not link.is_open:
                    raise
                continue
            gone |= {location for location, place in places.items() if place not in alive}
        return gone

    async def _alive(
        self, link: ImapConnection, folder: ImapFolder | None, places: Iterable[tuple[int, int]]
    ) -> set[tuple[int, int]]:
        """The messages, by UIDVALIDITY and UID, that a folder still has; None is a folder that is gone."""
        if folder is None:
            return set()
        state = await link.state_of(folder)
        uids = sorted(uid for validity, uid in places if validity == state.validity)
        alive: set[tuple[int, int]] = set()
        for first in range(0, len(uids), CHECKED):
            found = await link.search(ranges(uids[first : first + CHECKED]))
            alive |= {(state.validity, uid) for uid in found}
        return alive

    async def _check(self, link: ImapConnection, cursor: _Cursor, known: KnownItems, draft: _Draft) -> bool:
        """Look for deleted messages in the folders where some are missing. Returns whether all are checked."""
        folders = {folder.name: folder for folder in self._folders}
        while cursor.dirty:
            if draft.is_full():
                return False
            name = cursor.dirty[0]
            items = await known.after(cursor.after, CHECKED, prefix=_prefix(name))
            places = {item.id: place[1:] for item in items if (place := _place(item.location)) is not None}
            try:
                alive = await self._alive(link, folders.get(name), places.values())
            except ImapRefusedError:
                if not link.is_open:
                    raise
                items = []  # it cannot be opened: its documents stay
            else:
                missing = [item for item, place in places.items() if place not in alive]
                draft.deleted += missing
                draft.room -= len(missing)
            draft.seen += len(items)
            if len(items) < CHECKED:
                cursor.dirty.pop(0)
                cursor.after = ""
            else:
                cursor.after = items[-1].location
        return True


def _usual(folders: list[ImapFolder]) -> list[ImapFolder]:
    """The folders that a reader of mail expects: the one with everything, or all but trash, spam and drafts."""
    everything = [folder for folder in folders if "\\all" in folder.flags]
    if everything:
        return everything
    has_flags = any(folder.flags & _LEFT_OUT for folder in folders)
    return [
        folder
        for folder in folders
        if not folder.flags & (_LEFT_OUT | _VIRTUAL)
        and (has_flags or not _LEFT_OUT_NAMES.fullmatch(re.split(r"[/.]", folder.name)[-1]))
    ]


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, one) or (name.upper() == "INBOX" == one.upper()) for one in patterns)


def _prefix(name: str) -> str:
    """The beginning of the locations of a folder; no other folder's locations begin so."""
    return re.sub(r"[;%\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", name) + ";UIDVALIDITY="


def _location(name: str, validity: int, uid: int) -> str:
    """The location of a message; in the order of text, those of a folder are in the order of their UIDs."""
    return f"{_prefix(name)}{validity}/;UID={uid:010d}"


def _place(location: str) -> tuple[str, int, int] | None:
    """Folder, UIDVALIDITY and UID of a location."""
    found = _LOCATION.fullmatch(location)
    if found is None:
        return None
    return re.sub(r"%([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), found[1]), int(found[2]), int(found[3])


def _decoded(cursor: str) -> _Cursor:
    if not cursor:
        return _Cursor()
    try:
        return msgspec.json.decode(cursor, type=_Cursor)
    except msgspec.DecodeError:
        raise SourceError(
            "the cursor of this source was not written by this connector; forget it, and everything is read again",
            FailureType.PERMANENT,
        ) from None
