"""
The schema of a configuration file: every section with its names, kinds and bounds.

The written form only; the policy words get their meaning in `dialects`. A key that is not written stays
unset, because "not given" differs from "given: none".
"""

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from reefknot.core.limits import ACCEPTED_RATE, MOST_BURST, MOST_RUNNING, RATE_PATTERN
from reefknot.core.policy import RetryStrategy
from reefknot.policy.secrets import ACCEPTED, is_reference
from reefknot.policy.sections import NotAcceptedError, Section, Spelling
from reefknot.runtime.database_urls import POSTGRES_PREFIXES, database_file

JitterWord = Literal["none", "full", "equal", "proportional", "decorrelated"]
StrategyWord = Annotated[
    str,
    Meta(max_length=64, description=f"{', '.join(RetryStrategy)}, or a package's own", examples=list(RetryStrategy)),
]
"""Packages may offer more names than these, so `dialects` checks them."""
Timeout = Annotated[int, Meta(ge=1, le=315_360_000_000)]
"""Milliseconds of a time limit: the largest is that of an assignment's options."""
Milliseconds = Annotated[float, Meta(ge=0, le=86_400_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
RetryCount = Annotated[int, Meta(ge=0, le=100)]
StatusFlags = dict[str, bool]
ExceptionName = Annotated[str, Meta(min_length=1)]
FilePath = Annotated[str, Meta(min_length=1, max_length=4096)]
AnswerBytes = Annotated[int, Meta(ge=1, le=64 * 1024 * 1024)]


class Backoff(Section, frozen=True):
    """The worker's words for a policy. `max_attempts` counts retries."""

    max_attempts: RetryCount | None = None
    base_delay_ms: Milliseconds | None = None
    max_delay_ms: Milliseconds | None = None
    jitter_type: JitterWord | None = None
    jitter_factor: Annotated[float, Meta(ge=0, le=1)] | None = None
    exponential_base: Annotated[float, Meta(ge=1, le=1000)] | None = None
    strategy: StrategyWord | None = None
    max_retry_after_ms: Milliseconds | None = None
    timeout_ms: Timeout | None = None
    attempt_timeout_ms: Timeout | None = None


class ErrorOverride(Backoff, frozen=True):
    """A block's policy for one status (`"429"`), error code (`connection_timeout`) or failure type (`rate_limited`)."""

    retryable: bool | None = None


class BlockPolicy(Backoff, frozen=True):
    """The policy of one kind of block."""

    error_overrides: dict[str, ErrorOverride] = field(default_factory=dict)


class StatusHundred(Section, frozen=True):
    """Whether a hundred of HTTP statuses is retried, and which of them differ."""

    retryable: bool | None = None
    exceptions: StatusFlags = field(default_factory=dict)


class Category(Backoff, frozen=True):
    """A category of error codes. `retryable` is true, false, or a mapping of its codes."""

    retryable: Annotated[
        Any,
        Meta(
            extra_json_schema={
                "anyOf": [
                    {"type": "boolean"},
                    {"additionalProperties": {"enum": [True, False, "conditional"]}, "type": "object"},
                ]
            }
        ),
    ] = None


class NetworkCategory(Category, frozen=True):
    """Network errors also say which HTTP statuses are retried."""

    http_status_mapping: dict[Literal["4xx", "5xx"], StatusHundred] = field(default_factory=dict)


class ErrorClassification(Section, frozen=True):
    """Policies by category of error code."""

    validation_errors: Category = Category()
    execution_errors: Category = Category()
    network_errors: NetworkCategory = NetworkCategory()
    system_errors: Category = Category()
    cancellation_errors: Category = Category()


class Throttle(Section, frozen=True):
    """Success-fed tokens per destination, so that retries do not multiply an outage."""

    enabled: bool = True
    tokens: Annotated[float, Meta(ge=1, le=1_000_000)] = 10.0
    per_success: Annotated[float, Meta(ge=0, le=1000)] = 0.1
    per_second: Annotated[float, Meta(ge=0, le=1000)] = 0.1


class DestinationBreaker(Section, frozen=True):
    """The breaker of each destination: when it is held to be down, and how jobs wait for it."""

    enabled: bool = True
    failures: Annotated[int, Meta(ge=1, le=1000, description="transient failures in a row")] = 10
    jobs: Annotated[int, Meta(ge=1, le=1000, description="of at least this number of jobs")] = 3
    within_seconds: Seconds = 300.0
    cooldown_seconds: Annotated[Seconds, Meta(ge=0.1, description="until the first probe; doubled by each")] = 1.0
    max_cooldown_seconds: Annotated[Seconds, Meta(ge=0.1)] = 60.0
    max_outage_seconds: Annotated[
        float, Meta(gt=0, le=31_536_000, description="the longest time that a job waits for its destination")
    ] = 86_400.0


class RetriesV2(Section, frozen=True):
    """`worker.retries.v2`: how blocks are retried."""

    enabled: bool | None = None
    default_policy: Backoff = Backoff()
    error_classification: ErrorClassification = ErrorClassification()
    block_policies: dict[str, BlockPolicy] = field(default_factory=dict)
    throttle: Throttle = Throttle()
    breaker: DestinationBreaker = DestinationBreaker()


class OverloadThresholds(Section, frozen=True):
    """Shares of a full queue at which the worker changes its level."""

    degraded: Annotated[float, Meta(gt=0, le=10)] = 0.5
    overloaded: Annotated[float, Meta(gt=0, le=10)] = 0.8
    critical: Annotated[float, Meta(gt=0, le=10)] = 1.0


class RejectNewPolicy(Section, frozen=True):
    enabled: bool | None = None
    default: bool | None = None


class DropOldestPolicy(RejectNewPolicy, frozen=True):
    max_drop_age_ms: Annotated[int, Meta(ge=0)] = 60_000


class DeferPolicy(RejectNewPolicy, frozen=True):
    max_defer_time_ms: Annotated[int, Meta(ge=0)] = 30_000


class DegradationSection(Section, frozen=True):
    """The means that a level of degradation takes away."""

    skip_retries: bool = False
    reduce_timeout: bool = False
    timeout_reduction_factor: Annotated[float, Meta(gt=0, le=1)] = 1.0
    skip_circuit_breaker: bool = False


class DegradationLevels(Section, frozen=True):
    light: DegradationSection = DegradationSection()
    medium: DegradationSection = DegradationSection(
        skip_retries=True, reduce_timeout=True, timeout_reduction_factor=0.8
    )
    heavy: DegradationSection = DegradationSection(
        skip_retries=True, reduce_timeout=True, timeout_reduction_factor=0.5, skip_circuit_breaker=True
    )


class DegradePolicy(RejectNewPolicy, frozen=True):
    degradation_levels: DegradationLevels = DegradationLevels()


class RejectionPolicies(Section, frozen=True):
    reject_new: RejectNewPolicy = RejectNewPolicy()
    drop_oldest: DropOldestPolicy = DropOldestPolicy()
    defer: DeferPolicy = DeferPolicy()
    degrade: DegradePolicy = DegradePolicy()


class ResourcePool(Section, frozen=True):
    max_queue_size: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    max_concurrency: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class QueueV2(Section, frozen=True):
    """`worker.queue.v2`: how much may wait, and what happens when it is more."""

    enabled: bool | None = None
    max_queue_size: Annotated[int, Meta(ge=1, le=10_000_000)] = 1000
    rejection_policy: Literal["reject_new", "drop_oldest", "defer", "degrade"] = "reject_new"
    reject_at: Literal["overloaded", "critical"] = "critical"
    max_wait_fraction: Annotated[float, Meta(gt=0, le=1)] | None = 0.5
    preempt: bool = True
    overload_thresholds: OverloadThresholds = OverloadThresholds()
    policies: RejectionPolicies = RejectionPolicies()
    resource_pools: dict[str, ResourcePool] = field(default_factory=dict)


class Retries(Section, frozen=True):
    v2: RetriesV2 = RetriesV2()


class Queue(Section, frozen=True):
    v2: QueueV2 = QueueV2()


class WorkerSection(Section, frozen=True):
    """`worker`: retries, queue, and what becomes of work that has ended."""

    retries: Retries = Retries()
    queue: Queue = Queue()
    default_timeout_ms: Timeout | None = None
    quarantine_failed: bool = False
    retention_seconds: Annotated[float, Meta(ge=60, le=315_360_000)] | None = 7 * 86_400.0


class ConnectorEntry(Section, frozen=True):
    """A connector's words for a policy. Numbers are retries and whole seconds; what is left out keeps its default."""

    strategy: StrategyWord | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=10)] | None = None
    base_delay_seconds: Annotated[int, Meta(ge=1, le=3600)] | None = None
    max_delay_seconds: Annotated[int, Meta(ge=1, le=86400)] | None = None
    jitter_factor: Annotated[float, Meta(ge=0, le=1)] | None = None
    backoff_multiplier: Annotated[float, Meta(ge=1, le=10)] | None = None
    transient_max_attempts: Annotated[int, Meta(ge=1, le=20)] | None = None
    rate_limit_delay_seconds: Annotated[int, Meta(ge=1, le=7200)] | None = None
    max_retry_after_seconds: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    permanent_failures_no_retry: bool | None = None


