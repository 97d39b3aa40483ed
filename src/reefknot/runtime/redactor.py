"""
The redactor of this process: removes the secrets that a running worker was configured with, wherever text leaves.

A step that uses `@retry` or `@idempotent` knows nothing of the worker's configuration, and neither do the decorators.
Their log lines, recorded failures and events pass here, so that what the configuration calls secret stays in, whether
or not `secrets=` was said. One redactor for all threads: steps that are plain functions run in threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache

from reefknot.core.redaction import Redactor

_known: Counter[str] = Counter()
_process = Redactor()
_forgetting: list[Callable[[], None]] = []


def on_other_secrets(forget: Callable[[], None]) -> None:
    """Call `forget` whenever the secrets of this process have changed: what was redacted before may show a new one."""
    _forgetting.append(forget)


def add_secrets(secrets: Iterable[str]) -> None:
    """Hide these texts in this process until `remove_secrets` is called with them."""
    _known.update(secrets)
    _renew()


def remove_secrets(secrets: Iterable[str]) -> None:
    """Undo one `add_secrets`; a text that another caller added as well stays hidden."""
    _known.subtract(secrets)
    _renew()


def _renew() -> None:
    global _process
    for secret in [one for one, count in _known.items() if count <= 0]:
        del _known[secret]
    if _process.secrets != frozenset(_known):
        _process = Redactor(_known)
        for forget in _forgetting:
            forget()


def process_redactor(own: Redactor | None = None) -> Redactor:
    """The redactor of the process, with the secrets of `own` as well."""
    if own is None or own.secrets <= _process.secrets:
        return _process
    return _combined(own.secrets | _process.secrets) if _process.secrets else own


@lru_cache(maxsize=16)
def _combined(secrets: frozenset[str]) -> Redactor:
    return Redactor(secrets)


def redact(text: str) -> str:
    """The text, cut to its bound, without secrets: by their context, and those of the process by their value."""
    return _process(text)
