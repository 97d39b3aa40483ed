import errno
import os
import stat
from pathlib import Path

import pytest

from reefknot.core.checks import suggest
from reefknot.errors import ConfigurationError, ConfigurationMissingError, ReefknotError
from reefknot.policy.layers import Format, Tree, read_file, read_text
from reefknot.policy.reading.session import Mark, Problem, dotted
from tests.rows import for_each_row


def mistake(path: Path | str) -> str:
    """The one mistake of a file, without the folder's name."""
    with pytest.raises(ConfigurationError) as caught:
        read_file(path)
    (problem,) = caught.value.problems
    return str(problem).rpartition("/")[2]


def written(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.yaml", "a: 1"), ("c.yml", "a: 1"), ("c.YAML", "a: 1"), ("c.json", '{"a": 1}'), ("c.toml", "a = 1")],
)
def test_a_file_is_read_by_its_suffix(name: str, text: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, text)
    tree = read_file(path)
    assert tree.value == {"a": 1}
    assert tree.mark(("a",)).source == str(path)
    assert read_file(str(path)) == tree


@pytest.mark.parametrize("name", ["c.ini", "c", ".yaml", "c.yaml.bak"])
def test_another_suffix_is_refused_and_the_accepted_ones_are_named(name: str, tmp_path: Path) -> None:
    assert ".yaml, .yml, .json, .toml" in mistake(written(tmp_path, name, "a: 1"))


@for_each_row(
    ("kind", "text"),
    [
        *((kind, text) for kind in ("yaml", "json", "toml") for text in ("", "\n\n", "\ufeff", "  \n")),
        *(("yaml", text) for text in ("# only a comment\n", "---\n", "---\n...\n")),
    ],
)
def test_a_document_that_says_nothing_is_an_empty_mapping(kind: Format, text: str) -> None:
    assert read_text(text, format=kind).value == {}


@for_each_row("text", ["- a\n", "just text\n", "null\n", "''\n", "5\n"])
def test_a_document_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="<text>:1:1: a configuration is a mapping"):
        read_text(text)


def test_what_is_no_file_that_can_be_read_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.yaml", written(tmp_path, "file", "") / "below.yaml"):
        with pytest.raises(ConfigurationMissingError, match="there is no such file"):
            read_file(missing)
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "link.yaml")
    assert mistake(tmp_path / "folder.yaml") == "folder.yaml: is a directory, not a file"
    assert mistake(tmp_path / "pipe.yaml") == "pipe.yaml: is not a regular file"
    assert stat.S_ISCHR(os.stat("/dev/zero").st_mode)
    assert "is not a regular file" in mistake("/dev/zero")
    assert "cannot be read" in mistake(tmp_path / "link.yaml")
    assert "not a possible file name" in mistake("c\x00.yaml")
    assert "cannot be read" in mistake("x" * 5000 + ".yaml")


def test_bad_utf8_is_found_with_its_place_and_a_file_that_may_not_be_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "c.yaml", "a: é\nb: é".encode() + b"\xff\n")
    assert mistake(path) == "c.yaml:2:5: is not UTF-8: byte 0xff at offset 11"

    # by a stand-in for the system's answer: the superuser may read everything
    path = written(tmp_path, "c.yaml", "a: 1")

    def denied(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert mistake(path) == "c.yaml: may not be read: permission denied"


def test_the_mark_of_a_path_is_the_nearest_that_is_known_and_a_byte_order_mark_moves_none() -> None:
    tree = read_text("a:\n  b: [1]\n", name="f")
    assert str(tree.mark(("a", "b", 0))) == "f:2:7"
    assert str(tree.mark(("a", "b", 7, "x"))) == "f:2:3"
    assert str(tree.mark(("a", "missing"))) == "f:1:1"
    assert tree.mark(("z",)) == tree.mark(())

    assert read_text("\ufeffa: 1").mark(("a",)) == Mark("<text>", 1, 1)

    tree = Tree({}, {(): Mark("f")})
    with pytest.raises(AttributeError):
        tree.value = {}  # type: ignore[misc]


def test_marks_and_problems_are_one_printable_line_and_a_path_is_shown_as_it_may_be_written() -> None:
    assert str(Mark("f", 3, 4)) == "f:3:4"
    assert str(Mark("f", 3)) == "f:3"
    assert str(Mark("environment X")) == "environment X"
    assert str(Problem(Mark("f", 1, 2), "a.b", "is wrong")) == "f:1:2: a.b: is wrong"
    assert str(Problem(Mark("f"), "", "is wrong")) == "f: is wrong"
    assert str(Problem(Mark("f\n\x1b[2J", 1, 2), "a\r", "b\u2028c")) == "f\\n\\x1b[2J:1:2: a\\r: b\\u2028c"

    assert dotted(()) == ""
    assert dotted(("worker", "retries", "v2")) == "worker.retries.v2"
    assert dotted(("sources", 0, "name")) == "sources[0].name"
    assert dotted(("operations", "nats.publish", "timeout")) == 'operations."nats.publish".timeout'
    assert dotted(("a b", "\n")) == '"a b"."\\n"'
    assert len(dotted(("x" * 10_000,))) == 60


def test_a_near_miss_is_suggested_and_a_far_one_is_not() -> None:
    accepted = ["max_attempts", "base_delay_ms", "jitter_type"]
    assert suggest("max_attemps", accepted) == "; did you mean 'max_attempts'?"
    assert suggest("MAX-ATTEMPTS", accepted) == "; did you mean 'max_attempts'?"
    assert suggest("colour", accepted) == ""
    assert suggest("", accepted) == ""
    assert suggest("max_attempts" * 1000, accepted) == ""


def test_the_error_lists_problems_up_to_fifty_counts_the_rest_and_survives_a_journey() -> None:
    problems = [Problem(Mark("f", line, 1), "a", "is wrong") for line in range(1, 53)]
    error = ConfigurationError(problems)
    assert isinstance(error, ReefknotError)
    assert error.problems == tuple(problems)
    assert str(error).splitlines() == [str(problem) for problem in problems[:50]] + ["… and 2 more"]
    assert str(ConfigurationError(problems[:50])).count("\n") == 49
    assert str(ConfigurationError(["two\nlines"])) == "two lines"
    assert str(ConfigurationError([])) != ""

    import copy
    import pickle

    error = ConfigurationError([Problem(Mark("f", 1, 2), "a", "is wrong")])
    for travelled in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(travelled), str(travelled), travelled.problems) == (type(error), str(error), error.problems)


def test_reading_loads_no_parser_before_there_is_text_for_it() -> None:
    import subprocess
    import sys

    parsers = ("yaml", "tomllib", "json", "pydantic")
    code = f"import sys, reefknot.policy.layers; print([name for name in {parsers} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
