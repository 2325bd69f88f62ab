"""Access control: one ASGI middleware around every route and WebSocket, with the login page.

Without it, any web page that the user visits could start processes here: through a host name that resolves to this
machine (DNS rebinding: Host is checked), or through a form or script of another site (cross-site requests: Origin and
fetch metadata are checked). Every other user of this machine could do the same (so the page requires a login).
docs/security.md lists the attacks and their tests.
"""

from __future__ import annotations

import asyncio
import html
import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit

import orjson
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request, cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from webui.connections import ACCEPTED
from webui.login import SESSION_SECONDS, TOKEN, Login

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARD = ("0.0.0.0", "::")
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_FORM_BYTES = 8 * 1024  # anyone can send the login form
MAX_FORM_FIELDS = 8
FORM_SECONDS = 10.0

# Gradio compiles its templates with `new Function`, and uses inline scripts and styles. Nothing is loaded from other
# hosts.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self' data: blob:",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",
        "style-src 'self' 'unsafe-inline'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
CLOSE = {"connection": "close"}  # the rest of the body is not read
NOT_LOGGED_IN = "Not logged in: open or reload the page in a browser, and log in."
HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    # Not no-referrer: with that, browsers send `Origin: null` when the login form is posted.
    (b"referrer-policy", b"same-origin"),
)


def known_hosts(bound: str, more: Iterable[str] = ()) -> frozenset[str]:
    """The host names that the page answers to: loopback, the one it is bound to, and those the user allows."""
    names = (h.lower() if _is_address(h) else host_name(h) for h in (*LOOPBACK, bound, *more))
    return frozenset(name for name in names if name)


class AccessControl:
    """Passes requests from this server's own page and from the user's programs; rejects all others with a sentence.

    Ports are not compared: behind `ssh -L` the browser uses a different one. Origin and Host must agree.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], login: Login | None = None) -> None:
        self.app = app
        self.hosts = hosts
        self.login = login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        send_with_headers = _with_headers(send)
        rejected = self._reject_cross_site(scope, headers) or _reject_framing(scope, headers)
        if rejected is None and self.login is not None:
            rejected = await self._require_login(Request(scope, receive) if scope["type"] == "http" else None, headers)
        if rejected is None:
            rejected = self._without_login(scope) or _reject_length(scope, headers)
        if rejected is None:
            scope.get("state", {}).get(ACCEPTED, _nothing)()
            await self.app(scope, _counted(receive, MAX_BODY_BYTES), send_with_headers)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await rejected(scope, receive, send_with_headers)

    def _reject_cross_site(self, scope: Scope, headers: Headers) -> Response | None:
        """The response to a request with an unknown host name, or from another site; None if it may pass."""
        named = headers.getlist("host")
        name = host_name(named[0]) if len(named) == 1 else ""
        if not self._known(name):
            return error_response(
                421,
                f"Unknown host name {name[:80]!r}. Open the page at http://127.0.0.1 with its port, or start the "
                "server with FOOTPLATE_HOSTS set to that name.",
            )
        origins = headers.getlist("origin")
        if any(not _is_same_origin(origin, named[0]) for origin in origins):
            return error_response(403, "Requests from other sites are not allowed.")
        site = headers.get("sec-fetch-site", "none")
        link = (
            scope["type"] == "http" and scope["method"] in SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate"
        )
        if site not in ("same-origin", "none") and not link:
            return error_response(403, "Requests from other sites are not allowed.")
        return None

    def _known(self, name: str) -> bool:
        if name in self.hosts:
            return True
        # If the server is bound to all addresses, a numeric host is an address of this machine: DNS cannot rebind it.
        return any(h in self.hosts for h in WILDCARD) and _is_address(name)

    def _without_login(self, scope: Scope) -> Response | None:
        """The response when the page asks whether it can log out; None for other requests. An error status would show
        in the browser's console."""
        asks = scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] == "/login"
        return Response(status_code=200) if asks and self.login is None else None

    async def _require_login(self, request: Request | None, headers: Headers) -> Response | None:
        """The response to a request without a valid session; None if it is valid. `request`: None for a WebSocket."""
        login = self.login
        assert login is not None
        session = _cookies(headers).get(login.cookie, "")
        logged_in = login.sessions.is_valid(session)
        if request is None:
            return None if logged_in else error_response(401, NOT_LOGGED_IN)
        path = request.scope["path"]
        if path == "/login":
            return await _login(request, login, logged_in)
        if path == "/logout" and request.method == "POST":
            login.sessions.end(session)
            response = RedirectResponse("./login", 303)
            response.delete_cookie(login.cookie)
            return response
        if request.method == "GET" and TOKEN in request.query_params:
            return _exchange_token(request, login, logged_in)
        if logged_in:
            return None
        if request.method == "GET" and "text/html" in headers.get("accept", ""):
            return RedirectResponse(f"{_up(path)}login?next={quote(_back(request), safe='')}", 303)
        return error_response(401, NOT_LOGGED_IN, CLOSE)


