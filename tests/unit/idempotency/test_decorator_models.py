"""`@idempotent` with models: pydantic's, attrs', dataclasses and Structs, as arguments and as results."""

import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import attrs
import pytest
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field

import reefknot as rk
from tests.rows import for_each_row


class Line(BaseModel):
    name: str
    count: int = 1


class Order(BaseModel):
    id: str
    cents: int
    lines: list[Line] = []


@attrs.define
class AttrsOrder:
    id: str
    cents: int


class StructOrder(Struct):
    id: str
    cents: int


@dataclass
class WithModel:
    id: str
    order: Order


class Receipt(BaseModel):
    """A model whose own JSON is not what it can be read from by default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    number: int = Field(alias="no")
    no: str | None = Field(None, alias="text")
    day: date = date(2026, 1, 2)
    tags: tuple[str, ...] = ()
    order: Order | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        return f"receipt {self.number}"


class Connection:
    """Nothing that JSON can hold."""


RECEIPT = Receipt.model_validate(
    {"no": 7, "text": "x", "tags": ("a", "b"), "order": Order(id="o", cents=1), "day": date(2026, 3, 4)}
)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (Order(id="o", cents=1), Order(id="o", cents=99)),
        (Order(id="o", cents=1, lines=[Line(name="rope")]), Order(id="o", cents=1, lines=[Line(name="rope", count=2)])),
        (AttrsOrder("o", 1), AttrsOrder("o", 99)),
        (StructOrder("o", 1), StructOrder("o", 99)),
        (WithModel("o", Order(id="o", cents=1)), WithModel("o", Order(id="o", cents=99))),
        ([Order(id="o", cents=1)], [Order(id="o", cents=99)]),
        ({"order": Order(id="o", cents=1)}, {"order": Order(id="o", cents=99)}),
    ],
)
async def test_a_model_is_compared_by_its_content(first: Any, other: Any) -> None:
    @rk.idempotent(key=lambda order: "o")
    async def pay(order: Any) -> str:
        return "paid"

    async with rk.open_store("memory:"):
        assert [await pay(first), await pay(first)] == ["paid"] * 2
        with pytest.raises(rk.KeyConflictError):
            await pay(other)


@pytest.mark.parametrize(
    ("argument", "fingerprint"),
    [
        ("text", "48018160968203527aa4d6c5f2fa277a3abc2fbf2aa83fe4c024eaf74ea65bc8"),
        (StructOrder("o", 1), "73ec11c1e49c2a94adf14aea20437a50f008fc3dd9203b3444c502b4ad778ff9"),
        (AttrsOrder("o", 1), "73ec11c1e49c2a94adf14aea20437a50f008fc3dd9203b3444c502b4ad778ff9"),
        (Connection(), "8265cf7c370f9169b34990256f8c092cc716a2671382630d90e9e2aa3ddb1395"),
        ([Connection()], "24f87681a3747ad2c1a4f0df288f4839e24d3eb9d8577de53d7d8691c4abb2d7"),
    ],
)
async def test_the_stored_fingerprints_of_other_arguments_stay_as_they_were(argument: Any, fingerprint: str) -> None:
    """Taken before models of pydantic were compared."""

    @rk.idempotent(key=lambda value: "k", name="kept")
    async def keep(value: Any) -> None: ...

    async with rk.open_store("memory:") as store:
        await keep(argument)
        record = await store.idempotency.get("kept:k")
    assert record is not None
    assert record.fingerprint == fingerprint


async def test_a_computed_field_is_not_part_of_the_payload() -> None:
    class Timed(BaseModel):
        id: str

        @computed_field  # type: ignore[prop-decorator]
        @property
        def reads(self) -> int:
            reads.append(self.id)
            return len(reads)

    reads: list[str] = []

    @rk.idempotent(key=lambda order: order.id)
    async def pay(order: Any) -> str:
        return "paid"

    async with rk.open_store("memory:"):
        assert [await pay(Timed(id="o")), await pay(Timed(id="o"))] == ["paid"] * 2


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        (Order, Order(id="o", cents=1, lines=[Line(name="rope")])),
        (Receipt, RECEIPT),
        (list[Order], [Order(id="o", cents=1)]),
        (dict[str, Order], {"o": Order(id="o", cents=1)}),
        (Order | None, Order(id="o", cents=1)),
        (Order | None, None),
        (WithModel, WithModel("o", Order(id="o", cents=1))),
        (RootModel[list[Order]], RootModel[list[Order]]([Order(id="o", cents=1)])),
        (AttrsOrder, AttrsOrder("o", 1)),
    ],
)
async def test_every_caller_gets_an_equal_model_of_the_type(url: str, kind: Any, result: Any) -> None:
    calls = 0

    @rk.idempotent(key=lambda: "k", result_type=kind)
    async def make() -> Any:
        nonlocal calls
        calls += 1
        return result

    async with rk.open_store(url):
        first, later = await make(), await make()
    assert (first, later, calls) == (result, result, 1)
    assert type(first) is type(later) is type(result)


async def test_without_a_type_a_model_is_given_back_as_a_dataclass_is(url: str) -> None:
    @rk.idempotent(key=lambda one: type(one).__name__)
    async def make(one: Any) -> Any:
        return one

    async with rk.open_store(url):
        for one in (Order(id="o", cents=1, lines=[]), StructOrder("o", 1)):
            first, later = await make(one), await make(one)
            assert (first, first["id"], first["cents"]) == (later, "o", 1)


async def test_a_result_that_cannot_be_kept_is_refused_at_decoration_or_when_it_comes() -> None:
    async def connect() -> Connection:
        return Connection()

    def folder() -> Path:
        return Path()

    for function, name in ((connect, "Connection"), (folder, "Path")):
        with pytest.raises(rk.ParameterTypeError, match=rf"-> {name}.*result_type="):
            rk.idempotent(key=lambda: "k", name=name)(function)
    rk.idempotent(key=lambda: "k", name="said", result_type=dict)(connect)

    @rk.idempotent(key=lambda: "k")
    async def make() -> Any:
        return Connection()

    async with rk.open_store("memory:"):
        with pytest.raises(rk.NotJsonError, match=r"Connection.*result_type="):
            await make()


@for_each_row("annotation", ["Order", "Any", "object", "Unknown", "None", "dict[str, Order]", "BaseModel"])
def test_an_annotation_that_may_be_kept_or_is_not_known_is_accepted(annotation: str) -> None:
    async def make() -> None: ...

    make.__annotations__["return"] = annotation
    rk.idempotent(key=lambda: "k", name=f"make {annotation}")(make)


async def test_a_manager_keeps_a_model_and_gives_it_back(url: str) -> None:
    async with rk.open_store(url):
        manager = rk.RetryManager()

        async def make() -> Receipt:
            return RECEIPT

        run: dict[str, Any] = {"idempotency_key": "k", "result_type": Receipt}
        assert await manager.execute_with_retry("http", "make", make, **run) == RECEIPT
        assert await manager.execute_with_retry("http", "make", make, **run) == RECEIPT
        keys = manager.idempotency_manager
        await keys.record_result("k", RECEIPT)
        await keys.record_result("o", Order(id="o", cents=1))
        await keys.record_result("o", Order(id="o", cents=1))
        with pytest.raises(rk.KeyConflictError):
            await keys.record_result("o", Order(id="o", cents=99))
        assert await keys.check_idempotency("o") == {"id": "o", "cents": 1, "lines": []}


def test_pydantic_is_not_imported_for_arguments_and_results_that_are_not_of_it() -> None:
    program = """
import asyncio, dataclasses, sys
import reefknot as rk

@dataclasses.dataclass
class Order:
    id: str

class Gateway: ...

@rk.idempotent(key=lambda order, gateway: order.id, result_type=Order)
async def pay(order: Order, gateway: Gateway) -> Order:
    return order

async def main():
    async with rk.open_store("memory:"):
        return [await pay(Order("o"), Gateway()) for _ in range(2)]

assert asyncio.run(main()) == [Order("o")] * 2
assert "pydantic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
