"""
The applications of the guides under the real frameworks: every order is one job that ends once.

Each is a process of its own, and so are a router and two workers. `make faults` sends 500 orders to each.
"""

import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import reefknot as rk
from reefknot.console.cli.config import example_files
from tests.acceptance.folder import ROOT, Folder
from tests.docs.run_page import fences
from tests.faults.points import either

ORDERS, ORDERS_ON_NATS = either(60, 500), either(20, 500)
AT_ONCE = 8
CLIENT_S = 200
STEPS = """\
import reefknot as rk

@rk.block("order.confirm")
def confirm(inputs, context):
    with open("begun.txt", "a") as file:
        file.write(context.assignment_id + "\\n")
    return {"sent_to": inputs["email"]}
"""
FLASK_CLIENT = """\
from wsgi import app

web = app.test_client()

def post(order):
    return web.post("/orders", json=order).status_code

def get(number):
    answer = web.get(f"/orders/{number}")
    return answer.status_code, answer.json
"""
DJANGO_CLIENT = """\
import django

django.setup()

from django.core.management import call_command
from django.test import Client

call_command("migrate", run_syncdb=True, verbosity=0)
web = Client()

def post(order):
    return web.post("/orders", order, content_type="application/json").status_code

def get(number):
    answer = web.get(f"/orders/{number}")
    return answer.status_code, answer.json() if answer.status_code == 200 else None
"""
FULL = """\
import reefknot as rk

def refuse(*words, **options):
    raise rk.QueueFullError(depth=9, limit=9, retry_after=2.4)

order = {"number": 7, "email": "ada@example.com"}
"""
FULL_QUEUES = {
    "fastapi": FULL
    + """\
from contextlib import asynccontextmanager
from types import SimpleNamespace
from app import make_app
from fastapi.testclient import TestClient

@asynccontextmanager
async def connect():
    yield SimpleNamespace(submit=refuse)

with TestClient(make_app(connect)) as web:
    answer = web.post("/orders", json=order)
print(answer.status_code, answer.headers["Retry-After"], answer.json()["error"])
""",
    "flask": FULL
    + """\
from types import SimpleNamespace
from app import create_app

answer = create_app(SimpleNamespace(submit=refuse)).test_client().post("/orders", json=order)
print(answer.status_code, answer.headers["Retry-After"], answer.json["error"])
""",
    "django": FULL
    + """\
from types import SimpleNamespace
import django

django.setup()

from django.core.management import call_command
from django.test import Client
from shop import jobs

call_command("migrate", run_syncdb=True, verbosity=0)
for name in ("jobs", "client"):
    setattr(jobs, name, lambda: SimpleNamespace(submit=refuse))
answer = Client().post("/orders", order, content_type="application/json")
print(answer.status_code, answer.headers["Retry-After"], answer.json()["error"])
""",
}
DRIVER = """
import json, sys
from shop_client import get, post

orders = range(int(sys.argv[1]))
taken, found = [], []
for number in orders:
    taken.append(post({"number": number, "email": f"{number}@example.com"}))
    found.append(get(number)[0])
print(json.dumps([taken, found, get(len(orders))[0]]), flush=True)
sys.stdin.read()  # until the test has seen that all have ended
print(json.dumps([get(number) for number in orders]))
"""


@pytest.fixture
def shop(folder: Folder) -> Folder:
    """A router and two workers that know the step of the shop."""
    folder.write("confirmations.py", STEPS)
    folder.part("router")
    for name in ("one", "two"):
        folder.part("worker", "--worker-id", name, "--module", "confirmations")
    return folder


def write_guide(folder: Folder, name: str) -> None:
    """Write the Python files of a guide into the folder, as its reader would."""
    page = ROOT / "docs" / "guides" / f"{name}.md"
    for fence in fences(page.read_text(encoding="utf-8")):
        if fence.file.endswith(".py"):
            target = folder.path / fence.file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(fence.content)


def serve(folder: Folder, program: Sequence[str], ready: str) -> tuple[subprocess.Popen[str], str]:
    """A web server as soon as it listens, and its address."""
    server = folder.start(program=("-m", *program), before=("env",))
    assert server.stderr is not None
    lines = [server.stderr.readline()]
    while not (found := re.search(rf"{ready} (http://127\.0\.0\.1:\d+)", lines[-1])):
        lines.append(server.stderr.readline())
        assert lines[-1], lines
    return server, found[1]


