"""The glossary names code that exists, and the source uses no word that was given up for one of the glossary."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "reefknot"
PAGE = ROOT / "docs" / "glossary.md"

RETIRED = {
    "asking": "request",
    "attend": "wake, nudge",
    "chapter": "history entry",
    "crew": "bounded tasks",
    "deed": "action",
    "desk": "submissions",
    "door": "admission, intake",
    "doomed": "rejected",
    "ear": "a task is named after what it receives",
    "endings": "closing, completion",
    "evidence": "audit source",
    "faces": "embedded addresses",
    "fate": "outcome",
    "gather": "batch",
    "govern": "configure",
    "grouped": "bulk, by kind",
    "hand": "submit, prefetched, interrupted",
    "handed": "submitted, returned",
    "handover": "drain",
    "hope": "rank",
    "judge": "rule",
    "lay": "overlay",
    "lineup": "ranking",
    "nature": "transient, retryable by default",
    "newcomer": "arrival",
    "newcomers": "arrivals",
    "outstanding": "unrecorded",
    "rouse": "wake",
    "said": "value, given, status",
    "shelf": "recorder",
    "tell": "report, announce",
    "telling": "events, secret",
    "tidied": "removed",
    "tidier": "retention job",
    "told": "recorded, reported",
    "undisturbed": "delay without jitter",
    "unwrapped": "IPv4 of",
    "vouched": "confirmed",
}
"""Words that no identifier may contain, and what to say instead."""

PUBLIC = {
    "hand_in": "the method of `Client`",
    "gather": "the function `rk.gather`, and the method of a step's context",
    "Gather": "its value",
}
"""Names with a retired word that users call, and so stay."""

RETIRED_NAMES = {
    "Said": "FieldValue",
    "Asking": "ClaimRequest",
    "Newcomer": "Arrival",
    "HandBack": "Interrupted",
    "Walk": "ChainVerifier",
    "Filed": "EventIndex",
    "Opening": "LogHeader",
    "NOTHING_SAID": "EMPTY_PATCH",
    "OWN_STRATEGIES": "CUSTOM_STRATEGIES",
    "passing_by_nature": "is_transient",
    "telling_name": "is_secret_name",
    "as_the_baseline_sees": "without_retry_after",
    "misfiled": "wrong_index_field",
    "checked_type": "checked_result_type",
    "text_of": "result_to_json",
    "read_as": "result_from_json",
    "go_on_from": "resume_from",
    "now_text": "envelope",
}
"""Names that were replaced, and by what."""


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every word of the page with the names in its second column."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
        if len(cells) == 3 and cells[1] != "in code" and not set(cells[1]) <= set("- "):
            yield cells[0], re.findall(r"`([^`]+)`", cells[1])


def names_in(tree: ast.AST) -> Iterator[str]:
    """Everything that is defined, assigned or passed by name."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case _:
                continue


def words_in(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@cache
def names_of_source() -> dict[str, str]:
    """Every name of the source, with a module that has it; modules and packages by their paths too."""
    found: dict[str, str] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        path = file.relative_to(SOURCE).as_posix()
        found.setdefault(path, path)
        found.setdefault(file.parent.relative_to(SOURCE).as_posix(), path)
        for name in (file.stem, *names_in(ast.parse(file.read_text(encoding="utf-8")))):
            found.setdefault(name, path)
    return found


def retired(source: str, path: str) -> list[str]:
    """The retired words and names among the identifiers of one module."""
    names = {name for name in (Path(path).stem, *names_in(ast.parse(source))) if not name.startswith("test_")}
    found = [f"{path}: {name}: say {RETIRED_NAMES[name]}" for name in names & set(RETIRED_NAMES)]
    for name in names - set(PUBLIC):
        found += [f"{path}: {name}: say {RETIRED[word]}" for word in words_in(name) & set(RETIRED)]
    return sorted(found)


def test_every_word_stands_there_once_with_names_that_exist_and_none_that_was_retired() -> None:
    table = list(rows(PAGE.read_text(encoding="utf-8")))
    words = [word for word, _ in table]
    assert len(words) > 80
    assert len(words) == len(set(words))
    assert all(names for _, names in table)
    on_page = {name for _, names in table for name in names}
    assert on_page - set(names_of_source()) == set()
    assert on_page & set(RETIRED_NAMES) == set()


def test_no_identifier_of_the_source_is_a_retired_word() -> None:
    found = [
        finding
        for file in sorted(SOURCE.rglob("*.py"))
        for finding in retired(file.read_text(encoding="utf-8"), file.relative_to(SOURCE).as_posix())
    ]

    assert not found
    assert set(PUBLIC) <= set(names_of_source())


def test_control_a_name_that_does_not_exist_and_a_retired_word_are_found() -> None:
    page = "| word | in code | meaning |\n| --- | --- | --- |\n| fence | `fence`, `Fense` | a number |\n"

    assert list(rows(page)) == [("fence", ["fence", "Fense"])]
    assert "Fense" not in names_of_source()
    source = "class EarDrum:\n    def take(self, undisturbed_delay): self.fate_of = telling_name = 1"
    assert retired(source, "core/x.py") == [
        "core/x.py: EarDrum: say a task is named after what it receives",
        "core/x.py: fate_of: say outcome",
        "core/x.py: telling_name: say events, secret",
        "core/x.py: telling_name: say is_secret_name",
        "core/x.py: undisturbed_delay: say delay without jitter",
    ]
    assert retired("", "ports/door.py") == ["ports/door.py: door: say admission, intake"]
    assert words_in("HTTPServerName_of") == {"http", "server", "name", "of"}