class OperationEntry(Section, frozen=True):
    """An operation's words for a policy. `max_attempts` counts executions; exceptions are given by name."""

    max_attempts: Annotated[int, Meta(ge=1, le=100)] | None = None
    base_delay: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    max_delay: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    backoff_multiplier: Annotated[float, Meta(ge=1, le=1000)] | None = None
    jitter_enabled: bool | None = None
    jitter_factor: Annotated[float, Meta(ge=0, le=1)] | None = None
    retryable_exceptions: list[ExceptionName] | None = None
    non_retryable_exceptions: list[ExceptionName] | None = None
    max_retry_after: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    timeout: Seconds | None = None


Duration = Annotated[
    str,
    Meta(
        pattern=r"^[0-9]{1,9}(\.[0-9]{1,3})?[smhd]$",
        description="a duration: 90s, 15m, 2h, 7d",
        examples=["15m"],
        extra={"accepted": "a duration from 1s to 366d, such as 90s, 15m, 2h, 7d"},
    ),
]


class TimetableKeys(Section, frozen=True):
    """The due times of a source or a schedule: at intervals or by cron. Neither of them: only when a person asks."""

    every: Duration | None = None
    cron: Annotated[str, Meta(max_length=200, examples=["0 7 * * 1-5"])] | None = None
    time_zone: Annotated[str, Meta(max_length=64, examples=["Europe/Berlin"])] = "UTC"
    missed: Annotated[
        Literal["once", "skip"], Meta(description="due times that passed while nothing ran: caught up once, or not")
    ] = "once"


