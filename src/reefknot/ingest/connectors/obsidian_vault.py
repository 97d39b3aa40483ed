"""
`obsidian_vault`: the notes of an Obsidian vault with their properties, tags, aliases, links and embeds.

A vault is a folder, and is synced as `local_files` does. A note is a Markdown file: its front matter becomes metadata,
what is behind it the text. Every other file is an attachment, a document of its own. `.obsidian` and `.trash` are never
read.

Notes are read by a small scanner, not by a Markdown parser: its steps are searches over the whole text, so their time
is proportional to the length of a note, whatever is in it.
"""

import math
import re
from collections.abc import Iterable, Iterator
from datetime import date
from functools import cache
from itertools import islice
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote

import yaml
from msgspec.structs import replace

from reefknot.core.checks import flag
from reefknot.ingest.connectors.folders import FileOnDisk
from reefknot.ingest.connectors.local_files import LocalFiles, counted
from reefknot.ingest.port import Document, SourceContext

LARGEST_FRONT_MATTER = 65_536
MOST_VALUES = 5000
"""Values of the front matter, aliases expanded."""
MOST_CHARACTERS = 131_072
"""Characters of all values of the front matter, aliases expanded."""
DEEPEST_VALUE = 20
MOST_NAMES = 500
"""Tags, aliases, links and embeds of a note that are kept: this number of each."""
LONGEST_NAME = 300
SCANNED = 1 << 20
"""Characters of a note in which names are looked for. The text is kept as a whole."""
MOST_FOUND = 10_000
"""Links or tags that are looked at, repeated ones included."""

# ---- front matter ----------------------------------------------------------------------------------------------------


class FrontMatterError(Exception):
    """Front matter that cannot be used; `line` is that of the note."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"front matter, line {line}: {problem}; correct it, and the properties are read")
        self.line = line


class SplitNote(NamedTuple):
    """A note's front matter, None when it has none, and the text behind it."""

    front_matter: str | None
    body: str
    is_unclosed: bool = False


_OPENING = re.compile(r"---[ \t]*\r?\n")
_CLOSING = re.compile(r"^(?:---|\.\.\.)[ \t]*\r?$", re.MULTILINE)
_PROPERTY = re.compile(r"[^\s:#-][^:\n]{0,200}:(?:\s|$)")


def split(note: str) -> SplitNote:
    """The parts of a note. Front matter begins in the first line with `---` and ends with the next such line."""
    opening = _OPENING.match(note)
    if opening is None:
        return SplitNote(None, note)
    closing = _CLOSING.search(note, opening.end())
    if closing is None:  # a line above a text, unless something like a property follows it
        return SplitNote(None, note, is_unclosed=_PROPERTY.match(note, opening.end()) is not None)
    return SplitNote(note[opening.end() : closing.start()], note[closing.end() :].lstrip("\r\n"))


