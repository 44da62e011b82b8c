"""Peak memory of calibration by the number of samples.

Calibrates a small encoder on 64, 256, 1024 and 4096 random texts, each in a process of its own, and
prints the peak resident memory and the time. Memory should not depend on the number of samples:

    python benchmarks/calibration_memory.py
    python benchmarks/calibration_memory.py --samples 64 16384
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

SAMPLES = (64, 256, 1024, 4096)
BATCH = 16
LENGTHS = (64, 48, 32, 16)  # taken in turn, so every run sees the same shapes


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """A batch of random token ids of one length."""

    rows: np.ndarray
    feeds: dict[str, np.ndarray]


def random_batches(samples: int) -> Iterator[Texts]:
    """Yield batches one by one; none is kept."""
    random = np.random.default_rng(0)
    for start in range(0, samples, BATCH):
        size = min(BATCH, samples - start)
        ids = random.integers(1, 100, (size, LENGTHS[start // BATCH % len(LENGTHS)]))
        yield Texts(
            np.arange(start, start + size),
            {"input_ids": ids, "attention_mask": np.ones_like(ids)},
        )


def measure(samples: int) -> tuple[float, float, int]:
    """Return peak resident memory in MiB, seconds and tensors of one calibration."""
    from qbench.backends import backend_named
    from qbench.calibration import calibrate
    from qbench.graph.layers import find_layers
    from qbench.runtime.ort import open_session, settings_for
    from qbench.testing.graphs import tiny_encoder

    model = tiny_encoder(layers=4, hidden=64)
    settings = settings_for(backend_named("ort-cpu"))
    start = time.perf_counter()
    found = calibrate(
        model,
        find_layers(model),
        random_batches(samples),
        lambda graph: open_session(graph, settings),
    )
    wall_s = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB here
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak / 2**20, wall_s, len(found.ranges)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of samples in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=list(SAMPLES))
    parser.add_argument("--alone", action="store_true", help="measure here, print one row")
    chosen = parser.parse_args(arguments)
    if chosen.alone:
        for samples in chosen.samples:
            peak_mib, wall_s, tensors = measure(samples)
            print(f"{samples:>8} {tensors:>8} {peak_mib:>10.1f} {wall_s:>8.2f}")
        return
    print(f"{'samples':>8} {'ranges':>8} {'peak MiB':>10} {'seconds':>8}", flush=True)
    for samples in chosen.samples:
        command = [sys.executable, __file__, "--alone", "--samples", str(samples)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
