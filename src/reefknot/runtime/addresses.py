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
