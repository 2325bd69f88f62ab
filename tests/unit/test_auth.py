"""Access control: host names, origins, fetch metadata, WebSockets, bodies, and the login."""

import stat

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from webui.auth import AccessControl, Login, host_name, known_hosts, load_or_create_key

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
def login(clock):
    return Login(PASSWORD, b"k" * 32, clock)


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
    good = login.create_session()
    expires, _, signature = good.partition(".")
    bad = [
        "",
        ".",
        good[:-1],
        f"{int(expires) + 1}.{signature}",
        f"{expires}.",
        f"x.{signature}",
        signature,
        "\u00e9.\u00e9",
    ]
    for session in bad:
        assert not login.is_valid(session), session
    for session in bad[:-1]:
        assert http.get("/", headers={"cookie": f"{login.cookie}={session}"}).status_code == 401
    assert http.get("/", headers={"cookie": f"{login.cookie}={good}"}).status_code == 200
    assert http.get("/", headers={"cookie": f"a b=c; \x01; {login.cookie}"}).status_code == 401
    clock.now += 31 * 24 * 3600
    assert http.get("/", headers={"cookie": f"{login.cookie}={good}"}).status_code == 401


def test_session_survives_a_restart_but_not_a_new_password(tmp_path):
    session = Login(PASSWORD, load_or_create_key(tmp_path)).create_session()
    assert Login(PASSWORD, load_or_create_key(tmp_path)).is_valid(session)
    assert not Login("another one", load_or_create_key(tmp_path)).is_valid(session)
    assert stat.S_IMODE((tmp_path / ".key").stat().st_mode) == 0o600
    (tmp_path / ".key").write_bytes(b"")  # killed while it was created
    assert len(load_or_create_key(tmp_path)) == 32
    assert not Login(PASSWORD, load_or_create_key(tmp_path)).is_valid(session)


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
    assert login.wait_seconds("10.0.0.1") == 300
    for i in range(2000):
        login.check_password(f"10.1.{i // 256}.{i % 256}", "wrong")
    assert len(login._failures) <= 1000


def test_login_rejects_cross_site_requests(login):
    http = client(login=login)
    assert log_in(http, headers={"origin": "http://evil.example"}).status_code == 403
    assert log_in(http, headers={"host": "evil.example"}).status_code == 421


def test_without_a_password_there_is_no_login():
    assert client().get("/login").text == "0 bytes"
