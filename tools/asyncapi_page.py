"""
The AsyncAPI document of the messages on NATS, written from the records in `core.messages`.

`asyncapi_page.py` writes `docs/asyncapi.yaml`; `asyncapi_page.py --check` only compares, and fails when the file on
disk says something else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from reefknot.queue.model.message_schema import WIRE, wire_schemas
from reefknot.queue.model.messages import ACK, ASSIGN, CANCEL, FLEET, HEARTBEAT, RESULT, assign_subject

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "asyncapi.yaml"
HEAD = "# Written by tools/asyncapi_page.py from src/reefknot/queue/model/messages.py. Change that, not this file.\n"

_Channel = tuple[str, str, str, str]
"""Subject, message, description, and who sends it: `router` or `worker`."""
CHANNELS: dict[str, _Channel] = {
    "assign": (ASSIGN, "ExecAssignment", "An assignment for any worker; on NATS a stream keeps it for one.", "router"),
    "assignToWorker": (assign_subject("{worker_id}"), "ExecAssignment", "An assignment for one worker.", "router"),
    "ack": (ACK, "ExecAssignmentAck", "An acknowledgement or a refusal of an assignment.", "worker"),
    "result": (RESULT, "ExecResult", "The result of an assignment.", "worker"),
    "cancel": (CANCEL, "Cancel", "The wish that an assignment ends.", "router"),
    "heartbeat": (HEARTBEAT, "Heartbeat", "The state of a worker, every second.", "worker"),
    "fleet": (FLEET, "Fleet", "The number of live workers.", "router"),
}
_DESCRIPTION = (
    "Routers, workers and peers of other makes exchange these messages over core NATS. In a store that is not named"
    " `reefknot`, its name and a dot stand before each subject. Readers ignore fields that they do not know."
    " docs/reference/nats-messages.md has the rules around them."
)


def document() -> dict[str, Any]:
    """The whole document."""
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Messages of reefknot", "version": "1", "description": _DESCRIPTION},
        "defaultContentType": "application/json",
        "channels": {name: _channel(*one) for name, one in CHANNELS.items()},
        "operations": dict(_operations()),
        "components": {
            "messages": {kind.__name__: _message(kind.__name__) for kind in WIRE},
            "schemas": wire_schemas("#/components/schemas/{name}"),
        },
    }


def _channel(subject: str, message: str, description: str, _sender: str) -> dict[str, Any]:
    found: dict[str, Any] = {"address": subject, "description": description}
    if "{worker_id}" in subject:
        found["parameters"] = {"worker_id": {"description": "The id of the worker, one token of a subject."}}
    return found | {"messages": {message: {"$ref": f"#/components/messages/{message}"}}}


def _message(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "contentType": "application/json"}
    if name == "ExecAssignment":
        header = {"type": "string", "description": "Overrides the field of the assignment."}
        names = ("tenant_id", "trace_id", "traceparent", "version")
        found["headers"] = {"type": "object", "properties": {one: dict(header) for one in names}}
    return found | {"payload": {"$ref": f"#/components/schemas/{name}"}}


def _operations() -> list[tuple[str, dict[str, Any]]]:
    """What a worker and a router do on each channel."""
    return [
        (
            f"{part}.{name}",
            {
                "action": "send" if part == sender else "receive",
                "channel": {"$ref": f"#/channels/{name}"},
                "tags": [{"name": part}],
            },
        )
        for part in ("worker", "router")
        for name, (_, _, _, sender) in CHANNELS.items()
    ]


class _Plain(yaml.SafeDumper):
    """A dumper without anchors: each place says all of it."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def page() -> str:
    """The text of the file."""
    return HEAD + yaml.dump(document(), Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("accepted: --check, or nothing", file=sys.stderr)
        return 2
    if arguments:
        is_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        if not is_current:
            print(f"{PAGE.relative_to(ROOT)} is out of date: tools/asyncapi_page.py writes it", file=sys.stderr)
        return 0 if is_current else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
