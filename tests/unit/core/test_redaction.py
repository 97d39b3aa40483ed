"""Secrets do not come through; ordinary text does."""

import json
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from functools import partial
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.redaction import _PATTERN, HIDDEN, LONGEST_TEXT, Redactor, _hide, is_secret_name, redact
from tests.pace import fastest
from tests.rows import for_each_row

CANARY = "hunter2-Zx9"

IN_PLACE = [
    # user information of URLs
    "postgres://hunter2-Zx9@db/app",
    # queries
    *("GET https://h/x?token=hunter2-Zx9&page=2", "https://h/x?page=2&api_key=hunter2-Zx9;a"),
    "https://h/x?X-Amz-Signature=hunter2-Zx9",
    # headers and schemes without one
    *("authorization=hunter2-Zx9, x", "X-Api-Key: hunter2-Zx9\r\nHost: h", "sent bearer hunter2-Zx9"),
    "sent BEARER hunter2-Zx9",
    # names
    *("password=hunter2-Zx9", "PASSWORD = hunter2-Zx9 host=db", "passwd: hunter2-Zx9)", "pass:hunter2-Zx9]"),
    *("pwd=hunter2-Zx9}", "passphrase: hunter2-Zx9", "client_secret=hunter2-Zx9", "clientSecret=hunter2-Zx9"),
    *("accessToken: hunter2-Zx9", "dbpassword=hunter2-Zx9", "userPass=hunter2-Zx9", "jwt=hunter2-Zx9"),
    *("AWS_SECRET_ACCESS_KEY=hunter2-Zx9", "private-key: hunter2-Zx9", "credentials: hunter2-Zx9"),
    *("credential=hunter2-Zx9", "session_id=hunter2-Zx9", "sessionid=hunter2-Zx9", "session=hunter2-Zx9"),
    *("sig=hunter2-Zx9", "signature=hunter2-Zx9", "cookie=hunter2-Zx9", "smtp.password=hunter2-Zx9"),
    *("token := hunter2-Zx9", "token == hunter2-Zx9", "token => hunter2-Zx9", "x" * 120 + "_token=hunter2-Zx9"),
    # values in quotes
    '{"password": "hunter2-Zx9", "a": 1}',
]
PLACES = [
    *((text, text.replace(CANARY, "[redacted]")) for text in IN_PLACE),
    # user information of URLs, also a password that should have been encoded
    ("postgres://bob:hunter2-Zx9@db/app", "postgres://[redacted]@db/app"),
    ("https://:hunter2-Zx9@host", "https://[redacted]@host"),
    ("HTTPS://bob:p@hunter2-Zx9@host/x", "HTTPS://[redacted]@host/x"),
    ("from git+ssh://bob:hunter2-Zx9@h.example:22/r to ftp", "from git+ssh://[redacted]@h.example:22/r to ftp"),
    ("nats://a:hunter2-Zx9@b and nats://c:hunter2-Zx9@d", "nats://[redacted]@b and nats://[redacted]@d"),
    ("postgres://bob:hunter2-Zx9/+x?#@db/app", "postgres://[redacted]@db/app"),
    ("https://:a/hunter2-Zx9@host", "https://[redacted]@host"),
    ("https://h/x?access_token=hunter2-Zx9#top", "https://h/x?access_token=[redacted]"),
    # headers
    ("Authorization: Bearer hunter2-Zx9 refused", "Authorization: [redacted] refused"),
    ("Proxy-Authorization: Basic hunter2-Zx9", "Proxy-Authorization: [redacted]"),
    ("X-Authorization: ApiKey hunter2-Zx9", "X-Authorization: [redacted]"),
    ("Authorization: Custom hunter2-Zx9 refused", "Authorization: [redacted] refused"),
    ("{'Authorization': 'Bearer hunter2-Zx9', 'Accept': 'x'}", "{'Authorization': '[redacted]', 'Accept': 'x'}"),
    ("Cookie: theme=dark; sid=hunter2-Zx9\r\nHost: h", "Cookie:[redacted]\r\nHost: h"),
    ("Set-Cookie: sid=hunter2-Zx9; Path=/", "Set-Cookie: [redacted]; Path=/"),
    ("auth: Bearer hunter2-Zx9", "auth: [redacted]"),
    # schemes without a header
    ("sent Basic aGVsbG86d29ybGQ", "sent Basic [redacted]"),
    ("sent Basic abcdEFGHijkl", "sent Basic [redacted]"),
    ("bearer eyJh.eyJz.abcd", "bearer [redacted]"),
    ("bearer abcdefghijklmnopqrstuvwx", "bearer [redacted]"),
    # values in quotes, as JSON, as a dict, as JSON in JSON
    ('{"password":"one, two & hunter2-Zx9"}', '{"password":"[redacted]"}'),
    (r'{"password": "a\"b hunter2-Zx9", "a": 1}', '{"password": "[redacted]", "a": 1}'),
    ("{'api_key': 'one hunter2-Zx9'}", "{'api_key': '[redacted]'}"),
    (r"{\"token\": \"one hunter2-Zx9\", \"a\": 1}", r"{\"token\": \"[redacted]\", \"a\": 1}"),
    ("secret = 'one\nhunter2-Zx9' end", "secret = '[redacted]' end"),
    ('password="never closed hunter2-Zx9', 'password="[redacted]"'),
]


