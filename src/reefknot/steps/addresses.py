"""
URLs, hosts and addresses that `http.request` may call: pure rules, no network.

Allowed is what everybody can reach, and what the configuration lists. Reading is strict on purpose: two programs that
read the same odd URL differently are how a check is got around. A URL is taken apart once and put together again from
checked parts; a host is brought into one form or refused, because a resolver takes `2130706433`, `0177.0.0.1` and
`127.1` for addresses, and so do attackers; an address is judged with every IPv4 address embedded in it. Names are
resolved elsewhere, and the answers are checked here.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import quote, urljoin

from msgspec import Struct

from reefknot.core.failure import ErrorCode

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LONGEST = 8192
_PORTS = {"http": 80, "https": 443}
_SHAPE = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<target>[^#]*)(?:#.*)?", re.DOTALL)
_AUTHORITY = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]{0,5}))?")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f-\xa0\\\u2000-\u200f\u2028-\u202f\u3000\ufeff\ud800-\udfff]")
_SAFE = "/?:@!$&'()*+,;=-._~%[]"

_NOT_PUBLIC = tuple(
    IPv4Network(one)
    for one in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        "168.63.129.16/32",  # public by its number, and yet the inside of a large cloud
    )
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(IPv6Network(one) for one in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
_NAT64 = IPv6Network("64:ff9b::/96")
_TEREDO = IPv6Network("2001::/32")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_COMPATIBLE = IPv6Network("::/96")
_LOW = 0xFFFF_FFFF

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)")
_INTERNAL_SUFFIXES = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "home.arpa", "localdomain")


class BadUrl(ValueError):  # noqa: N818 - it names what was given
    """The text is not a URL that can be called."""

    code = ErrorCode.invalid_input


class Forbidden(Exception):  # noqa: N818 - it reads as what it says
    """A host or address may not be called. The text says why, and what to do about it."""

    code = ErrorCode.permission_denied


class Unreachable(Exception):  # noqa: N818 - a fact about the other side
    """The server could not be reached, or broke off. The code tells silence from refusal."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.network_error) -> None:
        super().__init__(message)
        self.code = code


class Url(Struct, frozen=True):
    """A URL that was read and checked: the target of a request."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """The value of the Host header: brackets around IPv6, no default port."""
        return self.endpoint.removesuffix(f":{_PORTS[self.scheme]}")

    @property
    def endpoint(self) -> str:
        """Host and port: the destination that a breaker is kept for."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.origin}{self.target}"

    def joined(self, location: str) -> "Url":
        """The URL that a redirect from this one leads to."""
        if _UNPRINTABLE.search(location):
            raise BadUrl("a redirect leads to a URL with characters that no URL has")
        return read_url(urljoin(str(self), location))


def read_url(text: str) -> Url:
    """The checked URL; raises `BadUrl` for text that is not a URL, `Forbidden` for a URL that must not be called."""
    if len(text) > LONGEST:
        raise BadUrl(f"the URL has {len(text)} characters; accepted: at most {LONGEST}")
    if _UNPRINTABLE.search(text):
        raise BadUrl("the URL has spaces, backslashes or characters that cannot be seen; write them as %XX")
    parts = _SHAPE.fullmatch(text)
    if parts is None:
        raise BadUrl("not a URL; accepted: http://HOST/… or https://HOST/…")
    scheme = parts["scheme"].lower()
    if scheme not in _PORTS:
        raise Forbidden(f"the scheme {scheme[:20]!r} is not allowed; allowed: http and https")
    if "@" in parts["authority"]:
        raise Forbidden("a name or password in the URL is not allowed; use the header Authorization")
    authority = _AUTHORITY.fullmatch(parts["authority"])
    if authority is None:
        raise BadUrl("the URL's host or port cannot be read; accepted: HOST, HOST:PORT or [IPV6]:PORT")
    port = int(authority["port"]) if authority["port"] else _PORTS[scheme]
    if not 0 < port < 65536:
        raise BadUrl(f"the port {port} is not one; accepted: 1 to 65535")
    target = quote(parts["target"], safe=_SAFE)
    return Url(scheme, normalised_host(authority["host"]), port, target if target.startswith("/") else f"/{target}")


def normalised_host(host: str) -> str:
    """The host in its one form: lower case, ASCII, no dot at the end. An unusual one is refused."""
    if not host:
        raise Forbidden("the URL has no host")
    if host.startswith("["):
        return str(_bracketed_address(host))
    if not host.isascii():
        host = _ascii(host)
    host = host.lower().removesuffix(".")
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return str(_dotted_quad(host))
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise Forbidden(f"the host {host[:80]!r} is not a host name")
    return host


def _bracketed_address(host: str) -> Address:
    inner = host.removeprefix("[").removesuffix("]")
    if not host.endswith("]") or "%" in inner or ":" not in inner:
        raise Forbidden(f"the host {host[:80]!r} is not an IPv6 address in brackets, without a zone")
    try:
        return ipv4_of(IPv6Address(inner))
    except ValueError:
        raise Forbidden(f"the host {host[:80]!r} is not an IPv6 address") from None


def _dotted_quad(host: str) -> IPv4Address:
    """The address of four plain decimal numbers; any other way of writing them is how a filter is fooled."""
    try:
        return IPv4Address(host)
    except ValueError:
        text = f"the host {host[:80]!r} is an address in an unusual form; write it as four decimal numbers"
        raise Forbidden(text) from None


