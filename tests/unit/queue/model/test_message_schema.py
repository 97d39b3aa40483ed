"""The JSON Schemas of assignments and results agree with what is really read and written."""

import json
import subprocess
import sys
from typing import Any

from msgspec import structs

from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.message_schema import WIRE, assignment_schema, result_schema, wire_schemas
from reefknot.queue.model.messages import (
    LONGEST_ID,
    LONGEST_MS,
    ExecAssignment,
    ExecResult,
    InvalidMessage,
    ResultJob,
    ResultStatus,
    encode,
    written_assignment,
)
from tests.rows import for_each_row

KINDS: dict[str, Any] = {
    "object": dict,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
}
KNOWN = {
    *("$schema", "$defs", "$ref", "title", "description", "default", "type", "properties", "required", "enum", "anyOf"),
    *("additionalProperties", "minimum", "maximum", "minLength", "maxLength", "items"),
}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether the value matches, by the keywords that these schemas use; any other keyword is an error of the test."""
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "anyOf" in schema and not any(is_valid(value, one, root) for one in schema["anyOf"]):
        return False
    if "type" in schema:
        kind = KINDS[schema["type"]]
        if not isinstance(value, kind) or (isinstance(value, bool) and schema["type"] != "boolean"):
            return False
    if isinstance(value, str) and not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return False
    if not isinstance(value, dict) or "properties" not in schema:
        return True
    fields = schema["properties"]
    if not set(schema.get("required", ())) <= set(value):
        return False
    if schema.get("additionalProperties") is False and not set(value) <= set(fields):
        return False
    return all(is_valid(one, fields[name], root) for name, one in value.items() if name in fields)


JOB: dict[str, Any] = {"type": "t"}
SAMPLES: list[tuple[dict[str, Any], bool]] = [
    ({"job": JOB}, True),
    ({"job": {"type": "t", "payload": {"any": [1, None, {"x": "y"}]}, "resources": {"class": "gpu"}}}, True),
    ({"job": JOB, "assignment_id": "x", "request_id": "y", "tenant_id": None, "version": "1"}, True),
    ({"job": JOB, "options": {"priority": "high", "deadline_ms": 1, "timeout_ms": LONGEST_MS}}, True),
    ({"job": JOB, "options": {"priority": -5, "attempt_timeout_ms": 9, "retry_count": 0}}, True),
    ({"job": JOB, "options": {"retry": {"max_attempts": 100, "backoff_ms": 0}, "skip_circuit_breaker": True}}, True),
    ({"job": JOB, "executor": {"provider_id": "p"}, "correlation": {"trace_id": "t"}, "metadata": {"a": 1}}, True),
    ({}, False),
    ({"job": {}}, False),
    ({"job": {"type": ""}}, False),
    ({"job": {"type": "t" * (LONGEST_ID + 1)}}, False),
    ({"job": {"type": "t", "inputs": {}}}, False),
    ({"job": JOB, "assigment_id": "x"}, False),
    ({"job": JOB, "assignment_id": ""}, False),
    ({"job": JOB, "assignment_id": 5}, False),
    ({"job": JOB, "version": "2"}, False),
    ({"job": JOB, "options": {"priority": "urgent"}}, False),
    ({"job": JOB, "options": {"priority": 10**7}}, False),
    ({"job": JOB, "options": {"deadline_ms": 0}}, False),
    ({"job": JOB, "options": {"deadline_ms": "5"}}, False),
    ({"job": JOB, "options": {"timeout_ms": LONGEST_MS + 1}}, False),
    ({"job": JOB, "options": {"retry_count": 101}}, False),
    ({"job": JOB, "options": {"retry": {"backoff": 5}}}, False),
]


@for_each_row(("value", "accepted"), SAMPLES)
def test_the_schema_of_an_assignment_accepts_what_a_file_may_have_alone(value: dict[str, Any], accepted: bool) -> None:
    schema = assignment_schema()
    is_read = not isinstance(written_assignment(value, "a", "r"), InvalidMessage)
    assert (is_valid(value, schema, schema), is_read) == (accepted, accepted)


def test_every_field_of_both_records_is_described() -> None:
    for schema, kind in ((assignment_schema(), ExecAssignment), (result_schema(), ExecResult)):
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        parts = [schema, *(one for one in schema["$defs"].values() if "properties" in one)]
        assert [name for part in parts for name, one in part["properties"].items() if not one.get("description")] == []


def test_results_match_their_schema() -> None:
    schema = result_schema()
    least = ExecResult("a", "r", ResultStatus.SUCCESS, "w", ResultJob("t"))
    load = OverloadStatus.HEALTHY
    whole = ExecResult("a", "r", ResultStatus.ERROR, "w", ResultJob("t"), 1.5, 0, "trace", "acme", 1, 2, load, "w", 3)
    whole = structs.replace(whole, error_code="HTTP_ERROR", error_message="500", output={"status_code": 500})
    for one in (least, whole):
        assert is_valid(json.loads(encode(one)), schema, schema)
    wrong: dict[str, Any]
    for wrong in ({"status": "done"}, {"error_code": "http_error"}, {"retries_used": "3"}, {"job": {}}):
        assert not is_valid({**json.loads(encode(whole)), **wrong}, schema, schema), wrong


def test_the_command_prints_each_schema_and_refuses_other_words() -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "reefknot", "config", "schema", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert json.loads(command("--of", "assignment").stdout) == assignment_schema()
    assert json.loads(command("--of", "result").stdout) == result_schema()
    refused = command("--of", "asignment")
    assert (refused.returncode, "did you mean 'assignment'?" in refused.stderr) == (2, True)


def test_the_schemas_of_the_wire_are_all_there_described_and_open_to_fields_of_newer_versions() -> None:
    parts = wire_schemas("#/$defs/{name}")
    root = {"$defs": parts}
    assert {one.__name__ for one in WIRE} <= parts.keys()
    assert [name for name, part in parts.items() if part.get("additionalProperties") is False] == []
    assert "comes back in the result" in parts["ExecAssignment"]["properties"]["request_id"]["description"]
    assignment = {"assignment_id": "a", "request_id": "r", "job": {"type": "own.step"}, "later": 1}
    assert is_valid(assignment, parts["ExecAssignment"], root)
    assert not is_valid(assignment | {"request_id": "x" * (LONGEST_ID + 1)}, parts["ExecAssignment"], root)
    result = ExecResult("a", "r", ResultStatus.SUCCESS, "w1", ResultJob("own.step"))
    assert is_valid(json.loads(encode(result)), parts["ExecResult"], root)
