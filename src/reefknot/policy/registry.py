"""
`RetryPolicyRegistry`: the policies of connectors in their own words: retries, whole seconds, failure types.

`max_attempts` here counts retries, as connectors write it; only a resolved policy counts executions. The arithmetic is
the core's.
"""

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Self

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from reefknot.core.backoff import delay_before, draw
from reefknot.core.failure import FailureType
from reefknot.core.policy import Jitter, RetryPolicy, RetryStrategy
from reefknot.policy.check import checked
from reefknot.policy.dialects import problem_with, strategy_named
from reefknot.policy.layers import read_file
from reefknot.policy.model.defaults import CONNECTORS, OTHER_CONNECTORS, JobType
from reefknot.runtime import seeds


class ConnectorPolicy(BaseModel):
    """The retry policy of one connector, as it is written."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    connector_type: JobType | str
    strategy: RetryStrategy | str = RetryStrategy.EXPONENTIAL_BACKOFF
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    base_delay_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    max_delay_seconds: Annotated[int, Field(ge=1, le=86400)] = 3600
    jitter_factor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    backoff_multiplier: Annotated[float, Field(ge=1.0, le=10.0)] = 2.0
    transient_max_attempts: Annotated[int, Field(ge=1, le=20)] | None = None
    rate_limit_delay_seconds: Annotated[int, Field(ge=1, le=7200)] | None = None
    permanent_failures_no_retry: bool = True

    @model_validator(mode="after")
    def _base_within_cap(self) -> Self:
        if self.base_delay_seconds > self.max_delay_seconds:
            raise ValueError(
                f"base_delay_seconds={self.base_delay_seconds} is above max_delay_seconds={self.max_delay_seconds}"
            )
        return self

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, strategy: str) -> RetryStrategy | str:
        problem = problem_with(strategy)
        if problem:
            raise ValueError(problem)
        return strategy_named(strategy)

    def retries_for(self, failure_type: FailureType) -> int:
        """The number of retries for this kind of failure."""
        if self.strategy is RetryStrategy.NO_RETRY:
            return 0
        if failure_type is FailureType.PERMANENT and self.permanent_failures_no_retry:
            return 0
        if failure_type is FailureType.TRANSIENT and self.transient_max_attempts is not None:
            return self.transient_max_attempts
        return self.max_attempts

    def resolved(self, failure_type: FailureType = FailureType.UNKNOWN) -> RetryPolicy:
        """The core's policy for one kind of failure, in executions and seconds."""
        base = self.base_delay_seconds
        if failure_type is FailureType.RATE_LIMITED and self.rate_limit_delay_seconds is not None:
            base = self.rate_limit_delay_seconds
        retries = self.retries_for(failure_type)
        return RetryPolicy(
            retries + 1,
            float(base),
            max_delay=float(max(self.max_delay_seconds, base)),
            multiplier=self.backoff_multiplier,
            strategy=self.strategy,
            jitter=Jitter.PROPORTIONAL if self.jitter_factor else Jitter.NONE,
            jitter_factor=self.jitter_factor,
            retryable=retries > 0,
            whole_seconds=True,
        )

    def calculate_delay(self, attempt: int, failure_type: FailureType = FailureType.UNKNOWN) -> int:
        """Whole seconds before the retry after `attempt` retries; at least one, unless retries are immediate."""
        chosen = draw(seeds.process_seed, seeds.next_key(), attempt)
        return int(delay_before(attempt, self.resolved(failure_type), draw=chosen))


class RetryBudget(Struct):
    """The retries of one job: `attempts` counts the retries that were scheduled."""

    job_id: str
    job_type: JobType | str
    attempts: int = 0
    failure_type: FailureType = FailureType.UNKNOWN
    first_attempt_at: datetime | None = None
    last_attempt_at: datetime | None = None
    total_delay_seconds: int = 0

    def can_retry(self, policy: ConnectorPolicy) -> bool:
        """Whether another retry may be scheduled: with 3, at 0, 1 and 2 yes, at 3 no."""
        return self.attempts < policy.retries_for(self.failure_type)

    def next_delay(self, policy: ConnectorPolicy) -> int:
        return policy.calculate_delay(self.attempts, self.failure_type)

    def spend(self, delay_seconds: int, *, now: datetime | None = None) -> None:
        """Count a retry that was scheduled."""
        at = now or datetime.now(UTC)
        self.first_attempt_at = self.first_attempt_at or at
        self.last_attempt_at = at
        self.attempts += 1
        self.total_delay_seconds += delay_seconds


class RetryPolicyRegistry:
    """The policies of all connectors: built in, from a file, or set by the program."""

    DEFAULT_POLICIES: ClassVar[Mapping[JobType, ConnectorPolicy]]
    """The built-in policy of each connector."""

    def __init__(self, config_path: str | os.PathLike[str] | None = None) -> None:
        self._policies: dict[str, ConnectorPolicy] = dict(self.DEFAULT_POLICIES.items())
        if config_path is None:
            return
        path = Path(config_path)
        if not path.exists():
            logging.getLogger("reefknot").warning("%s does not exist; connectors keep their built-in policies", path)
            return
        configuration, _ = checked(read_file(path))
        for name, entry in configuration.retry_policies.items():
            written = {word: getattr(entry, word) for word in entry.written & ConnectorPolicy.model_fields.keys()}
            self.set_policy(ConnectorPolicy(**(self.get_policy(name).model_dump() | written)))

    def get_policy(self, job_type: JobType | str) -> ConnectorPolicy:
        """The policy of a connector; an unknown one gets the default."""
        return self._policies.get(job_type) or _builtin(job_type)

    def set_policy(self, policy: ConnectorPolicy) -> None:
        """Replace the policy of the connector that it names."""
        self._policies[policy.connector_type] = policy

    def list_policies(self) -> list[ConnectorPolicy]:
        """All policies, the built-in connectors first."""
        return [*self._policies.values()]


def _builtin(job_type: JobType | str) -> ConnectorPolicy:
    return ConnectorPolicy(connector_type=job_type, **CONNECTORS.get(job_type, OTHER_CONNECTORS)._asdict())


RetryPolicyRegistry.DEFAULT_POLICIES = MappingProxyType({job_type: _builtin(job_type) for job_type in JobType})
