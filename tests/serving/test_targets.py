from __future__ import annotations

import json
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serving_fakes import encode

from qbench.errors import ConfigError, InputError, MeasurementError
from qbench.serving.arrivals import Arrivals, Process
from qbench.serving.closedload import drive_closed
from qbench.serving.failures import RefusedError
from qbench.serving.load import ClosedLoop
from qbench.serving.openload import OpenLoop, drive_open
from qbench.serving.remote import HttpTarget, OipExchange, read_inputs


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

    def do_GET(self):  # noqa: N802 — the base class names it so
        told = {
            "inputs": [{"name": "ids", "datatype": "INT64"}, {"name": "mask", "datatype": "INT32"}]
        }
        body = {"/v2/models/sum": json.dumps(told), "/v2/models/odd": "[1]"}.get(self.path, "{}")
        self.send_response(404 if self.path.endswith("none") else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

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
    with closing(OipExchange(f"{url}/v2/models/sum", encode)) as exchange:
        assert exchange("abcd") == {"sum": [394]}
        for _ in range(3):  # the server closes after three tokens; the connection is opened anew
            assert exchange("abc") == {"sum": [294]}


def test_a_full_server_and_a_broken_one_are_told_apart(url):
    with closing(OipExchange(f"{url}/v2/models/sum", encode)) as exchange:
        with pytest.raises(RefusedError, match="sorry"):
            exchange("a")
        with pytest.raises(MeasurementError, match="answered 500"):
            exchange("ab")


def test_load_over_http_is_driven_as_in_process(url):
    exchange = OipExchange(f"{url}/v2/models/sum", encode)
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


def test_a_server_tells_what_it_reads(url):
    model = f"{url}/v2/models/sum"
    assert read_inputs(model, ["mask", "ids"]) == {"ids": "INT64", "mask": "INT32"}
    for names in (["ids"], ["ids", "mask", "types"]):
        with pytest.raises(InputError, match="reads ids, mask, and requests of this run bring"):
            read_inputs(model, names)
    with pytest.raises(InputError, match="answered 404"):
        read_inputs(f"{url}/v2/models/none", ["ids"])
    with pytest.raises(InputError, match="no model answers at"):
        read_inputs(f"{url}/v2/models/odd", ["ids"])


@pytest.mark.parametrize(
    "address", ["ftp://a/v2/models/b", "http://a/b", "http://[::1/v2/models/x", ""]
)
def test_what_is_no_address_of_a_model_is_refused(address):
    with pytest.raises(InputError, match="allowed: http://HOST:PORT/v2/models/NAME"):
        read_inputs(address, ["ids"])


def test_a_wait_for_a_connection_is_the_generators_own():
    """One connection and a server of 20 ms: the fifth of five at once waits 80 ms for the line."""
    target = HttpTarget(lambda payload: time.sleep(0.02), connections=1)
    burst = Arrivals(50.0, Process.TRACE, trace_s=(0.0,) * 5)
    result = drive_open(target, ["a"], OpenLoop(burst, measure_s=0.09, warmup_s=0.0))
    target.close()
    last = result.sent[-1]
    assert len(result.sent) == 5 and last.lag_s > 0.07
    assert last.latency_s > 0.09 and last.latency_s - last.lag_s < 0.05


def test_clients_of_a_closed_loop_send_when_they_have_an_answer(url):
    exchange = OipExchange(f"{url}/v2/models/sum", encode)
    target = HttpTarget(exchange, connections=4)
    load = ClosedLoop(4, measure_s=0.5, warmup_s=0.1)
    result = drive_closed(target, ["abcd", "abcde", "a"], load)
    assert set(result.statuses) == {"ok", "refused"}
    assert result.percentile(50).value < 500 and result.measured_s == 0.5
    assert any(one.warmup for one in result.sent) and result.goodput_rps > 4
    with pytest.raises(MeasurementError, match="nothing was answered: Measur"):
        drive_closed(target, ["ab"], load)
    with pytest.raises(ConfigError, match="no payloads"):
        drive_closed(target, [], load)
    target.close()
    exchange.close()
