"""
Additions to a configuration file: a new entry of a section, with everything else of the file byte for byte as it was.

YAML and TOML get a few lines more, so that comments and order stay; JSON, which has no comments, is rewritten with its
own indentation. The result is read again and compared: it must be the old values and the entry, and nothing else. A
file whose shape does not allow for that, such as one written in braces on one line, is refused with the lines to add.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from reefknot.errors import ConfigurationError
from reefknot.policy.layers import Format, Tree, read_text
from reefknot.policy.reading.session import Mark, Problem
from reefknot.policy.reading.yaml import WordError, plain_word

_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./~@+-]*")
"""Text that needs no quotes in YAML, if it is not a word with a meaning such as `yes`."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_EMPTY = re.compile(r"(?P<key>[^:]+:)[ \t]*(?P<value>\{[ \t]*\}|null|~)?[ \t]*(?P<comment>#.*)?")
"""The line of a section without entries on it."""


def with_entry(
    text: str, section: str, name: str, *, values: Mapping[str, Any], file: str, written_in: Format
) -> tuple[str, str]:
    """
    The text of a file with one more entry of a section, and the lines that were added.

    Raises `ConfigurationError` when the file has mistakes, or cannot be extended by lines alone.
    """
    before = read_text(text, name=file, format=written_in)
    line_end = "\r\n" if "\r\n" in text else "\n"
    match written_in:
        case "yaml":
            one_line = f"{_yaml(name)}: {_yaml(dict(values))}"
            added = _yaml_lines(name, values)
            longer = _longer_yaml(text, before, section, added, line_end)
        case "toml":
            one_line = f"{_toml_key(name)} = {_toml(dict(values))}"
            added = _toml_lines(section, name, values)
            longer = _appended(text, added, line_end)
        case "json":
            one_line = json.dumps({name: values}, ensure_ascii=False)
            longer = _longer_json(before.value | {section: {**(before.value.get(section) or {}), name: values}}, text)
            added = json.dumps({section: {name: values}}, indent=2, ensure_ascii=False).splitlines()
    if longer is None or not _is_only_longer(before, longer, section, name, values, written_in):
        message = f"cannot be extended without changing its form; add this to {section} by hand: {one_line}"
        raise ConfigurationError([Problem(Mark(file), "", message)])
    return longer, "\n".join(added)


def _is_only_longer(
    before: Tree, text: str, section: str, name: str, values: Mapping[str, Any], written_in: Format
) -> bool:
    """Whether a text is that of before, with the entry and nothing else."""
    try:
        after = read_text(text, format=written_in).value
    except ConfigurationError:
        return False
    wanted = {**before.value, section: {**(before.value.get(section) or {}), name: dict(values)}}
    return after == wanted


# ---- YAML ------------------------------------------------------------------------------------------------------------


def _longer_yaml(text: str, before: Tree, section: str, added: list[str], line_end: str) -> str | None:
    """The lines beneath the key of the section, or with that key at the end; None where the section has a value."""
    mark = before.marks.get((section,))
    if mark is None or mark.line is None:
        return _appended(text, [f"{section}:", *_indented(added, 2)], line_end)
    lines = text.splitlines(keepends=True)
    key = _EMPTY.fullmatch(lines[mark.line - 1].rstrip("\r\n"))
    if key is None or mark.column != 1:
        return None
    entries = [one for path, one in before.marks.items() if len(path) == 2 and path[0] == section]
    indent = entries[0].column - 1 if entries and entries[0].column else 2
    if key["value"]:
        lines[mark.line - 1] = f"{key['key']}{' ' if key['comment'] else ''}{key['comment'] or ''}{line_end}"
    elif not lines[mark.line - 1].endswith("\n"):
        lines[mark.line - 1] += line_end
    lines[mark.line : mark.line] = [line + line_end for line in _indented(added, indent)]
    return "".join(lines)


def _yaml_lines(name: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{_yaml(name)}:", *_indented([f"{_yaml(key)}: {_yaml(value)}" for key, value in values.items()], 2)]


def _yaml(value: Any) -> str:
    """A value on one line: text without quotes where that means the same, everything else as JSON, which YAML reads."""
    match value:
        case str():
            return value if _PLAIN.fullmatch(value) and _means_itself(value) else json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(_yaml, value))}]"
        case dict():
            return f"{{{', '.join(f'{_yaml(key)}: {_yaml(one)}' for key, one in value.items())}}}"
        case _:
            return json.dumps(value)


def _means_itself(text: str) -> bool:
    try:
        return plain_word(text) == text
    except WordError:
        return False


# ---- TOML and JSON ---------------------------------------------------------------------------------------------------


def _toml_lines(section: str, name: str, values: Mapping[str, Any]) -> list[str]:
    return [f"[{section}.{_toml_key(name)}]", *(f"{_toml_key(key)} = {_toml(one)}" for key, one in values.items())]


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _toml(value: Any) -> str:
    match value:
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return f"{{ {', '.join(f'{_toml_key(key)} = {_toml(one)}' for key, one in value.items())} }}"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _longer_json(values: Mapping[str, Any], text: str) -> str:
    found = re.search(r"\n([ \t]+)\S", text)
    indent = found[1] if found else None if text.strip() and "\n" not in text.strip() else "  "
    return json.dumps(values, indent=indent, ensure_ascii=text.isascii()) + ("\n" if text.endswith("\n") else "")


def _appended(text: str, added: Iterable[str], line_end: str) -> str:
    gap = "" if not text.strip() else line_end if text.endswith("\n") else line_end * 2
    return text + gap + "".join(line + line_end for line in added)


def _indented(lines: Iterable[str], columns: int) -> list[str]:
    return [" " * columns + line for line in lines]
