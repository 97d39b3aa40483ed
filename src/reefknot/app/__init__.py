"""
Wiring: stores, managers and the running system, built by plain constructor calls.

The only package that knows every class; no part finds another by itself. The names below are loaded when they are first
used: a client of a store loads neither managers nor the system of router and workers, which is in `app.system`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reefknot.app.managers import IdempotencyManager, RetryManager, get_retry_manager, open_manager
    from reefknot.app.stores import open_audit_log, open_store

__all__ = ["IdempotencyManager", "RetryManager", "get_retry_manager", "open_audit_log", "open_manager", "open_store"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'reefknot.app' has no attribute {name!r}")
    home = "stores" if name in ("open_audit_log", "open_store") else "managers"
    return getattr(import_module(f"reefknot.app.{home}"), name)
