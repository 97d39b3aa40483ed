"""
Reload of policies: the configuration of a running system is read again, and its workers follow the policies in it.

A book is replaced whole or not at all: a configuration with a mistake is refused, and the policies in force stay. Work
that has begun keeps the book it began under. Everything else in the configuration takes effect at the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from reefknot.audit.journal import Journal, envelope
from reefknot.audit.model.event import OperatorAction
from reefknot.errors import ConfigurationError
from reefknot.policy.check import other_changes
from reefknot.runtime.log import logger, printable

if TYPE_CHECKING:
    from reefknot.audit.copies import StoredBooks
    from reefknot.core.clock import Clock
    from reefknot.core.limits import LimitRule
    from reefknot.policy.model.book import Book
    from reefknot.policy.settings import Settings

Follow = Callable[["Book"], None]
"""Switches a worker, or the orchestrator, to another book."""
FollowLimits = Callable[["tuple[LimitRule, ...]"], None]

READ_S = 10.0
MOST_PROBLEMS = 50


class ReloadOutcome(Struct, frozen=True):
    """The outcome of the last reload, as a system's status shows it."""

    sequence: int
    """The last command that was answered, by this reload or an earlier one; 0 before the first."""
    book_hash: str
    """The book in force afterwards."""
    changed: bool = False
    problems: tuple[str, ...] = ()
    """The mistakes for which the configuration was refused."""
    at_next_start: tuple[str, ...] = ()
    """Sections with other changes, which are not in force yet."""
    new_limits: bool = False
    """Whether the limits of the fleet changed."""

    def sentence(self) -> str:
        """The outcome for people, without the problems."""
        if self.problems:
            return f"the configuration is refused; the policies of book {self.book_hash[:12]} stay in force"
        text = f"policies reloaded, book {self.book_hash[:12]}; work that has begun keeps its own"
        if not self.changed:
            text = f"the policies are unchanged, book {self.book_hash[:12]}"
        if self.new_limits:
            text += "; limits reloaded"
        later = ", ".join(self.at_next_start)
        return f"{text}; changes of {later} take effect at the next start" if later else text


class PolicyReload:
    """Reads the configuration again by `read`, and passes its book to the parts that use it."""

    def __init__(
        self, settings: Settings, read: Callable[[], Settings], *, books: StoredBooks, journal: Journal, clock: Clock
    ) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._read = read
        self._books = books
        self._journal = journal
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self.latest: ReloadOutcome | None = None

    async def once(
        self, followers: Sequence[Follow], limits: FollowLimits | None = None, *, actor: str, sequence: int = 0
    ) -> ReloadOutcome:
        """Reload, and audit the outcome. `limits` switches the router to other limits, where there is one."""
        async with self._one_at_a_time:
            before = self._settings.book.hash
            if self.latest is not None:  # a signal has no number and must not replace a command's answer
                sequence = max(sequence, self.latest.sequence)
            try:
                outcome = await self._reload(followers, limits, sequence)
            except Exception as error:
                outcome = ReloadOutcome(sequence, before, problems=_problems(error))
            for problem in outcome.problems:
                logger().error("reload: %s", printable(problem, most=1000))
            logger().log(40 if outcome.problems else 20, "reload: %s", outcome.sentence())
            await self._audit(actor, before, outcome)
            self.latest = outcome
            return outcome

    async def _reload(self, followers: Sequence[Follow], limits: FollowLimits | None, sequence: int) -> ReloadOutcome:
        async with asyncio.timeout(READ_S):
            found = await asyncio.to_thread(self._read)
        later = tuple(other_changes(self._settings.tree.value, found.tree.value))
        changed = found.book.hash != self._settings.book.hash
        if changed:
            await self._books.add(found.book)
            for follow in followers:
                follow(found.book)
            self._settings = msgspec.structs.replace(self._settings, book=found.book)
        new_limits = found.limits != self._limits
        if new_limits:
            self._limits = found.limits
            if limits is not None:
                limits(found.limits)
        return ReloadOutcome(sequence, found.book.hash, changed, at_next_start=later, new_limits=new_limits)

    async def _audit(self, actor: str, before: str, outcome: ReloadOutcome) -> None:
        details = {"book_hash": outcome.book_hash, "book_before": before, "problems": list(outcome.problems)}
        action = "policy.reload_refused" if outcome.problems else "policy.reload"
        event = OperatorAction(**envelope(wall=self._clock.wall()), actor=actor, action=action, details=details)
        try:
            await self._journal.write(event)
        except Exception as error:  # the policies are in force either way
            logger().error(
                "the reload took effect, but its audit event could not be written (%s)", printable(str(error), most=300)
            )


def _problems(error: Exception) -> tuple[str, ...]:
    if isinstance(error, ConfigurationError):
        return tuple(str(error).splitlines()[:MOST_PROBLEMS])
    if isinstance(error, TimeoutError):
        return (f"the configuration could not be read within {READ_S:g} s",)
    return (f"{type(error).__name__}: {error}",)
