"""
The settings of a source that is a folder: which files are wanted, and the locations that they are known by.

A location is the path from the folder, and valid text: what a name has of control characters and of bytes that are no
UTF-8 is written as `\\xNN`, and a backslash twice.
"""

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from reefknot.core.checks import flag, text, whole_number
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.ingest.port import SourceContext, UnknownSettingError

Parts = tuple[str, ...]
"""The names on the way from the root to a file, as the system spells them."""

MAX_BYTES = 10 << 20
MOST_PATTERNS = 1000
LONGEST_PATTERN = 1000

# ---- locations -------------------------------------------------------------------------------------------------------

_UNSHOWN = re.compile("[\\\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SHOWN = re.compile(rb"\\(\\|x[0-9a-f]{2})")


def name_of(name: str) -> str:
    """A file's name as it stands in a location."""
    return _UNSHOWN.sub(_escaped, name)


def _escaped(found: re.Match[str]) -> str:
    if found[0] == "\\":
        return "\\\\"
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(found[0]))


def location_of(parts: Parts) -> str:
    return "/".join(map(name_of, parts))


def parts_of(location: str) -> Parts | None:
    """The names that a location is made of; None for a text that is no location."""
    try:
        encoded = location.encode()
    except UnicodeEncodeError:
        return None
    given = [_SHOWN.sub(lambda found: _byte(found[1]), part) for part in encoded.split(b"/")]
    parts = tuple(map(os.fsdecode, given))
    is_safe = not any(part in (b"", b".", b"..") or b"/" in part or b"\0" in part for part in given)
    return parts if is_safe and location_of(parts) == location else None


def _byte(word: bytes) -> bytes:
    return b"\\" if word == b"\\" else bytes([int(word[1:], 16)])


# ---- settings --------------------------------------------------------------------------------------------------------


class FolderSettings(Struct, frozen=True):
    """The settings of a source that is a folder."""

    path: Path
    include: tuple[str, ...] = ("**",)
    exclude: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES
    follow_symlinks: bool = False
    link_targets: tuple[Path, ...] = ()
    allow_empty: bool = False


FOLDER_KEYS = FolderSettings.__struct_fields__


def read_settings(context: SourceContext, *, more: Sequence[str] = ()) -> FolderSettings:
    """The settings of a folder. `more` are keys that the connector reads itself."""
    given = context.settings
    accepted = (*FOLDER_KEYS, *more)
    for key in given:
        if key not in accepted:
            raise UnknownSettingError(str(key), accepted)
    if "path" not in given:
        raise ParameterError("path", None, "the folder to read, such as ~/Documents; it has no default")
    return FolderSettings(
        path=_path("path", given["path"], context.folder),
        include=_patterns("include", given) or ("**",),
        exclude=_patterns("exclude", given),
        max_bytes=whole_number("max_bytes", given.get("max_bytes", MAX_BYTES), least=0, most=1 << 30),
        follow_symlinks=flag("follow_symlinks", given.get("follow_symlinks", False)),
        link_targets=tuple(
            _path("link_targets", one, context.folder) for one in _listed("link_targets", given, "a list of folders")
        ),
        allow_empty=flag("allow_empty", given.get("allow_empty", False)),
    )


def _path(key: str, given: object, folder: Path) -> Path:
    accepted = "the path of a folder, such as ~/Documents; a relative one is beneath the configuration's folder"
    written = text(key, given, accepted)
    if not written.strip() or "\0" in written:
        raise ParameterError(key, given, accepted)
    try:
        return folder / Path(written).expanduser()
    except RuntimeError:  # ~user, who has no home here
        raise ParameterError(key, given, f"{accepted}; the home folder in it is not known") from None


def _listed(key: str, given: Mapping[str, Any], accepted: str) -> Sequence[Any]:
    values = given.get(key, [])
    if not isinstance(values, list | tuple):
        raise ParameterTypeError(key, values, accepted)
    if len(values) > MOST_PATTERNS:
        raise ParameterError(key, f"{len(values)} entries", f"at most {MOST_PATTERNS}")
    return values


