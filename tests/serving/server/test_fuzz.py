"""Thousands of requests that are nearly right, beside clients whose requests are."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from served import JSON, Served, request

GOOD = request([[5, 6, 7], [8, 9, 10]], id="x", parameters={"priority": 1, "timeout": 9_000_000})
GOOD["outputs"] = [{"name": "embedding", "parameters": {"binary_data": False}}]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, 1e308, -1e-300, 1.5),
    *("", "x", "\0", "é" * 50, "x" * 5000, "NaN", [], {}, [[]], [[[]]], {"a": 1}, [None], ["a"]),
    *([1, [2]], [{}], {"binary_data_size": 4}, {"binary_data_size": 2**70}, [2, 3], [3, 2], [6]),
    *({"shared_memory_region": "a"}, {"classification": 2}, [2, 3, 1], [0, 3], [2**40, 2**40]),
]
LINE = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where each value of a JSON document lies."""
    if before:
        yield before
    items: Any = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield from places(inner, (*before, key))


def changed(rng: random.Random) -> dict[str, Any]:
    """Return the good request after one to three edits."""
    content = copy.deepcopy(GOOD)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(content))
        if not found:
            break
        *way, last = rng.choice(found)
        part: Any = content
        for key in way:
            part = part[key]
        if rng.random() < 0.25:
            del part[last]
        elif rng.random() < 0.2 and isinstance(part, list):
            part.insert(last, copy.deepcopy(part[last]))
        else:
            part[last] = copy.deepcopy(rng.choice(VALUES))
    return content


def garbled(data: bytes, rng: random.Random) -> bytes:
    """Return bytes after a few of them were changed, left out or put in."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 2, 5, 20))):
        place = rng.randrange(len(found))
        more = rng.choice((b"", bytes([rng.randrange(256)]), rng.randbytes(4), found[:20]))
        found[place : place + rng.randrange(4)] = more
        if not found:
            break
    return bytes(found)


@pytest.fixture
def good_clients(served: Served, direct) -> Iterator[list[str]]:
    """Go on with right requests, and note each that has no right answer."""
    wrong: list[str] = []
    over = threading.Event()

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not over.is_set():
            rows = rng.integers(1, 99, (int(rng.integers(1, 4)), int(rng.integers(1, 40)))).tolist()
            ident = f"{seed}-{rng.integers(1 << 30)}"
            status, _, answer = served.infer(request(rows, id=ident))
            if status != 200 or answer["id"] != ident:
                wrong.append(f"{status} {answer}")
                continue
            (output,) = answer["outputs"]
            got = np.reshape(output["data"], output["shape"])
            if not np.allclose(got, direct(rows), atol=1e-5):
                wrong.append(f"{ident} got another's answer")

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    yield wrong
    over.set()
    for thread in threads:
        thread.join()


def test_documents_that_are_nearly_right(served: Served, good_clients: list[str]) -> None:
    rng, told = random.Random(0), Counter[int]()
    for turn in range(1500):
        body = json.dumps(changed(rng)).encode()
        if turn % 3 == 0:
            body = garbled(body, rng)
        status, headers, answer = served.call("POST", "/v2/models/tiny/infer", body, JSON)
        told[status] += 1
        assert status < 500 or status == 504, (body, answer)  # that: a deadline of microseconds
        if status != 200:
            assert headers["content-type"] == "application/json" and answer["error"], body
    assert told[200] > 30 and told[400] > 800
    assert not good_clients, good_clients[:3]


def test_bytes_that_are_nearly_http(served: Served, good_clients: list[str]) -> None:
    rng, told = random.Random(1), Counter[int]()
    body = json.dumps(GOOD).encode()
    whole = LINE + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    for turn in range(400):
        data = garbled(whole if turn % 4 else whole * 3, rng)
        with served.socket() as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(65536):  # a hang is a TimeoutError
                    found += part
        for code in re.findall(rb"HTTP/1\.1 (\d+)", found):
            told[int(code)] += 1
            assert code < b"500", (data, found)
    assert sum(told.values()) > 100
    assert not good_clients, good_clients[:3]
