"""The AsyncAPI document says what is on the wire: every subject, every message, every field."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from reefknot.queue.model import messages
from reefknot.queue.model.message_schema import WIRE
from tools import asyncapi_page

DOCUMENT: dict[str, Any] = yaml.safe_load(asyncapi_page.PAGE.read_text(encoding="utf-8"))


def _references(place: Any) -> Iterator[str]:
    if isinstance(place, dict):
        yield from [place["$ref"]] if "$ref" in place else []
        for one in place.values():
            yield from _references(one)
    elif isinstance(place, list):
        for one in place:
            yield from _references(one)


def test_the_file_is_what_the_code_says() -> None:
    assert asyncapi_page.main(["--check"]) == 0
    assert DOCUMENT["asyncapi"] == "3.0.0"


def test_every_subject_of_the_code_is_a_channel() -> None:
    subjects = {value for name, value in vars(messages).items() if name.isupper() and str(value).startswith("caf.")}
    subjects.add(messages.assign_subject("{worker_id}"))
    assert {one["address"] for one in DOCUMENT["channels"].values()} == subjects


def test_every_reference_leads_somewhere() -> None:
    found = list(_references(DOCUMENT))
    assert len(found) > 20
    for one in found:
        place: Any = DOCUMENT
        for part in one.removeprefix("#/").split("/"):
            place = place[part]
        assert place


@pytest.mark.parametrize("kind", WIRE)
def test_every_field_of_a_message_is_there_and_required_where_the_code_requires_it(kind: type[msgspec.Struct]) -> None:
    schema = DOCUMENT["components"]["schemas"][kind.__name__]
    fields = msgspec.structs.fields(kind)
    assert list(schema["properties"]) == [field.encode_name for field in fields]
    assert schema["required"] == [field.encode_name for field in fields if field.required]


def test_a_file_that_says_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncapi_page, "PAGE", tmp_path / "asyncapi.yaml")
    monkeypatch.setattr(asyncapi_page, "ROOT", tmp_path)
    assert asyncapi_page.main(["--check"]) == 1
    assert asyncapi_page.main([]) == 0
    assert asyncapi_page.main(["--check"]) == 0
    assert asyncapi_page.main(["--force"]) == 2
