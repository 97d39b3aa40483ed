"""`reefknot config` and `reefknot init`: show, check, schema, templates, and the exit codes of a bad configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reefknot.console.cli.config import TEMPLATES, recommended, template_text
from reefknot.policy.schema import Configuration
from reefknot.policy.sections import keys_of
from tests.unit.console.cli.running import Commands

BAD: dict[str, tuple[bytes, str]] = {
    "unknown key": (b"worker: {retrys: {}}", "unknown key"),
    "wrong type": (b"worker: {retries: {v2: {default_policy: {max_attempts: many}}}}", "a whole number"),
    "unknown connector": (b"retry_policies: {imap_mailbx: {}}", "did you mean 'imap_mailbox'?"),
    "out of bounds": (b"retry_policies: {imap_mailbox: {max_attempts: 11}}", "out of bounds"),
    "thresholds out of order": (
        b"worker: {queue: {v2: {overload_thresholds: {degraded: 0.9}}}}",
        "degraded < overloaded < critical",
    ),
    "base above cap": (b"operations: {KV_GET: {base_delay: 60}}", "above the cap"),
    "alias bomb": (
        b"a: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n".encode() for n in range(8)
        ),
        "limit",
    ),
    "10 MB": (b"# " + b"x" * 10_000_000, "256 kB"),
    "bad UTF-8": (b"engine: 'sqlite:\xff'", "is not UTF-8"),
    "duplicate key": (b"engine: a\nengine: b\n", "engine"),
    "not YAML": (b"worker: [", ":1:"),
    "a list": (b"- a\n", "is a mapping"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    "command", ["config check", "config show", "policy check", "policy list", "policy explain block:x"]
)
def test_a_bad_file_is_78_and_nothing_is_shown_of_it(rk: Commands, name: str, command: str) -> None:
    content, says = BAD[name]
    (rk.folder / "reefknot.yaml").write_bytes(content)

    ended = rk(*command.split())

    assert ended.code == 78
    assert says in ended.err
    assert ended.err.startswith("reefknot.yaml"), "the reader's own folder is not repeated"
    assert "Traceback" not in ended.err
    assert ended.out == ""


@pytest.mark.parametrize("command", ["config check named.yaml", "policy list --config named.yaml"])
def test_a_file_that_may_not_be_read_is_reported(rk: Commands, command: str) -> None:
    path = rk.write("{}", "named.yaml")
    opened = os.open

    def forbidden(name: str | Path, *arguments: int) -> int:
        if Path(name) == path:
            raise PermissionError(13, "Permission denied")
        return opened(name, *arguments)

    rk.environment.setattr(os, "open", forbidden)

    ended = rk(*command.split())

    assert (ended.code, ended.err) == (78, "named.yaml: may not be read: permission denied\n")


@pytest.mark.parametrize("command", ["config check", "config show", "policy list", "policy explain block:x"])
def test_a_file_that_was_named_has_to_be_there(rk: Commands, command: str) -> None:
    by_flag = rk(*command.split(), "--config", "gone.yaml")
    rk.environment.setenv("REEFKNOT_CONFIG", "gone.yaml")
    by_variable = rk(*command.split())

    assert (by_flag.code, by_variable.code) == (78, 78)
    assert by_flag.err == "gone.yaml: there is no such file, named by --config\n"
    assert by_variable.err == "gone.yaml: there is no such file, named by environment REEFKNOT_CONFIG\n"


def test_the_nearest_file_upwards_counts(rk: Commands) -> None:
    rk.write("worker: {retries: {v2: {default_policy: {max_attempts: 9}}}}")
    (rk.folder / "a" / "b").mkdir(parents=True)
    rk.environment.chdir(rk.folder / "a" / "b")

    assert rk("policy", "show", "block:any", "--json").json["policy"]["retries"]["value"] == 9


def test_a_variable_counts_even_without_a_file(rk: Commands) -> None:
    rk.environment.setenv("REEFKNOT__WORKER__RETRIES__V2__DEFAULT_POLICY__MAX_ATTEMPTS", "9")

    assert rk("policy", "show", "block:any", "--json").json["policy"]["retries"]["value"] == 9


@pytest.mark.parametrize("variable", ["WORKER_RETRIES_V2_ENABLED", "WORKER_QUEUE_V2_ENABLED"])
def test_a_gate_that_says_maybe_is_78(rk: Commands, variable: str) -> None:
    rk.environment.setenv(variable, "maybe")

    ended = rk("policy", "list")

    assert ended.code == 78
    assert variable in ended.err
    assert "'maybe' is not accepted; accepted: true, 1, yes, on, false, 0, no, off" in ended.err


@pytest.mark.parametrize("name", ["heads", "jsonl"])
@pytest.mark.parametrize(
    ("path", "what"), [("reefknot.yaml", "the configuration"), (".reefknot/state.db", "the store")]
)
def test_a_copy_of_the_log_must_not_be_a_file_of_the_system(rk: Commands, name: str, path: str, what: str) -> None:
    rk.write(f"audit:\n  {name}:\n    path: {path}\n")

    ended = rk("config", "check")

    assert ended.code == 78
    assert f"reefknot.yaml:3:5: audit.{name}.path: " in ended.err
    assert f"is {what}, which would be overwritten; accepted: a file of its own" in ended.err


def test_the_gates_are_shown_with_their_source(rk: Commands) -> None:
    rk.environment.setenv("WORKER_QUEUE_V2_ENABLED", "on")

    gates = rk("config", "show", "--json").json["gates"]

    assert gates["worker.retries.v2"] == {"on": False, "said_by": "default"}
    assert gates["worker.queue.v2"] == {"on": True, "said_by": "environment WORKER_QUEUE_V2_ENABLED"}
    assert "gate worker.queue.v2: on (environment WORKER_QUEUE_V2_ENABLED)" in rk("config", "show").out


def test_secrets_are_never_shown_and_references_are(rk: Commands) -> None:
    rk.write(
        "engine: sqlite:state.db\n"
        "secrets: {mail: 'env:MAIL_PASSWORD'}\n"
        "sources:\n"
        "  a: {connector: imap_mailbox, password: canary-2, host: mail.example, login: {token: canary-3}}\n"
        "  b: {connector: imap_mailbox, password: 'env:MAIL_PASSWORD', urls: ['https://u:canary-4@x/']}\n"
        "  c: {connector: imap_mailbox, pin_token: 5551234}\n"
        "blocks: {sql: {connections: {main: {url: 'postgres://u:canary-5@db/x'}}}}\n"
    )
    rk.environment.setenv("MAIL_PASSWORD", "canary-6")

    for form in ((), ("--json",)):
        ended = rk("config", "show", *form)
        assert ended.code == 0, ended.err
        shown = ended.out + ended.err
        assert "canary" not in shown
        assert "5551234" not in shown
        assert "env:MAIL_PASSWORD" in shown
        assert "mail.example" in shown


def test_the_password_in_an_engine_with_a_host_is_refused_and_not_shown(rk: Commands) -> None:
    rk.write("engine: sqlite://bob:canary-1@host/state.db\n")
    ended = rk("config", "show")

    assert ended.code == 78
    assert "canary" not in ended.out + ended.err


def test_the_schema_is_that_of_the_configuration(rk: Commands) -> None:
    schema = rk("config", "schema").json

    assert schema["$schema"].startswith("https://json-schema.org/")
    assert set(schema["properties"]) == set(keys_of(Configuration))
    assert rk("config", "schema", "--json").json == schema


def test_the_default_engine_is_shown_as_such(rk: Commands) -> None:
    assert rk("config", "show", "--json").json["values"]["engine"] == {
        "value": "sqlite:.reefknot/state.db",
        "source": "default",
    }
    path = rk.write("engine: 'memory:'\n")
    assert rk("config", "show", "--json").json["values"]["engine"] == {"value": "memory:", "source": f"{path}:1:1"}


def test_what_becomes_of_events_is_shown_with_its_source(rk: Commands) -> None:
    path = rk.write("audit:\n  on_failure: fail_closed\n  jsonl: {path: a.jsonl}\n")
    values = rk("config", "show", "--json").json["values"]

    assert values["audit.on_failure"] == {"value": "fail_closed", "source": f"{path}:2:3"}
    assert values["audit.jsonl.path"] == {"value": "a.jsonl", "source": f"{path}:3:11"}
    assert values["audit.jsonl.fsync"] == {"value": "always", "source": "default"}
    assert values["audit.retention_seconds"] == {"value": 7776000.0, "source": "default"}
    assert values["idempotency.retention_seconds"]["value"] == 604800.0
    assert values["worker.retention_seconds"]["value"] == 604800.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("audit: {sinks: []}", ":1:9: audit.sinks: unknown key; accepted: heads, jsonl, log, max_buffered, on_failure"),
        ("audit: {jsonl: {}}", ":1:9: audit.jsonl.path: missing; it must be given"),
        ("audit: {jsonl: {path: a, keep: 3}}", ":1:26: audit.jsonl.keep: unknown key; accepted: fsync, max_file_bytes"),
        (
            "audit: {jsonl: {path: a, max_files: 1}}",
            ":1:26: audit.jsonl.max_files: 1 is out of bounds; accepted: from 2",
        ),
        ("audit: {jsonl: {path: a, fsync: maybe}}", "accepted: 'always', 'rotate' or 'never'"),
        ("audit: {on_failure: closed}", ":1:9: audit.on_failure: 'closed' is not accepted; accepted: 'fail_open'"),
        ("audit: {retention_seconds: 1}", ":1:9: audit.retention_seconds: 1 is out of bounds; accepted: from 60"),
        ("audit: {max_buffered: 0}", ":1:9: audit.max_buffered: 0 is out of bounds; accepted: from 1 to 1000000"),
        ("worker: {retention_seconds: soon}", "worker.retention_seconds: 'soon' is not accepted; accepted: a number"),
        ("idempotency: {max_keys: 0}", ":1:15: idempotency.max_keys: 0 is out of bounds; accepted: from 1"),
        ("blocks: {http: {alow: []}}", ":1:17: blocks.http.alow: unknown key; accepted: allow"),
        ("blocks:\n  fs:\n    roots: [a, 7]", ":3:16: blocks.fs.roots[1]: 7 is not accepted; accepted: text"),
        (
            "blocks: {sql: {connections: {a.b: {url: x}}}}",
            ":1:36: blocks.sql.connections.\"a.b\".url: 'x' is not accepted",
        ),
    ],
)
def test_a_mistake_in_any_section_is_reported_with_file_line_and_column(rk: Commands, text: str, said: str) -> None:
    rk.write(f"{text}\n")
    ended = rk("config", "check")

    assert ended.code == 78
    assert said in ended.err
    assert ended.err.startswith("reefknot.yaml:")


def test_a_mistake_under_blocks_stops_a_system_with_its_position(rk: Commands) -> None:
    rk.write("blocks: {http: {alow: []}}\n")
    rk.write("", "none.jsonl")
    ended = rk("run", "none.jsonl", "--engine", "memory:")

    assert ended.code == 78
    assert "reefknot.yaml:1:17: blocks.http.alow: unknown key" in ended.err


@pytest.mark.parametrize("command", [["config", "check"], ["run", "work.jsonl"], ["up", "--for", "0"]])
def test_an_engine_that_cannot_be_one_is_reported_with_its_line_and_78(rk: Commands, command: list[str]) -> None:
    rk.write("worker: {}\nengine: nats://127.0.0.1:99999\n")
    rk.write("", "work.jsonl")
    ended = rk(*command)

    assert ended.code == 78
    assert "reefknot.yaml:2:" in ended.err
    assert "a store on NATS is nats://HOST:PORT" in ended.err
    assert "--engine" not in ended.err, "nobody gave that flag"


@pytest.mark.parametrize("full", [False, True])
def test_what_is_written_is_the_recommended_file_and_is_in_force(rk: Commands, full: bool) -> None:
    ended = rk("init", *(["--full"] if full else []))

    assert (ended.code, ended.out) == (0, "")
    assert (rk.folder / "reefknot.yaml").read_text() == recommended(full=full)
    assert (rk.folder / "files").is_dir(), "the folder that its file steps may use"
    checked = rk("config", "check")
    assert (checked.code, checked.err) == (0, "")
    assert "worker.retries.v2 on, worker.queue.v2 on" in checked.out


@pytest.mark.parametrize(
    ("status", "decision"),
    [
        ("408", "retry"),
        ("425", "retry"),
        ("429", "retry"),
        ("404", "stop"),
        ("500", "retry"),
        ("501", "stop"),
        ("505", "stop"),
    ],
)
def test_it_knows_the_statuses_that_the_documents_table_leaves_out(rk: Commands, status: str, decision: str) -> None:
    rk("init")

    assert rk("policy", "explain", "block:http", "--status", status, "--json").json["decision"] == decision


def test_an_existing_file_is_kept(rk: Commands) -> None:
    path = rk.write("engine: 'memory:'\n")

    ended = rk("init")

    assert ended.code == 1
    assert "--force" in ended.err
    assert path.read_text() == "engine: 'memory:'\n"


def test_a_link_that_leads_nowhere_is_not_followed(rk: Commands) -> None:
    (rk.folder / "reefknot.yaml").symlink_to(rk.folder / "elsewhere")

    assert rk("init").code == 1
    assert not (rk.folder / "elsewhere").exists()


def test_force_replaces_it_whole(rk: Commands) -> None:
    path = rk.write("engine: 'memory:'\n")

    assert rk("init", "--force").code == 0
    assert path.read_text() == recommended()
    assert sorted(os.listdir(rk.folder)) == ["files", "reefknot.yaml"]


def test_the_short_file_and_the_full_one_retry_alike(rk: Commands) -> None:
    """The full one writes down what is built in; a value that differs would be a surprise."""
    policies = []
    for words in (("init",), ("init", "--full", "--force")):
        assert rk(*words).code == 0
        listed = rk("policy", "list", "--json").json["policies"]
        policies.append({one["target"]: one["policy"] for one in listed})

    assert policies[0] == policies[1]


def test_full_and_a_template_are_two_different_files(rk: Commands) -> None:
    ended = rk("init", "--full", "--template", "mailbox")

    assert (ended.code, os.listdir(rk.folder)) == (2, [])
    assert "give one of them" in ended.err


@pytest.mark.parametrize("words", [(), ("--force",)])
def test_a_dry_run_over_an_existing_file_says_what_a_real_run_would_do(rk: Commands, words: tuple[str, ...]) -> None:
    file = rk.write("{}")
    dry = rk("init", *words, "--dry-run")
    as_json = rk("init", *words, "--dry-run", "--json")

    assert (dry.out, as_json.json["text"], as_json.json["written"]) == (recommended(), recommended(), False)
    assert file.read_text() == "{}"
    real = rk("init", *words)
    assert (dry.code, as_json.code) == (real.code, real.code)
    assert ("reefknot.yaml exists already" in real.err, "refusal" in as_json.json) == (not words, not words)
    said = "in place of the one that is there" if words else real.err.removeprefix("reefknot: ").rstrip("\n")
    assert said in dry.err


def test_a_folder_under_that_name_is_reported(rk: Commands) -> None:
    (rk.folder / "reefknot.yaml").mkdir()

    ended = rk("init", "--force")

    assert ended.code == 1
    assert os.listdir(rk.folder) == ["reefknot.yaml"]


def test_a_folder_that_may_not_be_written_is_77(rk: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", "reefknot.yaml")

    monkeypatch.setattr("pathlib.Path.open", forbidden)

    ended = rk("init")

    assert (ended.code, ended.err) == (77, "reefknot: reefknot.yaml: permission denied\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_is_a_whole_configuration(rk: Commands, name: str) -> None:
    assert rk("init", "--template", name).code == 0

    assert (rk.folder / "reefknot.yaml").read_text() == template_text(name)
    ended = rk("config", "check")
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_when_to_use_it(name: str) -> None:
    lines = template_text(name).splitlines()

    assert lines[0] == f"# {name}: {TEMPLATES[name]}."
    assert any(line.startswith("# Use it ") for line in lines)


# ---- connectors of one's own -----------------------------------------------------------------------------------------

CHECKED = """\
import reefknot as rk

