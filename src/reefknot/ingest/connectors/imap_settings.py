"""
The settings of an IMAP source, checked before anything connects.

Nothing is guessed: a key that is not known, a value of another type, a password in plain text and an unencrypted
connection to another machine are refused with what to write instead.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from msgspec import Struct

from reefknot.core.checks import choice, text, whole_number
from reefknot.core.failure import FailureType
from reefknot.errors import ParameterError, ParameterTypeError, SourceError
from reefknot.ingest.connectors.imap_failures import ImapAddress, Tls
from reefknot.ingest.connectors.imap_protocol import ImapFolder, MessageInfo
from reefknot.ingest.port import UnknownSettingError
from reefknot.runtime.addresses import is_loopback
from reefknot.runtime.log import printable

KEYS = (
    *("host", "port", "tls", "tls_ca", "user", "password", "folders", "exclude"),
    *("max_message_bytes", "attachments", "since"),
)
MAX_MESSAGE_BYTES = 25 * 1024 * 1024
PORTS = {Tls.IMPLICIT: 993, Tls.STARTTLS: 143, Tls.NONE: 143}
MOST_PATTERNS = 200

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:.]{2,45}")
_VIRTUAL = frozenset({"\\flagged", "\\important"})
"""Flags of folders that show messages of other folders."""
_LEFT_OUT = frozenset({"\\trash", "\\junk", "\\drafts"})
_LEFT_OUT_NAMES = re.compile(r"trash|spam|junk( e-?mail)?|drafts?|deleted (items|messages)|bulk mail", re.IGNORECASE)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Attachments(StrEnum):
    """The part of attachments that is kept in addition to their names and sizes."""

    TEXT = "text"
    NAMES = "names"


class ImapSettings(Struct, frozen=True):
    """The settings of one mailbox."""

    address: ImapAddress
    user: str
    password: str
    """A reference."""
    folders: tuple[str, ...] | None
    """Patterns; None: the usual ones."""
    exclude: tuple[str, ...]
    max_message_bytes: int
    attachments: Attachments
    since: date | None

    @property
    def reads_attachments(self) -> bool:
        return self.attachments is Attachments.TEXT

    @property
    def criteria(self) -> tuple[str, ...]:
        """Conditions of a search."""
        if self.since is None:
            return ()
        return ("SINCE", f"{self.since.day}-{_MONTHS[self.since.month - 1]}-{self.since.year:04d}")

    def chosen(self, found: Sequence[ImapFolder]) -> list[ImapFolder]:
        """The folders to read among those of a mailbox. A name that it does not have is a permanent failure."""
        readable = [folder for folder in found if not folder.flags & {"\\noselect", "\\nonexistent"}]
        chosen = _usual(readable)
        if self.folders is not None:
            for pattern in self.folders:
                if not any(_fits(folder.name, [pattern]) for folder in readable):
                    names = ", ".join(printable(folder.name, most=40) for folder in readable[:20])
                    raise SourceError(
                        f"folders: the mailbox has no folder {printable(pattern, most=100)!r}; it has {names}",
                        FailureType.PERMANENT,
                    )
            chosen = [folder for folder in readable if _fits(folder.name, self.folders)]
        return [folder for folder in chosen if not _fits(folder.name, self.exclude)]

    @property
    def rules(self) -> str:
        """The settings that decide what becomes of a message: with others, all messages are looked at again."""
        return f"1 {self.max_message_bytes} {self.attachments} {self.since or ''}".rstrip()

    @property
    def unread_version(self) -> str:
        """The version of a message of which nothing is known."""
        return f"unread {self.rules}"

    def version(self, info: MessageInfo) -> str:
        """The version of a document. Messages never change: only the settings can change what is read of one."""
        kind = "headers" if info.size > self.max_message_bytes else str(self.attachments)
        return f"1-{kind}-{info.size}-{info.arrived_at or 0}"


def read_settings(given: Mapping[str, Any], folder: Path) -> ImapSettings:
    """The settings of a source. Raises `ParameterError` for the first one that is not accepted."""
    for key in given:
        if key not in KEYS:
            raise UnknownSettingError(str(key), KEYS)
    tls = choice("tls", given.get("tls", Tls.IMPLICIT), Tls)
    host = _host(given.get("host"), tls)
    port = whole_number("port", given.get("port", PORTS[tls]), most=65_535)
    user = text("user", given.get("user"), "the name of the account, often the mail address")
    if not user or re.search(r"[\r\n\x00]", user) or len(user) > 500:
        raise ParameterError("user", user, "the name of the account in one line, often the mail address")
    return ImapSettings(
        address=ImapAddress(host, port, tls, _tls_ca(given.get("tls_ca"), tls, folder)),
        user=user,
        password=_password(given.get("password")),
        folders=_patterns("folders", given["folders"]) if given.get("folders") is not None else None,
        exclude=_patterns("exclude", given.get("exclude", [])),
        max_message_bytes=whole_number(
            "max_message_bytes", given.get("max_message_bytes", MAX_MESSAGE_BYTES), least=1024, most=100 * 1024 * 1024
        ),
        attachments=choice("attachments", given.get("attachments", Attachments.TEXT), Attachments),
        since=_since(given.get("since")),
    )


def _host(given: object, tls: Tls) -> str:
    host = text("host", given, "the name or address of the IMAP server, such as imap.example.org")
    if not _HOST.fullmatch(host) or ".." in host:
        raise ParameterError("host", host, "the name or address of the IMAP server alone, such as imap.example.org")
    if tls is Tls.NONE and not is_loopback(host):
        raise ParameterError(
            "tls", "none", "implicit or starttls; none only for a server on this machine, such as 127.0.0.1"
        )
    return host


def _tls_ca(given: object, tls: Tls, folder: Path) -> Path | None:
    if given is None:
        return None
    path = folder / text("tls_ca", given, "the path of a file with certificates")
    if tls is Tls.NONE:
        raise ParameterError("tls_ca", given, "no certificates without TLS; leave it out, or set tls")
    return path


def _password(given: object) -> str:
    accepted = (
        "a reference to it: env:NAME for an environment variable, file:PATH for a file; never the password itself"
    )
    if not isinstance(given, str):
        raise ParameterTypeError("password", None if given is None else "***", accepted)
    if not given.startswith(("env:", "file:")) or not given.partition(":")[2]:
        raise ParameterError("password", "***", accepted)
    return given


def _patterns(name: str, given: object) -> tuple[str, ...]:
    accepted = f"a list of names of folders, with * for any letters, at most {MOST_PATTERNS}"
    if not isinstance(given, list | tuple):
        raise ParameterTypeError(name, given, accepted)
    if len(given) > MOST_PATTERNS or (not given and name == "folders"):
        raise ParameterError(name, given, accepted)
    for pattern in given:
        if not isinstance(pattern, str) or not 0 < len(pattern) <= 500:
            raise ParameterError(name, pattern, accepted)
    return tuple(given)


def _since(given: object) -> date | None:
    accepted = "a date such as 2024-01-31"
    if given is None or (isinstance(given, date) and not isinstance(given, datetime)):
        return given
    try:
        return date.fromisoformat(text("since", given, accepted))
    except ParameterError:
        raise
    except ValueError:
        raise ParameterError("since", given, accepted) from None


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
