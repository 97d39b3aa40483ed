"""
The connector of a GitHub repository: files of one branch, issues and pull requests.

A sync goes through phases, and its cursor says how far it has come. Files are compared by the hashes of a commit's
tree; a push while they are read restarts that phase, and what is kept already is not fetched again. Issues are read
from the oldest change to the newest, so that one that changes meanwhile comes again at the end; pull requests, for
which GitHub knows no `since`, from the newest change down to the last sync's. Requests that would repeat the last
sync's carry its ETags: an unchanged repository costs nothing of the rate limit.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from reefknot import clock
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors.github_api import RIGHTS, ApiAnswer, GithubApi, path_of
from reefknot.ingest.connectors.github_content import (
    ApiReference,
    ApiRepository,
    CommitTree,
    Conversation,
    DocumentReader,
    Listings,
    TreeEntry,
    listing_query,
    parsed_time,
    shown_time,
    version_of,
)
from reefknot.ingest.connectors.github_settings import GithubSettings
from reefknot.ingest.port import Document, FetchRequest, ItemFailure, KnownItem, KnownItems, Page, SourceContext

PAGE_S = 30.0
"""Time after which a page is closed with what it has, so that a slow server does not outlast the page's time limit."""
LARGEST_PAGE = 16 * 1024 * 1024
"""Characters after which a page is closed."""
BATCH = 500
"""Known items that are looked up at once."""
OVERLAP = timedelta(seconds=60)
"""How far a sync reaches back before the last change that was seen: a change may become visible late."""
SWEEP_S = 86_400.0
"""Time between two looks for issues that were deleted or transferred."""

Phase = Literal["start", "dropped", "files", "lost_files", "issues", "pull_requests", "lost_issues", "done"]
_PHASES: tuple[Phase, ...] = get_args(Phase)


class SyncState(Struct, omit_defaults=True):
    """The cursor: the phase, the place in it, and what the last complete sync saw."""

    scope: str = ""
    """The fingerprint of the settings; with other ones everything is looked at again."""
    phase: Phase = "done"
    path: str = ""
    """The path, or location, that the phase has reached."""
    repository_etag: str = ""
    default_branch: str = ""
    url: str = ""
    branch: str = ""
    commit: str = ""
    commit_etag: str = ""
    complete: str | None = None
    """The commit whose files are all kept."""
    since: str = ""
    """The change that the issues have reached, as GitHub writes times."""
    page: int = 1
    is_closing: bool = False
    """Whether the next request for issues is that of the next sync, made for its ETag."""
    issues_etag: str = ""
    newest_pull: str = ""
    pulls_since: str = ""
    offset: int = 0
    pulls_etag: str = ""
    next_pulls_etag: str = ""
    swept_at: float = 0.0

    @property
    def place(self) -> tuple[str | int, ...]:
        """The place that the sync has reached."""
        return self.phase, self.path, self.commit, self.since, self.page, self.is_closing, self.offset


class _PageInProgress:
    """A page in the making."""

    def __init__(self, state: SyncState, known: KnownItems, limit: int) -> None:
        self.state = state
        self.known = known
        self.limit = limit
        self.deleted: list[str] = []
        self.failures: list[ItemFailure] = []
        self.moved: set[str] = set()
        """The ids of documents of this page that were found at another path."""
        self.seen = self.checked = 0
        self.steps = 0
        """The items and requests that the page has got on by; without any it is not closed for lack of time."""
        self.is_closed = False
        self._documents: dict[str, Document] = {}
        self._characters = 0
        self._ends = clock.now() + PAGE_S

    def add(self, document: Document) -> None:
        self._documents[document.location] = document
        self._characters += len(document.text)

    def look(self) -> None:
        """Count a kept document that was looked for."""
        self.steps += 1
        self.checked += 1

    async def at(self, locations: Sequence[str]) -> dict[str, KnownItem]:
        """The items at these locations: those of this page, and those that are kept."""
        found = await self.known.at(locations)
        for location in locations:
            if one := self._documents.get(location):
                found[location] = KnownItem(one.id, one.location, one.version, one.fingerprint)
        return found

    @property
    def count(self) -> int:
        return len(self._documents) + len(self.deleted) + len(self.failures)

    @property
    def is_full(self) -> bool:
        is_late = self.steps > 0 and clock.now() >= self._ends
        return self.is_closed or is_late or self.count >= self.limit or self._characters >= LARGEST_PAGE

    def page(self) -> Page:
        return Page(
            cursor=msgspec.json.encode(self.state).decode(),
            documents=tuple(self._documents.values()),
            deleted=tuple(self.deleted),
            failures=tuple(self.failures),
            is_last=self.state.phase == "done",
            seen=self.seen,
            checked=self.checked,
        )