@for_each_row(("text", "clean"), PLACES)
def test_what_is_secret_by_its_place_is_hidden_and_the_rest_stays(text: str, clean: str) -> None:
    assert redact(text) == clean
    assert CANARY not in clean
    assert CANARY not in redact(clean)
    assert CANARY not in redact(f"first line: ok\n({text}\nlast line = ok")


ORDINARY = [
    *("", "connection refused", "connect to 10.0.0.1:5432 failed: timed out", "file:///tmp/x@y"),
    *("https://example.com:8080/a/b?page=2&sort=name#top", "see https://example.com/~bob@home"),
    *("https://example.com:8080/~bob@home", "http://[::1]:8080/~bob@home", "mail bob@example.com: no such mailbox"),
    *("compass=north", "bypass: yes", "key: value, key=value", "author: Bob", "tokens: 5", "tokenizer=bpe"),
    *("basic authentication failed: 401", "Basic authentication.", "bearer of bad news: timeout"),
    *("basic arithmetic = hard", 'Basic realm="x"', "signed: yes", "a password is needed", "token://x"),
    *("password must not be empty", "ratio 1:2 = 0.5", "HTTP 503: Service Unavailable", "12:30:45 retry in 5 s"),
    "{'status': 503, 'reason': \"can't\"}",
]


@given(
    st.lists(
        st.sampled_from([*(text for text, _ in PLACES), *ORDINARY, "PWD=x1", "sIg:x1", "CRED", "é"]), max_size=3
    ).map("\n".join)
)
def test_the_short_way_out_changes_nothing(text: str) -> None:
    assert redact(text) == _PATTERN.sub(_hide, text)


@for_each_row("text", ORDINARY)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text) == text
    assert Redactor()(text) == text


def test_long_text_is_cut_and_says_so_and_a_url_that_is_cut_before_its_at_sign_hides_its_user() -> None:
    assert LONGEST_TEXT == 4096
    for hide in (redact, Redactor(["abcd"])):
        assert hide("x" * LONGEST_TEXT) == "x" * LONGEST_TEXT
        assert hide("x" * (LONGEST_TEXT + 1)) == "x" * (LONGEST_TEXT - 1) + "…"
    assert Redactor(["abcd"])("x" * (LONGEST_TEXT - 4) + "abcd").endswith("…")
    text = "." * (LONGEST_TEXT - 30) + " https://bob:" + CANARY * 40 + "@host"
    assert redact(text).endswith(" https://[redacted]@")


# --- configured values --------------------------------------------------------------------------------------------

AWKWARD = "p@ss w/rd+é?>>~"


def forms(secret: str) -> list[str]:
    raw = secret.encode()
    return [
        secret,
        quote(secret, safe=""),
        quote(secret, safe="").lower() if "%" in quote(secret) else secret,
        quote_plus(secret),
        quote(secret),
        b64encode(raw).decode(),
        b64encode(raw).decode().rstrip("="),
        urlsafe_b64encode(raw).decode(),
        urlsafe_b64encode(raw).decode().rstrip("="),
        raw.hex(),
        raw.hex().upper(),
    ]


