"""Latency of batches without a server: paired, interleaved, every time kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qbench.errors import ConfigError
from qbench.records import Estimate
from qbench.serving.bench import Engine
from qbench.serving.request import Feeds
from qbench.serving.summary import paired_ratio


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Times of one engine, the same batches in the same rounds as its fellows.

    Attributes:
        engine: Name of the engine.
        times_ms: Raw milliseconds, by round and then by batch; the warm-up round is left out.
        cpu_ms: CPU milliseconds of the process, likewise.
    """

    engine: str
    times_ms: tuple[tuple[float, ...], ...]
    cpu_ms: tuple[tuple[float, ...], ...]

    @property
    def best_ms(self) -> tuple[float, ...]:
        """Best time of each batch over the rounds."""
        return tuple(float(value) for value in np.min(self.times_ms, axis=0))

    @property
    def median_ms(self) -> tuple[float, ...]:
        """Median time of each batch over the rounds."""
        return tuple(float(value) for value in np.median(self.times_ms, axis=0))

    def ratio_to(self, reference: BatchTimes) -> Estimate:
        """Return the paired ratio of times to the reference's (< 1 is faster).

        In each round it is the geometric mean over the batches: a short one counts as a long one.
        """
        return paired_ratio(_geometric(self.times_ms), _geometric(reference.times_ms))


def time_batches(
    engines: Sequence[Engine],
    batches: Sequence[Feeds],
    rounds: int = 7,
    *,
    threads: int = 1,
    seed: int = 0,
) -> tuple[BatchTimes, ...]:
    """Time the same batches on every engine, one lane each.

    In each round every batch runs once on each engine, engine after engine on the same batch
    in a seeded order that changes from batch to batch. A first round is thrown away.

    Args:
        engines: The engines; results come in their order.
        batches: Feeds of each batch.
        rounds: Rounds that count.
        threads: Threads of a lane.
        seed: Seed of the order.

    Raises:
        ConfigError: If there is nothing to time.
    """
    if rounds < 1 or not batches or not engines:
        raise ConfigError(
            f"got {len(engines)} engines, {len(batches)} batches and {rounds} rounds; "
            f"at least one of each is needed"
        )
    rng = np.random.default_rng(seed)
    runs = [engine.open_lane(threads) for engine in engines]
    wall_s = np.empty((len(engines), rounds + 1, len(batches)))
    cpu_s = np.empty_like(wall_s)
    for round_index in range(rounds + 1):
        for batch_index, feeds in enumerate(batches):
            for engine_index in rng.permutation(len(engines)):
                cpu_start_s, start_s = time.process_time(), time.perf_counter()
                runs[engine_index](feeds)
                end_s, cpu_end_s = time.perf_counter(), time.process_time()
                wall_s[engine_index, round_index, batch_index] = end_s - start_s
                cpu_s[engine_index, round_index, batch_index] = cpu_end_s - cpu_start_s
    return tuple(
        BatchTimes(engine.name, _milliseconds(wall_s[index]), _milliseconds(cpu_s[index]))
        for index, engine in enumerate(engines)
    )


def _geometric(times_ms: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the geometric mean over batches of each round, shape [rounds]."""
    return np.asarray(np.exp(np.mean(np.log(times_ms), axis=1)))


def _milliseconds(seconds: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Return [rounds + 1, batches] seconds as milliseconds without the warm-up round."""
    return tuple(tuple(float(value) for value in row) for row in seconds[1:] * 1e3)
