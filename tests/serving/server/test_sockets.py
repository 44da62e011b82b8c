"""Clients that do not behave, on raw sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest
from served import Served, request, serve_graph, wait_until

from qbench.testing.graphs import tiny_encoder

BODY = json.dumps(request([[5, 6, 7]])).encode()
LINE = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HEAD = LINE + f"Content-Length: {len(BODY)}\r\n\r\n".encode()


def answer_of(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes."""
    parts = []
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def status_of(connection: socket.socket) -> int:
    return int(answer_of(connection).split(b" ", 2)[1] or 0)


def test_a_silent_client_is_told_and_closed(served: Served) -> None:
    with served.socket() as connection:
        began_s = time.monotonic()
        assert status_of(connection) == 408
        assert 0.5 < time.monotonic() - began_s < 5


def test_headers_that_trickle_are_given_up(served: Served) -> None:
    with served.socket() as connection:
        began_s = time.monotonic()
        for byte in LINE[:100]:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
        assert time.monotonic() - began_s < 5
        assert b"408" in answer_of(connection)[:20]


def test_headers_that_trickle_on_a_used_connection_are_given_up(served: Served) -> None:
    with served.socket() as connection:
        connection.sendall(HEAD + BODY)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        time.sleep(0.1)
        connection.sendall(b"GET /v2 HT")
        assert status_of(connection) == 408


def test_a_body_that_trickles_is_given_up(served: Served) -> None:
    with served.socket() as connection:
        connection.sendall(HEAD + BODY[:10])
        assert status_of(connection) == 408


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v2 HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_headers_that_are_too_large_are_refused(served: Served, head: bytes) -> None:
    with served.socket() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(head)
        assert status_of(connection) == 431


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"HELLO\r\n\r\n",
        LINE + b"Content-Length: -5\r\n\r\n",
        LINE + b"Content-Length: 99999999999999999999999\r\n\r\n",
        LINE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        LINE + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        LINE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\n\r\n",
        b"GET /v2\x00 HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_400(served: Served, data: bytes) -> None:
    with served.socket() as connection:
        connection.sendall(data)
        assert status_of(connection) == 400


def test_chunked_bodies_are_read(served: Served) -> None:
    with served.socket() as connection:
        parts = [BODY[i : i + 20] for i in range(0, len(BODY), 20)]
        chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
        connection.sendall(
            LINE
            + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            + chunks
            + b"0\r\n\r\n"
        )
        assert status_of(connection) == 200


