"""Load that is turned away, engines that fail, and each told by its own status."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from served import OPTIONS, Served, request, wait_until

from qbench.serving.decisions import BatchLimits
from qbench.serving.flights import LoopOptions
from qbench.serving.gates import BreakerRules
from qbench.serving.request import Work, named_rows
from qbench.serving.server.face import Face
from qbench.serving.server.host import Host, listen
from qbench.serving.server.metrics import Metrics
from qbench.serving.service import Gates, Service

Run = Callable[[Any], dict[str, np.ndarray]]


class Engine:
    """Answers the first id of each row; waits, fails or answers NaN where an id says so."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.rows: list[int] = []

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        ids = feeds["input_ids"][:, 0]
        self.rows += ids.tolist()
        time.sleep(self.seconds)
        if (ids == 66).any():
            raise RuntimeError("secret words of the engine")
        values = np.repeat(ids[:, None].astype(np.float32), 32, axis=1)
        values[ids == 77] = np.nan
        return {"embedding": values}


@contextlib.contextmanager
def hosted(
    served: Served, run: Run, limits: BatchLimits, gates: Gates | None = None, **more: Any
) -> Iterator[Served]:
    """Serve a controlled engine under the encoder's contract."""
    contract = served.hosting.contract
    face = Face("tiny", contract, OPTIONS.requests, Metrics("tiny"))
    work = Work(contract.pad, None, named_rows)

    def open_it() -> Service:
        return Service([run], work, limits, LoopOptions(**more.get("options", {})), gates)

    host = Host(face, listen("127.0.0.1", 0), open_it, OPTIONS.transport, more.get("drain_s", 10.0))
    hosting = type(served.hosting)(host, "tiny", contract)
    one = Served(hosting, host.address[1], served.session)
    ready = threading.Event()
    thread = threading.Thread(
        target=lambda: one.ended.append(host.run(on_ready=ready.set)), daemon=True
    )
    thread.start()
    assert ready.wait(20)
    try:
        yield one
    finally:
        host.stop()
        thread.join(30)
        assert not thread.is_alive()


def ask(served: Served, first: int, **more: Any) -> tuple[int, dict[str, str], Any]:
    return served.infer(request([[first, 2]], **more))


def test_a_full_queue_is_429_with_a_hint(served: Served) -> None:
    with (
        hosted(served, Engine(0.3), BatchLimits(queue=1, token_budget=2)) as slow,
        ThreadPoolExecutor(6) as pool,
    ):
        told = list(pool.map(lambda n: ask(slow, n), range(1, 7)))
        refused = [(headers, body) for status, headers, body in told if status == 429]
        answered = [body for status, _, body in told if status == 200]
        assert refused and len(refused) + len(answered) == 6
        for headers, body in refused:
            assert int(headers["retry-after"]) >= 1 and "full" in body["error"]
        page = slow.call("GET", "/metrics")[2].decode()
        assert f'qbench_rejections_total{{model="tiny",reason="refused"}} {len(refused)}.0' in page


def test_a_request_that_would_be_late_is_shed(served: Served) -> None:
    with hosted(served, Engine(0.4), BatchLimits(token_budget=2)) as slow:
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(ask, slow, 1)
            time.sleep(0.1)
            late = pool.submit(ask, slow, 2, parameters={"timeout": 50_000})
            by_header = pool.submit(
                slow.infer, request([[3, 2]]), {"X-Timeout-Ms": "50", "X-Tenant": "t"}
            )
            in_time = pool.submit(ask, slow, 4, parameters={"timeout": 20_000_000})
        assert first.result()[0] == in_time.result()[0] == 200
        for one in (late, by_header):
            status, _, body = one.result()
            assert status == 504 and "deadline" in body["error"]


def test_a_deadline_that_has_passed_on_arrival_is_no_shutdown(served: Served) -> None:
    status, headers, body = ask(served, 1, parameters={"timeout": 1})
    assert status == 504 and "deadline" in body["error"]
    assert "retry-after" not in headers