print("imported")


@rk.connector("checked_wiki")
class CheckedWiki:
    def __init__(self, context):
        if not isinstance(context.settings.get("export"), str):
            raise rk.ParameterError("export", context.settings.get("export"), "the path of a list of changes")

    async def fetch(self, request):
        raise AssertionError("a check reaches nothing")
"""


def test_a_check_with_the_module_of_a_connector_checks_its_settings_and_knows_no_other(rk: Commands) -> None:
    rk.write(CHECKED, "checked_wiki.py")
    rk.write("import reefknot", "checked_steps.py")
    rk.write("sources:\n  wiki:\n    connector: checked_wiki\n    export: 5\n")
    without = rk("config", "check")
    assert (without.code, "warning: reefknot.yaml:3:5: sources.wiki.connector: " in without.err) == (0, True)

    words = ("config", "check", "--module", "checked_wiki.py", "--module", "checked_steps")
    done = rk(*words)
    assert (done.code, done.out) == (78, "")
    assert "reefknot.yaml:4:5: sources.wiki.export: 5 is not accepted: the path of a list of changes" in done.err

    rk.write("sources:\n  wiki: {connector: checked_wiki, export: changes.json}\n")
    done = rk(*words, "--json")
    assert (done.code, done.json["ok"], done.json["files"][0]["warnings"]) == (0, True, [])
    rk.write("sources:\n  wiki: {connector: cheked_wiki, export: changes.json}\n")
    done = rk(*words)
    assert (done.code, "did you mean 'checked_wiki'?" in done.err) == (78, True)


def test_a_module_that_cannot_be_imported_is_told(rk: Commands) -> None:
    done = rk("config", "check", "--module", "no_such_wiki.py")
    assert (done.code, "--module no_such_wiki.py: there is no such file" in done.err) == (78, True)
