"""A collector of spans on loopback: OTLP over HTTP, decoded by OpenTelemetry's own messages."""

import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span as it arrived; ids are hexadecimal, and a root has no parent."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    is_error: bool
    began: int
    ended: int
    pid: int
    """The process that sent it."""


class Receiver:
    """The spans and the headers of all other requests that have arrived."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Received] = []
        self.bodies: list[bytes] = []
        self.services: set[str] = set()
        self.headers: list[dict[str, str]] = []

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.services |= {
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            }
            pid = next(one.value.int_value for one in resource.resource.attributes if one.key == "process.pid")
            for scope in resource.scope_spans:
                self.spans += [_received(span, pid) for span in scope.spans]

    def named(self, name: str) -> list[Received]:
        return sorted((one for one in self.spans if one.name == name), key=lambda one: one.began)

    def children(self, parent: Received) -> Sequence[Received]:
        found = [one for one in self.spans if (one.trace_id, one.parent_id) == (parent.trace_id, parent.span_id)]
        return sorted(found, key=lambda one: one.began)


def _received(span: Any, pid: int) -> Received:
    values = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    is_error = span.status.code == span.status.STATUS_CODE_ERROR
    return Received(span.name, *ids, values, is_error, span.start_time_unix_nano, span.end_time_unix_nano, pid)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver, as long as the block lasts. A GET is answered with 204, and its headers are kept."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
