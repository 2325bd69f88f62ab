"""Access control: host names, origins, fetch metadata, WebSockets, bodies, and the login."""

import asyncio
import stat

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from webui import auth
from webui.auth import AccessControl, host_name, known_hosts
from webui.login import SESSIONS, Login, load_or_create_key, network

HOME = "http://127.0.0.1:7860"


async def page(request):
    body = await request.body()
    return PlainTextResponse(f"{len(body)} bytes", headers={"access-control-allow-origin": "http://evil.example"})


async def socket(websocket):
    await websocket.accept()
    await websocket.send_text("connected")
    await websocket.close()


APP = Starlette(
    routes=[WebSocketRoute("/ws", socket), Route("/{rest:path}", page, methods=["GET", "POST", "DELETE", "OPTIONS"])]
)


def client(hosts=(), bound="127.0.0.1", login=None, **more):
    app = AccessControl(APP, known_hosts(bound, hosts), login)
    return TestClient(app, base_url=HOME, follow_redirects=False, **more)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7860", 200),
        ("127.0.0.1", 200),
        ("localhost:7860", 200),
        ("LocalHost:9000", 200),  # ssh -L: the browser uses another port
        ("[::1]:7860", 200),
        ("box.lan:7860", 200),
        ("evil.example", 421),
        ("evil.example:7860", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost@evil.example", 421),
        ("evil.example/127.0.0.1", 421),
        ("192.168.1.7:7860", 421),
        ("127.0.0.1:port", 421),
        ("", 421),
    ],
)
def test_host(host, status):
    response = client(hosts=["box.lan:7860"]).get("/", headers={"host": host})
    assert response.status_code == status
    if status == 421:
        assert "FOOTPLATE_HOSTS" in response.json()["error"]


def test_two_host_headers_are_rejected():
    assert client().get("/", headers=[("host", "127.0.0.1"), ("host", "evil.example")]).status_code == 421


def test_bound_to_all_addresses_accepts_addresses_but_not_names():
    everywhere = client(bound="0.0.0.0")
    assert everywhere.get("/", headers={"host": "192.168.1.7:7860"}).status_code == 200
    assert everywhere.get("/", headers={"host": "[fe80::1]:7860"}).status_code == 200
    assert everywhere.get("/", headers={"host": "evil.example"}).status_code == 421


SAME_ORIGIN = {"origin": HOME}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", {}, 200),  # a program of the user, not a browser
        ("POST", SAME_ORIGIN, 200),
        ("DELETE", SAME_ORIGIN, 200),
        ("POST", {"origin": HOME, "sec-fetch-site": "same-origin"}, 200),
        ("POST", {"origin": "http://evil.example"}, 403),
        ("DELETE", {"origin": "http://evil.example"}, 403),
        ("OPTIONS", {"origin": "http://evil.example"}, 403),
        ("GET", {"origin": "http://evil.example"}, 403),
        ("POST", {"origin": "null"}, 403),
        ("POST", {"origin": ""}, 403),
        ("POST", {"origin": "http://127.0.0.1:3000"}, 403),  # another program's page on this machine
        ("POST", {"origin": "http://localhost:7860"}, 403),
        ("POST", {"origin": "file://127.0.0.1:7860"}, 403),
        ("POST", {"sec-fetch-site": "cross-site"}, 403),
        ("POST", {"sec-fetch-site": "same-site"}, 403),
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a link
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),  # typed
        ("GET", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
    ],
)
def test_origin(method, headers, status):
    response = client().request(method, "/", headers=headers)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]


def receive_text(http, headers):
    with http.websocket_connect(f"ws://{headers.get('host', '127.0.0.1:7860')}/ws", headers=headers) as websocket:
        return websocket.receive_text()


def test_websocket():
    assert receive_text(client(), {"origin": HOME}) == "connected"
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"host": "evil.example", "origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
    ):
        with pytest.raises(WebSocketDisconnect):
            receive_text(client(), headers)