def _ascii(host: str) -> str:
    """The A-labels of a name in another script, by the strict rules: no full-width or circled digits, no other dots."""
    import idna

    try:
        return idna.encode(host.lower(), uts46=False, strict=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        text = f"the host {host[:80]!r} has characters that no host name has; write it in ASCII (xn--…)"
        raise Forbidden(text) from None


def literal_address(host: str) -> Address | None:
    """The address that a normalised host is, None for a name."""
    try:
        return ipv4_of(ip_address(host))
    except ValueError:
        return None


def ipv4_of(address: Address) -> Address:
    """The IPv4 address of an IPv4-mapped one, because the system connects to that; any other address as it is."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def embedded_addresses(address: Address) -> tuple[Address, ...]:
    """The address, and every IPv4 address that a gateway may read in it."""
    address = ipv4_of(address)
    if isinstance(address, IPv4Address):
        return (address,)
    number = int(address)
    hidden: list[Address] = [address]
    if address in _NAT64 or (address in _COMPATIBLE and number > 1):  # :: and ::1 are themselves
        hidden.append(IPv4Address(number & _LOW))
    if address in _SIX_TO_FOUR:
        hidden.append(IPv4Address(number >> 80 & _LOW))
    if address in _TEREDO:
        hidden += [IPv4Address(number >> 64 & _LOW), IPv4Address(~number & _LOW)]
    if (number >> 32 & 0xFCFF_FFFF) == 0x0000_5EFE:  # ISATAP
        hidden.append(IPv4Address(number & _LOW))
    return tuple(hidden)


def is_public(address: Address) -> bool:
    """Whether everybody can reach the address and every address embedded in it."""
    return all(map(_is_public_itself, embedded_addresses(address)))


def _is_public_itself(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in network for network in _NOT_PUBLIC)
    if address in _NAT64:
        return True  # it stands for the IPv4 address in it, and that one is looked at too
    return address in _GLOBAL_UNICAST and not any(address in network for network in _NOT_PUBLIC_6)


class AllowEntry(Struct, frozen=True):
    """An entry of `blocks.http.allow`: a host name or a range of addresses, with or without a port."""

    name: str = ""
    network: Network | None = None
    port: int | None = None

    def matches(self, host: str, address: Address | None, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if self.network is None:
            return host == self.name
        return address is not None and address.version == self.network.version and address in self.network


def read_allowed(text: str) -> AllowEntry:
    """The entry of a text: `localhost`, `localhost:8080`, `10.0.0.7`, `10.0.0.0/8`, `::1`, `[::1]:80`, `fd00::/8`."""
    whole = _network(text)
    if whole is not None:
        return AllowEntry(network=whole)
    rest, colon, number = text.rpartition(":")
    if not colon:
        rest, port = text, None
    elif number.isascii() and number.isdigit() and 0 < int(number[:9]) < 65536:
        port = int(number)
    else:
        raise ValueError("a host, an address or a CIDR, with or without :PORT")
    network = _network(rest.removeprefix("[").removesuffix("]") if rest.startswith("[") else rest)
    if network is not None:
        return AllowEntry(network=network, port=port)
    try:
        return AllowEntry(name=normalised_host(rest), port=port)
    except Forbidden as error:
        raise ValueError(f"a host, an address or a CIDR, with or without :PORT ({error})") from None


def _network(text: str) -> Network | None:
    try:
        return ip_network(text)
    except ValueError:
        return None


class HttpSettings(Struct, frozen=True):
    """Addresses that `http.request` may call beyond public ones, and how much it may read."""

    allow: tuple[AllowEntry, ...] = ()
    max_response_bytes: int = 1024 * 1024
    ca_file: str = ""
    """Certificates to trust instead of the well-known ones."""
    references: Mapping[str, Callable[[], str | None]] = {}
    """References that a payload may have in place of a URL that is a secret, and what reads each; None: it cannot be
    read now. Others are refused, so no payload reads the environment or the files of a worker."""


class AddressRules:
    """The addresses that may be called: public ones, and those that the configuration lists."""

    def __init__(self, allowed: Iterable[AllowEntry] = ()) -> None:
        self._allowed = tuple(allowed)

    def check_host(self, host: str, port: int) -> None:
        """Refuse a normalised host, before anything is resolved."""
        address = literal_address(host)
        if address is not None:
            self.check_address(host, address, port)
        elif not self._listed(host, None, port) and ("." not in host or _is_internal(host)) and not self._has_ranges:
            raise Forbidden(_not_allowed(host, host, port))

    def check_address(self, host: str, address: Address, port: int) -> None:
        """Refuse one answer of the resolver. All of them have to pass."""
        if is_public(address) or self._listed(host, None, port):
            return
        for one in embedded_addresses(address):
            if not (_is_public_itself(one) or self._listed(host, one, port)):
                shown = f"{host} ({one})" if str(one) != host else host
                raise Forbidden(_not_allowed(shown, host, port))

    @property
    def _has_ranges(self) -> bool:
        """Whether ranges are listed: then an internal name has to be resolved to be judged."""
        return any(one.network is not None for one in self._allowed)

    def _listed(self, host: str, address: Address | None, port: int) -> bool:
        return any(one.matches(host, address, port) for one in self._allowed)


def _is_internal(host: str) -> bool:
    return any(host == suffix or host.endswith(f".{suffix}") for suffix in _INTERNAL_SUFFIXES)


def _not_allowed(shown: str, host: str, port: int) -> str:
    return f"{shown} is not a public address; to allow it, add {host} or {host}:{port} to blocks.http.allow"
