"""
Which file counts, and what is laid over it.

In this order: the file that was named, the variable `REEFKNOT_CONFIG`, the nearest `reefknot.yaml` (or `.yml`, `.json`,
`.toml`) upwards, the user's folder for configuration, none. Two files that could both be meant are a mistake, not a
choice. Nothing is remembered: the caller says when to read again.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reefknot.config.document import SUFFIXES, Mark, Problem, Tree, environment, flags, merge, read_file
from reefknot.errors import ConfigurationError, ConfigurationMissingError

VARIABLE = "REEFKNOT_CONFIG"
NAMES = tuple(f"reefknot{suffix}" for suffix in SUFFIXES)


def _named(name: str, source: str, cwd: Path) -> Path:
    path = cwd / name
    try:
        is_there = os.path.lexists(path)
    except ValueError:  # a name with a NUL in it
        is_there = False
    if not is_there:
        raise ConfigurationMissingError([Problem(Mark(name), "", f"there is no such file, named by {source}")])
    return path


def _in_folder(folder: Path) -> Path | None:
    """The folder's one configuration. A link that leads nowhere counts: reading it says what is wrong."""
    found = [path for name in NAMES if os.path.lexists(path := folder / name) and not os.path.isdir(path)]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise ConfigurationError(
            [Problem(Mark(str(folder)), "", f"holds {names}: keep one, or name one with --config")]
        )
    return found[0] if found else None


def _home_config(environ: Mapping[str, str]) -> Path | None:
    """The user's folder for configuration, None when nothing says where it is."""
    for variable, below in (("XDG_CONFIG_HOME", ""), ("APPDATA", ""), ("HOME", ".config")):
        folder = environ.get(variable, "")
        if os.path.isabs(folder):
            return Path(folder, below, "reefknot")
    return None


def find(
    explicit: str | None,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    home_config: Path | None = None,
) -> Path | None:
    """The file that counts, None when there is none. A file that was named has to be there."""
    if explicit is not None:
        return _named(explicit, "--config", cwd)
    if environ.get(VARIABLE):
        return _named(environ[VARIABLE], f"environment {VARIABLE}", cwd)
    start = Path(os.path.abspath(cwd))
    for folder in (start, *start.parents):
        if found := _in_folder(folder):
            return found
    home_config = home_config or _home_config(environ)
    return _in_folder(home_config) if home_config is not None else None


def load_tree(
    explicit: str | None = None,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    overrides: Mapping[str, Any] = {},
) -> tuple[Tree, Path | None]:
    """The file with the environment and then the flags over it, and the file's path. Mistakes are raised together."""
    path = find(explicit, environ=environ, cwd=cwd)
    trees: list[Tree] = []
    errors: list[ConfigurationError] = []
    readers: list[Callable[[], Tree]] = [lambda: environment(environ), lambda: flags(overrides)]
    if path is not None:
        readers.insert(0, lambda: read_file(path))
    for read in readers:
        try:
            trees.append(read())
        except ConfigurationError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigurationError([problem for error in errors for problem in error.problems])
    return merge(*trees), path