def test_bodies_need_a_length_below_the_limit():
    assert client().post("/", content=b"x" * 1000).text == "1000 bytes"
    assert client().post("/", content=b"x" * (4 * 1024**2 + 1)).status_code == 413
    assert client().post("/", content=iter([b"x", b"y"])).status_code == 411
    assert client().post("/", headers={"content-length": "-1"}).status_code == 411


def test_headers_on_every_response():
    for response in (client().get("/"), client().get("/", headers={"host": "evil.example"})):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "same-origin"
        assert "frame-ancestors 'self'" in response.headers["content-security-policy"]
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("host", "name"),
    [("a:1", "a"), ("[::1]:1", "::1"), ("A.b", "a.b"), ("u@a", ""), ("a/b", ""), ("a:x", ""), ("a?b", ""), ("a#b", "")],
)
def test_host_name(host, name):
    assert host_name(host) == name


class FakeClock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


PASSWORD = "correct horse"


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def login(clock, tmp_path):
    return Login(PASSWORD, tmp_path, clock=clock)


def log_in(http, password=PASSWORD, next_page="", **more):
    return http.post(f"/login?next={next_page}", data={"password": password}, **more)


def test_nothing_is_visible_without_login(login):
    anonymous = client(login=login)
    html = {"accept": "text/html,*/*"}
    for path, back in (("/", ""), ("/rules", "rules"), ("/api/runs/x?off=1", "api%2Fruns%2Fx%3Foff%3D1")):
        response = anonymous.get(path, headers=html)
        assert (response.status_code, response.text) == (303, "")
        assert response.headers["location"].lstrip("./") == f"login?next={back}"
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        response = anonymous.request(method, "/gradio_api/anything", headers=SAME_ORIGIN)
        assert response.status_code == 401
        assert "Not logged in" in response.json()["error"]
    with pytest.raises(WebSocketDisconnect):
        receive_text(anonymous, SAME_ORIGIN)


def test_login_returns_to_the_requested_page(login):
    http = client(login=login)
    shown = http.get("/login?next=%3Frun%3Dx")
    assert shown.status_code == 200 and "<form" in shown.text and 'data-back="./?run=x"' in shown.text
    assert http.head("/login").status_code == 200
    assert log_in(http, "wrong").status_code == 401
    assert http.get("/").status_code == 401
    response = log_in(http, next_page="%3Frun%3Dx", headers=SAME_ORIGIN)
    assert (response.status_code, response.headers["location"]) == (303, "./?run=x")
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower() and "Max-Age" in cookie
    assert http.get("/").text == "0 bytes"
    assert receive_text(http, SAME_ORIGIN | {"cookie": cookie.partition(";")[0]}) == "connected"
    assert http.head("/login").status_code == 204
    assert http.get("/login?next=rules").headers["location"] == "./rules"


@pytest.mark.parametrize(
    "place", ["//evil.example", "https:%2F%2Fevil.example", "%5C%5Cevil.example", "%0d%0aset-cookie:a"]
)
def test_login_redirects_only_to_this_site(login, place):
    http = client(login=login)
    location = log_in(http, next_page=place).headers["location"]
    assert location.startswith("./") and "\n" not in location
    assert str(http.build_request("GET", f"{HOME}/login").url.join(location)).startswith(HOME + "/")


def test_login_page_escapes_its_parameters(login):
    text = client(login=login).get('/login?next="><script>x').text
    assert "<script>x" not in text


