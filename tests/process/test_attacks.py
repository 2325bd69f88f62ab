"""Attacks on a running server, without a session: connections, bodies, every route. docs/security.md lists them."""

import contextlib
import http.client
import json
import math
import os
import re
import resource
import select
import socket
import ssl
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import privileges
import pytest
from test_server_process import printing_server

# The limit of open files that most shells have.
SHORT_DEADLINE = """
import resource
import sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
import webui.connections
webui.connections.HEADER_SECONDS = 1.0
from webui.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The process, the port and the token of a server that drops connections after one second without headers."""
    with printing_server(tmp_path_factory.mktemp("attacks") / "runs", "-c", SHORT_DEADLINE) as (process, url):
        port, token = re.fullmatch(r"http://127.0.0.1:(\d+)/\?token=([\w-]{32})", url).groups()
        yield process, int(port), token


def request(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    result = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return result


def rss_bytes(process):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()).group(1)) * 1024


def test_another_local_user_cannot_start_a_run(server):
    """The request that ran code as the server's user before there was a login on loopback."""
    _, port, token = server
    body = json.dumps({"values": {"launch.env": "PYTHONPATH=/tmp/evil"}, "key": "attack-1"})
    for path in ("/api/runs", "/api/check", "/api/import"):
        assert request(port, "POST", path, body, **{"content-type": "application/json"})[0] == 401
    for path in ("/api/runs", "/config", "/footplate/main.js", "/gradio_api/info", "/assets/x"):
        assert request(port, "GET", path)[0] == 401
    assert request(port, "GET", "/?token=" + "A" * 32)[1]["location"].startswith("./login")
    status, headers, _ = request(port, "GET", f"/?token={token}")
    assert status == 303 and headers["location"] == "./"
    cookie = headers["set-cookie"].partition(";")[0]
    assert request(port, "GET", "/api/runs", cookie=cookie)[0] == 200


def test_concurrent_logins_are_counted_one_by_one(server):
    """300 connections send their headers, then all bodies at once."""
    _, port, _ = server
    connections = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(300)]
    head = b"POST /login HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: 14\r\n\r\n"
    for connection in connections:
        connection.sendall(head)
    time.sleep(0.3)
    start = time.monotonic()
    with ThreadPoolExecutor(30) as pool:
        list(pool.map(lambda c: c.sendall(b"password=wrong"), connections))
        codes = [int(text[9:12]) for text in pool.map(lambda c: c.makefile("rb").read(), connections)]
    for connection in connections:
        connection.close()
    # Five at once, then one after 1, 3, 7, 15 ... seconds.
    assert codes.count(401) <= 5 + int(math.log2(time.monotonic() - start + 1))
    assert codes.count(401) + codes.count(429) == 300


def test_body_with_two_lengths_is_not_read(server):
    """A small content-length passes the limit, but the chunks after it would be read: 600 MB were accepted that way."""
    process, port, _ = server
    before, sent = rss_bytes(process), 0
    chunk = b"%x\r\n%s\r\n" % (2**20, b"x" * 2**20)
    for path in (b"/api/check", b"/login"):
        with socket.create_connection(("127.0.0.1", port), 20) as connection:
            connection.sendall(b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10\r\n"
                               b"transfer-encoding: chunked\r\n\r\n" % path)  # fmt: skip
            try:
                for _ in range(64):
                    connection.sendall(chunk)
                    sent += len(chunk)
                answer = connection.recv(1000)
            except OSError:
                continue  # closed while we were sending
            assert answer.startswith(b"HTTP/1.1 400")
    assert sent < 64 * 2**20 and rss_bytes(process) - before < 32 * 2**20


def test_connections_that_never_send_their_headers_are_closed(server):
    """350 silent connections, and 20 that send one header line at a time, are dropped; others are served meanwhile."""
    _, port, _ = server
    silent = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(350)]
    slow = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(20)]
    for number in range(8):
        for connection in slow:
            try:
                connection.sendall(b"GET / HTTP/1.1\r\n" if number == 0 else b"x-header: %d\r\n" % number)
            except OSError:
                assert number > 2  # dropped
        assert number or request(port, "GET", "/login")[0] == 200
        time.sleep(0.25)
    for connection in (*silent, *slow):
        connection.settimeout(1)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(10) == b""
        connection.close()
    assert request(port, "GET", "/login")[0] == 200


