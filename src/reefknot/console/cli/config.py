"""
`reefknot config` and `reefknot init`: the configuration in force, checks of files, and files to start from.

The recommended configuration and the templates are files that people may read, and a test loads every one of them. A
check reads every file and reports every mistake. Secrets are never shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import Meta

from reefknot.console.cli.app import CommandError, Exit, examples, noun
from reefknot.console.cli.options import COMMON, CommonFlags, FileName, Json, arg, file_arg, load, settings
from reefknot.console.cli.output import (
    json_text,
    prints_to_stderr,
    put,
    put_document,
    put_json,
    put_table,
    relative,
    say,
    show,
    table_width,
)
from reefknot.console.operations.values import one_of, plural, shown_value
from reefknot.errors import ConfigurationError, ParameterError
from reefknot.policy.reading.session import dotted
from reefknot.policy.sections import Section, keys_of, plain, required, takes_own
from reefknot.stores.port.engines import DEFAULT_URL

if TYPE_CHECKING:
    from reefknot.policy.settings import Settings

# ---- init and templates ----------------------------------------------------------------------------------------------

_FOLDER = Path(__file__).with_name("samples")

TEMPLATES = {
    "rate-limited-api": "an HTTP API that answers 429 with Retry-After",
    "flaky-network": "a network that drops and stalls, but recovers within seconds",
    "database": "SQL with lock conflicts, failovers and a full connection pool",
    "local-disk": "files and vaults on this machine, where long waits are pointless",
    "mailbox": "IMAP servers that limit logins and are unavailable for minutes",
}
"""By name: the situation that a template is for."""


EXAMPLES = ("fastapi", "flask", "django", "worker")


def example_files(name: str) -> dict[str, str]:
    """The files of an example project by their paths: those that all examples have, and its own."""
    if name not in EXAMPLES:
        raise ParameterError("name", name, f"one of {', '.join(EXAMPLES)}")
    found: dict[str, str] = {}
    for folder in (_FOLDER / "examples" / "common", _FOLDER / "examples" / name):
        for file in sorted(folder.rglob("*.txt")):  # else tools would take the projects for modules of this package
            found[file.relative_to(folder).with_suffix("").as_posix()] = file.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


def recommended(*, full: bool = False) -> str:
    """The configuration that `init` writes: what a system needs to start, or with `full` every policy as well."""
    return (_FOLDER / ("reefknot-full.yaml" if full else "reefknot.yaml")).read_text(encoding="utf-8")


def template_text(name: str) -> str:
    """The text of one template."""
    if name not in TEMPLATES:
        raise ParameterError("name", name, f"one of {', '.join(TEMPLATES)}")
    return (_FOLDER / "templates" / f"{name}.yaml").read_text(encoding="utf-8")


NAME = "reefknot.yaml"
FILES = "files"
"""The folder that both files open to `fs.blob_put`, `fs.blob_get` and `fs.delete`."""

init_app = noun(
    "init",
    "init",
    "init --full --dry-run",
    "init --template mailbox",
    "init --example fastapi",
    help="Write a commented reefknot.yaml with which a system works, and the folder that its file steps may use; or, "
    "with --example, a small project with steps and tests in a folder of its own. An existing file is kept.",
)


@init_app.default
def init(
    *,
    force: Annotated[bool, arg("Replace an existing file.")] = False,
    dry_run: Annotated[bool, arg("Print what would be written, and write nothing.")] = False,
    full: Annotated[bool, arg("Write every policy too: classes of failures, blocks, connectors.")] = False,
    template: Annotated[str | None, arg("Write this template; `policy templates` lists them.")] = None,
    example: Annotated[str | None, arg(f"Write a project with tests into NAME-app: {', '.join(EXAMPLES)}.")] = None,
    json: Json = False,
) -> int:
    """Write a commented reefknot.yaml into the current folder."""
    if example is not None:
        if full or force or template is not None:
            raise CommandError("--example writes a folder of its own; give it without --full, --force and --template")
        return _init_example(one_of("--example", example, {one: one for one in EXAMPLES}), dry_run=dry_run, json=json)
    if template is None:
        text = recommended(full=full)
    elif full:
        raise CommandError("--full and --template name two different files; give one of them")
    else:
        text = template_text(one_of("--template", template, {one.replace("-", "_"): one for one in TEMPLATES}))
    path = Path.cwd() / NAME
    refusal = _refusal(path, force)
    if refusal and not dry_run:
        raise CommandError(refusal, Exit.FAILED)
    if not dry_run:
        _write(path, text, force)
        if template is None:
            path.with_name(FILES).mkdir(exist_ok=True)
    if json:
        put_json({"path": str(path), "written": not dry_run, **({"refusal": refusal} if refusal else {}), "text": text})
    elif dry_run:
        put_document(text)
    folder = "" if template is not None else f" and the folder {FILES}/"
    if refusal:
        say(f"Nothing was written, and without --dry-run nothing would be: {refusal}.")
        return Exit.FAILED
    if dry_run and not json:
        instead = ", in place of the one that is there" if os.path.lexists(path) else ""
        say(f"Nothing was written; without --dry-run this goes to {NAME}{instead}.")
    elif not json:
        say(f"Wrote {NAME}{folder}. Next: reefknot config check, reefknot up.")
    return Exit.FINE


def _init_example(name: str, *, dry_run: bool, json: bool) -> int:
    """Write an example project into a new folder; one that is there already is kept as it is."""
    files, folder = example_files(name), Path.cwd() / f"{name}-app"
    refusal = f"{folder.name} exists already; move it away" if os.path.lexists(folder) else None
    if refusal and not dry_run:
        raise CommandError(refusal, Exit.FAILED)
    if not dry_run:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    if json:
        outcome = {"path": str(folder), "written": not dry_run, **({"refusal": refusal} if refusal else {})}
        put_json({**outcome, "files": files})
    elif dry_run:
        for path in files:
            put(f"{folder.name}/{path}")
    if refusal:
        say(f"Nothing was written, and without --dry-run nothing would be: {refusal}.")
        return Exit.FAILED
    if dry_run and not json:
        say("Nothing was written; without --dry-run these files are.")
    elif not json:
        first, second = (line.strip() for line in files["README.md"].splitlines() if line.startswith("    "))
        packages = re.findall(r"`(pip install [^`]+)`", files["README.md"])
        say(f"Wrote {folder.name}: {', '.join(files)}.")
        say(f"It needs reefknot and these packages: {packages[0]}")
        say(f"Next: cd {folder.name}, then in two terminals: {first}, and: {second}. README.md says more.")
    return Exit.FINE


def _refusal(path: Path, force: bool) -> str | None:
    """Why nothing can be written here; None when it can."""
    others = [one.name for one in path.parent.glob("reefknot.*") if one.suffix in (".yml", ".json", ".toml")]
    if others:
        return f"{' and '.join(sorted(others))} exists already, and a folder has one configuration; move it away"
    if os.path.lexists(path) and not force:
        return f"{NAME} exists already; move it away, or replace it with --force (--dry-run shows the new one)"
    return None


def _write(path: Path, text: str, force: bool) -> None:
    """Write the whole file or nothing. Without force, a file that was created meanwhile is kept."""
    if not force:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise CommandError(f"{NAME} was created meanwhile by another process, and was kept", Exit.FAILED) from None
        return
    fresh = path.with_name(f".{NAME}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


# ---- check -----------------------------------------------------------------------------------------------------------


def check_files(
    files: Iterable[str | None], *, json: bool, policies_only: bool = False, has_modules: bool = False
) -> int:
    """
    Check each file on its own; None is the one that would be found. One mistake anywhere makes the exit code 78.

    With `has_modules` the modules of one's own connectors are loaded: a connector that is not known then is a mistake.
    """
    results = [
        _check_file(name, json=json, policies_only=policies_only, has_modules=has_modules)
        for name in dict.fromkeys(files)
    ]
    ok = all(one["ok"] for one in results)
    if json:
        put_json({"ok": ok, "files": results})
    return Exit.FINE if ok else Exit.MISCONFIGURED


def _check_file(name: str | None, *, json: bool, policies_only: bool, has_modules: bool) -> dict[str, Any]:
    try:
        found = load(name)
        unknown = [] if policies_only else check_parts(found, strict=has_modules)
    except ConfigurationError as error:
        problems = str(error).splitlines()
        for line in problems:
            say(relative(line))
        return {"file": name, "ok": False, "problems": problems, "warnings": []}
    warnings = [] if policies_only else [*found.warnings, *unknown]
    for warning in warnings:
        say(f"warning: {warning}", level="warning")
    file = str(found.path) if name is None and found.path else name
    if not json:
        shown = "no configuration file, built-in values only" if file is None else relative(file)
        put(f"{shown}: OK: {_contents(found)}")
    return {"file": file, "ok": True, "problems": [], "warnings": warnings}


def check_parts(found: Settings, *, strict: bool = False) -> list[str]:
    """Check the settings of blocks, and of sources, each by its connector; `strict` is as there. Returns warnings."""
    if found.configuration.written & {"blocks", "audit"}:
        from reefknot.app.blocks import block_settings

        block_settings(found)  # refuses what blocks cannot read, and files that are taken
    if not found.configuration.sources:
        return []
    from reefknot.ingest.configured_sources import check_sources

    return [relative(warning) for warning in check_sources(found, strict=strict)]


def _contents(found: Settings) -> str:
    configuration = found.configuration
    counts = (
        (len(configuration.worker.retries.v2.block_policies), "block"),
        (len(configuration.retry_policies), "connector"),
        (len(configuration.operations), "operation"),
        (len(configuration.sources), "source"),
    )
    parts = ", ".join(plural(count, noun) for count, noun in counts)
    retries, queue = ("on" if gate else "off" for gate in (found.retries_gate, found.queue_gate))
    return f"{parts}; worker.retries.v2 {retries}, worker.queue.v2 {queue}"


# ---- commands --------------------------------------------------------------------------------------------------------

app = noun("config", "config check")

DEFAULT = "default"


def _lines_of(name: str) -> list[str]:
    """The dotted name of a setting, in lines that leave room for its value, broken after a dot."""
    lines, most = [""], max(36, table_width() - 60)
    for part in name.replace(".", ".\n").splitlines():
        if len(lines[-1] + part) > most:
            lines.append("  ")
        lines[-1] += part
    return lines


@app.command(name="show", help_epilogue=examples("config show --json"))
def show_config(*, common: CommonFlags = COMMON) -> None:
    """Show every setting in force with the source that set it. Secrets are hidden."""
    found = settings(common.config)
    values = list(_values(found))
    gates = {"worker.retries.v2": found.retries_gate, "worker.queue.v2": found.queue_gate}
    data = {
        "path": None if found.path is None else str(found.path),
        "gates": {name: {"on": gate.on, "said_by": gate.origin} for name, gate in gates.items()},
        "values": {name: {"value": value, "source": source} for name, value, source in values},
    }

    def text() -> None:
        put(f"file: {'none, built-in values only' if found.path is None else relative(str(found.path))}")
        for name, gate in gates.items():
            put(f"gate {name}: {'on' if gate else 'off'} ({relative(gate.origin)})")
        put()
        rows = [(_lines_of(name), json_text(value), relative(source)) for name, value, source in values]
        put_table(("setting", "value", "source"), rows, styles=("cyan", "bold"), whole=("setting",))

    show(data, text, json=common.json)


def _values(found: Settings) -> Iterator[tuple[str, Any, str]]:
    """Name, value and source of every setting. An unset one without a default is left out: what is built in for the
    target holds then, and `policy list` shows it."""
    tree = found.tree
    for path, value in _leaves(plain(found.configuration), ()):
        written = path in tree.marks
        if value is not None or written:
            yield dotted(path), shown_value(path, value), str(tree.mark(path)) if written else DEFAULT
    if found.configuration.engine is None:
        yield "engine", DEFAULT_URL, DEFAULT


_MODULES = "Module (app.sources) or file (sources.py) of your own connectors, which check their settings; repeatable."


@app.command(help_epilogue=examples("config check reefknot.yaml", "config check --module team_wiki.py"))
def check(
    file: Annotated[FileName | None, file_arg("File to check. Default: the one that would be found.")] = None,
    /,
    *,
    module: Annotated[list[FileName] | None, file_arg(_MODULES, "--module")] = None,
    common: CommonFlags = COMMON,
) -> int:
    """Check a whole file and report every mistake with its line. Exits with 78 when there is one."""
    _import_modules(module or ())
    named = [file if file is not None else common.config]
    return check_files(named, json=common.json, has_modules=bool(module))


def _import_modules(names: Iterable[str]) -> None:
    """Import modules, so that their connectors are known. A module of steps is fine, too: `up` is given all of them."""
    from reefknot.runtime.user_modules import import_user_module

    with prints_to_stderr():  # a module may print when it is imported
        for name in names:
            import_user_module(name, path=os.getcwd())


@app.command(help_epilogue=examples("config schema > reefknot.schema.json", "config schema --of assignment"))
def schema(
    *,
    of: Annotated[str, arg("Format to describe: configuration, assignment or result. Default: configuration.")] = (
        "configuration"
    ),
    json: Json = False,
) -> None:
    """Print the JSON Schema of a format, for editors and checks. The output is JSON with or without --json."""
    del json
    put_json(one_of("--of", of, _SCHEMAS)())


def _assignment_schema() -> dict[str, Any]:
    from reefknot.queue.model.message_schema import assignment_schema

    return assignment_schema()


def _result_schema() -> dict[str, Any]:
    from reefknot.queue.model.message_schema import result_schema

    return result_schema()


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value that contains no other; an empty mapping is skipped."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from _leaves(inner, (*path, key))
        case list() if any(isinstance(item, dict | list) for item in value):
            for index, item in enumerate(value):
                yield from _leaves(item, (*path, index))
        case _:
            yield path, value


# ---- the JSON Schema of a file ---------------------------------------------------------------------------------------

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "pattern": "pattern",
    "min_length": "minLength",
    "max_length": "maxLength",
}
_ABOUT = {"description": "description", "examples": "examples"}
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def configuration_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file, for editors and checks."""
    from reefknot.policy.schema import Configuration

    sections: dict[str, Any] = {}
    whole = _section_schema(Configuration, sections)
    return {"$schema": _DIALECT, "$defs": dict(sorted(sections.items())), **whole}