@cache
def _loader() -> type[Any]:
    """The safe loader with the words of YAML 1.2, as Obsidian has it: `12:30`, `no` and dates are text."""
    parent: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class NoteLoader(parent):  # type: ignore[misc]
        """Merges nothing: `<<` repeats values without a bound. Names are text as written: `null`, `1.50`, `yes`."""

        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Leave the mapping as it is written."""
            for name, _ in node.value:
                is_plain = isinstance(name, yaml.ScalarNode)
                if is_plain and name.tag == self.resolve(yaml.ScalarNode, name.value, (True, False)):
                    name.tag = "tag:yaml.org,2002:str"

    words: Any = NoteLoader.add_implicit_resolver
    words("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
    words("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    words("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})$"), list("-+0123456789"))
    number = r"[-+]?(?:[0-9]{1,40}\.[0-9]{0,40}|\.[0-9]{1,40}|[0-9]{1,40}(?=[eE]))(?:[eE][-+]?[0-9]{1,4})?$"
    words("tag:yaml.org,2002:float", re.compile(number), list("-+.0123456789"))
    return NoteLoader


def read_front_matter(text: str) -> dict[str, Any]:
    """The properties, as values that JSON can carry. Raises `FrontMatterError`."""
    if len(text) > LARGEST_FRONT_MATTER:
        raise FrontMatterError(1, f"it has {len(text)} characters, and {LARGEST_FRONT_MATTER} are accepted")
    try:
        _check_depth(text)
        loader = _loader()(text)
        try:
            return _properties(loader.get_single_data())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        if mark is None or mark.line >= len(text.splitlines()):  # at the end: where it began is of more help
            mark = error.context_mark or mark
        problem = " ".join(str(error.problem or error.context or "this is no YAML").split())[:LONGEST_NAME]
        raise FrontMatterError(mark.line + 2 if mark else 1, problem) from None
    except FrontMatterError:
        raise
    except Exception as error:
        problem = " ".join(f"a value cannot be read ({type(error).__name__}: {error})".split())[:LONGEST_NAME]
        raise FrontMatterError(1, problem) from None


def _properties(found: object) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise FrontMatterError(2, "properties are written as `name: value`, one in a line")
    properties: dict[str, Any] = _JsonValues().of(found)
    return properties


def _check_depth(text: str) -> None:
    """Refuse deep nesting before anything recurses into it."""
    depth = 0
    for event in yaml.parse(text, Loader=_loader()):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST_VALUE:
                problem = f"values are nested more than {DEEPEST_VALUE} deep"
                raise FrontMatterError(event.start_mark.line + 2 if event.start_mark else 1, problem)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _JsonValues:
    """YAML's values as those of JSON. What an alias stands for counts each time."""

    def __init__(self) -> None:
        self._values = self._characters = 0

    def of(self, value: Any, depth: int = 0) -> Any:
        self._values += 1
        if self._values > MOST_VALUES or self._characters > MOST_CHARACTERS or depth > DEEPEST_VALUE:
            raise FrontMatterError(
                1, f"it has more than {MOST_VALUES} values or is too long, what aliases stand for included"
            )
        match value:
            case None | bool():
                return value
            case int():
                return value if abs(value) < 1 << 63 else self._text(str(value))
            case float():
                return value if math.isfinite(value) else self._text(str(value))
            case dict():
                return {self._text(str(key)): self.of(one, depth + 1) for key, one in value.items()}
            case list() | tuple():
                return [self.of(one, depth + 1) for one in value]
            case set():
                return self.of(sorted(map(str, value)), depth)
            case date():
                return self._text(value.isoformat())
            case bytes():
                return self._text(value.decode(errors="replace"))
            case _:
                return self._text(str(value))

    def _text(self, text: str) -> str:
        self._characters += len(text)
        return text


def named(properties: dict[str, Any], *keys: str) -> Iterator[str]:
    """The names in a property that is a list of texts, or one text with commas between them."""
    for key, value in properties.items():
        if key.lower() not in keys:
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                yield from one.split(",") if not isinstance(value, list) else [one]
            elif isinstance(one, int | float) and not isinstance(one, bool):
                yield str(one)


# ---- the text of a note ----------------------------------------------------------------------------------------------

_FENCE = re.compile(r"^[ \t>]*(`{3,}|~{3,})([^\n]*)$", re.MULTILINE)
_INDENTED = re.compile(r"(?:\A|(?<=\n))[ \t]*\r?\n((?:(?: {4}|\t)[^\n]*(?:\n|\Z))+)")
_LIST = re.compile(r"\s|[-*+][ \t]|[0-9]{1,9}[.)][ \t]")
_TICKS = re.compile("`+")
# Each of these begins with what it is found by, and only then looks back: so searching is fast.
_WIKILINK = re.compile(r"\[\[(?<!\\\[\[)([^\[\]\n]{1,1000})\]\]")
_LINK = re.compile(
    r"\[(?<!\\\[)([^\[\]\n]{0,500})\]\([ \t]*(?:<([^<>\n]{1,1000})>|((?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,1000}))"
    r"(?:[ \t]+(?:\"[^\"\n]{0,300}\"|'[^'\n]{0,300}'))?[ \t]*\)"
)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,30}://[^\s<>]{1,2000}", re.IGNORECASE)
_TAG = re.compile(r"#(?<![^\s(]#)([^\s\u2000-\u206F\u2E00-\u2E7F'!\"#$%&()*+,.:;<=>?@^`{|}~\[\]\\]{1,200})")
_NOT_A_NUMBER = re.compile(r"[^\d/_-]")
LOOKED_BACK = 1000
"""Characters before an indented paragraph in which the line before it is looked for."""


