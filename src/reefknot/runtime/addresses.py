"""Addresses of servers: whether one is for this host alone, or stands for all addresses of the host."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this host reaches the address. A name other than localhost may mean any address."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether the address stands for all addresses of the host."""
    return host.strip("[]") in ("0.0.0.0", "::")  # noqa: S104 - looked for, not bound


NATS_SCHEMES = ("nats", "tls")
NATS_ACCEPTED = "nats://HOST:PORT, several hosts separated by commas, and /NAME behind them for one of another name"


def nats_address(url: str) -> tuple[tuple[str, ...], str]:
    """The servers of a `nats:` or `tls:` URL, and the store's name, which may be empty; a `ValueError` else."""
    scheme, separator, rest = url.partition("://")
    places, _, name = rest.partition("/")
    servers = [place.strip() for place in places.split(",")]
    plain = name.replace("-", "a").replace("_", "a")
    if not separator or scheme not in NATS_SCHEMES or not all(servers) or len(name) > 64:
        raise ValueError(NATS_ACCEPTED)
    if plain and not (plain.isascii() and plain.isalnum()):
        raise ValueError("the name of a store has letters, digits, - and _")
    for place in servers:
        port = place.rpartition("@")[2].rpartition("]")[2].partition(":")[2]
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("a port is a number from 1 to 65535")
    return tuple(f"{scheme}://{place}" for place in servers), name
