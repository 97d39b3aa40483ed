"""
`local_files`: the files of a folder as documents.

A sync has two phases. The scan goes through the folder in the order of locations, compares each file's times with what
is kept, and reads those that differ. Then the prune goes through what is kept, and looks for each file on the disk by
itself: so a file is only ever deleted because it is not there, never because a scan has not seen it.

A file that was moved keeps its identity: it is new where it is, the one with its content or its inode is gone. A move
during a scan, from behind its position to before it, looks like a deletion. So a file that disappeared since the scan
began is not deleted yet: another round follows, and finds it.
"""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from reefknot import clock
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors.file_contents import DecodedFile, decoded, media_type_of
from reefknot.ingest.connectors.file_selection import Parts, Patterns, parts_of, read_settings
from reefknot.ingest.connectors.folders import (
    FileOnDisk,
    Folder,
    FolderWalk,
    LinkLeadsOutsideError,
    OpenFolder,
    Presence,
    Sighting,
    check_depth,
    file_clock_ns,
    is_gone,
    item_error,
    times_of,
)
from reefknot.ingest.connectors.text_extraction import is_installed
from reefknot.ingest.port import Document, FetchRequest, ItemFailure, KnownItem, KnownItems, Page, SourceContext
from reefknot.runtime.log import printable

T = TypeVar("T")

STUCK_S = 60.0
"""Longest time for one step in a thread: a disk that does not answer in this time is down."""
PAGE_S = 10.0
"""Time after which a page ends, however few documents it has: what is kept need not be read again."""
PAGE_CHARACTERS = 16 << 20
"""Text after which a page ends."""
BATCH = 200
"""Files that are looked at in one step."""
READ_AT_ONCE = 32
"""Files that are read in one step, or fewer that have `READ_BYTES`."""
READ_BYTES = 4 << 20
LOOKS_PER_DOCUMENT = 20
"""Files of a page that may be looked at for each document that it may have."""
MOST_ROUNDS = 3
MOST_DEPARTED = 10_000
"""Files that are gone and may be found again by their inodes, when their contents changed too."""
MOST_NAMED = 3
MOST_COUNTED = 10_000
WATCH_TIMEOUT_MS = 5000
LATEST_MS = 253_402_300_799_999
"""The end of the year 9999."""


# ---- versions --------------------------------------------------------------------------------------------------------

_UNSETTLED = "?"


def _is_unchanged(kept: str, seen: str) -> bool:
    """Whether a file is as it was kept. `kept` has the generation of the inode behind a slash."""
    return kept.partition("/")[0] == seen and not kept.endswith(_UNSETTLED)


def _inode(version: str) -> str:
    """Inode and generation, which no other file ever has at the same time or later; empty when that is not known."""
    times, _, generation = version.rstrip(_UNSETTLED).partition("/")
    return f"{times.rpartition('-')[2]}/{generation}" if generation else ""


# ---- the cursor ------------------------------------------------------------------------------------------------------


class FolderCursor(Struct, frozen=True, omit_defaults=True):
    """The place of a sync: phase and location, and what is known since the scan began."""

    phase: str = "scan"
    after: str = ""
    root: str = ""
    """The identity of the folder."""
    was: str = ""
    """Its identity in the sync before."""
    started_ns: int = 0
    """When this round began; 0 before a sync."""
    round: int = 1
    seen: int = 0
    nothing_known: bool = False
    reads_all: bool = False
    """Whether unchanged files are read, too: the cursor was forgotten for that."""
    is_unsure: bool = False
    """Whether something disappeared since this round began."""


def _read_cursor(text: str) -> FolderCursor:
    """The cursor; one that cannot be read starts from the beginning, which costs time and nothing else."""
    if not text:
        return FolderCursor()
    try:
        return msgspec.json.decode(text, type=FolderCursor)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return FolderCursor()


def _written(cursor: FolderCursor) -> str:
    return msgspec.json.encode(cursor).decode()


