"""
A server that answers like GitHub's REST API, over a real git repository, with faults on request.

Files, commits and hashes are git's own: commits are made by `git fast-import`, and read by `git ls-tree` and
`git cat-file`. Issues and pull requests are kept here, with the times of a clock that only the test moves. Every answer
has an ETag and counts against a rate limit, unless it is a 304. A test scripts failures by path, and reads what was
asked from `requests`.
"""

import gzip
import hashlib
import json
import os
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

GIT_ENVIRONMENT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": os.devnull}
LIMIT_MESSAGE = "API rate limit exceeded for user ID 1."
SECONDARY_MESSAGE = "You have exceeded a secondary rate limit. Please wait a few minutes before you try again."


@dataclass(frozen=True)
class Seen:
    """A request as it came, and the status that it got."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    status: int


@dataclass(frozen=True)
class Reply:
    """An answer of the script instead of the real one."""

    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None
    """The Content-Length to claim."""
    cut: bool = False
    """Whether the connection ends after half of the body."""
    drip: bool = False
    """Whether the rest of the body never comes."""


def refusal(status: int, message: str, **headers: str) -> Reply:
    """A refusal in GitHub's shape; `retry_after="5"` is the header Retry-After."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, json.dumps({"message": message}).encode(), names)


Action = Reply | Callable[["GithubServer"], object]
"""A reply, or something that happens before the real answer."""