class GithubRepository:
    """The connector `github_repository`."""

    def __init__(self, context: SourceContext) -> None:
        self._settings = settings = GithubSettings.of(context)
        token = settings.token
        self._api = GithubApi(
            settings.base_url,
            settings.repository,
            token=(lambda: context.secret(token)) if token else None,
            ca_file=settings.ca_file,
        )
        self._reader = DocumentReader(self._api, settings)
        self._tree = CommitTree(self._api, "")
        self._present: set[int] | None = None
        """The issues that a look for lost ones has found so far."""
        self._listings = Listings(self._api)
        self._steps: dict[Phase, Callable[[_PageInProgress], Awaitable[None]]] = {
            "start": self._start,
            "dropped": self._drop,
            "files": self._files,
            "lost_files": self._lost_files,
            "issues": self._issues,
            "pull_requests": self._pull_requests,
            "lost_issues": self._lost_issues,
        }

    async def fetch(self, request: FetchRequest) -> Page:
        state = self._resumed(request.cursor)
        draft, began = _PageInProgress(state, request.known, request.limit), state.place
        try:
            while state.phase != "done" and not draft.is_full:
                await self._steps[state.phase](draft)
        except SourceError:
            if not draft.count and state.place == began:
                raise
            # What was read is kept; the next page meets the failure first, and raises it.
        return draft.page()

    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        kind, _, name = location.partition("/")
        draft = _PageInProgress(SyncState(), known, 1)
        if kind == "files":
            return await self._file_again(draft, name)
        if kind not in ("issues", "pull_requests") or not name.isdecimal() or kind not in self._settings.content:
            return None
        path = path_of("issues" if kind == "issues" else "pulls", name)
        answer = await self._api.get(path, expected=(301, 404, 410))
        if answer.status != 200:
            return None
        one = self._api.decoded(answer, Conversation)
        if kind == "issues" and one.pull_request is not None:
            return None
        return await self._reader.conversation(kind, one, version_of(one, answer))

    async def test(self) -> str:
        settings, state = self._settings, SyncState()
        await self._describe(state)
        found = f"{settings.repository}: "
        if "files" in settings.content:
            await self._head(state)
            found += f"branch {state.branch} at {state.commit[:12] or 'no commit yet'}"
        for kind, path in (("issues", "/issues"), ("pull_requests", "/pulls")):
            if kind in settings.content:
                answer = await self._api.get(path, {"per_page": 1}, expected=(410,))
                found += f", {kind.replace('_', ' ')} {'readable' if answer.status == 200 else 'disabled'}"
        left = f"; {self._api.remaining} requests left" if self._api.remaining.isdecimal() else ""
        return found.replace(": , ", ": ") + left

    async def close(self) -> None:
        await self._api.close()

    def _resumed(self, cursor: str) -> SyncState:
        """The state of a cursor. One of other settings or of another program starts over; kept documents stay known."""
        state = SyncState(scope=self._settings.scope, swept_at=0.0 if cursor else clock.wall())
        with suppress(msgspec.DecodeError):
            found = msgspec.json.decode(cursor, type=SyncState)
            if found.scope == state.scope:
                state = found
        if state.phase == "done":
            state.phase, state.path, state.page, state.offset = "start", "", 1, 0
        return state

    # ---- the phases --------------------------------------------------------------------------------------------------

    async def _start(self, draft: _PageInProgress) -> None:
        self._listings = Listings(self._api)
        await self._describe(draft.state)
        _go_on(draft.state)

    async def _describe(self, state: SyncState) -> None:
        answer = await self._api.get("", etag=state.repository_etag)
        if not answer.is_unchanged:
            found = self._api.decoded(answer, ApiRepository)
            state.repository_etag, state.url = answer.etag, found.html_url
            state.default_branch = found.default_branch
        branch = self._settings.branch or state.default_branch
        if branch != state.branch:
            state.branch, state.commit_etag = branch, ""

    async def _drop(self, draft: _PageInProgress) -> None:
        """Delete the documents of kinds that the settings do not name any more."""
        state = draft.state
        for kind in ("files", "issues", "pull_requests"):
            if kind in self._settings.content or state.path >= f"{kind}0":  # 0 is what follows / in the alphabet
                continue
            while items := await draft.known.after(max(state.path, f"{kind}/"), BATCH, prefix=f"{kind}/"):
                for item in items:
                    if draft.is_full:
                        return
                    draft.deleted.append(item.id)
                    draft.steps += 1
                    state.path = item.location
        _go_on(state)

    async def _head(self, state: SyncState) -> bool:
        """Whether the branch has another commit than `state` says, which says the new one then."""
        before = state.commit
        path = path_of("git/ref/heads", state.branch)
        answer = await self._api.get(path, etag=state.commit_etag, expected=(404, 409))
        if answer.is_unchanged:
            return False
        if answer.status == 404:
            text = (
                f"the repository has no branch {state.branch}, or the token may not read it: check `branch:`; {RIGHTS}"
            )
            raise SourceError(text, FailureType.PERMANENT)
        if answer.status == 409 and b"empty" not in answer.body:
            raise SourceError("GitHub cannot read the repository now (409)", FailureType.TRANSIENT)
        is_empty = answer.status == 409
        state.commit = "" if is_empty else self._api.decoded(answer, ApiReference).object.sha
        state.commit_etag = "" if is_empty else answer.etag
        return state.commit != before

    async def _is_pushed(self, draft: _PageInProgress) -> bool:
        """Whether there was a push; then the files are to be read from the beginning, in a page of their own."""
        state = draft.state
        if await self._head(state):
            state.phase, state.path = "files", ""
            draft.is_closed = draft.count > 0
            return True
        if self._tree.commit != state.commit:
            self._tree = CommitTree(self._api, state.commit)
        return False

    async def _files(self, draft: _PageInProgress) -> None:
        state = draft.state
        if "files" not in self._settings.content:
            return _go_on(state, "issues")
        if await self._is_pushed(draft):
            return None
        if state.complete == state.commit:
            return _go_on(state, "issues")
        while batch := await self._tree.next_files(state.path, BATCH):
            known = await draft.at([f"files/{one.path}" for one in batch])
            for entry in batch:
                if draft.is_full:
                    return None
                draft.seen += 1
                draft.steps += 1
                item = known.get(f"files/{entry.path}")
                is_kept = item is not None and item.version == self._reader.file_version(entry)
                if not is_kept and self._settings.selects(entry.path):
                    await self._add_file(draft, entry, item)
                    if state.commit != self._tree.commit:
                        return None  # pushed meanwhile
                state.path = entry.path
        return _go_on(state)

    async def _add_file(self, draft: _PageInProgress, entry: TreeEntry, item: KnownItem | None) -> None:
        item = item or await self._moved_from(draft, entry)
        try:
            draft.add(await self._file(draft.state, entry, item))
        except SourceError as error:
            if error.failure_type is FailureType.RATE_LIMITED:
                raise
            # A failure that the repository shares is not the file's, nor is one after a push.
            if not await self._is_pushed(draft):
                failure = ItemFailure(f"files/{entry.path}", self._reader.file_version(entry), error)
                draft.failures.append(failure)

    async def _moved_from(self, draft: _PageInProgress, entry: TreeEntry) -> KnownItem | None:
        """The kept document of a file with this content whose path is gone. Empty files are all alike."""
        if not entry.size:
            return None
        for item in await draft.known.like(entry.sha):
            kind, _, path = item.location.partition("/")
            if kind == "files" and item.id not in draft.moved and await self._tree.find(path) is None:
                draft.moved.add(item.id)
                return item
        return None

    async def _lost_files(self, draft: _PageInProgress) -> None:
        """Delete the documents of files that the commit does not have, or that are not selected any more."""
        state = draft.state
        if await self._is_pushed(draft):
            return
        while items := await draft.known.after(f"files/{state.path}", BATCH, prefix="files/"):
            for item in items:
                if draft.is_full:
                    return
                path = item.location.removeprefix("files/")
                is_there = self._settings.selects(path) and await self._tree.find(path) is not None
                if not is_there and item.id not in draft.moved:
                    draft.deleted.append(item.id)
                draft.look()
                state.path = path
        state.complete = state.commit
        self._tree = CommitTree(self._api, "")
        _go_on(state)

    async def _issues(self, draft: _PageInProgress) -> None:
        state = draft.state
        if "issues" not in self._settings.content:
            return _go_on(state)
        while not draft.is_full:
            listing: list[Conversation] = []  # one listing at a time in memory, not the last one as well
            since = state.since
            query = listing_query("updated", "asc", page=state.page) | ({"since": since} if since else {})
            etag = state.issues_etag if state.page == 1 else ""
            answer = await self._api.get("/issues", query, etag=etag, expected=(410,))
            if answer.status != 200:  # unchanged, or issues are disabled: then the kept ones stay
                return _go_on(state)
            state.issues_etag = ""
            listing = self._listings.read(answer, f"issues {since} {state.is_closing}", state.page)
            if not await self._add_conversations(draft, "issues", listing, answer):
                return None
            if answer.has_next:
                state.page = state.page + 1 if since == state.since else 1
            elif not state.is_closing:
                self._close_issues(state)
            else:
                # A change would show on a further page if this one were full, and leave its ETag as it is.
                state.issues_etag = answer.etag if state.page == 1 and len(listing) < 100 else ""
                state.page, state.is_closing = 1, False
                return _go_on(state)
        return None

    def _close_issues(self, state: SyncState) -> None:
        """Make the last request for issues that of the next sync, which then has its ETag."""
        state.page, state.is_closing = 1, True
        state.since = state.since and shown_time(parsed_time(state.since) - OVERLAP)

    async def _pull_requests(self, draft: _PageInProgress) -> None:
        state = draft.state
        if "pull_requests" not in self._settings.content:
            return _go_on(state)
        size = min(100, draft.limit)
        reach = shown_time(parsed_time(state.pulls_since) - OVERLAP) if state.pulls_since else ""
        while not draft.is_full:
            listing: list[Conversation] = []
            new: list[Conversation] = []
            page, skipped = state.offset // size + 1, state.offset % size
            etag = state.pulls_etag if state.offset == 0 else ""
            answer = await self._api.get("/pulls", listing_query("updated", "desc", page=page, size=size), etag=etag)
            if answer.is_unchanged:
                return _go_on(state)
            listing = self._listings.read(answer, "pulls", page)
            if state.offset == 0:
                state.newest_pull = shown_time(listing[0].updated_at) if listing else ""
                state.next_pulls_etag = answer.etag
            new = [one for one in listing[skipped:] if shown_time(one.updated_at) >= reach]
            if not await self._add_conversations(draft, "pull_requests", new, answer):
                return None
            if len(new) < len(listing) - skipped or not answer.has_next:
                state.pulls_since, state.pulls_etag = state.newest_pull, state.next_pulls_etag
                return _go_on(state)
        return None

    async def _add_conversations(
        self, draft: _PageInProgress, kind: str, listing: Sequence[Conversation], answer: ApiAnswer
    ) -> bool:
        """Add what changed of a listing; False when the page is full before its end. Moves the state on."""
        state = draft.state
        known = await draft.at([f"{kind}/{one.number}" for one in listing])
        for one in listing:
            location, version = f"{kind}/{one.number}", version_of(one, answer)
            item = known.get(location)
            is_other = kind == "issues" and one.pull_request is not None
            is_new = (item is None or item.version != version) and (location, version) not in self._listings.failed
            if is_new and not is_other:
                if draft.is_full:
                    return False
                await self._add_conversation(draft, kind, one, version)
                draft.steps += 1
            draft.seen += not is_other and not state.is_closing
            if kind == "pull_requests":
                state.offset += 1
            elif not state.is_closing and shown_time(one.updated_at) > state.since:
                state.since, state.page = shown_time(one.updated_at), 1
        draft.steps += 1
        return True

    async def _add_conversation(self, draft: _PageInProgress, kind: str, one: Conversation, version: str) -> None:
        try:
            draft.add(await self._reader.conversation(kind, one, version))
        except SourceError as error:
            if error.failure_type is FailureType.RATE_LIMITED:
                raise
            # A failure that the repository shares is not the conversation's own.
            await self._api.get("", etag=draft.state.repository_etag)
            draft.failures.append(ItemFailure(f"{kind}/{one.number}", version, error))
            self._listings.failed.add((f"{kind}/{one.number}", version))

    async def _lost_issues(self, draft: _PageInProgress) -> None:
        """Once a day, delete the documents of issues that were deleted or transferred."""
        state = draft.state
        if "issues" not in self._settings.content or clock.wall() - state.swept_at < SWEEP_S:
            return _go_on(state)
        if self._present is None:
            self._present, state.page, state.path = set(), 1, ""
        while state.page:
            if draft.is_full:
                return None
            answer = await self._api.get("/issues", listing_query("created", "asc", page=state.page), expected=(410,))
            draft.steps += 1
            if answer.status == 410:
                break
            numbers = {one.number for one in self._listings.read(answer, "lost", state.page)}
            draft.checked += len(numbers - self._present)
            self._present |= numbers
            state.page = state.page + 1 if answer.has_next else 0
        while not state.page and (items := await draft.known.after(f"issues/{state.path}", BATCH, prefix="issues/")):
            for item in items:
                if draft.is_full:
                    return None
                number = item.location.removeprefix("issues/")
                if not (number.isdecimal() and int(number) in self._present) and await self._is_lost(number):
                    draft.deleted.append(item.id)
                draft.look()
                state.path = number
        self._present, state.page, state.swept_at = None, 1, clock.wall()
        return _go_on(state)

    async def _is_lost(self, number: str) -> bool:
        """Whether an issue that was not listed is really gone: deleted, or transferred to another repository."""
        return (await self._api.get(path_of("issues", number), expected=(301, 404, 410))).status != 200

    async def _file_again(self, draft: _PageInProgress, path: str) -> Document | None:
        if "files" not in self._settings.content or not self._settings.selects(path):
            return None
        await self._describe(draft.state)
        await self._head(draft.state)
        entry = await CommitTree(self._api, draft.state.commit, whole=False).find(path)
        if entry is None:
            return None
        known = await draft.known.at([f"files/{path}"])
        return await self._file(draft.state, entry, known.get(f"files/{path}"))

    async def _file(self, state: SyncState, entry: TreeEntry, item: KnownItem | None) -> Document:
        place = {"commit": state.commit, "branch": state.branch, "url": state.url}
        return await self._reader.file(entry, **place, known_id="" if item is None else item.id)


def _go_on(state: SyncState, to: Phase | None = None) -> None:
    """Enter the next phase, or the one that is named."""
    state.phase = to or _PHASES[_PHASES.index(state.phase) + 1]
    state.path = ""
