"""
What a word without quotes means.

The rules are YAML's, with the surprises taken out: `1e3` is a number, `12:30` and `2026-01-01` stay text, and `0123`,
which is eighty-three to one reader and a hundred and twenty-three to another, is refused.

YAML, from its events to plain values.

The parser is PyYAML's (libyaml's when it is there); composing and constructing are ours, because the limits have to
hold while the text is read, duplicate keys are mistakes, and no tag may name a type. Keys stay as they are written:
`429`, `on` and `null` are the texts "429", "on" and "null".
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from reefknot.config.reading.session import KeyPath, Mark, Reading, shortened

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
BOOLEANS = {
    form: meaning
    for words, meaning in ((_TRUE, True), (_FALSE, False))
    for word in words
    for form in (word, word.capitalize(), word.upper())
}

LONGEST_NUMBER = 100

_MAYBE_NUMBER = re.compile(r"[-+.0-9]")
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")
_OTHER_RADIX = re.compile(r"([-+]?)0([box])([0-9a-fA-F_]+)\Z")
_AMBIGUOUS = re.compile(r"[-+]?0[0-9_]+\Z")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z")
_RADIXES = {"b": 2, "o": 8, "x": 16}


class WordError(Exception):
    """A word that has no one meaning. Its text is the message for people."""


def _number(text: str) -> int | float | None:
    """The number a word stands for, None when it is a word."""
    if len(text) > LONGEST_NUMBER:
        if _DECIMAL.match(text) or _FLOAT.match(text):
            raise WordError(f"a number has at most {LONGEST_NUMBER} digits; put text in quotes")
        return None
    if _DECIMAL.match(text):
        return int(text.replace("_", ""))
    if _AMBIGUOUS.match(text):
        raise WordError("a leading zero has two readings, octal and decimal; leave it out, or put text in quotes")
    if found := _OTHER_RADIX.match(text):
        sign, radix, digits = found.groups()
        try:
            return int(sign + digits.replace("_", ""), _RADIXES[radix])
        except ValueError:
            return None
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.match(text):
        return float(text.replace(".", ""))
    return None


def plain_word(text: str) -> str | int | float | bool | None:
    """The value of a word without quotes."""
    if text in NULLS:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    number = _number(text) if _MAYBE_NUMBER.match(text) else None
    return text if number is None else number


def _as_null(text: str) -> None:
    if text not in NULLS:
        raise WordError("is not null")


def _as_boolean(text: str) -> bool:
    if text not in BOOLEANS:
        raise WordError("is neither true nor false")
    return BOOLEANS[text]


def _as_integer(text: str) -> int:
    number = _number(text)
    if not isinstance(number, int):
        raise WordError("is not a whole number")
    return number


def _as_float(text: str) -> float:
    number = _number(text)
    if number is None:
        raise WordError("is not a number")
    return float(number)


TAGGED: dict[str, Callable[[str], str | int | float | bool | None]] = {
    "tag:yaml.org,2002:null": _as_null,
    "tag:yaml.org,2002:bool": _as_boolean,
    "tag:yaml.org,2002:int": _as_integer,
    "tag:yaml.org,2002:float": _as_float,
    "tag:yaml.org,2002:str": str,
    "!": str,
}
"""What an explicit tag makes of a scalar's text."""


_MERGE = "<<"
_PREFIX = "tag:yaml.org,2002:"


class _Node:
    """A piece of the document: where it begins, and the tag that was written on it."""

    __slots__ = ("mark", "tag")

    def __init__(self, mark: Mark, tag: str | None) -> None:
        self.mark = mark
        self.tag = tag


class _Scalar(_Node):
    __slots__ = ("plain", "text")

    def __init__(self, mark: Mark, tag: str | None, text: str, *, plain: bool) -> None:
        super().__init__(mark, tag)
        self.text = text
        self.plain = plain


class _Sequence(_Node):
    __slots__ = ("is_open", "items")

    def __init__(self, mark: Mark, tag: str | None) -> None:
        super().__init__(mark, tag)
        self.items: list[_Node] = []
        self.is_open = True

    @property
    def awaits_key(self) -> bool:
        return False


class _Mapping(_Sequence):
    """A mapping's keys and values follow each other in `items`, as they do in the text."""

    __slots__ = ()

    @property
    def awaits_key(self) -> bool:
        return len(self.items) % 2 == 0


