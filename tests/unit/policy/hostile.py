"""Fifty files that nobody should be able to hurt us with, each with a word of the reason it is refused for."""

from collections.abc import Mapping
from typing import NamedTuple

KILOBYTE = 1024


class Hostile(NamedTuple):
    """A file, and what the refusal has to say."""

    suffix: str
    data: bytes
    reason: str


def _laughs(levels: int, width: int, *, item: str = "ha") -> str:
    lines = [f"a0: &a0 [{', '.join([item] * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


def _merged_laughs(levels: int) -> str:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]}}" for n in range(1, levels)]
    return "\n".join(lines)


def _nested_maps(depth: int) -> str:
    return "\n".join(f"{' ' * n}k:" for n in range(depth)) + " 1"


def _alias_ladder(levels: int) -> str:
    """Each level is shallow as written, and one deeper than the one before when it is expanded."""
    return "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, levels))])


_YAML: Mapping[str, tuple[str, str]] = {
    "billion laughs": (_laughs(10, 10), "limit of 10000"),
    "laughs in mappings": (_merged_laughs(30), "limit of 10000"),
    "quadratic blow-up": (f"a: &a [{', '.join(['x'] * 2000)}]\nb: [{', '.join(['*a'] * 90)}]", "limit of 10000"),
    "too many aliases": (f"a: &a 1\nb: [{', '.join(['*a'] * 101)}]", "limit of 100"),
    "a list in itself": ("a: &a [1, *a]", "never end"),
    "a mapping in itself": ("a: &a {b: *a}", "never end"),
    "a mapping merged into itself": ("a: &a {<<: *a}", "never end"),
    "the document in itself": ("&a\na: *a", "never end"),
    "alias without anchor": ("a: *b", "no anchor"),
    "deep flow lists": ("a: " + "[" * 100_000, "limit of 32 levels"),
    "deep flow mappings": ("a: " + "{k: " * 50_000, "limit of 32 levels"),
    "deep block lists": ("a:\n  " + "- " * 100_000, "limit of 32 levels"),
    "deep block mappings": (_nested_maps(600), "limit of 32 levels"),
    "deep explicit keys": ("? " * 100_000, "limit of 32 levels"),
    "deep by alias": (_alias_ladder(60), "limit of 32 levels"),
    "many items": ("a:\n" + "- 1\n" * 60_000, "limit of 10000"),
    "many keys": ("\n".join(f"k{n}: 1" for n in range(20_000)), "limit of 10000"),
    "many empty lists": ("a: [" + "[]," * 80_000 + "]", "limit of 10000"),
    "many documents": ("---\n" * 60_000, "one document"),
    "many tag directives": ("".join(f"%TAG !{n}! x\n" for n in range(15_000)), "%YAML"),
    "an object": ("a: !!python/object/apply:os.system [id]", "tag"),
    "a name of Python": ("a: !!python/name:os.system", "tag"),
    "a tag of its own": ("a: !secret x", "tag"),
    "a set": ("a: !!set {b, c}", "tag"),
    "binary": ("a: !!binary aGVsbG8=", "tag"),
    "a mapping as a key": ("? {a: 1}\n: 2", "key"),
    "duplicate keys": ("\n".join("k: 1" for _ in range(9_000)), "already given"),
    "endless quotes": ('a: "' + "x" * 200_000, "is not YAML"),
    "endless flow": ("a: [" + "x " * 100_000, "is not YAML"),
    "long key": ("k" * 200_000 + ": 1", "is not YAML"),
    "huge number": ("a: " + "9" * 200_000, "digits"),
    "infinite": ("a: .inf", "finite"),
    "only a list": ("- 1\n- 2", "mapping"),
    "NUL by escape": ('a: "x\\0y"', "U+0000"),
}
_JSON: Mapping[str, tuple[str, str]] = {
    "deep lists": ('{"a": ' + "[" * 200_000, "limit of 32 levels"),
    "deep objects": ('{"a": ' * 30_000, "limit of 32 levels"),
    "many numbers": ('{"a": [' + "1," * 100_000, "limit of 10000"),
    "huge number": ('{"a": ' + "9" * 200_000 + "}", "digits"),
    "overflowing number": ('{"a": 1e99999}', "finite"),
    "NaN": ('{"a": NaN}', "finite"),
    "duplicate keys": ("{" + ", ".join('"k": 1' for _ in range(9_000)) + "}", "already given"),
    "endless text": ('{"a": "' + '\\"' * 100_000, "no end"),
    "half a surrogate": ('{"a": "\\ud800"}', "U+D800"),
    "blank": (" " * 200_000 + "x", "is not JSON"),
}
_TOML: Mapping[str, tuple[str, str]] = {
    "deep lists": ("a = " + "[" * 200_000, "limit of 32 levels"),
    "deep tables": ("a = " + "{b = " * 40_000, "limit of 32 levels"),
    "deep dotted keys": (".".join(["a"] * 100_000) + " = 1", "limit of 32 levels"),
    "deep headers": ("[" + ".".join(["a"] * 100_000) + "]", "limit of 32 levels"),
    "many items": ("a = [" + "1," * 100_000 + "]", "limit of 10000"),
    "many tables": ("".join(f"[t{n}]\n" for n in range(25_000)), "limit of 10000"),
    "huge number": ("a = " + "9" * 100_000, "is not TOML"),
    "endless text": ('a = """' + '"" ' * 60_000, "is not TOML"),
}
_BYTES: Mapping[str, tuple[bytes, str]] = {
    "ten megabytes": (b"a: 1\n" * (2 * KILOBYTE * KILOBYTE), "limit of 256 kB"),
    "one byte too many": (b"a" * (256 * KILOBYTE + 1), "limit of 256 kB"),
    "NUL bytes": (b"a: \x00" * 50_000, "U+0000"),
    "an escape sequence": (b"a: \x1b]0;owned\x07", "U+001B"),
    "not UTF-8": (b"a: 1\nb: \xff\xfe", "offset 8"),
    "UTF-16": ("a: 1".encode("utf-16"), "UTF-16"),
    "a hidden line break": ("# note\u2028enabled: true".encode(), "U+2028"),
}

HOSTILE: Mapping[str, Hostile] = {
    **{f"yaml: {name}": Hostile(".yaml", text.encode(), reason) for name, (text, reason) in _YAML.items()},
    **{f"json: {name}": Hostile(".json", text.encode(), reason) for name, (text, reason) in _JSON.items()},
    **{f"toml: {name}": Hostile(".toml", text.encode(), reason) for name, (text, reason) in _TOML.items()},
    **{f"bytes: {name}": Hostile(".yaml", data, reason) for name, (data, reason) in _BYTES.items()},
}