def _section_schema(kind: type[Section], sections: dict[str, Any]) -> dict[str, Any]:
    about = kind.__dict__.get("__doc__")
    schema: dict[str, Any] = {"additionalProperties": takes_own(kind)}
    if about:
        schema["description"] = cleandoc(about)
    schema["properties"] = {name: _key_schema(kind, name, one, sections) for name, one in keys_of(kind).items()}
    needed = required(kind)
    return schema | ({"required": list(needed)} if needed else {}) | {"title": kind.__name__, "type": "object"}


def _key_schema(section: type[Section], name: str, kind: Any, sections: dict[str, Any]) -> dict[str, Any]:
    schema = _value_schema(kind, sections)
    if name not in required(section):
        default = _default(section, name)
        schema["default"] = (
            {one: _in_order(item) for one, item in default.items()} if type(default) is dict else default
        )
    if not any("$ref" in one for one in schema.get("anyOf", [schema])):  # a section has a title of its own
        schema["title"] = name.replace("_", " ").title()
    return dict(sorted(schema.items()))


def _default(section: type[Section], name: str) -> Any:
    given = section.__struct_defaults__[section.__struct_fields__.index(name) - len(section.__struct_fields__)]
    return plain(given.factory() if hasattr(given, "factory") else given)


def _in_order(value: Any) -> Any:
    return {name: _in_order(item) for name, item in sorted(value.items())} if isinstance(value, Mapping) else value