class GitRepository:
    """A bare git repository whose branch is set to the files that a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, bytes] = {}
        self._commits = 0
        self._lock = threading.Lock()
        self._git("init", "--bare", "--quiet", "--initial-branch=main", str(folder))
        self._reader: subprocess.Popen[bytes] | None = None
        self._heads: dict[str, str] = {}
        self._trees: dict[tuple[str, bool], list[dict[str, Any]]] = {}

    def commit(self, *, branch: str = "main", parent: str | None = None) -> str:
        """Make `files` the content of the branch. With a parent the branch is forced onto it ("" for none)."""
        self._commits += 1
        who = f"Ada <ada@example.org> {1_700_000_000 + self._commits} +0000"
        before = self.head(branch) if parent is None else parent
        lines = [f"commit refs/heads/{branch}\ncommitter {who}\ndata 1\nx".encode()]
        lines += [f"from {before}".encode()] if before else []
        lines.append(b"deleteall")
        for path, content in sorted(self.files.items()):
            name = json.dumps(path, ensure_ascii=False).encode()
            lines.append(b"M 100644 inline %s\ndata %d\n%s" % (name, len(content), content))
        self._git("fast-import", "--quiet", "--force", stdin=b"\n".join(lines) + b"\n")
        self._heads.clear()
        self._trees.clear()
        return self.head(branch)

    def head(self, branch: str) -> str:
        if branch not in self._heads:
            found = self._git("for-each-ref", "--format=%(objectname)", f"refs/heads/{branch}")
            self._heads[branch] = found.decode().strip()
        return self._heads[branch]

    def forget(self, sha: str) -> None:
        """Drop a commit that no branch has, as a server's garbage collection does some day."""
        self._git("reflog", "expire", "--expire=now", "--all")
        self._git("gc", "--prune=now", "--quiet")
        self._trees.clear()
        self.close()
        assert not self.has(sha)

    def has(self, sha: str) -> bool:
        asked = subprocess.run(["git", "cat-file", "-e", sha], cwd=self.folder, stderr=subprocess.DEVNULL, check=False)
        return asked.returncode == 0

    def tree(self, sha: str, *, recursive: bool) -> list[dict[str, Any]] | None:
        if (sha, recursive) in self._trees:
            return self._trees[sha, recursive]
        try:
            listed = self._git("ls-tree", "-l", "-z", *(["-r", "-t"] if recursive else []), sha)
        except subprocess.CalledProcessError:
            return None
        entries = []
        for line in filter(None, listed.split(b"\0")):
            words, _, path = line.partition(b"\t")
            mode, kind, name, size = words.decode().split()
            entry: dict[str, Any] = {"path": path.decode(), "mode": mode, "type": kind, "sha": name, "url": "…"}
            if size != "-":
                entry["size"] = int(size)
            entries.append(entry)
        self._trees[sha, recursive] = entries
        return entries

    def blob(self, sha: str) -> bytes | None:
        with self._lock:
            if self._reader is None:
                self._reader = subprocess.Popen(
                    ["git", "cat-file", "--batch"], cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            assert self._reader.stdin is not None
            assert self._reader.stdout is not None
            self._reader.stdin.write(sha.encode() + b"\n")
            self._reader.stdin.flush()
            head = self._reader.stdout.readline().split()
            if head[-1] == b"missing":
                return None
            body = self._reader.stdout.read(int(head[2]))
            self._reader.stdout.read(1)
            return body

    def close(self) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.communicate(timeout=10)
                self._reader = None

    def _git(self, *words: str, stdin: bytes = b"") -> bytes:
        where = self.folder if self.folder.exists() else self.folder.parent
        own = os.environ | GIT_ENVIRONMENT
        return subprocess.run(["git", *words], cwd=where, input=stdin, capture_output=True, check=True, env=own).stdout


class GithubServer:
    """The server of one repository, on a free port of this machine."""

    def __init__(self, folder: Path, *, name: str = "octo/demo", certificate: Path | None = None) -> None:
        self.git = GitRepository(folder / "repository.git")
        self.name = name
        self.moved_to = ""
        self.default_branch = "main"
        self.token = ""
        self.rights = {"contents", "issues", "pulls"}
        self.has_issues = True
        self.now = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
        self.issues: dict[int, dict[str, Any]] = {}
        self.comments: dict[int, list[dict[str, Any]]] = {}
        self.reviews: dict[int, list[dict[str, Any]]] = {}
        self.transferred: set[int] = set()
        self.limit = 5000
        self.used = 0
        self.resets_at = int(time.time()) + 3600
        self.largest_tree = 100_000
        self.echoes_token = False
        self.requests: list[Seen] = []
        self.interfere: Callable[[str], Reply | None] | None = None
        """Answers a target instead of the server, for as long as it is set; None is the real answer."""
        self._script: list[tuple[re.Pattern[str], list[Action]]] = []
        self._lock = threading.RLock()
        self.stopping = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://{'localhost' if certificate else '127.0.0.1'}:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    # ---- what the test arranges --------------------------------------------------------------------------------------

    def on(self, pattern: str, *actions: Action) -> None:
        """Let the next requests whose path and query have the pattern meet these actions, one each."""
        with self._lock:
            self._script.append((re.compile(pattern), list(actions)))

    def tick(self, seconds: float = 10) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now

    def add_issue(self, number: int, title: str = "", *, body: str = "", is_pull: bool = False) -> None:
        stamp = _stamp(self.now)
        where = "pull" if is_pull else "issues"
        self.issues[number] = {
            "number": number,
            "title": title or f"Issue {number}",
            "body": body,
            "state": "open",
            "user": {"login": "ada", "id": 1},
            "labels": [{"name": "bug", "color": "f00"}],
            "comments": 0,
            "created_at": stamp,
            "updated_at": stamp,
            "closed_at": None,
            "html_url": f"https://github.example/{self.name}/{where}/{number}",
        }
        if is_pull:
            self.issues[number]["pull_request"] = {"url": "…", "merged_at": None}
            self.issues[number]["head"] = {"ref": f"topic-{number}", "sha": "0" * 40}

    def change_issue(self, number: int, **fields: object) -> None:
        self.issues[number] |= {"updated_at": _stamp(self.now), **fields}

    def add_comment(self, number: int, body: str, *, path: str = "") -> None:
        comment = {"id": 1, "body": body, "user": {"login": "bob"}, "created_at": _stamp(self.now)}
        if path:
            self.reviews.setdefault(number, []).append(comment | {"path": path})
        else:
            self.comments.setdefault(number, []).append(comment)
            self.issues[number]["comments"] += 1
        self.change_issue(number)

    def paths(self, pattern: str = "", *, status: int | None = None) -> list[str]:
        """The paths that were asked for, in their order."""
        with self._lock:
            found = [one for one in self.requests if status in (None, one.status)]
        return [one.path for one in found if re.search(pattern, one.path)]

    def close(self) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)
        self.git.close()

    # ---- what it answers ---------------------------------------------------------------------------------------------

    def reply(self, target: str, headers: Mapping[str, str]) -> Reply:
        """The answer to a GET, recorded and counted."""
        parts = urlsplit(target)
        path, query = unquote(parts.path), {name: values[-1] for name, values in parse_qs(parts.query).items()}
        for action in self._scripted(target):
            if isinstance(action, Reply):
                return self._recorded(path, query, headers, action)
            action(self)
        if self.interfere is not None and (reply := self.interfere(target)) is not None:
            return self._recorded(path, query, headers, reply)
        with self._lock:
            found = self._counted(self._allowed(path, headers) or self._found(path, query, headers), headers)
            return self._recorded(path, query, headers, found)

    def _scripted(self, target: str) -> list[Action]:
        with self._lock:
            return [actions.pop(0) for pattern, actions in self._script if actions and pattern.search(target)]

    def _recorded(self, path: str, query: Mapping[str, str], headers: Mapping[str, str], reply: Reply) -> Reply:
        with self._lock:
            self.requests.append(Seen(path, query, headers, reply.status))
        return reply

    def _counted(self, reply: Reply, headers: Mapping[str, str]) -> Reply:
        """The reply with its ETag and the rate limit; a 304 where the ETag is known, which is free."""
        if self.used >= self.limit:
            reply = refusal(403, LIMIT_MESSAGE)
        etag = f'W/"{hashlib.sha256(reply.body).hexdigest()}"'
        if reply.status == 200 and headers.get("if-none-match") == etag:
            reply = Reply(304, b"", reply.headers)
        elif self.used < self.limit:
            self.used += 1
        counts = {
            "X-RateLimit-Limit": str(self.limit),
            "X-RateLimit-Remaining": str(self.limit - self.used),
            "X-RateLimit-Reset": str(self.resets_at),
        }
        own = {"ETag": etag} if reply.status in (200, 304) else {}
        return Reply(reply.status, reply.body, {**reply.headers, **counts, **own})

    def _allowed(self, path: str, headers: Mapping[str, str]) -> Reply | None:
        given = headers.get("authorization", "")
        if self.token and not given:
            return refusal(404, "Not Found")
        if self.token and given != f"Bearer {self.token}":
            return refusal(401, f"Bad credentials {given}" if self.echoes_token else "Bad credentials")
        area = "contents" if "/git/" in path else "issues" if "/issues" in path else "pulls" if "/pulls" in path else ""
        if area and area not in self.rights:
            return refusal(403, "Resource not accessible by personal access token")
        return None

    def _found(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Reply:
        if self.moved_to and path == "/repositories/42":
            return _json({"full_name": self.moved_to, "default_branch": "main", "html_url": "…"})
        root = f"/repos/{self.name}"
        if not path.startswith(root):
            return refusal(404, "Not Found")
        path = path.removeprefix(root)
        if self.moved_to:
            return Reply(301, b"{}", {"Location": f"{self.url}/repositories/42{path}"})
        if path == "":
            url = f"https://github.example/{self.name}"
            return _json({"full_name": self.name, "default_branch": self.default_branch, "html_url": url, "id": 42})
        if path.startswith("/git/"):
            return self._git_object(path.removeprefix("/git/"), query, headers)
        if path.startswith("/issues"):
            return self._issues(path.removeprefix("/issues"), query)
        if path.startswith("/pulls"):
            return self._pulls(path.removeprefix("/pulls"), query)
        return refusal(404, "Not Found")

    def _git_object(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Reply:
        kind, _, name = path.partition("/")
        if kind == "ref":
            branch = name.removeprefix("heads/")
            sha = self.git.head(branch)
            if not sha:
                is_empty = not self.git.head("*")
                return refusal(409, "Git Repository is empty.") if is_empty else refusal(404, "Not Found")
            return _json({"ref": f"refs/heads/{branch}", "object": {"sha": sha, "type": "commit"}})
        if kind == "trees":
            recursive = bool(query.get("recursive"))
            entries = self.git.tree(name, recursive=recursive)
            if entries is None:
                return refusal(404, "Not Found")
            is_cut = recursive and len(entries) > self.largest_tree
            shown = entries[: self.largest_tree] if is_cut else entries
            return _json({"sha": name, "tree": shown, "truncated": is_cut})
        if kind == "blobs" and "raw" in headers.get("accept", ""):
            body = self.git.blob(name)
            return refusal(404, "Not Found") if body is None else Reply(200, body, {"Content-Type": "text/plain"})
        return refusal(404, "Not Found")

    def _issues(self, path: str, query: Mapping[str, str]) -> Reply:
        if not self.has_issues:
            return refusal(410, "Issues has been disabled in this repository.")
        if not path:
            return self._listed(list(self.issues.values()), query, "/issues")
        number, _, rest = path.removeprefix("/").partition("/")
        if int(number) in self.transferred:
            return Reply(301, b"{}", {"Location": f"{self.url}/repos/octo/other/issues/1"})
        if int(number) not in self.issues:
            return refusal(410 if rest == "" else 404, "This issue was deleted")
        if rest == "comments":
            return self._paged(self.comments.get(int(number), []), query, f"/issues{path}")
        return _json(self.issues[int(number)])

    def _pulls(self, path: str, query: Mapping[str, str]) -> Reply:
        pulls = {number: self._pull(one) for number, one in self.issues.items() if "pull_request" in one}
        if not path:
            assert "since" not in query, "GitHub does not know it here"
            return self._listed(list(pulls.values()), query, "/pulls")
        number, _, rest = path.removeprefix("/").partition("/")
        if int(number) not in pulls:
            return refusal(404, "Not Found")
        if rest == "comments":
            return self._paged(self.reviews.get(int(number), []), query, f"/pulls{path}")
        return _json(pulls[int(number)])

    def _pull(self, issue: Mapping[str, Any]) -> dict[str, Any]:
        """A pull request in the shape of its own listing, which has no count of comments."""
        own = {name: value for name, value in issue.items() if name not in ("comments", "pull_request")}
        return own | {"base": {"ref": "main"}, "merged_at": issue["pull_request"]["merged_at"], "draft": False}

    def _listed(self, items: list[dict[str, Any]], query: Mapping[str, str], path: str) -> Reply:
        key = f"{query.get('sort', 'created')}_at"
        items = [one for one in items if query.get("state") == "all" or one["state"] == "open"]
        items = [one for one in items if one["updated_at"] >= query.get("since", "")]
        items.sort(key=lambda one: (one[key], one["number"]), reverse=query.get("direction", "desc") == "desc")
        return self._paged(items, query, path)

    def _paged(self, items: list[dict[str, Any]], query: Mapping[str, str], path: str) -> Reply:
        size, page = min(100, int(query.get("per_page", "30"))), int(query.get("page", "1"))
        others = {"next": page + 1 if page * size < len(items) else 0, "prev": page - 1}
        links = [f'<{self.url}{path}?page={other}>; rel="{name}"' for name, other in others.items() if other]
        shown = items[(page - 1) * size : page * size]
        return Reply(200, json.dumps(shown).encode(), {"Link": ", ".join(links)} if links else {})


def _json(value: object) -> Reply:
    return Reply(200, json.dumps(value).encode())


def _stamp(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _handler(server: GithubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            reply = server.reply(self.path, {name.lower(): value for name, value in self.headers.items()})
            body, packed = reply.body, {}
            if len(body) > 500 and not (reply.cut or reply.drip or reply.length):
                body, packed = gzip.compress(body, 1), {"Content-Encoding": "gzip"}
            self.send_response(reply.status)
            names = {"Content-Type": "application/json; charset=utf-8", **packed, **reply.headers}
            for name, value in names.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(reply.length if reply.length is not None else len(body)))
            self.end_headers()
            if reply.cut or reply.drip:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                if reply.drip:
                    server.stopping.wait(30)
                self.close_connection = True
            elif reply.status != 304:
                self.wfile.write(body)
                if reply.length is not None:
                    self.close_connection = True

        def date_time_string(self, timestamp: float | None = None) -> str:
            return format_datetime(server.now, usegmt=True)

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the name that it overrides

        def handle(self) -> None:
            with suppress(ConnectionError, ssl.SSLError):  # the client went away
                super().handle()

    return Handler
