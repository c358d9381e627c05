"""Request lines, headers and chunk framing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from attack.target import Group, Reply, Target, read_reply

GROUP = Group("heads")
REFUSED = (400, 413, 431, None)
CHAT = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}'


def _raw(name: str, raw: bytes, *allowed: int | None) -> None:
    GROUP.one(name, lambda target: target.send(raw.replace(b"HOST", _host(target))), *allowed)


def _host(target: Target) -> bytes:
    return f"{target.host}:{target.port}".encode()


@GROUP.case(*REFUSED, is_long=True)
def many_heads_of_28000_lines(target: Target) -> Iterator[Reply]:
    """64 sockets, each with one head of 112 KB, without a key."""
    raw = target.head("GET", "/v1/models", key=None)[:-2] + b"a:1\r\n" * 28_000 + b"\r\n"
    clients = [target.connect() for _ in range(64)]
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(raw)
    for client in clients:
        with contextlib.closing(client):
            yield read_reply(client)


for n in (101, 1_000, 7_000):
    _raw(f"{n}_headers", b"GET /livez HTTP/1.1\r\nHost: HOST\r\n" + b"a:1\r\n" * n + b"\r\n", *REFUSED)
for n_bytes in (33 << 10, 128 << 10, 1 << 20):
    line = b"GET /livez HTTP/1.1\r\nHost: HOST\r\nx: " + b"a" * n_bytes + b"\r\n\r\n"
    _raw(f"one_header_of_{n_bytes}_bytes", line, *REFUSED)
    _raw(f"no_end_of_line_in_{n_bytes}_bytes", b"a" * n_bytes, *REFUSED)
for n_bytes in (33 << 10, 1 << 20):
    path = b"GET /" + b"a" * n_bytes + b" HTTP/1.1\r\nHost: HOST\r\n\r\n"
    _raw(f"path_of_{n_bytes}_bytes", path, 414, *REFUSED)
    query = b"GET /livez?" + b"a=b&" * (n_bytes // 4) + b" HTTP/1.1\r\nHost: HOST\r\n\r\n"
    _raw(f"query_of_{n_bytes}_bytes", query, 414, *REFUSED)

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: HOST\r\nContent-Type: application/json\r\n"
_raw("header_without_colon", b"GET /livez HTTP/1.1\r\nHost: HOST\r\nabc\r\n\r\n", *REFUSED)
_raw("nul_in_a_header", b"GET /livez HTTP/1.1\r\nHost: HOST\r\na: \x00\r\n\r\n", *REFUSED)
_raw("folded_header", b"GET /livez HTTP/1.1\r\nHost: HOST\r\na: b\r\n c\r\n\r\n", 200, *REFUSED)
_raw("space_before_colon", b"GET /livez HTTP/1.1\r\nHost: HOST\r\na : b\r\n\r\n", *REFUSED)
_raw("two_hosts", b"GET /v1/models HTTP/1.1\r\nHost: HOST\r\nHost: evil\r\n\r\n", 401, *REFUSED)
_raw("no_host", b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n", *REFUSED)
_raw("http_0_9", b"GET /livez\r\n\r\n", *REFUSED)
_raw("http_2_preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, *REFUSED)
_raw("tls_client_hello", bytes.fromhex("16030100c8010000c40303") + bytes(190), *REFUSED)
_raw("a_megabyte_of_bytes", bytes(range(256)) * 4096, *REFUSED)
_raw("a_million_empty_lines", b"\r\n" * 1_000_000, *REFUSED)
_raw("method_of_10000_bytes", b"A" * 10_000 + b" /livez HTTP/1.1\r\nHost: HOST\r\n\r\n", 401, 405, *REFUSED)
_raw(
    "connect",
    b"CONNECT evil:443 HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n",
    401,
    404,
    405,
    *REFUSED,
)
_raw(
    "options_star", b"OPTIONS * HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n", 401, 404, 405, *REFUSED
)
_raw(
    "websocket",
    b"GET /v1/models HTTP/1.1\r\nHost: HOST\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    *REFUSED,
)
_raw(
    "length_and_chunks", HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", *REFUSED
)
_raw("two_lengths", HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345", *REFUSED)
_raw("negative_length", HEAD + b"Content-Length: -1\r\n\r\n", *REFUSED)
_raw("length_of_letters", HEAD + b"Content-Length: ten\r\n\r\n", *REFUSED)
_raw("length_of_40_digits", HEAD + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n", 401, *REFUSED)
_raw("unknown_transfer_encoding", HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 401, 501, *REFUSED)
_raw("chunked_twice", HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 401, 501, *REFUSED)


def _chunks(name: str, body: bytes, *allowed: int | None, is_long: bool = False) -> None:
    """Add a case with a chunked body and the attacker's key."""

    def attack(target: Target) -> Reply:
        lines = ("Transfer-Encoding: chunked", "Content-Type: application/json", "Connection: close")
        return target.send(target.head("POST", "/v1/chat/completions", *lines), body)

    GROUP.one(name, attack, *allowed, is_long=is_long)


_chunks("one_byte_chunks", b"1\r\na\r\n" * 500_000 + b"0\r\n\r\n", *REFUSED)
_chunks("one_byte_chunks_of_spaces", b"1\r\n \r\n" * 300_000 + b"0\r\n\r\n", *REFUSED)
# The server waits for the rest of the chunk until the upload timeout.
_chunks("chunk_of_2_to_the_64", b"ffffffffffffffff\r\nabc", 408, *REFUSED, is_long=True)
_chunks("chunk_size_of_1000_digits", b"0" * 1000 + b"5\r\nabcde\r\n0\r\n\r\n", *REFUSED)
_chunks("chunk_size_of_letters", b"zz\r\nabc\r\n", *REFUSED)
_chunks("chunk_extension_of_a_megabyte", b"1;" + b"a" * (1 << 20) + b"\r\na\r\n0\r\n\r\n", *REFUSED)
_chunks(
    "many_chunk_extensions", b"1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\na\r\n" * 50_000 + b"0\r\n\r\n", *REFUSED
)
_chunks("chunk_without_its_end", b"3\r\nabcdef", *REFUSED)
_chunks("10000_trailers", b"1\r\na\r\n0\r\n" + b"t: 1\r\n" * 10_000 + b"\r\n", *REFUSED)
_chunks("a_body_in_honest_chunks", b"%x\r\n%s\r\n0\r\n\r\n" % (len(CHAT), CHAT), 200)


@GROUP.case(200, 400, None)
def a_thousand_pipelined_requests(target: Target) -> Iterator[Reply]:
    raw = target.head("GET", "/livez", key=None)
    yield target.send(raw * 1000, raw.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))


@GROUP.case(401, 200, *REFUSED)
def a_head_byte_by_byte(target: Target) -> Iterator[Reply]:
    raw = target.head("GET", "/v1/models", "Connection: close")
    yield target.send(*(raw[i : i + 1] for i in range(len(raw))))