def test_an_endless_chunked_body_is_refused(served: Served) -> None:
    with served.socket() as connection:
        connection.sendall(LINE + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        try:
            while sent < 64 << 20:
                connection.sendall(chunk)
                sent += len(chunk)
        except OSError:
            pass
        assert sent < 32 << 20
        assert answer_of(connection)[:12] in (b"HTTP/1.1 413", b"")


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    lengths = [3, 1, 7, 2]
    with served.socket() as connection:
        for index, length in enumerate(lengths):
            body = json.dumps(request([[5] * length], id=str(index))).encode()
            last = b"Connection: close\r\n" if index == len(lengths) - 1 else b""
            head = LINE + last + f"Content-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body)
        told = answer_of(connection)
    places = [told.index(f'"id":"{index}"'.encode()) for index in range(len(lengths))]
    assert places == sorted(places) and told.count(b"HTTP/1.1 200") == len(lengths)


def test_garbage_behind_a_request_does_not_spoil_its_answer(served: Served) -> None:
    with served.socket() as connection:
        connection.sendall(HEAD + BODY + b"\x00\x01garbage\r\n\r\n")
        assert answer_of(connection).startswith(b"HTTP/1.1 200")


def test_a_half_closed_client_leaves_nothing_behind(served: Served) -> None:
    face = served.hosting.host.face
    for _ in range(5):
        with served.socket() as connection:
            connection.sendall(HEAD + BODY)
            connection.shutdown(socket.SHUT_WR)
            told = answer_of(connection)
            assert told == b"" or told.startswith(b"HTTP/1.1 200")
    wait_until(lambda: face.inside == 0)


def test_a_wrong_content_length_harms_that_connection_alone(served: Served) -> None:
    with served.socket() as short:
        short.sendall(LINE + b"Content-Length: 5\r\n\r\n" + BODY)  # the rest is no request
        assert b"HTTP/1.1 400" in answer_of(short)
    with served.socket() as long:
        long.sendall(LINE + b"Content-Length: 5000\r\n\r\n" + BODY)
        assert status_of(long) == 408
    assert served.infer(json.loads(BODY))[0] == 200


@pytest.mark.parametrize("split", [0, 30, len(LINE) + 40])
@pytest.mark.parametrize("offer", [b"Upgrade: h2c", b"Upgrade: websocket\r\nSec-WebSocket-Key: x"])
def test_an_offer_of_another_protocol_is_passed_over(
    served: Served, offer: bytes, split: int
) -> None:
    offered = b"Connection: Upgrade, HTTP2-Settings, close\r\nHTTP2-Settings: AAM\r\n" + offer
    data = LINE + offered + f"\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    with served.socket() as connection:
        connection.sendall(data[:split])
        time.sleep(0.05)
        connection.sendall(data[split:])
        told = answer_of(connection)
    assert told.startswith(b"HTTP/1.1 200") and b'"shape":[1,32]' in told


def test_a_tunnel_is_refused(served: Served) -> None:
    with served.socket() as connection:
        connection.sendall(b"CONNECT other:80 HTTP/1.1\r\nHost: other:80\r\n\r\n")
        assert status_of(connection) == 405


def test_expect_continue_is_answered(served: Served) -> None:
    with served.socket() as connection:
        head = LINE + f"Expect: 100-continue\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(BODY)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_clients_that_go_away_take_their_requests_back(served: Served) -> None:
    face = served.hosting.host.face
    for _ in range(20):
        connection = served.socket()
        connection.sendall(HEAD + BODY)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()  # a reset
    wait_until(lambda: face.inside == 0)
    assert served.infer(json.loads(BODY))[0] == 200


def test_requests_in_a_row_of_a_client_that_goes_away_are_no_failures(
    served: Served, caplog
) -> None:
    face = served.hosting.host.face
    for _ in range(20):
        connection = served.socket()
        connection.sendall((HEAD + BODY) * 12)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()  # a reset
    wait_until(lambda: face.inside == 0)
    assert served.infer(json.loads(BODY))[0] == 200
    page = served.call("GET", "/metrics")[2].decode()
    assert 'reason="engine"' not in page
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_connections_over_the_limit_are_turned_away_with_a_hint(tmp_path) -> None:
    from dataclasses import replace

    from served import OPTIONS

    few = replace(OPTIONS.transport, connections=3, header_timeout_s=20.0)
    with serve_graph(tiny_encoder(), tmp_path, transport=few) as served:
        held = [served.socket() for _ in range(3)]
        time.sleep(0.1)
        with served.socket() as one_more:
            told = answer_of(one_more)
        assert told.startswith(b"HTTP/1.1 503") and b"retry-after" in told
        for connection in held:
            connection.close()
        wait_until(lambda: served.call("GET", "/v2/health/ready")[0] == 200)


def test_a_client_that_never_reads_is_given_up(tmp_path) -> None:
    from dataclasses import replace

    from served import OPTIONS

    body = json.dumps(request([[5] * 60] * 16)).encode()
    one = LINE + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    impatient = replace(OPTIONS.transport, write_timeout_s=0.5)
    with serve_graph(tiny_encoder(pooled=False), tmp_path, transport=impatient) as served:
        face = served.hosting.host.face
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(5)
        connection.connect(("127.0.0.1", served.port))
        with connection:
            with contextlib.suppress(OSError):
                for _ in range(40):
                    connection.sendall(one)
                    time.sleep(0.02)
            with served.socket() as other:
                other.sendall(HEAD + BODY)
                assert other.recv(65536).startswith(b"HTTP/1.1 200")
            wait_until(lambda: face.inside == 0)  # while the connection is open still
