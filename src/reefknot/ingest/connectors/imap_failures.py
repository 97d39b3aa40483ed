"""
The failures of an IMAP server, sorted by what helps: waiting, waiting longer, or a change of the settings.

A server says NO or BAD to a command, or BYE and hangs up, with a code in brackets (RFC 5530) or in words of its own;
the network and TLS fail with exceptions. All of them become a `SourceError` that says what to do.
"""

import asyncio
import re
import ssl
from enum import StrEnum
from pathlib import Path
from socket import gaierror

from msgspec import Struct

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.runtime.log import printable

RESPONSE_CODE = re.compile(r"\[([A-Za-z0-9-]{1,64}+)([^\[\]]{0,1000}+)\]")
_BACKOFF = re.compile(r"backoff time: (\d{1,9}) milliseconds", re.IGNORECASE)
_LIMIT_WORDS = (
    *("too many", "rate limit", "bandwidth limit", "command limit", "exceeded command", "throttled"),
    *("quota exceeded", "limit exceeded", "maximum number of connections"),
)
_LIMIT_CODES = frozenset({"LIMIT", "OVERQUOTA", "THROTTLED"})
_TRANSIENT_CODES = frozenset({"UNAVAILABLE", "INUSE", "SERVERBUG", "EXPUNGEISSUED", "CORRUPTION"})
_PERMANENT_CODES = frozenset({"NONEXISTENT", "NOPERM", "CANNOT", "ACL", "CLIENTBUG", "BADCHARSET", "TRYCREATE"})
_MISSING = re.compile(r"(does ?n.t|not) exist|nonexistent|no such|unknown mailbox", re.IGNORECASE)


class Tls(StrEnum):
    """The way a connection is encrypted. There is no fallback from one to another."""

    IMPLICIT = "implicit"
    STARTTLS = "starttls"
    NONE = "none"


class ImapAddress(Struct, frozen=True):
    """The address of a server, and how to talk to it."""

    host: str
    port: int
    tls: Tls = Tls.IMPLICIT
    tls_ca: Path | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def trust(self) -> ssl.SSLContext:
        """The certificates that the server's is checked against."""
        try:
            return ssl.create_default_context(cafile=self.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise SourceError(
                f"tls_ca: {self.tls_ca} cannot be read as certificates ({printable(str(error), most=100)})",
                FailureType.PERMANENT,
            ) from None


class ImapRefusedError(SourceError):
    """The server answered NO or BAD to a command, and the connection goes on; or BYE, and it is closed."""


def refusal(words: str, doing: str, *, is_bad: bool = False, is_bye: bool = False) -> ImapRefusedError:
    """The failure behind a NO, BAD or BYE, by the server's code and words. `doing` says what was refused."""
    codes = {code.upper() for code, _ in RESPONSE_CODE.findall(words)}
    lower = words.lower()
    message = f"{doing}: {words or 'without a reason'}"
    if codes & _LIMIT_CODES or any(word in lower for word in _LIMIT_WORDS):
        asked = _BACKOFF.search(words)
        after = None if asked is None else int(asked[1]) / 1000
        return ImapRefusedError(
            f"{message}; if it happens often, sync less often, or raise rate_limit_delay_seconds of this source",
            FailureType.RATE_LIMITED,
            retry_after=after,
        )
    if codes & _TRANSIENT_CODES or is_bye:
        return ImapRefusedError(message, FailureType.TRANSIENT)
    if is_bad or codes & _PERMANENT_CODES or _MISSING.search(words):
        return ImapRefusedError(message, FailureType.PERMANENT, forbidden="NOPERM" in codes)
    return ImapRefusedError(message, FailureType.UNKNOWN)


def login_refused(error: ImapRefusedError, user: str) -> SourceError:
    """The failure behind a refused login: another attempt with the same password would fail, too."""
    if error.failure_type in (FailureType.RATE_LIMITED, FailureType.TRANSIENT):
        return error
    return SourceError(
        f"{error}; {printable(user, most=100)} could not log in: check user and password, and whether the provider "
        "wants an app password for programs; then put the new one where `password` points",
        FailureType.PERMANENT,
        forbidden=True,
    )


def connection_failure(error: Exception, address: ImapAddress, doing: str) -> SourceError:
    """The failure behind an error of the network or of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return SourceError(
            f"the certificate of {address} is not trusted ({printable(error.verify_message, most=150)}); check host, "
            "or name the file with the authority's certificate in tls_ca",
            FailureType.PERMANENT,
        )
    if isinstance(error, ssl.SSLError) and error.reason in (
        "WRONG_VERSION_NUMBER",
        "UNSUPPORTED_PROTOCOL",
        "NO_PROTOCOLS_AVAILABLE",
    ):
        return SourceError(
            f"{address} does not speak TLS as it is wanted here ({error.reason}); check port and tls: 993 goes with "
            "implicit, 143 with starttls",
            FailureType.PERMANENT,
        )
    if isinstance(error, gaierror):
        return SourceError(
            f"no address was found for {address.host}; check host and the network", FailureType.TRANSIENT
        )
    if isinstance(error, asyncio.LimitOverrunError):
        return SourceError(f"{address} sent a line without an end; the connection was closed", FailureType.TRANSIENT)
    if isinstance(error, asyncio.IncompleteReadError):
        return SourceError(f"{address} closed the connection ({doing})", FailureType.TRANSIENT)
    reason = printable(str(error) or type(error).__name__, most=150)
    return SourceError(f"the connection to {address} failed ({doing}): {reason}", FailureType.TRANSIENT)
