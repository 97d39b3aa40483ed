"""Settings of an IMAP source: the defaults, and what is refused with what to write instead."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import ParameterError
from reefknot.ingest.connectors.imap_failures import Tls
from reefknot.ingest.connectors.imap_protocol import MessageInfo
from reefknot.ingest.connectors.imap_settings import ImapSettings, read_settings

LEAST = {"host": "imap.example.org", "user": "ann@example.org", "password": "env:MAIL_PASSWORD"}


def settings(**more: Any) -> ImapSettings:
    return read_settings({**LEAST, **more}, Path(__file__).parent)


def test_three_settings_are_enough_and_tls_is_on() -> None:
    given = settings()

    assert (given.address.host, given.address.port, given.address.tls) == ("imap.example.org", 993, Tls.IMPLICIT)
    assert given.folders is None
    assert given.max_message_bytes == 25 * 1024 * 1024
    assert settings(tls="starttls").address.port == 143


def test_a_date_is_given_as_text_or_as_yaml_reads_it() -> None:
    assert (
        settings(since="2024-01-31").criteria == settings(since=date(2024, 1, 31)).criteria == ("SINCE", "31-Jan-2024")
    )


@pytest.mark.parametrize(
    ("key", "values", "says"),
    [
        ("hots", ("x",), "did you mean 'host'?"),
        ("folder", (["x"],), "did you mean 'folders'?"),
        ("host", (None,), "the name or address of the IMAP server"),
        ("host", ("imap.example.org:993", "imaps://x", "a\r\nb"), "the name or address of the IMAP server alone"),
        ("port", ("993", 70_000), "a whole number from 1 to 65535"),
        ("tls", (True,), "one of implicit, starttls, none"),
        ("tls", ("none",), "none only for a server on this machine"),
        ("tls_ca", (["a.pem"],), "the path of a file with certificates"),
        ("user", ("", 5), "the name of the account"),
        ("user", ("a\r\nb LOGOUT",), "in one line"),
        ("password", (None,), "env:NAME"),
        ("folders", ("INBOX", [], [5]), "a list of names"),
        ("exclude", (["x"] * 201,), "at most 200"),
        ("max_message_bytes", (10, "25 MB"), "a whole number from 1024"),
        ("attachments", (True,), "one of text, names"),
        ("since", ("yesterday", 2024), "a date such as 2024-01-31"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name_with_what_is_accepted(
    key: str, values: tuple[object, ...], says: str
) -> None:
    for value in values:
        with pytest.raises(ParameterError) as caught:
            settings(**{key: value})
        assert caught.value.parameter == key
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("password", "hunter2 plain"), ("passwort", "hunter2 plain"), ("password", 5)]
)
def test_a_password_in_the_file_is_refused_and_not_repeated(key: str, value: object) -> None:
    with pytest.raises(ParameterError) as caught:
        settings(**{key: value})

    assert str(value) not in str(caught.value).replace("env:NAME", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_a_server_on_this_machine_may_go_without_tls(host: str) -> None:
    assert settings(host=host, tls="none").address.tls is Tls.NONE


def test_settings_that_change_what_is_read_change_the_version_of_a_message() -> None:
    info = MessageInfo(2000, 0)

    assert settings().version(info) == settings(since="2024-01-31").version(info)
    assert settings().version(info) != settings(max_message_bytes=1024).version(info)
    assert settings().version(info) != settings(attachments="names").version(info)
    assert settings().rules != settings(since="2024-01-31").rules
