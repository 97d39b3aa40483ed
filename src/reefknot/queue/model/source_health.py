"""
The health of a source: how many of its jobs may run now, and whether a failure spends an attempt.

    healthy ──(transient failures in a row, of several jobs)──▶ resting ──(rest is over)──▶ probing, one job at a time
       ▲                                                          ▲                             │
       └──(every job may run)── recovering ◀──(a probe succeeds)──┼─────────────────────────────┤
                                     └──────(a transient failure)─┴──────(a probe fails)────────┘

An outage is not the fault of the jobs that meet it: while a source is not healthy, transient failures spend no
attempts. A job is to blame itself once it has failed and the source has answered others since: its failures spend
attempts and do not open the breaker, so a few bad jobs that are left alone cannot pass for an outage.

A failure of the source itself (its listing fails, it refuses connections) needs no second job: a source has one sync.
A few of those in a row open the breaker, whichever job met them. `max_outage_ms` bounds how long a job waits.

A source that limits its rate *cools* until the time it asked for: none of its jobs is begun. A permanent failure is an
answer: the source works. The state is a value that all processes share; time is an argument.
"""

from enum import StrEnum

from msgspec import Struct, structs

LONGEST_COOLING_MS = 86_400_000
"""The longest time for which a source cools, whatever it asks for."""
ANSWERED_EVERY_MS = 60_000
"""How often the time of the last answer is written while nothing else changes."""
NO_ANSWER = "the source did not answer"
"""The beginning, up to the colon, of the quarantine reason of a job that has waited for its source for too long."""
LONGEST_PROBE_MS = 600_000
"""Milliseconds without a report after which a probe counts as lost and another one may begin."""


class SourceCondition(StrEnum):
    """The condition of a source, as people see it."""

    HEALTHY = "healthy"
    COOLING = "cooling"
    RESTING = "resting"
    PROBING = "probing"
    RECOVERING = "recovering"
    PAUSED = "paused"


class HealthRules(Struct, frozen=True):
    """The rules of health: when a source counts as down, and how it recovers."""

    failures: int = 5
    """Transient failures in a row …"""
    jobs: int = 2
    """… of at least this number of jobs."""
    source_failures: int = 3
    """Failures in a row of the source itself, whichever job met them."""
    rest_ms: int = 30_000
    """The first rest; each failed probe doubles it, up to the longest."""
    longest_rest_ms: int = 900_000
    max_outage_ms: int = 86_400_000
    """The longest time for which one job waits for a source that does not answer, or limits its rate."""
    enabled: bool = True


class SourceHealth(Struct, frozen=True, omit_defaults=True):
    """The state of one source. Times are milliseconds UTC, 0 for none."""

    paused: bool = False
    cools_until: int = 0
    cooling_reason: str = ""
    failures: int = 0
    failed_jobs: tuple[str, ...] = ()
    source_failures: int = 0
    failing_since: int = 0
    """The first failure, or limit, since the last answer."""
    rests_until: int = 0
    rests: int = 0
    """Rests since the source was last healthy."""
    probed_at: int = 0
    slow_start: int = 0
    """The number of jobs that may run at once while the source recovers; 0 when it does not."""
    answered_at: int = 0
    """The time of the last answer, to within `ANSWERED_EVERY_MS`."""

    def condition(self, now: int) -> SourceCondition:
        if self.paused:
            return SourceCondition.PAUSED
        if now < self.cools_until:
            return SourceCondition.COOLING
        if now < self.rests_until:
            return SourceCondition.RESTING
        if self.slow_start:
            return SourceCondition.RECOVERING
        return SourceCondition.PROBING if self.rests else SourceCondition.HEALTHY

    def opens_at(self, now: int) -> int | None:
        """The time at which jobs may begin again; None when they may now, or when only a person can change that."""
        until = max(self.cools_until, self.rests_until)
        return until if until > now and not self.paused else None


