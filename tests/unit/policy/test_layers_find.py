from pathlib import Path

import pytest

from reefknot.errors import ConfigurationError, ConfigurationMissingError
from reefknot.policy.layers import find, load_tree


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with folders in it, and no configuration anywhere above that is ours."""
    (tmp_path / "project" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "home" / "reefknot").mkdir(parents=True)
    return tmp_path / "project"


def put(path: Path, text: str = "a: 1\n") -> Path:
    path.write_text(text)
    return path


def test_the_order_is_named_then_variable_then_nearest_then_home_then_none(project: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(project.parent / "home")}
    here = project / "deep" / "er"
    assert find(None, environ=environ, cwd=here) is None

    home = put(project.parent / "home" / "reefknot" / "reefknot.toml", "a = 1")
    assert find(None, environ=environ, cwd=here) == home

    above = put(project / "reefknot.yaml")
    assert find(None, environ=environ, cwd=here) == above

    nearer = put(project / "deep" / "reefknot.json", "{}")
    assert find(None, environ=environ, cwd=here) == nearer

    by_variable = put(project / "other.yaml")
    environ["REEFKNOT_CONFIG"] = str(by_variable)
    assert find(None, environ=environ, cwd=here) == by_variable

    named = put(here / "named.yaml")
    assert find("named.yaml", environ=environ, cwd=here) == named


def test_the_users_folder_is_found_without_xdg_and_a_folder_of_that_name_is_passed_by(project: Path) -> None:
    folder = project.parent / "me" / ".config" / "reefknot"
    folder.mkdir(parents=True)
    file = put(folder / "reefknot.yml")
    home = str(project.parent / "me")
    assert find(None, environ={"HOME": home}, cwd=project) == file
    assert find(None, environ={"HOME": home, "XDG_CONFIG_HOME": "relative"}, cwd=project) == file
    assert find(None, environ={}, cwd=project) is None
    assert find(None, environ={"REEFKNOT_CONFIG": ""}, cwd=project) is None, "an empty variable names no file"

    (project / "deep" / "reefknot.yaml").mkdir()
    above = put(project / "reefknot.yaml")
    assert find(None, environ={}, cwd=project / "deep") == above


def test_two_candidates_in_one_folder_and_mistakes_of_file_and_environment_are_told_together(project: Path) -> None:
    put(project / "reefknot.yaml")
    put(project / "reefknot.toml", "a = 1")
    with pytest.raises(ConfigurationError, match=r"holds reefknot\.yaml and reefknot\.toml"):
        find(None, environ={}, cwd=project / "deep")
    assert find("reefknot.toml", environ={}, cwd=project) == project / "reefknot.toml"

    (project / "reefknot.toml").unlink()
    put(project / "reefknot.yaml", "a: 1\na: 2\nb: 0123\n")
    with pytest.raises(ConfigurationError) as caught:
        load_tree(environ={"REEFKNOT__A": "[1"}, cwd=project)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("name", ["none.yaml", "", "no\x00ne.yaml"])
def test_a_named_file_that_is_missing_is_an_error_even_when_another_is_there(name: str, project: Path) -> None:
    put(project / "reefknot.yaml")
    if name:
        missing = "there is no such file, named by environment REEFKNOT_CONFIG"
        with pytest.raises(ConfigurationMissingError, match=missing):
            find(None, environ={"REEFKNOT_CONFIG": name}, cwd=project)
        with pytest.raises(ConfigurationMissingError, match="there is no such file, named by --config"):
            find(name, environ={}, cwd=project)
    else:
        with pytest.raises(ConfigurationError, match="is a directory"):
            load_tree("", environ={}, cwd=project)
    (project / "reefknot.yaml").unlink()
    (project / "reefknot.yaml").symlink_to(project / "gone.yaml")
    with pytest.raises(ConfigurationMissingError, match=r"reefknot\.yaml: there is no such file"):
        load_tree(environ={}, cwd=project)


def test_the_environment_lies_over_the_file_and_counts_without_one(project: Path) -> None:
    assert load_tree(environ={"REEFKNOT__A": "1"}, cwd=project)[0].value == {"a": 1}
    assert load_tree(environ={"REEFKNOT__A": "1"}, cwd=project)[1] is None
    file = put(project / "reefknot.yaml", "a: {x: file, y: file}\n")
    tree, path = load_tree(environ={"REEFKNOT__A__Y": "environment"}, cwd=project)
    assert path == file
    assert tree.value == {"a": {"x": "file", "y": "environment"}}
    assert [str(tree.mark(("a", name))) for name in "xy"] == [f"{file}:1:5", "environment REEFKNOT__A__Y"]
