"""
A new source in the configuration file: its settings from flags, the file with it, checked as a whole, and written.

The file is replaced in one step, or not at all; a mistake anywhere leaves it as it was.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reefknot.console.cli.app import CommandError, Exit
from reefknot.console.cli.config import check_parts
from reefknot.console.cli.options import load, unwritable
from reefknot.console.cli.output import relative, say
from reefknot.errors import ConfigurationError
from reefknot.ingest.configured_sources import check_sources
from reefknot.policy.editing import with_entry
from reefknot.policy.layers import SUFFIXES, Tree, environment, find, merge, read_text, word_or_flow
from reefknot.policy.reading.session import KeyPath, Mark, ParseSession
from reefknot.policy.settings import settings_of
from reefknot.runtime.files import whole_file
from reefknot.runtime.log import printable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def check_name(name: str) -> None:
    """Refuse a name that is awkward to type, or in the ids of jobs."""
    if not _NAME.fullmatch(name):
        accepted = "letters, digits, '.', '_' and '-', 64 at most, a letter or digit first"
        raise CommandError(f"NAME: {printable(name, most=60)!r} is not accepted: {accepted}")


def own_settings(path: str | None, pairs: Sequence[str]) -> dict[str, Any]:
    """The settings that are the connector's own, from `--path` and `--set`."""
    values: dict[str, Any] = {} if path is None else {"path": path}
    for pair in pairs:
        key, equals, written = pair.partition("=")
        if not equals or not _KEY.fullmatch(key):
            raise CommandError(
                f"--set: {printable(key, most=60)!r} is not accepted: KEY=VALUE, such as host=example.org"
            )
        if key in values:
            raise CommandError(f"--set: {key} is given twice; give it once")
        session = ParseSession(f"--set {key}")
        session.check_text(written)
        values[key] = word_or_flow(written, session)
        session.settle()
    return values


def extended(name: str, values: dict[str, Any], config: str | None, *, path: str | None) -> tuple[Path, str, str]:
    """
    The configuration file, its text with the source, and the lines of the source. All of it is checked.

    `path` is a folder as it was typed, from the current folder.
    """
    found = find(config, environ=os.environ, cwd=Path.cwd())
    file = Path.cwd() / "reefknot.yaml" if found is None else Path(os.path.realpath(found))
    if path is not None and not Path(path).expanduser().is_absolute():
        values["path"] = os.path.relpath(path, file.parent)  # relative paths are beneath the folder of the file
    if found is not None:
        _check_file(str(found))
    try:
        text = file.read_bytes().decode("utf-8") if found is not None else ""
    except UnicodeDecodeError as error:
        raise CommandError(f"{file}: is not UTF-8 ({error.reason})", Exit.MISCONFIGURED) from None
    written_in = SUFFIXES[file.suffix.lower()]
    if name in (read_text(text, name=str(file), format=written_in).value.get("sources") or {}):
        raise CommandError(f"{name} is a source of {relative(str(file))} already; choose another name", Exit.FAILED)
    tree = merge(read_text(text, name=str(file), format=written_in), environment(os.environ), _flags(name, values))
    try:
        check_sources(settings_of(tree, file, environ=os.environ), only={name}, strict=True)
    except ConfigurationError:
        say(f"{relative(str(file))} is as it was: this source is not accepted.")
        raise
    # Only now: the refusal of a file that cannot be extended shows the values, and none of them is a secret.
    longer, added = with_entry(text, "sources", name, values=values, file=str(file), written_in=written_in)
    return file, longer, added


def _check_file(name: str) -> None:
    """Refuse to extend a file with mistakes, as `config check` finds them."""
    found = load(name)
    try:
        check_parts(found)
    except ConfigurationError:
        say(f"{relative(name)} is as it was: correct what it has already, then add the source.")
        raise


def _flags(name: str, values: dict[str, Any]) -> Tree:
    """The source as a layer of configuration, with the flag that gives each value."""
    source = ("sources", name)
    marks: dict[KeyPath, Mark] = {source: Mark(f"source {name}"), (): Mark("flags")}
    own = ("connector", "path", "every", "cron", "time_zone", "on_change")
    for key in values:
        marks[*source, key] = Mark(f"--{key.replace('_', '-')}" if key in own else f"--set {key}")
    return Tree({"sources": {name: values}}, marks)


def replace_file(file: Path, text: str) -> None:
    """Replace the file as a whole; its rights stay."""
    try:
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o644 & ~_umask()
        if not mode & 0o222:
            text = (
                f"{relative(str(file))} is read-only, and is as it was; make it writable, or write the lines yourself"
            )
            raise CommandError(text, Exit.FORBIDDEN)
        with whole_file(file) as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(text.encode("utf-8"))
    except OSError as error:
        raise unwritable(relative(str(file)), error) from None


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
