"""
The HTTP API: from a request to an operation of `operations`, and from its answer to JSON.

Which operation a path means stands in the table of `api_routes`. Everything that a request brings is converted by the
types there, strictly: an unknown parameter, an unknown field, a key that stands twice or a number in place of a text is
refused, with the name of the parameter and what is accepted.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from math import isfinite
from typing import TYPE_CHECKING, Any, get_origin
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import Struct, ValidationError

from reefknot.console.dashboard.api_routes import ROUTES
from reefknot.console.dashboard.api_types import LOOK_S, PREFIX, ApiRoute, WrittenAssignment
from reefknot.console.dashboard.openapi import openapi_document
from reefknot.console.dashboard.site import HttpRefusal, Site
from reefknot.console.operations.metrics import CONTENT_TYPE, metrics_text
from reefknot.console.operations.values import ParameterUseError, check_limit, typed
from reefknot.errors import OperationError, ParameterError, ReefknotError, shown

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

MOST_PARAMETERS = 50
LONGEST_PARAMETER = 4096
MOST_LISTED = 1000
"""Entries of one page of a list."""
_JSON = "application/json"


class RequestError(Exception):
    """A request that no operation is asked with."""

    def __init__(self, refusal: HttpRefusal, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.headers = dict(headers or {})


def routes(site: Site) -> list[BaseRoute]:
    """
    The routes below `/api/v1`, and `/metrics`.

    Those of the API are matched here, by the path before it is decoded: an id may hold slashes.
    """
    from starlette.responses import Response
    from starlette.routing import Route

    document = msgspec.json.encode(openapi_document())

    def put(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        return Response(body, status, headers, media_type=_JSON)

    async def answer(request: Request) -> Response:
        route: ApiRoute | None = None
        try:
            parts = _parts(request)
            if parts == ["openapi.json"] and request.method in ("GET", "HEAD"):
                return put(document)
            route, given = matched(request.method, parts)
            return put(msgspec.json.encode(await _answer(site, route, request, given)))
        except RequestError as error:
            return put(msgspec.json.encode(error.refusal.tree()), error.refusal.status, error.headers)
        except (ReefknotError, TimeoutError, ConnectionError) as error:
            refusal = api_refusal(error, route, site)
            return put(msgspec.json.encode(refusal.tree()), refusal.status, refusal.headers)

    async def metrics(request: Request) -> Response:
        async with site.reading(request), asyncio.timeout(LOOK_S):
            return Response(await metrics_text(site.operator(request)), media_type=CONTENT_TYPE)

    # Every method comes here, so that a wrong one is answered with those that the path takes.
    return [Route(f"{PREFIX}/{{rest:path}}", answer, methods=_ALL_METHODS), Route("/metrics", metrics, methods=["GET"])]


_ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


async def _answer(site: Site, route: ApiRoute, request: Request, in_path: dict[str, str]) -> Any:
    """The answer of the operation that a request asks for."""
    parameters = parameters_of(route, in_path, request.scope.get("query_string", b""))
    body = None
    if route.body is not None:  # a large one takes a while, and the loop has other work
        given, media_type = await request.body(), request.headers.get("content-type")
        body = await asyncio.to_thread(body_of, route.body, media_type, given)
    async with site.reading(request) if route.is_read else nullcontext(), asyncio.timeout(route.seconds):
        if not route.is_read:
            await site.check_unlocked()
        found = route.call(site.operator(request), parameters, body)
        return await found if inspect.isawaitable(found) else found


def api_refusal(error: Exception, route: ApiRoute | None, site: Site) -> HttpRefusal:
    """The refusal of an operation. An unknown name in a path is a 404, as an unknown address is."""
    found = site.refusal(error)
    in_path = route is not None and isinstance(error, ParameterError) and error.parameter in route.path_names
    status, kind = (404, "not_found") if in_path and found.status == 400 else (found.status, found.kind)
    advice = f"; {error.advice} {error.parameter}=" if isinstance(error, OperationError) and error.advice else ""
    return msgspec.structs.replace(found, status=status, kind=kind, message=found.message + advice)


# ---- matching --------------------------------------------------------------------------------------------------------


def _parts(request: Request) -> list[str]:
    """The parts of the path behind the prefix, each decoded by itself."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    try:
        return [unquote_to_bytes(part).decode() for part in raw.decode("ascii").split("/")[3:]]
    except UnicodeDecodeError:
        raise RequestError(HttpRefusal(400, "invalid", "the path is not UTF-8, percent-encoded")) from None


def matched(method: str, parts: list[str]) -> tuple[ApiRoute, dict[str, str]]:
    """The route of a method and a path, and the values in the path."""
    found = [(route, values) for route in ROUTES if (values := route.values_in(parts)) is not None]
    if not found:
        raise _nothing_there()
    wanted = "GET" if method == "HEAD" else method
    for route, values in found:
        if route.method == wanted:
            return route, values
    taken = sorted({route.method for route, _ in found} | ({"HEAD"} if any(one.is_read for one, _ in found) else set()))
    text = f"{method[:20]} is not accepted here; accepted: {', '.join(taken)}"
    raise RequestError(HttpRefusal(405, "wrong_method", text), {"Allow": ", ".join(taken)})


def _nothing_there() -> RequestError:
    text = f"there is nothing at this address; {PREFIX}/openapi.json lists what there is"
    return RequestError(HttpRefusal(404, "not_found", text))


# ---- reading ---------------------------------------------------------------------------------------------------------