def free_places(health: SourceHealth, now: int, *, running: int, limit: int) -> int:
    """The number of jobs that may begin now, in addition to the `running` ones, up to `limit` in all."""
    condition = health.condition(now)
    if condition is SourceCondition.PROBING:
        is_probed = health.probed_at and now < health.probed_at + LONGEST_PROBE_MS
        return 0 if running or is_probed else 1
    if condition is SourceCondition.RECOVERING:
        return max(0, min(limit, health.slow_start) - running)
    return max(0, limit - running) if condition is SourceCondition.HEALTHY else 0


def probe_begun(health: SourceHealth, now: int) -> SourceHealth:
    """The state with a probe under way; a source that needs none stays as it is."""
    if health.condition(now) is SourceCondition.PROBING:
        return structs.replace(health, probed_at=now)
    return health


def probe_released(health: SourceHealth) -> SourceHealth:
    """The state after a probe that says nothing about the source: it was interrupted, or its failure has no type."""
    return structs.replace(health, probed_at=0) if health.probed_at else health


def is_to_blame(health: SourceHealth, first_attempt_at: int | None) -> bool:
    """Whether a job has failed (first at that time), and the source has answered others since."""
    return first_attempt_at is not None and health.answered_at > first_attempt_at


def spends_attempt(health: SourceHealth, first_attempt_at: int | None) -> bool:
    """Whether a transient failure counts against its job: while the source counts as down, it rarely does."""
    return not health.rests or is_to_blame(health, first_attempt_at)


def after_answer(health: SourceHealth, now: int, *, limit: int) -> SourceHealth:
    """The state after the source has answered a job: with a page, or with a refusal of that job alone."""
    slow_start = health.slow_start + 1
    if not health.rests:
        is_quiet = not health.failures and not health.failing_since
        if is_quiet and now < health.answered_at + ANSWERED_EVERY_MS:
            return health
        slow_start = 0
    is_back = slow_start > limit
    return structs.replace(
        health,
        failures=0,
        failed_jobs=(),
        source_failures=0,
        failing_since=0,
        rests=0 if is_back else health.rests,
        rests_until=0,
        probed_at=0,
        slow_start=0 if is_back else slow_start,
        answered_at=now,
    )


def after_outage(
    health: SourceHealth,
    job_id: str,
    now: int,
    rules: HealthRules,
    *,
    first_attempt_at: int | None = None,
    of_source: bool = False,
) -> SourceHealth:
    """The state after a transient failure that this job met; `of_source`, it is a failure of the source itself."""
    if not rules.enabled or (not of_source and not health.rests and is_to_blame(health, first_attempt_at)):
        return health
    jobs = health.failed_jobs
    if job_id not in jobs and len(jobs) < rules.jobs:
        jobs = (*jobs, job_id)
    failed = structs.replace(
        health,
        failures=health.failures + 1,
        failed_jobs=jobs,
        source_failures=health.source_failures + of_source,
        failing_since=health.failing_since or now,
    )
    if now < health.rests_until:  # a job that began before the rest
        return failed
    by_jobs = failed.failures >= rules.failures and len(jobs) >= rules.jobs
    if not health.rests and not by_jobs and failed.source_failures < rules.source_failures:
        return failed
    rest = min(rules.longest_rest_ms, rules.rest_ms << min(health.rests, 30))
    return structs.replace(failed, rests=health.rests + 1, rests_until=now + rest, probed_at=0, slow_start=0)


def outage_is_too_long(health: SourceHealth, waits_since: int, now: int, rules: HealthRules) -> bool:
    """Whether a job that has waited since then is past the longest wait for a source that does not answer."""
    return bool(health.failing_since) and now - max(health.failing_since, waits_since) > rules.max_outage_ms


def cooled(health: SourceHealth, until: int, now: int, reason: str) -> SourceHealth:
    """
    The state of a source that cools until then, at most `LONGEST_COOLING_MS` from now; a longer cooling in force is
    kept.
    """
    until = min(until, now + LONGEST_COOLING_MS)
    if until <= health.cools_until:
        return health
    since = health.failing_since or now
    return structs.replace(health, cools_until=until, cooling_reason=reason, probed_at=0, failing_since=since)
