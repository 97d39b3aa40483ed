"""The files that `--reload` watches, and the words that it gives its child."""

from pathlib import Path

import pytest

from reefknot.console.cli.app import CommandError
from reefknot.console.cli.reloading import WatchedFiles, changes, without


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("steps.py", "gateway.py", "shop/__init__.py", "shop/inner/tasks.py", "shop/.cache/x.py", "notes.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (tmp_path / "reefknot.yaml").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("modules", "watched"),
    [
        (["steps"], {"steps.py", "gateway.py"}),
        (["./steps.py"], {"steps.py", "gateway.py"}),
        (["shop.inner.tasks"], {"shop/__init__.py", "shop/inner/tasks.py"}),
        (["shop/inner/tasks.py"], {"shop/__init__.py", "shop/inner/tasks.py"}),
        (["shop", "json"], {"shop/__init__.py", "shop/inner/tasks.py"}),
        (["not_written_yet"], {"steps.py", "gateway.py"}),
    ],
)
def test_the_folder_or_the_package_of_a_module_is_watched(project: Path, modules: list[str], watched: set[str]) -> None:
    seen = WatchedFiles(modules, [project / "reefknot.yaml", Path("/etc/passwd")]).look()
    assert set(seen) == {str(project / name) for name in {*watched, "reefknot.yaml"}}


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("modules", [[], ["json"], ["../steps.py"], ["/tmp/steps.py"]])
def test_modules_of_other_folders_are_not_watched(modules: list[str]) -> None:
    with pytest.raises(CommandError, match="so there is nothing to watch"):
        WatchedFiles(modules)


def test_changed_new_and_removed_files_are_named(project: Path) -> None:
    files = WatchedFiles(["steps"])
    before = files.look()
    assert changes(before, files.look()) == ""
    (project / "steps.py").write_text("x = 1\n")
    (project / "gateway.py").unlink()
    assert changes(before, files.look()) == "gateway.py and steps.py"
    for number in range(3):
        (project / f"new{number}.py").write_text("")
    assert changes(before, files.look()) == "gateway.py, new0.py, new1.py and 2 more"


def test_a_flag_is_taken_out_of_a_command_with_its_value() -> None:
    words = ["up", "--for", "3", "--reload", "--module", "steps", "--for=4"]
    assert without(words, "--for") == ["up", "--reload", "--module", "steps"]
    assert without(words, "--reload", takes_value=False) == ["up", "--for", "3", "--module", "steps", "--for=4"]
