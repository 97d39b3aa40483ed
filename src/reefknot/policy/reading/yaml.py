"""
YAML: the values and positions of a document, from libyaml's events.

`yaml.CSafeLoader` parses (`SafeLoader` where libyaml is missing); composing and constructing are done here. libyaml's
own composer recurses in C without a bound and ends the process at some 100,000 brackets, refuses a redefined anchor,
and forgets where an alias stands. PyYAML's constructor shares what an alias stands for, takes the last of two equal
keys, and can count neither.

Words without quotes follow YAML with the surprises taken out: `1e3` is a number, `12:30` and `2026-01-01` stay text,
and `0123`, which is 83 to one reader and 123 to another, is refused. Keys stay as they are written: `429`, `on` and
`null` are the texts "429", "on" and "null".
"""

import re
from collections.abc import Iterator
from types import NoneType
from typing import Any

import yaml

from reefknot.policy.reading.session import LONGEST_NUMBER, KeyPath, Mark, ParseSession, shortened

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
BOOLEANS = {
    form: meaning
    for words, meaning in ((_TRUE, True), (_FALSE, False))
    for word in words
    for form in (word, word.capitalize(), word.upper())
}

# Patterns are compiled on first use: a file has few numbers that are not decimal.
_MAYBE_NUMBER = r"[-+.0-9]"
_DECIMAL = r"[-+]?(?:0|[1-9][0-9_]*)\Z"
_OTHER_RADIX = r"([-+]?)0([box])([0-9a-fA-F_]+)\Z"
_AMBIGUOUS = r"[-+]?0[0-9_]+\Z"
_FLOAT = r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?\Z"
_NOT_FINITE = r"[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
_RADIXES = {"b": 2, "o": 8, "x": 16}


class WordError(Exception):
    """A word that has no one meaning. Its text is the message for people."""


def _number(text: str) -> int | float | None:
    """The number that a word stands for, None when it is text."""
    if len(text) > LONGEST_NUMBER:
        if re.match(_DECIMAL, text) or re.match(_FLOAT, text):
            raise WordError(f"a number has at most {LONGEST_NUMBER} digits; put text in quotes")
        return None
    if re.match(_DECIMAL, text):
        return int(text.replace("_", ""))
    if re.match(_AMBIGUOUS, text):
        raise WordError("a leading zero has two readings, octal and decimal; leave it out, or put text in quotes")
    if found := re.match(_OTHER_RADIX, text):
        sign, radix, digits = found.groups()
        try:
            return int(sign + digits.replace("_", ""), _RADIXES[radix])
        except ValueError:
            return None
    if re.match(_FLOAT, text):
        return float(text.replace("_", ""))
    if re.match(_NOT_FINITE, text):
        return float(text.replace(".", ""))
    return None


def plain_word(text: str) -> str | int | float | bool | None:
    """The value of a word without quotes."""
    if text in NULLS:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    number = _number(text) if re.match(_MAYBE_NUMBER, text) else None
    return text if number is None else number


_MERGE = "<<"
_PREFIX = "tag:yaml.org,2002:"
_KINDS: dict[str, tuple[type, str]] = {
    _PREFIX + "null": (NoneType, "is not null"),
    _PREFIX + "bool": (bool, "is neither true nor false"),
    _PREFIX + "int": (int, "is not a whole number"),
    _PREFIX + "float": (float, "is not a number"),
}
"""By explicit tag: the type of the value, and the message for another one."""


def _tagged(text: str, tag: str) -> str | int | float | bool | None:
    """The value of a word with an explicit tag, which is a mistake unless the word has that meaning anyway."""
    if tag not in _KINDS:
        return text
    kind, message = _KINDS[tag]
    is_number = kind in (int, float)
    value = plain_word(text) if is_number or text in NULLS or text in BOOLEANS else text
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise WordError(message)
    return value


class _Alias(yaml.Node):
    """Another node, its `value`, once more; its own mark is where the alias stands."""


def _target(node: yaml.Node) -> yaml.Node:
    target: yaml.Node = node.value if isinstance(node, _Alias) else node
    return target


