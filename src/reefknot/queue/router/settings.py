"""
A router's settings: how much may wait, how patient it is, how long its claims hold.

The lease, the patience, and the times after which a worker is asked again are defined here; other times are in the
modules that use them.
"""

from typing import Any

from msgspec import Struct, structs

from reefknot.core.checks import seconds
from reefknot.core.limits import LimitRule
from reefknot.queue.model.admission import Rules
from reefknot.queue.model.submission import SubmissionRules

LEASE_S = 30.0
"""Seconds for which a router holds a submission after its last renewal."""
RENEWALS = 3
"""Renewals per lease: two in a row may fail without losing the claim."""
PATIENCE_S = 30.0
"""How long work waits for a worker that has its class, or knows its type, while only others are there."""
ACK_WITHIN_S = 10.0
"""Seconds without an ack after which an assignment is sent again, to the same or another worker."""
ASK_AGAIN_S = 15.0
"""Seconds between two questions to a worker for the result of an assignment that it accepted."""
LATE_S = 0.5
"""Seconds after the deadline in which the worker may still end an assignment, because it knows the last error. After
that the router ends it, and after `CALLER_LATE_S` the caller: whatever died, an answer comes within a second."""
CALLER_LATE_S = 0.75


class RouterSettings(Struct, frozen=True):
    """The settings of a router, given when it is built."""

    rules: Rules = Rules()
    """The bounds of its own queue. Whatever the policy says: what cannot come in is refused."""
    lease: float = LEASE_S
    patience: float = PATIENCE_S
    tenant_share: float = 0.5
    """The most places that one tenant may hold while others wait."""
    shared_subject: bool = False
    """Also send on the shared subject, for workers that send no heartbeats."""
    limits: tuple[LimitRule, ...] = ()
    """The limits of the fleet."""

    def __post_init__(self) -> None:
        for name in ("lease", "patience"):
            seconds(name, getattr(self, name), most=86_400)

    @property
    def renew_every(self) -> float:
        return self.lease / RENEWALS

    @property
    def submission_rules(self) -> SubmissionRules:
        """The rules by which the store admits submissions."""
        return SubmissionRules(self.rules.size, self.tenant_share, self.rules.max_wait_fraction, self.rules.preempt)


def settings_from(configuration: Any, rules: Rules, limits: tuple[LimitRule, ...] = ()) -> RouterSettings:
    """
    The settings that a checked configuration gives, over the rules of its workers' queues.

    `configuration` has the shape of the file; what its `router` section does not say is as the rules have it.
    """
    section = configuration.router
    changes: dict[str, Any] = {}
    if section.max_queue_size is not None:
        changes["size"] = section.max_queue_size
    if "max_wait_fraction" in section.written:
        changes["max_wait_fraction"] = section.max_wait_fraction
    return RouterSettings(
        rules=structs.replace(rules, **changes),
        lease=section.lease_seconds,
        patience=section.patience_seconds,
        tenant_share=section.tenant_share,
        shared_subject=section.shared_subject == "cp1",
        limits=limits,
    )
