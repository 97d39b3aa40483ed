"""`reefknot init`: a commented configuration to start from. It never overwrites a file unless told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from reefknot.cli.asking import Json, one_of
from reefknot.cli.exits import CommandError, Exit
from reefknot.cli.output import put, put_json, say

NAME = "reefknot.yaml"

app = App(
    name="init",
    help="Write a commented reefknot.yaml: the recommended policies, both v2 gates on. A file that is there stays.",
    help_epilogue="Examples:\n\n    reefknot init\n    reefknot init --template mailbox --dry-run",
)


@app.default
def init(
    *,
    force: Annotated[bool, Parameter(help="Replace a file that is there.")] = False,
    dry_run: Annotated[bool, Parameter(help="Print what would be written, and write nothing.")] = False,
    template: Annotated[str | None, Parameter(help="Write this template; `policy templates` lists them.")] = None,
    json: Json = False,
) -> int:
    """Write a commented reefknot.yaml into the current folder."""
    from reefknot.config.templates import TEMPLATES, recommended
    from reefknot.config.templates import template as text_of

    if template is None:
        text = recommended()
    else:
        text = text_of(one_of("--template", template, {one.replace("-", "_"): one for one in TEMPLATES}))
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
