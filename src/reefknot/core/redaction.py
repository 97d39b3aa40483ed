"""
Redaction: removes secrets from text before it is decided on, logged or written.

`redact` is one pass of one regular expression over text that was cut first, so the cost is bounded for any input. It
finds secrets by their context: credentials in URLs, values after names such as `password`, authorization headers. A
`Redactor` also removes the values that are configured as secrets.
"""

import re
from collections.abc import Iterable

LONGEST_TEXT = 4096
HIDDEN = "[redacted]"
SHORTEST_SECRET = 4
"""A shorter secret would be found in too many innocent words."""

_TELLTALE = (
    # Anywhere at the end of a name: dbpassword, accessToken, X-Api-Key.
    r"(?:pass(?:word|wd|phrase)|secret|token|(?:api|access|private)[_-]?key|credentials?|signature|session[_-]?id"
    # Only as a word of its own or a CamelCase hump: "compass=north" is no secret.
    r"|(?:(?<![a-z0-9])|(?-i:(?<=[a-z0-9])(?=[A-Z])))(?:pass|auth|cookie|session|sig|pwd|bearer|jwt))"
)
_NAME = r"(?<![\w.-])[\w.-]{0,128}?"
_IS = r"""\\*["']?[^\S\r\n]*[:=]=?>?(?!//)[^\S\r\n]*"""
_QUOTED = r"""(\\*["'])(?:(?!\{0})(?:\\.|[^\\]))*+(?:\{0})?"""
"""A quoted value: to the closing quote, or to the end when the text was cut before it. The quotes may be escaped."""
_OPAQUE = (
    # "basic authentication" is prose: a token has a digit, a sign or a hump in it, or is longer than words are.
    r"(?:(?=[a-z]*(?:[0-9_~+/=-]|\.[a-z0-9]|(?-i:(?<=[a-z])[A-Z])))[a-z0-9._~+/=-]{8,}|[a-z]{24,})"
)
_SCHEME = r"(?:(?:basic|bearer|digest|token|apikey|key|negotiate|hmac)[^\S\r\n]+)?"
_BARE = r"""[^\s,"'&;)\]}]"""
_PATTERN = re.compile(
    rf"""
    (?P<url>\b[a-z][a-z0-9+.-]{{0,20}}://)(?:
        [^\s/?\#'"]*(?:@|…\Z)    # user:password@, or the text was cut before the @
        | [^\s/?\#'"@:\[]{{0,128}}:(?!\d{{1,5}}[/?\#])[^\s'"@]{{1,256}}@)    # an unencoded /; no port
    | (?P<cookie>\bcookie[^\S\r\n]*:)[^\r\n"']+
    | (?P<header>{_NAME}authorization{_IS})(?:{_QUOTED.format(4)}|{_SCHEME}[^\s,"'&;]+(?:[ ]+{_OPAQUE})?)
    | (?P<scheme>\b(?:bearer|basic)\s+){_OPAQUE}
    | (?P<named>{_NAME}{_TELLTALE}{_IS})(?:{_QUOTED.format(7)}|{_SCHEME}(?:\[redacted\]{_BARE}*|{_BARE}+))
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)

_HINTS = ("://", "pass", "pwd", "secret", "token", "key", "cred", "sig", "session", "auth", "cookie", "jwt")
"""Text without any of these has no secret by context; looking for them costs a fiftieth of matching the pattern."""


def _hide(match: re.Match[str]) -> str:
    url = match["url"]
    if url is not None:
        return f"{url}{HIDDEN}@"
    quote = match[4] or match[7] or ""
    return f"{match['cookie'] or match['header'] or match['scheme'] or match['named']}{quote}{HIDDEN}{quote}"


def redact(text: str) -> str:
    """The text, cut to its bound, with secrets replaced by `[redacted]`."""
    if len(text) > LONGEST_TEXT:
        text = text[: LONGEST_TEXT - 1] + "…"
    low = text.lower()
    if "bearer" in low or "basic" in low or ((":" in text or "=" in text) and any(sign in low for sign in _HINTS)):
        return _PATTERN.sub(_hide, text)
    return text


_SECRET_KEY = re.compile(rf"(?:{_TELLTALE}|authorization)\Z", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether the value under this name is secret: `password`, `x-api-key`, `client_secret`."""
    return _SECRET_KEY.search(name) is not None


class Redactor:
    """Redacts like `redact`, and also configured secrets: raw, escaped as in JSON or `repr`, URL-encoded, in base64,
    in hexadecimal digits."""

    __slots__ = ("_forms", "_longest", "_values", "knows_values", "secrets")

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self.secrets = frozenset(secrets)
        known = {form for secret in self.secrets if len(secret) >= SHORTEST_SECRET for form in _forms(secret)}
        forms = sorted(known, key=len, reverse=True)
        self._forms = forms
        self._values = re.compile("|".join(map(re.escape, forms))) if forms else None
        self._longest = len(forms[0]) if forms else 0
        self.knows_values = bool(forms)
        """Whether any secret is configured."""

    def __call__(self, text: str) -> str:
        if self._values is not None:
            text = self._values.sub(HIDDEN, self._cut(text, self._values))
            if text.endswith("…"):
                text = self._without_torn_end(text)
        return redact(text)

    def values_out_of(self, text: str) -> str:
        """The whole text, however long, without the configured secrets."""
        return text if self._values is None else self._values.sub(HIDDEN, text)

    def tree(self, value: object, *, deepest: int = 16) -> object:
        """JSON-like data with its texts redacted, and with the values under secret names hidden."""
        if isinstance(value, str):
            return self(value)
        if deepest == 0:
            return HIDDEN
        if isinstance(value, dict):
            return {
                self(str(key)): HIDDEN if is_secret_name(str(key)) else self.tree(one, deepest=deepest - 1)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.tree(one, deepest=deepest - 1) for one in value]
        return value

    def _cut(self, text: str, values: re.Pattern[str]) -> str:
        """The bounded beginning of the text, with no secret cut in two: half of a secret would not be recognised."""
        if len(text) <= LONGEST_TEXT:
            return text
        end = LONGEST_TEXT
        for found in values.finditer(text, 0, LONGEST_TEXT + self._longest):
            if found.start() < end:
                end = max(end, found.end())
        return text[:end] + "…"

    def _without_torn_end(self, text: str) -> str:
        """The text without the beginning of a secret at its end: the caller had cut the text there."""
        kept = len(text) - 1
        for form in self._forms:
            for length in range(min(len(form), kept), SHORTEST_SECRET - 1, -1):
                if text.endswith(form[:length], 0, kept):
                    return f"{text[: kept - length]}{HIDDEN}…"
        return text


def _forms(secret: str) -> Iterable[str]:
    from base64 import b64encode, urlsafe_b64encode
    from json import dumps
    from urllib.parse import quote, quote_plus

    raw = secret.encode("utf-8", "surrogatepass")
    yield secret
    yield repr(secret)[1:-1]
    yield dumps(secret)[1:-1]
    yield dumps(secret, ensure_ascii=False)[1:-1]
    for encoded in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        yield encoded
        yield re.sub("%..", lambda pair: pair[0].lower(), encoded)
    yield from (raw.hex(), raw.hex().upper())
    for encode in (b64encode, urlsafe_b64encode):
        yield encode(raw).decode().rstrip("=")
        for before in range(3):  # bytes before it, as in `user:secret`: the characters that only the secret makes
            yield encode(bytes(before) + raw).decode()[(before * 8 + 5) // 6 : (before + len(raw)) * 8 // 6]
