"""Access rules over every route: Host, Origin, API key and body size."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.http_errors import ANTHROPIC_PATH, OLLAMA_PATH
from llaisys.server.middleware.auth import Keyring
from llaisys.server.middleware.body_limits import BodyLimitMiddleware, BodyLimits
from llaisys.server.middleware.hosts import HostRule, check_exposure, is_loopback
from llaisys.server.state import ServerState

KEYS = ("secret-1", "schlüssel")
GOOD = "Bearer secret-1"
OPEN = ("/livez", "/health", "/ready", "/")
# Requests that no route serves, and spellings of paths that a prefix check could confuse.
UNKNOWN = [
    ("GET", "/docs"),
    ("GET", "/nothing"),
    ("DELETE", "/v1/models"),
    ("POST", "/"),
    ("POST", "/health"),
    ("OPTIONS", "/v1/models"),
    ("GET", "//v1/models"),
    ("GET", "/V1/models"),
    ("GET", "/v1/models/"),
    ("GET", "/%76%31/models"),
    ("GET", "/v1%2fmodels"),
    ("GET", "/assets/%2e%2e/%2e%2e/etc/passwd"),
    ("GET", "/health/"),
    ("GET", "/health%2f"),
    ("GET", "/health%2f..%2fv1%2fmodels"),
    ("GET", "/health;/v1/models"),
    ("POST", "/invocations"),
    ("POST", "/v2/completions"),
    ("POST", "/v1/requests/cmpl-unknown/cancel"),
]


@pytest.fixture
def requests(routes: list[APIRoute]) -> list[tuple[str, str]]:
    """Return method and path of every route and of UNKNOWN; a new route is a new row."""
    served = [
        (method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in routes
        for method in sorted(route.methods)
    ]
    assert len(served) > 30
    return [*served, *UNKNOWN]


def is_open(method: str, path: str) -> bool:
    return path in OPEN and method in ("GET", "HEAD")


def has_error(response: httpx.Response, code: str) -> bool:
    """Return True for an error with this code, or one of a protocol whose errors have no code."""
    path, error = response.request.url.path, response.json()["error"]
    if path.startswith(OLLAMA_PATH):
        return bool(error) and isinstance(error, str)
    if path.startswith(ANTHROPIC_PATH):
        return bool(response.json()["type"] == "error" and error["type"] and error["message"])
    return bool(error["code"] == code)


def check_rejected(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.request.url
    assert response.request.method == "HEAD" or has_error(response, code)
    assert "secret" not in response.text
    assert "access-control-allow-origin" not in response.headers


@pytest.fixture
async def locked(engine: FakeService, make_client: Any) -> AsyncIterator[httpx.AsyncClient]:
    config = Config(api_key=KEYS, allowed_hosts=("llm.example", "edge.example:444"), host="127.0.0.1")
    async with make_client(
        ServerState(config, keys=Keyring.of(config), models=ModelRegistry([engine]))
    ) as client:
        yield client


async def test_every_path_except_probes_and_the_web_ui_needs_a_key(
    locked: httpx.AsyncClient, requests: list[tuple[str, str]]
) -> None:
    for method, path in requests:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            response = await locked.request(method, path, headers=headers)
            if is_open(method, path):
                assert response.status_code == 200
            else:
                check_rejected(response, 401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        if not is_open(method, path):
            check_rejected(await locked.request(method, f"{path}?api_key=secret-1"), 401, "invalid_api_key")
        for headers in ({"authorization": GOOD}, {"x-api-key": "secret-1"}):
            assert (await locked.request(method, path, headers=headers)).status_code != 401


async def test_every_path_except_probes_needs_a_host_of_the_server(
    locked: httpx.AsyncClient, requests: list[tuple[str, str]]
) -> None:
    for method, path in requests:
        response = await locked.request(method, path, headers={"host": "evil.example", "authorization": GOOD})
        if path in OPEN[:3]:
            assert response.status_code in (200, 405)
        else:
            check_rejected(response, 400, "invalid_host")


async def test_every_path_rejects_foreign_origins_and_websockets(
    locked: httpx.AsyncClient, requests: list[tuple[str, str]]
) -> None:
    for method, path in requests:
        for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
            response = await locked.request(method, path, headers={**headers, "authorization": GOOD})
            check_rejected(response, 403, "origin_not_allowed")
        same = {"origin": "http://127.0.0.1:8000", "authorization": GOOD}
        assert (await locked.request(method, path, headers=same)).status_code != 403
        upgrade = await locked.request(method, path, headers={"upgrade": "websocket", "authorization": GOOD})
        check_rejected(upgrade, 400, "websocket_refused")


@pytest.mark.parametrize(
    ("value", "ok"),
    [
        (b"Bearer secret-1", True),
        (b"bearer secret-1", True),
        ("Bearer schlüssel".encode(), True),
        ("Bearer schlüssel".encode("latin-1"), False),
        (b"Bearer secret-1 ", True),  # HTTP strips trailing blanks of a header
        (b"Bearer  secret-1", False),
        (b"Bearer secret", False),
        (b"Bearer secret-12", False),
        (b"secret-1", False),
        (b"Basic secret-1", False),
        (b"Bearer", False),
        (b"Bearer ", False),
        (b"Bearer SECRET-1", False),
        (b"Bearer " + hashlib.sha256(b"secret-1").hexdigest().encode(), False),
        (b"Bearer " + b"x" * 10_000, False),
        (b"Bearer \xff\xfe", False),
    ],
)
async def test_only_one_bearer_header_with_a_valid_key_is_accepted(
    locked: httpx.AsyncClient, value: bytes, ok: bool
) -> None:
    stripped = value.rstrip() if ok else value
    response = await locked.get("/v1/models", headers=[(b"authorization", stripped)])
    assert response.status_code == (200 if ok else 401)


@pytest.mark.parametrize("name", ["api-key", "cookie"])
async def test_a_key_in_another_header_is_ignored(locked: httpx.AsyncClient, name: str) -> None:
    for value in ("secret-1", GOOD, f"authorization={GOOD}"):
        assert (await locked.get("/v1/models", headers={name: value})).status_code == 401


@pytest.mark.parametrize(
    ("headers", "ok"),
    [
        ([("x-api-key", "secret-1")], True),
        ([("X-Api-Key", "secret-1")], True),
        ([("x-api-key", "schlüssel")], True),
        ([("x-api-key", GOOD)], False),
        ([("x-api-key", "")], False),
        ([("x-api-key", "secret-1"), ("authorization", GOOD)], True),
        ([("x-api-key", "schlüssel"), ("authorization", GOOD)], False),
        ([("x-api-key", "wrong"), ("authorization", GOOD)], False),
        ([("x-api-key", ""), ("authorization", GOOD)], False),
        ([("x-api-key", "secret-1"), ("authorization", "Bearer wrong")], False),
        ([("x-api-key", "secret-1"), ("authorization", "Basic secret-1")], False),
        ([("x-api-key", "secret-1"), ("x-api-key", "secret-1")], False),
    ],
)
async def test_a_request_has_one_key_in_one_or_both_headers(
    locked: httpx.AsyncClient, headers: list[tuple[str, str]], ok: bool
) -> None:
    sent = [(name.encode(), value.encode()) for name, value in headers]
    assert (await locked.get("/v1/models", headers=sent)).status_code == (200 if ok else 401)


@pytest.mark.parametrize("second", ["Bearer secret-1", "Bearer schlüssel", "Bearer wrong"])
async def test_two_authorization_headers_are_rejected(locked: httpx.AsyncClient, second: str) -> None:
    headers = [(b"authorization", GOOD.encode()), (b"authorization", second.encode())]
    assert (await locked.get("/v1/models", headers=headers)).status_code == 401


async def test_the_key_determines_the_client_id(locked: httpx.AsyncClient, engine: FakeService) -> None:
    for key in ("secret-1", "secret-1", "schlüssel"):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        await locked.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    first, again, other = (call.client_id for call in engine.calls)
    assert first == again != other
    assert "secret" not in first


@pytest.mark.parametrize(
    ("host", "ok"),
    [
        ("127.0.0.1:8000", True),
        ("127.0.0.1", True),
        ("localhost:8000", True),
        ("LOCALHOST:8000", True),
        ("[::1]:8000", True),
        ("llm.example", True),
        ("llm.example:9999", True),
        ("edge.example:444", True),
        ("edge.example:445", False),
        ("localhost:8001", False),
        ("localhost.evil.example:8000", False),
        ("127.0.0.1.evil.example:8000", False),
        ("evil.example:8000", False),
        ("192.168.1.7:8000", False),
        (":8000", False),
        ("", False),
        ("127.0.0.1:", False),
        ("[::1]8000", False),
        ("llm.example:80x", False),
        ("user@127.0.0.1:8000", False),
        ("0.0.0.0", False),
        ("127.0.0.1:8000, evil.example", False),
    ],
)
async def test_only_names_of_the_server_are_accepted_as_host(
    locked: httpx.AsyncClient, host: str, ok: bool
) -> None:
    response = await locked.get("/v1/models", headers={"host": host, "authorization": GOOD})
    assert response.status_code == (200 if ok else 400)
    if not ok:
        assert response.json()["error"]["code"] == "invalid_host"
        assert (await locked.get("/", headers={"host": host})).status_code == 400
        assert (await locked.get("/health", headers={"host": host})).status_code == 200


def test_a_server_on_all_interfaces_allows_addresses_and_no_names() -> None:
    rule = HostRule.of(Config(host="0.0.0.0", api_key=("k",)), 8000)
    assert rule.allows("192.168.1.7:8000")
    assert rule.allows("[fe80::1]:8000")
    assert not rule.allows("evil.example:8000")
    bound = HostRule.of(Config(host="::1"), 8000)
    assert bound.allows("[::1]:8000")
    assert not bound.allows("[fe80::1]:8000")


@pytest.mark.parametrize(
    ("headers", "ok"),
    [
        ({"origin": "http://127.0.0.1:8000"}, True),
        ({"origin": "http://localhost:8000"}, True),
        ({"origin": "https://llm.example"}, True),
        ({"origin": "null"}, False),
        ({"origin": "http://localhost:3000"}, False),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "http://127.0.0.1.evil.example:8000"}, False),
        ({"origin": "file://127.0.0.1:8000"}, False),
        ({"origin": ""}, False),
        ({"origin": "http://127.0.0.1:8001"}, False),
        ({"origin": "http://127.0.0.1:8000.evil.example"}, False),
        ({"origin": "http://evil.example#127.0.0.1:8000"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
    ],
)
async def test_only_the_servers_own_origin_is_accepted(
    locked: httpx.AsyncClient, headers: dict[str, str], ok: bool
) -> None:
    response = await locked.get("/v1/models", headers={**headers, "authorization": GOOD})
    assert response.status_code == (200 if ok else 403)
    assert "access-control-allow-origin" not in response.headers
    if not ok:
        assert (await locked.get("/health", headers=headers)).status_code == 403


async def test_a_link_from_another_site_opens_only_the_web_ui(locked: httpx.AsyncClient) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "authorization": GOOD}
    assert (await locked.get("/", headers=link)).status_code == 200
    assert (await locked.get("/v1/models", headers=link)).status_code == 403


async def test_two_origins_are_rejected(locked: httpx.AsyncClient) -> None:
    own = ("origin", "http://127.0.0.1:8000")
    response = await locked.get("/v1/models", headers=[own, own, ("authorization", GOOD)])
    assert response.status_code == 403


async def test_dns_rebinding_is_rejected(locked: httpx.AsyncClient) -> None:
    headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000", "authorization": GOOD}
    assert (await locked.get("/v1/models", headers=headers)).status_code == 400


async def test_allowed_origins_get_cors_headers(engine: FakeService, make_client: Any) -> None:
    config = Config(api_key=KEYS, allowed_origins=("http://app.example",))
    async with make_client(
        ServerState(config, keys=Keyring.of(config), models=ModelRegistry([engine]))
    ) as client:
        preflight_headers = {
            "origin": "http://app.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type, x-stainless-lang",
        }
        preflight = await client.options("/v1/chat/completions", headers=preflight_headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://app.example"
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        response = await client.get(
            "/v1/models",
            headers={"origin": "http://app.example", "sec-fetch-site": "cross-site", "authorization": GOOD},
        )
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://app.example"
        rejected = await client.get("/v1/models", headers={"origin": "http://app.example"})
        assert (rejected.status_code, rejected.headers["access-control-allow-origin"]) == (
            401,
            "http://app.example",
        )
        assert (
            await client.get("/v1/models", headers={"origin": "http://b.example", "authorization": GOOD})
        ).status_code == 403


async def test_websockets_are_rejected(state: ServerState) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope: Scope = {"type": "websocket", "path": "/v1/models", "headers": [(b"host", b"127.0.0.1:8000")]}
    await create_app(state, 8000)(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_a_declared_body_over_the_limit_is_not_read(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    body = b'{"prompt": "' + b"x" * Config().max_body_bytes + b'"}'
    response = await client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert not engine.calls


async def test_a_body_without_a_length_is_counted(engine: FakeService, client: httpx.AsyncClient) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(5):
            yield b"x" * (Config().max_body_bytes // 4)

    response = await client.post(
        "/v1/completions", content=parts(), headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert not engine.calls


@pytest.mark.parametrize(("n_bytes", "status"), [(10, 200), (11, 413)])
async def test_a_body_at_the_limit_is_accepted(n_bytes: int, status: int) -> None:
    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(BodyLimitMiddleware(read, BodyLimits(10, 1000, 30)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.post("/", content=b"x" * n_bytes)).status_code == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "llm.example", ""])
def test_an_exposed_server_needs_a_key(host: str) -> None:
    with pytest.raises(RejectedError, match="API key") as caught:
        check_exposure(Config(host=host))
    assert caught.value.param == "host"
    check_exposure(Config(host=host, api_key=("k",)))


def test_loopback_needs_no_key() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"):
        assert is_loopback(host)
        check_exposure(Config(host=host))


def test_a_wildcard_origin_is_rejected_at_start() -> None:
    with pytest.raises(RejectedError, match="allowed_origins"):
        check_exposure(Config(allowed_origins=("*",)))
