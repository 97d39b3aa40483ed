"""
Proposals for the retry policy of a connector, computed from the counts of its telemetry.

`tune` asks a fixed list of questions and answers each with a `TuningAnswer`: a proposal within the bounds of the
configuration, an advice, nothing to change, or too few observations. Successes are counted by their number of
executions, not by failure type: where that matters, a rule takes the most cautious reading of the counts, or says that
it cannot tell. A person applies what is proposed.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

from msgspec import Struct

from reefknot.core.failure import FailureType
from reefknot.core.policy import RetryStrategy

LEAST = 50
"""Observations that a question needs for an answer."""
USELESS, WORTHWHILE = 0.02, 0.20
"""
Share of jobs that late retries rescue: at or below the first, they are not needed; at or above the second, more retries
would rescue more jobs.
"""
LEAST_GIVEN_UP = 10
MOST_LIMITED = 0.20
"""Share of executions that meet a rate limit."""
NEARLY_ALL, HARDLY_ANY = 0.95, 0.20
"""Share of retried jobs that succeed at the first retry."""
ONE_TYPE = 0.80
"""Share of retries from which on one group of failure types is taken for the cause of all."""
MORE_RETRIES = 2
MOST_RETRIES, MOST_TRANSIENT_RETRIES = 10, 20
LONGEST_BASE_DELAY, LONGEST_RATE_LIMIT_DELAY = 3600, 7200
WAIT_BY_FIELDS = frozenset(RetryStrategy) - {RetryStrategy.IMMEDIATE, RetryStrategy.NO_RETRY}
"""The strategies whose waits follow from the fields of the policy."""

_TRANSIENT, _LIMITED = FailureType.TRANSIENT.value, FailureType.RATE_LIMITED.value
_PERMANENT, _UNKNOWN = FailureType.PERMANENT.value, FailureType.UNKNOWN.value


class Verdict(StrEnum):
    """The kind of an answer."""

    PROPOSAL = "proposal"
    ADVICE = "advice"
    KEEP = "keep"
    NOT_ENOUGH_DATA = "not_enough_data"


class ConnectorCounts(Struct, frozen=True):
    """The counts of one connector. Mappings other than `successes` are by failure type."""

    successes: Mapping[int, int] = {}
    """Jobs that succeeded, by their number of executions."""
    failures: Mapping[str, int] = {}
    """Failed executions."""
    quarantined: Mapping[str, int] = {}
    retried_after: Mapping[str, int] = {}
    """Retries that ended, by the failure that caused them."""

    @property
    def jobs(self) -> int:
        """The jobs that ended: one that was requeued counts each time."""
        return sum(self.successes.values()) + sum(self.quarantined.values())

    @property
    def executions(self) -> int:
        return sum(self.successes.values()) + sum(self.failures.values())

    def rescued_after(self, retries: int) -> int:
        """The jobs that succeeded with more than this number of retries."""
        return sum(number for executions, number in self.successes.items() if executions - 1 > retries)

    def share_of_retries(self, types: frozenset[str]) -> float:
        """The share of these failure types among the causes of all retries."""
        total = sum(self.retried_after.values())
        return sum(self.retried_after.get(one, 0) for one in types) / total if total else 0.0

    def per_thousand(self, number: float) -> int:
        """A number of all jobs, as one of a thousand jobs."""
        return round(1000 * number / self.jobs)


class CurrentPolicy(Struct, frozen=True):
    """The policy in force, in the words of connectors: `max_attempts` counts retries."""

    strategy: str = RetryStrategy.EXPONENTIAL_BACKOFF
    max_attempts: int = 3
    transient_max_attempts: int | None = None
    base_delay_seconds: int = 60
    max_delay_seconds: int = 3600
    rate_limit_delay_seconds: int | None = None
    permanent_failures_no_retry: bool = True


class TuningAnswer(Struct, frozen=True, omit_defaults=True):
    """The answer to one question; a proposal names the field and its values."""

    question: str
    verdict: Verdict
    why: str
    effect: str = ""
    field: str = ""
    current: int | None = None
    proposed: int | None = None


def tune(counts: ConnectorCounts, policy: CurrentPolicy) -> list[TuningAnswer]:
    """The answers to all questions about one connector."""
    if counts.jobs < LEAST:
        return [_too_few("policy", counts.jobs, "jobs")]
    if policy.strategy == RetryStrategy.NO_RETRY:
        return [TuningAnswer("policy", Verdict.KEEP, "the strategy is no_retry: there are no retries to tune")]
    questions: tuple[Callable[[ConnectorCounts, CurrentPolicy], TuningAnswer], ...] = (
        _rate_limits,
        _first_wait,
        _unknown,
    )
    retries = [_number_of_retries(counts, group) for group in _groups(policy)]
    return [*retries, *(ask(counts, policy) for ask in questions)]


def proposed_values(findings: list[TuningAnswer]) -> dict[str, int]:
    """The proposals as the fields to write."""
    return {one.field: one.proposed for one in findings if one.proposed is not None}


# ---- the number of retries -------------------------------------------------------------------------------------------


class _Group(Struct, frozen=True):
    """Failure types that share a limit of retries."""

    field: str
    limit: int
    highest: int
    types: frozenset[str]


def _groups(policy: CurrentPolicy) -> list[_Group]:
    types = frozenset({_LIMITED, _UNKNOWN} if policy.permanent_failures_no_retry else {_LIMITED, _UNKNOWN, _PERMANENT})
    if policy.transient_max_attempts is None:
        return [_Group("max_attempts", policy.max_attempts, MOST_RETRIES, types | {_TRANSIENT})]
    return [
        _Group("max_attempts", policy.max_attempts, MOST_RETRIES, types),
        _transient(policy.transient_max_attempts),
    ]


def _transient(limit: int) -> _Group:
    return _Group("transient_max_attempts", limit, MOST_TRANSIENT_RETRIES, frozenset({_TRANSIENT}))


def _number_of_retries(counts: ConnectorCounts, group: _Group) -> TuningAnswer:
    question, given_up = f"retries ({group.field})", _given_up(counts, group)
    seen = counts.rescued_after(min(1, group.limit - 1)) + given_up
    if seen < LEAST:
        which = "jobs that needed more than one retry" if group.limit > 1 else "jobs that were retried"
        return _too_few(question, seen, which)
    for fewer in range(1, group.limit):
        rescued = counts.rescued_after(fewer)
        reached = rescued + given_up
        if reached >= LEAST and rescued <= USELESS * reached:
            return _fewer_retries(counts, group, fewer)
    if _TRANSIENT in group.types and counts.share_of_retries(frozenset({_TRANSIENT})) >= ONE_TYPE:
        group = _transient(group.limit)  # a limit of their own reaches further, and leaves the others alone
        given_up = _given_up(counts, group)
    rescued = counts.rescued_after(group.limit - 1)
    reached = rescued + given_up
    if reached < LEAST or given_up < LEAST_GIVEN_UP or rescued < WORTHWHILE * reached:
        text = f"of {reached} jobs that came to the last of {group.limit} retries, {rescued} succeeded by it"
        return TuningAnswer(question, Verdict.KEEP, f"{text}; too few for more retries, and earlier ones are needed")
    if counts.share_of_retries(group.types) < ONE_TYPE:
        text = f"{given_up} jobs failed all retries; which failure types late retries rescue is not counted"
        return TuningAnswer(question, Verdict.KEEP, text)
    return _more_retries(counts, group, question)


def _given_up(counts: ConnectorCounts, group: _Group) -> int:
    return sum(counts.quarantined.get(one, 0) for one in group.types)


def _fewer_retries(counts: ConnectorCounts, group: _Group, fewer: int) -> TuningAnswer:
    given_up, rescued = _given_up(counts, group), counts.rescued_after(fewer)
    saved = counts.per_thousand(given_up * (group.limit - fewer))
    return TuningAnswer(
        f"retries ({group.field})",
        Verdict.PROPOSAL,
        f"of {rescued + given_up} jobs that were not done after retry {fewer}, later ones rescued at most {rescued}",
        f"about {saved} executions fewer per 1,000 jobs; at most {counts.per_thousand(rescued)} more jobs per 1,000 in "
        "quarantine; a job that fails for good is reported earlier",
        group.field,
        group.limit,
        fewer,
    )


def _more_retries(counts: ConnectorCounts, group: _Group, question: str) -> TuningAnswer:
    given_up, rescued = _given_up(counts, group), counts.rescued_after(group.limit - 1)
    chance = rescued / (rescued + given_up)
    why = (
        f"the last of {group.limit} retries still rescued {rescued} of {rescued + given_up} jobs ({chance:.0%}), and "
        f"{given_up} went to quarantine"
    )
    if group.limit >= group.highest:
        text = f"{group.field} is the highest already; longer waits (max_delay_seconds) outlast longer outages"
        return TuningAnswer(question, Verdict.ADVICE, f"{why}; {text}")
    to = min(group.highest, group.limit + MORE_RETRIES)
    more = given_up * (1 - (1 - chance) ** (to - group.limit))
    return TuningAnswer(
        question,
        Verdict.PROPOSAL,
        why,
        f"about {counts.per_thousand(more)} more jobs rescued per 1,000, for {counts.per_thousand(more / chance)} more "
        "executions, if further retries succeed as often as the last; a job that fails for good is reported later",
        group.field,
        group.limit,
        to,
    )


# ---- waits, and failures without a type ------------------------------------------------------------------------------


def _rate_limits(counts: ConnectorCounts, policy: CurrentPolicy) -> TuningAnswer:
    question, limited = "waits after rate limits", counts.failures.get(_LIMITED, 0)
    if counts.executions < LEAST:  # counts that a process could not add in time
        return _too_few(question, counts.executions, "executions")
    share = limited / counts.executions
    why = f"{limited} of {counts.executions} executions met a rate limit ({share:.0%})"
    if share < MOST_LIMITED:
        return TuningAnswer(question, Verdict.KEEP, why)
    fewer_jobs = "fewer jobs at once help too: max_concurrency of its sources, or of the connector under `ingestion`"
    if policy.strategy not in WAIT_BY_FIELDS:
        text = f"the strategy {policy.strategy} does not wait by the fields of the policy: choose another one"
        return TuningAnswer(question, Verdict.ADVICE, f"{why}; {text}; {fewer_jobs}")
    wait = policy.rate_limit_delay_seconds or policy.base_delay_seconds
    if wait >= LONGEST_RATE_LIMIT_DELAY:
        return TuningAnswer(question, Verdict.ADVICE, f"{why}; the wait is the longest already; {fewer_jobs}")
    saved = min(limited, counts.retried_after.get(_LIMITED, 0))
    return TuningAnswer(
        question,
        Verdict.PROPOSAL,
        why,
        f"up to {counts.per_thousand(saved)} executions fewer per 1,000 jobs; a limited source cools twice as long, "
        f"unless it names a longer time itself; {fewer_jobs}",
        "rate_limit_delay_seconds",
        wait,
        min(LONGEST_RATE_LIMIT_DELAY, 2 * wait),
    )


def _first_wait(counts: ConnectorCounts, policy: CurrentPolicy) -> TuningAnswer:
    question, base = "the first wait", policy.base_delay_seconds
    rescued = counts.rescued_after(0)
    retried = rescued + sum(_given_up(counts, group) for group in _groups(policy))
    if retried < LEAST:
        return _too_few(question, retried, "jobs that were retried")
    first = counts.successes.get(2, 0)
    share = first / retried
    why = f"{first} of {retried} retried jobs succeeded at the first retry ({share:.0%})"
    if policy.strategy not in WAIT_BY_FIELDS:
        return TuningAnswer(question, Verdict.KEEP, f"{why}; the strategy {policy.strategy} has waits of its own")
    if counts.share_of_retries(frozenset({_LIMITED})) >= MOST_LIMITED:
        return TuningAnswer(question, Verdict.KEEP, f"{why}; too many of the retries wait for rate limits")
    if share >= NEARLY_ALL and base > 1:
        effect = f"a retried job is done about {base - base // 2} s earlier; look again, since a wait can be too short"
        return TuningAnswer(question, Verdict.PROPOSAL, why, effect, "base_delay_seconds", base, base // 2)
    longer = min(LONGEST_BASE_DELAY, policy.max_delay_seconds, 2 * base)
    if share <= HARDLY_ANY and rescued >= retried / 2 and longer > base:
        effect = (
            f"up to {counts.per_thousand(retried - first)} executions fewer per 1,000 jobs; a job that would have "
            f"succeeded at the first retry is done {longer - base} s later"
        )
        text = f"{why}, although {rescued} succeeded in the end"
        return TuningAnswer(question, Verdict.PROPOSAL, text, effect, "base_delay_seconds", base, longer)
    return TuningAnswer(question, Verdict.KEEP, why)


def _unknown(counts: ConnectorCounts, policy: CurrentPolicy) -> TuningAnswer:
    question, failed = "failures without a type", sum(counts.failures.values())
    if failed < LEAST:
        return _too_few(question, failed, "failed executions")
    unknown = counts.failures.get(_UNKNOWN, 0)
    why = f"{unknown} of {failed} failures are of no known type ({unknown / failed:.0%})"
    if unknown < failed / 2:
        return TuningAnswer(question, Verdict.KEEP, why)
    text = (
        "look at them with `quarantine list`, and let the connector raise SourceError with a FailureType: "
        "then permanent ones are not retried, and outages spend no attempts"
    )
    return TuningAnswer(question, Verdict.ADVICE, f"{why}; {text}")


def _too_few(question: str, seen: int, what: str) -> TuningAnswer:
    return TuningAnswer(question, Verdict.NOT_ENOUGH_DATA, f"not enough data: {seen} of {LEAST} {what}")
