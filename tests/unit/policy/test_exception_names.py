"""Exceptions by name: what is said of a name is what happens to the exception."""

import asyncio
import builtins
import concurrent.futures
import http.client
import imaplib
import inspect
import json
import smtplib
import socket
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
from types import ModuleType
from typing import Any

import aiohttp
import apsw
import httpx2
import nats.errors
import psycopg
import psycopg_pool
import pytest
import requests
import trio
import urllib3.exceptions

import reefknot as rk
from reefknot.console.operations.policies import PolicyQuestion, active_book, explained
from reefknot.core.failure import Failure
from reefknot.policy.book import LIBRARIES, exception_class, exception_names, failure_from_facts, is_known_exception
from reefknot.policy.model.defaults import builtin_book
from reefknot.policy.model.explain import explain
from reefknot.queue.execution.failures import failure_of_step, outcome_of
from reefknot.retrying.failures import failure_from
from tests.rows import for_each_row

BUILT_IN = (builtins, asyncio, concurrent.futures, http.client, json, smtplib, socket, sqlite3, ssl, subprocess)
INSTALLED = (aiohttp, apsw, httpx2, trio, nats.errors, psycopg, psycopg.errors, psycopg_pool, requests)
OF_REQUESTS = (urllib.error, requests.exceptions, urllib3.exceptions)
MODULES: dict[str, Any] = {one.__name__: one for one in (*BUILT_IN, *INSTALLED, *OF_REQUESTS)}
MODULES["imaplib.IMAP4"] = imaplib.IMAP4


def classes() -> dict[str, type[Exception]]:
    """Every exception class of these modules, under the name by which it is imported."""
    found = {f"{name}.{one}": cls for name, module in MODULES.items() for one, cls in vars(module).items()}
    return {
        name: cls
        for name, cls in found.items()
        if inspect.isclass(cls) and issubclass(cls, Exception) and not issubclass(cls, Warning | BaseExceptionGroup)
    }


def raised(cls: type[Exception]) -> Exception:
    """An exception of the class that says nothing but its class, however many arguments the class wants."""
    error = cls.__new__(cls)
    Exception.__init__(error)
    return error


def in_worker(error: Exception) -> Failure:
    """The failure that a worker decides about, when a step raised this."""
    outcome = outcome_of(error, lambda step: (False, 0))
    return failure_of_step(outcome.step, outcome.exceptions)


def test_what_is_said_of_every_class_is_what_happens_to_its_exception() -> None:
    """Some hundreds of classes, each with the text that it has without arguments: its words count as well."""
    book, differing = builtin_book(), []
    active = active_book(None)
    for name, cls in classes().items():
        error = raised(cls)
        real = failure_from(error)
        told = failure_from_facts(exception=name, message=real.message)
        policy = book.resolve("block:my.step", in_worker(error))
        happens = explain("block:my.step", policy, in_worker(error)).retries
        question = PolicyQuestion(target="block:my.step", exception=name, message=real.message)
        answer = explained(active, question)
        if (real.code, real.failure_type, real.exceptions, happens) != (
            *(told.code, told.failure_type, told.exceptions),
            answer.retried,
        ):
            differing.append((name, real, told, happens, answer.retried))

    assert len(classes()) > 300
    assert differing == []


@for_each_row(
    ("name", "retried"),
    [
        *((name, True) for name in ("TimeoutError", "ConnectionResetError", "socket.gaierror", "socket.timeout")),
        *((f"httpx.{name}", True) for name in ("ReadTimeout", "ConnectError", "PoolTimeout", "CloseError")),
        *((f"httpx2.{name}", True) for name in ("ReadTimeout", "ConnectError", "RemoteProtocolError")),
        *((f"requests.{name}", True) for name in ("ReadTimeout", "ConnectionError", "exceptions.ConnectTimeout")),
        *((f"aiohttp.{name}", True) for name in ("ClientConnectorError", "ServerTimeoutError", "ClientPayloadError")),
        *((name, False) for name in ("ValueError", "PermissionError", "httpx2.InvalidURL", "imaplib.IMAP4.error")),
        *((name, False) for name in ("psycopg.errors.UniqueViolation", "sqlite3.IntegrityError", "NoSuchError")),
    ],
)
def test_a_name_is_answered_as_it_is_written_in_programs(name: str, retried: bool) -> None:
    assert explained(active_book(None), PolicyQuestion(target="block:my.step", exception=name)).retried is retried


def test_exceptions_of_httpx_are_known_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {name: failure_from_facts(exception=name) for name in classes() if name.startswith("httpx2.")}
    monkeypatch.setitem(sys.modules, "httpx2", None)

    assert exception_class("httpx2.ReadTimeout") is None
    for name, failure in installed.items():
        alone = failure_from_facts(exception=name)
        assert (alone.code, alone.failure_type) == (failure.code, failure.failure_type), name


def test_a_class_of_a_module_that_is_loaded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class BadGatewayError(ConnectionError):
        class Inner(ValueError): ...

    steps = ModuleType("my_steps")
    vars(steps)["BadGatewayError"] = BadGatewayError
    monkeypatch.setitem(sys.modules, "my_steps", steps)

    assert exception_class("my_steps.BadGatewayError") is BadGatewayError
    assert exception_class("my_steps.BadGatewayError.Inner") is BadGatewayError.Inner
    assert exception_class("my_steps.Missing") is None
    assert exception_class("reefknot.QueueFullError") is rk.QueueFullError, "an error of ours, by its public name"
    assert is_known_exception("reefknot.StoreFullError")
    assert is_known_exception("botocore.exceptions.SSLError")


def test_no_module_is_imported_for_a_name_and_no_code_of_a_loaded_one_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    for name in ("this.X", "antigravity.open", "reefknot.__main__.X", "requests.help.X", "idlelib.X"):
        assert exception_names(name) == (name,)
    assert set(sys.modules) == before
    assert not any(name.endswith("__main__") for name in LIBRARIES)

    class Loud(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "my_steps", Loud("my_steps"))
    assert exception_class("my_steps.X") is None


@for_each_row("name", ["", ".", "..", "x.", ".x", "os.system", "print", "json.loads", "a b", "ü.ü", "X" * 5000])
def test_a_name_that_is_no_class_stands_alone(name: str) -> None:
    assert exception_names(name) == (name,)
    assert not is_known_exception(name)
