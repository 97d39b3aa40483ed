"""
Traces by OpenTelemetry: the tracer behind the seam of `reefknot.runtime.tracing`, and its export.

A program with a `TracerProvider` of its own calls `enable()`, and these spans go where its others go. Commands that run
a system set up a provider by the standard variables of the environment (`exported`): OTLP over HTTP, in batches, from a
thread of its own. What the collector does not take in time is dropped, and never delays work.

OpenTelemetry is the extra `otel`; it is imported when traces are asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from threading import Thread
from typing import TYPE_CHECKING, Any

from reefknot.core.failure import Failure
from reefknot.errors import ParameterError, shown
from reefknot.queue.model.messages import trace_of
from reefknot.runtime.log import MAX_ERROR_TEXT, LogBudget, error_text, logger, printable
from reefknot.runtime.redactor import redact
from reefknot.runtime.tracing import tracing

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext, TracerProvider

    from reefknot.runtime.tracing import Attributes, TraceSpan

INSTALL = "pip install '.[otel]' in a checkout"
FLUSH_S = 3.0
"""How long the end of a command waits for its last spans to be sent."""
_EXPORTERS = ("otlp", "console", "none")
_PROTOCOL = "http/protobuf"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SAMPLED = 1
_last: object = None
"""The provider that an earlier command in this process has set; it has been shut down."""


# ---- on and off ------------------------------------------------------------------------------------------------------


def enable(tracer_provider: TracerProvider | None = None) -> None:
    """
    Write spans of retries, jobs and submissions in this process, until `disable`.

    They go to `tracer_provider`, or to the one that `opentelemetry.trace.set_tracer_provider` was called with.
    """
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise ImportError(f"traces need the extra 'otel': {INSTALL}") from error
    provider = tracer_provider or _global_provider()
    if provider is None:
        accepted = "a TracerProvider, or none after opentelemetry.trace.set_tracer_provider was called"
        raise ParameterError("tracer_provider", tracer_provider, accepted)
    if not isinstance(provider, trace.TracerProvider):
        raise ParameterError("tracer_provider", tracer_provider, "a TracerProvider of OpenTelemetry")
    tracing.tracer = OtelTracer(provider)


def disable() -> None:
    """Write no more spans."""
    tracing.tracer = None


def _global_provider() -> TracerProvider | None:
    """The provider that the program has set; None when it has set none."""
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider) else provider


# ---- the tracer ------------------------------------------------------------------------------------------------------

_chosen: ContextVar[tuple[int, int] | None] = ContextVar("reefknot_chosen_ids", default=None)
"""Trace and span id of the operation that is being recorded."""


class OtelTracer:
    """
    The tracer of the seam, over one provider.

    An operation that several processes share is recorded at its end under ids that were known from its beginning. The
    SDK gives ids out by a generator, which is replaced in our own tracer only. A provider that is not the SDK's cannot
    do this: there, attempts are children of the caller's span, and no operation is recorded.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import context, trace

        from reefknot import __version__

        self._api, self._context = trace, context
        own: Any = provider.get_tracer("reefknot", __version__)
        self._tracer = own
        self._has_chosen_ids = hasattr(own, "id_generator")
        if self._has_chosen_ids:
            own.id_generator = _with_chosen_ids(own.id_generator)

    def start(
        self, name: str, attributes: Attributes, *, kind: str = "internal", parent: TraceSpan | str | None = None
    ) -> OtelSpanAdapter:
        """Begin a span below `parent`; without one, below the current span."""
        above: Context | None = None
        if isinstance(parent, OtelSpanAdapter):
            above = self._api.set_span_in_context(parent.span)
        elif isinstance(parent, str) and parent:
            above = self._api.set_span_in_context(self._api.NonRecordingSpan(self._remote(parent)))
        span = self._tracer.start_span(
            name, context=above, kind=self._api.SpanKind[kind.upper()], attributes=_written(attributes)
        )
        return OtelSpanAdapter(span, self._api, self._context)

    def current(self) -> str | None:
        """The `traceparent` of the current span."""
        found = self._api.get_current_span().get_span_context()
        return _traceparent(found.trace_id, found.span_id, found.trace_flags) if found.is_valid else None

    def operation(self, key: str, parent: str | None, trace_id: str | None) -> str:
        """The `traceparent` of an operation, always the same for one `key`; empty where it cannot be recorded."""
        if not self._has_chosen_ids:
            return parent or ""
        digest = sha256(key.encode("utf-8", "replace")).digest()
        span_id = int.from_bytes(digest[:8], "big") or 1
        if parent is not None:
            above = self._remote(parent)
            return _traceparent(above.trace_id, span_id, above.trace_flags & _SAMPLED)
        given = trace_of(f"00-{trace_id}-{'1' * 16}-01")
        trace = int(given, 16) if given else int.from_bytes(digest[8:24], "big") or 1
        decision = self._tracer.sampler.should_sample(None, trace, "reefknot").decision
        return _traceparent(trace, span_id, int(decision.is_sampled()))

    def record(
        self, operation: str, name: str, attributes: Attributes, *, parent: str | None, began: float, error: str
    ) -> None:
        """Record an operation that has ended now."""
        if not self._has_chosen_ids:
            return
        own = self._remote(operation)
        above = self._context.Context()
        if parent is not None:
            above = self._api.set_span_in_context(self._api.NonRecordingSpan(self._remote(parent)), above)
        token = _chosen.set((own.trace_id, own.span_id))
        try:
            span = self._tracer.start_span(
                name,
                context=above,
                kind=self._api.SpanKind.CONSUMER,
                attributes=_written(attributes),
                start_time=int(began * 1e9),
            )
        finally:
            _chosen.reset(token)
        if error:
            span.set_status(self._api.StatusCode.ERROR, error)
        span.end()

    def _remote(self, traceparent: str) -> SpanContext:
        _, trace_id, span_id, flags = traceparent.split("-")[:4]
        flag = self._api.TraceFlags(int(flags, 16))
        return self._api.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=flag)


