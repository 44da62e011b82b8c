from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import onnx_ir as ir
import pytest
from serving_fakes import Summing, answer_of, encode, pad, texts

from qbench.backends import BACKENDS
from qbench.errors import MeasurementError
from qbench.graph.model import TensorSpec
from qbench.runtime.ort import SessionSettings, SharedSessions, open_session, settings_for
from qbench.serving.bench import Engine, Workload, cores
from qbench.serving.cost import BatchMemory
from qbench.serving.lanes import arrangements, choose_lanes, mixed_batches, pick
from qbench.serving.memory import process_memory
from qbench.serving.opening import (
    LargestBatch,
    ServeSettings,
    largest_batch,
    measure_memory,
    open_service,
    warm,
)
from qbench.serving.request import named_rows
from qbench.serving.service import Gates, Request
from qbench.tasks.padding import pad_batch
from qbench.testing.graphs import tiny_encoder

SPECS = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "sequence")),
)


def simple(overhead_s: float = 0.0002, token_s: float = 2e-6) -> Engine:
    return Engine("simple", lambda threads: Summing(overhead_s, token_s))


def test_a_service_opens_itself_and_says_what_it_chose():
    workload = Workload(texts(60), pad, encode)
    opened = open_service(simple(), workload, ServeSettings(sla_ms=100.0))
    with opened.service as service:
        assert opened.lanes.lanes * opened.lanes.threads_per_lane == cores()
        assert len(opened.lanes.trials) == len(arrangements(cores()))
        assert opened.sizing.within_sla and opened.sizing.within_memory
        assert service.loop.batcher.limits.token_budget == opened.sizing.token_budget
        assert service.loop.batcher.model.known
        asked = texts(50, seed=8)
        answers = [future.result(10) for future in [service.submit(Request(t)) for t in asked]]
        assert [answer.value for answer in answers] == [answer_of(text) for text in asked]
    told = opened.describe()
    assert told["limits"]["odd_lane"] == (opened.lanes.lanes > 1)
    assert told["memory"]["used"] > 0 and told["batch_memory"]["round_to"] > 0


def test_what_is_given_is_not_chosen():
    settings = ServeSettings(lanes=1, token_budget=96, max_batch=3, weights={"a": 2.0})
    opened = open_service(simple(), Workload(texts(20), pad, encode), settings)
    with opened.service as service:
        limits = service.loop.batcher.limits
        assert (limits.lanes, limits.token_budget, limits.max_batch) == (1, 96, 3)
        assert limits.weights == {"a": 2.0}
        assert opened.sizing is None and opened.lanes.trials == ()


def test_sizes_that_were_given_are_lowered_to_what_fits_into_memory(caplog):
    memory = BatchMemory(0.0, 100_000.0, 0.0, round_to=1)
    workload = Workload(["ab" * 10, "abcd"], pad, encode)
    limit = process_memory().used + 400_000_000
    for given, name in (
        ({"token_budget": 1 << 15}, "token_budget"),
        ({"fixed_size": 2000}, "fixed_size"),
    ):
        settings = ServeSettings(lanes=1, queue=4000, memory_limit=limit, **given)
        with open_service(simple(0.0, 0.0), workload, settings, memory=memory).service as service:
            size = getattr(service.loop.batcher.limits, name)
        tokens = size if name == "token_budget" else 20 * size
        assert tokens * 100_000 <= 0.8 * 400_000_000 and tokens > 200
    assert "token budget: 32768 ->" in caplog.text and "fixed size: 2000 ->" in caplog.text


def test_it_is_warm_before_it_is_ready():
    engine = Summing()
    warm([engine], pad, encode(["ab", "abcdefgh"]), LargestBatch(32, 256))
    assert engine.shapes.count((4, 8)) == 10, "the longest, as many as the budget holds"
    assert engine.shapes.count((16, 2)) == 10