def parameters_of(route: ApiRoute, in_path: dict[str, str], query: bytes) -> Any:
    """The parameters of a request as the type of its route: those of the path, and those of the query string."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(route.parameters)}
    texts: dict[str, Any] = dict(in_path)
    for name, value in _pairs(query):
        if name not in fields or name in in_path:
            accepted = ", ".join(one for one in fields if one not in route.path_names) or "none"
            raise ParameterUseError(shown(name)[1:-1], f"unknown parameter; accepted here: {accepted}")
        if get_origin(fields[name].type) is tuple:
            texts.setdefault(name, []).append(value)
            continue
        if name in texts:
            raise ParameterUseError(name, "is given twice; give it once")
        texts[name] = value
    if not route.path_names <= texts.keys():
        raise _nothing_there()
    found = {name: typed(name, value, fields[name].type) for name, value in texts.items()}
    if isinstance(limit := found.get("limit"), int):
        check_limit(limit, MOST_LISTED)
    return made(route.parameters, found)


def _pairs(query: bytes) -> list[tuple[str, str]]:
    try:
        text = query.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MOST_PARAMETERS)
    except (UnicodeDecodeError, ValueError):
        raise OperationError(
            "the query string is not UTF-8, percent-encoded, or has too many fields", "invalid"
        ) from None
    for name, value in pairs:
        if len(value) > LONGEST_PARAMETER or "\0" in value:
            text = f"a text of at most {LONGEST_PARAMETER} characters, without NUL"
            raise ParameterError(shown(name)[1:-1], value, text)
    return pairs


def made(kind: type[Struct], fields: Mapping[str, Any]) -> Any:
    """An object of this type with these fields. A refusal by the type's own checks keeps its message."""
    try:
        return msgspec.convert(fields, kind)
    except ValidationError as error:
        if isinstance(error.__cause__, ReefknotError):
            raise error.__cause__ from None
        raise _refused_field(kind, str(error)) from None


_PLACE = re.compile(r"(.*) - at `(?:key in )?\$\.?(.*)`\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`\Z", re.DOTALL)


def _refused_field(kind: type[Struct], text: str) -> OperationError | ParameterUseError:
    """The refusal of a field, by its name, from the words of the decoder."""
    found = _PLACE.match(text)
    problem, place = (found[1], found[2]) if found else (text, "")
    if unknown := _UNKNOWN.match(problem):
        accepted = ", ".join(one.name for one in msgspec.structs.fields(kind))
        return ParameterUseError(shown(unknown[1])[1:-1], f"unknown field; accepted: {accepted}")
    if missing := _MISSING.match(problem):
        return ParameterUseError(missing[1], "missing; it must be given")
    problem = problem.replace("`", "").lower()
    return ParameterUseError(place, problem) if place else OperationError(f"the body: {problem}", "invalid")


def body_of(kind: type[Struct], media_type: str | None, body: bytes) -> Any:
    """The body of a request as the type of its route; without a body, its defaults."""
    if not body:
        return _checked_body(kind, {})
    if (media_type or "").partition(";")[0].strip().lower() != _JSON:
        text = f"the body is {(media_type or 'of no type')[:60]!r}; accepted: {_JSON}"
        raise RequestError(HttpRefusal(415, "wrong_media_type", text))
    if (encoding := json.detect_encoding(body)) not in ("utf-8", "utf-8-sig"):
        raise OperationError(f"the body is not JSON in UTF-8, it begins as {encoding.upper()}", "invalid")
    try:
        value = json.loads(body, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise OperationError("the body is nested too deeply", "invalid") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise OperationError(f"the body is not JSON: {error}", "invalid") from None
    except ReefknotError:
        raise
    except ValueError:  # of Python's bound for numbers
        most = sys.get_int_max_str_digits()
        raise OperationError(f"the body has a number of too many digits; accepted: up to {most}", "invalid") from None
    _check_values(value)
    return _checked_body(kind, value)


def _check_values(value: Any) -> None:
    """Refuse values that Python reads and no store can keep: lone surrogates, and numbers that are not finite."""
    waiting: list[tuple[_Place, Any]] = [((), value)]
    while waiting:
        place, one = waiting.pop()
        match one:
            case str() if not _is_text(one):
                raise ParameterUseError(
                    _place_text(place), "half of a surrogate pair; accepted: text of whole characters"
                )
            case float() if not isfinite(one):
                raise ParameterUseError(_place_text(place), "the number is too large; accepted: up to about 1.8e308")
            case dict():
                waiting += [(place, name) for name in one if not _is_text(name)]
                waiting += [((place, name), below) for name, below in one.items() if not isinstance(below, int)]
            case list():
                waiting += [((place, at), below) for at, below in enumerate(one) if not isinstance(below, int)]
            case _:
                pass


_Place = tuple[()] | tuple[Any, str | int]
"""Where a value stands: nowhere below, or the place of its object or list, and its name or number there."""


def _place_text(place: _Place) -> str:
    """A place in words. Made for a refused value only: a body has many values, and long places."""
    steps = ""
    while place:
        place, step = place
        steps = (f"[{step}]" if isinstance(step, int) else f".{shown(step)[1:-1]}") + steps
    return steps.lstrip(".") or "the body"


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value)


def _checked_body(kind: type[Struct], value: Any) -> Any:
    if kind is WrittenAssignment:
        if not isinstance(value, dict):
            raise OperationError("the body: an object is accepted", "invalid")
        return value
    return made(kind, value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ParameterUseError(shown(name)[1:-1], "the key stands twice in one object; keep one of them")
        found[name] = value
    return found


def _no_constant(name: str) -> None:
    raise OperationError(f"the body is not JSON: {name} is no JSON value", "invalid")