def test_cookie_is_checked(login, clock):
    http = client(login=login)
    good = login.sessions.create()
    expires, _, random = good.partition(".")
    bad = [
        "",
        ".",
        good[:-1],
        good[:-1] + ("A" if good[-1] != "A" else "B"),
        f"{int(expires) + 1}.{random}",
        f"{expires}.",
        f"x.{random}",
        random,
        "../" + good,
        good + "/..",
        "\u00e9.\u00e9",
    ]
    for session in bad:
        assert not login.sessions.is_valid(session), session
    for session in bad[:-1]:
        assert http.get("/", headers={"cookie": f"{login.cookie}={session}"}).status_code == 401
    assert http.get("/", headers={"cookie": f"{login.cookie}={good}"}).status_code == 200
    assert http.get("/", headers={"cookie": "a b=c; \x01; "}).status_code == 401
    assert http.get("/", headers={"cookie": f"a b=c; \x01; {login.cookie}={good}"}).status_code == 200
    assert http.get("/", headers={"cookie": f'state={{"a": [1, "x;y"]}}; {login.cookie}={good}'}).status_code == 200
    for _ in range(4):  # in use every week
        clock.now += 6 * 24 * 3600
        assert login.sessions.is_valid(good)
    clock.now += 6 * 24 * 3600 + 1  # 30 days after the login
    assert http.get("/", headers={"cookie": f"{login.cookie}={good}"}).status_code == 401


def test_idle_session_ends(login, clock):
    session = login.sessions.create()
    clock.now += 7 * 24 * 3600 + 1
    assert not login.sessions.is_valid(session)
    clock.now -= 7 * 24 * 3600
    assert not login.sessions.is_valid(session)


def test_logout_ends_the_session_also_for_a_copied_cookie(login):
    http, thief = client(login=login), client(login=login)
    log_in(http)
    thief.cookies.update(http.cookies)
    assert thief.get("/").status_code == 200
    assert http.get("/logout").status_code == 200 and thief.get("/").status_code == 200  # no state change by GET
    assert http.post("/logout", headers={"origin": "http://evil.example"}).status_code == 403
    assert http.post("/logout", headers=SAME_ORIGIN).headers["location"] == "./login"
    assert not http.cookies
    assert thief.get("/").status_code == 401


def test_session_survives_a_restart_but_not_a_new_password(tmp_path):
    session = Login(PASSWORD, tmp_path).sessions.create()
    assert Login(PASSWORD, tmp_path).sessions.is_valid(session)
    assert not Login("another one", tmp_path).sessions.is_valid(session)
    assert not Login("a token", tmp_path, is_token=True).sessions.is_valid(session)
    session_of_token = Login("a token", tmp_path, is_token=True).sessions.create()
    assert Login("the next token", tmp_path, is_token=True).sessions.is_valid(session_of_token)
    assert not Login(PASSWORD, tmp_path).sessions.is_valid(session_of_token)
    assert stat.S_IMODE((tmp_path / ".key").stat().st_mode) == 0o600
    (tmp_path / ".key").write_bytes(b"")  # killed while it was created
    assert len(load_or_create_key(tmp_path)) == 32
    assert not Login(PASSWORD, tmp_path).sessions.is_valid(session)


def test_sessions_are_private_bounded_and_useless_to_a_reader_of_the_folder(login, tmp_path):
    sessions = [login.sessions.create() for _ in range(120)]
    files = list((tmp_path / SESSIONS).iterdir())
    assert len(files) == 100 and stat.S_IMODE((tmp_path / SESSIONS).stat().st_mode) == 0o700
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 and not file.read_bytes() for file in files)
    assert not any(file.name in session for file in files for session in sessions)
    assert login.sessions.is_valid(sessions[-1])


TOKEN = "t0ken-" + "x" * 26


@pytest.fixture
def with_token(clock, tmp_path):
    return Login(TOKEN, tmp_path, is_token=True, clock=clock)


def test_token_in_the_url_is_exchanged_for_a_session(with_token):
    http = client(login=with_token)
    response = http.get(f"/?tab=run&token={TOKEN}&run=a%20b", headers={"accept": "text/html"})
    assert (response.status_code, response.headers["location"]) == (303, "./?tab=run&run=a+b")
    assert "HttpOnly" in response.headers["set-cookie"] and TOKEN not in str(response.headers)
    assert http.get("/").status_code == 200
    assert http.get(f"/?token={TOKEN}").headers["location"] == "./"  # also with a session, it leaves the address
    assert http.get("/?token=from-an-earlier-start").headers["location"] == "./"
    assert http.get("/").text == "0 bytes"


