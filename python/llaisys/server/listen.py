"""Where the server listens: a TCP port or a Unix domain socket, with TLS or without; and how many files it
may open for it. All of it is tried before the model is loaded, and a refusal names the setting."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import resource
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.files import open_regular
from llaisys.server.connection_limit import ACCEPTS_PER_TURN, PROBE_CONNECTIONS, REQUESTS_MAX, Listener

# What the kernel takes for a connection (it doubles this); left to itself it takes up to 4 MiB for a reader
# that does not read.
SEND_BYTES = 128 * 1024
# Files open in addition to the connections: weights, stores, epoll, pipes, libraries while they are read, and
# connections that were accepted or evicted in this turn of the event loop.
SPARE_FILES = 256 + 2 * ACCEPTS_PER_TURN
FILES_OF_NO_LIMIT = 65536  # where the system names no limit of its own
TLS_SETTINGS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")

log = logging.getLogger("llaisys.server")


@contextlib.contextmanager
def listening(config: Config) -> Iterator[Listener]:
    """A listening socket; at the end it is closed, and the file of a Unix socket is gone.

    Raises RejectedError saying what to do.
    """
    with contextlib.closing(bind(config) if config.uds is None else _bind_uds(config.uds)) as listener:
        mine = None if config.uds is None else config.uds.stat()
        try:
            yield listener
        finally:
            # Another server may have taken the name since.
            with contextlib.suppress(OSError):
                if config.uds is not None and mine is not None and os.path.samestat(config.uds.stat(), mine):
                    config.uds.unlink()


def bind(config: Config) -> Listener:
    """A listening TCP socket, taken before the model is loaded, so that a taken port is known at once.

    Raises RejectedError saying what to do.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host.strip("[]"), config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio sets TCP_NODELAY only where the protocol is named; without it the first token of a stream
        # waits up to 40 ms for the client's delayed acknowledgement of the headers.
        listener = Listener(family, kind, protocol)
    except OSError as e:
        raise RejectedError(_bind_text(config, e), param="host") from e
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # connections inherit it
        # For what is sent and waits to be read; a stream that makes more has a bound of its own, too.
        patience_ms = math.ceil(1000 * config.send_timeout_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        listener.bind(address)
        listener.listen(REQUESTS_MAX)
    except OSError as e:
        listener.close()
        raise RejectedError(_bind_text(config, e), param="port") from e
    return listener


def _bind_text(config: Config, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port {config.port} of {config.host} is taken by another program; stop that one, or choose "
                "another with --port (0 picks a free one)"
            )
        case errno.EACCES:
            return f"port {config.port} needs more rights; choose one from 1024 with --port"
    return f"cannot listen on {config.host} port {config.port}: {error.strerror}"


def _bind_uds(path: Path) -> Listener:
    """A listening Unix socket that others than owner and group cannot use, whatever the umask; by the usual
    umask of 022 the group cannot either. A socket that no server listens on is replaced."""
    _clear_stale(path)
    listener = Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        os.umask(umask | 0o117)
        listener.bind(str(path))
        listener.listen(REQUESTS_MAX)
    except OSError as e:
        listener.close()
        raise RejectedError(f"cannot listen on the socket {path}: {e.strerror or e}", param="uds") from e
    finally:
        os.umask(umask)
    return listener


def _clear_stale(path: Path) -> None:
    """Removes a socket that a killed server left. Raises RejectedError if one is served, or for a file."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:  # it is not there, or `bind` will say why it cannot be
        return
    if not is_socket:
        raise RejectedError(f"{path} exists and is no socket; remove it or choose another", param="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as e:
            raise RejectedError(f"cannot use the socket {path}: {e.strerror or e}", param="uds") from e
        else:
            raise RejectedError(f"another server listens on {path}; stop it or choose another", param="uds")


def tls_options(config: Config) -> dict[str, Any]:
    """uvicorn's options for TLS 1.2 and newer; none without a certificate.

    Raises RejectedError for a file that is missing or not what it should be, before uvicorn meets it.
    """
    paths = {name: path for name in TLS_SETTINGS if (path := getattr(config, name)) is not None}
    if not paths and not config.ssl_cert_reqs:
        return {}
    for name in ("ssl_certfile", "ssl_keyfile", *(["ssl_ca_certs"] if config.ssl_cert_reqs else [])):
        if name not in paths:
            raise RejectedError(f"TLS needs {name}, a PEM file", param=name)
    for name, path in paths.items():
        try:
            open_regular(path).close()
        except OSError as e:
            raise RejectedError(f"{name}: cannot read {path}: {e.strerror}", param=name) from e
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An encrypted key would be asked for on the terminal otherwise.
        context.load_cert_chain(paths["ssl_certfile"], paths["ssl_keyfile"], password="")
    except (ssl.SSLError, ValueError) as e:
        text = f"ssl_keyfile: {paths['ssl_keyfile']} is not the key, unencrypted, of {paths['ssl_certfile']}"
        raise RejectedError(f"{text} ({e})", param="ssl_keyfile") from e
    if "ssl_ca_certs" in paths:
        try:
            context.load_verify_locations(paths["ssl_ca_certs"])
        except ssl.SSLError as e:
            text = f"ssl_ca_certs: {paths['ssl_ca_certs']} has no certificate ({e})"
            raise RejectedError(text, param="ssl_ca_certs") from e
    return {**paths, "ssl_cert_reqs": config.ssl_cert_reqs}


def address_of(config: Config, port: int) -> str:
    """The address to open in a browser, or the Unix socket. A server on every address is opened by the
    loopback one."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = config.host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def allow_files() -> int:
    """Raise this process's limit of open files to the hard limit. Return how many connections fit, so that
    `accept` never fails for want of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(soft, FILES_OF_NO_LIMIT) if hard == resource.RLIM_INFINITY else hard
    if soft not in (allowed, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    wanted = REQUESTS_MAX + PROBE_CONNECTIONS
    n_connections = max(PROBE_CONNECTIONS, min(wanted, allowed - SPARE_FILES))
    if n_connections < wanted:
        log.warning("only %d files may be open: at most %d connections", allowed, n_connections)
    return n_connections
