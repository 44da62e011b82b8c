"""Peak memory of calibration by the number of samples.

Calibrates a small encoder on 64, 256, 1024 and 4096 random texts, each in a process of its own, and
prints the peak resident memory and the time. Memory should not depend on the number of samples:

    python benchmarks/calibration_memory.py
    python benchmarks/calibration_memory.py --samples 64 16384
    python benchmarks/calibration_memory.py --json
    python benchmarks/calibration_memory.py --figure benchmarks/calibration_memory.svg
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SAMPLES = (64, 256, 1024, 4096)
BATCH = 16
LENGTHS = (64, 48, 32, 16)  # taken in turn, so every run sees the same shapes


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """A batch of random token ids of one length."""

    rows: np.ndarray
    feeds: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Row:
    """One calibration.

    Attributes:
        samples: Texts that it saw.
        ranges: Tensors that it gave ranges of.
        peak_mib: Peak resident memory of its process, MiB.
        before_mib: Peak before the first text: libraries, graph and session, MiB.
        wall_s: Seconds of the calibration.
    """

    samples: int
    ranges: int
    peak_mib: float
    before_mib: float
    wall_s: float


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


def measure(samples: int) -> Row:
    """Calibrate in this process and return what it took."""
    from qbench.backends import backend_named
    from qbench.calibration import calibrate
    from qbench.graph.layers import find_layers
    from qbench.runtime.ort import open_session, settings_for
    from qbench.testing.graphs import tiny_encoder

    model = tiny_encoder(layers=4, hidden=64)
    settings = settings_for(backend_named("ort-cpu"))
    layers, before_mib = find_layers(model), peak_mib()
    start = time.perf_counter()
    found = calibrate(
        model, layers, random_batches(samples), lambda graph: open_session(graph, settings)
    )
    wall_s = time.perf_counter() - start
    return Row(samples, len(found.ranges), peak_mib(), before_mib, wall_s)


def peak_mib() -> float:
    """Return the peak resident memory of this process, MiB.

    NOTE: ``ru_maxrss`` would do on a machine of its own, but Linux hands a child its parent's.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(float(x.split()[1]) for x in lines if x.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def measure_apart(samples: int) -> Row:
    """Calibrate in a fresh process and return what it took."""
    command = [sys.executable, __file__, "--alone", "--samples", str(samples)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Row(**json.loads(done.stdout))


def memory_data(rows: Sequence[Row]) -> pd.DataFrame:
    """Return one row a calibration and part of its memory, MiB."""
    said = [(r.samples, "peak", r.peak_mib) for r in rows]
    said += [(r.samples, "before the first text", r.before_mib) for r in rows]
    return pd.DataFrame(said, columns=["samples", "what", "mib"])


def draw_memory(rows: Sequence[Row]) -> Any:
    """Draw peak memory against the number of samples."""
    import altair as alt

    from qbench.report.figure_style import BLUE, GREY, finished, titled

    scale = alt.Scale(domain=["peak", "before the first text"], range=[BLUE, GREY])
    chart = alt.Chart(memory_data(rows), width=520, height=260).encode(
        x=alt.X("samples:Q", title="calibration samples").scale(type="log", base=2),
        y=alt.Y("mib:Q", title="resident memory, MiB").scale(zero=True),
        color=alt.Color("what:N", title=None, scale=scale),
    )
    low, high = min(r.peak_mib for r in rows), max(r.peak_mib for r in rows)
    notes = (
        f"encoder of 4 layers, width 64, batches of {BATCH}; a process each",
        f"peaks from {low:.0f} to {high:.0f} MiB",
    )
    layers = chart.mark_line() + chart.mark_point(filled=True, size=70)
    return finished(layers, titled("Calibration memory by the number of samples", *notes))


def save_figure(rows: Sequence[Row], path: Path) -> None:
    """Write the figure as SVG."""
    import vl_convert

    from qbench.report.figures import spec_of, vegalite_version

    svg = vl_convert.vegalite_to_svg(spec_of(draw_memory(rows)), vl_version=vegalite_version())
    path.write_text(svg, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of samples in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=list(SAMPLES))
    parser.add_argument("--json", action="store_true", help="print one object and nothing else")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw it, as SVG")
    parser.add_argument("--alone", action="store_true", help="measure one here, as JSON")
    chosen = parser.parse_args(arguments)
    if chosen.alone:
        print(json.dumps(asdict(measure(chosen.samples[0]))))
        return
    if not chosen.json:
        print(f"{'samples':>8} {'ranges':>8} {'peak MiB':>10} {'seconds':>8}", flush=True)
    rows = []
    for samples in chosen.samples:
        row = measure_apart(samples)
        rows.append(row)
        if not chosen.json:
            said = f"{row.peak_mib:>10.1f} {row.wall_s:>8.2f}"
            print(f"{row.samples:>8} {row.ranges:>8} {said}", flush=True)
    growth = max(r.peak_mib for r in rows) / min(r.peak_mib for r in rows)
    if chosen.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "peak_growth": growth}))
    if chosen.figure is not None:
        save_figure(rows, chosen.figure)


if __name__ == "__main__":
    main()
