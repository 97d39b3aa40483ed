"""
`TelemetryRecorder`: retry metrics per connector, kept over restarts.

Counts are gathered in memory and added to the store's values every second and at the end: a process that is killed
loses at most the last second of statistics, and nothing else depends on them. A store that cannot be written is logged,
and its counts wait; a failure here never reaches a job.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct, structs

from reefknot.core.failure import FailureType
from reefknot.errors import ReefknotError
from reefknot.runtime.log import logger, printable
from reefknot.stores.port import ValueStore

PREFIX = "telemetry:"
MOST_CONNECTORS = 1000
MOST_ATTEMPTS = 25
"""Executions of one job that are distinguished."""
MOST_TRIES = 50


class DamagedMetricsError(ReefknotError):
    """The record of a connector's counts cannot be read."""

    def __init__(self, connector: str, problem: str) -> None:
        super().__init__(f"the telemetry record {printable(PREFIX + connector, most=100)} cannot be read ({problem})")
        self.connector = connector


class ConnectorMetrics(Struct, frozen=True, omit_defaults=True):
    """The counts of one connector."""

    retried_after: dict[str, int] = {}
    """Retry executions that ended, by the type of the failure that caused them."""
    successful_retries: int = 0
    failed_retries: int = 0
    successes: dict[str, int] = {}
    """Jobs that succeeded, by their number of executions."""
    failures: dict[str, int] = {}
    """Failed executions by failure type, those that spent no attempt included."""
    quarantined: dict[str, int] = {}
    """Jobs that went to quarantine, by the type of their last failure."""
    scheduled: int = 0
    waited_s: float = 0.0
    """The sum of all waits before retries."""
    executions: int = 0
    busy_s: float = 0.0

    def plus(self, other: "ConnectorMetrics") -> "ConnectorMetrics":
        """The sum of two counts."""
        return ConnectorMetrics(**{name: _sum(getattr(self, name), getattr(other, name)) for name in _FIELDS})

    @property
    def average_attempts(self) -> float:
        """The mean number of executions of the jobs that succeeded."""
        jobs = sum(self.successes.values())
        return round(sum(int(n) * number for n, number in self.successes.items()) / jobs, 3) if jobs else 0.0

    def as_written(self) -> dict[str, Any]:
        """The counts in the words of the telemetry schema."""
        return {
            "total_retries": self.successful_retries + self.failed_retries,
            "successful_retries": self.successful_retries,
            "failed_retries": self.failed_retries,
            "avg_attempts_until_success": self.average_attempts,
            "by_failure_type": {one.value: self.retried_after.get(one.value, 0) for one in FailureType},
        }


_FIELDS = ConnectorMetrics.__struct_fields__
_metrics = msgspec.json.Decoder(ConnectorMetrics)


def _read(connector: str, body: str) -> ConnectorMetrics:
    """
    The counts of a record. One that cannot be read starts again from zero: counting goes on, and the loss is logged.
    """
    try:
        return decoded_metrics(connector, body)
    except DamagedMetricsError as error:
        logger().warning("%s; its counts start again from zero", error)
        return ConnectorMetrics()


def decoded_metrics(connector: str, body: str) -> ConnectorMetrics:
    """The counts of a record. Raises `DamagedMetricsError`."""
    try:
        return _metrics.decode(body)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise DamagedMetricsError(connector, str(error)) from None


def _sum(one: Any, other: Any) -> Any:
    return dict(Counter(one) + Counter(other)) if isinstance(one, dict) else one + other


class TelemetryRecorder:
    """Records what jobs did. Without a store the counts are those of this object alone."""

    def __init__(self, values: ValueStore | None = None) -> None:
        self._values = values
        self._new: dict[str, ConnectorMetrics] = {}

    def record(
        self, job_id: str, *, duration: float = 0.0, status: str, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """
        Count what a job did: `succeeded`, `failed`, `retry_scheduled` or `quarantined`.

        `metadata` has `job_type`, `attempt` (of a retry that is scheduled the retry's number, else the execution's),
        `failure_type`, `delay_seconds`, and `caused_by`, the type of the failure that a retry execution followed. The
        id is not kept: the number of metrics must not grow with the number of jobs.
        """
        given = metadata or {}
        connector = str(given.get("job_type", "unknown"))
        if connector not in self._new and len(self._new) >= MOST_CONNECTORS:
            connector = "other"
        counted = _counted(status, given, duration)
        self._new[connector] = self._new.get(connector, ConnectorMetrics()).plus(counted)

    async def flush(self) -> None:
        """Add what was counted to the store. What cannot be written is kept for the next time."""
        if self._values is None:
            return
        for connector in list(self._new):
            counted = self._new.pop(connector)
            try:
                await self._add(connector, counted)
            except BaseException:
                self._new[connector] = self._new.get(connector, ConnectorMetrics()).plus(counted)
                raise

    async def _add(self, connector: str, counted: ConnectorMetrics) -> None:
        assert self._values is not None
        for _ in range(MOST_TRIES):
            known = await self._values.get(PREFIX + connector)
            total = counted if known is None else _read(connector, known.body).plus(counted)
            body = msgspec.json.encode(total).decode()
            if await self._values.put(PREFIX + connector, body, version=0 if known is None else known.version):
                return
        raise TimeoutError(f"the telemetry of {connector} is changed by others all the time")

    async def metrics(self) -> dict[str, ConnectorMetrics]:
        """The counts of every connector, of all processes and restarts."""
        totals = {} if self._values is None else await stored_metrics(self._values, read=_read)
        for connector, counted in self._new.items():
            totals[connector] = totals.get(connector, ConnectorMetrics()).plus(counted)
        return totals

    async def retry_metrics(self) -> dict[str, Any]:
        """The counts in the telemetry schema: `{"retry_metrics": {connector: {…}}}`."""
        return {"retry_metrics": {name: one.as_written() for name, one in sorted((await self.metrics()).items())}}


async def stored_metrics(
    values: ValueStore, *, read: Callable[[str, str], ConnectorMetrics] = decoded_metrics
) -> dict[str, ConnectorMetrics]:
    """The counts that a store holds, by connector. Raises `DamagedMetricsError`."""
    names = ((one.name.removeprefix(PREFIX), one.body) for one in await values.list(PREFIX))
    return {name: read(name, body) for name, body in names}


def _counted(status: str, given: Mapping[str, Any], duration: float) -> ConnectorMetrics:
    attempt = max(1, min(MOST_ATTEMPTS, int(given.get("attempt", 1))))
    failure_type = str(given.get("failure_type") or FailureType.UNKNOWN.value)
    match status:
        case "retry_scheduled":
            return ConnectorMetrics(scheduled=1, waited_s=float(given.get("delay_seconds", 0.0)))
        case "quarantined":
            return ConnectorMetrics(quarantined={failure_type: 1})
        case "succeeded":
            counted = ConnectorMetrics(successes={str(attempt): 1}, executions=1, busy_s=duration)
        case _:
            counted = ConnectorMetrics(failures={failure_type: 1}, executions=1, busy_s=duration)
    cause = given.get("caused_by")
    if cause is None:
        return counted
    is_ok = status == "succeeded"
    return structs.replace(
        counted, retried_after={str(cause): 1}, successful_retries=int(is_ok), failed_retries=int(not is_ok)
    )