def without_code(text: str) -> str:
    """The text with spaces in the place of code: fenced blocks, indented ones, and `code` within a line."""
    text = _replaced(text, _fenced(text))
    if "\n    " in text or "\n\t" in text or text[:1] in ("\t", " "):
        text = _replaced(text, (found.span(1) for found in _INDENTED.finditer(text) if not _is_in_list(text, found)))
    return _replaced(text, _code_spans(text)) if "`" in text else text


def _replaced(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """The text with spaces in the place of spans."""
    parts: list[str] = []
    last = 0
    for start, end in spans:
        parts += [text[last:start], " " * (end - start)]
        last = end
    return "".join([*parts, text[last:]]) if parts else text


def _fenced(text: str) -> Iterator[tuple[int, int]]:
    """The blocks between fences; one that is not closed goes on to the end."""
    fence, start = "", 0
    for found in _FENCE.finditer(text):
        marks, words = found[1], found[2]
        if not fence:
            if marks[0] == "~" or "`" not in words:
                fence, start = marks, found.start()
        elif marks[0] == fence[0] and len(marks) >= len(fence) and not words.strip():
            yield start, found.end()
            fence = ""
    if fence:
        yield start, len(text)


def _is_in_list(text: str, found: re.Match[str]) -> bool:
    """Whether an indented paragraph belongs to the list before it."""
    before = text[max(0, found.start() - LOOKED_BACK) : found.start()].rstrip().rpartition("\n")[2]
    return _LIST.match(before) is not None


def _code_spans(text: str) -> Iterator[tuple[int, int]]:
    """Spans between runs of as many backticks, within one paragraph."""
    runs = [(found.start(), found.end()) for found in _TICKS.finditer(text)]
    closing: list[int] = [-1] * len(runs)
    latest: dict[int, int] = {}
    for index in range(len(runs) - 1, -1, -1):
        size = runs[index][1] - runs[index][0]
        closing[index] = latest.get(size, -1)
        latest[size] = index
    index = 0
    while index < len(runs):
        end = closing[index]
        if end >= 0 and text.find("\n\n", runs[index][1], runs[end][0]) < 0:
            yield runs[index][0], runs[end][1]
            index = end
        index += 1


class NoteNames(NamedTuple):
    """The names that the text of a note uses."""

    tags: list[str]
    links: list[dict[str, str]]
    embeds: list[dict[str, str]]


def names_in(body: str) -> NoteNames:
    """Tags, links and embeds of the first `SCANNED` characters of a note, without those in code."""
    text = without_code(body[:SCANNED])
    wikilinks = [(_is_embed(found), _wikilink(found[1])) for found in islice(_WIKILINK.finditer(text), MOST_FOUND)]
    text = _WIKILINK.sub(" ", text)
    written = islice(_LINK.finditer(text), MOST_FOUND)
    links = [(_is_embed(found), _link(found[2] or found[3], found[1])) for found in written]
    text = _LINK.sub(" ", text)
    if "://" in text:
        text = _URL.sub(" ", text)
    tags = (found[1].strip("/") for found in islice(_TAG.finditer(text), MOST_FOUND))
    found_links = [*wikilinks, *links]
    return NoteNames(
        tags=unique(tag for tag in tags if _NOT_A_NUMBER.search(tag)),
        links=_unique_links(link for is_embed, link in found_links if not is_embed),
        embeds=_unique_links(link for is_embed, link in found_links if is_embed),
    )


def _is_embed(found: re.Match[str]) -> bool:
    return found.string[found.start() - 1 : found.start()] == "!"


def _unique_links(links: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    found = {tuple(link.items()): link for link in links if link.keys() & {"target", "heading"}}
    return list(islice(found.values(), MOST_NAMES))


def _wikilink(words: str) -> dict[str, str]:
    """`Note#Heading|alias` by its parts. In a table, the bar is written as `\\|`."""
    target, _, alias = words.partition("|")
    name, _, heading = target.rstrip("\\").partition("#")
    return _link_parts(name, heading, alias)


def _link(target: str, words: str) -> dict[str, str]:
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", target):
        return _link_parts(target, "", words)
    name, _, heading = unquote(target, errors="replace").partition("#")
    return _link_parts(name, heading, words)


def _link_parts(name: str, heading: str, alias: str) -> dict[str, str]:
    """A link; one without a target is to a heading of the note itself."""
    parts = {"target": name.strip(), "heading": heading.strip(), "alias": alias.strip()}
    return {key: value[:LONGEST_NAME] for key, value in parts.items() if value}


def unique(names: Iterable[str]) -> list[str]:
    """Names in the order in which they first appear, in their first spelling, at most `MOST_NAMES`."""
    found: dict[str, str] = {}
    for name in names:
        cleaned = name.strip()[:LONGEST_NAME]
        if cleaned and len(found) < MOST_NAMES:
            found.setdefault(cleaned.casefold(), cleaned)
    return list(found.values())


# ---- the connector ---------------------------------------------------------------------------------------------------


class ObsidianVault(LocalFiles):
    """The connector `obsidian_vault`."""

    READER = "o2"
    MORE_KEYS = ("attachments",)
    ALWAYS_EXCLUDED = (".obsidian", ".trash")

    def __init__(self, context: SourceContext) -> None:
        if not flag("attachments", context.settings.get("attachments", True)):
            self._ending = ".md"
        super().__init__(context)

    def describe(self, file: FileOnDisk) -> Document:
        """A note with what it says about itself, or an attachment."""
        document = super().describe(file)
        if not _is_note(file.name):
            return replace(document, metadata={**document.metadata, "kind": "attachment"})
        metadata: dict[str, Any] = {**document.metadata, "kind": "note"}
        document = replace(document, title=file.name[:-3] or file.name, media_type="text/markdown", metadata=metadata)
        if file.read.content is None:
            return document
        return _with_note(document, document.text)

    async def test(self) -> str:
        """Count the notes and attachments, and tell whether Obsidian has opened the folder."""
        (notes, _), (files, unreadable) = await self._count(".md"), await self._count()
        found = f"{counted(notes, 'note')}, {counted(max(0, files - notes), 'attachment')}{unreadable}"
        is_vault = await self._in_thread((self.settings.path / ".obsidian").is_dir)
        return f"{self.settings.path}: {found}{'' if is_vault else '; Obsidian has not opened this folder yet'}"


def _is_note(name: str) -> bool:
    return name.lower().endswith(".md")


_WRITTEN_TITLE = re.compile(r"^title:[ \t]*([^\s#]{1,300})", re.MULTILINE)


def _title(properties: dict[str, Any], front_matter: str) -> str:
    """The property `title`; a number or a truth value as it is written, so `2026.10` has its zero. Else empty."""
    title = properties.get("title")
    if isinstance(title, bool | int | float):
        written = _WRITTEN_TITLE.search(front_matter)
        title = written[1] if written else str(title)
    return title.strip()[:LONGEST_NAME] if isinstance(title, str) else ""


def _with_note(document: Document, note: str) -> Document:
    parts = split(note)
    properties: dict[str, Any] = {}
    problem = document.problem
    if parts.is_unclosed:
        problem = "front matter, line 1: it is not closed; write --- in a line of its own behind the properties"
    elif parts.front_matter is not None:
        try:
            properties = read_front_matter(parts.front_matter)
        except FrontMatterError as error:
            problem = str(error)
    names = names_in(parts.body)
    title = _title(properties, parts.front_matter or "")
    tags = (tag.lstrip("#") for words in named(properties, "tags", "tag") for tag in words.split())
    return replace(
        document,
        title=title or document.title,
        text=parts.body,
        problem=problem,
        metadata={
            **document.metadata,
            "properties": properties,
            "tags": unique([*tags, *names.tags]),
            "aliases": unique(named(properties, "aliases", "alias")),
            "links": names.links,
            "embeds": names.embeds,
        },
    )
