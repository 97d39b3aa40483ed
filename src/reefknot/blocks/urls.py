"""
A URL, taken apart once and put together again from parts that were checked.

Strict on purpose: two programs that read the same odd URL differently are how a check is got around. What cannot be
read in exactly one way is refused.
"""

import re
from urllib.parse import quote, urljoin

from msgspec import Struct

from reefknot.blocks.addresses import Forbidden, spelled

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
    return Url(scheme, spelled(authority["host"]), port, target if target.startswith("/") else f"/{target}")
