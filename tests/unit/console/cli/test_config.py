"""`reefknot config` and `reefknot init`: show, check, schema, templates, and the exit codes of a bad configuration."""

import os
from pathlib import Path

import pytest

from reefknot.console.cli.config import TEMPLATES, recommended, template_text
from reefknot.policy.schema import Configuration
from reefknot.policy.sections import keys_of
from tests.unit.console.cli.running import Commands

BAD: dict[str, tuple[bytes, str]] = {
    "an engine with a password": (b"engine: sqlite://bob:canary-1@host/state.db\n", "engine"),
    "alias bomb": (
        b"a: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n".encode() for n in range(8)
        ),
        "limit",
    ),
    "10 MB": (b"# " + b"x" * 10_000_000, "256 kB"),
}
"""Files that no command accepts; the golden files show what is said of many more."""


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    "command", ["config check", "config show", "policy check", "policy list", "policy explain block:x"]
)
def test_a_bad_file_is_78_and_nothing_is_shown_of_it(rk: Commands, name: str, command: str) -> None:
    content, says = BAD[name]
    (rk.folder / "reefknot.yaml").write_bytes(content)
    ended = rk(*command.split())
    assert (ended.code, ended.out, says in ended.err) == (78, "", True)
    assert ended.err.startswith("reefknot.yaml"), "the reader's own folder is not repeated"
    assert "canary" not in ended.err


@pytest.mark.parametrize("command", ["config check named.yaml", "policy list --config named.yaml"])
def test_a_file_that_may_not_be_read_is_reported(rk: Commands, command: str) -> None:
    path, opened = rk.write("{}", "named.yaml"), os.open

    def forbidden(name: str | Path, *arguments: int) -> int:
        if Path(name) == path:
            raise PermissionError(13, "Permission denied")
        return opened(name, *arguments)

    rk.environment.setattr(os, "open", forbidden)
    ended = rk(*command.split())
    assert (ended.code, ended.err) == (78, "named.yaml: may not be read: permission denied\n")


def test_a_copy_of_the_log_must_not_be_a_file_of_the_system(rk: Commands) -> None:
    for path, what in (("reefknot.yaml", "the configuration"), (".reefknot/state.db", "the store")):
        for name in ("heads", "jsonl"):
            rk.write(f"audit:\n  {name}:\n    path: {path}\n")
            ended = rk("config", "check")
            assert (ended.code, f"reefknot.yaml:3:5: audit.{name}.path: " in ended.err) == (78, True)
            assert f"is {what}, which would be overwritten; accepted: a file of its own" in ended.err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_secrets_are_never_shown_and_references_are(rk: Commands, form: tuple[str, ...]) -> None:
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
    ended = rk("config", "show", *form)
    assert ended.code == 0, ended.err
    shown = [one for one in ("canary", "5551234", "env:MAIL_PASSWORD", "mail.example") if one in ended.out + ended.err]
    assert shown == ["env:MAIL_PASSWORD", "mail.example"]


@pytest.mark.parametrize("words", [(), ("--full",), ("--force",)], ids=" ".join)
def test_what_is_written_is_the_recommended_file_and_is_in_force(rk: Commands, words: tuple[str, ...]) -> None:
    if "--force" in words:
        rk.write("engine: 'memory:'\n")
    ended = rk("init", *words)
    assert (ended.code, ended.out) == (0, "")
    assert (rk.folder / "reefknot.yaml").read_text() == recommended(full="--full" in words), "and nothing else"
    assert sorted(os.listdir(rk.folder)) == ["files", "reefknot.yaml"], "the folder that its file steps may use"
    checked = rk("config", "check")
    assert (checked.code, checked.err) == (0, "")
    assert "worker.retries.v2 on, worker.queue.v2 on" in checked.out


def test_it_knows_the_statuses_that_the_documents_table_leaves_out(rk: Commands) -> None:
    rk("init")
    decisions = {"retry": ("408", "425", "429", "500"), "stop": ("404", "501", "505")}
    for decision, statuses in decisions.items():
        for one in statuses:
            assert rk("policy", "explain", "block:http", "--status", one, "--json").json["decision"] == decision, one


def test_a_link_is_not_followed_a_folder_of_that_name_stays_and_without_rights_it_is_77(rk: Commands) -> None:
    (rk.folder / "reefknot.yaml").symlink_to(rk.folder / "elsewhere")
    assert rk("init").code == 1
    assert not (rk.folder / "elsewhere").exists()
    (rk.folder / "reefknot.yaml").unlink()
    (rk.folder / "reefknot.yaml").mkdir()
    assert rk("init", "--force").code == 1
    assert os.listdir(rk.folder) == ["reefknot.yaml"]
    (rk.folder / "reefknot.yaml").rmdir()

    def forbidden(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", "reefknot.yaml")

    rk.environment.setattr("pathlib.Path.open", forbidden)
    ended = rk("init")
    assert (ended.code, ended.err) == (77, "reefknot: reefknot.yaml: permission denied\n")


def test_the_short_file_and_the_full_one_retry_alike(rk: Commands) -> None:
    """The full one writes down what is built in; a value that differs would be a surprise."""
    schema = rk("config", "schema").json
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert set(schema["properties"]) == set(keys_of(Configuration))
    policies = []
    for words in (("init",), ("init", "--full", "--force")):
        assert rk(*words).code == 0
        listed = rk("policy", "list", "--json").json["policies"]
        policies.append({one["target"]: one["policy"] for one in listed})
    assert policies[0] == policies[1]


@pytest.mark.parametrize("words", [(), ("--force",)])
def test_a_dry_run_over_an_existing_file_says_what_a_real_run_would_do(rk: Commands, words: tuple[str, ...]) -> None:
    file, dry = rk.write("{}"), rk("init", *words, "--dry-run")
    as_json = rk("init", *words, "--dry-run", "--json")
    assert (dry.out, as_json.json["text"], as_json.json["written"]) == (recommended(), recommended(), False)
    assert file.read_text() == "{}"
    real = rk("init", *words)
    assert file.read_text() == (recommended() if words else "{}")
    assert (dry.code, as_json.code) == (real.code, real.code)
    assert ("reefknot.yaml exists already" in real.err, "refusal" in as_json.json) == (not words, not words)
    said = "in place of the one that is there" if words else real.err.removeprefix("reefknot: ").rstrip("\n")
    assert said in dry.err


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_is_a_whole_configuration_and_says_when_to_use_it(rk: Commands, name: str) -> None:
    assert rk("init", "--template", name).code == 0
    assert (rk.folder / "reefknot.yaml").read_text() == template_text(name)
    ended = rk("config", "check")
    assert (ended.code, ended.err) == (0, "")
    first, *others = template_text(name).splitlines()
    assert first == f"# {name}: {TEMPLATES[name]}."
    assert any(line.startswith("# Use it ") for line in others)


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
