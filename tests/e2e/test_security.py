"""Access checks on a real socket of a server with two keys.

A request is rejected by its head alone: by Host, then Origin, then the key, then the size. Each kind of route
is requested in every variant; `tests/unit/server/test_hosts.py` requests all routes of the server.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from serving import END_S, Server, long_model, serving

CANARY = "canary-7f3a"
GOOD, OTHER = f"{CANARY}-good", f"{CANARY}-other"
EVIL = "evil.example"
LIMIT = 100_000
CHAT = b'{"messages": [{"role": "user", "content": "' + CANARY.encode() + b'"}], "max_tokens": 1}'
COMPLETION = b'{"prompt": "' + CANARY.encode() + b'", "max_tokens": 1}'
PROBES = ("/livez", "/health", "/ready")

Header = tuple[str, str]


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Row:
    """A request, and its statuses with a valid key. `open`: it needs no key."""

    method: str
    path: str
    good: Sequence[int]
    body: bytes = b""
    open: bool = False

    @property
    def id(self) -> str:
        return f"{self.method} {self.path}"


# One row for each kind of route: open, with and without a body, and unknown.
ROWS = [
    Row("GET", "/livez", (200,), open=True),
    Row("GET", "/", (200,), open=True),
    Row("GET", "/v1/models", (200,)),
    Row("POST", "/v1/chat/completions", (200,), CHAT),
    Row("GET", "/nothing", (404,)),
]
# Requests that no route serves, and spellings of paths as only a raw client sends them.
OTHERS = [
    Row("GET", "/docs", (404,)),
    Row("DELETE", "/v1/models", (405,)),
    Row("POST", "/health", (405,), b"{}"),
    Row("OPTIONS", "/v1/chat/completions", (405,)),
    Row("GET", "//v1/models", (404,)),
    Row("GET", "/v1/../v1/models", (404,)),
    Row("GET", "/V1/models", (404,)),
    Row("GET", "/v1/models/", (404,)),
    Row("GET", "/%76%31/models", (200,)),
    Row("GET", "/v1%2fmodels", (200,)),
    Row("GET", "/health/", (404,)),
    Row("GET", "/health%2f..%2fv1%2fmodels", (404,)),
    Row("GET", "/health;/v1/models", (404,)),
    Row("GET", "/assets/../v1/models", (404,)),
    Row("GET", "/assets/%2e%2e/%2e%2e/etc/passwd", (404,)),
    Row("POST", "/invocations", (404,), COMPLETION),
    Row("POST", "/v2/completions", (404,), COMPLETION),
    Row("POST", "/v1/requests/cmpl-unknown/cancel", (404,), b"{}"),
]
# Above the limit by its declared length; no byte of it is sent.
LARGE = Row("POST", "/v1/completions", (413,), b"")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("locked")
    keys = folder / "keys.txt"
    lines = [
        f"{name} {hashlib.sha256(key.encode()).hexdigest()}" for name, key in (("a", GOOD), ("b", OTHER))
    ]
    keys.write_text("\n".join(lines), "utf-8")
    flags = ("--api-key-file", str(keys), "--max-body-bytes", str(LIMIT), "--num-kv-cells", "16384")
    flags += ("--max-model-len", "8192", "--log-level", "debug")
    with serving(folder, str(long_model(folder)), *flags) as made:
        made.http.headers["authorization"] = f"Bearer {GOOD}"
        yield made


def address(server: Server) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def send_request(
    server: Server, row: Row, *headers: Header, host: str | None = "", target: str = "", declared: int = -1
) -> Response:
    """Send a raw request. `host`: "" sends the server's own, None no Host header."""
    endpoint = address(server)
    lines = [f"{row.method} {target or row.path} HTTP/1.1"]
    lines += [] if host is None else [f"Host: {host or f'{endpoint[0]}:{endpoint[1]}'}"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines += ["Content-Type: application/json"] if row.body else []
    lines += [f"Content-Length: {len(row.body) if declared < 0 else declared}", "Connection: close", "", ""]
    with socket.create_connection(endpoint, timeout=END_S) as line:
        line.sendall("\r\n".join(lines).encode("latin-1") + row.body)
        raw = b"".join(iter(partial(line.recv, 65536), b""))
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *fields = head.decode("latin-1").split("\r\n")
    found = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    return Response(int(status.split()[1]), found, body)


def key(value: str) -> Header:
    return ("Authorization", f"Bearer {value}")


BAD_KEYS: list[tuple[Header, ...]] = [
    (),
    (key("wrong"),),
    (key(GOOD[:-1]),),
    (key(GOOD + "x"),),
    (key(GOOD.upper()),),
    (key(f" {GOOD}"),),
    (key(""),),
    (key(hashlib.sha256(GOOD.encode()).hexdigest()),),
    (key("k" * 10_000),),
    (key("schl\xfcssel"),),
    (("Authorization", GOOD),),
    (("Authorization", f"Basic {GOOD}"),),
    (key(GOOD), key(OTHER)),
    (key(GOOD), key("wrong")),
    (("X-Api-Key", "wrong"),),
    (("X-Api-Key", GOOD), key(OTHER)),
    (("Cookie", f"authorization=Bearer {GOOD}"),),
]


def check_rejected(response: Response, status: int, row: Row) -> None:
    assert response.status == status, (row.id, response)
    assert CANARY.encode() not in response.body
    assert CANARY not in str(response.headers)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_a_route_needs_a_valid_key_unless_it_is_open(server: Server, row: Row) -> None:
    for headers in BAD_KEYS:
        response = send_request(server, row, *headers)
        if row.open:
            assert response.status in row.good
        else:
            check_rejected(response, 401, row)
            assert response.headers["www-authenticate"] == "Bearer"
    if not row.open:
        check_rejected(send_request(server, row, target=f"{row.path}?api_key={GOOD}&key={GOOD}"), 401, row)
    good = ((key(GOOD),), (key(OTHER),), (("authorization", f"bearer {GOOD}  "),), (("X-Api-Key", GOOD),))
    for headers in good:
        response = send_request(server, row, *headers)
        assert response.status in row.good, (row.id, response)


@pytest.mark.parametrize("row", OTHERS, ids=[row.id for row in OTHERS])
def test_unknown_requests_and_other_spellings_need_a_key(server: Server, row: Row) -> None:
    check_rejected(send_request(server, row), 401, row)
    if row.path not in PROBES:
        check_rejected(send_request(server, row, key(GOOD), host=EVIL), 400, row)
    check_rejected(send_request(server, row, key(GOOD), ("Origin", f"http://{EVIL}")), 403, row)
    assert send_request(server, row, key(GOOD)).status in row.good
    if row.method == "OPTIONS":
        check_rejected(
            send_request(server, row, ("Access-Control-Request-Method", "POST"), key(GOOD)), 405, row
        )


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_only_names_of_the_server_are_accepted_as_host(server: Server, row: Row) -> None:
    host, port = address(server)
    wrong = [
        EVIL,
        f"{EVIL}:{port}",
        f":{port}",
        f"localhost.{EVIL}:{port}",
        f"{host}.{EVIL}:{port}",
        f"{host}:{port + 1}",
        f"{host}:",
        f"user@{host}:{port}",
        f"[::1]{port}",
        "0.0.0.0",
        f"{host}:{port}, {EVIL}",
    ]
    for value in wrong:
        response = send_request(server, row, key(GOOD), host=value)
        if row.path in PROBES:
            assert response.status in row.good or response.status == 405
        else:
            check_rejected(response, 400, row)
    for value in (f"{host}:{port}", f"localhost:{port}", f"[::1]:{port}", "LocalHost"):
        assert send_request(server, row, key(GOOD), host=value).status in row.good


def test_a_missing_empty_or_repeated_host_is_rejected(server: Server) -> None:
    host, port = address(server)
    row = Row("GET", "/v1/models", (200,))
    check_rejected(send_request(server, row, key(GOOD), host=None), 400, row)
    check_rejected(send_request(server, row, key(GOOD), host=" "), 400, row)
    for second in (EVIL, f"{host}:{port}"):
        check_rejected(send_request(server, row, key(GOOD), ("Host", second)), 400, row)


def test_an_absolute_target_reveals_nothing(server: Server) -> None:
    row = Row("GET", "/v1/models", (404,))
    for host in (EVIL, f"{address(server)[0]}:{address(server)[1]}"):
        target = f"http://{host}/v1/models"
        check_rejected(send_request(server, row, target=target), 401, row)
        assert send_request(server, row, key(GOOD), target=target).status == 404
        check_rejected(send_request(server, row, key(GOOD), target=target, host=EVIL), 400, row)


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_only_the_servers_own_origin_is_accepted(server: Server, row: Row) -> None:
    host, port = address(server)
    for origin in (
        f"http://{EVIL}",
        "null",
        "",
        f"http://{host}.{EVIL}:{port}",
        f"http://{host}:{port + 1}",
        f"http://{host}:{port}.{EVIL}",
        f"http://{EVIL}#{host}:{port}",
        f"file://{host}:{port}",
    ):
        check_rejected(send_request(server, row, key(GOOD), ("Origin", origin)), 403, row)
    check_rejected(
        send_request(server, row, key(GOOD), ("Origin", server.url), ("Origin", server.url)), 403, row
    )
    check_rejected(send_request(server, row, key(GOOD), ("Sec-Fetch-Site", "cross-site")), 403, row)
    rebound = send_request(server, row, key(GOOD), ("Origin", f"http://{EVIL}"), host=EVIL)
    check_rejected(rebound, 403 if row.path in PROBES else 400, row)
    assert send_request(server, row, key(GOOD), ("Origin", server.url)).status in row.good


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_websockets_are_rejected(server: Server, row: Row) -> None:
    upgrade = (("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "eA=="))
    for headers in ((), (key(GOOD),)):
        response = send_request(server, row, *upgrade, *headers)
        assert response.status == 400, (row.id, response)


def test_a_body_over_the_limit_is_rejected_by_its_declared_length(server: Server) -> None:
    check_rejected(send_request(server, LARGE, declared=LIMIT + 1), 401, LARGE)
    check_rejected(send_request(server, LARGE, key(GOOD), declared=LIMIT + 1), 413, LARGE)
    check_rejected(send_request(server, LARGE, key(GOOD), declared=LIMIT + 1, host=EVIL), 400, LARGE)
    check_rejected(send_request(server, LARGE, key(GOOD), ("Origin", "null"), declared=LIMIT + 1), 403, LARGE)
    chunked = Row("POST", "/v1/completions", (413,), b"%x\r\n" % (LIMIT + 1) + b"x" * (LIMIT + 1))
    for headers, status in (((), 401), ((key(GOOD),), 413)):
        endpoint = address(server)
        head = ["POST /v1/completions HTTP/1.1", f"Host: {endpoint[0]}:{endpoint[1]}"]
        head += ["Transfer-Encoding: chunked"]
        head += ["Content-Type: application/json", *(f"{name}: {value}" for name, value in headers)]
        with socket.create_connection(endpoint, timeout=END_S) as line:
            line.sendall("\r\n".join([*head, "", ""]).encode() + chunked.body)
            assert int(line.recv(12).split()[1]) == status


def test_only_its_own_key_cancels_a_request(server: Server) -> None:
    body = {"prompt": "Hi", "max_tokens": 8_000, "ignore_eos": True, "stream": True, "request_id": "held"}
    endpoint = Row("POST", "/v1/requests/cmpl-held/cancel", (200,))
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        chunks = response.iter_raw()
        raw = next(chunks)
        assert send_request(server, endpoint, key(OTHER)).status == 404
        assert send_request(server, endpoint).status == 401
        assert send_request(server, endpoint, key(GOOD)).status == 200
        assert (raw + b"".join(chunks)).endswith(b"data: [DONE]\n\n")


def test_prompts_and_keys_are_not_in_errors_metrics_or_the_log(server: Server) -> None:
    """The canary is in prompts, keys, headers and rejected fields.

    An error response may show the short value of a field with fixed values (a role, a type); the log may not.
    """
    odd = [("X-Request-Id", "<script>"), ("User-Agent", CANARY), ("X-Other", CANARY), key(GOOD)]
    bodies = [
        CHAT,
        CHAT.replace(b'"max_tokens": 1', b'"temperature": "' + CANARY.encode() + b'"'),
        CHAT.replace(b'"max_tokens": 1', b'"max_tokens": 100000000'),
        CHAT[:-3],
        CHAT.replace(CANARY.encode(), CANARY.encode() * 2000),
        b'{"messages": "' + CANARY.encode() + b'"}',
        b'{"messages": [{"role": "tool", "content": {"x": "' + CANARY.encode() + b'"}}]}',
        b'{"messages": [], "model": "x", "stop": ["' + CANARY.encode() + b'", 5]}',
        *(CHAT.replace(b'"max_tokens": 1', more) for more in (b'"continue_final_message": true', b'"n": 9')),
    ]
    shown = [
        CHAT.replace(b"user", CANARY.encode()),
        CHAT.replace(b'"max_tokens": 1', b'"response_format": {"type": "' + CANARY.encode() + b'"}'),
    ]
    for body in shown:
        send_request(server, Row("POST", "/v1/chat/completions", (), body), *odd)
    for body in bodies:
        response = send_request(server, Row("POST", "/v1/chat/completions", (), body), *odd)
        if response.status != 200:
            assert CANARY.encode() not in response.body, (body[:200], response.body)
    metrics = server.http.get("/metrics").text
    assert "llaisys" in metrics
    assert CANARY not in metrics
    log = server.log.read_text("utf-8")
    assert "/v1/chat/completions" in log
    assert CANARY not in log


def test_no_request_was_a_server_error(server: Server) -> None:
    statuses = server.samples("http_requests_total")
    assert sum(statuses) > 200
    assert not server.samples("http_requests_total", status="5xx")


def test_a_server_without_keys_checks_hosts_and_origins(tiny: Server) -> None:
    for row in (Row("GET", "/v1/models", (200,)), Row("GET", "/nothing", (404,))):
        for headers in ((), (key("wrong"),)):
            assert send_request(tiny, row, *headers).status in row.good
        assert send_request(tiny, row, host=EVIL).status == 400
        assert send_request(tiny, row, ("Origin", f"http://{EVIL}")).status == 403