@for_each_row("form", forms(AWKWARD))
def test_a_configured_secret_is_hidden_in_every_form(form: str) -> None:
    text = Redactor([AWKWARD])(f"<{form}> and ordinary words")

    assert form.rstrip("=") not in text
    assert text.startswith(f"<{HIDDEN}")
    assert text.endswith("> and ordinary words")
    assert form in redact(f"<{form}> and ordinary words")


@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode])
@pytest.mark.parametrize("before", ["", "u", "us", "use", "user:"])
@pytest.mark.parametrize("after", ["", "x", "xy", "@host"])
def test_a_configured_secret_is_hidden_within_other_encoded_text(
    encode: Callable[[bytes], bytes], before: str, after: str
) -> None:
    """What is left are the characters that it shares with its neighbours, less than two of its own at either end."""
    encoded = encode(f"{before}{AWKWARD}{after}".encode()).decode()
    shown = Redactor([AWKWARD])(encoded)

    assert HIDDEN in shown
    left = shown.replace(HIDDEN, "")
    assert len(left) <= len(encode(f"{before}{after}".encode())) + 4
    for size in range(5, len(AWKWARD.encode())):
        assert encode(AWKWARD.encode()[3 : 3 + size]).decode().rstrip("=")[:-1] not in shown


@pytest.mark.parametrize("secret", ["aa?a", ">c?WbW", "\ud800aaa"])
def test_the_forms_of_a_secret_are_whole(secret: str) -> None:
    """`YWE_YQ==` without its padding, `PmM_V2JX` with its last letter, and what is no proper text."""
    raw = secret.encode("utf-8", "surrogatepass")
    for form in (b64encode(raw).decode(), urlsafe_b64encode(raw).decode(), quote(raw)):
        assert Redactor([secret])(f"<{form.rstrip('=')}>") == f"<{HIDDEN}>"


@given(st.text(alphabet="abcXYZ019 /+%é?&=\"'\\", min_size=4, max_size=40))
def test_no_secret_of_any_shape_gets_through(secret: str) -> None:
    hide = Redactor([secret])

    for form in forms(secret)[3:] + forms(secret)[:2]:
        assert form not in hide(f"<{form}>").replace(HIDDEN, "")


def test_what_is_short_is_no_secret_and_what_is_long_is_found_first_as_it_is_beside_the_places() -> None:
    assert Redactor(["abc"])("abc") == "abc"
    assert Redactor(["abcd"])("abcd") == HIDDEN
    assert Redactor(["abcd", "abcdefgh"])("abcdefgh abcd") == f"{HIDDEN} {HIDDEN}"
    assert Redactor(["a.*b"])("a.*b axxb") == f"{HIDDEN} axxb"
    assert Redactor(["swordfish"])("password=x swordfish") == f"password={HIDDEN} {HIDDEN}"
    assert Redactor()("password=x") == f"password={HIDDEN}"
    assert [Redactor(known).knows_values for known in (["swordfish"], ["abc"], [])] == [True, False, False]


def test_a_secret_on_the_edge_of_the_cut_does_not_get_through_in_part() -> None:
    secret = "correct-horse-battery-staple"
    hide = Redactor([secret, "qqqq"])
    for before in range(LONGEST_TEXT - len(secret) - 2, LONGEST_TEXT + 3):
        text = hide("." * before + secret + "tail" * 99)
        assert "cor" not in text, before
        assert "taple" not in text, before
        assert len(text) <= LONGEST_TEXT

    # hiding makes the text shorter; what then moves up was cut by nobody
    secret = "0123456789" * 10
    text = Redactor([secret])(secret * 60)
    assert "0123" not in text
    assert text == HIDDEN * 41 + "…"


# --- data ---------------------------------------------------------------------------------------------------------


SECRET_NAMES = ("password", "X-Api-Key", "client_secret", "clientSecret", "Authorization", "userPass", "jwt")


@for_each_row(
    ("name", "is_secret"),
    [
        *((name, True) for name in (*SECRET_NAMES, "Proxy-Authorization")),
        *((name, False) for name in ("", "compass", "tokens", "author", "password_hint", "key", "value")),
    ],
)
def test_a_key_may_tell_that_its_value_is_secret(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) is is_secret
    assert Redactor().tree({name: ["anything"]}) == {name: HIDDEN if is_secret else ["anything"]}