class Source(TimetableKeys, frozen=True, kw_only=True):
    """An instance of a connector: these keys, and its connector's own settings."""

    own: dict[str, Any] = field(default_factory=dict)
    """The connector's own settings, as they are written."""
    connector: str
    on_change: Annotated[bool, Meta(description="sync when the source reports changes, where it can be watched")] = (
        False
    )
    max_concurrency: Annotated[int, Meta(ge=1, le=1000, description="jobs of this source at the same time")] = 2
    page_size: Annotated[int, Meta(ge=1, le=10_000, description="documents that are kept in one step")] = 100
    timeout_seconds: Annotated[float, Meta(gt=0, le=86_400, description="longest time for one page")] = 120.0
    retry: ConnectorEntry = ConnectorEntry()


class ScheduleEntry(TimetableKeys, frozen=True, kw_only=True):
    """An assignment that is submitted at each due time."""

    assignment: dict[str, Any]


class ConnectorSection(Section, frozen=True, kw_only=True):
    max_concurrency: Annotated[int, Meta(ge=1, le=1000, description="jobs of all its sources at the same time")]


class SourceBreakerSection(Section, frozen=True):
    """The breaker of a source: when the source is held to be down, and how long it rests between probes."""

    enabled: bool = True
    failures: Annotated[int, Meta(ge=1, le=1000, description="transient failures in a row")] = 5
    jobs: Annotated[int, Meta(ge=1, le=1000, description="of at least this number of jobs")] = 2
    source_failures: Annotated[int, Meta(ge=1, le=1000, description="failures in a row of the source itself")] = 3
    cooldown_seconds: Seconds = 30.0
    max_cooldown_seconds: Seconds = 900.0
    max_outage_seconds: Annotated[
        float, Meta(ge=60, le=31_536_000, description="longest wait of one job for a source that does not answer")
    ] = 86_400.0


