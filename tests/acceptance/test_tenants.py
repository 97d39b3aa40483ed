"""Tenants that use the same id, from processes of their own: each gets its own result, whichever came first."""

import json
from typing import Any

import pytest

from tests.acceptance.folder import Folder, until

STEP = """\
import asyncio
import os
import reefknot as rk

@rk.block("own.tell")
async def tell(inputs, context):
    with open("begun.txt", "a") as file:
        file.write(f"{context.tenant_id}\\n")
    while not os.path.exists("go"):
        await asyncio.sleep(0.05)
    if inputs.get("fails"):
        raise PermissionError("not this one")
    return {"for": context.tenant_id, "key": context.idempotency_key}
"""
CLIENT = """\
import asyncio
import json
import sys
import reefknot as rk

async def main(tenant, engine):
    async with rk.connect(engine) as client:
        handle = await client.submit("own.tell", assignment_id="order-7", tenant_id=tenant or None)
        print("submitted", handle.assignment_id, flush=True)
        result = await handle.result(30)
        print(json.dumps([result.assignment_id, result.tenant_id, result.output, await handle.status()]))

asyncio.run(main(*sys.argv[1:]))
"""
BROKEN = """\
import runpy
import sys
from reefknot.queue.model import work

work.record_id = lambda assignment_id, tenant_id: assignment_id
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
COMMAND = "import sys\nfrom reefknot.console.cli import main\nsys.exit(main())\n"


def told(tenant: str) -> list[Any]:
    """What the client of a tenant says of its result; the empty name has none."""
    key = f"{tenant}|order-7/0" if tenant else "order-7/0"
    return ["order-7", tenant or None, {"for": tenant or None, "key": key}, "succeeded"]


def answers_of(folder: Folder, tenants: tuple[str, ...], program: tuple[str, ...] = ()) -> list[Any]:
    """What each is told, and once more when all have ended. The first one's step runs when the others submit."""
    files = {"tell.py": STEP, "client.py": CLIENT, "broken.py": BROKEN, "command.py": COMMAND}
    for name, text in files.items():
        (folder.path / name).write_text(text)
    system = folder.start("up", "--module", "tell", program=(*program, "command.py"))
    assert system.stderr is not None
    assert system.stderr.readline().startswith("up ")

    def ask(tenant: str) -> Any:
        client = folder.start(tenant, folder.engine, program=(*program, "client.py"))
        assert client.stdout is not None
        assert client.stdout.readline() == "submitted order-7\n"
        return client

    def answer(client: Any) -> Any:
        """The second line, read like the first: `communicate` would not see what is buffered with that."""
        line = client.stdout.readline()
        folder.ends(client)
        return json.loads(line)

    clients = [ask(tenants[0])]
    until(lambda: len(folder.begun()) == 1)
    clients += map(ask, tenants[1:])
    folder.go()
    answers = [answer(client) for client in clients]
    return answers + [answer(client) for client in [ask(tenant) for tenant in tenants]]


@pytest.mark.parametrize("tenants", [("acme", "bolt", ""), ("", "bolt", "acme")])
def test_clients_of_several_tenants_with_one_id_get_their_own_results(folder: Folder, tenants: tuple[str, ...]) -> None:
    assert answers_of(folder, tenants) == [told(tenant) for tenant in tenants * 2]
    assert sorted(folder.begun()) == sorted(tenant or "None" for tenant in tenants), "each ran once"

    listed = folder.json("job", "list")["jobs"]
    assert {(one["id"], one["tenant_id"]) for one in listed} == {("order-7", name or None) for name in tenants}
    for name in filter(None, tenants):
        shown = folder.json("job", "show", "order-7", "--tenant", name)
        assert (shown["id"], shown["tenant_id"], shown["result"]["output"]["for"]) == ("order-7", name, name)
        assert {(one["work_id"], one["tenant_id"]) for one in shown["events"]} == {("order-7", name)}
    assert folder.job("order-7")["tenant_id"] is None
    for words in (("job", "list"), ("job", "list", "--json"), ("audit", "tail", "--json"), ("audit", "tail")):
        assert "acme|order-7" not in folder(*words).out


def test_control_records_that_ignore_the_tenant_would_be_caught(folder: Folder) -> None:
    answers = answers_of(folder, ("acme", "bolt"), program=("broken.py",))
    assert [output["for"] for _, _, output, _ in answers] == ["acme"] * 4


def test_a_file_may_have_the_same_id_for_several_tenants(folder: Folder) -> None:
    folder.write("tell.py", STEP)
    lines = [_line("acme"), _line("bolt"), _line(None), _line("bolt")]
    folder.write("work.jsonl", "".join(lines))
    folder.go()
    process = folder.start("run", "work.jsonl", "--module", "tell", "--results", "results.jsonl", "--json")
    code, out, err = folder.ends(process)
    assert (code, json.loads(out)["succeeded"], json.loads(out)["rejected"]) == (1, 3, 1), err
    assert "work.jsonl:4: assignment_id: 'order-7' is in line 2 already" in err
    results = [json.loads(line) for line in (folder.path / "results.jsonl").read_text().splitlines()]
    found = {(one.get("tenant_id"), one["output"]["for"]) for one in results}
    assert found == {("acme", "acme"), ("bolt", "bolt"), (None, None)}


def _line(tenant: str | None, **payload: object) -> str:
    whose = {} if tenant is None else {"tenant_id": tenant}
    job = {"type": "own.tell", "payload": payload}
    return json.dumps({"assignment_id": "order-7", "request_id": "r", "job": job, **whose}) + "\n"


def test_what_failed_for_one_tenant_is_requeued_for_it_alone(folder: Folder) -> None:
    folder.write("tell.py", STEP)
    folder.write("work.jsonl", _line("acme", fails=True) + _line("bolt", fails=True))
    folder.go()
    assert folder.ends(folder.start("run", "work.jsonl", "--module", "tell"))[0] == 1
    assert {one["tenant_id"] for one in folder.json("quarantine", "list")["items"]} == {"acme", "bolt"}
    assert "--tenant" in folder("quarantine", "show", "order-7").err
    assert folder.json("quarantine", "show", "order-7", "--tenant", "bolt")["tenant_id"] == "bolt"
    assert folder("quarantine", "requeue", "order-7").code == 1
    done = folder.json("quarantine", "requeue", "order-7", "--tenant", "acme")
    assert (done["requeued"], done["tenant_ids"]) == (["order-7"], ["acme"])
    discard = ("quarantine", "discard", "order-7", "--tenant", "bolt", "--because", "withdrawn")
    assert folder(*discard).out == "order-7 of bolt discarded\n"
    states = {one["tenant_id"]: one["state"] for one in folder.json("job", "list")["jobs"]}
    assert states == {"acme": "pending", "bolt": "discarded"}
