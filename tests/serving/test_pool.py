from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import pytest
from serving_fakes import texts

from qbench.graph.model import TensorSpec
from qbench.runtime.ort import SessionSettings, open_session
from qbench.serving.batcher import BatchLimits
from qbench.serving.flights import LoopOptions
from qbench.serving.loop import ServingLoop
from qbench.serving.pool import BoundRun, PooledPad, can_pool, pools_for
from qbench.serving.request import Work
from qbench.tasks.padding import pad_batch

SPECS = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "sequence")),
    TensorSpec("token_type_ids", "int32", ("batch", "sequence")),
)
MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
sums (int64[batch, length] input_ids, int64[batch, length] attention_mask)
     => (float[batch] total, float[batch, length] kept) {
   product = Mul (input_ids, attention_mask)
   kept = Cast <to: int = 1> (product)
   axes = Constant <value_ints: ints = [1]> ()
   total = ReduceSum <keepdims: int = 0> (kept, axes)
}
"""


def encoded(count: int = 200, shortest: int = 2, longest: int = 20, seed: int = 0):
    return [
        {"input_ids": [ord(c) for c in text], "attention_mask": [1] * len(text)}
        for text in texts(count, shortest, longest, seed)
    ]


@pytest.fixture
def session(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), path)
    with open_session(path, SessionSettings(threads=1)) as opened:
        yield opened


def plain(group):
    return pad_batch(group, SPECS, pad_id=7)


def test_buffers_pad_as_the_padder_does_whatever_lay_in_them():
    pooled = PooledPad(SPECS, 256, pad_id=7)
    requests = encoded()
    rng = np.random.default_rng(0)
    for _ in range(50):
        group = [requests[i] for i in rng.integers(0, len(requests), rng.integers(1, 9))]
        wanted, got = plain(group), pooled(group)
        assert list(got) == list(wanted)
        for name, array in wanted.items():
            assert got[name].dtype == array.dtype
            np.testing.assert_array_equal(got[name], array)
            assert got[name].flags.c_contiguous


def test_in_steady_state_no_input_buffer_is_allocated():
    """Counted by the pool, and by the allocator: nothing of the size of a feed is left behind."""
    pooled = PooledPad(SPECS, 4096)
    requests = encoded(500, 100, 200)
    groups = [requests[i : i + 16] for i in range(0, 480, 16)]
    for group in groups:
        pooled(group)
    before = pooled.buffers.allocations
    peaks = []
    for _ in range(5):  # threads that other tests left behind may allocate in one of them
        tracemalloc.start()
        for group in groups:
            pooled(group)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    peak = min(peaks)
    assert pooled.buffers.allocations == before == len(SPECS)
    feed_bytes = 16 * 150 * 8
    assert peak < feed_bytes, "three feeds of that size would have been three times this"


def test_a_served_lane_allocates_its_buffers_once():
    pools = []

    def make():
        pools.append(PooledPad(SPECS, 512))
        return pools[-1]

    limits = BatchLimits(token_budget=512, queue=1000)
    options = LoopOptions(pads=make)
    run = lambda feeds: {"n": (feeds["input_ids"] * feeds["attention_mask"]).sum(axis=1)}  # noqa: E731
    asked = encoded(600)
    with ServingLoop([run, run], Work(plain), limits, options) as loop:
        answers = [future.result(10) for future in [loop.ask(one) for one in asked]]
    assert [answer.value for answer in answers] == [sum(one["input_ids"]) for one in asked]
    assert [pool.buffers.allocations for pool in pools] == [len(SPECS)] * 2


def test_a_larger_batch_than_ever_grows_the_buffers_and_is_counted():
    pooled = PooledPad(SPECS, 8)
    pooled(encoded(10))
    assert pooled.buffers.allocations == 2 * len(SPECS)


def test_graphs_that_buffers_do_not_suit_are_left_to_the_padder():
    assert can_pool(SPECS)
    assert not can_pool((TensorSpec("input_ids", "int64", (8, "sequence")),))
    assert not can_pool((TensorSpec("pixels", "float32", ("batch", "width")),))
    assert pools_for((), plain, encoded(4), 64) is None
    assert pools_for(SPECS, plain, encoded(4), 64, pad_id=0) is None, "another pad id"
    made = pools_for(SPECS, plain, encoded(4), 64, pad_id=7)
    assert made is not None and made() is not made()


def test_position_ids_are_made_up():
    specs = (*SPECS, TensorSpec("position_ids", "int64", ("batch", "sequence")))
    group = encoded(3)
    np.testing.assert_array_equal(
        PooledPad(specs, 64)(group)["position_ids"], pad_batch(group, specs)["position_ids"]
    )


def test_a_bound_session_answers_as_a_plain_one_in_buffers_that_it_keeps(session):
    bound = BoundRun(session)
    pooled = PooledPad(SPECS, 512)
    requests = encoded()
    for start in range(0, 160, 8):
        feeds = pooled(requests[start : start + 8])
        wanted, got = session.run(feeds), bound(feeds)
        for name, array in wanted.items():
            np.testing.assert_array_equal(got[name], array)
            assert got[name].dtype == array.dtype
    before = bound.buffers.allocations
    for start in range(0, 160, 8):
        bound(pooled(requests[start : start + 8]))
    assert bound.buffers.allocations == before


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("float[?, ?, 4] x", "float[?, ?, 4] y"),  # dimensions without names
        ("float[batch, length, 4] x", "float[batch, length, 4] y"),  # a name that is wrong
    ],
)
def test_dimensions_whose_names_tell_nothing_or_wrongly_are_left_to_the_runtime(
    given, told, tmp_path
):
    text = f"""
    <ir_version: 10, opset_import: ["" : 21]>
    halves ({given}) => ({told}) {{
       starts = Constant <value_ints: ints = [0]> ()
       ends = Constant <value_ints: ints = [99]> ()
       axes = Constant <value_ints: ints = [1]> ()
       steps = Constant <value_ints: ints = [2]> ()
       y = Slice (x, starts, ends, axes, steps)
    }}
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "x.onnx")
    with open_session(tmp_path / "x.onnx", SessionSettings(threads=1)) as session:
        bound = BoundRun(session)
        for rows, length in ((2, 6), (3, 1), (1, 7), (4, 4)):
            x = np.random.default_rng(length).normal(size=(rows, length, 4)).astype(np.float32)
            np.testing.assert_array_equal(bound({"x": x})["y"], x[:, ::2])


def test_a_bound_session_refuses_bad_feeds_with_the_runtime_s_words(session):
    from qbench.errors import MeasurementError

    feeds = {"input_ids": np.zeros((2, 3), np.int64), "attention_mask": np.zeros((2, 4), np.int64)}
    with pytest.raises(MeasurementError, match=r"(?i)broadcast|dimension|shape"):
        BoundRun(session)(feeds)
