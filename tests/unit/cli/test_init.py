"""`reefknot init`: a file to start from, and never over a file that is there."""

from __future__ import annotations

import os

import pytest

from reefknot.cli.config import TEMPLATES, recommended, template_text
from tests.unit.cli.running import Commands


def test_what_is_written_is_the_recommended_file_and_is_in_force(rk: Commands) -> None:
    ended = rk("init")

    assert (ended.code, ended.out) == (0, "")
    assert (rk.folder / "reefknot.yaml").read_text() == recommended()
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


def test_a_file_that_is_there_stays(rk: Commands) -> None:
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
    assert os.listdir(rk.folder) == ["reefknot.yaml"]


def test_a_dry_run_prints_and_writes_nothing(rk: Commands) -> None:
    ended = rk("init", "--dry-run")

    assert ended.code == 0
    assert ended.out == recommended()
    assert os.listdir(rk.folder) == []


def test_a_second_configuration_in_one_folder_is_refused(rk: Commands) -> None:
    rk.write("{}", "reefknot.json")

    ended = rk("init", "--force")

    assert ended.code == 1
    assert "reefknot.json" in ended.err


def test_a_folder_under_that_name_is_told(rk: Commands) -> None:
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


def test_an_unknown_template_is_refused_before_anything_is_written(rk: Commands) -> None:
    ended = rk("init", "--template", "mail-box")

    assert ended.code == 2
    assert "did you mean 'mailbox'?" in ended.err
    assert os.listdir(rk.folder) == []