class _Alias(_Node):
    """Another node once more. Its own mark is where the alias stands."""

    __slots__ = ("target",)

    def __init__(self, mark: Mark, target: _Node) -> None:
        super().__init__(mark, None)
        self.target = target


def _check_directives(text: str, reading: Reading) -> None:
    """Refuse `%TAG` before the parser sees it: it compares each with all before it."""
    if not text.startswith(("%", "#", " ", "\t", "\n", "\r")):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("%") and not line.startswith("%YAML"):
            reading.refuse(reading.at(number, 1), (), "directives other than %YAML are not accepted")
        if line.strip() and not line.startswith(("%", "#")) and not line.lstrip().startswith("#"):
            return


def _compose(events: Iterator[Any], reading: Reading) -> _Node | None:
    """The nodes of the one document, None when there is none. It keeps its own stack: depth is bounded by us."""
    import yaml

    root: _Node | None = None
    documents = 0
    stack: list[_Sequence] = []
    anchors: dict[str, _Node] = {}
    before = reading.nodes
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                mark = _mark(event, reading)
                reading.refuse(mark, (), "a second document begins here; a configuration is one document")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            stack.pop().is_open = False
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        mark = _mark(event, reading)
        if not (stack and stack[-1].awaits_key):
            reading.count_node(mark)
        node = _node(event, mark, anchors, reading)
        if event.anchor is not None and not isinstance(node, _Alias):
            anchors[event.anchor] = node
        if stack:
            stack[-1].items.append(node)
        else:
            root = node
        if isinstance(node, _Sequence):
            stack.append(node)
            reading.check_level(len(stack), mark)
    reading.nodes = before  # counted again, expanded, when it is constructed
    return root


def _mark(event: Any, reading: Reading) -> Mark:
    return reading.at(event.start_mark.line + 1, event.start_mark.column + 1)


def _node(event: Any, mark: Mark, anchors: dict[str, _Node], reading: Reading) -> _Node:
    import yaml

    match event:
        case yaml.AliasEvent():
            reading.count_alias(mark)
            name = event.anchor or ""
            target = anchors.get(name)
            name = shortened(name)
            if target is None:
                reading.refuse(mark, (), f"alias *{name} has no anchor &{name} before it")
            if isinstance(target, _Sequence) and target.is_open:
                reading.refuse(mark, (), f"alias *{name} stands inside what it refers to: it would never end")
            return _Alias(mark, target)
        case yaml.ScalarEvent():
            return _Scalar(mark, event.tag, event.value, plain=event.implicit[0])
        case yaml.SequenceStartEvent():
            return _Sequence(mark, event.tag)
        case _:
            return _Mapping(mark, event.tag)


def _tag_refused(node: _Node, path: KeyPath, reading: Reading) -> None:
    tag = node.tag or ""
    shown = f"!!{tag.removeprefix(_PREFIX)}" if tag.startswith(_PREFIX) else tag
    reading.wrong(node.mark, path, f"tag {shortened(shown)} is not accepted here; values need no tags")


