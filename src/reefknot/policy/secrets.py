"""
Secrets by reference: `env:NAME` and `file:PATH`.

A configuration names where a secret is, never the secret. A resolved one is wrapped so that showing, logging or
encoding it by accident shows nothing, and no message here holds a value.
"""

import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from reefknot.policy.layers import Tree
from reefknot.policy.reading.session import UNFIT_DECODED, Mark, Problem, UnreadableError, dotted, read_small, shortened

MOST_SECRET_BYTES = 64 * 1024
ACCEPTED = "a reference: env:NAME or file:PATH"
NATS_SECRETS = ("token", "password")
"""Keys of the section `nats` that name a secret."""
WEBHOOK = ("alerts", "webhook")
"""A key that names a secret or holds it: anyone who knows the address of a webhook can post to it."""
WEBHOOK_PLACE = "config:alerts.webhook"
"""The reference to a webhook whose address is written out in the configuration."""
SECRET_KEYS = (
    *(("nats", name) for name in NATS_SECRETS),
    ("dashboard", "operator_token"),
    ("dashboard", "reader_token"),
    WEBHOOK,
)
"""Keys outside of the section `secrets` that name a secret."""


class SecretText:
    """A text that does not show itself; `reveal` returns it."""

    __slots__ = ("__text",)

    def __init__(self, text: str) -> None:
        self.__text = text

    def reveal(self) -> str:
        """The secret itself, for the call that needs it."""
        return self.__text

    def __repr__(self) -> str:
        return "SecretText('***')"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretText):
            return NotImplemented
        return hmac.compare_digest(self.__text.encode(), other.__text.encode())

    __hash__ = None  # type: ignore[assignment] # a hash would say something about the text

    def __copy__(self) -> "SecretText":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "SecretText":
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret is not pickled; send its reference")


def is_reference(text: object) -> TypeGuard[str]:
    """Whether the text has the form of a reference."""
    return isinstance(text, str) and text.startswith(("env:", "file:")) and text.partition(":")[2] != ""


def resolve(
    reference: object, *, environ: Mapping[str, str], folder: str | os.PathLike[str], mark: Mark, path: str = ""
) -> SecretText | Problem:
    """The secret behind a reference, or the mistake. A file's path is beneath the configuration's folder."""
    if not is_reference(reference):
        return Problem(mark, path, f"is not {ACCEPTED}")
    try:
        return SecretText(_text(reference, environ, folder))
    except UnreadableError as error:
        return Problem(mark, path, f"{shortened(reference, 200)}: {error}")


def _text(reference: str, environ: Mapping[str, str], folder: str | os.PathLike[str]) -> str:
    kind, _, name = reference.partition(":")
    if kind == "env" and name not in environ:
        raise UnreadableError("there is no such environment variable")
    text = environ[name] if kind == "env" else _decoded(read_small(Path(folder, name), MOST_SECRET_BYTES))
    if text is None:
        raise UnreadableError("the file is not UTF-8 text")
    if not text:
        raise UnreadableError("is empty")
    if UNFIT_DECODED.search(text):
        raise UnreadableError("holds a NUL or what is not UTF-8")
    return text


def _decoded(data: bytes) -> str | None:
    """The text without its one trailing line break. The decoder's error holds the bytes, so it ends here."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def secret_texts(
    tree: Tree, path: Path | None, *, environ: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[Problem, ...]]:
    """
    The texts of all secrets that can be read, for redaction, and the mistakes in the others.

    `tree` and `path` are those of `load_tree` or `Settings`. Whether a mistake ends the process is the caller's choice.
    """
    folder = Path.cwd() if path is None else path.parent
    found, problems = resolve_section(tree, environ=environ, folder=folder)
    texts = [secret.reveal() for secret in found.values()]
    for key in SECRET_KEYS:
        outcome = resolve_at(tree, key, environ=environ, folder=folder)
        if isinstance(outcome, Problem):
            problems += (outcome,)
        elif outcome is not None:
            texts.append(outcome.reveal())
    return tuple(texts), problems


def resolve_at(
    tree: Tree, path: tuple[str, ...], *, environ: Mapping[str, str], folder: str | os.PathLike[str]
) -> SecretText | Problem | None:
    """The secret that is named at one place of the configuration; None when there is nothing."""
    written: Any = tree.value
    for name in path:
        written = written.get(name) if isinstance(written, dict) else None
    if written is None:
        return None
    if path == WEBHOOK and isinstance(written, str) and not is_reference(written):
        return SecretText(written)
    return resolve(written, environ=environ, folder=folder, mark=tree.mark(path), path=dotted(path))


def webhook_reference(tree: Tree) -> str | None:
    """
    The reference that a payload has in place of the webhook's address; None when there is no webhook.

    A payload is stored and shown to shells that do not know the address and so cannot redact it.
    """
    section = tree.value.get("alerts")
    written = section.get("webhook") if isinstance(section, dict) else None
    return written if written is None or is_reference(written) else WEBHOOK_PLACE


def resolve_section(
    tree: Tree, *, environ: Mapping[str, str], folder: str | os.PathLike[str]
) -> tuple[dict[str, SecretText], tuple[Problem, ...]]:
    """The secrets of `secrets` by name, and every mistake in that section."""
    written = tree.value.get("secrets")
    if written is not None and not isinstance(written, dict):
        return {}, (tree.problem(("secrets",), f"is a mapping of names, each to {ACCEPTED}"),)
    found: dict[str, SecretText] = {}
    problems: list[Problem] = []
    for name, reference in (written or {}).items():
        path = ("secrets", name)
        outcome = resolve(reference, environ=environ, folder=folder, mark=tree.mark(path), path=dotted(path))
        if isinstance(outcome, Problem):
            problems.append(outcome)
        else:
            found[name] = outcome
    return found, tuple(problems)
