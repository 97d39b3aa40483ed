"""URLs that can be read in exactly one way, and the hosts and addresses that may be called."""

from ipaddress import ip_address

import pytest

from reefknot.steps.addresses import (
    LONGEST,
    AddressRules,
    BadUrl,
    Forbidden,
    is_public,
    normalised_host,
    read_allowed,
    read_url,
)

PUBLIC = ("1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::808:808")
INSIDE = (
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
    *("169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.1"),
    *("203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16", "192.88.99.1"),
    *("::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1", "2002:808:808::1", "2001::1", "2001:0:7f00:1::1"),
    *("fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "3fff::1", "100::1", "5f00::1"),
    *("2a00::5efe:7f00:1", "2a00::200:5efe:a00:1"),
)


def test_an_address_that_everybody_reaches_is_public_and_one_of_the_inside_in_no_form() -> None:
    assert [address for address in (*PUBLIC, *INSIDE) if is_public(ip_address(address))] == list(PUBLIC)
    assert any(ip_address(address).is_global for address in INSIDE), "the control: why there is a table here"


@pytest.mark.parametrize(
    ("written", "spelling"),
    [
        *(("Example.COM", "example.com"), ("example.com.", "example.com"), ("127.0.0.1.", "127.0.0.1")),
        *(("bücher.example", "xn--bcher-kva.example"), ("a_b.example", "a_b.example"), ("123abc", "123abc")),
        *(("[2606:4700:0:0::1111]", "2606:4700::1111"), ("[::ffff:10.0.0.1]", "10.0.0.1")),
    ],
)
def test_a_host_has_one_spelling(written: str, spelling: str) -> None:
    assert normalised_host(written) == spelling


@pytest.mark.parametrize(
    "host",
    [
        *("2130706433", "0177.0.0.1", "127.1", "0x7f.1", "0x7f000001", "127.0.0.1.2", "1.2.3.0x4", "256.1.1.1"),
        *("①②⑦.⓪.⓪.①", "127。0。0。1", "ⓛocalhost", "loc\u00adalhost", "ex\u200bample.com"),
        *("a..b", ".a", "a..", "-a.com", "a-.com", "a b", "a%2eb", "[::1", "[::1%eth0]", "[1.2.3.4]", "[]", ""),
        *("a" * 64 + ".com", "a." * 127 + "com", "[::1]x", "a:b", "fe80::1%25lo"),
    ],
)
def test_an_unusual_spelling_is_refused(host: str) -> None:
    with pytest.raises(Forbidden):
        normalised_host(host)


def allowing(*listed: str) -> AddressRules:
    return AddressRules(read_allowed(one) for one in listed)


@pytest.mark.parametrize(
    ("listed", "host", "port"),
    [
        *(("127.0.0.1", "127.0.0.1", 80), ("127.0.0.1:80", "127.0.0.1", 80), ("10.0.0.0/8", "10.9.9.9", 443)),
        *(("10.0.0.0/8:443", "10.9.9.9", 443), ("::1", "::1", 80), ("[::1]:80", "::1", 80)),
        *(("fd00::/8", "fd12::1", 80), ("localhost", "localhost", 80), ("Billing:8080", "billing", 8080)),
    ],
)
def test_what_is_listed_may_be_called(listed: str, host: str, port: int) -> None:
    allowing(listed).check_host(host, port)


@pytest.mark.parametrize(
    ("listed", "host", "port"),
    [
        *(("127.0.0.1:80", "127.0.0.1", 81), ("127.0.0.1", "127.0.0.2", 80), ("10.0.0.0/8", "11.0.0.1.internal", 80)),
        *(("10.0.0.0/8", "192.168.0.1", 80), ("localhost:80", "localhost", 81), ("::1", "127.0.0.1", 80)),
        ("billing", "billing2", 80),
    ],
)
def test_what_is_not_listed_may_not(listed: str, host: str, port: int) -> None:
    """As it goes: the host, then what the name is resolved to."""
    rules = allowing(listed)

    with pytest.raises(Forbidden, match=r"blocks\.http\.allow"):  # noqa: PT012 - either of the two
        rules.check_host(host, port)
        rules.check_address(host, ip_address("192.168.7.7"), port)


def test_a_listed_name_may_have_any_address_and_a_listed_range_holds_for_those_of_any_name() -> None:
    allowing("billing.internal").check_address("billing.internal", ip_address("10.0.0.7"), 80)
    rules = allowing("10.0.0.0/8")
    rules.check_host("billing.internal", 80)
    rules.check_address("billing.internal", ip_address("::ffff:10.0.0.7"), 80)
    with pytest.raises(Forbidden):
        rules.check_address("billing.internal", ip_address("192.168.0.7"), 80)


@pytest.mark.parametrize("host", ["localhost", "a.localhost", "printer.local", "db.internal", "intranet", "home.arpa"])
def test_names_of_the_inside_are_refused_before_anybody_resolves_them(host: str) -> None:
    AddressRules().check_host("example.com", 443)
    with pytest.raises(Forbidden):
        AddressRules().check_host(host, 80)


@pytest.mark.parametrize(
    "text", ["", "a b", "10.0.0.0/33", "host:0", "host:99999", "host:x", "http://a", "127.1", "*.a"]
)
def test_an_entry_that_is_no_host_is_a_mistake(text: str) -> None:
    with pytest.raises(ValueError, match="a host, an address or a CIDR"):
        read_allowed(text)


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
        *("http://a.com:8x/", "http://a.com:80:80/", "http://a.com\\@b.com/", "http://a.com /", "http://a]b/"),
        *("http://a.com/\x00", "\thttp://a.com", "http://a\u2028.com", "http://[::1/", "http://a.com/\r\nX: y"),
        "http://a.com/" + "x" * LONGEST,
    ],
)
def test_what_two_programs_could_read_differently_is_refused(text: str) -> None:
    with pytest.raises((BadUrl, Forbidden)):
        read_url(text)


@pytest.mark.parametrize(
    ("location", "whole"),
    [
        *(("/b", "https://a.com/b"), ("c", "https://a.com/x/c"), ("//b.com/y", "https://b.com/y")),
        *(("http://b.com", "http://b.com/"), ("?q=1", "https://a.com/x/y?q=1")),
    ],
)
def test_a_redirect_is_read_like_any_other_url(location: str, whole: str) -> None:
    assert str(read_url("https://a.com/x/y").joined(location)) == whole
    assert read_url("https://a.com/x").endpoint == "a.com:443"
    assert read_url("http://[2606::1]/").endpoint == "[2606::1]:80"


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "http://a@b/", "http://127.1/", "javascript:1", "http://a b/"]
)
def test_a_redirect_leads_to_no_odd_url(location: str) -> None:
    with pytest.raises((BadUrl, Forbidden)):
        read_url("https://a.com/").joined(location)