class _Construction:
    """Nodes into values, with a mark for each. What is wrong is noted, and the rest is still looked at."""

    __slots__ = ("reading",)

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def value(self, node: _Node, path: KeyPath, level: int = 1) -> Any:
        """The plain value of a node. An alias is built anew at each place: nothing is shared."""
        if isinstance(node, _Alias):
            node = node.target
        self.reading.count_node(node.mark, path)
        match node:
            case _Mapping():
                self.reading.check_level(level, node.mark)
                return self.mapping(node, path, level)
            case _Sequence():
                self.reading.check_level(level, node.mark)
                if node.tag not in (None, "!", _PREFIX + "seq"):
                    _tag_refused(node, path, self.reading)
                return [self.item(item, (*path, index), level + 1) for index, item in enumerate(node.items)]
            case _Scalar():
                return self.scalar(node, path)
            case _:
                raise AssertionError("unreachable: an alias never stands for an alias")

    def item(self, node: _Node, path: KeyPath, level: int) -> Any:
        self.reading.marks[path] = node.mark
        return self.value(node, path, level)

    def scalar(self, node: _Scalar, path: KeyPath) -> Any:
        value: Any = None
        try:
            if node.tag is None:
                value = plain_word(node.text) if node.plain else node.text
            elif node.tag in TAGGED:
                value = TAGGED[node.tag](node.text)
            else:
                _tag_refused(node, path, self.reading)
        except WordError as error:
            self.reading.wrong(node.mark, path, str(error))
        self.reading.check_scalar(value, node.mark, path)
        return value

    def mapping(self, node: _Mapping, path: KeyPath, level: int) -> dict[str, Any]:
        if node.tag not in (None, "!", _PREFIX + "map"):
            _tag_refused(node, path, self.reading)
        entries: dict[str, tuple[Mark, _Node]] = {}
        merged: list[_Node] = []
        pairs = iter(node.items)
        for key, value in zip(pairs, pairs, strict=True):
            name = self.key(key, path)
            if name is None:
                continue
            if name == _MERGE and isinstance(key, _Scalar) and key.plain:
                merged.append(value)
            elif name in entries:
                first = entries[name][0]
                message = f"the key is already given at line {first.line}, column {first.column}"
                self.reading.wrong(key.mark, (*path, name), message)
            else:
                entries[name] = key.mark, value
        for source in merged:
            self.inherit(source, entries, path)
        built: dict[str, Any] = {}
        for name, (mark, value) in entries.items():
            self.reading.marks[*path, name] = mark
            built[name] = self.value(value, (*path, name), level + 1)
        return built

    def key(self, node: _Node, path: KeyPath) -> str | None:
        """A key's text as it is written, None when it cannot be a key."""
        if not isinstance(node, _Scalar):
            self.reading.wrong(node.mark, path, "a key is text: neither a list, nor a mapping, nor an alias")
            return None
        if node.tag not in (None, "!", _PREFIX + "str", _PREFIX + "int"):
            _tag_refused(node, path, self.reading)
        if node.plain and not node.text:
            self.reading.wrong(node.mark, path, "a key is missing before the colon")
            return None
        self.reading.check_scalar(node.text, node.mark, path)
        return node.text

    def inherit(self, source: _Node, entries: dict[str, tuple[Mark, _Node]], path: KeyPath) -> None:
        """Fill in from `<<`: what the mapping says itself wins, then what is named first."""
        node = source.target if isinstance(source, _Alias) else source
        if isinstance(node, _Sequence) and not isinstance(node, _Mapping):
            for item in node.items:
                self.inherit_one(item, entries, path)
        else:
            self.inherit_one(source, entries, path)

    def inherit_one(self, source: _Node, entries: dict[str, tuple[Mark, _Node]], path: KeyPath) -> None:
        node = source.target if isinstance(source, _Alias) else source
        if not isinstance(node, _Mapping):
            self.reading.wrong(source.mark, path, "<< takes a mapping, or a list of mappings")
            return
        pairs = iter(node.items)
        for key, value in zip(pairs, pairs, strict=True):
            self.reading.count_node(source.mark, path)
            if isinstance(key, _Scalar) and key.plain and key.text == _MERGE:
                self.inherit(value, entries, path)
            elif isinstance(key, _Scalar) and (key.text or not key.plain):
                entries.setdefault(key.text, (key.mark, value))


def _syntax(error: Any, reading: Reading) -> None:
    """The parser's complaint, in our words as far as there are any."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = reading.marks[()] if mark is None else reading.at(mark.line + 1, mark.column + 1)
    parts = [part for part in (getattr(error, "problem", None), getattr(error, "context", None)) if part]
    message = ", ".join(parts) or "cannot be read"
    if "cannot start any token" in message:
        message += " (indent with spaces, not tabs; put text that begins with a sign in quotes)"
    if "mapping values are not allowed" in message:
        message += " (indent the keys of one mapping alike; put text such as 'memory:' in quotes)"
    reading.wrong(where, (), f"is not YAML: {shortened(message, 300)}")


def read_yaml(text: str, reading: Reading) -> Any:
    """The plain value of a YAML document, an empty mapping when it says nothing."""
    import yaml

    _check_directives(text, reading)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        root = _compose(yaml.parse(text, Loader=loader), reading)
    except yaml.YAMLError as error:
        _syntax(error, reading)
        root = None
    reading.settle()
    if root is None or (isinstance(root, _Scalar) and root.plain and not root.text):
        return {}
    reading.marks[()] = root.mark
    return _Construction(reading).value(root, ())
