"""The house rules find each thing they are there for, at its limit and not before, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

import pytest

from reefknot.stores.port.engines import ENGINES
from tools import check_house
from tools.check_house import RULES, findings, main, summary
from tools.source_tree import ROOT, read_modules


class Write(Protocol):
    """Write modules of a package `pkg`, by their path beneath it, and return the report of the rules as texts."""

    def __call__(self, files: Mapping[str, str], *rules: str, exempt: Mapping[str, str] | None = None) -> list[str]: ...


@pytest.fixture
def check(tmp_path: Path) -> Write:
    def check(files: Mapping[str, str], *rules: str, exempt: Mapping[str, str] | None = None) -> list[str]:
        for name, source in {"__init__.py": "", **files}.items():
            path = tmp_path / "src" / "pkg" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(source)
        return [str(finding) for finding in findings(tmp_path, exempt or {}, rules)]

    return check


def function_of(lines: int, name: str = "f", indent: str = "") -> str:
    """A function of so many lines, its `def` among them."""
    return f"{indent}def {name}():\n" + f"{indent}    x = 1\n" * (lines - 1)


# Sizes


def test_a_private_name_of_the_nats_client_is_found(check: Write) -> None:
    found = "src/pkg/m.py:1: private-client: client._subs is a private name of nats-py: use it in " + check_house.WIRE
    for use in ("client._subs", "self.client._subs", "connection.client._subs"):
        assert check({"m.py": f"x = {use}\n"}, "private-client") == [found]
    assert check({"m.py": "x = client.subs\ny = self._client._handle\nz = client.__class__\n"}, "private-client") == []


@pytest.mark.parametrize(
    "test",
    [
        *("url.startswith('sqlite:')", "url.startswith(('nats:', 'tls:'))", "store.identity.startswith('memory')"),
        *("shown.removeprefix('sqlite:')", "url in ('memory', 'memory:')", "url.rstrip(':') == 'memory'"),
        *("isinstance(store, SqliteStore)", "isinstance(log, (MemoryAuditLog, JetStreamAuditLog))"),
    ],
)
def test_a_test_of_the_engine_is_found_outside_of_the_stores(check: Write, test: str) -> None:
    (found,) = check({"m.py": f"x = {test}\n", "stores/m.py": f"x = {test}\n"}, "engine-tests")

    assert found.startswith("src/pkg/m.py:1: engine-tests: ")
    assert found.endswith(" asks which engine a store has: ask `stores.port.engine`, or the open store")


def test_the_rule_knows_the_schemes_and_the_classes_of_every_engine_in_the_table(check: Write) -> None:
    for scheme, one in ENGINES.items():
        engine = type(import_module(one.package).ENGINE).__name__
        asked = f"x = url.startswith('{scheme}:')\ny = isinstance(engine, {engine})\n"
        assert len(check({"m.py": asked}, "engine-tests")) == 2, scheme


def test_addresses_that_are_only_written_and_databases_of_users_are_no_engine_tests(check: Write) -> None:
    asked = "x = url.startswith('postgresql://') or kind == 'memory' or isinstance(url, str)\n"
    assert check({"m.py": f"url = 'sqlite:state.db'\n{asked}"}, "engine-tests") == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1\n" * 450, None),
        ("x = 1\n" * 451, 451),
        ("x = 1\n" * 450 + "\n# why\n" * 40, None),
        ("x = 1\n" * 451 + "\n# why\n" * 40, 451),
        ('x = """\n' + "# inside a text, and no comment\n" * 449 + '"""\n', 451),
        ('x = f"""\n' + "# inside a text, and no comment {x}\n" * 449 + '"""\n', 451),
    ],
    ids=["at the limit", "beyond", "comments at the limit", "comments beyond", "text", "formatted text"],
)
def test_a_module_has_at_most_450_lines_that_are_neither_blank_nor_comment_and_a_bound_for_all(
    check: Write, source: str, found: int | None
) -> None:
    report = [f"src/pkg/m.py:1: module-ceiling: module has {found} lines of code, 450 are allowed"] if found else []
    assert check({"m.py": source}, "module-ceiling") == report
    most = check_house.MODULE_LENGTH
    too_long = f"src/pkg/m.py:1: module-ceiling: module has {most + 1} lines in all, {most} are allowed"
    assert check({"m.py": "# why\n" * most}, "module-ceiling") == []
    assert check({"m.py": "# why\n" * (most + 1)}, "module-ceiling") == [too_long]


def test_a_module_of_60_lines_is_large_enough_and_blank_lines_and_comments_count(check: Write) -> None:
    (found,) = check({"m.py": "# why\n\n" * 30, "n.py": "x = 1\n" * 59}, "module-floor")

    assert found.startswith("src/pkg/n.py:1: module-floor: module has 59 lines and 0 importers")


@pytest.mark.parametrize(
    "importing",
    [
        *("from pkg.small import x\n", "from pkg import small\n", "import pkg.small\n", "from .small import x\n"),
        "from . import small\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.small import x\n",
        "def f():\n    try:\n        pass\n    except OSError:\n        with x():\n            import pkg.small\n",
        "match 1:\n    case 1:\n        from pkg import small\n",
    ],
)
def test_a_small_module_needs_four_importers_however_they_import_it(check: Write, importing: str) -> None:
    large = "x = 1\n" * 60
    users = {f"user{number}.py": importing + large for number in range(3)}
    assert len(check({"small.py": "x = 1\n", **users}, "module-floor")) == 1

    assert check({"fourth.py": importing + large}, "module-floor") == []


def test_an_entry_point_may_be_small_and_so_may_a_package_docstring(check: Write, tmp_path: Path) -> None:
    small = {"__main__.py": "x = 1\n", "plugin.py": "x = 1\n", "sub/__init__.py": ""}
    assert len(check(small, "module-floor")) == 1

    (tmp_path / "pyproject.toml").write_text('[project.entry-points.pytest11]\npkg = "pkg.plugin"\n')
    assert check({}, "module-floor") == []


def test_a_product_keeps_to_its_lines_and_modules(check: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_house, "BUDGETS", {"sub": (3, 2)})
    files = {"sub/a.py": "x = 1\n", "sub/deeper/b.py": "x = 1\nx = 2\n", "other.py": "x = 1\n" * 9}
    assert check(files, "product-budget") == []

    (lines,) = check({"sub/a.py": "x = 1\n" * 2}, "product-budget")
    assert "product has 4 lines, 3 are allowed" in lines

    assert ["modules" in text for text in check({"sub/c.py": ""}, "product-budget")] == [False, True]


def test_every_product_has_a_budget() -> None:
    parts = {module.part for module in read_modules(ROOT)} - {"reefknot", "__main__", "clock", "errors"}
    assert parts == set(check_house.BUDGETS)


@pytest.mark.parametrize("importer", ["core/a.py", "sub/model.py", "sub/model/a.py", "sub/port.py"])
def test_models_ports_and_the_core_import_no_flow(check: Write, importer: str) -> None:
    others = {"sub/flow.py": "", "other/model/b.py": "", "core/b.py": ""}
    fine = "from pkg.other.model import b\nfrom pkg.core import b as c\n"
    assert check({importer: fine, **others}, "open-modules") == []

    (found,) = check({importer: "from pkg.sub import flow\n"}, "open-modules")
    assert "imports pkg.sub.flow: models and ports import core, models and ports only" in found


@pytest.mark.parametrize(
    ("source", "line", "name"),
    [
        ("\n\n" + function_of(61), 3, "f"),
        ("class C:\n" + function_of(61, indent="    "), 2, "C.f"),
        ("async " + function_of(61), 1, "f"),
        ("if True:\n" + function_of(61, indent="    "), 2, "f"),
        ("def g():\n" + function_of(58, indent="    ") + "    y = 1\n    return 1\n", 1, "g"),
        (function_of(60) + "    # why\n\n" * 20 + "\n", 0, ""),
        ("def f():\n" + "    x = 1\n    # why\n" * 59, 0, ""),
    ],
    ids=["function", "method", "async", "behind a condition", "around another", "60 lines", "comments are free"],
)
def test_a_function_beyond_60_lines_is_found_where_it_starts(check: Write, source: str, line: int, name: str) -> None:
    found = f"src/pkg/m.py:{line}: function-ceiling: function {name} has 61 lines of code, 60 are allowed"
    assert check({"m.py": source}, "function-ceiling") == [found][: len(name)]


# Names and words


def test_a_class_name_in_two_modules_is_found_in_both_and_two_variants_in_one_are_one_class(check: Write) -> None:
    assert check({"a.py": "class Door: ...", "b.py": "\nclass Outer:\n    class Door: ..."}, "class-names") == [
        "src/pkg/a.py:1: class-names: class Door is also in src/pkg/b.py",
        "src/pkg/b.py:3: class-names: class Door is also in src/pkg/a.py",
    ]
    variants = "try:\n    class A: ...\nexcept OSError:\n    class A: ..."
    assert check({"a.py": variants, "b.py": "A = 1"}, "class-names") == []


@pytest.mark.parametrize(
    "docstring",
    [
        *(
            "It waits.",
            "Its name.",
            "it's over",
            "They wait.",
            "Those of one class.",
            "These wait.",
            "What went wrong.",
        ),
        *("What's left.", "Who gets it?", "Whoever asks.", "Whose lease it is.", "Nobody is asked.", "As kill -9."),
        *("Somebody else has it.", "The same, without waiting.", "the  same again", "How full is full?"),
        *("Where events are kept.", "WHEN it is due.", "One text for one value.", " \t It begins after a space."),
    ],
)
def test_a_docstring_that_begins_with_a_pronoun_or_a_question_word_is_found(check: Write, docstring: str) -> None:
    source = f'"""{docstring}"""\nclass C:\n    """{docstring}"""\n    async def f(self):\n        """{docstring}"""\n'

    found = check({"m.py": source}, "first-words")
    places = ((1, "the module"), (3, "C"), (5, "C.f"))
    expected = [f"src/pkg/m.py:{line}: first-words: docstring of {name}" for line, name in places]
    assert [text.split(" begins")[0] for text in found] == expected


@pytest.mark.parametrize(
    "docstring",
    [
        *("", "Items that wait.", "The sameness of two values.", "The lease of a key.", "One-way latch.", "Oneself."),
        *("`it`, quoted.", "42 is the answer.", "Assignments, as they come.", "However long the wait."),
    ],
)
def test_a_docstring_that_names_a_thing_is_fine(check: Write, docstring: str) -> None:
    assert check({"m.py": f'"""{docstring}"""\n'}, "first-words") == []


# Cycles


def test_a_cycle_is_found_through_imports_in_functions_for_types_only_and_from_a_subpackage(check: Write) -> None:
    files = {
        "a.py": "from pkg.b import x\n",
        "b.py": "def f():\n    from pkg import c\n",
        "c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.a import y\n",
        "d.py": "from pkg.a import y\n",
    }
    found = "src/pkg/a.py:1: import-cycles: modules import each other: a →"
    assert check(files, "import-cycles") == [f"{found} b → c → a"]
    knot = {"a.py": "from pkg import b, c\n", "b.py": "from pkg import c\n", "c.py": "from pkg import a\n"}
    assert check(files | knot, "import-cycles") == [f"{found} c → a"], "the shortest is shown"
    inner = {"a.py": "from pkg.sub import thing\n", "sub/__init__.py": "from pkg.a import x\nthing = 1\n"}
    assert len(check({"b.py": "", "c.py": "", **inner}, "import-cycles")) == 1


def test_imports_that_go_one_way_and_those_of_the_root_package_are_no_cycle_nor_is_one_that_is_exempt(
    check: Write,
) -> None:
    files = {"__init__.py": "from pkg.a import x\n", "a.py": "import pkg\nfrom pkg import b\n", "b.py": ""}
    assert check(files, "import-cycles") == []
    files = {"a.py": "from pkg import b, c\n", "b.py": "from pkg import a\n", "c.py": "from pkg import a\n"}
    found = check(files, "import-cycles", exempt={"import-cycles pkg.b -> pkg.a": "a type"})
    assert found == ["src/pkg/a.py:1: import-cycles: modules import each other: a → c → a"]


# Exemptions and the report


@pytest.mark.parametrize(
    ("key", "source"),
    [
        ("function-ceiling src/pkg/m.py:f", function_of(61)),
        ("module-ceiling src/pkg/m.py", "x = 1\n" * 451),
        ("module-floor src/pkg/m.py", "x = 1\n"),
        ("first-words src/pkg/m.py", '"""It."""\n'),
        ("first-words src/pkg/m.py:f", 'def f():\n    """It."""\n'),
        ("import-cycles pkg.m -> pkg.n", "from pkg import n\n"),
    ],
    ids=["function", "ceiling", "floor", "module's word", "function's word", "cycle"],
)
def test_an_exemption_holds_while_it_has_a_reason_and_is_needed(check: Write, key: str, source: str) -> None:
    rule, _, place = key.partition(" ")
    files = {"m.py": source, "n.py": "from pkg import m\n" + "x = 1\n" * 60}

    assert len(check(files, rule)) == 1
    assert check(files, rule, exempt={key: "a table"}) == []
    assert check(files, rule, exempt={key: " "}) == [f"{place}:1: {rule}: exempt without a reason"]
    unneeded = f"{place}:1: {rule}: exempt, yet nothing is found there"
    assert check({"m.py": "x = 1\n" * 60}, rule, exempt={key: "once"}) == [unneeded]


def test_every_rule_is_checked_unless_some_are_named(check: Write) -> None:
    files = {"m.py": '"""It."""\n' + function_of(61), "n.py": "x = 1\n"}

    assert {text.split(": ")[1] for text in check(files)} == {"module-floor", "function-ceiling", "first-words"}
    assert {text.split(": ")[1] for text in check(files, "first-words")} == {"first-words"}


def test_the_summary_counts_by_rule_and_package(check: Write, tmp_path: Path) -> None:
    check({"sub/m.py": '"""It."""\n' + function_of(61), "other/n.py": '"""Who?"""\n'})
    table = {row.split()[0]: row.split()[1:] for row in summary(findings(tmp_path, {})).splitlines()}
    columns = table.pop("package")
    assert columns == [*RULES, "all"]
    words = columns.index("first-words")
    assert {name: row[words] for name, row in table.items()} == {"sub": "1", "other": "1", "all": "2"}
    assert table["all"][-1] == "4"


def test_the_exit_code_says_whether_anything_was_found(
    check: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_house, "ROOT", tmp_path)
    monkeypatch.setattr(check_house, "EXEMPT", {})
    check({"m.py": function_of(61)})
    assert main([]) == 1
    assert "src/pkg/m.py:1: function-ceiling: function f" in capsys.readouterr().out
    assert (main(["--summary"]), main(["import-cycles"])) == (1, 0)
    check({"m.py": function_of(60)})
    assert (main([]), main(["--summary"])) == (0, 0)
    assert main(["sizes"]) == 2
    assert "no such rule: sizes; there are module-ceiling, " in capsys.readouterr().err