def asked(url: str, given: object = None) -> tuple[int, Any]:
    """The status and the JSON of an answer, over a connection of its own: any worker of the server may take it."""
    body = None if given is None else json.dumps(given).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


@pytest.fixture
def orders(folder: Folder) -> range:
    """The numbers of the orders: fewer on a server, where a client of each process is most of the time."""
    return range(ORDERS if folder.engine.startswith("sqlite:") else ORDERS_ON_NATS)


def wait_for_all(folder: Folder, orders: range) -> None:
    with rk.connect_sync(folder.engine, create=False) as client:
        ends = {client.job(f"order-{number}").wait(60) for number in orders}
    assert ends == {"succeeded"}


def each_ended_once(folder: Folder, orders: range, answers: Sequence[tuple[int, Any]]) -> None:
    outputs = [(status, answer["status"], answer["output"]) for status, answer in answers]
    assert outputs == [(200, "succeeded", {"sent_to": f"{number}@example.com"}) for number in orders]
    assert sorted(folder.begun()) == sorted(f"order-{number}" for number in orders), "each ran once"


@pytest.mark.parametrize(
    ("guide", "path", "program", "ready"),
    [
        ("flask", "orders/", "gunicorn --preload --workers 4 --bind 127.0.0.1:0 wsgi:app", "Listening at:"),
        ("fastapi", "jobs/order-", "uvicorn app:app --port 0 --no-access-log", "running on"),
    ],
    ids=["flask-gunicorn", "fastapi-uvicorn"],
)
def test_a_served_application_finds_each_of_its_jobs_which_end_once(
    shop: Folder, orders: range, guide: str, path: str, program: str, ready: str
) -> None:
    write_guide(shop, guide)
    server, address = serve(shop, program.split(), ready)

    def get(number: int) -> tuple[int, Any]:
        return asked(f"{address}/{path}{number}")

    def order(number: int) -> tuple[int, int]:
        taken, _ = asked(f"{address}/orders", {"number": number, "email": f"{number}@example.com"})
        return taken, get(number)[0]

    with ThreadPoolExecutor(AT_ONCE) as callers:
        answers = list(callers.map(order, orders))
        assert {taken for taken, _ in answers} == {202}
        assert {found for _, found in answers} <= {200, 202}, "never 404"
        assert get(len(orders))[0] == 404
        wait_for_all(shop, orders)
        each_ended_once(shop, orders, list(callers.map(get, orders)))
    code, _, err = shop.stop(server)
    assert code in (0, -signal.SIGTERM), err  # uvicorn ends in order, and then by the signal it got


@pytest.mark.parametrize(
    ("guide", "client"), [("flask", FLASK_CLIENT), ("django", DJANGO_CLIENT)], ids=["flask", "django"]
)
def test_an_application_under_a_test_client_finds_jobs(shop: Folder, orders: range, guide: str, client: str) -> None:
    write_guide(shop, guide)
    shop.write("shop_client.py", client)
    shop.write("drive.py", DRIVER)
    shop.set_variable("DJANGO_SETTINGS_MODULE", "shop.settings")
    web = shop.start(str(len(orders)), program=("drive.py",), stdin=subprocess.PIPE)
    assert web.stdout is not None
    first = web.stdout.readline()
    assert first, web.communicate(timeout=CLIENT_S)
    taken, found, unknown = json.loads(first)
    assert set(taken) == {202}
    assert set(found) <= {200, 202}, "never 404"
    assert unknown == 404

    wait_for_all(shop, orders)
    out, err = web.communicate("", timeout=CLIENT_S)
    assert web.returncode == 0, err
    each_ended_once(shop, orders, json.loads(out))


@pytest.mark.parametrize("name", FULL_QUEUES)
@pytest.mark.parametrize("origin", ["guide", "example"])
def test_a_full_queue_is_answered_with_the_time_to_come_back(folder: Folder, name: str, origin: str) -> None:
    if origin == "guide":
        write_guide(folder, name)
    else:
        for path, text in example_files(name).items():
            (folder.path / path).parent.mkdir(parents=True, exist_ok=True)
            (folder.path / path).write_text(text)
    folder.write("full.py", FULL_QUEUES[name])
    folder.set_variable("DJANGO_SETTINGS_MODULE", "shop.settings")
    code, out, err = folder.ends(folder.start(program=("full.py",)))
    assert code == 0, err
    assert out == "503 3 queue is full: 9 of 9 places taken; try again in 2.4 s\n"