def _nothing() -> None:
    """Called after a valid login if no connection waits for that, as in tests; does nothing."""


def error_response(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the same format as the API's."""
    body = orjson.dumps({"error": sentence})
    return Response(body, status, media_type="application/json", headers=headers)


def host_name(host: str) -> str:
    """The name in a Host header, without port or brackets; '' if the header is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises for a port that is not a number
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == host and "@" not in host else ""


def _is_same_origin(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _reject_framing(scope: Scope, headers: Headers) -> Response | None:
    """The response to a body whose length is ambiguous (request smuggling) or missing; None for other bodies."""
    if scope["type"] != "http" or "transfer-encoding" not in headers:
        return None
    if "content-length" in headers:
        return error_response(
            400, "A request must have a content-length or a transfer-encoding header, not both.", CLOSE
        )
    return error_response(411, "The request needs a content-length header.", CLOSE)


def _reject_length(scope: Scope, headers: Headers) -> Response | None:
    if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
        return None
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()):
        return error_response(411, "The request needs a content-length header.")
    if int(length[:20]) > MAX_BODY_BYTES:
        return error_response(413, f"The request body exceeds {MAX_BODY_BYTES // 1024**2} MiB.")
    return None


def _counted(receive: Receive, limit: int) -> Receive:
    """`receive` that refuses more than `limit` bytes, whatever length the headers gave."""
    count = 0

    async def receiving() -> Message:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        if count > limit:
            raise HTTPException(413, f"The request body exceeds {limit} bytes")
        return message

    return receiving


def _with_headers(send: Send) -> Send:
    """`send` with the page's headers on every response, and without the CORS headers that Gradio adds."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            others = [pair for pair in message.get("headers", ()) if not _is_replaced(pair[0].lower())]
            message = {**message, "headers": [*others, *HEADERS]}
        await send(message)

    return sending


def _is_replaced(name: bytes) -> bool:
    return name.startswith(b"access-control-") or any(name == own for own, _ in HEADERS)


def _cookies(headers: Headers) -> dict[str, str]:
    """The cookies, even if other programs on this host have set cookies that http.cookies cannot parse."""
    return {name: value for header in headers.getlist("cookie") for name, value in cookie_parser(header).items()}


def _up(path: str) -> str:
    """The relative URL of the page's root, which a proxy may have moved, as seen from `path`."""
    return "../" * (path.count("/") - 1) or "./"


def _back(request: Request) -> str:
    """Path and query of the request, relative to the page's root, without a token."""
    query = [pair for pair in parse_qsl(request.url.query, keep_blank_values=True) if pair[0] != TOKEN]
    path: str = request.scope["path"]
    return path.lstrip("/\\") + (f"?{urlencode(query)}" if query else "")


def _exchange_token(request: Request, login: Login, logged_in: bool) -> Response:
    """A session for the token in the printed URL, and a redirect to the same address without the token."""
    up, back = _up(request.scope["path"]), _back(request)
    if login.is_token_valid(request.query_params[TOKEN]):
        response = RedirectResponse(up + _quoted(back), 303, headers={"cache-control": "no-store"})
        return response if logged_in else _with_session(response, request, login)
    return RedirectResponse(up + _quoted(back) if logged_in else f"{up}login?next={quote(back, safe='')}", 303)


def _quoted(place: str) -> str:
    return quote(place, safe="/?&=%+,:;@~!$'()*-._")


def _with_session(response: Response, request: Request, login: Login) -> Response:
    response.set_cookie(
        login.cookie, login.sessions.create(), SESSION_SECONDS, httponly=True, samesite="strict",
        secure=request.scope.get("scheme") == "https",
    )  # fmt: skip
    return response


async def _login(request: Request, login: Login, logged_in: bool) -> Response:
    """The login page (GET), its form (POST), and HEAD, with which the page asks whether the browser sends the cookie
    after all."""
    back = "./" + _quoted(request.query_params.get("next", "").lstrip("/\\"))
    if request.method == "HEAD":
        return Response(status_code=204 if logged_in else 200)  # an error status would show in the console
    if request.method != "POST":
        return RedirectResponse(back, 303) if logged_in else _login_page(login, back)
    try:
        password = await asyncio.wait_for(_password(request), FORM_SECONDS)
    except (HTTPException, TimeoutError, ClientDisconnect, ValueError):
        return error_response(400, "The login form is incomplete or too large.", CLOSE)
    if logged_in:
        return RedirectResponse(back, 303)
    # From here on without `await`: otherwise many requests at once would all be checked before the first one counts.
    address = request.client.host if request.client else ""
    if wait := login.throttle.wait_seconds(address):
        page = _login_page(login, back, f"Too many wrong attempts. Try again in {wait} s.", 429)
        page.headers["retry-after"] = str(wait)
        return page
    if not login.check_password(address, password):
        return _login_page(login, back, "Wrong token." if login.is_token else "Wrong password.", 401)
    return _with_session(RedirectResponse(back, 303), request, login)


async def _password(request: Request) -> str:
    """The password in the login form; only the first bytes of the form are read. Raises HTTPException, ValueError."""
    body, receive = b"", _counted(request.receive, MAX_FORM_BYTES)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=MAX_FORM_FIELDS)
    return str(fields.get("password", [""])[0])