class _Draft:
    """A page that is being filled."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ends = clock.now() + PAGE_S
        self.documents: list[Document] = []
        self.failures: list[ItemFailure] = []
        self.taken: set[str] = set()
        """The ids in this page."""
        self.characters = 0
        self.seen = 0

    @property
    def is_full(self) -> bool:
        return (
            len(self.documents) + len(self.failures) >= self._limit
            or self.characters >= PAGE_CHARACTERS
            or self.seen >= self._limit * LOOKS_PER_DOCUMENT
            or clock.now() >= self._ends
        )

    def add(self, document: Document) -> None:
        self.documents.append(document)
        self.taken.add(document.id)
        self.characters += len(document.text)

    def page(self, cursor: FolderCursor) -> Page:
        return Page(
            cursor=_written(cursor),
            documents=tuple(self.documents),
            failures=tuple(self.failures),
            is_last=False,
            seen=self.seen,
        )


class _Scan:
    """A walk that continues with the next page, and the files that it found to be gone."""

    def __init__(self, folder: Folder, after: str) -> None:
        self.walk = FolderWalk(folder, after)
        self.departed: dict[str, KnownItem] | None = None


# ---- the connector ---------------------------------------------------------------------------------------------------


class LocalFiles:
    """The connector `local_files`."""

    READER = "l1"
    """What reads the files: a new one has every file read again."""
    MORE_KEYS: Sequence[str] = ()
    ALWAYS_EXCLUDED: Sequence[str] = ()
    _ending = ""
    """Files with another ending are not wanted."""

    def __init__(self, context: SourceContext) -> None:
        self.name = context.name
        self.settings = read_settings(context, more=self.MORE_KEYS)
        excluded = (*self.settings.exclude, *self.ALWAYS_EXCLUDED)
        self._patterns = Patterns(self.settings.include, excluded, ending=self._ending)
        self._folder = Folder(self.settings, self._patterns)
        self._going_on: tuple[str, _Scan] | None = None
        """The scan that the cursor of the last page continues. Without it, the walk goes to that place again."""

    async def fetch(self, request: FetchRequest) -> Page:
        """The next page of the scan or of the prune."""
        cursor = _read_cursor(request.cursor)
        root = await self._in_thread(self._identity)
        if cursor.started_ns == 0 or cursor.root != root:
            self._going_on = None
            nothing_known = not await request.known.after("", 1)
            cursor = FolderCursor(
                root=root,
                was=cursor.root,
                started_ns=file_clock_ns(),
                nothing_known=nothing_known,
                reads_all=not request.cursor and not nothing_known,
            )
        if cursor.phase == "prune":
            return await self._prune(request, cursor)
        return await self._scan(request, cursor)

    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        """A single file again. A folder that could not be listed is tried; its files come with the next sync."""
        if location.endswith("/"):
            await self._in_thread(self._list_folder, location)
            return None
        document = await self._in_thread(self._read_one, location)
        if document is None:
            return None
        kept = (await known.at([location])).get(location)
        moved = None if kept else await self._moved(document, known, set(), _Scan(self._folder, ""))
        found = kept or moved
        return document if found is None else replace(document, id=found.id)

    async def test(self) -> str:
        """Count the files of the folder that can be opened, up to a bound, and name what cannot be read."""
        files, unreadable = await self._count()
        return f"{self.settings.path}: {counted(files, 'file')}{unreadable}"

    async def _count(self, ending: str = "") -> tuple[int, str]:
        """The number of wanted files whose names end so, up to a bound, and the end of a sentence on errors. Where
        there are files and none of them can be read, that is the error."""
        walk = FolderWalk(self._folder, "", opens=True)
        ends, files, errors = clock.now() + PAGE_S, 0, list[SourceError]()
        while not walk.is_done and files + len(errors) < MOST_COUNTED and clock.now() < ends:
            met = await self._in_thread(walk.take, BATCH, "")
            errors += [one.error for one in met if one.error is not None]
            files += sum(1 for one in met if one.error is None and one.location.lower().endswith(ending))
        named = "; ".join(printable(str(one), most=200) for one in errors[:MOST_NAMED])
        more = f"; and {len(errors) - MOST_NAMED} more" if len(errors) > MOST_NAMED else ""
        unreadable = f"; cannot be read: {named}{more}" if errors else ""
        if errors and not files and not ending:
            message, worst = f"{self.settings.path}: no file{unreadable}", errors[0]
            raise SourceError(message, worst.failure_type, forbidden=worst.forbidden)
        return (files if walk.is_done else MOST_COUNTED), unreadable

    async def close(self) -> None:
        """Forget the walk. No file is open between two calls."""
        self._going_on = None

    async def watch(self) -> AsyncIterator[None]:
        """Yields after changes of wanted files and of folders. Ends when the folder is not the one it was."""
        try:
            from watchfiles import Change, awatch
        except ImportError:
            message = (
                "on_change needs the package watchfiles: pip install '.[ingest]' in a checkout, or remove on_change"
            )
            raise SourceError(message, FailureType.PERMANENT) from None
        root = await self._in_thread(self._identity)
        top = str(await self._in_thread(self.settings.path.resolve))

        def matters(change: Change, path: str) -> bool:
            parts = tuple(part for part in path[len(top) :].split("/") if part)
            if not parts or self._patterns.wants(parts):
                return True
            return change is not Change.modified and self._patterns.may_hold(parts)  # it may be a folder

        try:
            async for changes in awatch(
                top, watch_filter=matters, rust_timeout=WATCH_TIMEOUT_MS, yield_on_timeout=True, debounce=1600, step=200
            ):
                if changes:
                    yield
                if await self._in_thread(self._identity_or_none) != root:
                    return
        except (OSError, RuntimeError) as error:  # watchfiles raises a RuntimeError of its own
            message = (
                f"the folder {top} cannot be watched: {error}; scheduled syncs go on. "
                "On Linux, raise fs.inotify.max_user_watches if its limit was reached"
            )
            raise SourceError(message, FailureType.TRANSIENT) from error

    def describe(self, file: FileOnDisk) -> Document:
        """The file as a document. A subclass reads formats of its own here."""
        content = file.read.content
        text = DecodedFile(None) if content is None else decoded(content, file.name)
        problem = text.problem
        if content is None:
            size, most = file.read.state.st_size, self.settings.max_bytes
            problem = f"its text was not read: it has {size} bytes, and max_bytes is {most}; raise max_bytes to read it"
        return self._document(file, text, problem)

    def _document(self, file: FileOnDisk, text: DecodedFile, problem: str) -> Document:
        content, charset = file.read.content, {"charset": text.charset} if text.charset else {}
        modified_at = file.read.state.st_mtime_ns // 1_000_000
        return Document(
            id=sha256(f"{file.location}\0{file.version}".encode()).hexdigest()[:32],
            location=file.location,
            version=file.version,
            title=file.name,
            text=text.text or "",
            fingerprint="" if content is None else sha256(content).hexdigest(),
            media_type=media_type_of(file.name, is_text=text.text is not None and not text.is_extracted),
            modified_at=modified_at if 0 <= modified_at <= LATEST_MS else None,
            metadata={"name": file.name, "size": file.read.state.st_size} | charset,
            problem=problem,
        )

    # ---- the scan ----

    async def _scan(self, request: FetchRequest, cursor: FolderCursor) -> Page:
        going_on, self._going_on = self._going_on, None
        scan = going_on[1] if going_on and going_on[0] == request.cursor else _Scan(self._folder, cursor.after)
        draft = _Draft(request.limit)
        after = cursor.after
        while not scan.walk.is_done:
            met = await self._in_thread(scan.walk.take, BATCH, cursor.root)
            used = await self._add(met, draft, request.known, cursor, scan)
            if used:
                after = met[used - 1].location
            scan.walk.put_back(met[used:])
            after = max(after, scan.walk.passed)
            if draft.is_full:
                break
        cursor = replace(cursor, after=after, seen=cursor.seen + draft.seen)
        if not scan.walk.is_done:
            page = draft.page(cursor)
            self._going_on = page.cursor, scan
            return page
        if cursor.seen == 0 and cursor.was != cursor.root and not self.settings.allow_empty:
            await self._refuse_emptiness(request.known)
        return draft.page(replace(cursor, phase="prune", after=""))

    async def _refuse_emptiness(self, known: KnownItems) -> None:
        if await known.after("", 1):
            raise SourceError(
                f"the folder {self.settings.path} has no file that is wanted, is another folder than in the last sync, "
                "and documents of it are kept: mount its disk, or correct `path`; if it really is empty, set "
                "`allow_empty: true` and the documents are deleted",
                FailureType.PERMANENT,
            )

    async def _add(
        self, met: Sequence[Sighting], draft: _Draft, known: KnownItems, cursor: FolderCursor, scan: _Scan
    ) -> int:
        """Add what is new and changed to the page until it is full. Returns how many sightings were used up."""
        kept = await known.at([sighting.location for sighting in met if sighting.error is None])
        used = 0
        while used < len(met):
            chunk = met[used : used + READ_AT_ONCE]
            changed = [one for one in chunk if one.error is None and (cursor.reads_all or not self._is_kept(one, kept))]
            read = await self._in_thread(self._read_many, changed, cursor.root) if changed else {}
            for sighting in chunk:
                if sighting in changed and sighting.location not in read:
                    break  # those before it were large or slow
                outcome = sighting.error or read.get(sighting.location)
                used += 1
                if outcome is None and sighting in changed:
                    continue  # it is gone meanwhile
                draft.seen += 1
                if isinstance(outcome, SourceError):
                    draft.failures.append(ItemFailure(sighting.location, self._version(sighting.state), outcome))
                elif outcome is not None:
                    item = kept.get(sighting.location)
                    if item is not None and item.id in draft.taken:
                        item = None  # that one has moved in this page, and this file came in its place
                    elif item is None and not cursor.nothing_known:
                        item = await self._moved(outcome, known, draft.taken, scan)
                    draft.add(outcome if item is None else replace(outcome, id=item.id))
                if draft.is_full:
                    return used
        return used

    def _is_kept(self, sighting: Sighting, kept: Mapping[str, KnownItem]) -> bool:
        item = kept.get(sighting.location)
        return item is not None and _is_unchanged(item.version, self._version(sighting.state))

    def _version(self, about: os.stat_result | None) -> str:
        """The version of a file in this state. A file that becomes too large, or no longer is, has another one."""
        reader = f"{self.READER}{'t' if is_installed() else ''}"  # with the extra `text`, there is more to read
        if about is None:
            return reader
        return f"{reader}{'+' if about.st_size > self.settings.max_bytes else ''}-{times_of(about)}"

    # ---- moves ----

    async def _moved(self, new: Document, known: KnownItems, taken: AbstractSet[str], scan: _Scan) -> KnownItem | None:
        """The item that a new file was before it was moved, by its content or its inode; None when it was nowhere."""
        inode = _inode(new.version)
        if new.fingerprint and new.metadata["size"]:
            alike = [item for item in await known.like(new.fingerprint) if item.id not in taken]
            gone = await self._in_thread(self._gone_among, alike) if alike else []
            if gone:
                name = new.location.rpartition("/")[2]
                return max(
                    gone, key=lambda item: (_inode(item.version) == inode, item.location.rpartition("/")[2] == name)
                )
        if not inode:
            return None
        if scan.departed is None:
            scan.departed = await self._departed(known)
        item = scan.departed.get(inode)
        return item if item is not None and item.id not in taken else None

    async def _departed(self, known: KnownItems) -> dict[str, KnownItem]:
        """The items whose files are gone, by their inodes."""
        departed: dict[str, KnownItem] = {}
        after = ""
        while len(departed) < MOST_DEPARTED and (items := await known.after(after, 1000)):
            after = items[-1].location
            with_inode = [item for item in items if _inode(item.version)]
            departed |= {_inode(item.version): item for item in await self._in_thread(self._gone_among, with_inode)}
        return departed

    # ---- the prune ----

    async def _prune(self, request: FetchRequest, cursor: FolderCursor) -> Page:
        number = min(request.limit * 10, MOST_COUNTED)
        items = await request.known.after(cursor.after, number)
        deleted, is_unsure = await self._in_thread(self._departures, items, cursor) if items else ([], False)
        is_unsure = is_unsure or cursor.is_unsure
        if len(items) == number:
            following = replace(cursor, after=items[-1].location, is_unsure=is_unsure)
        elif is_unsure:
            following = FolderCursor(
                root=cursor.root, was=cursor.root, started_ns=file_clock_ns(), round=cursor.round + 1
            )
        else:
            following = FolderCursor(root=cursor.root)
        is_last = following.started_ns == 0
        return Page(cursor=_written(following), deleted=tuple(deleted), is_last=is_last, checked=len(items))

    # ---- in threads ----

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            async with asyncio.timeout(STUCK_S):
                return await asyncio.to_thread(work, *arguments)
        except TimeoutError as error:
            message = f"the disk of {self.settings.path} did not answer within {STUCK_S:g} s; it is tried again"
            raise SourceError(message, FailureType.TRANSIENT) from error

    def _identity(self) -> str:
        with self._folder.opened() as root:
            return root.identity

    def _identity_or_none(self) -> str | None:
        try:
            return self._identity()
        except SourceError:
            return None

    def _list_folder(self, location: str) -> None:
        parts = parts_of(location[:-1])
        if parts is None or not self._patterns.may_hold(parts):
            return
        with self._folder.opened() as root:
            try:
                check_depth(parts, location)
                root.children(parts, "")
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG or not is_gone(error):
                    raise item_error(error, location) from error

    def _read_one(self, location: str) -> Document | None:
        parts = parts_of(location)
        if parts is None or not self._patterns.wants(parts):
            return None
        with self._folder.opened() as root:
            document = self._read(root, location, parts)
        if isinstance(document, SourceError):
            raise document
        return document

    def _read_many(self, sightings: Sequence[Sighting], expected: str) -> dict[str, Document | SourceError | None]:
        """Files by location, in order; not all of them when they are large or slow. None: the file is gone."""
        read: dict[str, Document | SourceError | None] = {}
        size, ends = 0, clock.now() + PAGE_S
        with self._folder.opened(expected) as root:
            for sighting in sightings:
                if read and (size >= READ_BYTES or clock.now() >= ends):  # some may take long to read
                    break
                outcome = read[sighting.location] = self._read(root, sighting.location, sighting.parts)
                size += outcome.metadata["size"] if isinstance(outcome, Document) and outcome.fingerprint else 0
        return read

    def _read(self, root: OpenFolder, location: str, parts: Parts) -> Document | SourceError | None:
        try:
            content = root.read(parts)
        except OSError as error:
            leads_outside = isinstance(error, LinkLeadsOutsideError)
            return None if is_gone(error) and not leads_outside else item_error(error, location)
        if content is None:
            return None
        version = f"{self._version(content.state)}/{content.generation}{'' if content.is_settled else _UNSETTLED}"
        try:
            return self.describe(FileOnDisk(location, parts, version, content))
        except Exception as error:
            what = printable(f"{type(error).__name__}: {error}", most=200)
            text = f"{printable(location, most=200)} cannot be read as a document ({what}); exclude it, and report this"
            return SourceError(text, FailureType.PERMANENT)

    def _gone_among(self, items: Sequence[KnownItem]) -> list[KnownItem]:
        with self._folder.opened() as root:
            return [item for item in items if root.presence(item.location) is Presence.GONE]

    def _departures(self, items: Sequence[KnownItem], cursor: FolderCursor) -> tuple[list[str], bool]:
        """The ids of files that are gone or not wanted, and whether some disappeared since the round began."""
        deleted: list[str] = []
        is_unsure = False
        with self._folder.opened(cursor.root) as root:
            for item in items:
                match root.presence(item.location):
                    case Presence.UNWANTED:
                        deleted.append(item.id)
                    case Presence.GONE:
                        is_recent = cursor.round < MOST_ROUNDS and root.changed_since(item.location, cursor.started_ns)
                        is_unsure = is_unsure or is_recent
                        if not is_recent:
                            deleted.append(item.id)
                    case _:
                        continue
        return deleted, is_unsure


def counted(number: int, noun: str) -> str:
    """The number with its noun: `1 file`, `2 files`, `10000 files or more`."""
    return f"{number} {noun}{'' if number == 1 else 's'}{' or more' if number >= MOST_COUNTED else ''}"