def test_the_fallback_is_warm_too():
    fallback, encoded = Summing(), encode(["ab", "abcdefgh"])
    settings = ServeSettings(lanes=1, token_budget=32)
    workload = Workload(encoded, pad)
    opened = open_service(
        Engine("summing", lambda threads: Summing()), workload, settings, Gates(fallback=[fallback])
    )
    with opened.service:
        assert fallback.shapes.count((4, 8)) == 10


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A real session of a small encoder."""
    path = tmp_path_factory.mktemp("encoder") / "model.onnx"
    ir.save(tiny_encoder(), path)
    return path


def requests(count: int, vocabulary: int = 20, seed: int = 0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 12, count)
    return [
        {"input_ids": rng.integers(1, vocabulary, n).tolist(), "attention_mask": [1] * int(n)}
        for n in lengths
    ]


def test_a_real_session_serves_from_buffers_of_its_lanes_with_the_answers_of_a_plain_run(encoder):
    def open_one(threads):
        settings = SessionSettings(
            threads=threads, entries={"session.intra_op.allow_spinning": "0"}
        )
        return open_session(encoder, settings)

    plain = open_one(1)
    specs = plain.inputs
    asked = requests(200)

    def pad_plain(group):
        return pad_batch(group, specs)

    engine = Engine("encoder", lambda threads: open_one(threads).run, open_one, specs)
    workload = Workload(asked[:40], pad_plain, decode=named_rows)
    settings = ServeSettings(lanes=2, token_budget=128, queue=300)
    opened = open_service(engine, workload, settings)
    assert opened.pooled
    with opened.service as service:
        answers = [f.result(20).value for f in [service.submit(Request(one)) for one in asked]]
    for one, answer in zip(asked, answers, strict=True):
        wanted = plain.run(pad_plain([one]))
        for name in plain.outputs:
            row = wanted[name][0]
            got = answer[name] if row.ndim < 2 else answer[name][: len(row)]
            np.testing.assert_allclose(got, row, rtol=1e-4, atol=1e-5)


def test_with_int8_dynamic_layers_answers_are_within_the_spread_over_compositions(
    encoder, tmp_path
):
    """One scale a batch: an answer depends on its batch-mates, and on nothing else."""
    from onnxruntime.quantization import quantize_dynamic

    path = tmp_path / "int8.onnx"
    quantize_dynamic(encoder, path, op_types_to_quantize=["MatMul"])
    session = open_session(path, SessionSettings(threads=1))
    asked, output = requests(120, vocabulary=90), session.outputs[0]

    def pad_plain(group):
        return pad_batch(group, session.inputs)

    def run(group):
        return session.run(pad_plain(group))[output]

    low = high = alone = np.concatenate([run([one]) for one in asked])
    rng = np.random.default_rng(0)
    for _ in range(40):
        order = rng.permutation(len(asked))
        for start in range(0, len(order), 8):
            part = order[start : start + 8]
            found = run([asked[index] for index in part])
            low, high = low.copy(), high.copy()
            low[part], high[part] = np.minimum(low[part], found), np.maximum(high[part], found)
    spread = float((high - low).max())
    assert spread > 1e-4, "batch-mates matter"
    engine = Engine("int8", lambda threads: session.run, lambda threads: session, session.inputs)
    settings = ServeSettings(lanes=2, token_budget=96, queue=300)
    workload = Workload(asked[:40], pad_plain, decode=named_rows)
    with open_service(engine, workload, settings).service as service:
        answers = [f.result(20) for f in [service.submit(Request(one)) for one in asked * 2]]
    assert max(answer.batch_size for answer in answers) > 1
    got = np.stack([answer.value[output] for answer in answers])
    assert np.abs(got - np.concatenate([alone, alone])).max() <= spread


def test_sessions_of_arrangements_that_were_only_tried_are_let_go(encoder):
    opened: list[weakref.ref] = []

    def open_one(threads):
        session = open_session(encoder, SessionSettings(threads=threads))
        opened.append(weakref.ref(session))
        return session

    sessions = SharedSessions(open_one)
    first = sessions(1)
    assert sessions(1) is first and len(opened) == 1
    specs = first.inputs
    engine = Engine("e", lambda threads: sessions(threads).run, sessions, specs)
    del first
    workload = Workload(requests(40), lambda group: pad_batch(group, specs), decode=named_rows)
    with open_service(engine, workload, ServeSettings(token_budget=64)).service as service:
        gc.collect()
        assert len(opened) == len(arrangements(cores()))
        assert sum(one() is not None for one in opened) == 1
        service.submit(Request(requests(1)[0])).result(10)


def test_threads_of_sessions_do_not_spin(encoder):
    """Lanes share cores: a spinning thread takes them from another lane."""
    session = open_session(encoder, settings_for(BACKENDS["ort-cpu"], 1))
    options = session.raw.get_session_options()
    for pool in ("intra_op", "inter_op"):
        assert options.get_session_config_entry(f"session.{pool}.allow_spinning") == "0"


def test_memory_is_what_larger_batches_make_it_grow():
    held = {"bytes": 10_000_000}

    def run(feeds):
        batch, length = feeds["ids"].shape
        held["bytes"] = max(held["bytes"], 10_000_000 + 50_000 * batch * length)
        return {"n": np.zeros(batch)}

    encoded = encode(["ab" * 4, "ab" * 20, "ab" * 60])
    memory = measure_memory(run, pad, encoded, lambda: held["bytes"], LargestBatch(1024, 256))
    assert memory.need(8, 120) >= 50_000 * 960 - 50_000 * 8
    assert memory.need(8, 120) <= 1.6 * 50_000 * 960


@pytest.mark.parametrize(
    ("settings", "tokens", "rows"),
    [
        (ServeSettings(lanes=1), 1024, 256),
        (ServeSettings(lanes=1, token_budget=96), 96, 256),
        (ServeSettings(lanes=1, max_batch=3), 120, 3),
        (ServeSettings(lanes=1, queue=2), 80, 2),
        (ServeSettings(lanes=1, fixed_size=4), 160, 4),
        (ServeSettings(lanes=1, max_batch=1), 40, 1),
    ],
)
def test_nothing_larger_is_run_at_the_start_than_can_be_served(settings, tokens, rows):
    asked = ["ab" * 20, "abcd", "abc"]  # 40 tokens at most
    assert largest_batch(settings, encode(asked)) == LargestBatch(tokens, rows)
    engines = []

    def open_lane(threads):
        engines.append(Summing())
        return engines[-1]

    with open_service(Engine("e", open_lane), Workload(asked, pad, encode), settings).service:
        shapes = [shape for engine in engines for shape in engine.shapes]
    assert max(batch for batch, _ in shapes) <= rows
    assert max(batch * length for batch, length in shapes) <= max(tokens, 40)


def test_lanes_are_tried_and_the_quicker_arrangement_taken():
    def open_lane(threads: int):
        return Summing(0.004 if threads == 1 else 0.0005)

    chosen = choose_lanes(open_lane, pad, encode(texts(40)), 2, round_s=0.1)
    assert (chosen.lanes, chosen.threads_per_lane) == (1, 2)
    assert {(one.lanes, one.threads_per_lane) for one in chosen.trials} == {(2, 1), (1, 2)}
    other = choose_lanes(lambda threads: Summing(0.002), pad, encode(texts(40)), 2, round_s=0.1)
    assert (other.lanes, other.threads_per_lane) == (2, 1)


def test_fewer_lanes_must_be_clearly_better():
    assert pick({(4, 1): 100.0, (2, 2): 107.0, (1, 4): 90.0}) == (4, 1)
    assert pick({(4, 1): 100.0, (2, 2): 115.0, (1, 4): 120.0}) == (1, 4)
    assert pick({(1, 1): 5.0}) == (1, 1)


def test_arrangements_fill_the_cores():
    assert arrangements(1) == [(1, 1)]
    assert arrangements(2) == [(2, 1), (1, 2)]
    assert arrangements(8) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert arrangements(6) == [(6, 1), (3, 2), (1, 6)]


def test_batches_of_the_trial_are_the_user_s_own_lengths():
    encoded = encode(texts(300, 2, 40))
    batches = mixed_batches(pad, encoded, 128)
    assert all(feeds["ids"].size <= 128 * 1.5 for feeds, _ in batches)
    assert sum(count for _, count in batches) > 30


def test_an_engine_that_fails_while_warming_up_says_why():
    def open_lane(threads):
        def run(feeds):
            raise OSError("no device")

        return run

    with pytest.raises(MeasurementError, match="while warming up: no device"):
        choose_lanes(open_lane, pad, encode(texts(4)), 1, round_s=0.05)


def test_a_hung_lane_is_opened_again():
    opened_lanes = []

    class Session(Summing):
        def __call__(self, feeds):
            if (feeds["ids"] == ord("h")).any() and len(opened_lanes) < 2:
                time.sleep(1.0)
            return super().__call__(feeds)

    def open_lane(threads):
        opened_lanes.append(threads)
        return Session()

    settings = ServeSettings(lanes=1, token_budget=32, hang_s=0.2)
    service = open_service(
        Engine("e", open_lane), Workload(["ab", "abcd"], pad, encode), settings
    ).service
    with service:
        with pytest.raises(MeasurementError, match="lane was replaced"):
            service.submit(Request("hh")).result(10)
        assert service.submit(Request("ab")).result(10).value == answer_of("ab")
        assert len(opened_lanes) == 2
