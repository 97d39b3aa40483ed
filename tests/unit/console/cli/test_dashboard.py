"""`reefknot dashboard` and the dashboard of `up`: what cannot be served is refused, with what to do about it."""

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.cli import serve
from reefknot.console.dashboard import server
from tests.unit.console.cli import work_items
from tests.unit.console.cli.running import Commands

CERTIFICATE = Path(__file__).parents[3] / "integration" / "localhost.pem"
TOKEN = "a-token-that-is-long-enough"
WANTED = "tls_certificate, dashboard.tls_key, dashboard.operator_token or reader_token"


@pytest.fixture(autouse=True)
def store(store: Path) -> Path:
    work_items.submitted(store, "known")
    return store


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_chosen_port_in_use_is_an_error_as_is_an_address_of_another_machine(rk: Commands, taken: int) -> None:
    rk.environment.setenv("TOKEN", TOKEN)
    rk.write(f"dashboard: {{tls_certificate: {CERTIFICATE}, tls_key: {CERTIFICATE}, operator_token: env:TOKEN}}")
    ended = rk("dashboard", "--host", "192.0.2.1", "--port", "0")
    assert ended.code == 78
    assert "the dashboard cannot be served on 192.0.2.1:0: " in ended.err
    assert "check --host and --port" in ended.err
    rk.environment.setenv("REEFKNOT__DASHBOARD__PORT", str(taken))
    for words, ways in (
        (("dashboard", "--port", str(taken)), "--port or dashboard.port"),
        (("up", "--for", "0"), "dashboard.port or REEFKNOT__DASHBOARD__PORT"),
    ):
        ended = rk(*words)
        assert ended.code == 75
        assert f"127.0.0.1:{taken}: the port is in use" in ended.err
        assert f"choose another with {ways} (0 takes a free one)" in ended.err


def test_the_usual_port_in_use_is_replaced_by_a_free_one(rk: Commands, taken: int) -> None:
    rk.environment.setattr(server, "DEFAULT_PORT", taken)
    ended, told, system = rk("dashboard", "--for", "0", "--json"), rk("dashboard", "--for", "0"), rk("up", "--for", "1")
    assert ended.code == told.code == system.code == 0
    assert ended.json["url"].startswith("http://127.0.0.1:")
    assert f":{taken}/" not in ended.json["url"]
    for one in (told, system):
        lines = [line for line in one.err.splitlines() if "dashboard" in line]
        assert lines[0] == "the dashboard's usual port is in use, so it has a free one"
        assert lines[1].startswith("dashboard: http://127.0.0.1:")


@pytest.mark.parametrize("words", [("dashboard", "--for", "0"), ("up", "--for", "1")], ids=["dashboard", "up"])
def test_an_address_has_its_token_only_on_a_terminal_also_as_json(rk: Commands, store: Path, words: Any) -> None:
    rk.environment.setenv("REEFKNOT__DASHBOARD__PORT", "0")
    for form in ("text", "json"):
        elsewhere = rk(*words, "--log-format", form)
        assert "token=" not in elsewhere.err + elsewhere.out
        assert re.search(r"http://127\.0\.0\.1:\d+/", elsewhere.err)
        (path,) = re.findall(r"log in with the address in (\S+\.url), which only this user can read", elsewhere.err)
        assert Path(path).parent == store.parent
        assert not Path(path).exists(), "it ends with the server"
    rk.environment.setattr(serve, "is_terminal", lambda stream: stream is sys.stderr)
    as_text, as_json = rk(*words, "--log-format", "text"), rk(*words, "--log-format", "json")
    assert re.search(r"^dashboard: http://127\.0\.0\.1:\d+/#token=[\w-]{43}$", as_text.err, re.MULTILINE)
    lines = [json.loads(line) for line in as_json.err.splitlines()]
    (address,) = [line["url"] for line in lines if line["message"] == "dashboard"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{43}", address)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        *((f"{{host: '{one}'}}", f"dashboard.{WANTED}") for one in ("0.0.0.0", "::", "192.0.2.1", "example.org")),
        (
            f"{{host: 192.0.2.1, tls_certificate: {CERTIFICATE}, tls_key: {CERTIFICATE}}}",
            "set dashboard.operator_token",
        ),
        ("{host: 192.0.2.1, operator_token: env:TOKEN}", "set dashboard.tls_certificate"),
        ("{operator_token: env:NOT_THERE}", "there is no such environment variable"),
        ("{operator_token: env:SHORT}", "the token is too short; accepted: at least 16 characters"),
        ("{operator_token: env:TOKEN, reader_token: env:TOKEN}", "operator_token and reader_token are the same"),
        ("{operator_token: written-in-the-file}", "accepted: a reference, env:NAME or file:PATH"),
        ("{tls_certificate: cert.pem}", "tls_certificate and tls_key belong together"),
        ("{tls_certificate: cert.pem, tls_key: cert.pem}", "cert.pem cannot be used"),
        ("{port: 70000}", "dashboard.port"),
        ("{prot: 1}", "unknown key; accepted: allowed_hosts, enabled, host"),
    ],
)
@pytest.mark.parametrize("words", [("dashboard", "--for", "0"), ("up", "--for", "0")], ids=["dashboard", "up"])
def test_an_unusable_section_is_refused(rk: Commands, section: str, named: str, words: tuple[str, ...]) -> None:
    rk.write(f"dashboard: {section}")
    rk.environment.setenv("TOKEN", TOKEN)
    rk.environment.setenv("SHORT", "too-short-token")
    ended = rk(*words)
    assert (ended.code, ended.out) == (78, "")
    assert named in ended.err
    assert ("dashboard.allowed_hosts" in ended.err) is ("'0.0.0.0'" in section or "'::'" in section)
    assert "too-short-token" not in ended.err
    assert "written-in-the-file" not in ended.err


def test_a_configured_token_is_never_printed_and_without_it_each_start_makes_another(rk: Commands) -> None:
    tokens = {rk("dashboard", "--for", "0", "--port", "0", "--json").json["token"] for _ in range(2)}
    assert [len(one) for one in tokens] == [43, 43], "two of 32 random bytes"
    rk.write("dashboard: {operator_token: env:TOKEN, port: 0}")
    rk.environment.setenv("TOKEN", TOKEN)
    told, as_json = rk("dashboard", "--for", "0"), rk("dashboard", "--for", "0", "--json")
    lines, system = rk("dashboard", "--for", "0", "--log-format", "json"), rk("up", "--for", "1")
    assert told.code == as_json.code == lines.code == system.code == 0
    for one in (told, lines, system):
        assert "log in with the token of dashboard.operator_token (env:TOKEN)" in one.err
    assert as_json.json["token"] is None
    assert TOKEN not in "".join(one.err + one.out for one in (told, as_json, lines, system))
    assert "#token" not in told.err + lines.err + system.err


def test_a_missing_package_is_named_by_its_extra_and_a_dashboard_may_be_off(rk: Commands, store: Path) -> None:
    rk.environment.setattr(server, "NEEDED", ("starlette", "no_such_package"))
    ended, system = rk("dashboard", "--for", "0"), rk("up", "--for", "0")
    assert ended.code == 78
    assert "pip install '.[dashboard]' in a checkout (missing: no_such_package)" in ended.err
    assert (system.code, sum("'.[dashboard]'" in line for line in system.err.splitlines())) == (0, 1)
    rk.environment.setenv("REEFKNOT__DASHBOARD__ENABLED", "false")
    off = rk("up", "--for", "0")
    assert (off.code, "dashboard" in off.err) == (0, False)
