"""
The IMAP connector: reads the messages of a mailbox, folder by folder, and notices deletions and moves.

A sync reads all folders first and looks for deletions afterwards, so that a message that was moved is found at its new
place before its old one is missed. A message of a folder is named by UIDVALIDITY and UID, which never mean another one;
the cursor keeps for each folder how far it was read. Deletions are looked for only where the number of messages does
not add up: no UID is given a second time, so what was there and is missing was deleted.

A document keeps its id when the message is found elsewhere with the same content, and is gone from where it was: moved
to another folder, in a folder that was renamed, or after UIDVALIDITY has changed.

A message at which the connection breaks must not hold up the others. The cursor counts these breaks, so that the count
survives the attempt and the process: the page up to there is returned with it, and only the next request fails. What
was asked for together is asked for one by one then, and the third break at one message makes it a failure of its own.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile

import msgspec
from msgspec import Struct

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors.imap_failures import ImapRefusedError
from reefknot.ingest.connectors.imap_messages import (
    GROUP_MESSAGES,
    PAGE_S,
    Draft,
    MessageReader,
    location_of,
    place_of,
    prefix_of,
    withheld,
)
from reefknot.ingest.connectors.imap_protocol import FolderState, ImapConnection, ImapFolder, ranges
from reefknot.ingest.connectors.imap_settings import ImapSettings, read_settings
from reefknot.ingest.port import Document, FetchRequest, KnownItems, Page, SourceContext
from reefknot.runtime.log import logger, printable

WINDOW = 50_000
"""UIDs of one search: its answer is a line of at most half a megabyte."""
CHECKED = 400
"""Known messages that are looked for at once: their UIDs fit into a command line of 8 kB."""
MOST_BREAKS, MOST_LISTED = 3, 100
"""Breaks at one message, the last of which makes it a failure of its own; searches for all UIDs of a folder."""
LARGEST_UID = 2**32 - 1
MOST_CURSOR = 240_000
"""Bytes of a cursor, which names every folder and, where it is to be checked, names it twice."""
IDLE_S = 30.0
"""How long a connection is kept for the next page or item."""


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
    """The folder that is being read."""
    suspects: dict[int, int] = {}
    """UIDs of that folder, and how often the connection broke while they were fetched."""
    is_checking: bool = False
    dirty: list[str] = []
    """Folders in which messages may have been deleted."""
    after: str = ""
    """The last location that was checked for deletion."""


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
        self._messages = MessageReader(self._settings)
        self._present: dict[str, tuple[int, array[int]] | None] = {}
        """By folder: UIDVALIDITY and all UIDs, in order, if this sync has asked for them; None: it was asked once."""
        self._broken: SourceError | None = None
        """The break of the connection that the last page has counted, and that the next request fails with."""
        self._idle: asyncio.TimerHandle | None = None

    # ---- the port ----------------------------------------------------------------------------------------------------

    async def fetch(self, request: FetchRequest) -> Page:
        """The next page: messages first, then deletions."""
        broken, self._broken = self._broken, None
        if broken is not None:
            raise broken
        draft = Draft(ends_at=asyncio.get_running_loop().time() + PAGE_S, room=max(1, request.limit))
        cursor = _decoded(request.cursor)
        if not cursor.is_checking:
            async with self._session() as link:
                if not cursor.is_running:
                    self._folders = await self._chosen(link)
                    cursor = self._begun(cursor)
                cursor.is_checking = await self._read_folders(link, cursor, request.known, draft)
        is_done = cursor.is_checking and not cursor.dirty
        if draft.documents:
            async with self._session() as link:  # a new connection, if the last one broke at a message
                await self._identify(link, draft, request.known)
        elif cursor.dirty and cursor.is_checking and not draft.failures:
            async with self._session() as link:
                is_done = await self._check(link, cursor, request.known, draft)  # against what was kept
        if is_done:
            cursor = _Cursor(folders=cursor.folders, rules=cursor.rules)
            await self._leave()
        return draft.page(msgspec.json.encode(cursor).decode(), is_last=is_done)

    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        """The message at a location, whatever its version."""
        place = place_of(location)
        if place is None:
            return None
        name, validity, uid = place
        async with self._session() as link:
            folder = next((one for one in self._folders if one.name == name), None)
            if folder is None or (await link.state_of(folder)).validity != validity:
                return None
            try:
                info = (await link.infos([uid])).get(uid)
                raw = None if info is None else await self._messages.content(link, uid, info)
            except SourceError as error:
                if link.is_open or error.failure_type is FailureType.RATE_LIMITED:
                    raise
                text = (
                    f"the connection breaks when this message is fetched ({error}); mend it on the server, then requeue"
                )
                raise SourceError(text, FailureType.UNKNOWN) from error
            if info is None or raw is None:
                if await link.search(str(uid)):
                    raise withheld()
                return None
            draft = Draft(ends_at=0.0, room=1)
            draft.documents.append(await asyncio.to_thread(self._messages.document, name, validity, uid, info, raw))
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

    async def _chosen(self, link: ImapConnection) -> list[ImapFolder]:
        """The folders to read, in the order of their names."""
        chosen = self._settings.chosen(await link.folders())
        if sum(2 * len(folder.name.encode()) + 60 for folder in chosen) > MOST_CURSOR:
            text = f"{len(chosen)} folders are too many for one source; choose some with folders or exclude"
            raise SourceError(text, FailureType.PERMANENT)
        return chosen

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if self._idle is not None:
            self._idle.cancel()
        if link is not None:
            await link.logout()

    # ---- new messages ------------------------------------------------------------------------------------------------

    def _begun(self, cursor: _Cursor) -> _Cursor:
        """The cursor of a new sync. Folders that are not there any more are to be checked."""
        self._present = {}
        names = {folder.name for folder in self._folders}
        marks = {name: mark for name, mark in cursor.folders.items() if name in names}
        if cursor.rules != self._settings.rules:
            marks = {name: _Mark(mark.validity, 0, mark.end, mark.count) for name, mark in marks.items()}
        gone = [name for name in cursor.folders if name not in names]
        return _Cursor(folders=marks, rules=self._settings.rules, is_running=True, dirty=gone)

    async def _read_folders(self, link: ImapConnection, cursor: _Cursor, known: KnownItems, draft: Draft) -> bool:
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
                if draft.is_full() or not await self._read_some(link, folder, state, cursor, known, draft):
                    return False
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
        cursor.suspects = {}
        state = await link.examine(folder)
        end = await self._end(link, state, 0 if mark is None or mark.validity != state.validity else mark.end)
        if mark is None or mark.validity != state.validity:
            cursor.folders[folder.name] = _Mark(state.validity, 0, end, state.exists)
            is_dirty = mark is not None or bool(await known.after("", 1, prefix=prefix_of(folder.name)))
        else:
            came = await self._number_between(link, mark.end, end)
            is_dirty = came is None or state.exists - came != mark.count
            cursor.folders[folder.name] = _Mark(state.validity, mark.read, end, state.exists)
        if is_dirty and folder.name not in cursor.dirty:
            cursor.dirty.append(folder.name)
        return state

    async def _end(self, link: ImapConnection, state: FolderState, begin: int) -> int:
        """The last UID of a folder. An announced next one that is far behind `begin` is not taken for true."""
        announced = LARGEST_UID if state.next_uid is None else min(state.next_uid - 1, LARGEST_UID)
        if announced - begin <= WINDOW:
            return announced
        return min(announced, max(await link.search("*"), default=0)) if state.exists else 0

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
        if is_named or _passes(link, error):
            raise error
        logger().warning("%s: the folder %s was passed over: %s", self._name, printable(folder.name, most=100), error)

    async def _read_some(
        self,
        link: ImapConnection,
        folder: ImapFolder,
        state: FolderState,
        cursor: _Cursor,
        known: KnownItems,
        draft: Draft,
    ) -> bool:
        """Read the next messages of the open folder, and move the mark behind them. False: the connection broke."""
        mark = cursor.folders[folder.name]
        uids = await self._next_uids(link, folder, state, mark)
        if not uids:
            return True
        uids = _together(uids[: min(draft.room, GROUP_MESSAGES)], cursor.suspects)
        is_whole = True
        try:
            await self._read_uids(link, folder, state, uids, cursor, known, draft)
        except SourceError as error:
            if error.failure_type is FailureType.RATE_LIMITED:
                raise
            link.abort()
            is_whole = False
            cursor.suspects |= {uid: cursor.suspects.get(uid, 0) + 1 for uid in uids if uid > mark.read}
            if len(uids) > 1 or cursor.suspects[uids[0]] < MOST_BREAKS:
                self._broken = error
            else:
                draft.fail(location_of(folder.name, state.validity, uids[0]), self._settings.unread_version, error)
                mark.read = uids[0]
        cursor.suspects = {uid: breaks for uid, breaks in cursor.suspects.items() if uid > mark.read}
        done = sum(uid <= mark.read for uid in uids)
        draft.seen += done
        self._ahead = (folder.name, mark.validity, self._ahead[2][done:])
        return is_whole

    async def _read_uids(
        self,
        link: ImapConnection,
        folder: ImapFolder,
        state: FolderState,
        uids: list[int],
        cursor: _Cursor,
        known: KnownItems,
        draft: Draft,
    ) -> None:
        """Read these messages until the page is full. The mark is behind those that are done with."""
        mark, name, validity = cursor.folders[folder.name], folder.name, state.validity
        locations = {uid: location_of(name, validity, uid) for uid in uids}
        infos = await link.infos(uids)
        await self._messages.fail_withheld(link, name, validity, [uid for uid in uids if uid not in infos], draft)
        kept = await known.at(list(locations.values()))
        wanted = [
            uid
            for uid in uids
            if uid in infos
            and ((item := kept.get(locations[uid])) is None or item.version != self._settings.version(infos[uid]))
        ]
        is_first = True
        while wanted and (is_first or not draft.is_full()):  # each page gets on
            group = self._messages.group(wanted, infos, cursor.suspects)
            done = await self._messages.read(link, name, validity, {uid: infos[uid] for uid in group}, draft)
            if len(done) < len(group):  # after a refusal or a wrong size: one by one
                cursor.suspects |= {uid: cursor.suspects.get(uid, 0) for uid in group}
            is_first, mark.read, wanted = False, done[-1], wanted[len(done) :]
        mark.read = wanted[0] - 1 if wanted else uids[-1]  # the page is full: the rest comes with the next one

    async def _next_uids(self, link: ImapConnection, folder: ImapFolder, state: FolderState, mark: _Mark) -> list[int]:
        """UIDs behind the mark. None in a whole window: the mark is moved behind it."""
        name, validity, uids = self._ahead
        if (name, validity) == (folder.name, mark.validity) and uids and uids[0] > mark.read:
            return uids
        # A few messages are found at once, however far their UIDs are apart.
        last = mark.end if state.exists <= WINDOW else min(mark.end, mark.read + WINDOW)
        uids = await link.search(f"{mark.read + 1}:{last}", *self._settings.criteria)
        uids = [uid for uid in uids if mark.read < uid <= last]
        self._ahead = (folder.name, mark.validity, uids)
        if not uids:
            mark.read = last
        return uids

    # ---- moves and deletions -----------------------------------------------------------------------------------------

    async def _identify(self, link: ImapConnection, draft: Draft, known: KnownItems) -> None:
        """Give documents the ids that they had: at the same place, or at one that does not have them any more."""
        at = await known.at([document.location for document in draft.documents]) if draft.documents else {}
        new = [document for document in draft.documents if document.location not in at]
        alike = await asyncio.gather(*(known.like(document.fingerprint) for document in new))  # without a wait for each
        candidates = {
            document.location: [item for item in items if item.location != document.location]
            for document, items in zip(new, alike, strict=True)
        }
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
            if (place := place_of(location)) is not None:
                by_folder.setdefault(place[0], {})[location] = place[1:]
        folders = {folder.name: folder for folder in self._folders}
        for name, places in by_folder.items():
            try:
                alive = await self._alive_of_many(link, folders.get(name), places.values())
            except ImapRefusedError as error:
                if _passes(link, error):
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

    async def _alive_of_many(
        self, link: ImapConnection, folder: ImapFolder | None, places: Iterable[tuple[int, int]]
    ) -> set[tuple[int, int]]:
        """
        Messages that a folder still has, as by `_alive`; from the second look of a sync on, by a list of all UIDs.

        To open a large folder for every page, and then the one that is read again, would be most of the work of a sync
        that follows many moves. The list may be old: a UID that is gone stays so, and one that is gone meanwhile is
        noticed as a deletion.
        """
        if folder is None or folder.name not in self._present:
            self._present |= {} if folder is None else {folder.name: None}
            return await self._alive(link, folder, places)
        present = self._present[folder.name]
        if present is None:
            state = await link.state_of(folder)
            end = await self._end(link, state, 0)
            if end > MOST_LISTED * WINDOW:
                return await self._alive(link, folder, places)
            uids = array("Q")
            for first in range(1, end + 1, WINDOW):
                last = min(end, first + WINDOW - 1)
                uids.extend(uid for uid in await link.search(f"{first}:{last}") if first <= uid <= last)
            present = self._present[folder.name] = (state.validity, uids)
        validity, uids = present
        return {(found, uid) for found, uid in places if found == validity and _has(uids, uid)}

    async def _check(self, link: ImapConnection, cursor: _Cursor, known: KnownItems, draft: Draft) -> bool:
        """Look for deleted messages in the folders where some are missing. Returns whether all are checked."""
        folders = {folder.name: folder for folder in self._folders}
        while cursor.dirty:
            if draft.is_full():
                return False
            name = cursor.dirty[0]
            items = await known.after(cursor.after, CHECKED, prefix=prefix_of(name))
            places = {item.id: place[1:] for item in items if (place := place_of(item.location)) is not None}
            try:
                alive = await self._alive(link, folders.get(name), places.values())
            except ImapRefusedError as error:
                if _passes(link, error):
                    raise
                items = []  # it cannot be opened: its documents stay, and the next sync looks again
                if name in cursor.folders:
                    cursor.folders[name].count = -1
            else:
                missing = [item for item, place in places.items() if place not in alive]
                draft.deleted += missing
                draft.room -= len(missing)
            draft.checked += len(items)
            if len(items) < CHECKED:
                cursor.dirty.pop(0)
                cursor.after = ""
            else:
                cursor.after = items[-1].location
        return True


def _has(uids: Sequence[int], uid: int) -> bool:
    place = bisect_left(uids, uid)
    return place < len(uids) and uids[place] == uid


def _together(uids: list[int], suspects: Mapping[int, int]) -> list[int]:
    """The first of these messages that may be asked for together: a suspect comes alone."""
    return uids[:1] if uids[0] in suspects else list(takewhile(lambda uid: uid not in suspects, uids))


def _passes(link: ImapConnection, error: ImapRefusedError) -> bool:
    """Whether the refusal is about the server, and passes; else it is about the folder."""
    return not link.is_open or error.failure_type in (FailureType.TRANSIENT, FailureType.RATE_LIMITED)


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