def test_interactive_goes_before_batch(served: Served) -> None:
    engine = Engine(0.15)
    limits = BatchLimits(token_budget=2, ageing_s=60.0)
    with hosted(served, engine, limits) as slow, ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(ask, slow, 1)]
        time.sleep(0.05)
        for first in (21, 22, 23):
            jobs.append(pool.submit(ask, slow, first, parameters={"priority": 2}))
        time.sleep(0.05)
        jobs.append(pool.submit(ask, slow, 11, parameters={"priority": 1}))
        assert {job.result()[0] for job in jobs} == {200}
    assert engine.rows.index(11) < max(engine.rows.index(n) for n in (21, 22, 23))
    assert engine.rows[1] == 11


@pytest.mark.parametrize(("first", "words"), [(66, "failed"), (77, "NaN")])
def test_a_bad_request_fails_alone(served: Served, first: int, words: str, caplog) -> None:
    with hosted(served, Engine(0.05), BatchLimits(token_budget=64)) as one:
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda n: (n, ask(one, n)), [1, 2, first, 3, 4, 5]))
        for asked, (status, _, body) in told:
            if asked == first:
                assert status == 500 and words in body["error"] and "secret" not in body["error"]
            else:
                assert status == 200 and body["outputs"][0]["data"][0] == asked


def test_an_engine_that_hangs_is_told(served: Served, caplog) -> None:
    stuck = threading.Event()

    def run(feeds: Any) -> dict[str, np.ndarray]:
        if (feeds["input_ids"][:, 0] == 9).any():
            stuck.wait(20)
        return Engine()(feeds)

    with hosted(served, run, BatchLimits(), options={"hang_s": 0.4}) as one:
        status, _, body = ask(one, 9)
        assert status == 500 and "did not answer" in body["error"]
        assert ask(one, 1)[0] == 200
        stuck.set()


def test_the_fallback_says_that_it_answered(served: Served, caplog) -> None:
    def failing(feeds: Any) -> dict[str, np.ndarray]:
        raise RuntimeError("broken")

    rules = BreakerRules(least=3, window_s=0.2, open_s=30.0)
    gates = Gates(rules, fallback=[Engine()])
    with hosted(served, failing, BatchLimits(), gates) as one:
        wait_until(lambda: ask(one, 1)[0] == 200)
        status, _, body = ask(one, 5)
        assert status == 200 and body["parameters"] == {"served_by": "fallback"}
        assert body["outputs"][0]["data"][0] == 5
        opened = b'qbench_transitions_total{change="breaker:open",model="tiny"} 1.0'
        wait_until(lambda: opened in one.call("GET", "/metrics")[2])
        page = one.call("GET", "/metrics")[2]
        assert b'qbench_breaker{model="tiny",state="open"} 1.0' in page


def test_a_client_that_goes_away_frees_its_place(served: Served) -> None:
    engine = Engine(0.3)
    with hosted(served, engine, BatchLimits(token_budget=2)) as slow:
        import json

        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, slow, 1)
            time.sleep(0.1)
            for number in (31, 32, 33):
                body = json.dumps(request([[number, 2]])).encode()
                with slow.socket() as gone:
                    gone.sendall(
                        b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\n"
                        + f"Content-Length: {len(body)}\r\n\r\n".encode()
                        + body
                    )
                    time.sleep(0.03)
            assert first.result()[0] == 200
        assert ask(slow, 2)[0] == 200
    assert not {31, 32, 33} & set(engine.rows)


def test_draining_answers_what_was_taken_and_nothing_new(served: Served) -> None:
    with (
        hosted(served, Engine(0.5), BatchLimits(token_budget=2)) as slow,
        ThreadPoolExecutor(4) as pool,
    ):
        taken = [pool.submit(ask, slow, n) for n in (1, 2)]
        time.sleep(0.2)
        slow.hosting.host.stop()
        time.sleep(0.1)
        status, headers, body = ask(slow, 3)
        assert status == 503 and headers["retry-after"] and "going down" in body["error"]
        assert slow.call("GET", "/v2/health/ready")[0] == 503
        assert slow.call("GET", "/v2/health/live")[0] == 200
        assert [job.result()[0] for job in taken] == [200, 200]
    assert slow.ended[0].served


def test_a_drain_that_takes_too_long_says_so(served: Served) -> None:
    with hosted(served, Engine(3.0), BatchLimits(token_budget=2), drain_s=0.3) as slow:
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(ask, slow, 1)
            time.sleep(0.3)
            slow.hosting.host.stop()
            status, _, body = job.result()
        assert status == 503 and "ended" in body["error"]
    assert not slow.ended[0].served and slow.ended[0].left == 1
