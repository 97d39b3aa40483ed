"""
Secrets out of text, before anybody sees it.

One pass of one regular expression over text that was cut first, so the cost is bounded whatever comes in. It finds what
is secret by its place: credentials in URLs, values beside telling names, authorization headers. Values that are secret
by configuration are a `Redactor`'s business.
"""

import re
from collections.abc import Iterable

LONGEST_TEXT = 4096
HIDDEN = "[redacted]"

_TELLING = (
    r"pass(?:word|wd|phrase)?|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|client[_-]?secret|credentials?"
    r"|auth(?:orization)?|cookie|session(?:[_-]?id)?|signature|sig|pwd|bearer|jwt"
)
_PLACES = re.compile(
    rf"""
    (?P<url>\b[a-z][a-z0-9+.-]{{0,20}}://)[^\s/@:'"]{{0,256}}(?::[^\s/@'"]{{0,256}})?@            # user:password@
    | (?P<header>\b(?:proxy-)?authorization["']?\s*[:=]\s*["']?)(?:(?:basic|bearer|digest|token)\s+)?[^\s,"'&;]+
    | (?P<scheme>\b(?:bearer|basic)\s+)[a-z0-9._~+/=-]{{8,}}
    | (?P<named>\b(?:[a-z0-9]{{1,20}}[_-]){{0,3}}(?:{_TELLING})["']?\s*(?:=|:(?!//))\s*["']?)[^\s,"'&;)\]}}]+
    """,
    re.IGNORECASE | re.VERBOSE,
)


def _hide(match: re.Match[str]) -> str:
    url = match["url"]
    if url is not None:
        return f"{url}{HIDDEN}@"
    return f"{match['header'] or match['scheme'] or match['named']}{HIDDEN}"


def redact(text: str) -> str:
    """The text, cut to its bound, without what is secret by its place."""
    if len(text) > LONGEST_TEXT:
        text = text[: LONGEST_TEXT - 1] + "…"
    if ":" not in text and "=" not in text and "earer" not in text:
        return text
    return _PLACES.sub(_hide, text)


class Redactor:
    """`redact`, and also every configured secret, raw, URL-encoded or in base64."""

    __slots__ = ("_values",)

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {form for secret in secrets if len(secret) >= 4 for form in _forms(secret)}
        self._values = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None

    def __call__(self, text: str) -> str:
        if self._values is not None:
            text = self._values.sub(HIDDEN, text)
        return redact(text)


def _forms(secret: str) -> Iterable[str]:
    from base64 import b64encode, urlsafe_b64encode
    from urllib.parse import quote, quote_plus

    raw = secret.encode()
    yield secret
    yield quote(secret, safe="")
    yield quote_plus(secret)
    yield b64encode(raw).decode().rstrip("=")
    yield urlsafe_b64encode(raw).decode().rstrip("=")
