from __future__ import annotations

import numpy as np
import pytest
from serving_fakes import Summing, encode, pad, texts

from qbench.errors import ConfigError
from qbench.serving.bench import Engine
from qbench.serving.offline import BatchTimes, time_batches


def test_batches_are_timed_in_pairs():
    engines = [Engine("slow", lambda t: Summing(0.02)), Engine("quick", lambda t: Summing(0.001))]
    batches = [pad(encode(texts(size))) for size in (1, 4, 8)]
    slow, quick = time_batches(engines, batches, 4)
    assert (slow.engine, quick.engine) == ("slow", "quick")
    assert np.shape(slow.times_ms) == np.shape(slow.cpu_ms) == (4, 3)
    assert all(best >= 20.0 for best in slow.best_ms)
    assert all(best <= median for best, median in zip(quick.best_ms, quick.median_ms, strict=True))
    ratio = quick.ratio_to(slow)
    assert ratio.value < 0.8
    assert ratio.n == 4


def test_every_engine_runs_each_batch_once_a_round_and_the_order_changes():
    calls: list[str] = []

    def named(name):
        return Engine(name, lambda threads: lambda feeds: calls.append(name) or {})

    time_batches([named("a"), named("b")], [{}] * 10, 3)
    pairs = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert len(pairs) == 40
    assert set(pairs) == {("a", "b"), ("b", "a")}


def test_ratios_come_from_whole_rounds():
    a = BatchTimes("a", ((1.0, 3.0), (2.0, 6.0)), ((0.0, 0.0), (0.0, 0.0)))
    b = BatchTimes("b", ((2.0, 6.0), (4.0, 12.0)), ((0.0, 0.0), (0.0, 0.0)))
    assert a.best_ms == (1.0, 3.0)
    assert a.median_ms == (1.5, 4.5)
    assert b.ratio_to(a).value == pytest.approx(2.0)


def test_there_must_be_something_to_time():
    with pytest.raises(ConfigError, match="0 batches"):
        time_batches([Engine("a", lambda t: Summing())], [], 3)
