"""Listener: the listening socket (TCP or Unix, with or without TLS), and the limit on open connections.

All of it is set up before the model loads; errors name the setting. Idle connections are closed for new ones,
oldest first, so that a flood of idle sockets blocks neither probes nor clients. A connection with an open
request is never closed for another.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.files import open_regular

REQUESTS_MAX = 1024
# Connections in addition to REQUESTS_MAX, so that probes get a response while that many requests are open.
PROBE_CONNECTIONS = 32
# Maximum number of connections that asyncio accepts in one iteration of the event loop.
ACCEPTS_PER_ITERATION = 128
# Bytes of the kernel's send buffer of a connection (the kernel doubles this). The default would grow to 4 MiB
# for a client that does not read.
SEND_BYTES = 128 * 1024
# Open files in addition to connections: weights, stores, epoll, pipes, libraries while they are read, and
# connections accepted or evicted in this iteration of the event loop.
SPARE_FILES = 256 + 2 * ACCEPTS_PER_ITERATION
FILES_IF_UNLIMITED = 65536  # if the system has no limit
TLS_SETTINGS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")

log = logging.getLogger("llaisys.connections")


@dataclass(slots=True)
class ConnectionStats:
    """Counters of connections, for metrics and tests."""

    accepted: int = 0
    refused: int = 0  # closed at accept: every other connection had an open request
    evicted: int = 0  # closed while waiting for a request, for a newer connection
    bad_requests: int = 0  # rejected by the connection: not HTTP, or a head that exceeds a bound
    requests_refused: int = 0  # 503: too many open requests
    headers: int = 0  # parsed
    events: int = 0  # parsed: request heads with their headers, pieces of bodies


class AcceptedSocket(socket.socket):
    """An accepted connection that is removed from its ConnectionLimit when it is closed."""

    limit: ConnectionLimit

    def close(self) -> None:
        """Close the socket and remove it from the limit."""
        self.limit.remove(self)
        super().close()


class ConnectionLimit:
    """Limits the number of open connections to `maximum`; each is either idle or has an open request.

    It counts accepted sockets and not HTTP connections, so that clients that never finish their TLS handshake
    count, too.
    """

    def __init__(self, maximum: int = REQUESTS_MAX + PROBE_CONNECTIONS) -> None:
        self.maximum = maximum
        self.stats = ConnectionStats()
        # In the order in which they would be closed: first those that never sent a complete request head.
        self._new: dict[int, AcceptedSocket] = {}
        self._idle: dict[int, AcceptedSocket] = {}
        self._busy: dict[int, AcceptedSocket] = {}

    def admit(self, accepted: AcceptedSocket) -> bool:
        """Count a connection, closing another if needed; return False if all others have an open request."""
        if len(self._new) + len(self._idle) + len(self._busy) >= self.maximum and not self._evict():
            self.stats.refused += 1
            log.warning("rejecting connections: all %d have an open request", self.maximum)
            return False
        self.stats.accepted += 1
        self._new[accepted.fileno()] = accepted
        accepted.limit = self
        return True

    def mark_busy(self, fd: int) -> None:
        """Mark the connection as having an open request."""
        self._move(fd, self._busy)

    def mark_idle(self, fd: int) -> None:
        """Mark the connection as idle: its request is complete."""
        self._move(fd, self._idle)

    def remove(self, accepted: AcceptedSocket) -> None:
        """Stop counting a closed connection."""
        for each in (self._new, self._idle, self._busy):
            if each.get(accepted.fileno()) is accepted:
                del each[accepted.fileno()]

    def _evict(self) -> bool:
        """Shut down the oldest idle connection; asyncio then reads end-of-file and closes it."""
        waiting = self._new or self._idle
        if not waiting:
            return False
        oldest = waiting.pop(next(iter(waiting)))
        with contextlib.suppress(OSError):  # the client has closed it already
            oldest.shutdown(socket.SHUT_RDWR)
        self.stats.evicted += 1
        log.warning("closing idle connections for new ones: %d are open", self.maximum)
        return True

    def _move(self, fd: int, to: dict[int, AcceptedSocket]) -> None:
        """Move a connection to another list. No effect for an evicted one that is not closed yet."""
        for each in (self._new, self._idle, self._busy):
            if fd in each:
                to[fd] = each.pop(fd)
                return


class Listener(socket.socket):
    """A listening socket whose connections are limited."""

    def __init__(self, *arguments: Any) -> None:
        """`arguments`: those of socket.socket."""
        super().__init__(*arguments)
        self.limit = ConnectionLimit()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and close connections above the limit.

        Raises ConnectionAbortedError after ACCEPTS_PER_ITERATION of those, which ends asyncio's loop.
        """
        for _ in range(ACCEPTS_PER_ITERATION):
            plain, address = super().accept()
            accepted = AcceptedSocket(self.family, self.type, self.proto, plain.detach())
            if self.limit.admit(accepted):
                return accepted, address
            socket.socket.close(accepted)
        raise ConnectionAbortedError


