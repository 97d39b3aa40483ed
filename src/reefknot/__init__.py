"""
reefknot: unreliable work, run reliably.

The names below are promises. They are loaded when they are first used, so `from reefknot import retry` costs what
`retry` costs.
"""

from __future__ import annotations

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from reefknot import testing as testing
    from reefknot.app.embedded import system as system
    from reefknot.app.embedded import system_sync as system_sync
    from reefknot.app.managers import IdempotencyManager as IdempotencyManager
    from reefknot.app.managers import RetryManager as RetryManager
    from reefknot.app.managers import get_retry_manager as get_retry_manager
    from reefknot.app.managers import open_manager as open_manager
    from reefknot.audit.journal import FanOut as FanOut
    from reefknot.audit.jsonlines import open_audit_log as open_audit_log
    from reefknot.audit.log_sink import LogSink as LogSink
    from reefknot.core.breaker import BreakerState as BreakerState
    from reefknot.core.decide import AttemptRecord as AttemptRecord
    from reefknot.core.decide import Outcome as Outcome
    from reefknot.core.decide import Reason as Reason
    from reefknot.core.failure import ErrorCategory as ErrorCategory
    from reefknot.core.failure import ErrorCode as ErrorCode
    from reefknot.core.failure import Failure as Failure
    from reefknot.core.failure import FailureType as FailureType
    from reefknot.core.policy import Jitter as Jitter
    from reefknot.core.policy import RetryPolicy as RetryPolicy
    from reefknot.core.policy import RetryStrategy as RetryStrategy
    from reefknot.core.throttle import RetryThrottle as RetryThrottle
    from reefknot.errors import AsyncioOnlyError as AsyncioOnlyError
    from reefknot.errors import AttemptTimeoutError as AttemptTimeoutError
    from reefknot.errors import AuditUnavailableError as AuditUnavailableError
    from reefknot.errors import BreakerOpenError as BreakerOpenError
    from reefknot.errors import ChangesLostError as ChangesLostError
    from reefknot.errors import ConfigurationError as ConfigurationError
    from reefknot.errors import ConfigurationMissingError as ConfigurationMissingError
    from reefknot.errors import DeadlineExceededError as DeadlineExceededError
    from reefknot.errors import EventLoopRunningError as EventLoopRunningError
    from reefknot.errors import IdempotencyError as IdempotencyError
    from reefknot.errors import IllegalMoveError as IllegalMoveError
    from reefknot.errors import JobsStuckError as JobsStuckError
    from reefknot.errors import KeyConflictError as KeyConflictError
    from reefknot.errors import KeyInProgressError as KeyInProgressError
    from reefknot.errors import KeyQuotaError as KeyQuotaError
    from reefknot.errors import KeyTooLongError as KeyTooLongError
    from reefknot.errors import LeaseLostError as LeaseLostError
    from reefknot.errors import LimitReachedError as LimitReachedError
    from reefknot.errors import LoopMisuseError as LoopMisuseError
    from reefknot.errors import NameTakenError as NameTakenError
    from reefknot.errors import NoStoreError as NoStoreError
    from reefknot.errors import NotJsonError as NotJsonError
    from reefknot.errors import OperationError as OperationError
    from reefknot.errors import OutcomeUnknownError as OutcomeUnknownError
    from reefknot.errors import ParameterError as ParameterError
    from reefknot.errors import ParameterTypeError as ParameterTypeError
    from reefknot.errors import QueueFullError as QueueFullError
    from reefknot.errors import RecordedFailureError as RecordedFailureError
    from reefknot.errors import ReefknotError as ReefknotError
    from reefknot.errors import RejectedError as RejectedError
    from reefknot.errors import ResultPendingError as ResultPendingError
    from reefknot.errors import ResultTooLargeError as ResultTooLargeError
    from reefknot.errors import RetryAfter as RetryAfter
    from reefknot.errors import RetryError as RetryError
    from reefknot.errors import SourceError as SourceError
    from reefknot.errors import StalePositionError as StalePositionError
    from reefknot.errors import StoreCorruptError as StoreCorruptError
    from reefknot.errors import StoreError as StoreError
    from reefknot.errors import StoreFullError as StoreFullError
    from reefknot.errors import StoreLockedError as StoreLockedError
    from reefknot.errors import StoreMissingError as StoreMissingError
    from reefknot.errors import StoreMovedError as StoreMovedError
    from reefknot.errors import StorePermissionError as StorePermissionError
    from reefknot.errors import StoreReplacedError as StoreReplacedError
    from reefknot.errors import StoreUnavailableError as StoreUnavailableError
    from reefknot.errors import StoreVersionError as StoreVersionError
    from reefknot.errors import UnknownJobError as UnknownJobError
    from reefknot.errors import VirtualDeadlockError as VirtualDeadlockError
    from reefknot.idempotency.decorator import idempotent as idempotent
    from reefknot.idempotency.ledger import ledger as ledger
    from reefknot.idempotency.model import Done as Done
    from reefknot.ingest.connectors.registry import connector as connector
    from reefknot.ingest.jobs import IngestionJob as IngestionJob
    from reefknot.ingest.jobs import JobQueue as JobQueue
    from reefknot.ingest.orchestrator import IngestionOrchestrator as IngestionOrchestrator
    from reefknot.ingest.port import Document as Document
    from reefknot.ingest.port import FetchRequest as FetchRequest
    from reefknot.ingest.port import ItemFailure as ItemFailure
    from reefknot.ingest.port import Page as Page
    from reefknot.ingest.port import SourceContext as SourceContext
    from reefknot.ingest.sources import IngestionSource as IngestionSource
    from reefknot.ingest.telemetry import TelemetryRecorder as TelemetryRecorder
    from reefknot.policy.book import PolicyBook as PolicyBook
    from reefknot.policy.model.book import ResolvedPolicy as ResolvedPolicy
    from reefknot.policy.model.defaults import JobType as JobType
    from reefknot.policy.model.defaults import RetryCategory as RetryCategory
    from reefknot.policy.registry import ConnectorPolicy as ConnectorPolicy
    from reefknot.policy.registry import RetryBudget as RetryBudget
    from reefknot.policy.registry import RetryPolicyRegistry as RetryPolicyRegistry
    from reefknot.queue.client import Client as Client
    from reefknot.queue.client import ClientLike as ClientLike
    from reefknot.queue.client import Handle as Handle
    from reefknot.queue.client import HandleLike as HandleLike
    from reefknot.queue.connect import SyncClient as SyncClient
    from reefknot.queue.connect import SyncClientLike as SyncClientLike
    from reefknot.queue.connect import SyncHandle as SyncHandle
    from reefknot.queue.connect import SyncHandleLike as SyncHandleLike
    from reefknot.queue.connect import connect as connect
    from reefknot.queue.connect import connect_sync as connect_sync
    from reefknot.queue.model.admission import OverloadStatus as OverloadStatus
    from reefknot.queue.model.admission import RejectionPolicy as RejectionPolicy
    from reefknot.queue.model.arguments import SubmitItem as SubmitItem
    from reefknot.queue.model.arguments import SubmitOptions as SubmitOptions
    from reefknot.queue.model.follow_ups import FollowUp as FollowUp
    from reefknot.queue.model.follow_ups import Gather as Gather
    from reefknot.queue.model.follow_ups import ThenOptions as ThenOptions
    from reefknot.queue.model.follow_ups import gather as gather
    from reefknot.queue.model.follow_ups import then as then
    from reefknot.queue.model.messages import ExecAssignment as ExecAssignment
    from reefknot.queue.model.messages import ExecAssignmentAck as ExecAssignmentAck
    from reefknot.queue.model.messages import ExecResult as ExecResult
    from reefknot.queue.model.messages import StepRequest as StepRequest
    from reefknot.queue.model.messages import StepResult as StepResult
    from reefknot.queue.model.messages import StepStatus as StepStatus
    from reefknot.queue.port.quarantine import QuarantineStore as QuarantineStore
    from reefknot.queue.router.service import Router as Router
    from reefknot.queue.worker.service import Worker as Worker
    from reefknot.retrying.breaker import CircuitBreaker as CircuitBreaker
    from reefknot.retrying.decorator import retry as retry
    from reefknot.retrying.decorator import using as using
    from reefknot.retrying.failures import classify_failure as classify_failure
    from reefknot.retrying.failures import http_errors as http_errors
    from reefknot.retrying.limit import Limit as Limit
    from reefknot.retrying.retrier import Retrier as Retrier
    from reefknot.retrying.types import FailedAttempt as FailedAttempt
    from reefknot.retrying.types import RetryEvent as RetryEvent
    from reefknot.retrying.types import RetryKeywords as RetryKeywords
    from reefknot.steps.port import BlockContext as BlockContext
    from reefknot.steps.port import Children as Children
    from reefknot.steps.python import block as block
    from reefknot.stores.opening import open_store as open_store