class IngestionSection(Section, frozen=True):
    """`ingestion`: how much runs at once, and where documents are kept."""

    documents: Annotated[FilePath, Meta(description="the SQLite file of documents; next to the store by default")] | (
        None
    ) = None
    max_concurrency: Annotated[int, Meta(ge=1, le=1000, description="jobs of all sources at the same time")] = 4
    connectors: dict[str, ConnectorSection] = field(default_factory=dict)
    breaker: SourceBreakerSection = SourceBreakerSection()
    max_failed_items: Annotated[
        int, Meta(ge=1, le=100_000, description="items of a source that failed and are remembered; then syncs stop")
    ] = 1000
    stalled_after_seconds: Annotated[
        float, Meta(ge=1, le=86_400, description="time without progress after which a sync is ended")
    ] = 600.0
    lease_seconds: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    drain_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0


class IdempotencySection(Section, frozen=True):
    """Retention and size limits of idempotency keys and their results."""

    retention_seconds: Annotated[float, Meta(ge=1, le=315_360_000)] = 7 * 86_400.0
    largest_result_bytes: Annotated[int, Meta(ge=1, le=67_108_864)] = 1_048_576
    max_keys: Annotated[int, Meta(ge=1)] | None = None


class JsonLinesFile(Section, frozen=True, kw_only=True):
    """A copy of every event as a line of JSON. A file that is full is followed by the next."""

    path: FilePath
    max_file_bytes: Annotated[int, Meta(ge=4096, le=1_099_511_627_776)] = 67_108_864
    max_files: Annotated[int, Meta(ge=2, le=1_000_000)] | None = None
    fsync: Literal["always", "rotate", "never"] = "always"


class HeadsFile(Section, frozen=True, kw_only=True):
    """A file of heads of the audit log, in a second place: a rewritten log does not match them."""

    path: FilePath
    every_seconds: Annotated[float, Meta(ge=1, le=604_800)] = 3600.0
    max_heads: Annotated[int, Meta(ge=10, le=50_000)] = 10_000


class AuditSection(Section, frozen=True):
    """Audit events: how long the store keeps them, where they are copied, and what a failing log means."""

    on_failure: Literal["fail_open", "fail_closed"] = "fail_open"
    max_buffered: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    retention_seconds: Annotated[float, Meta(ge=60, le=3_153_600_000)] | None = 90 * 86_400.0
    jsonl: JsonLinesFile | None = None
    heads: HeadsFile | None = None
    log: bool = False


def _off(value: object) -> object:
    """The word `off`, which YAML reads as false; null means the same."""
    return "off" if value is False or value is None else value


class RouterSection(Section, frozen=True):
    """The router's queue and patience. Keys of the queue that are not given are those of `worker.queue.v2`."""

    max_queue_size: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    max_wait_fraction: Annotated[float, Meta(gt=0, le=1)] | None = None
    tenant_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    patience_seconds: Seconds = 30.0
    lease_seconds: Annotated[float, Meta(ge=1, le=3600)] = 30.0
    shared_subject: Annotated[Literal["ours", "cp1", "off"], Spelling(_off)] = "ours"


