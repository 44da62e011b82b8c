from __future__ import annotations

import itertools
import logging
import threading
import time

import numpy as np
import pytest
from serving_fakes import Summing, answer_of, encode, pad, texts

from qbench.errors import MeasurementError
from qbench.serving.batcher import Accept, BatchLimits, Refuse
from qbench.serving.loop import RefusedError, ServingLoop
from qbench.serving.request import Work, first_rows

WORK = Work(pad, encode)


def test_each_caller_gets_the_answer_to_its_own_request():
    asked = texts(400)
    engines = [Summing(token_s=1e-6), Summing(token_s=1e-6)]
    with ServingLoop(engines, WORK, BatchLimits(token_budget=128, queue=1000)) as loop:
        futures = [loop.ask(text) for text in asked]
        answers = [future.result(20) for future in futures]
    assert [answer.value for answer in answers] == [answer_of(text) for text in asked]
    assert [answer.tokens for answer in answers] == [len(text) for text in asked]
    assert all(answer.batch_size == 1 or answer.padded_tokens <= 128 for answer in answers)
    shapes = engines[0].shapes + engines[1].shapes
    assert sum(shape[0] for shape in shapes) == len(asked)
    assert max(shape[0] for shape in shapes) > 1
    assert sum(loop.dispatches.values()) == len(shapes)


def test_callers_on_many_threads_lose_nothing():
    answers: dict[str, list[float]] = {}
    lock = threading.Lock()

    def call(seed: int) -> None:
        for text in texts(40, seed=seed):
            value = loop.ask(text).result(20).value
            with lock:
                answers.setdefault(text, []).append(value)

    with ServingLoop([Summing(), Summing()], WORK, BatchLimits()) as loop:
        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sum(map(len, answers.values())) == 320
    assert all(set(values) == {answer_of(text)} for text, values in answers.items())


def test_the_stages_are_times_in_order_and_add_up():
    def slow_encode(group):
        time.sleep(0.01)
        return encode(group)

    with ServingLoop([Summing(overhead_s=0.02)], Work(pad, slow_encode), BatchLimits()) as loop:
        times = loop.ask("abc").result(10).times
    order = [
        times.submitted_s, times.encode_start_s, times.encode_end_s, times.dispatched_s,
        times.run_start_s, times.run_end_s, times.answered_s,
    ]  # fmt: skip
    assert order == sorted(order)
    assert times.preprocess_s >= 0.01
    assert times.inference_s >= 0.02
    assert sum(times.stages_s) == pytest.approx(times.total_s, abs=1e-9)


def test_time_behind_a_busy_lane_is_queue_time():
    engine = Summing()
    engine.gate.clear()
    with ServingLoop([engine], WORK, BatchLimits()) as loop:
        first = loop.ask("ab")
        while loop.batcher.free_lanes:
            time.sleep(0.001)
        second = loop.ask("ab")
        time.sleep(0.05)
        engine.gate.set()
        assert first.result(10).times.inference_s >= 0.04
        assert second.result(10).times.queue_s >= 0.04


def test_a_failing_batch_fails_its_own_requests_with_the_reason_and_the_loop_goes_on():
    calls = []

    def engine(feeds):
        calls.append(feeds["ids"].shape)
        if (feeds["ids"] == ord("z")).any():
            raise ValueError("no z please")
        return {"sum": feeds["ids"].sum(axis=1)}

    with ServingLoop([engine], WORK, BatchLimits(max_batch=1)) as loop:
        bad, good = loop.ask("abz"), loop.ask("abc")
        with pytest.raises(ValueError, match="no z please"):
            bad.result(10)
        assert good.result(10).value == answer_of("abc")
    assert len(calls) == 2


def test_a_text_that_cannot_be_encoded_fails_alone():
    def picky(group):
        if "poison" in group:
            raise UnicodeError("cannot encode")
        return encode(group)

    engine = Summing()
    with ServingLoop([engine], Work(pad, picky), BatchLimits()) as loop:
        futures = [loop.ask(text) for text in ("ab", "poison", "cd", "ef")]
        with pytest.raises(UnicodeError, match="cannot encode"):
            futures[1].result(10)
        for index, text in ((0, "ab"), (2, "cd"), (3, "ef")):
            assert futures[index].result(10).value == answer_of(text)
        assert loop.batcher.queued == 0


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (lambda feeds: {"out": np.zeros((7, 2))}, r"shape \(7, 2\) for a batch of 1"),
        (lambda feeds: {"out": np.float32(1)}, r"shape \(\) for a batch of 1"),
    ],
)
def test_outputs_that_do_not_fit_the_batch_are_an_error(engine, message):
    with (
        ServingLoop([engine], WORK, BatchLimits()) as loop,
        pytest.raises(MeasurementError, match=message),
    ):
        loop.ask("ab").result(10)


def test_an_encoder_that_loses_a_request_is_an_error():
    with (
        ServingLoop([Summing()], Work(pad, lambda group: []), BatchLimits()) as loop,
        pytest.raises(MeasurementError, match="0 results for 1 requests"),
    ):
        loop.ask("ab").result(10)