__version__ = "0.1.0"

_HOMES = {
    "reefknot.queue.model.arguments": "SubmitItem SubmitOptions",
    "reefknot.queue.model.follow_ups": "FollowUp Gather ThenOptions gather then",
    "reefknot.queue.connect": "SyncClient SyncClientLike SyncHandle SyncHandleLike connect connect_sync",
    "reefknot.app.embedded": "system system_sync",
    "reefknot.app.managers": "IdempotencyManager RetryManager get_retry_manager open_manager",
    "reefknot.audit.jsonlines": "open_audit_log",
    "reefknot.stores.opening": "open_store",
    "reefknot.audit.journal": "FanOut",
    "reefknot.steps.python": "block",
    "reefknot.policy.book": "PolicyBook",
    "reefknot.policy.registry": "ConnectorPolicy RetryBudget RetryPolicyRegistry",
    "reefknot.ingest.connectors.registry": "connector",
    "reefknot.core.failure": "ErrorCategory ErrorCode Failure FailureType",
    "reefknot.idempotency.model": "Done",
    "reefknot.queue.model.messages": "ExecAssignment ExecAssignmentAck ExecResult StepRequest StepResult StepStatus",
    "reefknot.queue.model.admission": "OverloadStatus RejectionPolicy",
    "reefknot.core.breaker": "BreakerState",
    "reefknot.policy.model.book": "ResolvedPolicy",
    "reefknot.core.decide": "AttemptRecord Outcome Reason",
    "reefknot.policy.model.defaults": "JobType RetryCategory",
    "reefknot.core.policy": "Jitter RetryPolicy RetryStrategy",
    "reefknot.core.throttle": "RetryThrottle",
    "reefknot.idempotency.ledger": "ledger",
    "reefknot.audit.log_sink": "LogSink",
    "reefknot.errors": (
        "AsyncioOnlyError AttemptTimeoutError AuditUnavailableError BreakerOpenError ChangesLostError "
        "ConfigurationError ConfigurationMissingError DeadlineExceededError EventLoopRunningError IdempotencyError "
        "IllegalMoveError KeyConflictError KeyInProgressError KeyQuotaError KeyTooLongError LeaseLostError "
        "JobsStuckError LimitReachedError LoopMisuseError NameTakenError OperationError "
        "NoStoreError NotJsonError OutcomeUnknownError ParameterError ParameterTypeError QueueFullError "
        "RecordedFailureError ReefknotError RejectedError ResultPendingError ResultTooLargeError RetryAfter "
        "RetryError SourceError StalePositionError StoreCorruptError StoreError StoreFullError StoreLockedError "
        "StoreMissingError StoreMovedError StorePermissionError StoreReplacedError StoreUnavailableError "
        "StoreVersionError UnknownJobError VirtualDeadlockError"
    ),
    "reefknot.idempotency.decorator": "idempotent",
    "reefknot.ingest.jobs": "IngestionJob JobQueue",
    "reefknot.ingest.orchestrator": "IngestionOrchestrator",
    "reefknot.ingest.sources": "IngestionSource",
    "reefknot.ingest.telemetry": "TelemetryRecorder",
    "reefknot.steps.port": "BlockContext Children",
    "reefknot.ingest.port": "Document FetchRequest ItemFailure Page SourceContext",
    "reefknot.queue.port.quarantine": "QuarantineStore",
    "reefknot.retrying.breaker": "CircuitBreaker",
    "reefknot.retrying.decorator": "retry using",
    "reefknot.retrying.failures": "classify_failure http_errors",
    "reefknot.retrying.limit": "Limit",
    "reefknot.retrying.retrier": "Retrier",
    "reefknot.retrying.types": "FailedAttempt RetryEvent RetryKeywords",
    "reefknot.queue.client": "Client ClientLike Handle HandleLike",
    "reefknot.queue.router.service": "Router",
    "reefknot.queue.worker.service": "Worker",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", "testing", *sorted(_HOME_OF)]  # noqa: PLE0604 - strings all; a test compares them with the names above


if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name == "testing":
            return import_module("reefknot.testing")
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'reefknot' has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
