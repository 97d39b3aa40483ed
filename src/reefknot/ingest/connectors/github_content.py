"""
The content of a GitHub repository: the files of a commit, issues and pull requests, and the documents made of them.

Content is asked for by its hash, and what arrives is checked against it: a body that was cut or changed on the way is
never kept.
"""

import asyncio
import hashlib
from bisect import bisect_left, bisect_right
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from reefknot import clock
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors.file_contents import extracted, media_type_of
from reefknot.ingest.connectors.github_api import MOST_TREE_OBJECTS, RAW, ApiAnswer, GithubApi, path_of
from reefknot.ingest.connectors.github_settings import GithubSettings
from reefknot.ingest.connectors.text_extraction import KINDS, is_installed
from reefknot.ingest.port import Document

LARGEST_TEXT = 1024 * 1024
"""Characters of an issue or a pull request with its comments."""
MOST_COMMENTS = 300
SETTLED = timedelta(seconds=2)
"""Age from which the time of a change is a version: GitHub's times are whole seconds, and a second may see two."""
_MEDIA_TYPES = {".md": "text/markdown", ".html": "text/html", ".json": "application/json", ".csv": "text/csv"}
_BINARY = frozenset(
    f".{ending}"
    for ending in (
        *("7z", "bz2", "gz", "jar", "tar", "xz", "zip", "zst"),
        *("avi", "flac", "mkv", "mov", "mp3", "mp4", "ogg", "wav"),
        *("bmp", "gif", "ico", "jpeg", "jpg", "pdf", "png", "tif", "tiff", "webp"),
        *("eot", "otf", "ttf", "woff", "woff2"),
        *("a", "bin", "class", "db", "dll", "dylib", "exe", "o", "pyc", "so", "sqlite", "wasm"),
    )
)
"""Endings of files whose content is no text and is not fetched."""


class ApiRepository(Struct):
    """A repository, as the API describes it."""

    full_name: str
    default_branch: str = ""
    html_url: str = ""


class ApiObject(Struct):
    """The object that a reference points at."""

    sha: str


class ApiReference(Struct):
    """A branch."""

    object: ApiObject


class ApiName(Struct):
    """A user or a label."""

    login: str = ""
    name: str = ""


class ApiBranch(Struct):
    """A branch of a pull request: where it comes from, or where it goes."""

    ref: str = ""


class ApiComment(Struct):
    """A comment on an issue or a pull request."""

    body: str | None = None
    user: ApiName | None = None
    created_at: str = ""
    path: str = ""
    """The file that a review comment is about."""


class Conversation(Struct):
    """An issue or a pull request, as the listings of the API describe it."""

    number: int
    updated_at: datetime
    title: str = ""
    body: str | None = None
    state: str = ""
    user: ApiName | None = None
    labels: list[ApiName] = []
    comments: int | None = None
    created_at: str = ""
    closed_at: str | None = None
    merged_at: str | None = None
    draft: bool = False
    html_url: str = ""
    base: ApiBranch | None = None
    head: ApiBranch | None = None
    pull_request: ApiBranch | None = None
    """Not None for a pull request among the issues."""


class TreeEntry(Struct, frozen=True, gc=False):
    """A file or a folder of a commit."""

    path: str
    sha: str = ""
    mode: str = ""
    type: str = ""
    size: int = 0

    @property
    def key(self) -> str:
        """The place in git's order, in which a folder stands where its files would."""
        return f"{self.path}/" if self.type == "tree" else self.path


class _Tree(Struct):
    tree: list[TreeEntry] = []
    truncated: bool = False


