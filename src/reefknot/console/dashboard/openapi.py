"""The OpenAPI 3.1 document of the HTTP API, made from the table of its routes and the types that stand in it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import NODEFAULT, UNSET

from reefknot.console.dashboard.api_routes import ROUTES
from reefknot.console.dashboard.api_types import PREFIX, ApiRoute

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["kind", "message"],
            "properties": {
                "kind": {"type": "string", "description": "invalid, not_found, conflict, forbidden, …"},
                "message": {"type": "string", "description": "what happened, and what to do"},
                "parameter": {"type": "string", "description": "the parameter or field that is not accepted"},
                "accepted": {"type": "string"},
            },
        }
    },
}
_STATUSES = {
    "400": "A parameter, a field or a filter is not accepted.",
    "401": "The token is missing, or wrong.",
    "403": "The role may read only, or the request comes from another host or origin.",
    "404": "What the path names is unknown.",
    "409": "The state does not allow it.",
    "429": "Too many wrong tokens; see Retry-After.",
    "500": "The configuration does not allow it, or the server has a bug; its log has more.",
    "503": "The store or the system does not answer; see Retry-After.",
}
_BODY_STATUSES = {
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is no application/json.",
}
_DESCRIPTION = (
    "The same questions and actions as on the command line, with the same JSON. A token comes as "
    "`Authorization: Bearer TOKEN`; that of a reader may use GET only."
)


def openapi_document() -> dict[str, Any]:
    """The document; its paths are those of the table, and nothing else."""
    from reefknot import __version__

    bodies = [route.body for route in ROUTES if route.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "reefknot", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": PREFIX}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute) -> dict[str, Any]:
    """The operation of one route."""
    statuses = {**_STATUSES, **(_BODY_STATUSES if route.body is not None else {})}
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"Least role: {route.role}.",
        "tags": [route.parts[0]],
        "parameters": _parameters(route),
        "responses": {
            "200": {"description": "The answer.", "content": _json(_answer(route.answer))},
            **{
                status: {"description": text, "content": _json({"$ref": "#/components/schemas/Error"})}
                for status, text in sorted(statuses.items())
            },
        },
    }
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        needed = any(one.required for one in msgspec.structs.fields(route.body))
        found["requestBody"] = {"required": needed, "content": _json(schema)}
    return found


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _parameters(route: ApiRoute) -> list[dict[str, Any]]:
    """The parameters of the path and of the query string."""
    found = []
    for field in msgspec.structs.fields(route.parameters):
        in_path = field.name in route.path_names
        members = [one for one in getattr(field.type, "__args__", (field.type,)) if one is not type(None)]
        schema: dict[str, Any] = msgspec.json.schema(members[0])
        if in_path:
            schema["minLength"] = 1
        if field.default not in (NODEFAULT, UNSET, None, ""):
            schema["default"] = field.default
        where = "path" if in_path else "query"
        found.append({"name": field.encode_name, "in": where, "required": in_path or field.required, "schema": schema})
    return found


def _answer(fields: dict[str, str]) -> dict[str, Any]:
    """The schema of an answer: an object with at least these fields. A kind with `?` may be null."""
    properties = {name: {"type": [kind[:-1], "null"] if kind.endswith("?") else kind} for name, kind in fields.items()}
    return {"type": "object", "required": list(fields), "properties": properties}
