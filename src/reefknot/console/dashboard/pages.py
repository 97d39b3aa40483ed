"""
Pages: routes from a request to an operation to a template, and the live stream of each page.

A page has no query of its own: `reefknot.console.dashboard.views` asks an operation, and a template shows its answer.
Texts are escaped by the templates, always; the only markup that they take as it is are the charts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from reefknot.console.dashboard import views
from reefknot.console.dashboard.formats import FILTERS, FUNCTIONS, query_text, visible
from reefknot.console.dashboard.live import LiveStream, LiveViews, ViewKey
from reefknot.console.dashboard.security import OPERATOR
from reefknot.console.operations.values import ParameterUseError
from reefknot.errors import OperationError

if TYPE_CHECKING:
    from jinja2 import Environment
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from reefknot.console.dashboard.site import HttpRefusal, Site
    from reefknot.console.dashboard.views import View

LOADING_S = 5.0
SENDING_S = 15.0
"""Longest time for a browser to take a live message; one that takes longer is let go."""
LONGEST_VALUE = 500
_HERE = Path(__file__).parent


class PageRenderer:
    """Templates, and what all of them share."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._templates = environment()
        self._shared = {"pages": [one for one in views.VIEWS if one.key], "static_version": _static_version()}

    async def page(self, view: View, asked: Mapping[str, str], request: Request) -> tuple[str, int]:
        """A whole page and its status; with 303, the address of the page to look at instead."""
        state = request.state
        async with self._site.reading(request), asyncio.timeout(LOADING_S):
            found = await view.load(self._site.operator(request), asked)
        if "moved_to" in found:
            return found["moved_to"], 303
        is_live = view.is_live and "find" not in asked  # one search, answered once
        live_url = f"/live?{query_text({'view': view.name, **asked})}" if is_live else ""
        values = self._values(view.parent or view.name, asked, state.role) | {
            "live_url": live_url,
            "actor": state.actor,
            **found,
        }
        text = self._templates.get_template(f"{view.template or view.name}.html").render(values)
        return text, 400 if found.get("errors") else 200

    async def fragment(self, key: ViewKey) -> tuple[str, float]:
        """The parts of a page that are live, as they are now, and the seconds that it took."""
        view, asked = views.BY_NAME[key.name], dict(key.asked)
        began = perf_counter()
        found = await view.load(self._site.plain_operator(), asked)
        template = self._templates.get_template(f"{view.name}.html")
        context = template.new_context(self._values(view.parent or view.name, asked, key.role) | found)
        return "".join(template.blocks["live"](context)), perf_counter() - began

    def error(self, refusal: HttpRefusal, request: Request) -> str:
        """The page of a request that was refused."""
        role = getattr(request.state, "role", None)
        path = quote(request.scope["path"])
        asks_tenant = refusal.status == 404 and path.startswith(("/work/", "/quarantine/"))
        own = {"live_url": "", "actor": None, "refusal": refusal, "path_of_page": path if asks_tenant else ""}
        values = self._values("", {}, role) | own
        return self._templates.get_template("error.html").render(values)

    def _values(self, current: str, asked: Mapping[str, str], role: str | None) -> dict[str, Any]:
        own = {"current": current, "asked": asked, "role": role, "can_act": role == OPERATOR, "errors": {}}
        return {**self._shared, **own, "shown": self._site.shown}


def environment() -> Environment:
    """The templates: everything is escaped, and a name that is not there is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(FILTERS)
    made.globals.update(FUNCTIONS)
    made.globals["part"] = made.get_template("parts.html").module
    return made


def routes(site: Site) -> list[BaseRoute]:
    """The routes of all pages, and of their live streams."""
    from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
    from starlette.routing import Route

    renderer = site.page_renderer = PageRenderer(site)
    live = LiveViews(site, renderer.fragment)

    class EventStream(StreamingResponse):
        """A stream of live messages, which lets go of a browser that takes nothing."""

        def __init__(self, messages: LiveStream) -> None:
            super().__init__(messages, media_type="text/event-stream")
            self._messages = messages

        async def __call__(self, *given: Any) -> None:
            try:
                await super().__call__(*given)
            finally:
                await self._messages.aclose()

        async def stream_response(self, send: Any) -> None:
            async def send_in_time(message: Any) -> None:
                async with asyncio.timeout(SENDING_S):
                    await send(message)

            try:
                await super().stream_response(send_in_time)
            except TimeoutError:
                return

    def route_of(view: View) -> Route:
        async def show(request: Request) -> Response:
            check_names(view, request)
            in_path = {name: text for name, text in request.path_params.items() if text}
            asked = asked_of(view, {**request.query_params, **in_path})
            if view.is_of_one and "id" not in asked:
                raise OperationError("no job is named in this address; the lists lead to each one", "not_found")
            text, status = await renderer.page(view, asked, request)
            return RedirectResponse(text, 303) if status == 303 else HTMLResponse(text, status)

        return Route(view.path, show, methods=["GET"])

    async def stream(request: Request) -> Response:
        view = views.BY_NAME.get(request.query_params.get("view", ""))
        if view is None or not view.is_live:
            return Response("view: unknown; accepted: a page that is live\n", 400, media_type="text/plain")
        asked = asked_of(view, request.query_params)
        if missing := [name for name in ("id", "name") if f"{{{name}" in view.path and name not in asked]:
            return Response(
                f"{missing[0]}: missing; accepted: that of a job or a source\n", 400, media_type="text/plain"
            )
        key = ViewKey(view.name, request.state.role, tuple(asked.items()))
        if request.method == "HEAD":  # the headers alone, without a stream
            live.check_room(key)
            return Response(media_type="text/event-stream")
        return EventStream(live.follow(key, request.state.is_valid))

    return [*map(route_of, views.VIEWS), Route("/live", stream, methods=["GET"])]


def asked_of(view: View, given: Mapping[str, str]) -> dict[str, str]:
    """The parameters that a view knows, in its order, each cut to a length that no honest one has."""
    return {name: str(given[name])[:LONGEST_VALUE] for name in view.parameters if given.get(name)}


def check_names(view: View, request: Request) -> None:
    """Refuse a parameter that the page does not know: a filter that is misspelled must not show everything."""
    known = [name for name in view.parameters if not request.path_params.get(name)]
    for name in request.query_params:
        if name not in known:
            raise ParameterUseError(name[:LONGEST_VALUE], f"is unknown; accepted: {', '.join(known) or 'no parameter'}")


def error_page(site: Site, request: Request, refusal: HttpRefusal) -> Response:
    """The page that says what went wrong, and what to do."""
    from starlette.responses import HTMLResponse

    return HTMLResponse(site.page_renderer.error(refusal, request), refusal.status)


def _static_version() -> str:
    """A text that changes with the script and the sheet, so that no browser uses an old one."""
    digest = sha256()
    for name in ("reefknot.css", "reefknot.js"):
        digest.update((_HERE / "static" / name).read_bytes())
    return digest.hexdigest()[:12]
