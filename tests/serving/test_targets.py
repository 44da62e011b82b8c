from __future__ import annotations

import json
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serving_fakes import encode

from qbench.errors import MeasurementError
from qbench.serving.arrivals import Arrivals
from qbench.serving.failures import RefusedError
from qbench.serving.openload import OpenLoop, drive_open
from qbench.serving.targets import HttpTarget, OipExchange


class Handler(BaseHTTPRequestHandler):
    """A small server of the protocol: sums ids; refuses a request of one token, fails on two."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):  # noqa: N802 — the base class names it so
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = next(one for one in asked["inputs"] if one["name"] == "ids")
        assert ids["datatype"] == "INT64" and ids["shape"] == [1, len(ids["data"])]
        assert self.path == "/v2/models/sum/infer"
        status = {1: 429, 2: 500}.get(len(ids["data"]), 200)
        outputs = [{"name": "sum", "shape": [1], "datatype": "INT64", "data": [sum(ids["data"])]}]
        body = json.dumps({"outputs": outputs} if status == 200 else {"error": "sorry"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if len(ids["data"]) == 3:
            self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_oip_server_is_asked_and_its_answer_read(url):
    with closing(OipExchange(url, "sum", encode)) as exchange:
        assert exchange("abcd") == {"sum": [394]}
        for _ in range(3):  # the server closes after three tokens; the connection is opened anew
            assert exchange("abc") == {"sum": [294]}


def test_a_full_server_and_a_broken_one_are_told_apart(url):
    with closing(OipExchange(url, "sum", encode)) as exchange:
        with pytest.raises(RefusedError, match="sorry"):
            exchange("a")
        with pytest.raises(MeasurementError, match="answered 500"):
            exchange("ab")


def test_load_over_http_is_driven_as_in_process(url):
    exchange = OipExchange(url, "sum", encode)
    target = HttpTarget(exchange, connections=8)
    replies = {}
    asked = ["a", "ab", "abcd", "abcde", "abcdef", "abcdefg"]
    load = OpenLoop(Arrivals(120.0), measure_s=0.6, warmup_s=0.1)
    result = drive_open(target, asked, load, lambda index, reply: replies.update({index: reply}))
    target.close()
    exchange.close()
    assert set(result.statuses) == {"ok", "refused", "failed"}
    assert replies[2].value == {"sum": [394]}
    assert result.statuses["ok"] > result.statuses["refused"]
