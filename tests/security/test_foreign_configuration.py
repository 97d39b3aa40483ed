"""Somebody else's configuration is not obeyed, and no root of the fs blocks reaches what the process is made of."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from reefknot.errors import ConfigurationError
from reefknot.policy.layers import find
from tests.warm_commands import run_warm

STRANGER = 54_321
STEPS = """\
import reefknot as rk

@rk.block("own.step")
async def step(inputs, context):
    return {"ran": "mine"}
"""


def reefknot(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REEFKNOT", "WORKER_", "SUDO_"))}
    environment = kept | {"XDG_CONFIG_HOME": str(folder / "none"), "PYTHONDONTWRITEBYTECODE": "1"}
    return run_warm(*words, cwd=folder, env=environment, timeout=60)


@pytest.fixture
def below(tmp_path: Path) -> Path:
    """A folder beneath one with a configuration."""
    (tmp_path / "reefknot.yaml").write_text("engine: sqlite:theirs.db\n")
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
class TestOwner:
    def test_a_file_of_another_user_above_is_refused_with_what_to_do(self, below: Path) -> None:
        os.chown(below.parent / "reefknot.yaml", STRANGER, -1)
        ended = reefknot(below, "config", "show")
        assert ended.returncode == 78
        assert f"reefknot.yaml: belongs to user {STRANGER}, not to user 0" in ended.stderr
        assert f"name it: --config {below.parent / 'reefknot.yaml'}" in ended.stderr

    def test_a_link_of_another_user_is_refused_as_well(self, below: Path) -> None:
        (below / "reefknot.yaml").symlink_to(below.parent / "reefknot.yaml")
        os.chown(below / "reefknot.yaml", STRANGER, -1, follow_symlinks=False)
        assert reefknot(below, "config", "show").returncode == 78

    def test_named_it_is_obeyed(self, below: Path) -> None:
        """A control: it is the finding, not the file, that is refused."""
        os.chown(below.parent / "reefknot.yaml", STRANGER, -1)
        ended = reefknot(below, "config", "show", "--config", "../reefknot.yaml")
        assert ended.returncode == 0
        assert "theirs.db" in ended.stdout

    def test_the_person_behind_sudo_is_trusted(self, below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        os.chown(below.parent / "reefknot.yaml", STRANGER, -1)
        monkeypatch.setenv("SUDO_UID", str(STRANGER))
        assert find(None, environ={}, cwd=below) == below.parent / "reefknot.yaml"


def test_a_user_does_not_trust_another_one_but_trusts_root(below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = (below.parent / "reefknot.yaml").stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    if owner == 0:
        assert find(None, environ={}, cwd=below) == below.parent / "reefknot.yaml"
        return
    with pytest.raises(ConfigurationError, match=f"belongs to user {owner}"):
        find(None, environ={}, cwd=below)


def assignments(folder: Path) -> None:
    evil = {"path": "steps.py", "content": STEPS.replace("mine", "theirs"), "overwrite": True}
    (folder / "work.jsonl").write_text(json.dumps({"job": {"type": "fs.blob_put", "payload": evil}}) + "\n")


@pytest.mark.parametrize(
    ("root", "holds"),
    [
        *((root, "the configuration") for root in (".", "..", "/")),
        *((root, "the store") for root in (".reefknot", "link")),
        *(("copies", "the copy of the audit log"), ("hidden", "the secret mail")),
        ("package", "the module package.steps"),
    ],
)
def test_a_root_over_what_the_process_is_made_of_is_refused(tmp_path: Path, root: str, holds: str) -> None:
    """An assignment replaced `steps.py`, which ran at the next start."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "steps.py").write_text(STEPS)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "mail").write_text("hunter2hunter2")
    (tmp_path / ".reefknot").mkdir()
    (tmp_path / "link").symlink_to(".reefknot")
    (tmp_path / "reefknot.yaml").write_text(
        f"blocks: {{fs: {{roots: [files, '{root}']}}}}\n"
        "audit: {jsonl: {path: copies/audit.jsonl}}\nsecrets: {mail: 'file:hidden/mail'}\n"
    )
    assignments(tmp_path)
    ended = reefknot(tmp_path, "run", "work.jsonl", "--module", "package.steps")

    assert ended.returncode == 78
    assert "blocks.fs.roots[1]" in ended.stderr
    assert f"holds {holds}" in ended.stderr
    assert not (tmp_path / ".reefknot" / "state.db").exists()


def test_a_root_over_the_folder_that_modules_come_from_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code" / "shop").mkdir(parents=True)
    (tmp_path / "code" / "shop" / "steps.py").write_text(STEPS)
    (tmp_path / "conf").mkdir()
    config = tmp_path / "conf" / "reefknot.yaml"
    config.write_text(f"engine: sqlite:state.db\nblocks: {{fs: {{roots: ['{tmp_path / 'code'}']}}}}\n")
    assignments(tmp_path / "code" / "shop")
    words = ("run", "work.jsonl", "--module", "steps", "--config", str(config))
    ended = reefknot(tmp_path / "code" / "shop", *words)

    assert ended.returncode == 78
    assert "holds modules that Python imports" in ended.stderr
    assert "mine" in (tmp_path / "code" / "shop" / "steps.py").read_text()


def test_config_check_refuses_the_same_roots(tmp_path: Path) -> None:
    (tmp_path / "reefknot.yaml").write_text("blocks: {fs: {roots: [.]}}\n")
    ended = reefknot(tmp_path, "config", "check")
    assert ended.returncode == 78
    assert "reefknot.yaml:1:23: blocks.fs.roots[0]" in ended.stderr


def test_a_folder_for_data_alone_is_accepted(tmp_path: Path) -> None:
    """The control: beside all of them there is room."""
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "files").mkdir()
    (tmp_path / "reefknot.yaml").write_text("blocks: {fs: {roots: [files]}}\n")
    assignments(tmp_path)
    ended = reefknot(tmp_path, "run", "work.jsonl", "--module", "steps")
    assert ended.returncode == 0, ended.stderr
    assert "theirs" in (tmp_path / "files" / "steps.py").read_text()
    assert "mine" in (tmp_path / "steps.py").read_text()
