"""The OpenAPI document, and the API by it: requests that it allows and requests that it forbids, against a server."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from reefknot.app.system import running_system
from reefknot.console.dashboard.api_routes import ROUTES
from reefknot.console.dashboard.api_types import PREFIX
from reefknot.console.dashboard.openapi import openapi_document
from reefknot.console.dashboard.server import prepare, serving
from reefknot.console.dashboard.site import Site
from reefknot.console.operations import jobs, systems
from reefknot.core.redaction import Redactor
from reefknot.policy.settings import load_settings
from tests.security.test_dashboard_input import CONFIGURED

STARTING_S = 60
EXAMPLES = 8
CHECKS = [
    *(not_a_server_error, checks.status_code_conformance),
    *(checks.content_type_conformance, checks.response_schema_conformance),
]


class Api(NamedTuple):
    """A running server: its address, and the operator's token."""

    url: str
    token: str


@contextmanager
def running(folder: Path) -> Iterator[Api]:
    """A system with its dashboard, in a loop and thread of its own."""
    ready, found, failed = threading.Event(), [], []
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()

    async def main() -> None:
        configured = load_settings(str(folder / "reefknot.yaml"), environ={}, cwd=folder)
        how = prepare(configured, port=0)
        async with running_system(f"sqlite:{folder / 'state.db'}", configured, drain=0.0) as system:
            site = Site(system.store, access=how.access, redactor=Redactor(()), settings=configured, shown="sqlite:x")
            async with serving(site, how):
                found.append(Api(how.url.rstrip("/"), how.token or ""))
                ready.set()
                await ending.wait()

    def run() -> None:
        try:
            loop.run_until_complete(main())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server of a test")
    thread.start()
    try:
        assert ready.wait(STARTING_S)
        assert not failed, failed
        yield found[0]
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(STARTING_S)
        loop.close()
    assert not failed, failed


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("api")
    (folder / "reefknot.yaml").write_text(CONFIGURED)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.setattr(systems, "OBEY_WAIT_S", 0.0)  # whether a worker obeys is not the question here
    patch.setattr(jobs, "CANCEL_WAIT_S", 0.0)
    with running(folder) as api:
        yield api
    patch.undo()


def operations(document: dict[str, Any]) -> dict[str, Any]:
    """The operations of a document by id."""
    results: Any = schemathesis.openapi.from_dict(document).get_all_operations()
    return {one.ok().definition.raw["operationId"]: one.ok() for one in results}


OPERATIONS = operations(openapi_document())


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_answers_as_the_document_says(name: str, served: Api) -> None:
    same: dict[str, Any] = {"deadline": None, "derandomize": True, "database": None, "phases": [Phase.generate]}

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), **same)
    @given(case=OPERATIONS[name].as_strategy())
    def check(case: Any) -> None:
        validate(case, served)

    check()


def validate(case: Any, served: Api) -> None:
    headers = {"Authorization": f"Bearer {served.token}"}
    case.call_and_validate(base_url=f"{served.url}{PREFIX}", headers=headers, checks=CHECKS)


def test_an_answer_that_the_document_does_not_know_would_be_seen(served: Api) -> None:
    """The control: the same question, by a document that promises a field too many."""
    document = openapi_document()
    schema = document["paths"]["/jobs"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    schema["required"].append("no_such_field")
    case = operations(document)["list_jobs"].Case(query={})
    with pytest.raises(BaseExceptionGroup):
        validate(case, served)


def test_the_document_has_every_route_once_and_is_json() -> None:
    """No question takes a body, and every action has one."""
    document = json.loads(json.dumps(openapi_document()))
    listed = [(method.upper(), path) for path, item in document["paths"].items() for method in item]

    assert sorted(listed) == sorted((route.method, route.path) for route in ROUTES)
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    assert document["openapi"] == "3.1.0"
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        in_path = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", route.path)), route.path
        assert ("requestBody" in operation) is (route.body is not None) is (not route.is_read)
    assert {route.method for route in ROUTES} == {"GET", "POST"}
