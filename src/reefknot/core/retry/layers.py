"""
Who said what, and who wins.

A patch is what one place said about a policy, field by field; each saying knows its layer and its source. Folding
patches in their order gives the winner of every field and, beneath it, what it overrode. Not said is not in the patch;
"said: none" is.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from msgspec import Struct


class Layer(StrEnum):
    """Where a value was said, lowest first."""

    BUILTIN = "builtin"
    GLOBAL = "global"
    CATEGORY = "category"
    TARGET = "target"
    OVERRIDE = "override"
    SOURCE = "source"
    REQUEST = "request"

    @property
    def rank(self) -> int:
        """How near to the request it is."""
        return list(Layer).index(self)


class Said(Struct, frozen=True):
    """A value, and where it was said."""

    value: Any
    layer: Layer
    source: str


class Settled(Struct, frozen=True):
    """The value that won, where it was said, and what it overrode, the nearest first."""

    value: Any
    layer: Layer
    source: str
    overrode: tuple[Said, ...] = ()


Patch = Mapping[str, Said]
NOTHING_SAID: Patch = MappingProxyType({})


def patch(layer: Layer, source: str, fields: Mapping[str, Any]) -> Patch:
    """Everything in `fields`, said in one place."""
    return MappingProxyType({name: Said(value, layer, source) for name, value in fields.items()})


def merge(lower: Patch, higher: Patch) -> Patch:
    """Two patches as one: where both speak, the higher one does. Associative, with `NOTHING_SAID` as its neutral."""
    return MappingProxyType({**lower, **higher})


def settle(patches: Iterable[Patch]) -> dict[str, Settled]:
    """Fold patches, lowest first, into winners that know what they overrode."""
    settled: dict[str, Settled] = {}
    for one in patches:
        for name, said in one.items():
            beaten = settled.get(name)
            overrode = () if beaten is None else (Said(beaten.value, beaten.layer, beaten.source), *beaten.overrode)
            settled[name] = Settled(said.value, said.layer, said.source, overrode)
    return settled