class CommitTree:
    """
    The files of a commit in the order of their paths, which is git's own.

    GitHub lists at most 100,000 entries at once and says when it left some out; such a tree is read folder by folder.
    Listings are kept while they are together no larger than `MOST_ENTRIES`.
    """

    MOST_ENTRIES = 150_000
    MOST_DEPTH = 200
    """Folders within each other: git has no bound, and a server may answer with trees for ever."""
    MOST_EMPTY = 200
    """Folders in a row that have no file."""

    def __init__(self, api: GithubApi, commit: str, *, whole: bool = True) -> None:
        """Build the tree of a commit. Without `whole` it is read folder by folder, which suits a look for one file."""
        self.commit = commit
        """Empty for a repository without commits."""
        self._whole = whole
        self._empty = 0
        """Folders since the last file that was found."""
        self._api = api
        self._listings: dict[str, list[TreeEntry]] = {}
        self._is_split: set[str] = set()

    async def next_files(self, after: str, limit: int) -> list[TreeEntry]:
        """The next files behind a path."""
        found: list[TreeEntry] = []
        if self.commit:
            await self._collect(self.commit, "", after, limit=limit, found=found)
        return found

    async def find(self, path: str) -> TreeEntry | None:
        """The file at a path, if there is one."""
        sha, rest = self.commit, path
        while sha:  # at most once for each part of the path
            listing = await self._listing(sha)
            entry = _at_key(listing, rest)
            if entry is not None:
                return replace(entry, path=path)
            head, _, rest = rest.partition("/")
            folder = _at_key(listing, f"{head}/") if rest else None
            sha = "" if folder is None else folder.sha
        return None

    async def _collect(self, sha: str, prefix: str, after: str, *, limit: int, found: list[TreeEntry]) -> None:
        self._check_depth(prefix)
        listing = await self._listing(sha)
        tail = after[len(prefix) :] if after.startswith(prefix) else ""
        start = bisect_right(listing, tail, key=_key)
        if start and listing[start - 1].type == "tree" and tail.startswith(listing[start - 1].key):
            start -= 1  # the folder that holds `after`
        for entry in islice(listing, start, None):
            if len(found) >= limit:
                return
            path = f"{prefix}{entry.path}"
            if entry.type == "tree":
                self._empty += 1
                await self._collect(entry.sha, f"{path}/", after, limit=limit, found=found)
            else:
                self._empty = 0
                found.append(replace(entry, path=path))

    def _check_depth(self, prefix: str) -> None:
        if prefix.count("/") > self.MOST_DEPTH or self._empty > self.MOST_EMPTY:
            where = f"at {prefix[:100]}…" if len(prefix) > 100 else f"at {prefix}"
            text = (
                f"commit {self.commit[:12]} has more than {self.MOST_DEPTH} folders within each other, or in a row "
                f"without a file, {where}; remove them, or check `base_url:`"
            )
            raise SourceError(text, FailureType.PERMANENT)

    async def _listing(self, sha: str) -> list[TreeEntry]:
        """Files beneath a tree in order; of a split one its own files and folders."""
        known = self._listings.pop(sha, None)
        if known is None:
            known = await self._fetched(sha)
        self._listings[sha] = known  # the last in line to go
        while len(self._listings) > 1 and sum(map(len, self._listings.values())) > self.MOST_ENTRIES:
            del self._listings[next(iter(self._listings))]
        return known

    async def _fetched(self, sha: str) -> list[TreeEntry]:
        if self._whole and sha not in self._is_split:
            whole = await self._tree(sha, recursive=True)
            if not whole.truncated:
                return sorted((one for one in whole.tree if _is_file(one)), key=_key)
            self._is_split.add(sha)
        part = await self._tree(sha)
        if part.truncated:
            text = f"a folder of commit {self.commit[:12]} has more entries than GitHub lists; divide it"
            raise SourceError(text, FailureType.PERMANENT)
        return sorted((one for one in part.tree if _is_file(one) or one.type == "tree"), key=_key)

    async def _tree(self, sha: str, *, recursive: bool = False) -> _Tree:
        query = {"recursive": 1} if recursive else None
        answer = await self._api.get(path_of("git/trees", sha), query, expected=(404, 409, 422))
        if answer.status != 200:
            text = f"commit {self.commit[:12]} is not there any more; the next attempt reads the new one"
            raise SourceError(text, FailureType.TRANSIENT)
        return self._api.decoded(answer, _Tree, objects=MOST_TREE_OBJECTS)


def listing_query(sort: str, direction: str, *, page: int, size: int = 100) -> dict[str, str | int]:
    """The query for one page of issues or pull requests, closed ones included."""
    return {"state": "all", "sort": sort, "direction": direction, "per_page": size, "page": page}