def _login_page(login: Login, back: str, message: str = "", status: int = 200) -> HTMLResponse:
    alert = f'<p role="alert">{html.escape(message)}</p>' if message else ""
    label, help_text = ("Token", TOKEN_HELP) if login.is_token else ("Password", "")
    page = LOGIN.replace("{label}", label).replace("{help}", help_text).replace("{message}", alert)
    page = page.replace("{back}", html.escape(back))
    return HTMLResponse(page, status, headers={"cache-control": "no-store"})


TOKEN_HELP = (
    "<small>The server printed a URL with this token when it started. Open that URL, or paste the token.</small>"
)
# A visitor who follows a link on another site arrives without the cookie (SameSite=Strict), even if the browser has it.
# The login page asks again from this site, and then continues without a login.
LOGIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Footplate: log in</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<style>
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;display:grid;place-content:center;min-height:90vh;margin:0;
  background:light-dark(#f8fafc,#0b1120);color:light-dark(#0f172a,#e2e8f0)}
form{width:min(20rem,86vw);display:grid;gap:.75rem}
h1{font-size:1.25rem;margin:0}
label{display:grid;gap:.25rem}
input,button{font:inherit;padding:.5rem .75rem;border-radius:6px;border:1px solid light-dark(#94a3b8,#475569)}
button{background:#2563eb;border-color:#2563eb;color:#fff;cursor:pointer}
p{margin:0;color:light-dark(#b91c1c,#fca5a5)}
</style></head><body>
<main>
<form method="post" data-back="{back}">
<h1>Footplate</h1>
<input name="username" value="footplate" autocomplete="username" hidden>
<label>{label} <input type="password" name="password" autocomplete="current-password" required autofocus></label>
{help}{message}
<button>Log in</button>
</form>
</main>
<script>
fetch(location.pathname, {method: "HEAD"}).then((response) => {
  if (response.status === 204) location.replace(document.querySelector("form").dataset.back);
});
</script>
</body></html>
"""