def _patterns(key: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    accepted = "a list of patterns relative to the folder, such as ['*.md', 'notes/**']"
    values = _listed(key, given, accepted)
    for one in values:
        written = text(key, one, accepted)
        if not written.strip("/") or written.startswith("/") or ".." in written.split("/"):
            raise ParameterError(key, one, f"{accepted}; a pattern neither begins with / nor leads upwards with ..")
        if len(written) > LONGEST_PATTERN:
            raise ParameterError(key, f"{len(written)} characters", f"at most {LONGEST_PATTERN} characters")
    return tuple(values)


class Patterns:
    """
    Which files of a folder are wanted.

    A pattern is matched name by name, and `**` stands for any number of folders. One without a slash is meant at any
    depth. One that matches a folder means everything in it. A name that begins with a dot is included only by a pattern
    that spells the dot; `exclude` wins over `include`.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str] = (), *, ending: str = "") -> None:
        self._ending = ending
        self._include = _Matcher(include, with_hidden=False)
        self._exclude = _Matcher(exclude, with_hidden=True)
        self._beneath = lru_cache(maxsize=1024)(self._states)

    def wants(self, parts: Parts) -> bool:
        """Whether the file at `parts` is wanted."""
        states = self._beneath(parts[:-1])
        if states is None or not parts[-1].lower().endswith(self._ending):
            return False
        included, excluded = (
            self._include.step(states[0], parts[-1]),
            self._exclude.step(states[1], parts[-1]),
        )
        return self._include.is_matched(included) and not self._exclude.is_matched(excluded)

    def may_hold(self, parts: Parts) -> bool:
        """Whether a file beneath the folder at `parts` may be wanted."""
        return self._beneath(parts) is not None

    def _states(self, parts: Parts) -> "tuple[_States, _States] | None":
        if not parts:
            return self._include.start, self._exclude.start
        above = self._beneath(parts[:-1])
        if above is None:
            return None
        included = self._include.step(above[0], parts[-1])
        excluded = self._exclude.step(above[1], parts[-1])
        return (included, excluded) if included and not self._exclude.is_matched(excluded) else None


_States = frozenset[tuple[int, int]]
"""Places within patterns: the number of a pattern, and of the name in it that is to be matched next."""


class _Matcher:
    """Patterns, matched against one name after the other."""

    def __init__(self, patterns: Sequence[str], *, with_hidden: bool) -> None:
        self._with_hidden = with_hidden
        self._patterns = [_segments(pattern) for pattern in patterns]
        self._expressions = {
            word: re.compile(translate(word)).match for words in self._patterns for word in words if word != "**"
        }
        self.start = self._closed({(number, 0) for number in range(len(self._patterns))})

    def step(self, states: _States, name: str) -> _States:
        is_hidden = name.startswith(".") and not self._with_hidden
        after: set[tuple[int, int]] = set()
        for number, place in states:
            words = self._patterns[number]
            if place == len(words):
                continue
            word = words[place]
            if is_hidden and not word.startswith("."):
                continue
            if word == "**":
                after.add((number, place))
            elif self._expressions[word](name):
                after.add((number, place + 1))
        return self._closed(after)

    def is_matched(self, states: _States) -> bool:
        return any(place >= len(self._patterns[number]) - 1 for number, place in states)

    def _closed(self, states: set[tuple[int, int]]) -> _States:
        """The states, and those behind each `**` that stands for no folder."""
        open_ones = list(states)
        while open_ones:
            number, place = open_ones.pop()
            words = self._patterns[number]
            if place < len(words) and words[place] == "**" and (number, place + 1) not in states:
                states.add((number, place + 1))
                open_ones.append((number, place + 1))
        return frozenset(states)


def _segments(pattern: str) -> list[str]:
    """The names of a pattern. It ends with `**`: a pattern that matches a folder matches what is in it."""
    words = [word for word in pattern.split("/") if word not in ("", ".")]
    if "/" not in pattern.rstrip("/"):
        words.insert(0, "**")
    return words if words[-1] == "**" else [*words, "**"]
