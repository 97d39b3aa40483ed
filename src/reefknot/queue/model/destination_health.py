"""
The health of a destination: whether a worker may call it now, and whether a failure spends an attempt.

    closed ──(failures in a row of several jobs, or half of many calls)──▶ open ──(rest is over)──▶ half-open: one probe
      ▲                                                                     ▲                          │
      └──(enough calls at once)── half-open: slow start ◀──(it answers)─────┼──────────────────────────┤
                                             └───────────(a call fails)─────┴──────(the probe fails)───┘

An outage is not the fault of the jobs that meet it: while a destination is not closed, its transient failures spend no
attempts, and jobs for it wait. A failure counts against its job once the destination has answered since the job's first
failure.

The state is a value, time is an argument (seconds of the worker's clock), and every change can be computed again from
an audit event.
"""

from msgspec import Struct, structs

from reefknot.core.breaker import BreakerState, Permit, Refused

LEAST_WAIT = 0.01
"""Least wait: due times are rounded, so a shorter one would be no wait."""
SHORTEST_PAUSE = 0.5
LONGEST_PAUSE = 5.0
"""Bounds of the wait of a job that finds a probe under way: it waits as long again as the probe has taken."""
SLOW_START_PAUSE = 0.25
"""The wait of a job that finds as many calls under way as the slow start allows."""


class DestinationRules(Struct, frozen=True, omit_defaults=True):
    """The rules of health: when a destination counts as down, and how it recovers. Times are in seconds."""

    enabled: bool = True
    failures: int = 10
    """Transient failures in a row …"""
    jobs: int = 3
    """… of at least this number of jobs …"""
    within: float = 300.0
    """… within this time."""
    calls: int = 100
    """Least number of calls in ten seconds for which half of them failing opens the breaker."""
    rest: float = 1.0
    """The first rest; each failed probe doubles it, up to the longest."""
    longest_rest: float = 60.0
    at_once: int = 8
    """The slow start is over with this number of answers."""
    max_outage: float = 86_400.0
    """The longest time that a job waits for a destination."""


class DestinationHealth(Struct, frozen=True, omit_defaults=True):
    """The state of one destination. Times are seconds of the worker's clock, 0 for none."""

    failed_at: tuple[float, ...] = ()
    """The last failures since the last answer, as many as the rules count."""
    failed_jobs: tuple[tuple[str, float], ...] = ()
    """The last jobs that failed, each with its last failure."""
    rests: int = 0
    """Rests in a row; not 0 until the slow start is over."""
    rests_until: float = 0.0
    probed_at: float = 0.0
    slow_start: int = 0
    """The calls that may be made at once while the destination recovers; 0 otherwise."""
    generation: int = 0
    """Raised by each opening and each probe, to distinguish a late report from a current one."""

    def state(self, now: float) -> BreakerState:
        if not self.rests:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.rests_until else BreakerState.HALF_OPEN


class Traffic(Struct, frozen=True, omit_defaults=True):
    """The calls of the last ten seconds, and whether their failures say something about the destination."""

    calls: int = 0
    failed: int = 0
    may_open: bool = True
    """False: only one of several tenants fails."""


def admitted(
    health: DestinationHealth, now: float, rules: DestinationRules, *, running: int
) -> tuple[DestinationHealth, Permit | Refused]:
    """The answer to a job that wants to call, and the state after it; `running` calls of this generation are out."""
    if not health.rests:
        return health, Permit(health.generation)
    if now < health.rests_until:
        return health, Refused(max(LEAST_WAIT, health.rests_until - now))
    if health.slow_start:
        is_free = running < health.slow_start
        return health, Permit(health.generation) if is_free else Refused(SLOW_START_PAUSE)
    if health.probed_at and now < health.probed_at + rules.longest_rest:
        return health, Refused(min(LONGEST_PAUSE, max(SHORTEST_PAUSE, now - health.probed_at)))
    probed = structs.replace(health, probed_at=now, generation=health.generation + 1)
    return probed, Permit(probed.generation, probe=True)


