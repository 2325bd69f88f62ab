"""Access control: one ASGI middleware around every route and WebSocket, and the login.

Imports no other module of Footplate. Without it, any web page that the user visits could start processes here: through
a host name that resolves to this machine (DNS rebinding: Host is checked), through a form or script of another site
(cross-site requests: Origin and fetch metadata are checked), and, beyond this machine, anybody could (login).
"""

from __future__ import annotations

import hashlib
import hmac
import html
import ipaddress
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARD = ("0.0.0.0", "::")
MAX_BODY_BYTES = 4 * 1024 * 1024
SESSION_SECONDS = 30 * 24 * 3600
FREE_ATTEMPTS = 5
MAX_WAIT_SECONDS = 300
MAX_ADDRESSES = 1000

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
HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    # Not no-referrer: with that, browsers send `Origin: null` when the login form is posted.
    (b"referrer-policy", b"same-origin"),
)


class Login:
    """The password, and the signed session cookie. Sessions survive a restart: only the key is stored."""

    def __init__(self, password: str, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._password = password.encode()
        # The password is part of the key: changing it ends every session.
        self._key = hmac.digest(key, self._password, "sha256")
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}
        # Cookies ignore ports: two servers on one machine must not overwrite each other's cookie.
        self.cookie = "footplate_" + hashlib.sha256(key).hexdigest()[:8]

    def create_session(self) -> str:
        """A cookie value: when the session expires (Unix seconds), and its signature."""
        expires = str(int(self._clock()) + SESSION_SECONDS)
        return f"{expires}.{self._sign(expires)}"

    def is_valid(self, session: str) -> bool:
        """Whether `session` was signed with this key and has not expired."""
        expires, _, signature = session.partition(".")
        signed = hmac.compare_digest(self._sign(expires).encode(), signature.encode())
        return signed and expires.isdecimal() and int(expires) > self._clock()

    def wait_seconds(self, address: str) -> int:
        """Seconds until `address` may try again; 0 means now."""
        _, until = self._failures.get(address, (0, 0.0))
        return max(0, math.ceil(until - self._clock()))

    def check_password(self, address: str, password: str) -> bool:
        """Whether `password` is correct. After a few wrong ones, `address` has to wait twice as long each time."""
        if hmac.compare_digest(hashlib.sha256(password.encode()).digest(), hashlib.sha256(self._password).digest()):
            self._failures.pop(address, None)
            return True
        failed = self._failures.pop(address, (0, 0.0))[0] + 1
        wait = min(MAX_WAIT_SECONDS, 2 ** min(failed - FREE_ATTEMPTS, 16)) if failed >= FREE_ATTEMPTS else 0
        self._failures[address] = (failed, self._clock() + wait)
        while len(self._failures) > MAX_ADDRESSES:
            self._failures.pop(next(iter(self._failures)))
        return False

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()


def load_or_create_key(folder: Path) -> bytes:
    """The secret key of this runs folder, created on first use and readable only by its owner. Raises OSError."""
    path = folder / ".key"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if key := path.read_bytes():
            return key
        path.unlink()  # an earlier start was killed before it wrote the key
        return load_or_create_key(folder)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(32))
    return path.read_bytes()


def known_hosts(bound: str, more: Iterable[str] = ()) -> frozenset[str]:
    """The host names that the page answers to: loopback, the one it is bound to, and those the user allows."""
    names = (h.lower() if _is_address(h) else host_name(h) for h in (*LOOPBACK, bound, *more))
    return frozenset(name for name in names if name)


class AccessControl:
    """Passes requests of this server's own page and of the user's programs; rejects all others with a sentence.

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
        rejected = self._reject_cross_site(scope, headers) or _reject_body(scope, headers)
        if rejected is None and self.login is not None:
            rejected = await self._require_login(scope, receive, headers, self.login)
        if rejected is None:
            await self.app(scope, receive, send_with_headers)
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
        # Bound to all addresses: a numeric host cannot be rebound by DNS, so it is this machine's own address.
        return any(h in self.hosts for h in WILDCARD) and _is_address(name)

    async def _require_login(self, scope: Scope, receive: Receive, headers: Headers, login: Login) -> Response | None:
        """The response to a request without a valid session; None with one."""
        logged_in = login.is_valid(_cookies(headers).get(login.cookie, ""))
        if scope["type"] == "http" and scope["path"] == "/login":
            return await _login(Request(scope, receive), login, logged_in)
        if logged_in:
            return None
        if scope["type"] == "http" and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            back = scope["path"].lstrip("/") + (
                f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
            )
            up = "../" * (scope["path"].count("/") - 1)
            return RedirectResponse(f"{up or './'}login?next={quote(back, safe='')}", 303)
        return error_response(401, "Not logged in: open the page in a browser and log in.")


def error_response(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the same format as the API's."""
    body = orjson.dumps({"error": sentence})
    return Response(body, status, media_type="application/json", headers=headers)


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets; '' if the header is malformed."""
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


def _reject_body(scope: Scope, headers: Headers) -> Response | None:
    if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
        return None
    length = headers.get("content-length", "0" if "transfer-encoding" not in headers else "")
    if not length.isdecimal():
        return error_response(411, "The request needs a content-length header.")
    if int(length) > MAX_BODY_BYTES:
        return error_response(413, f"The request body exceeds {MAX_BODY_BYTES // 1024**2} MiB.")
    return None


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
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(headers.get("cookie", "")).items()}
    except CookieError:
        return {}


async def _login(request: Request, login: Login, logged_in: bool) -> Response:
    """The login page (GET), its form (POST), and HEAD, with which it asks whether the cookie arrives after all."""
    back = request.query_params.get("next", "").lstrip("/\\")
    back = "./" + quote(back, safe="/?&=%+,:;@~!$'()*-._")
    if request.method == "HEAD":
        return Response(status_code=204 if logged_in else 200)  # an error status would show in the console
    if logged_in:
        return RedirectResponse(back, 303)
    if request.method != "POST":
        return _login_page(back)
    address = request.client.host if request.client else ""
    if wait := login.wait_seconds(address):
        page = _login_page(back, f"Too many wrong passwords. Try again in {wait} s.", 429)
        page.headers["retry-after"] = str(wait)
        return page
    fields: dict[str, list[Any]] = parse_qs((await request.body()).decode("utf-8", "replace"))
    if not login.check_password(address, str(fields.get("password", [""])[0])):
        return _login_page(back, "Wrong password.", 401)
    response = RedirectResponse(back, 303)
    response.set_cookie(login.cookie, login.create_session(), SESSION_SECONDS, httponly=True, samesite="strict")
    return response


def _login_page(back: str, message: str = "", status: int = 200) -> HTMLResponse:
    alert = f'<p role="alert">{html.escape(message)}</p>' if message else ""
    page = LOGIN.replace("{message}", alert).replace("{back}", html.escape(back))
    return HTMLResponse(page, status, headers={"cache-control": "no-store"})


# A link on another site arrives without the cookie (SameSite=Strict) although the browser has one. The login page asks
# again from this site, and continues by itself.
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
<form method="post" data-back="{back}">
<h1>Footplate</h1>
<input name="username" value="footplate" autocomplete="username" hidden>
<label>Password <input type="password" name="password" autocomplete="current-password" required autofocus></label>
{message}
<button>Log in</button>
</form>
<script>
fetch(location.pathname, {method: "HEAD"}).then((response) => {
  if (response.status === 204) location.replace(document.querySelector("form").dataset.back);
});
</script>
</body></html>
"""