@pytest.fixture
def many_files():
    """This process may open as many files as the system allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4096:
        privileges.refuse("needs a hard limit of 4096 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_without_a_login_do_not_keep_the_user_out(server, many_files):
    """1,500 connections from the user's own address: at most 400 are open, an open page keeps working, and a new one
    opens. With 1,500, the user got status 503, and the server wrote megabytes of errors."""
    process, port, token = server
    cookie = request(port, "GET", f"/?token={token}")[1]["set-cookie"].partition(";")[0]
    page = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    page.request("GET", "/api/runs", headers={"cookie": cookie})
    assert page.getresponse().read()
    kept_open, held = page.sock, []
    for number in range(1500):
        held.append(socket.create_connection(("127.0.0.1", port), 20))
        if number % 3 == 0:
            with contextlib.suppress(OSError):
                held[-1].sendall(
                    b"nonsense\r\n\r\n" if number % 2 else b"GET /login HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
                )
    page.request("GET", "/api/runs", headers={"cookie": cookie})
    assert page.getresponse().status == 200 and page.sock is kept_open
    assert request(port, "GET", "/api/runs", cookie=cookie)[0] == 200
    assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 500
    for connection in held:
        connection.close()
    page.close()
    os.set_blocking(process.stderr.fileno(), False)
    assert (
        len(os.read(process.stderr.fileno(), 10**6) if select.select([process.stderr], [], [], 0)[0] else b"") < 10_000
    )


# A certificate for 127.0.0.1 and its key, valid until 2126, made for this test.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQggQcpQ0oTTF3mdLcf
Up05t8PGS5VcRe2/dVDXv4cdMRWhRANCAARrjcgLoxcake6tE3rLsia1FWsIPBfq
qSXqveJ74D3cmf7hVmsDy94sxl+7RgmxGF+kOAcdFHT4myE686szYLJL
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBkDCCATagAwIBAgIUJdVC/vKLVLu78EsX0yb4sL+r8xQwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJMTI3LjAuMC4xMCAXDTI2MTEyMzAzMDM0NloYDzIxMjYxMDMw
MDMwMzQ2WjAUMRIwEAYDVQQDDAkxMjcuMC4wLjEwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARrjcgLoxcake6tE3rLsia1FWsIPBfqqSXqveJ74D3cmf7hVmsDy94s
xl+7RgmxGF+kOAcdFHT4myE686szYLJLo2QwYjAdBgNVHQ4EFgQUcRKyCPEHncTc
zP+Hp5F3SBa7yjEwHwYDVR0jBBgwFoAUcRKyCPEHncTczP+Hp5F3SBa7yjEwDwYD
VR0TAQH/BAUwAwEB/zAPBgNVHREECDAGhwR/AAABMAoGCCqGSM49BAMCA0gAMEUC
IQDrotVZlRk7lWGpKFlpUs4Tn2fb2Cuknm/sHUJwezNuWQIgRRx7z1R6OvwFzeQN
2vAHne+qHOy8pmVkb3BK4u/3aqw=
-----END CERTIFICATE-----
"""


def test_certificate_serves_https(tmp_path):
    file = tmp_path / "server.pem"
    file.write_text(CERTIFICATE)
    with printing_server(tmp_path / "runs", "-c", SHORT_DEADLINE, "--certfile", str(file)) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        port, _, path = url.removeprefix("https://127.0.0.1:").partition("/")
        with socket.create_connection(("127.0.0.1", int(port)), 20) as silent:  # never begins its handshake
            assert silent.recv(10) == b""
        context = ssl.create_default_context(cafile=file)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # so that the client offers old versions too
        for version, expected in (
            (ssl.TLSVersion.TLSv1_2, contextlib.nullcontext()),
            (ssl.TLSVersion.TLSv1_1, pytest.raises(ssl.SSLError, match=r"PROTOCOL_VERSION|UNEXPECTED_EOF")),
        ):
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                context.minimum_version = context.maximum_version = version
            with socket.create_connection(("127.0.0.1", int(port)), 20) as client, expected:
                context.wrap_socket(client, server_hostname="127.0.0.1").close()
        context = ssl.create_default_context(cafile=file)
        connection = http.client.HTTPSConnection("127.0.0.1", int(port), timeout=20, context=context)
        connection.request("GET", f"/{path}")
        response = connection.getresponse()
        assert response.status == 303 and "Secure" in response.headers["set-cookie"]
        connection.close()