def answered(health: DestinationHealth, permit: Permit, rules: DestinationRules) -> DestinationHealth:
    """The state after the destination has answered: with a result, or with a refusal of that job alone."""
    if permit.generation != health.generation:
        return health
    if not health.rests:
        return structs.replace(health, failed_at=(), failed_jobs=()) if health.failed_at else health
    if health.slow_start >= rules.at_once:
        return DestinationHealth(generation=health.generation)
    return structs.replace(health, slow_start=health.slow_start + 1, rests_until=0.0, probed_at=0.0)


def failed(
    health: DestinationHealth, permit: Permit, now: float, rules: DestinationRules, *, job: str, traffic: Traffic
) -> DestinationHealth:
    """The state after a transient failure of this job. A call from before the last change is ignored."""
    if permit.generation != health.generation or not rules.enabled:
        return health
    if health.rests:  # a failure in the slow start begins with the first rest, because the destination did answer
        return _opened(health, now, rules, rests=1 if health.slow_start else health.rests + 1)
    times = (*health.failed_at, now)[-rules.failures :]
    jobs = (*((one, at) for one, at in health.failed_jobs if one != job), (job, now))[-rules.jobs :]
    counted = structs.replace(health, failed_at=times, failed_jobs=jobs)
    is_recent = now - min(times[0], jobs[0][1]) < rules.within
    in_a_row = len(times) == rules.failures and len(jobs) == rules.jobs and is_recent
    is_half = traffic.calls >= rules.calls and 2 * traffic.failed >= traffic.calls
    return _opened(counted, now, rules, rests=1) if traffic.may_open and (in_a_row or is_half) else counted


def released(health: DestinationHealth, permit: Permit) -> DestinationHealth:
    """The state after a call that says nothing about the destination: it was cancelled, or ran out of its own time."""
    is_probe = permit.probe and permit.generation == health.generation
    return structs.replace(health, probed_at=0.0) if is_probe else health


def resumed(health: DestinationHealth, rules: DestinationRules, *, since: float, until: float) -> DestinationHealth:
    """The state for a worker that starts, derived from a job that has waited `since` then `until` the next probe."""
    rests = 1
    while rest_of(rests, rules) < rules.longest_rest and (2**rests - 1) * rules.rest < until - since:
        rests += 1
    return structs.replace(health, rests=max(rests, health.rests), rests_until=max(until, health.rests_until))


def spends_attempt(health: DestinationHealth, first_attempt_at: float | None, answered_at: float) -> bool:
    """
    Whether a transient failure counts against its job: only if the destination has answered since the first attempt.
    """
    return not health.rests or (first_attempt_at is not None and answered_at > first_attempt_at)


def rest_of(rests: int, rules: DestinationRules) -> float:
    """The length of this rest, counted from 1."""
    return min(rules.longest_rest, rules.rest * 2.0 ** min(rests - 1, 60))


class BreakerInputs(Struct, frozen=True, omit_defaults=True):
    """All inputs of a decision about a destination: an admission, or with `permit` a report."""

    at: float
    rules: DestinationRules = DestinationRules()
    health: DestinationHealth = DestinationHealth()
    """The state before."""
    running: int = 0
    permit: Permit | None = None
    """The permit of the reported call."""
    ok: bool = False
    job: str = ""
    traffic: Traffic = Traffic()

    def admitted(self) -> tuple[DestinationHealth, Permit | Refused]:
        return admitted(self.health, self.at, self.rules, running=self.running)

    def reported(self, permit: Permit) -> DestinationHealth:
        if self.ok:
            return answered(self.health, permit, self.rules)
        return failed(self.health, permit, self.at, self.rules, job=self.job, traffic=self.traffic)

    def decided(self) -> tuple[BreakerState, float | None, float | None]:
        """The state that follows, the seconds until the next probe if the breaker opened, and those of a job's wait."""
        if self.permit is None:
            after, answer = self.admitted()
            return after.state(self.at), None, answer.retry_after if isinstance(answer, Refused) else None
        after = self.reported(self.permit)
        state = after.state(self.at)
        return state, after.rests_until - self.at if state is BreakerState.OPEN else None, None


def _opened(health: DestinationHealth, now: float, rules: DestinationRules, *, rests: int) -> DestinationHealth:
    return DestinationHealth(rests=rests, rests_until=now + rest_of(rests, rules), generation=health.generation + 1)
