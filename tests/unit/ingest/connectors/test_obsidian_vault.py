"""`obsidian_vault`: what a note says about itself, and notes that are broken or hostile."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import ParameterError, SourceError
from reefknot.ingest.connectors import folders, obsidian_vault
from reefknot.ingest.connectors.obsidian_vault import (
    FrontMatterError,
    ObsidianVault,
    names_in,
    read_front_matter,
    split,
    without_code,
)
from reefknot.ingest.port import ConnectorFactory, Document
from tests.unit.ingest.connectors.memory_sink import Folder, context, peak_of, put

NOTE = """\
---
title: The real title
tags: [project/alpha, "#Idea"]
aliases: [First, Second]
due: 2026-03-01
at: 12:30
done: no
rating: 4.5
nested: {a: [1, null, true]}
---
# Heading #inline

See [[Other Note#Part|the other]], [[Third]] and [a text](folder/My%20Note.md#Sub).
![[image.png|200]] ![alt](pictures/b.jpg)
[web](https://example.org/#nofragment) https://example.org/x#alsonot foo#no

`[[not a link]] #nottag`

```python
# comment
x = "[[nor this]]" #nor
```
"""


@pytest.fixture
def vault(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "vault", ObsidianVault)
    made.put(".obsidian/workspace.json", "{}")
    made.put(".trash/old.md")
    return made


def note(vault: Folder, text: str | bytes) -> Document:
    vault.put("Note.md", text)
    assert vault.sync().failures == {}
    return vault.document("Note.md")


def test_a_note_has_its_properties_tags_aliases_links_and_embeds(vault: Folder) -> None:
    found = note(vault, NOTE)

    assert (found.title, found.media_type, found.problem) == ("The real title", "text/markdown", "")
    assert found.text.startswith("# Heading #inline")
    metadata = dict(found.metadata)
    assert metadata["kind"] == "note"
    own = {name: metadata["properties"][name] for name in ("due", "at", "done", "rating", "nested")}
    assert own == {"due": "2026-03-01", "at": "12:30", "done": "no", "rating": 4.5, "nested": {"a": [1, None, True]}}
    assert metadata["tags"] == ["project/alpha", "Idea", "inline"]
    assert metadata["aliases"] == ["First", "Second"]
    assert metadata["links"] == [
        {"target": "Other Note", "heading": "Part", "alias": "the other"},
        {"target": "Third"},
        {"target": "folder/My Note.md", "heading": "Sub", "alias": "a text"},
        {"target": "https://example.org/#nofragment", "alias": "web"},
    ]
    assert metadata["embeds"] == [{"target": "image.png", "alias": "200"}, {"target": "pictures/b.jpg", "alias": "alt"}]
    json.dumps(metadata)


@pytest.mark.parametrize(
    ("written", "title"),
    [
        *((written, written) for written in ("2026", "2026.10", "true")),
        ("1e3 # a number", "1e3"),
        *((written, "Note") for written in ("null", "[a]", "' '")),
    ],
)
def test_a_title_that_is_a_number_is_a_title_as_it_is_written(vault: Folder, written: str, title: str) -> None:
    assert note(vault, f"---\ntitle: {written}\n---\ntext").title == title


def test_names_of_properties_are_kept_as_they_are_written(vault: Folder) -> None:
    found = note(vault, "---\nnull: 1\n~: 2\n1.50: 3\ntrue: {no: 4, Null: 5}\n---\ntext")
    assert found.metadata["properties"] == {"null": 1, "~": 2, "1.50": 3, "true": {"no": 4, "Null": 5}}


def test_a_note_without_a_title_is_called_by_its_file(vault: Folder) -> None:
    vault.synced("folder/My Note.MD")

    assert vault.document("folder/My Note.MD").title == "My Note"


def test_attachments_are_documents_and_the_folders_of_obsidian_are_not(vault: Folder) -> None:
    vault.put("image.png", b"\x89PNG\0")

    assert set(vault.synced("Note.md", "data.csv")) == {"Note.md", "image.png", "data.csv"}
    image = vault.document("image.png")
    assert (image.title, image.metadata["kind"], image.media_type) == ("image.png", "attachment", "image/png")
    assert vault.texts()["data.csv"] == "data.csv"
    vault.sync(attachments=False)
    assert set(vault.ids()) == {"Note.md"}
    vault.sync(include=["**", ".trash/**", ".obsidian/**"])
    assert set(vault.ids()) == {"Note.md", "image.png", "data.csv"}


def test_a_renamed_note_keeps_its_identity_even_when_it_was_edited_too(
    vault: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "generation_of", lambda descriptor: "1")
    before = vault.synced("Old.md", "Link.md")
    (vault / "Old.md").rename(vault / "New.md")
    (vault / "New.md").write_text("# New\n")
    (vault / "Link.md").write_text("[[New]]")

    assert vault.synced() == {"New.md": before["Old.md"], "Link.md": before["Link.md"]}


def test_settings_are_those_of_folders_and_attachments(vault: Folder) -> None:
    factory: ConnectorFactory = ObsidianVault
    factory(context(vault.root, attachments=True))
    with pytest.raises(ParameterError, match="True or False"):
        vault.source(attachments="no")
    with pytest.raises(ParameterError, match="did you mean 'attachments'"):
        vault.source(attachment=True)


def test_a_test_of_the_source_counts_notes_and_attachments(vault: Folder) -> None:
    vault.put("a.md")
    vault.put("b.png")

    assert vault.test() == f"{vault.root}: 1 note, 1 attachment"
    (vault / ".obsidian/workspace.json").unlink()
    (vault / ".obsidian").rmdir()
    assert vault.test().endswith("Obsidian has not opened this folder yet")


# ---- front matter ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("front_matter", "line", "problem"),
    [
        ("title: a: b", 2, "mapping values are not allowed"),
        ("a: 1\nb: [1, 2", 3, ""),
        ("a: 1\n\tb: 2", 3, ""),
        ("date: {{date}}", 2, "unhashable"),
        ("a: !!python/object:os.system x", 2, "could not determine a constructor"),
        ("just words", 2, "properties are written as `name: value`"),
        ("a: " + "[" * 100, 2, "nested more than 20 deep"),
        ("a: " + "x" * 70_000, 1, "65536 are accepted"),
        ("a: &a [*a]", 1, "more than 5000 values"),
        *((f"a: {value}", 1, "") for value in ("!!int " + "9" * 5000, "\x01")),
        ("a: !!bool maybe", 1, "a value cannot be read (KeyError"),
        ("a: !!timestamp foo", 1, "a value cannot be read"),
        ('a: !!int ""', 1, "a value cannot be read (IndexError"),
        ("a: !!int 0x" + "f" * 5000, 1, "a value cannot be read (ValueError"),
        ("? !!int 0x" + "f" * 5000 + "\n: 1", 1, "a value cannot be read (ValueError"),
    ],
    ids=range(16),
)
def test_broken_front_matter_is_a_problem_with_its_line_and_the_text_is_kept(
    vault: Folder, front_matter: str, line: int, problem: str
) -> None:
    found = note(vault, f"---\n{front_matter}\n---\nThe text #tag\n")

    assert found.problem.startswith(f"front matter, line {line}: ")
    assert problem in found.problem
    assert found.problem.endswith("correct it, and the properties are read")
    assert found.text == "The text #tag\n"
    assert found.title == "Note"
    assert (found.metadata["properties"], found.metadata["tags"]) == ({}, ["tag"])


def test_a_file_that_cannot_be_described_is_a_failure_of_its_own(
    vault: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault.put("bad.md", "bad")
    vault.put("good.md", "good")
    read = names_in

    def failing(body: str) -> object:
        if body == "bad":
            raise KeyError("unforeseen")
        return read(body)

    monkeypatch.setattr(obsidian_vault, "names_in", failing)
    failures = vault.sync().failures

    assert (list(vault.ids()), list(failures)) == (["good.md"], ["bad.md"])
    assert "bad.md cannot be read as a document (KeyError: 'unforeseen')" in str(failures["bad.md"])
    with pytest.raises(SourceError, match=r"bad\.md cannot be read as a document"):
        vault.item("bad.md")


def test_a_bomb_of_aliases_is_a_problem() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 15)]
    merges = ["m0: &m0 {k: v}", *(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}" for n in range(1, 100))]
    for text in ("\n".join(levels), "\n".join(merges)):
        begun = time.monotonic()
        with pytest.raises(FrontMatterError, match="what aliases stand for included"):
            read_front_matter(text)
        assert time.monotonic() - begun < 10


def test_aliases_that_stand_for_little_are_read() -> None:
    assert read_front_matter("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}


def test_values_that_json_does_not_have_become_text() -> None:
    found = read_front_matter("a: !!timestamp 2026-01-02\nb: !!binary aGk=\nc: !!set {y, x}\n1: 1e999\nd: !!float .nan")

    assert found == {"a": "2026-01-02", "b": "hi", "c": ["x", "y"], "1": "inf", "d": "nan"}


@pytest.mark.parametrize(
    ("text", "front_matter", "body"),
    [
        ("no front matter", None, "no front matter"),
        ("---\na: 1\n---\nbody", "a: 1\n", "body"),
        ("---\r\na: 1\r\n---\r\nbody", "a: 1\r\n", "body"),
        ("---\n---\nbody", "", "body"),
        ("---\na: 1\n...\n\nbody", "a: 1\n", "body"),
        ("text\n---\na: 1\n---\n", None, "text\n---\na: 1\n---\n"),
        ("---\nA line above a text.\n", None, "---\nA line above a text.\n"),
        ("----\na: 1\n---\n", None, "----\na: 1\n---\n"),
    ],
)
def test_front_matter_is_between_two_lines_at_the_very_beginning(
    text: str, front_matter: str | None, body: str
) -> None:
    assert split(text)[:2] == (front_matter, body)


def test_front_matter_that_is_not_closed_is_a_problem(vault: Folder) -> None:
    found = note(vault, "---\ntitle: x\n\ntext")

    assert "line 1: it is not closed; write ---" in found.problem
    assert "text" in found.text


@pytest.mark.parametrize(
    ("written", "tags"),
    [
        ("tags: a, b", ["a", "b"]),
        ("tags: a b", ["a", "b"]),
        ("tag: '#a'", ["a"]),
        ("Tags: [a, A, 2026]", ["a", "2026"]),
        ("tags:\n  - a/b\n  - null\n  - [x]", ["a/b"]),
        ("tags:", []),
        ("tags: {a: b}", []),
    ],
)
def test_tags_of_the_front_matter_are_lists_or_texts(vault: Folder, written: str, tags: list[str]) -> None:
    assert note(vault, f"---\n{written}\n---\n").metadata["tags"] == tags


# ---- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        *((f"{text} #yes", ["yes"]) for text in ("`#no` ``a ` #no``", "``` `x`", "https://x.y/a#b and http://x.y")),
        *((f"{text}\n#yes", ["yes"]) for text in ("```\n#no\n```", "~~~~\n#no\n~~~\n#no\n~~~~", "> ```\n> #no\n> ```")),
        *((text, ["yes"]) for text in ("Text\n\n    #no\n\n#yes", "- item\n\n    #yes", "a `b\n\n#yes` c")),
        *(("#tag", ["tag"]), ("#y2026", ["y2026"])),
        ("a #tag/sub, #other.", ["tag/sub", "other"]),
        ("(#a) - #b\n#c", ["a", "b", "c"]),
        ("#Tag #tag", ["Tag"]),
        ("#Übung #日本 #a-b_c", ["Übung", "日本", "a-b_c"]),
        *(
            (text, [])
            for text in ("# Heading", "## Heading\n##x", "#2026 #12/3", "foo#bar \\#no &#39;", "Text\n\n\t#no")
        ),
        *((text, []) for text in ("[[Note#Heading]] [x](#heading) <https://x.y/#z>", "```\n#no, never closed")),
    ],
)
def test_tags_are_words_with_a_hash_outside_of_code_and_links(text: str, tags: list[str]) -> None:
    assert names_in(text).tags == tags


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[[A]] [[A]] [[B|b]]", [{"target": "A"}, {"target": "B", "alias": "b"}]),
        ("| [[A\\|b]] |", [{"target": "A", "alias": "b"}]),
        ("[[#Heading]]", [{"heading": "Heading"}]),
        ("[[A#^block]]", [{"target": "A", "heading": "^block"}]),
        ("[[]] [[ ]] [[a\nb]] \\[[no]]", []),
        ("[x](<a b.md>)", [{"target": "a b.md", "alias": "x"}]),
        ('[x](a_(b).md "title")', [{"target": "a_(b).md", "alias": "x"}]),
        ("[x](mailto:a@b.c)", [{"target": "mailto:a@b.c", "alias": "x"}]),
        ("[ ] task [x] done", []),
        ("![[e.png]] ![x](y.png)", []),
    ],
)
def test_links_are_read_by_their_parts(text: str, links: list[dict[str, str]]) -> None:
    assert names_in(text).links == links


def test_code_is_replaced_by_as_many_spaces() -> None:
    text = "a `b` c\n```\nd\n```\ne"

    assert without_code(text) == "a     c\n         \ne"


@given(st.text(alphabet="[]()#!`~<>|\\-: \n\tab:/.", max_size=80))
def test_any_text_is_read(text: str) -> None:
    names = names_in(text)

    assert len(without_code(text)) == len(text)
    assert all(tag and not tag.isspace() for tag in names.tags)
    split(text)


HOSTILE = (
    *("[[", "#", " #a", "[[a]]", "`", "`a` ", "```\n", "\n", "\n\n    x", "[a](", "[a](b)", "a.", "http://", "---\n"),
)


@pytest.mark.parametrize("piece", HOSTILE, ids=repr)
def test_a_hostile_note_takes_no_more_than_a_moment(piece: str) -> None:
    text = piece * (1_200_000 // len(piece))
    begun = time.process_time()

    parts = split(text)
    names = names_in(parts.body)

    assert max(len(names.tags), len(names.links), len(names.embeds)) <= 500
    assert time.process_time() - begun < 5  # about 0.2 s; a limit for a machine under load


def filled(root: Path, notes: int) -> ObsidianVault:
    for number in range(notes):
        body = f"---\ntags: [t{number % 7}]\naliases: n{number}\n---\n# {number}\n[[{number + 1}]] #x{number % 5}\n"
        put(root, f"{number % 20}/{number}.md", body + "Some words of the note. " * 10)
    return ObsidianVault(context(root))


def test_two_thousand_notes_are_synced(vault: Folder) -> None:
    filled(vault.root, 2000)
    vault.sync()

    assert len(vault.ids()) == 2000
    metadata = vault.document("5/25.md").metadata
    assert (metadata["tags"], metadata["links"]) == (["t4", "x0"], [{"target": "26"}])


def test_two_thousand_notes_take_no_more_memory_than_two_hundred(tmp_path: Path) -> None:
    few, many = (peak_of(filled(tmp_path / str(notes), notes), notes) for notes in (200, 2000))

    assert many < few * 1.5 + 500_000
    assert many < 8_000_000
