"""
Types of the HTTP API: a route, and the parameters and bodies that requests bring.

The parameters of the path and of the query string together are one type, the body of an action is another. What they
refuse by themselves is checked by the types of the operations, from which some of them are made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from reefknot.console.operations import jobs, quarantine
from reefknot.console.operations.values import ParameterUseError
from reefknot.errors import ParameterError
from reefknot.queue.model.messages import AssignmentOptions, Correlation, Job
from reefknot.queue.model.unique import Unique, unique_of

PREFIX = "/api/v1"
LOOK_S = 5.0
ACTION_S = 30.0

Call = Callable[[Any, Any, Any], Any]
"""From operator, parameters and body to the answer, or to what can be awaited for it."""


class WrittenAssignment(Struct, frozen=True, kw_only=True):
    """
    An assignment as a person writes it. Without an id it gets a new one.

    The fields stand here for the document; the operation checks them, with words of its own.
    """

    job: Job
    assignment_id: str | None = None
    request_id: str | None = None
    tenant_id: str | None = None
    options: AssignmentOptions = AssignmentOptions()
    resource_class: str | None = None
    correlation: Correlation | None = None
    metadata: dict[str, Any] | None = None


class UniqueParameters(Struct, frozen=True, rename={"for_": "for"}):
    """The key of unique work, and the seconds for which its job holds it although it has ended."""

    unique: str | None = None
    for_: float | None = None

    @property
    def key(self) -> Unique:
        try:
            return unique_of({"unique": self.unique, "for_": self.for_})
        except ParameterError as error:
            raise ParameterUseError(error.parameter.rstrip("_"), error.problem) from None


class NoParameters(Struct, frozen=True):
    """A route that takes no parameters."""


class ApiRoute(Struct, frozen=True, kw_only=True, dict=True):
    """A method and a path, and what is behind them."""

    method: str
    path: str
    name: str
    """The id of the operation in the OpenAPI document."""
    call: Call
    summary: str = ""
    answer: dict[str, str] = {}
    """The fields of the answer, each with its kind; see `openapi`."""
    parameters: type[Struct] = NoParameters
    body: type[Struct] | None = None
    longest: float | None = None
    """The seconds that it may take, where they are not the usual ones."""

    def documented(self, summary: str, answer: dict[str, str]) -> ApiRoute:
        """The route with its part of the OpenAPI document."""
        return replace(self, summary=summary, answer=answer)

    @property
    def seconds(self) -> float:
        """The longest time of the operation. It is short for a read, because a store may not answer."""
        return self.longest or (LOOK_S if self.is_read else ACTION_S)

    @property
    def is_read(self) -> bool:
        return self.method == "GET"

    @property
    def role(self) -> str:
        """The least role: everything with effects is the operator's."""
        return "reader" if self.is_read else "operator"

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.strip("/").split("/"))

    @cached_property
    def path_names(self) -> frozenset[str]:
        """The parameters that are parts of the path."""
        return frozenset(part[1:-1] for part in self.parts if part.startswith("{"))

    def values_in(self, parts: list[str]) -> dict[str, str] | None:
        """The values in a path of this form; None for a path of another form. A place that is left empty has none: its
        value stands in the query, because clients take `.` and `..` out of paths."""
        if len(parts) != len(self.parts):
            return None
        values: dict[str, str] = {}
        for part, given in zip(self.parts, parts, strict=True):
            if part.startswith("{"):
                values |= {part[1:-1]: given} if given else {}
            elif part != given:
                return None
        return values


# ---- parameters and bodies -------------------------------------------------------------------------------------------


class JobParameters(Struct, frozen=True):
    """A job by its id, and its tenant if it has one."""

    job: str
    tenant: str | None = None


class LogParameters(JobParameters, frozen=True):
    """The lines of a job behind the one of this number."""

    after: int = 0


class ActionBody(Struct, frozen=True, forbid_unknown_fields=True):
    """An action: its reason for the audit log, and whether it is only tried."""

    because: str = ""
    dry_run: bool = False


class SearchParameters(Struct, frozen=True):
    """An id, a correlation id or a trace id."""

    text: str


class CancelBody(jobs.CancelQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The jobs to cancel."""

    because: str = ""
    dry_run: bool = False


class RetryBody(jobs.RetryQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The jobs to retry."""

    because: str = ""
    dry_run: bool = False


class QuarantineBody(quarantine.QuarantineChoice, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The quarantined jobs that an action is for."""

    because: str = ""
    dry_run: bool = False


class EditBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of the next version of a job."""

    payload: dict[str, Any]
    because: str = ""
    dry_run: bool = False


class WorkerParameters(Struct, frozen=True):
    worker: str


class RouterParameters(Struct, frozen=True):
    router: str


class DryRunBody(Struct, frozen=True, forbid_unknown_fields=True):
    """An action that may only be tried."""

    dry_run: bool = False


class ScheduleRunBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A run now, or one for each of the last due times that was missed."""

    missed: bool = False
    dry_run: bool = False


class DrainBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The time that running steps get."""

    seconds: float = 30.0
    dry_run: bool = False


class ResumeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A job type or a tenant to resume."""

    type: str | None = None
    tenant: str | None = None
    dry_run: bool = False


class PauseBody(ResumeBody, frozen=True, forbid_unknown_fields=True):
    """A job type or a tenant to pause, until when, and why."""

    until: str | None = None
    reason: str = ""


class NamedParameters(Struct, frozen=True):
    """A source or a schedule by its name."""

    name: str


class SourceParameters(Struct, frozen=True):
    """A source by its name, and how many of its problems are shown."""

    name: str
    limit: int = 20


class SyncBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A sync: of all documents, or of those that changed."""

    full: bool = False
    dry_run: bool = False


class DocumentSearch(Struct, frozen=True):
    """A search of documents, in the language of searches."""

    words: str
    source: str | None = None
    limit: int = 20


class ChangesParameters(Struct, frozen=True):
    """A page of changes of documents: behind which cursor, of which source, and whether with their texts."""

    after: str = "0"
    source: str | None = None
    limit: int = 100
    text: bool = True


class SpanParameters(Struct, frozen=True):
    """The span of series up to now: 15m, 2h or 24h."""

    span: str = "15m"


class TelemetryParameters(Struct, frozen=True):
    """The connector to show, and whether with all that is counted."""

    connector: str | None = None
    details: bool = False


class KeyParameters(Struct, frozen=True):
    """An idempotency key."""

    key: str


class PolicyKind(Struct, frozen=True):
    kind: str | None = None


class PolicyTarget(Struct, frozen=True):
    target: str | None = None
    source: str | None = None