def test_wrong_token_leads_to_the_login_page(with_token):
    for token in ("", "wrong", TOKEN[:-1], TOKEN + "x", "%C3%A9", "%ff"):
        http = client(login=with_token)
        response = http.get(f"/rules?token={token}", headers={"accept": "text/html"})
        assert (response.status_code, response.headers["location"]) == (303, "./login?next=rules")
        assert "set-cookie" not in response.headers and http.get("/").status_code == 401
    page = client(login=with_token).get("/login").text
    assert "<label>Token" in page and "The server printed a URL" in page
    assert client(login=with_token).post(f"/?token={TOKEN}").status_code == 401  # only by GET


def test_a_password_is_no_token(login):
    """A password in the address would be in the browser's history."""
    assert client(login=login).get(f"/?token={PASSWORD}").headers["location"].startswith("./login")


def test_token_stays_on_this_site(with_token):
    for path in (f"//evil.example/?token={TOKEN}", f"/\\evil.example?token={TOKEN}", f"/a//evil.example?token={TOKEN}"):
        http = client(login=with_token)
        response = http.send(http.build_request("GET", HOME + path))
        assert response.request.url.join(response.headers["location"]).host == "127.0.0.1"


def test_token_works_while_others_try_passwords(with_token):
    http = client(login=with_token)
    assert 429 in [log_in(http, f"wrong {i}").status_code for i in range(100)]
    assert http.get(f"/?token={TOKEN}").status_code == 303 and http.get("/").status_code == 200


def test_https_cookie_is_secure(login):
    http = TestClient(AccessControl(APP, known_hosts("127.0.0.1"), login), base_url="https://127.0.0.1:7860")
    response = http.post("/login", data={"password": PASSWORD}, follow_redirects=False)
    assert "Secure" in response.headers["set-cookie"]


def test_wrong_passwords_are_throttled(login, clock):
    http = client(login=login)
    assert [log_in(http, "wrong").status_code for _ in range(5)] == [401] * 5
    response = log_in(http)
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    clock.now += 1
    assert log_in(http, "wrong").status_code == 401
    assert log_in(http).headers["retry-after"] == "2"
    other = client(login=login, client=("10.0.0.2", 1))
    assert log_in(other).status_code == 303
    clock.now += 2
    assert log_in(http).status_code == 303
    assert log_in(client(login=login), "wrong").status_code == 401  # the count restarts after a correct password


def test_throttling_is_bounded(login, clock):
    for _ in range(100):
        login.check_password("10.0.0.1", "wrong")
    assert login.throttle.wait_seconds("10.0.0.1") == 300
    for i in range(2000):
        login.check_password(f"10.1.{i // 256}.{i % 256}", "wrong")
    assert len(login.throttle._failures) <= 1000


def test_a_hundred_wrong_passwords(login, clock):
    """From one address, guessing gets slow: the correct password is not even checked while the address has to wait."""
    http, checked = client(login=login), 0
    for i in range(100):
        checked += log_in(http, f"wrong {i}").status_code == 401
        clock.now += 1
    assert checked == 5 + 6  # five at once, then after 1, 2, 4, 8, 16 and 32 seconds
    assert log_in(http).status_code == 429
    assert log_in(client(login=login, client=("10.0.0.2", 1))).status_code == 303


