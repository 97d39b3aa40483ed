"""`reefknot config`: what is in force and where it was said. Secrets are never shown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.asking import Config, Json, settings
from reefknot.cli.exits import Exit
from reefknot.cli.output import jsonable, put, put_json, put_table, where

app = App(
    name="config",
    help="See and check the configuration.",
    help_epilogue="Example:\n\n    reefknot config check",
)

DEFAULT = "default"


@app.command(help_epilogue="Example:\n\n    reefknot config show --json")
def show(*, config: Config = None, json: Json = False) -> int:
    """The configuration in force, each value with the place that said it. Secrets are hidden."""
    from reefknot.config.document import dotted
    from reefknot.config.load import load_tree

    found = settings(config)
    tree, _ = load_tree(config, environ=os.environ, cwd=Path.cwd())
    values = []
    for path, value in _leaves(found.configuration.model_dump(), ()):
        written = path in tree.marks
        if value is None and not written:
            continue  # not said: what is built in for the target holds, and `policy list` shows it
        values.append((dotted(path), _safe(path, value), str(tree.mark(path)) if written else DEFAULT))
    if found.configuration.engine is None:
        from reefknot.cli.engine import DEFAULT as STATE

        values.append(("engine", f"sqlite:{STATE}", DEFAULT))
    gates = {"worker.retries.v2": found.retries_gate, "worker.queue.v2": found.queue_gate}
    if json:
        put_json(
            {
                "path": None if found.path is None else str(found.path),
                "gates": {name: {"on": gate.on, "said_by": gate.said_by} for name, gate in gates.items()},
                "values": {name: {"value": value, "source": source} for name, value, source in values},
            }
        )
        return Exit.FINE
    put(f"file: {'none, only what is built in' if found.path is None else where(str(found.path))}")
    for name, gate in gates.items():
        put(f"gate {name}: {'on' if gate else 'off'} ({where(gate.said_by)})")
    put()
    rows = [(name, _shown(value), where(source)) for name, value, source in values]
    put_table(("setting", "value", "where"), rows, styles=("cyan", "bold"))
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot config check reefknot.yaml")
def check(
    file: Annotated[str | None, Parameter(help="The file; without it, the one that would be found.")] = None,
    /,
    *,
    config: Config = None,
    json: Json = False,
) -> int:
    """Check a whole file: every mistake with its line. Exits with 78 when there is one."""
    from reefknot.cli.checking import check_files

    return check_files([file if file is not None else config], json=json)


@app.command(help_epilogue="Example:\n\n    reefknot config schema > reefknot.schema.json")
def schema(*, json: Json = False) -> int:
    """Print the JSON Schema of the configuration, for editors. It is JSON with or without --json."""
    from reefknot.config.schema import Configuration

    del json
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Configuration.model_json_schema()}
    put_json(document)
    return Exit.FINE


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value that holds no others; an empty mapping is nothing said."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from _leaves(inner, (*path, key))
        case list() if any(isinstance(item, dict | list) for item in value):
            for index, item in enumerate(value):
                yield from _leaves(item, (*path, index))
        case _:
            yield path, value


def _safe(path: tuple[str | int, ...], value: Any) -> Any:
    """The value as it may be shown: a reference to a secret is shown, a secret is not."""
    from reefknot.config.secrets import is_reference
    from reefknot.core.redaction import HIDDEN, redact

    if isinstance(value, list):
        return [_safe(path, item) for item in value]
    if is_reference(value) or value is None or isinstance(value, bool):
        return jsonable(value)
    if path[0] == "secrets":
        return HIDDEN
    named = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
    if redact(f"{named}: {value}").endswith(HIDDEN) and not redact(str(value)).endswith(HIDDEN):
        return HIDDEN
    return redact(value) if isinstance(value, str) else jsonable(value)


def _shown(value: Any) -> str:
    from json import dumps

    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)
