"""The listening socket: taken ports, rejected addresses, permissions of a Unix socket, and TLS files."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import trustme

from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.server import listener
from llaisys.server.listener import SEND_BYTES, address_of, bind, listening, tls_options


def test_a_taken_port_names_the_flag_to_change() -> None:
    with bind(Config(port=0)) as taken, pytest.raises(RejectedError, match=r"is taken.*--port"):
        bind(Config(port=taken.getsockname()[1]))


def test_an_address_of_another_machine_is_rejected() -> None:
    with pytest.raises(RejectedError, match=r"cannot listen on 192\.0\.2\.1"):
        bind(Config(host="192.0.2.1", port=0))
    with pytest.raises(RejectedError, match="cannot listen on no-such-host"):
        bind(Config(host="no-such-host.invalid", port=0))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("[::1]", "http://[::1]:8000"),
        ("llm.example", "http://llm.example:8000"),
    ],
)
def test_the_url_to_open_names_a_reachable_address(host: str, address: str) -> None:
    assert address_of(Config(host=host), 8000) == address


def test_the_url_has_the_scheme_and_host() -> None:
    assert address_of(Config(ssl_certfile="c.pem"), 8443) == "https://127.0.0.1:8443"
    assert address_of(Config(uds="/run/llaisys.sock"), 8000) == "unix:/run/llaisys.sock"


async def test_connections_have_tcp_nodelay_and_small_send_buffers() -> None:
    """Accepted connections have TCP_NODELAY, because a stream is many small writes.

    The kernel buffers no megabytes for a client that does not read.
    """
    seen: asyncio.Queue[int] = asyncio.Queue()

    def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        seen.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        seen.put_nowait(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        writer.close()

    with bind(Config(port=0)) as listener:
        server = await asyncio.start_server(on_connection, sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await seen.get()
        assert await seen.get() <= 2 * SEND_BYTES
        writer.close()
        server.close()


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o660), (0o007, 0o660), (0o022, 0o640), (0o077, 0o600)])
def test_other_users_cannot_connect_to_a_unix_socket(tmp_path: Path, umask: int, mode: int) -> None:
    """Connecting needs write permission, which only the owner has with a umask of 022."""
    path = tmp_path / "s"
    before = os.umask(umask)
    try:
        with listening(Config(uds=path)):
            assert stat.S_IMODE(path.stat().st_mode) == mode
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.exists()
    with listening(Config(uds=path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_in_use_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(Config(uds=path)):
        with pytest.raises(RejectedError, match=r"another server listens on .*; stop it or choose"):
            listening(Config(uds=path)).__enter__()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("precious")
    with pytest.raises(RejectedError, match="is not a socket"):
        listening(Config(uds=path)).__enter__()
    assert path.read_text() == "precious"


def test_close_does_not_remove_the_socket_of_another_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(Config(uds=path)):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.exists()


@pytest.mark.parametrize("name", ["x" * 200, "nowhere/s"])
def test_a_path_that_cannot_hold_a_socket_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(RejectedError, match="cannot listen on the socket") as rejected:
        listening(Config(uds=tmp_path / name)).__enter__()
    assert rejected.value.param == "uds"


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, Path]:
    """Return paths of a certificate, its key, its authority, another key, and an invalid file."""
    authority, other = trustme.CA(), trustme.CA()
    issued, foreign = authority.issue_cert("localhost"), other.issue_cert("localhost")
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca", "other", "text", "absent")}
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["ca"])
    foreign.private_key_pem.write_to_path(files["other"])
    files["text"].write_text("no certificate")
    return files


def test_tls_settings_become_uvicorn_options(pem: dict[str, Path]) -> None:
    assert tls_options(Config()) == {}
    files = {"ssl_certfile": pem["cert"], "ssl_keyfile": pem["key"], "ssl_ca_certs": pem["ca"]}
    assert tls_options(Config(**files, ssl_cert_reqs=2)) == {**files, "ssl_cert_reqs": 2}


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"ssl_certfile": "cert"}, "ssl_keyfile"),
        ({"ssl_keyfile": "key"}, "ssl_certfile"),
        ({"ssl_ca_certs": "ca"}, "ssl_certfile"),
        ({"ssl_certfile": "absent", "ssl_keyfile": "key"}, "ssl_certfile"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "other"}, "ssl_keyfile"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "text"}, "ssl_keyfile"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_ca_certs": "text"}, "ssl_ca_certs"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_cert_reqs": 2}, "ssl_ca_certs"),
        ({"ssl_cert_reqs": 1}, "ssl_certfile"),
    ],
)
def test_invalid_tls_files_are_rejected_by_name(
    pem: dict[str, Path], settings: dict[str, Any], param: str
) -> None:
    config = Config(**{name: pem.get(value, value) for name, value in settings.items()})
    with pytest.raises(RejectedError, match=param) as rejected:
        tls_options(config)
    assert rejected.value.param == param


@pytest.mark.parametrize(
    ("soft", "hard", "then", "n_connections"),
    [
        (1024, 4096, 4096, 1056),
        (1024, 1100, 1100, 588),
        (4096, 4096, 4096, 1056),
        (1024, resource.RLIM_INFINITY, 65536, 1056),
        (100, 100, 100, 32),
    ],
)
def test_the_file_limit_is_raised_and_bounds_the_connections(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    then: int,
    n_connections: int,
) -> None:
    now = [(soft, hard)]
    monkeypatch.setattr(listener.resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(listener.resource, "setrlimit", lambda _, limits: now.append(limits))
    assert listener.raise_file_limit() == n_connections
    assert now[-1] == (then, hard)
    assert bool(caplog.records) == (n_connections < 1056)