def _is_plain(node: yaml.Node) -> bool:
    """Whether the text has neither quotes nor a tag that gives it a kind."""
    return isinstance(node, yaml.ScalarNode) and not node.style and node.tag in (None, "!")


def _check_directives(text: str, session: ParseSession) -> None:
    """Refuse `%TAG` before the parser sees it: it compares each with all before it."""
    if not text.startswith(("%", "#", " ", "\t", "\n", "\r")):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("%") and not line.startswith("%YAML"):
            session.refuse(session.at(number, 1), (), "directives other than %YAML are not accepted")
        if line.strip() and not line.startswith(("%", "#")) and not line.lstrip().startswith("#"):
            return


def _compose(events: Iterator[Any], session: ParseSession) -> yaml.Node | None:
    """The nodes of the single document, or None. Nothing recurses: the stack's depth is limited."""
    root: yaml.Node | None = None
    documents = 0
    stack: list[yaml.CollectionNode] = []
    anchors: dict[str, yaml.Node] = {}
    before = session.nodes
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                message = "a second document begins here; a configuration is one document"
                session.refuse(_mark(event, session), (), message)
        elif isinstance(event, yaml.CollectionEndEvent):
            stack.pop()
        elif isinstance(event, yaml.NodeEvent):
            mark = _mark(event, session)
            parent = stack[-1] if stack else None
            is_key = isinstance(parent, yaml.MappingNode) and len(parent.value) % 2 == 0
            if not is_key:
                session.count_node(mark)
            node = _node(event, anchors, stack, session)
            if event.anchor is not None and not isinstance(node, _Alias):
                anchors[event.anchor] = node
            if parent is None:
                root = node
            else:
                parent.value.append(node)  # of a mapping: keys and values in turn, as in the text
            if isinstance(node, yaml.CollectionNode):
                stack.append(node)
                session.check_level(len(stack), mark)
    session.nodes = before  # counted again, aliases expanded, when the values are constructed
    return root


def _mark(where: Any, session: ParseSession) -> Mark:
    """The mark of an event or a node."""
    return session.at(where.start_mark.line + 1, where.start_mark.column + 1)


def _node(
    event: Any, anchors: dict[str, yaml.Node], stack: list[yaml.CollectionNode], session: ParseSession
) -> yaml.Node:
    tag: Any = getattr(event, "tag", None)  # not resolved: PyYAML's own nodes always have a tag
    anchor, start = event.anchor, event.start_mark
    if isinstance(event, yaml.ScalarEvent):
        return yaml.ScalarNode(tag, event.value, start, style=event.style)
    if isinstance(event, yaml.CollectionStartEvent):
        kind = yaml.SequenceNode if isinstance(event, yaml.SequenceStartEvent) else yaml.MappingNode
        return kind(tag, [], start)
    mark = _mark(event, session)
    session.count_alias(mark)
    target = anchors.get(anchor)
    name = shortened(anchor)
    if target is None:
        session.refuse(mark, (), f"alias *{name} has no anchor &{name} before it")
    if any(target is one for one in stack):
        session.refuse(mark, (), f"alias *{name} stands inside what it refers to: it would never end")
    return _Alias(tag, target, start, None)