def _database_url(url: str) -> str:
    try:
        file = database_file(url)
    except ValueError as error:
        raise NotAcceptedError("sqlite:PATH with the path of a file", str(error)) from None
    if file is None and not url.startswith(POSTGRES_PREFIXES) and "dbname=" not in url:
        raise NotAcceptedError("sqlite:PATH or postgresql://…")
    return url


def _engine_url(url: str) -> str:
    from reefknot.stores.port.engines import accepted_urls, address_problem

    why = address_problem(url)
    if why is None:
        return url
    raise NotAcceptedError(accepted_urls(), why)


def _secret_reference(text: str) -> str:
    if not is_reference(text):
        raise NotAcceptedError(ACCEPTED)
    return text


def _host_name(text: str) -> str:
    if re.fullmatch(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252})(:[0-9]{1,5})?", text) is None:
        why = "each name is written out" if "*" in text else ""
        raise NotAcceptedError("a host's name such as dash.example.org, with or without :PORT", why)
    return text


HostName = Annotated[str, _host_name]
EngineUrl = Annotated[str, _engine_url]
SecretReference = Annotated[str, _secret_reference]
DatabaseUrl = Annotated[
    str,
    _database_url,
    Meta(description="sqlite:PATH or postgresql://…", examples=["sqlite:orders.db"]),
]


NatsRole = Literal["client", "worker", "router", "operator", "reader"]
"""What a user of a store on NATS does there."""


class NatsSection(Section, frozen=True):
    """A store on NATS: how to get in, how many copies there are, and what is guaranteed."""

    guarantee: Annotated[
        Literal["fenced", "result-dedup"],
        Meta(description="fenced: every claim is stored before work begins; result-dedup: claims are stored later"),
    ] = "fenced"
    replicas: Annotated[
        int | None,
        Meta(ge=1, le=5, description="servers that hold each record; by default three in a cluster of three or more"),
    ] = None
    roles: Annotated[
        list[NatsRole],
        Meta(description="the roles of this user, whose permissions `reefknot dev permissions` prints"),
    ] = field(default_factory=list)
    user: str | None = None
    password: SecretReference | None = None
    token: SecretReference | None = None
    credentials: Annotated[FilePath, Meta(description="a file of credentials, as nsc writes them")] | None = None
    tls_ca: FilePath | None = None
    tls_certificate: FilePath | None = None
    tls_key: FilePath | None = None
    patience_seconds: Annotated[float, Meta(gt=0, le=600, description="how long a start tries to connect")] = 5.0
    subject_prefix: Annotated[
        str | None,
        Meta(
            pattern=r"^([A-Za-z0-9_-]+\.)*$",
            description="before the documented subjects; by default nothing, or NAME. for nats://HOST/NAME",
        ),
    ] = None
    max_shared_assignments: Annotated[
        int, Meta(ge=1, le=10_000_000, description="assignments that peers have sent and no worker has taken")
    ] = 10_000
    max_bytes: Annotated[
        int | None,
        Meta(ge=1 << 20, le=1 << 50, description="bytes for the stream of the store; what does not fit is refused"),
    ] = None


class HttpBlockSection(Section, frozen=True):
    """Addresses that `http.request` may call beyond public ones, and how much it may read."""

    allow: Annotated[list[str], Meta(description="hosts, addresses and CIDRs, each with or without :PORT")] = field(
        default_factory=list
    )
    max_response_bytes: AnswerBytes = 1024 * 1024
    ca_file: Annotated[FilePath, Meta(description="certificates to trust instead of the well-known ones")] | None = None


class FsBlockSection(Section, frozen=True):
    """The folders that `fs.blob_put`, `fs.blob_get` and `fs.delete` may touch."""

    roots: list[FilePath] = field(default_factory=list)
    max_bytes: AnswerBytes = 1024 * 1024


class SqlConnectionEntry(Section, frozen=True, kw_only=True):
    """A database: a file of SQLite or a server of PostgreSQL."""

    url: DatabaseUrl
    access: Literal["read", "write"] = "read"
    role: Annotated[str, Meta(description="PostgreSQL: the role to become, with fewer rights")] = ""
    functions: Annotated[
        list[str],
        Meta(description="PostgreSQL, for reading: functions to allow beyond the built-in ones that compute"),
    ] = field(default_factory=list)


