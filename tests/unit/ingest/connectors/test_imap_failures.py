"""Failures of IMAP servers, in the words of real ones, and names and sets as they travel."""

import ssl
import time
from collections.abc import Callable
from socket import gaierror

import pytest

from reefknot.core.failure import FailureType
from reefknot.ingest.connectors.imap_failures import (
    RESPONSE_CODE,
    ImapAddress,
    ImapRefusedError,
    connection_failure,
    login_refused,
    refusal,
)
from reefknot.ingest.connectors.imap_protocol import MOST_NAME, Token, _tokenize, decoded_name, ranges
from reefknot.retrying.failures import failure_from
from tests.imap_servers import encoded_name

TRANSIENT, LIMITED, PERMANENT = FailureType.TRANSIENT, FailureType.RATE_LIMITED, FailureType.PERMANENT
ADDRESS = ImapAddress("imap.example.org", 993)

REFUSED = [
    ("[UNAVAILABLE] Temporary authentication failure.", TRANSIENT),
    ("[INUSE] Mailbox is locked", TRANSIENT),
    ("[SERVERBUG] Internal error occurred.", TRANSIENT),
    ("[LIMIT] Too many connections", LIMITED),
    ("[OVERQUOTA] Quota exceeded", LIMITED),
    ("[ALERT] Too many simultaneous connections. (Failure)", LIMITED),
    ("Account exceeded command or bandwidth limits. (Failure)", LIMITED),
    ("[LIMIT] UID SEARCH Rate limit hit.", LIMITED),
    ("Maximum number of connections from user+IP exceeded (mail_max_userip_connections=10)", LIMITED),
    ("Request is throttled. Suggested Backoff Time: 92340 milliseconds", LIMITED),
    ("[NONEXISTENT] Unknown Mailbox: x (Failure)", PERMANENT),
    ("Mailbox doesn't exist: x", PERMANENT),
    ("[NOPERM] Permission denied", PERMANENT),
]
LOGINS = [
    ("[AUTHENTICATIONFAILED] Authentication failed.", PERMANENT),
    ("[AUTHENTICATIONFAILED] Invalid credentials (Failure)", PERMANENT),
    ("[ALERT] Application-specific password required", PERMANENT),
    ("LOGIN failed.", PERMANENT),
    ("[EXPIRED] Password expired", PERMANENT),
    ("[UNAVAILABLE] Temporary authentication failure.", TRANSIENT),
    ("[ALERT] Too many simultaneous connections. (Failure)", LIMITED),
]


@pytest.mark.parametrize(("words", "kind"), REFUSED)
def test_a_refusal_is_sorted_by_code_and_words(words: str, kind: FailureType) -> None:
    failure = refusal(words, "imap.example.org refused EXAMINE")

    assert failure.failure_type is kind
    assert failure_from(failure).failure_type is kind
    assert words in str(failure)


@pytest.mark.parametrize(("words", "kind"), LOGINS)
def test_a_refused_login_is_permanent_unless_waiting_helps(words: str, kind: FailureType) -> None:
    failure = login_refused(refusal(words, "imap.example.org refused AUTHENTICATE"), "ann")

    assert failure.failure_type is kind
    assert ("app password" in str(failure)) is (kind is PERMANENT)


def test_a_wait_that_the_server_asks_for_is_honoured() -> None:
    assert failure_from(refusal(REFUSED[9][0], "x")).retry_after == 92.34


def test_a_farewell_is_transient_unless_it_names_a_limit() -> None:
    assert refusal("Server shutting down.", "x", is_bye=True).failure_type is TRANSIENT
    assert refusal("[ALERT] Too many connections", "x", is_bye=True).failure_type is LIMITED
    assert isinstance(refusal("", "x", is_bad=True), ImapRefusedError)
    assert refusal("", "x", is_bad=True).failure_type is PERMANENT


def certificate_error() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "self-signed certificate"
    return error


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (certificate_error(), PERMANENT, "tls_ca"),
        (tls_error("WRONG_VERSION_NUMBER"), PERMANENT, "993 goes with implicit"),
        (tls_error("UNEXPECTED_EOF"), TRANSIENT, "failed"),
        (ConnectionRefusedError("refused"), TRANSIENT, "refused"),
        (ConnectionResetError("reset by peer"), TRANSIENT, "reset by peer"),
        (gaierror(-2, "Name or service not known"), TRANSIENT, "check host"),
    ],
)
def test_an_error_of_the_network_says_what_to_check(error: Exception, kind: FailureType, says: str) -> None:
    failure = connection_failure(error, ADDRESS, "connecting")

    assert failure.failure_type is kind
    assert says in str(failure)
    assert "imap.example.org" in str(failure)


@pytest.mark.parametrize("name", ["INBOX", "Entwürfe", "a & b", "日本語", "line\nbreak", 'quo"te\\', "😀", "&", "a&-b"])
def test_names_of_folders_are_decoded(name: str) -> None:
    assert decoded_name(encoded_name(name).encode()) == name


@pytest.mark.parametrize("raw", [b"&*-", b"&AB-", b"a&", b"&2D3-", b"\xff\xfe", b"&&APw-"])
def test_a_broken_name_of_a_folder_is_kept_as_it_is(raw: bytes) -> None:
    assert decoded_name(raw) == raw.decode("utf-8", "replace")


def test_uids_are_joined_to_ranges() -> None:
    assert ranges([7, 3, 2, 1, 9, 10]) == "1:3,7,9:10"
    assert ranges([]) == ""


def test_only_a_refused_login_or_a_missing_right_is_forbidden() -> None:
    assert login_refused(refusal("[AUTHENTICATIONFAILED] no", "login"), "ann").forbidden
    assert refusal("[NOPERM] not yours", "SELECT").forbidden
    assert not login_refused(refusal("[UNAVAILABLE] later", "login"), "ann").forbidden
    assert not refusal("[NONEXISTENT] no such mailbox", "SELECT").forbidden


def tokens(text: bytes) -> list[Token]:
    found: list[Token] = []
    _tokenize(text, [found])
    return found


def test_an_answer_is_read_by_its_values() -> None:
    assert tokens(rb'(\A \B) "/" "a \"b\" \\" NIL x') == [[rb"\A", rb"\B"], b"/", b'a "b" \\', None, b"x"]


@pytest.mark.parametrize("text", [b'"/" "open', b'"/" "open\\', b'"/" "open \\"'])
def test_a_text_without_an_end_is_no_value(text: bytes) -> None:
    assert tokens(text) == [b"/", None]


SIZE = 60_000


@pytest.mark.parametrize(
    "search",
    [
        lambda: tokens(b'() "/" "' + b'\\"' * SIZE),
        lambda: tokens(b'() "/" "' + b'\\"' * SIZE + b"\\"),
        lambda: tokens(b'"' + b"\\" * SIZE),
        lambda: RESPONSE_CODE.match("[" + "a" * SIZE),
        lambda: RESPONSE_CODE.findall("[a" * SIZE),
        lambda: [decoded_name(b"&" * MOST_NAME) for _ in range(1000)],
    ],
)
def test_hostile_answers_take_no_more_than_a_moment(search: Callable[[], object]) -> None:
    """Quadratic searches took 2 to 20 seconds for these, in which no other source was served."""
    begun = time.process_time()
    search()
    assert time.process_time() - begun < 0.8


def test_the_code_of_an_answer_has_an_end() -> None:
    assert RESPONSE_CODE.match("[UIDVALIDITY 12] ok") is not None
    assert RESPONSE_CODE.match(f"[UIDVALIDITY {'1' * 5000}]") is None