class OtelSpanAdapter:
    """A span of OpenTelemetry as the seam has it."""

    __slots__ = ("_api", "_context", "_token", "span")

    def __init__(self, span: OtelSpan, api: Any, context: Any) -> None:
        self.span = span
        self._api = api
        self._context = context
        self._token: Token[Context] | None = None

    @property
    def traceparent(self) -> str:
        found = self.span.get_span_context()
        return _traceparent(found.trace_id, found.span_id, found.trace_flags)

    def enter(self) -> None:
        """Make this span the current one, until `end`."""
        self._token = self._context.attach(self._api.set_span_in_context(self.span))

    def set(self, attributes: Attributes) -> None:
        self.span.set_attributes(_written(attributes))

    def failed(self, failure: Failure | str) -> None:
        """Mark this span as failed, with the failure as an event: its class and its redacted text."""
        if not self.span.is_recording():
            return
        text = printable(redact(str(failure)), most=MAX_ERROR_TEXT)
        event = {"exception.message": text}
        if isinstance(failure, Failure) and failure.exceptions:
            event["exception.type"] = failure.exceptions[0]
        self.span.set_status(self._api.StatusCode.ERROR, text)
        self.span.add_event("exception", event)

    def end(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._context.detach(token)
        self.span.end()


def _traceparent(trace_id: int, span_id: int, flags: int) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


def _written(attributes: Attributes) -> dict[str, Any]:
    """Attributes as OpenTelemetry takes them: those that are None are left out, and a name of an enum is its text."""
    return {
        name: str(value) if isinstance(value, str) else value for name, value in attributes.items() if value is not None
    }


def _with_chosen_ids(inner: Any) -> Any:
    """A generator of ids that gives out chosen ones while an operation is recorded, else those of `inner`."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class ChosenIds(IdGenerator):
        """The chosen ids, or those of the provider's own generator."""

        def generate_trace_id(self) -> int:
            chosen = _chosen.get()
            return int(inner.generate_trace_id()) if chosen is None else chosen[0]

        def generate_span_id(self) -> int:
            chosen = _chosen.get()
            return int(inner.generate_span_id()) if chosen is None else chosen[1]

        def is_trace_id_random(self) -> bool:
            return _chosen.get() is None and bool(getattr(inner, "is_trace_id_random", bool)())

    return ChosenIds()


# ---- export ----------------------------------------------------------------------------------------------------------


@contextmanager
def exported(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """
    Send spans to where the environment says while the block lasts: `OTEL_EXPORTER_OTLP_ENDPOINT` and its relatives.

    Without these variables nothing happens. What prevents it is a warning, and never an error of the command.
    """
    exporter = _asked_for(environ)
    if exporter is None:
        yield
        return
    try:
        processor = _set_up(exporter)
    except ImportError:
        logger().warning("the environment asks for traces, which need the extra 'otel': %s", INSTALL)
        processor = None
    except Exception as error:  # a variable of the environment that OpenTelemetry refuses
        logger().warning("no traces are written: %s", error_text(error))
        processor = None
    try:
        yield
    finally:
        disable()
        if processor is not None:
            _flush(processor)


def _asked_for(environ: Mapping[str, str]) -> str | None:
    """The exporter that the environment asks for: `otlp`, `console` or None. A value of no meaning is a warning."""
    given = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    has_endpoint = any(environ.get(name, "").strip() for name in _ENDPOINTS)
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or given == "none":
        return None
    if not given and not has_endpoint:
        return None
    if given and given not in _EXPORTERS:
        text = "no traces are written: OTEL_TRACES_EXPORTER: %s is not accepted; accepted: %s"
        logger().warning(text, shown(given), ", ".join(_EXPORTERS))
        return None
    for name in _PROTOCOLS:
        protocol = environ.get(name, "").strip().lower()
        if protocol and given != "console":
            if protocol == _PROTOCOL:
                break
            text = "no traces are written: %s: %s is not accepted; accepted: %s"
            logger().warning(text, name, shown(protocol), _PROTOCOL)
            return None
    return given or "otlp"


def _set_up(exporter: str) -> SpanProcessor | None:
    """Turn tracing on. Returns the processor to flush; None when the program's own provider is used."""
    from opentelemetry import trace

    global _last
    own = _global_provider()
    if own is not None and own is not _last:  # as with `opentelemetry-instrument`: it has an exporter already
        enable(own)
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from reefknot import __version__

    resource = Resource.create({"service.version": __version__, "process.pid": os.getpid()})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "reefknot"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    processor = BatchSpanProcessor(_exporter(exporter))
    provider.add_span_processor(processor)
    if own is None:
        trace.set_tracer_provider(provider)  # so that spans of one's own steps are seen too
        _last = provider
    enable(provider)
    return processor


def _exporter(name: str) -> Any:
    if name == "console":
        import sys

        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    lines = logging.getLogger(trace_exporter.__name__)
    if not any(isinstance(one, BoundedLines) for one in lines.filters):
        lines.addFilter(BoundedLines())
    return trace_exporter.OTLPSpanExporter()


class BoundedLines(logging.Filter):
    """Ten lines at once, then one a second: a collector that is gone does not flood the log."""

    def __init__(self) -> None:
        super().__init__()
        self._budget = LogBudget()

    def filter(self, record: logging.LogRecord) -> bool:
        return self._budget.take(record.created) is not None


def _flush(processor: SpanProcessor) -> None:
    """Send the last spans, for `FLUSH_S` at most: the thread that still tries then ends with the process."""

    def shut_down() -> None:
        with suppress(Exception):
            processor.shutdown()

    last = Thread(target=shut_down, name="last spans", daemon=True)
    last.start()
    last.join(FLUSH_S)
    if last.is_alive():
        logger().warning("the last spans were not sent within %g s", FLUSH_S)