class _Construction:
    """Nodes into values, with a mark for each. Mistakes are noted, and the rest is still looked at."""

    __slots__ = ("session",)

    def __init__(self, session: ParseSession) -> None:
        self.session = session

    def wrong(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self.session.wrong(_mark(node, self.session), path, message)

    def check_tag(self, node: yaml.Node, path: KeyPath, *accepted: str) -> None:
        if node.tag in (None, "!", *(_PREFIX + name for name in accepted)):
            return
        shown = f"!!{node.tag.removeprefix(_PREFIX)}" if node.tag.startswith(_PREFIX) else node.tag
        self.wrong(node, path, f"tag {shortened(shown)} is not accepted here; values need no tags")

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        """The plain value of a node. An alias is built again each time, so that nothing is shared."""
        node = _target(node)
        mark = _mark(node, self.session)
        self.session.count_node(mark, path)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        self.session.check_level(len(path) + 1, mark)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        self.check_tag(node, path, "seq")
        return [self.marked(item, _mark(item, self.session), (*path, index)) for index, item in enumerate(node.value)]

    def marked(self, node: yaml.Node, mark: Mark, path: KeyPath) -> Any:
        self.session.marks[path] = mark
        return self.value(node, path)

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        value: Any = None
        try:
            if node.tag in (*_KINDS, _PREFIX + "str", "!"):
                value = _tagged(node.value, node.tag)
            elif node.tag is None:
                value = node.value if node.style else plain_word(node.value)
            else:
                self.check_tag(node, path)
        except WordError as error:
            self.wrong(node, path, str(error))
        self.session.check_scalar(value, _mark(node, self.session), path)
        return value

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self.check_tag(node, path, "map")
        entries: dict[str, tuple[Mark, yaml.Node]] = {}
        merged: list[yaml.Node] = []
        for key, value in _pairs(node):
            name = self.key(key, path)
            if name is None:
                continue
            mark = _mark(key, self.session)
            if name == _MERGE and _is_plain(key):
                merged.append(value)
            elif name in entries:
                self.session.repeated(mark, (*path, name), entries[name][0])
            else:
                entries[name] = mark, value
        for source in merged:
            self.inherit(source, entries, path)
        return {name: self.marked(value, mark, (*path, name)) for name, (mark, value) in entries.items()}

    def key(self, node: yaml.Node, path: KeyPath) -> str | None:
        """A key's text as it is written, None when it cannot be a key."""
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, path, "a key is text: neither a list, nor a mapping, nor an alias")
            return None
        self.check_tag(node, path, "str", "int")
        if not node.value and _is_plain(node):
            self.wrong(node, path, "a key is missing before the colon")
            return None
        name: str = node.value
        self.session.check_scalar(name, _mark(node, self.session), path)
        return name

    def inherit(self, source: yaml.Node, entries: dict[str, tuple[Mark, yaml.Node]], path: KeyPath) -> None:
        """Fill in from `<<`: the mapping's own keys win, then the source that is named first."""
        node = _target(source)
        for one in node.value if isinstance(node, yaml.SequenceNode) else [source]:
            mapping = _target(one)
            if not isinstance(mapping, yaml.MappingNode):
                self.wrong(one, path, "<< takes a mapping, or a list of mappings")
                continue
            for key, value in _pairs(mapping):
                self.session.count_node(_mark(one, self.session), path)
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value == _MERGE and _is_plain(key):
                    self.inherit(value, entries, path)
                elif key.value or not _is_plain(key):
                    entries.setdefault(key.value, (_mark(key, self.session), value))


def _pairs(node: yaml.MappingNode) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    pairs = iter(node.value)
    return zip(pairs, pairs, strict=True)


def _syntax(error: Any, session: ParseSession) -> None:
    """Note the parser's error, with a hint for the two that people meet most."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = session.marks[()] if mark is None else session.at(mark.line + 1, mark.column + 1)
    parts = [part for part in (getattr(error, "problem", None), getattr(error, "context", None)) if part]
    message = ", ".join(parts) or "cannot be read"
    if "cannot start any token" in message:
        message += " (indent with spaces, not tabs; put text that begins with a sign in quotes)"
    if "mapping values are not allowed" in message:
        message += " (indent the keys of one mapping alike; put text such as 'memory:' in quotes)"
    session.wrong(where, (), f"is not YAML: {shortened(message, 300)}")


def read_yaml(text: str, session: ParseSession) -> Any:
    """The plain value of a YAML document, an empty mapping for one without content."""
    _check_directives(text, session)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        root = _compose(yaml.parse(text, Loader=loader), session)
    except yaml.YAMLError as error:
        _syntax(error, session)
        root = None
    session.settle()
    if root is None or (isinstance(root, yaml.ScalarNode) and _is_plain(root) and not root.value):
        return {}
    session.marks[()] = _mark(root, session)
    return _Construction(session).value(root, ())