@contextlib.contextmanager
def listening(config: Config) -> Iterator[Listener]:
    """Yield a listening socket; close it at the end, and remove the file of a Unix socket.

    Raises RejectedError with the fix.
    """
    with contextlib.closing(bind(config) if config.uds is None else _bind_uds(config.uds)) as listener:
        created = None if config.uds is None else config.uds.stat()
        try:
            yield listener
        finally:
            # Another server may have replaced the file since.
            with contextlib.suppress(OSError):
                if (
                    config.uds is not None
                    and created is not None
                    and os.path.samestat(config.uds.stat(), created)
                ):
                    config.uds.unlink()


def bind(config: Config) -> Listener:
    """Return a listening TCP socket. Call it before the model loads, so that a port in use is reported at
    once.

    Raises RejectedError with the fix.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host.strip("[]"), config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Name the protocol, because asyncio sets TCP_NODELAY only then. Without it, the first token of a
        # stream waits up to 40 ms for the client's delayed acknowledgment of the headers.
        listener = Listener(family, kind, protocol)
    except OSError as e:
        raise RejectedError(_bind_text(config, e), param="host") from e
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # connections inherit it
        # Limits how long sent data may wait to be read; streams also have their own limit.
        timeout_ms = math.ceil(1000 * config.send_timeout_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
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
                f"port {config.port} of {config.host} is taken by another program; stop it, or choose "
                "another port with --port (0 selects a free one)"
            )
        case errno.EACCES:
            return f"port {config.port} needs more privileges; choose a port from 1024 with --port"
    return f"cannot listen on {config.host} port {config.port}: {error.strerror}"


def _bind_uds(path: Path) -> Listener:
    """Return a listening Unix socket that only its owner and group may use; with umask 022, only its owner.

    A socket file that no server listens on is replaced.
    """
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
    """Remove the socket file of a killed server. Raises RejectedError if it is in use or not a socket."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:  # there is no such file, or `bind` will report the error
        return
    if not is_socket:
        raise RejectedError(
            f"{path} exists and is not a socket; remove it or choose another path", param="uds"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as e:
            raise RejectedError(f"cannot use the socket {path}: {e.strerror or e}", param="uds") from e
        else:
            raise RejectedError(
                f"another server listens on {path}; stop it or choose another path", param="uds"
            )


def tls_options(config: Config) -> dict[str, Any]:
    """Return uvicorn's options for TLS 1.2 and newer; none without a certificate.

    Raises RejectedError for a missing or invalid file.
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
        # Pass a password, because an encrypted key would prompt on the terminal otherwise.
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
    """Return the address to open in a browser (for a server on all addresses: loopback), or the Unix
    socket."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = config.host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def raise_file_limit() -> int:
    """Raise this process's limit of open files to the hard limit.

    Return how many connections fit, so that `accept` never runs out of files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(soft, FILES_IF_UNLIMITED) if hard == resource.RLIM_INFINITY else hard
    if soft not in (allowed, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    wanted = REQUESTS_MAX + PROBE_CONNECTIONS
    n_connections = max(PROBE_CONNECTIONS, min(wanted, allowed - SPARE_FILES))
    if n_connections < wanted:
        log.warning("only %d files may be open: at most %d connections", allowed, n_connections)
    return n_connections
