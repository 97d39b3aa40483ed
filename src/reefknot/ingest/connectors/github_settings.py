"""
The settings of a GitHub source, checked strictly: an unknown key or another type is a mistake that is named.

A token is given by reference, `env:NAME` or `file:PATH`; a token itself does not belong in a configuration.
"""

import hashlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from reefknot.core.checks import suggest, text, whole_number
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.ingest.port import SourceContext, UnknownSettingError
from reefknot.runtime.addresses import is_loopback

KINDS = ("files", "issues", "pull_requests")
MOST_PATTERNS = 200
LONGEST_PATTERN = 1000
LARGEST_FILE = 100 * 1024 * 1024
"""Bytes of a blob that GitHub's API hands out."""
_REPOSITORY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,99})/[A-Za-z0-9._-]{1,100}")
_REFERENCE = re.compile(r"(?:env|file):\S.*")
HIDDEN = "***"


class GithubSettings(Struct, frozen=True):
    """The settings of one source."""

    repository: str
    token: str = ""
    base_url: str = "https://api.github.com"
    branch: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    content: tuple[str, ...] = KINDS
    max_bytes: int = 1024 * 1024
    ca_file: Path | None = None

    @classmethod
    def of(cls, context: SourceContext) -> "GithubSettings":
        """The checked settings of a source. `ParameterError` names the key that cannot be used."""
        given = context.settings
        for key in given:
            if key not in cls.__struct_fields__:
                raise UnknownSettingError(str(key), cls.__struct_fields__)
        if "repository" not in given:
            raise ParameterError("repository", None, "OWNER/NAME, as in the address of the repository")
        checked: dict[str, Any] = {key: _CHECKS[key](value) for key, value in given.items()}
        if "ca_file" in checked:
            checked["ca_file"] = context.folder / Path(checked["ca_file"]).expanduser()
        return cls(**checked)

    @property
    def scope(self) -> str:
        """A fingerprint of the settings that decide which documents there are."""
        fields = (self.repository, self.base_url, self.branch, self.include, self.exclude, self.content, self.max_bytes)
        return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:16]

    def selects(self, path: str) -> bool:
        """Whether a file is read: included, where there are patterns for that, and not excluded."""
        if self.include and not any(_pattern(one).fullmatch(path) for one in self.include):
            return False
        return not any(_pattern(one).fullmatch(path) for one in self.exclude)


_patterns: dict[str, re.Pattern[str]] = {}


def _pattern(pattern: str) -> re.Pattern[str]:
    """
    A path pattern as a regular expression.

    `*`, `?` and `[abc]` stay within a name, `**` crosses folders. A pattern without a slash fits a name anywhere; one
    that fits a folder fits everything beneath it.
    """
    known = _patterns.get(pattern)
    if known is None:
        anywhere = "" if "/" in pattern.rstrip("/") else "(?:.*/)?"
        parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^]/]+])", re.sub(r"\*{3,}", "**", pattern.rstrip("/")))
        body = "".join(_expression(part) for part in parts)
        known = _patterns[pattern] = re.compile(f"{anywhere}{body}(?:/.*)?", re.DOTALL)
    return known


_EXPRESSIONS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _expression(part: str) -> str:
    if part.startswith("[") and part.endswith("]") and len(part) > 2:
        inside = part[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
        return f"[^/{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
    return _EXPRESSIONS.get(part) or re.escape(part)


def _repository(given: object) -> str:
    name = text("repository", given, "OWNER/NAME, as in the address of the repository")
    if not _REPOSITORY.fullmatch(name) or name.endswith(("/.", "/..")):  # these lead to another path of the API
        found = re.fullmatch(r"(?:https?://[^/@]+/|git@[^:]+:)([^/]+/[^/]+?)(?:\.git)?/?", name)
        meant = f"; did you mean {found[1]!r}?" if found else ""
        raise ParameterError("repository", name, f"OWNER/NAME, as in the address of the repository{meant}")
    return name


def _token(given: object) -> str:
    accepted = (
        "a reference to the token, env:NAME for an environment variable or file:PATH for a file; "
        "a token itself does not belong in a configuration"
    )
    if not isinstance(given, str):
        raise ParameterTypeError("token", type(given), accepted)
    if not _REFERENCE.fullmatch(given):
        raise ParameterError("token", HIDDEN, accepted)
    return given


def _base_url(given: object) -> str:
    accepted = "https://HOST or https://HOST/api/v3; http:// only for this machine"
    url = text("base_url", given, accepted)
    try:
        parts = urlsplit(url)
        fits = bool(parts.hostname) and not (parts.query or parts.fragment) and (parts.port or 1) > 0
    except ValueError:
        raise ParameterError("base_url", url, accepted) from None
    if "@" in parts.netloc:
        raise ParameterError("base_url", HIDDEN, f"{accepted}, without a user: a token is given by the setting `token`")
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    if not fits or not is_safe or not url.isascii() or not url.isprintable() or " " in url:
        raise ParameterError("base_url", url, accepted)
    if parts.hostname in ("github.com", "www.github.com"):
        raise ParameterError("base_url", url, "https://api.github.com for github.com, which is the default")
    return url.rstrip("/")


def _branch(given: object) -> str:
    accepted = "the name of a branch"
    name = text("branch", given, accepted)
    if not name or len(name) > 255 or name.startswith(("/", "-")) or ".." in name or not name.isprintable():
        raise ParameterError("branch", name, accepted)
    return name.removeprefix("refs/heads/")


def _path_patterns(key: str, given: object) -> tuple[str, ...]:
    accepted = f"a list of at most {MOST_PATTERNS} path patterns, such as docs/** or *.md"
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
        raise ParameterTypeError(key, given, accepted)
    if len(given) > MOST_PATTERNS:
        raise ParameterError(key, f"{len(given)} entries", accepted)
    for one in given:
        if not one.strip("/") or one.startswith("/") or ".." in one.split("/") or len(one) > LONGEST_PATTERN:
            raise ParameterError(key, one, f"{accepted}; a pattern neither begins with / nor leads upwards with ..")
        try:
            _pattern(one)
        except re.error as error:
            raise ParameterError(key, one, f"{accepted} ({error})") from None
    return tuple(given)


def _content(given: object) -> tuple[str, ...]:
    accepted = f"a list of {', '.join(KINDS)}; default: all"
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
        raise ParameterTypeError("content", given, accepted)
    for one in given:
        if one not in KINDS:
            raise ParameterError("content", one, accepted + suggest(one, KINDS))
    if not given:
        raise ParameterError("content", given, accepted)
    return tuple(kind for kind in KINDS if kind in given)


def _ca_file(given: object) -> str:
    accepted = "the path of a file of PEM certificates"
    path = text("ca_file", given, accepted)
    if not path or "\0" in path:
        raise ParameterError("ca_file", path, accepted)
    return path


_CHECKS = {
    "repository": _repository,
    "token": _token,
    "base_url": _base_url,
    "branch": _branch,
    "include": lambda given: _path_patterns("include", given),
    "exclude": lambda given: _path_patterns("exclude", given),
    "content": _content,
    "max_bytes": lambda given: whole_number("max_bytes", given, most=LARGEST_FILE),
    "ca_file": _ca_file,
}