class Listings:
    """
    The listings of issues and pull requests of one sync, each of which has to end.

    A server that answers every page with the same conversations, or with none and a next page, is a permanent failure.
    """

    MOST_PAGES = 10_000
    """Pages that are recognised when they come again."""

    def __init__(self, api: GithubApi) -> None:
        self._api = api
        self._pages: dict[int, int] = {}
        """The first page with a content, by the hash of the content."""
        self.failed: set[tuple[str, str]] = set()
        """Locations and versions that this sync could not read: listings overlap, and a failure is reported once."""

    def read(self, answer: ApiAnswer, name: str, page: int) -> list[Conversation]:
        """The conversations of one page of the listing of this name."""
        found = self._api.decoded(answer, list[Conversation])
        content = hash((name, *((one.number, one.updated_at) for one in found)))
        first = self._pages.setdefault(content, page)
        if answer.has_next and (not found or first != page):
            what = f"the same as page {first}" if found else "empty"
            text = f"page {page} of a listing is {what}, and yet not the last: it would never end; check `base_url:`"
            raise SourceError(text, FailureType.PERMANENT)
        if len(self._pages) > self.MOST_PAGES:
            self._pages.clear()
        return found


class DocumentReader:
    """Reads files and conversations of one repository as documents."""

    def __init__(self, api: GithubApi, settings: GithubSettings) -> None:
        self._api = api
        self._settings = settings

    def file_version(self, entry: TreeEntry) -> str:
        """The blob's hash; another one while the file is too large, so that a larger `max_bytes` reads it."""
        if entry.size > self._settings.max_bytes:
            return f"{entry.sha}:unread"
        return f"{entry.sha}:text" if _is_extractable(entry.path) else entry.sha

    async def file(self, entry: TreeEntry, *, commit: str, branch: str, url: str, known_id: str = "") -> Document:
        """
        A file. It keeps the id that it is known by; a new one depends on the commit as well, so that a file that takes
        the place of one that moved away is another document.
        """
        settings, text, problem = self._settings, "", ""
        suffix = PurePosixPath(entry.path).suffix.lower()
        media_type = _MEDIA_TYPES.get(suffix, "text/plain")
        if entry.size > settings.max_bytes:
            problem = (
                f"the file has {entry.size} bytes, more than `max_bytes: {settings.max_bytes}`; raise it to read it"
            )
        elif suffix in _BINARY and not _is_extractable(entry.path):
            media_type = "application/octet-stream"
        else:
            answer = await self._api.get(path_of("git/blobs", entry.sha), accept=RAW, most=entry.size)
            if _blob_sha(answer.body, entry.sha) != entry.sha:
                raise SourceError(f"GitHub sent other content than that of {entry.path}", FailureType.TRANSIENT)
            found = await asyncio.to_thread(extracted, entry.path, answer.body)
            if found is not None:
                text, problem = found.text or "", found.problem
                media_type = media_type_of(entry.path, is_text=not found.is_extracted)
            elif b"\0" in answer.body[:8000]:  # git's own test
                media_type = "application/octet-stream"
            else:
                text = answer.body.decode("utf-8-sig", "replace")
                if "\ufffd" in text and b"\xef\xbf\xbd" not in answer.body:
                    problem = "not all of the file is UTF-8; other bytes were replaced"
        first = hashlib.sha256(f"{entry.path}\0{entry.sha}\0{commit}".encode()).hexdigest()[:32]
        return Document(
            id=known_id or f"file-{first}",
            location=f"files/{entry.path}",
            version=self.file_version(entry),
            title=PurePosixPath(entry.path).name,
            text=text,
            fingerprint=entry.sha,
            media_type=media_type,
            metadata={
                "repository": settings.repository,
                "path": entry.path,
                "branch": branch,
                "bytes": entry.size,
                "url": f"{url}/blob/{path_of(branch, entry.path)[1:]}" if url else "",
            },
            problem=problem,
        )

    async def conversation(self, kind: str, one: Conversation, version: str) -> Document:
        """An issue or a pull request with its comments."""
        # Cut before it is joined: the text of a large answer is not copied.
        parts, problem = [f"# {one.title}", (one.body or "")[: LARGEST_TEXT + 1]], ""
        paths = [path_of("issues", one.number, "comments")] if one.comments != 0 else []
        if kind == "pull_requests":
            paths.append(path_of("pulls", one.number, "comments"))
        for path in paths:
            comments, is_whole = await self._comments(path)
            parts += [_comment(each) for each in comments]
            if not is_whole:
                problem = f"only the first {MOST_COMMENTS} comments were read"
        text = "\n\n".join(part for part in parts if part)
        if len(text) > LARGEST_TEXT:
            text, problem = text[:LARGEST_TEXT], f"only the first {LARGEST_TEXT} characters were kept"
        return Document(
            id=f"{kind}/{one.number}",
            location=f"{kind}/{one.number}",
            version=version,
            title=one.title,
            text=text,
            fingerprint=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
            media_type="text/markdown",
            modified_at=int(one.updated_at.timestamp() * 1000),
            metadata=self._described(one),
            problem=problem,
        )

    def _described(self, one: Conversation) -> dict[str, Any]:
        found: dict[str, Any] = {
            "repository": self._settings.repository,
            "number": one.number,
            "state": "merged" if one.merged_at else one.state,
            "author": one.user.login if one.user else "",
            "labels": [label.name for label in one.labels[:100]],
            "created_at": one.created_at,
            "closed_at": one.closed_at,
            "url": one.html_url,
        }
        if one.base is not None and one.head is not None:
            found |= {"base": one.base.ref, "head": one.head.ref, "draft": one.draft, "merged_at": one.merged_at}
        return found

    async def _comments(self, path: str) -> tuple[list[ApiComment], bool]:
        """The comments, and whether these are all."""
        found: list[ApiComment] = []
        for page in range(1, MOST_COMMENTS // 100 + 1):
            answer = await self._api.get(path, {"per_page": 100, "page": page}, expected=(410,))
            if answer.status == 410:  # a repository without issues has no comments of that kind
                return [], True
            found += self._api.decoded(answer, list[ApiComment])
            if not answer.has_next or sum(len(one.body or "") for one in found) > LARGEST_TEXT:
                return found, True
        return found, False


def shown_time(time: datetime) -> str:
    """A time as GitHub writes it."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parsed_time(text: str) -> datetime:
    """A time that GitHub wrote."""
    return datetime.fromisoformat(text)


def version_of(one: Conversation, answer: ApiAnswer) -> str:
    """The time of the last change; marked while that second may still see another one, so that it is read again."""
    try:
        sent = parsedate_to_datetime(answer.headers.get("date", ""))
    except (ValueError, IndexError, TypeError):
        sent = datetime.fromtimestamp(clock.wall(), UTC)
    is_settled = sent.replace(tzinfo=sent.tzinfo or UTC) - one.updated_at >= SETTLED
    return shown_time(one.updated_at) + ("" if is_settled else "~")


def _comment(one: ApiComment) -> str:
    about = f", {one.path}" if one.path else ""
    return f"---\n{one.user.login if one.user else 'someone'}, {one.created_at}{about}:\n\n{one.body or ''}"


def _blob_sha(body: bytes, like: str) -> str:
    """Git's hash of a file's content, of the kind that the repository uses."""
    algorithm = "sha256" if len(like) == 64 else "sha1"
    return hashlib.new(algorithm, b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


def _is_extractable(path: str) -> bool:
    return is_installed() and PurePosixPath(path).suffix.lower() in KINDS


def _key(entry: TreeEntry) -> str:
    return entry.key


def _is_file(entry: TreeEntry) -> bool:
    """Whether an entry is a file: neither a folder, nor a symbolic link, nor a submodule."""
    return entry.type == "blob" and entry.mode.startswith("100")


def _at_key(listing: list[TreeEntry], key: str) -> TreeEntry | None:
    index = bisect_left(listing, key, key=_key)
    return listing[index] if index < len(listing) and listing[index].key == key else None
