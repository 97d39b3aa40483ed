"""The tables of the architecture name files that exist, and as many of them as they say."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.check_house import RULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
_PATH = re.compile(r"`([\w./-]+(?:/|\.(?:py|html|json|toml)))`")


class Row(NamedTuple):
    """A row of a table: its first column, and the paths that the last one names."""

    task: str
    files: str
    """The column between the two, where there is one."""
    paths: list[str]


def rows(text: str, heading: str) -> Iterator[Row]:
    """The rows of the table below a heading."""
    _, _, below = text.partition(f"\n{heading}\n")
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert table is not None, heading
    for line in table[0].splitlines()[2:]:
        task, *between, where = (one.strip() for one in line.strip("|").split(" | "))
        yield Row(task, " ".join(between), _PATH.findall(where))


def absent(found: list[Row]) -> list[str]:
    """The paths that are neither beneath the package nor beneath the checkout."""
    return [
        path
        for row in found
        for path in row.paths
        if not any((folder / path).exists() for folder in (ROOT / "src" / "reefknot", ROOT))
    ]


def test_every_file_that_the_tables_name_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    tasks, changes = list(rows(text, "## Where do I change …?")), list(rows(text, "### Small changes"))
    assert (len(tasks) > 20, len(changes)) == (True, 10)
    assert absent(tasks + changes) == []


def test_a_small_change_names_as_many_files_as_it_says_and_at_most_four() -> None:
    changes = list(rows(PAGE.read_text(encoding="utf-8"), "### Small changes"))
    assert [row.task for row in changes if row.files != str(len(set(row.paths)))] == []
    assert max(int(row.files) for row in changes) <= 4


def test_a_file_that_is_gone_is_found() -> None:
    """The control."""
    head = "\n### T\n\n| change | files | where |\n| --- | --- | --- |\n"
    text = f"{head}| a | 2 | `core/gone.py` and `stores/`, in `retry` |\n"
    (row,) = rows(text, "### T")
    assert row == Row("a", "2", ["core/gone.py", "stores/"])
    assert absent([row]) == ["core/gone.py"]


def test_the_page_about_tests_explains_each_house_rule_and_no_other() -> None:
    table = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8").partition("| `module-ceiling`")
    listed = "".join(table[1:]).partition("\n\n")[0]
    first = [line.split(" | ")[0] for line in listed.splitlines()]
    assert sorted(re.findall(r"`([a-z-]+)`", "".join(first))) == sorted(RULES)
