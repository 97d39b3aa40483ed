"""
Wiring: stores, managers and the running system, built by plain constructor calls.

The only package that knows every class; no part finds another by itself. The system of router and workers is in
`app.system`, which is loaded only by programs that run one.
"""

from reefknot.app.managers import IdempotencyManager, RetryManager, get_retry_manager, open_manager
from reefknot.app.stores import open_audit_log, open_store

__all__ = ["IdempotencyManager", "RetryManager", "get_retry_manager", "open_audit_log", "open_manager", "open_store"]
