"""
Configurations to start from: the recommended one, and a template for each common situation.

They are files, so that people may read them; a test loads every one of them. A template is a whole, valid file that
says only what its situation needs.

`reefknot init`: a commented configuration to start from. It never overwrites a file unless told to.

Checking files: every file is read, every mistake is told, and one mistake anywhere makes the answer 78.

`reefknot config`: what is in force and where it was said. Secrets are never shown.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Config, Json, load, one_of, settings
from reefknot.cli.output import jsonable, put, put_json, put_table, say, where
from reefknot.errors import ConfigurationError, ParameterError

if TYPE_CHECKING:
    from reefknot.config.settings import Settings

_FOLDER = Path(__file__).with_name("samples")

TEMPLATES = {
    "rate-limited-api": "an HTTP API that answers 429 and says when to come back",
    "flaky-network": "a network that drops and stalls, but comes back within seconds",
    "database": "SQL that meets locks, fail-overs and a full connection pool",
    "local-disk": "files and vaults on this machine, where waiting long is pointless",
    "mailbox": "IMAP servers that limit logins and go away for minutes",
}
"""By name: when to use it."""


def recommended() -> str:
    """The configuration that `init` writes: both v2 gates on."""
    return (_FOLDER / "reefknot.yaml").read_text(encoding="utf-8")


def template_text(name: str) -> str:
    """The text of one template."""
    if name not in TEMPLATES:
        raise ParameterError("name", name, f"one of {', '.join(TEMPLATES)}")
    return (_FOLDER / "templates" / f"{name}.yaml").read_text(encoding="utf-8")


NAME = "reefknot.yaml"

init_app = App(
    name="init",
    help="Write a commented reefknot.yaml: the recommended policies, both v2 gates on. A file that is there stays.",
    help_epilogue="Examples:\n\n    reefknot init\n    reefknot init --template mailbox --dry-run",
)


@init_app.default
def init(
    *,
    force: Annotated[bool, Parameter(help="Replace a file that is there.")] = False,
    dry_run: Annotated[bool, Parameter(help="Print what would be written, and write nothing.")] = False,
    template: Annotated[str | None, Parameter(help="Write this template; `policy templates` lists them.")] = None,
    json: Json = False,
) -> int:
    """Write a commented reefknot.yaml into the current folder."""

    if template is None:
        text = recommended()
    else:
        text = template_text(one_of("--template", template, {one.replace("-", "_"): one for one in TEMPLATES}))
    path = Path.cwd() / NAME
    _refuse(path, force)
    if not dry_run:
        _write(path, text, force)
    if json:
        put_json({"path": str(path), "written": not dry_run, "text": text})
    elif dry_run:
        put(text.rstrip("\n"))
        say(f"Nothing was written; without --dry-run this goes to {NAME}.")
    else:
        say(f"Wrote {NAME}. Next: reefknot config check, reefknot policy list.")
    return Exit.FINE


def _refuse(path: Path, force: bool) -> None:
    others = [one.name for one in path.parent.glob("reefknot.*") if one.suffix in (".yml", ".json", ".toml")]
    if others:
        names = " and ".join(sorted(others))
        raise CommandError(f"{names} is here already, and one folder has one configuration; move it away", Exit.FAILED)
    if os.path.lexists(path) and not force:
        raise CommandError(
            f"{NAME} exists already; move it away, or replace it with --force (--dry-run shows by what)", Exit.FAILED
        )


def _write(path: Path, text: str, force: bool) -> None:
    """The whole file or nothing. Without force, a file that appeared meanwhile is left alone too."""
    if not force:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise CommandError(f"{NAME} appeared meanwhile and was left alone", Exit.FAILED) from None
        return
    fresh = path.with_name(f".{NAME}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def check_files(files: Iterable[str | None], *, json: bool, policies_only: bool = False) -> int:
    """Check each file on its own; None is the one that would be found."""
    results: list[dict[str, Any]] = []
    for name in dict.fromkeys(files):
        try:
            found = load(name)
            if not policies_only:
                _check_blocks(found)
        except ConfigurationError as error:
            problems = str(error).splitlines()
            results.append({"file": name, "ok": False, "problems": problems, "warnings": []})
            for line in problems:
                say(where(line))
            continue
        warnings = [] if policies_only else list(found.warnings)
        for warning in warnings:
            say(f"warning: {warning}")
        shown = str(found.path) if name is None and found.path else name
        results.append({"file": shown, "ok": True, "problems": [], "warnings": warnings})
        if not json:
            name = "no configuration file, only what is built in" if shown is None else where(shown)
            put(f"{name}: OK: {_contents(found)}")
    if json:
        put_json({"ok": all(one["ok"] for one in results), "files": results})
    return Exit.FINE if all(one["ok"] for one in results) else Exit.MISCONFIGURED


def _check_blocks(found: Settings) -> None:
    """Refuse addresses of `blocks.http.allow` that the blocks cannot read."""
    if "blocks" in found.configuration.model_fields_set:
        from reefknot.app.block_settings import block_settings

        block_settings(found)


def _contents(found: Settings) -> str:
    configuration = found.configuration
    counts = (
        (len(configuration.worker.retries.v2.block_policies), "block"),
        (len(configuration.retry_policies), "connector"),
        (len(configuration.operations), "operation"),
        (len(configuration.sources), "source"),
    )
    parts = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    retries, queue = ("on" if gate else "off" for gate in (found.retries_gate, found.queue_gate))
    return f"{parts}; worker.retries.v2 {retries}, worker.queue.v2 {queue}"


app = App(
    name="config",
    help="See and check the configuration.",
    help_epilogue="Example:\n\n    reefknot config check",
)

DEFAULT = "default"


@app.command(help_epilogue="Example:\n\n    reefknot config show --json")
def show(*, config: Config = None, json: Json = False) -> int:
    """The configuration in force, each value with the place that said it. Secrets are hidden."""
    from reefknot.config.layers import load_tree
    from reefknot.config.reading.session import dotted

    found = settings(config)
    tree, _ = load_tree(config, environ=os.environ, cwd=Path.cwd())
    values = []
    for path, value in _leaves(found.configuration.model_dump(), ()):
        written = path in tree.marks
        if value is None and not written:
            continue  # not said: what is built in for the target holds, and `policy list` shows it
        values.append((dotted(path), _safe(path, value), str(tree.mark(path)) if written else DEFAULT))
    if found.configuration.engine is None:
        from reefknot.cli.stores import DEFAULT as STATE

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
