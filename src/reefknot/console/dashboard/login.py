"""
The login: a page that takes a token and a name, and the routes that begin and end a session.

The address that is printed at the start carries the token behind `#`, which no browser sends and no log holds; the
script of this page puts it into the form. It asks for JSON, and gets the key of the session; a form that is sent
without the script gets a session that may read only.
"""

from __future__ import annotations

from html import escape
from string import Template
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from reefknot.console.dashboard.security import SESSION_S, client_address, cookies_of
from reefknot.console.dashboard.site import HttpRefusal

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from reefknot.console.dashboard.site import Site

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in · reefknot</title>
<link rel="icon" href="/static/reefknot.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/reefknot.css">
<script src="/static/login.js" defer></script>
</head>
<body>
<main>
<section class="card narrow">
<header><h1>reefknot</h1><p>log in</p></header>
<form method="post" action="/login" id="login" class="body">
<p id="problem" class="error" role="alert">$problem</p>
<input type="hidden" name="next" value="$next">
<label class="field">Your name, for the audit log <input type="text" name="name" maxlength="200"
 autocomplete="username" placeholder="optional"></label>
<label class="field">Token <input type="password" name="token" autocomplete="current-password" required
 autofocus></label>
<button type="submit" class="main">Log in</button>
<p class="note">The token is in the address that <code>reefknot up</code> or <code>reefknot dashboard</code> printed,
behind <code>#token=</code>, or the one that <code>dashboard.operator_token</code> names.</p>
<noscript><p class="note">Without JavaScript pages can be read; actions need it, or the command line.</p></noscript>
</form>
</section>
</main>
</body>
</html>
""")
WRONG = "This token is not accepted. Each start makes a new one, unless one is configured."


def routes(site: Site) -> list[BaseRoute]:
    """The routes `/login` and `/logout`."""
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
    from starlette.routing import Route

    access = site.access

    def page(problem: str, onward: str, status: int = 200) -> Response:
        return HTMLResponse(_PAGE.substitute(problem=escape(problem), next=escape(onward)), status)

    async def show(request: Request) -> Response:
        return page("", own_path(request.query_params.get("next", "/")))

    async def login(request: Request) -> Response:
        if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            return PlainTextResponse("the login takes a form: application/x-www-form-urlencoded\n", 415)
        text = (await request.body()).decode("utf-8", "replace")
        try:
            fields = {name: values[-1] for name, values in parse_qs(text, max_num_fields=10).items()}
        except ValueError:
            fields = {}
        onward = own_path(fields.get("next", "/"))
        by_script = "application/json" in request.headers.get("accept", "")
        token, name = fields.get("token", "").strip(), fields.get("name")
        secret = access.login(token, name, client_address(request.scope), has_key=by_script)
        if secret is None:
            refusal = HttpRefusal(403, "forbidden", WRONG)
            return JSONResponse(refusal.tree(), 403) if by_script else page(WRONG, onward, 403)
        response: Response = RedirectResponse(onward, 303)
        if by_script:
            response = JSONResponse({"key": access.key_of(secret), "next": onward})
        secure = access.tls or request.headers.get("origin", "").startswith("https://")
        response.set_cookie(
            access.cookie, secret, max_age=int(SESSION_S), path="/", secure=secure, httponly=True, samesite="strict"
        )
        return response

    async def logout(request: Request) -> Response:
        for secret in cookies_of({"cookie": request.headers.getlist("cookie")}, access.cookie):
            access.logout(secret)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(access.cookie, path="/", httponly=True, samesite="strict")
        return response

    return [
        Route("/login", show, methods=["GET"]),
        Route("/login", login, methods=["POST"]),
        Route("/logout", logout, methods=["POST"]),
    ]


def own_path(given: str) -> str:
    """The path to go to after a login: one of this server, never another site's address."""
    is_own = given.startswith("/") and not given.startswith(("//", "/login")) and "\\" not in given
    return given if is_own and given.isprintable() and len(given) <= 2000 else "/"