def test_secrets_are_hidden_at_every_depth_and_what_lies_too_deep_as_a_whole() -> None:
    hide = Redactor(["swordfish"])
    data = {"a": [1, None, True, 2.5, ("swordfish", {"b": "token=x"})], "swordfish": "y", 7: "z"}
    assert hide.tree(data) == {"a": [1, None, True, 2.5, [HIDDEN, {"b": f"token={HIDDEN}"}]], HIDDEN: "y", "7": "z"}

    assert Redactor().tree([[["x"]]], deepest=3) == [[["x"]]]
    assert Redactor().tree([[["x"]]], deepest=2) == [[HIDDEN]]
    assert Redactor().tree({"a": {"b": 1}}, deepest=1) == {"a": HIDDEN}
    assert Redactor().tree(5, deepest=0) == HIDDEN
    assert Redactor().tree("x", deepest=0) == "x"
    nested: object = "x"
    for _ in range(16):
        nested = [nested]
    assert Redactor().tree(nested) == nested
    assert "x" not in str(Redactor().tree([nested]))


def test_values_can_be_taken_out_of_a_text_of_any_length_also_from_the_end_of_a_cut_one() -> None:
    text = "x" * 2 * LONGEST_TEXT + " swordfish password=kept"
    assert Redactor(["swordfish"]).values_out_of(text) == "x" * 2 * LONGEST_TEXT + f" {HIDDEN} password=kept"
    assert Redactor().values_out_of(text) == text

    # A failure's message is cut before the configured secrets are known
    for seen in (4, 7, len(CANARY) - 1, len(CANARY)):
        assert Redactor([CANARY])(f"it said {CANARY[:seen]}…") == f"it said {HIDDEN}…"
    for nothing_secret in (f"it said {CANARY[:3]}…", "it said …"):
        assert Redactor([CANARY])(nothing_secret) == nothing_secret


# --- hostile text -------------------------------------------------------------------------------------------------

HOSTILE = [
    *("a://", "a.", "a-", "a.a.a.a.a.a.a.a.a://x", "://", ":", "@", "bearer ", "basic a", "authorization: "),
    *("authorization:basic ", "password", "password=", 'password="', "password='\\", 'token="\\', "\\", "token \t"),
    *("pass_", "x" * 200 + " ", "cookie:\n", "cookie ", "=", " =", "…", "'\"", "a://b:c", "://:"),
]
TEN_MEGABYTES = 10_000_000


@for_each_row("piece", HOSTILE)
@for_each_row("hide", [redact, Redactor([CANARY, "aaaaaaaa"])])
def test_ten_megabytes_of_hostile_text_are_cleaned_in_ten_milliseconds(piece: str, hide: Callable[[str], str]) -> None:
    text = (piece * (TEN_MEGABYTES // len(piece) + 1))[:TEN_MEGABYTES]

    for whole in ("a=" + text, "https://a.b.c.d:" + text):
        assert fastest(partial(hide, whole), times=40) < 0.010


@given(st.text(alphabet="ab:/@=\"'\\ .-_…\n", max_size=60))
def test_any_text_is_cleaned_without_an_error(text: str) -> None:
    assert isinstance(redact(text), str)


@for_each_row(
    "text",
    [
        *(f"password={CANARY}", f"(password={CANARY})", f"token: {CANARY}, and more", f"Cookie: a={CANARY}"),
        *(f"Authorization: Bearer {CANARY}", f"https://me:{CANARY}@example.org/x?token={CANARY}&y=1"),
        f'{{"password": "{CANARY}"}}',
    ],
)
def test_what_was_cleaned_once_is_not_changed_by_cleaning_it_again(text: str) -> None:
    """A message passes through here when its failure is built, and again on its way to a sink."""
    once = redact(text)

    assert CANARY not in once
    assert redact(once) == once
    assert redact("password=[redacted]hunter2 and more") == "password=[redacted] and more"


@for_each_row("secret", ['p"q\\r-1234', "line one\nline two", "pässwörd-1234", 'it\'s-"both"', "tab\there"])
@for_each_row(
    "shown", [repr, json.dumps, lambda text: json.dumps(text, ensure_ascii=False), lambda text: str(KeyError(text))]
)
def test_a_configured_secret_is_found_in_its_escaped_forms(secret: str, shown: Callable[[str], str]) -> None:
    text = Redactor([secret])(f"it said {shown(secret)} and stopped")

    assert shown(secret)[1:-1] not in text
    assert HIDDEN in text