class SqlBlockSection(Section, frozen=True):
    """The databases that `sql.query` may reach, and how much it may answer. A URL alone is a connection for reading."""

    connections: dict[str, DatabaseUrl | SqlConnectionEntry] = field(default_factory=dict)
    allow: Annotated[list[DatabaseUrl], Meta(description="URLs that an assignment may name; opened for reading")] = (
        field(default_factory=list)
    )
    max_rows: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    max_bytes: AnswerBytes = 1024 * 1024


class BlocksSection(Section, frozen=True):
    """The reach of steps. By default: public addresses, and neither files nor databases."""

    http: HttpBlockSection | None = HttpBlockSection()
    fs: FsBlockSection | None = FsBlockSection()
    sql: SqlBlockSection | None = SqlBlockSection()


class LimitEntry(Section, frozen=True):
    """A limit of the whole fleet; its name says for which jobs: a type, a tenant, a destination, a field of inputs."""

    rate: Annotated[str, Meta(pattern=RATE_PATTERN, extra={"accepted": ACCEPTED_RATE})] | None = None
    burst: Annotated[int, Meta(ge=1, le=MOST_BURST, description="starts at once; default: a second's")] | None = None
    running: Annotated[int, Meta(ge=1, le=MOST_RUNNING, description="jobs that run at the same time")] | None = None
    per: Annotated[str, Meta(description="for each tenant, destination or inputs.FIELD")] | None = None


class DashboardSection(Section, frozen=True):
    """The pages and the HTTP API that `up` and `dashboard` serve."""

    enabled: Annotated[bool, Meta(description="whether `up` serves the dashboard")] = True
    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="0: a free one")] | None = None
    allowed_hosts: Annotated[
        list[HostName], Meta(description="names by which a browser may call it, in addition to the address itself")
    ] = field(default_factory=list)
    operator_token: SecretReference | None = None
    reader_token: SecretReference | None = None
    tls_certificate: FilePath | None = None
    tls_key: FilePath | None = None


class AlertRule(Section, frozen=True):
    """The limits of one rule. An alert is raised beyond `threshold` for `for_seconds`, and resolved beyond `clear`."""

    enabled: bool = True
    threshold: Annotated[float, Meta(ge=0, le=1_000_000_000)] | None = None
    clear: Annotated[float, Meta(ge=0, le=1_000_000_000)] | None = None
    for_seconds: Annotated[float, Meta(ge=0, le=86_400)] | None = None


AlertName = Literal[
    "quarantine_growth",
    "retry_rate",
    "success_rate",
    "oldest_age",
    "critical_workers",
    "audit_outage",
    "no_router",
    "no_worker",
]


class AlertsSection(Section, frozen=True):
    """The rules that a running system watches by itself."""

    enabled: bool = True
    rules: dict[AlertName, AlertRule] = field(default_factory=dict)
    webhook: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=2048,
                description="URL that is notified of every alert, by a step http.request; or env:NAME, file:PATH",
            ),
        ]
        | None
    ) = None


class Configuration(Section, frozen=True):
    """The whole file."""

    worker: WorkerSection = WorkerSection()
    retry_policies: dict[str, ConnectorEntry] = field(default_factory=dict)
    operations: dict[str, OperationEntry] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    schedules: dict[str, ScheduleEntry] = field(default_factory=dict)
    ingestion: IngestionSection = IngestionSection()
    engine: EngineUrl | None = None
    nats: NatsSection = NatsSection()
    secrets: dict[str, SecretReference] = field(default_factory=dict)
    idempotency: IdempotencySection = IdempotencySection()
    audit: AuditSection = AuditSection()
    router: RouterSection = RouterSection()
    blocks: BlocksSection = BlocksSection()
    dashboard: DashboardSection = DashboardSection()
    alerts: AlertsSection = AlertsSection()
    limits: dict[str, LimitEntry] = field(default_factory=dict)
