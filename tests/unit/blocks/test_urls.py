"""A URL can be read in exactly one way, or not at all."""

from __future__ import annotations

import pytest

from reefknot.blocks.addresses import LONGEST, BadUrl, Forbidden, read_url


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTPS://Example.com:443/A?b=c#d", "https://example.com/A?b=c"),
        ("http://example.com:8080?q", "http://example.com:8080/?q"),
        ("http://example.com:/x", "http://example.com/x"),
        ("http://[2606:4700::1111]:81/", "http://[2606:4700::1111]:81/"),
        ("http://example.com/ü", "http://example.com/%C3%BC"),
        ("http://example.com/a%20b//c", "http://example.com/a%20b//c"),
    ],
)
def test_a_url_is_put_together_from_its_checked_parts(text: str, whole: str) -> None:
    assert str(read_url(text)) == whole


@pytest.mark.parametrize(
    "text", ["ftp://a.com", "file:///etc/passwd", "gopher://a/", "http://u:p@a.com", "https://@a.com"]
)
def test_other_schemes_and_passwords_are_forbidden(text: str) -> None:
    with pytest.raises(Forbidden):
        read_url(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "example.com", "//example.com", "http:/a.com", "http:a.com", "http://a.com:0", "http://a.com:65536"),
        *(
            "http://a.com:8x/",
            "http://a.com:80:80/",
            "http://a.com\\@b.com/",
            "http://a.com /",
            "http://a.com/\r\nX: y",
        ),
        *("http://a.com/\x00", "\thttp://a.com", "http://a\u2028.com", "http://[::1/", "http://a]b/"),
        "http://a.com/" + "x" * LONGEST,
    ],
)
def test_what_two_programs_could_read_differently_is_refused(text: str) -> None:
    with pytest.raises((BadUrl, Forbidden)):
        read_url(text)


@pytest.mark.parametrize(
    ("location", "whole"),
    [
        ("/b", "https://a.com/b"),
        ("c", "https://a.com/x/c"),
        ("//b.com/y", "https://b.com/y"),
        ("http://b.com", "http://b.com/"),
        ("?q=1", "https://a.com/x/y?q=1"),
    ],
)
def test_a_redirect_is_read_like_any_other_url(location: str, whole: str) -> None:
    assert str(read_url("https://a.com/x/y").joined(location)) == whole


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "http://a@b/", "http://127.1/", "javascript:1", "http://a b/"]
)
def test_a_redirect_leads_to_no_odd_url(location: str) -> None:
    with pytest.raises((BadUrl, Forbidden)):
        read_url("https://a.com/").joined(location)


def test_the_endpoint_of_a_url_is_its_host_and_port() -> None:
    assert read_url("https://a.com/x").endpoint == "a.com:443"
    assert read_url("http://[2606::1]/").endpoint == "[2606::1]:80"
