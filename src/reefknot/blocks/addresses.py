"""
A URL, taken apart once and put together again from parts that were checked.

Strict on purpose: two programs that read the same odd URL differently are how a check is got around. What cannot be
read in exactly one way is refused.

Which hosts and addresses may be called: pure rules, no network.

Only what is reachable by everybody, and what the configuration lists. A host is brought into one spelling or refused: a
resolver takes `2130706433`, `0177.0.0.1` and `127.1` for addresses, and so do attackers. An address is judged with
every IPv4 address hidden in it. Names are resolved elsewhere, and the answers are brought back here.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import quote, urljoin

from msgspec import Struct

LONGEST = 8192
_PORTS = {"http": 80, "https": 443}
_SHAPE = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<target>[^#]*)(?:#.*)?", re.DOTALL)
_AUTHORITY = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]{0,5}))?")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f-\xa0\\\u2000-\u200f\u2028-\u202f\u3000\ufeff\ud800-\udfff]")
_SAFE = "/?:@!$&'()*+,;=-._~%[]"


class BadUrl(ValueError):  # noqa: N818 - it names what was given
    """This is not a URL that can be called."""


class Url(Struct, frozen=True):
    """Where a request goes."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """As the Host header has it: brackets around IPv6, no default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def place(self) -> str:
        """Host and port: what a breaker is kept for."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.origin}{self.target}"

    def joined(self, location: str) -> "Url":
        """Where a redirect from here leads."""
        if _UNPRINTABLE.search(location):
            raise BadUrl("a redirect leads to a URL with characters that no URL has")
        return read_url(urljoin(str(self), location))


def read_url(text: str) -> Url:
    """The parts; `BadUrl` when it is none, `Forbidden` when it is one that must not be called."""
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


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

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
_INSIDE = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "home.arpa", "localdomain")


class Forbidden(Exception):  # noqa: N818 - it reads as what it says
    """This may not be called. The text says why, and what to do about it."""


class AllowEntry(Struct, frozen=True):
    """One entry of `blocks.http.allow`: a host name, or a range of addresses; with or without a port."""

    name: str = ""
    network: Network | None = None
    port: int | None = None

    def fits(self, host: str, address: Address | None, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if self.network is None:
            return host == self.name
        return address is not None and address.version == self.network.version and address in self.network


def read_allowed(text: str) -> AllowEntry:
    """`localhost`, `localhost:8080`, `10.0.0.7`, `10.0.0.0/8`, `10.0.0.0/8:443`, `::1`, `[::1]:80`, `fd00::/8`."""
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


def normalised_host(host: str) -> str:
    """The host in its one spelling: lower case, ASCII, no dot at the end. An unusual one is refused."""
    if not host:
        raise Forbidden("the URL has no host")
    if host.startswith("["):
        return str(_address_in(host))
    if not host.isascii():
        host = _ascii(host)
    host = host.lower().removesuffix(".")
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return str(_dotted(host))
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise Forbidden(f"the host {host[:80]!r} is not a host name")
    return host


def _address_in(host: str) -> Address:
    inner = host.removeprefix("[").removesuffix("]")
    if not host.endswith("]") or "%" in inner or ":" not in inner:
        raise Forbidden(f"the host {host[:80]!r} is not an IPv6 address in brackets, without a zone")
    try:
        return ipv4_of(IPv6Address(inner))
    except ValueError:
        raise Forbidden(f"the host {host[:80]!r} is not an IPv6 address") from None


def _dotted(host: str) -> IPv4Address:
    """Four plain decimal numbers. Every other way of writing them is how a filter is fooled."""
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


def literal(host: str) -> Address | None:
    """The address, if a normalised_host host is one."""
    try:
        return ipv4_of(ip_address(host))
    except ValueError:
        return None


def ipv4_of(address: Address) -> Address:
    """An IPv4 address in IPv6 clothes is that IPv4 address: the system connects to it as such."""
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
    """Whether everybody can reach it, whatever form it is written in."""
    return all(map(_public, embedded_addresses(address)))


def _public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in network for network in _NOT_PUBLIC)
    if address in _NAT64:
        return True  # it stands for the IPv4 address in it, and that one is looked at too
    return address in _GLOBAL_UNICAST and not any(address in network for network in _NOT_PUBLIC_6)


class HttpSettings(Struct, frozen=True):
    """What `http.request` may call beyond public addresses, and how much it may read."""

    allow: tuple[AllowEntry, ...] = ()
    max_response_bytes: int = 1024 * 1024
    ca_file: str = ""
    """Certificates to trust instead of the well-known ones."""


class AddressRules:
    """Public addresses, and what the configuration lists beyond them."""

    def __init__(self, allowed: Iterable[AllowEntry] = ()) -> None:
        self._allowed = tuple(allowed)

    def check_host(self, host: str, port: int) -> None:
        """Before anything is resolved. The host is normalised_host already."""
        address = literal(host)
        if address is not None:
            self.check_address(host, address, port)
        elif not self._listed(host, None, port) and ("." not in host or _is_inside(host)) and not self._has_ranges:
            raise Forbidden(_not_allowed(host, host, port))

    def check_address(self, host: str, address: Address, port: int) -> None:
        """One answer of the resolver. All of them have to pass."""
        if is_public(address) or self._listed(host, None, port):
            return
        for face in embedded_addresses(address):
            if not (_public(face) or self._listed(host, face, port)):
                shape = f"{host} ({face})" if str(face) != host else host
                raise Forbidden(_not_allowed(shape, host, port))

    @property
    def _has_ranges(self) -> bool:
        """With ranges listed, a name of the inside has to be resolved to be judged."""
        return any(one.network is not None for one in self._allowed)

    def _listed(self, host: str, address: Address | None, port: int) -> bool:
        return any(one.fits(host, address, port) for one in self._allowed)


def _is_inside(host: str) -> bool:
    return any(host == suffix or host.endswith(f".{suffix}") for suffix in _INSIDE)


def _not_allowed(shape: str, host: str, port: int) -> str:
    return f"{shape} is not a public address; to allow it, add {host} or {host}:{port} to blocks.http.allow"