def test_a_full_queue_refuses_at_once_and_tells_when_to_try_again():
    engine = Summing()
    engine.gate.clear()
    answered = []
    limits = BatchLimits(queue=3, max_batch=1)
    with ServingLoop([engine], WORK, limits) as loop:
        first = loop.submit("ab", answered.append)
        assert isinstance(first, Accept)
        while loop.batcher.free_lanes:
            time.sleep(0.001)
        decisions = [loop.submit("ab", answered.append) for _ in range(5)]
        assert [type(one) for one in decisions] == [Accept] * 3 + [Refuse] * 2
        assert loop.refused == 2
        with pytest.raises(RefusedError, match="queue is full .* try again in") as caught:
            loop.ask("ab").result(0)
        assert caught.value.retry_after_s > 0
        engine.gate.set()
    assert len(answered) == 4


def test_close_answers_what_was_accepted_and_refuses_the_rest():
    engine, before = Summing(overhead_s=0.002), set(threading.enumerate())
    loop = ServingLoop([engine, engine], WORK, BatchLimits(token_budget=8, queue=500))
    futures = [loop.ask(text) for text in texts(60)]
    loop.close()
    assert all(future.done() for future in futures)
    assert [future.result().value for future in futures] == [answer_of(t) for t in texts(60)]
    with pytest.raises(RefusedError, match="closing"):
        loop.ask("ab").result(0)
    loop.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("lane-")]


def test_close_does_not_wait_for_ever_when_the_last_request_cannot_be_encoded():
    def broken(group):
        time.sleep(0.02)
        raise UnicodeError("cannot encode")

    loop = ServingLoop([Summing(), Summing()], Work(pad, broken), BatchLimits())
    future = loop.ask("ab")
    closer = threading.Thread(target=loop.close)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
    assert isinstance(future.exception(), UnicodeError)


def test_encoded_requests_need_no_encoder():
    with ServingLoop([Summing()], Work(pad), BatchLimits()) as loop:
        answer = loop.ask(encode(["abc"])[0]).result(10)
        assert (answer.value, answer.times.preprocess_s) == (answer_of("abc"), 0.0)
        with pytest.raises(MeasurementError, match="mapping from input names"):
            loop.ask("abc")
        assert loop.batcher.queued == 0


def test_a_callback_that_raises_is_logged_and_harms_no_one(caplog):
    def explode(answer):
        raise RuntimeError("client is gone")

    with (
        caplog.at_level(logging.ERROR),
        ServingLoop([Summing()], WORK, BatchLimits()) as loop,
    ):
        loop.submit("ab", explode)
        assert loop.ask("cd").result(10).value == answer_of("cd")
    assert "client is gone" in caplog.text


def test_a_cancelled_future_is_left_alone(caplog):
    engine = Summing()
    engine.gate.clear()
    with ServingLoop([engine], WORK, BatchLimits()) as loop:
        future = loop.ask("ab")
        assert future.cancel()
        engine.gate.set()
    assert future.cancelled()
    assert not caplog.records


def test_many_requests_with_faults_are_each_answered_exactly_once():
    """Refusals, failing batches and texts that cannot be encoded, all at once."""
    serial = itertools.count(1)

    def engine(feeds):
        if next(serial) % 17 == 0:
            raise OSError("device lost")
        return {"sum": feeds["ids"].sum(axis=1)}

    def picky(group):
        if any("hh" in text for text in group):
            raise UnicodeError("hh")
        return encode(group)

    asked = texts(3000, seed=5)
    answers: list[list[object]] = [[] for _ in asked]
    accepted = 0
    with ServingLoop([engine, engine], Work(pad, picky), BatchLimits(queue=64)) as loop:
        for index, text in enumerate(asked):
            decision = loop.submit(text, answers[index].append)
            if isinstance(decision, Refuse):
                answers[index].append(decision)
                time.sleep(0.0005)
            else:
                accepted += 1
    assert all(len(got) == 1 for got in answers)
    assert loop.refused == len(asked) - accepted
    for text, (answer,) in zip(asked, answers, strict=True):
        assert is_right(text, answer)


def is_right(text, answer):
    if isinstance(answer, Refuse):
        return True
    if "hh" in text:
        return isinstance(answer.error, UnicodeError)
    if answer.error is not None:
        return isinstance(answer.error, OSError)
    return answer.value == answer_of(text)


def test_first_rows_are_one_answer_a_request():
    rows = first_rows({"a": np.arange(6).reshape(3, 2), "b": np.zeros(3)}, 3)
    assert [list(row) for row in rows] == [[0, 1], [2, 3], [4, 5]]


ADD_ROWS = """
<ir_version: 10, opset_import: ["" : 21]>
sums (int64[batch, length] ids, int64[batch, length] mask) => (float[batch] total) {
   kept = Mul (ids, mask)
   axes = Constant <value_ints: ints = [1]> ()
   whole = ReduceSum <keepdims: int = 0> (kept, axes)
   total = Cast <to: int = 1> (whole)
}
"""


def test_a_real_session_in_two_lanes():
    import onnx
    import onnxruntime as ort

    model = onnx.parser.parse_model(ADD_ROWS).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1

    def lane():
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return lambda feeds: {"total": session.run(["total"], dict(feeds))[0]}

    asked = texts(300, seed=2)
    with ServingLoop([lane(), lane()], WORK, BatchLimits(queue=300)) as loop:
        answers = [future.result(20) for future in [loop.ask(text) for text in asked]]
    assert [answer.value for answer in answers] == [answer_of(text) for text in asked]
    assert max(answer.batch_size for answer in answers) > 1