def test_many_addresses_are_slowed_down_together(login, clock):
    owner = client(login=login, client=("10.0.0.2", 1))
    assert log_in(owner).status_code == 303
    attackers = [client(login=login, client=(f"10.1.0.{i}", 1)) for i in range(100)]
    codes = [log_in(http, "wrong").status_code for http in attackers]
    assert codes == [401] * 50 + [429] * 50
    assert log_in(client(login=login, client=("10.0.0.2", 1))).status_code == 303  # it has logged in before
    clock.now += 5
    assert [log_in(http, "wrong").status_code for http in attackers[50:60]] == [401] + [429] * 9
    clock.now += 700
    assert log_in(client(login=login, client=("10.9.0.1", 1))).status_code == 303


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::4", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("", ""),
    ],
)
def test_addresses_of_one_host_count_together(address, name):
    assert network(address) == name


def form(app, body, headers=()):
    """A POST /login as raw ASGI; `body` yields messages. Returns the coroutine and the list of sent messages."""
    sent, chunks = [], iter(body)

    async def receive():
        await asyncio.sleep(0)
        message = next(chunks)
        return await message if asyncio.iscoroutine(message) else message

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/login", "query_string": b"", "scheme": "http",
        "headers": [(b"host", b"127.0.0.1"), *headers], "client": ("10.0.0.9", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    return app(scope, receive, send), sent


def test_login_cannot_be_raced(login):
    """300 requests whose bodies arrive at the same moment: the throttle counts each before the next is checked."""
    app = AccessControl(APP, known_hosts("127.0.0.1"), login)

    async def attack():
        start = asyncio.Event()

        async def late(body):
            await start.wait()
            return {"type": "http.request", "body": body}

        pending = [form(app, [late(b"password=wrong%d" % i)]) for i in range(300)]
        tasks = [asyncio.create_task(coroutine) for coroutine, _ in pending]
        await asyncio.sleep(0.01)
        start.set()
        await asyncio.gather(*tasks)
        return [sent[0]["status"] for _, sent in pending]

    codes = asyncio.run(attack())
    assert codes.count(401) == 5 and codes.count(429) == 295


def test_login_form_is_bounded(login, monkeypatch):
    http = client(login=login)
    assert log_in(http, "x" * 9000).status_code == 400
    assert http.post("/login", data={f"f{i}": "" for i in range(9)}).status_code == 400
    assert http.post("/login", content=b"\xff=%ff&password").status_code == 401
    app = AccessControl(APP, known_hosts("127.0.0.1"), login)

    def endless():
        while True:
            yield {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    coroutine, sent = form(app, endless(), [(b"content-length", b"10")])
    asyncio.run(coroutine)
    assert sent[0]["status"] == 400
    monkeypatch.setattr(auth, "FORM_SECONDS", 0.01)
    coroutine, sent = form(app, (asyncio.sleep(60) for _ in range(2)))
    asyncio.run(coroutine)
    assert sent[0]["status"] == 400


def test_two_lengths_are_refused(login):
    """With both headers, the length that was checked is not the one that counts."""
    for http in (client(), client(login=login)):
        both = {"content-length": "3", "transfer-encoding": "chunked"}
        for path in ("/", "/login"):
            response = http.post(path, headers=both, content=b"abc")
            assert response.status_code == 400 and "not both" in response.json()["error"]
            assert response.headers["connection"] == "close"
        assert http.get("/", headers={"transfer-encoding": "chunked"}).status_code == 411


def test_bytes_are_counted_while_they_arrive(monkeypatch):
    """Whatever the headers promise."""
    monkeypatch.setattr(auth, "MAX_BODY_BYTES", 1000)
    response = client().post("/", headers={"content-length": "10"}, content=b"x" * 1001)
    assert response.status_code == 413


def test_login_rejects_cross_site_requests(login):
    http = client(login=login)
    assert log_in(http, headers={"origin": "http://evil.example"}).status_code == 403
    assert log_in(http, headers={"host": "evil.example"}).status_code == 421


def test_without_a_password_there_is_no_login():
    assert client().get("/login").text == "0 bytes"
    assert client().head("/login").status_code == 200  # the page asks whether there is a session to log out of