def _value_schema(kind: Any, sections: dict[str, Any]) -> dict[str, Any]:
    """The schema of one kind of value; a section is kept in `sections` and referred to."""
    origin = get_origin(kind)
    if origin is Annotated:
        schema = _value_schema(kind.__origin__, sections)
        metas = [one for one in kind.__metadata__ if isinstance(one, Meta)]
        limits = {word: limit for one in metas for word, limit in _stated(one, _LIMITS).items()}
        if "anyOf" in schema:
            schema["anyOf"][0] = dict(sorted((schema["anyOf"][0] | limits).items()))
        else:
            schema |= limits
        for one in metas:
            schema |= _stated(one, _ABOUT) | (one.extra_json_schema or {})
        return dict(sorted(schema.items()))
    if origin in (Union, UnionType):
        kinds = [_value_schema(one, sections) for one in get_args(kind)]
        return {"anyOf" if NoneType in get_args(kind) else "oneOf": kinds}
    if origin is Literal:
        return {"enum": list(get_args(kind)), "type": "string"}
    if origin is list:
        return {"items": _value_schema(get_args(kind)[0], sections), "type": "array"}
    if origin is dict:
        names, values = get_args(kind)
        schema = {"additionalProperties": _value_schema(values, sections) or True}
        accepted = {"propertyNames": {"enum": list(get_args(names))}} if get_args(names) else {}
        return schema | accepted | {"type": "object"}
    if kind is Any or kind is NoneType:
        return {} if kind is Any else {"type": "null"}
    if issubclass(kind, Section):
        if kind.__name__ not in sections:
            sections[kind.__name__] = _section_schema(kind, sections)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return {"type": _JSON_TYPES[kind]}


def _stated(meta: Meta, names: Mapping[str, str]) -> dict[str, Any]:
    return {word: value for name, word in names.items() if (value := getattr(meta, name)) is not None}


_SCHEMAS = {"configuration": configuration_schema, "assignment": _assignment_schema, "result": _result_schema}
