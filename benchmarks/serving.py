"""The serving systems side by side: the same model, requests and clients, in one interleaved run.

    python benchmarks/serving.py
    python benchmarks/serving.py --json
    python benchmarks/serving.py --quick      # fewer settings, short slices: a trial

Every server is a process of its own and is driven over HTTP by the same 50 clients, which send
token ids; lengths are uniform in 16..48 and in 16..256. First each server is tuned over instances
x threads x batch sizes (qbench calibrates itself), then the best settings of all run at once, and
take turns in short slices in a shuffled order, so that a busy machine is busy for all. Ratios are
to ``FastAPI + PyTorch``, paired within rounds. ``cpu_ms`` is CPU time of the server's processes a
request, ``rss_mb`` their resident memory.

In the same rounds, without HTTP, in this process: the batcher under the same load, and the engine's
offline ceiling: the same requests, sorted, in batches, no server. ``ceiling_ratio`` is the
batcher's rate over the ceiling's, the worse of both lengths. ``overhead_us`` is CPU time of the
batcher and its client a request, with an engine that costs nothing. ``at_70`` is the batcher under
Poisson load at 70 % of its rate: P99 against ``max_wait`` and twice the longest batch expected.

Answers are compared with direct runs: FP32 to 1e-4, and the mixed engine, whose ``int8_dynamic``
layers quantize over a whole batch, to the spread of direct runs over compositions of batches.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from serving_batcher import Offline, at_70, batcher_rate, composition_spread, overhead_us
from serving_client import Load, Slice, drive_http
from serving_peers import PEERS, WAIT_MS, Models, Peer, Running, Setting, running
from serving_requests import draw_requests, encode_ids, sample_lengths

from qbench import judging, pipeline
from qbench.backends import applicability
from qbench.config import load_config
from qbench.errors import QbenchError
from qbench.lowering import lowering_for
from qbench.records import Status
from qbench.runtime.loading import resolve_source
from qbench.serving.bench import Workload, cores
from qbench.serving.load import ClosedLoop
from qbench.serving.opening import Opened, ServeSettings, open_service
from qbench.workbench import Workbench

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
LENGTHS = {"16-48": (16, 48), "16-256": (16, 256)}
CLIENTS = 50
CHECKED = 24
TOLERANCE = 1e-4
FLOOR = "FastAPI + PyTorch"


@dataclass(frozen=True, slots=True)
class Timing:
    """How long everything takes, seconds."""

    rounds: int = 5
    slice_s: float = 4.0
    warmup_s: float = 1.0
    tune_s: float = 2.0
    open_s: float = 20.0


QUICK = Timing(rounds=2, slice_s=2.0, warmup_s=0.5, tune_s=1.0, open_s=6.0)


@dataclass(slots=True)
class Measured:
    """What the slices of one server gave."""

    rates: list[float] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    rss_mb: float = 0.0

    def add(self, taken: Slice) -> None:
        """Add a slice whose marks are (CPU seconds, MB) of the server."""
        (cpu_s, _), (end_cpu_s, rss_mb) = taken.marks
        self.rates.append(taken.rate)
        self.latencies_ms += taken.latencies_ms
        self.cpu_s += end_cpu_s - cpu_s
        self.wall_s += taken.end_s - taken.from_s
        self.rss_mb = max(self.rss_mb, rss_mb)


def build_mixed(work: Workbench) -> Path:
    """Build the engine whose layers are ``int8_dynamic`` wherever they can be; return its file."""
    lowering = lowering_for("int8_dynamic")
    formats = {
        layer.name: "int8_dynamic"
        for layer in work.chosen
        if applicability(layer.kind, "int8_dynamic", work.backend)[0] is Status.OK
        and lowering.requires(work.model.ir, layer) is None
    }
    plan = judging.plan_for(work, judging.Candidate("mixed", formats), {})
    judging.build(work, "mixed", plan)
    return judging.engine_path(work, "mixed")


def usage_of(pid: int) -> tuple[float, float]:
    """Return CPU seconds and resident MB of a process and all that it started."""
    cpu_s = rss = 0.0
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            cpu_s += times.user + times.system
            rss += one.memory_info().rss
    return cpu_s, rss / 1e6


def drive_slice(server: Running, ids: Sequence[np.ndarray], load: Load) -> Slice:
    """Return a slice of load on a server, with its CPU time and memory marked."""
    marked = Load(
        load.clients, load.warmup_s, load.measure_s, load.keep, lambda: usage_of(server.pid)
    )
    return drive_http(server.port, server.wire, ids, marked)


def tune(
    peer: Peer, models: Models, ids: Sequence[np.ndarray], plan: Timing, quick: bool
) -> tuple[Setting, dict[str, float]]:
    """Return a server's best setting, and requests a second of each that was tried.

    Raises:
        RuntimeError: If it runs with none of them.
    """
    settings, found = peer.settings(quick), dict[Setting, float]()
    if len(settings) == 1:
        return settings[0], {}
    failed: RuntimeError | None = None
    for setting in settings:
        try:
            with running(peer, setting, models, sample_lengths(ids)) as server:
                taken = drive_slice(server, ids, Load(CLIENTS, plan.warmup_s, plan.tune_s))
        except RuntimeError as error:  # one setting of many
            failed = error
            tell(f"  {peer.name}: {setting}: {error}")
            continue
        found[setting] = taken.rate
        tell(f"  {peer.name}: {setting}: {taken.rate:.1f}/s")
    if not found and failed is not None:
        raise failed
    best = max(found, key=lambda one: found[one])
    return best, {str(setting): rate for setting, rate in found.items()}


def check_answers(name: str, taken: Slice, alone: np.ndarray, allowed: float) -> float:
    """Return how far a server's answers are from direct runs; end where that is too far."""
    if not taken.answers:
        sys.exit(f"{name}: no answer to compare")
    worst = max(float(np.abs(got - alone[at]).max()) for at, got in taken.answers.items())
    if not worst <= allowed:
        sys.exit(f"{name}: answers are {worst:.2g} from direct runs; allowed: {allowed:.2g}")
    return worst


def tell(words: str) -> None:
    """Say how far it is, apart from the result."""
    print(words, file=sys.stderr, flush=True)


class Bench:
    """One range of lengths: its requests, its servers and what they gave.

    Args:
        work: The workbench, both engines built.
        models: What is served.
        lengths: Name of the range.
        quick: Fewer settings and shorter slices.
    """

    def __init__(self, work: Workbench, models: Models, lengths: str, quick: bool) -> None:
        self.plan, self.quick, self.lengths = QUICK if quick else Timing(), quick, lengths
        self.models = models
        self.ids = draw_requests(work, *LENGTHS[lengths], seed=work.config.run.seed)
        encoded = [encode_ids(one, models.inputs) for one in self.ids]
        self.workload = Workload(encoded, judging.padder(work))
        self.reference = judging.serve_with(work, judging.REFERENCE)
        mixed = judging.serve_with(work, "mixed")
        self.direct = {
            engine.name: composition_spread(
                engine.open_lane(1), self.workload.pad, encoded[:CHECKED]
            )
            for engine in (self.reference, mixed)
        }
        self.measured: dict[str, Measured] = {}
        self.skipped: dict[str, str] = {}
        self.ceiling: list[float] = []
        self.batcher: list[float] = []

    def run(self, peers: Sequence[Peer]) -> dict[str, Any]:
        """Tune all, let them take turns, and return what is told of this range beside the rows."""
        best, tried = dict[Peer, Setting](), dict[str, Any]()
        for peer in peers:
            with self._sparing(peer):
                best[peer], rates = tune(peer, self.models, self.ids, self.plan, self.quick)
                tried[peer.name] = rates
        opened = open_service(self.reference, self.workload, ServeSettings(max_wait_ms=WAIT_MS))
        with opened.service, contextlib.ExitStack() as stack:
            lengths = sample_lengths(self.ids)
            servers = dict[Peer, Running]()
            for peer, setting in best.items():
                with self._sparing(peer):
                    one = running(peer, setting, self.models, lengths)
                    servers[peer] = stack.enter_context(one)
            self._take_turns(servers, opened)
            stack.close()
            tail = at_70(opened, self.workload.encoded(), median(self.batcher), self.plan.open_s)
        return {
            "settings": {peer.name: str(setting) for peer, setting in best.items()},
            "tried": tried,
            "batcher_req_s": median(self.batcher),
            "ceiling_req_s": median(self.ceiling),
            "ceiling_ratio": paired(self.batcher, self.ceiling),
            "at_70": tail,
            "lanes": [opened.lanes.lanes, opened.lanes.threads_per_lane],
            "token_budget": opened.service.loop.batcher.limits.token_budget,
            "int8_spread": self.direct["mixed"][1],
        }

    @contextlib.contextmanager
    def _sparing(self, peer: Peer) -> Iterator[None]:
        """Go on without a peer that fails, and keep why; what is ours must run."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if peer.kind == "ours":
                raise
            self.skipped[peer.name] = str(error)
            tell(f"skipped: {peer.name}: {error}")

    def _take_turns(self, servers: Mapping[Peer, Running], opened: Opened) -> None:
        """Give everything a slice in each round, in a shuffled order."""
        plan, rng = self.plan, np.random.default_rng(0)
        lanes = (opened.lanes.lanes, opened.lanes.threads_per_lane)
        offline = Offline(self.reference, self.workload, lanes)
        offline.tune(plan.tune_s)
        load = Load(CLIENTS, plan.warmup_s, plan.slice_s, CHECKED)
        loop = ClosedLoop(CLIENTS, plan.slice_s, plan.warmup_s)
        self.measured = {peer.name: Measured() for peer in servers}
        for _ in range(plan.rounds):
            for turn in rng.permutation(len(servers) + 1):
                if turn == len(servers):
                    self._alone(opened, offline, loop)
                    continue
                peer = list(servers)[turn]
                if peer.name not in self.skipped:
                    with self._sparing(peer):
                        self._turn(peer, drive_slice(servers[peer], self.ids, load))

    def _alone(self, opened: Opened, offline: Offline, loop: ClosedLoop) -> None:
        """Give batcher and ceiling a slice each, in turns that halve what a busy machine does."""
        for _ in range(2):
            self.batcher.append(batcher_rate(opened.service, self.workload.encoded(), loop))
            self.ceiling.append(offline.rate(self.plan.slice_s))
        tell(f"  {self.lengths}: batcher {self.batcher[-2:]}, ceiling {self.ceiling[-2:]}")

    def _turn(self, peer: Peer, taken: Slice) -> None:
        name = "mixed" if peer.engine == "mixed" else self.reference.name
        alone, spread = self.direct[name]
        allowed = max(spread, TOLERANCE) if peer.engine == "mixed" else TOLERANCE
        check_answers(peer.name, taken, alone, allowed)
        self.measured[peer.name].add(taken)
        tell(f"  {self.lengths}: {peer.name}: {taken.rate:.1f}/s")

    def rows(self, peers: Sequence[Peer]) -> list[dict[str, Any]]:
        """Return the rows of the table."""
        whole = {name: one for name, one in self.measured.items() if name not in self.skipped}
        floor, ran = whole.get(FLOOR), [peer for peer in peers if peer.name in whole]
        return [make_row(peer, self.lengths, whole[peer.name], floor) for peer in ran]


def make_row(
    peer: Peer, lengths: str, measured: Measured, floor: Measured | None
) -> dict[str, Any]:
    """Return one row; ratios are ``None`` where the floor was not measured."""
    p50, p95, p99 = np.percentile(measured.latencies_ms, (50, 95, 99))
    answers = sum(rate * measured.wall_s / len(measured.rates) for rate in measured.rates)
    cpu_ms = 1e3 * measured.cpu_s / answers
    return {
        "name": peer.name,
        "kind": peer.kind,
        "lengths": lengths,
        "engine": peer.engine,
        "req_s": median(measured.rates),
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "p99_ms": float(p99),
        "cpu_ms": cpu_ms,
        "rss_mb": measured.rss_mb,
        "utilisation": measured.cpu_s / (measured.wall_s * cores()),
        "ratio": None if floor is None else paired(measured.rates, floor.rates),
    }


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(np.median(values))


def paired(rates: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return float(np.median(np.divide(rates, reference)))


def measure(work: Workbench, quick: bool) -> dict[str, Any]:
    """Measure everything and return the object that ``--json`` prints."""
    inputs = tuple(one.name for one in work.model.inputs)
    folder = Path(resolve_source(work.config.model.source))
    models = Models(work.model.path, build_mixed(work), folder, inputs)
    skipped = {peer.name: why for peer in PEERS if (why := peer.missing())}
    for name, why in skipped.items():
        tell(f"skipped: {name}: {why}")
    peers = [peer for peer in PEERS if peer.name not in skipped]
    rows, said, overheads = [], dict[str, Any](), []
    for lengths in LENGTHS:
        bench = Bench(work, models, lengths, quick)
        overheads.append(overhead_us(bench.reference, bench.workload, CLIENTS))
        said[lengths] = bench.run(peers)
        rows += bench.rows(peers)
        skipped |= bench.skipped
        peers = [peer for peer in peers if peer.name not in skipped]
    return {
        "rows": rows,
        "ceiling_ratio": min(one["ceiling_ratio"] for one in said.values()),
        "overhead_us": max(overheads),
        "skipped": skipped,
        "by_lengths": said,
    }


def table(said: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    lines = []
    for lengths, about in said["by_lengths"].items():
        head = f"{lengths + ' tokens':36}{'engine':>7}{'req/s':>8}{'ratio':>7}{'P50':>7}{'P95':>7}"
        lines.append(head + f"{'P99 ms':>8}{'CPU ms':>8}{'RSS MB':>8}{'busy':>6}  setting")
        for row in (row for row in said["rows"] if row["lengths"] == lengths):
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            lines.append(
                f"{row['name']:36}{row['engine']:>7}{row['req_s']:8.1f}{ratio:>7}"
                f"{row['p50_ms']:7.0f}{row['p95_ms']:7.0f}{row['p99_ms']:8.0f}{row['cpu_ms']:8.2f}"
                f"{row['rss_mb']:8.0f}{row['utilisation']:6.2f}  {about['settings'][row['name']]}"
            )
        tail = about["at_70"]
        lines.append(
            f"batcher alone {about['batcher_req_s']:.1f}/s, ceiling {about['ceiling_req_s']:.1f}/s "
            f"({about['ceiling_ratio']:.3f}); at 70 %: P99 {tail['p99_ms']:.1f} ms, bound "
            f"{tail['bound_ms']:.1f} ms; answers of int8 within {about['int8_spread']:.2g}"
        )
    lines += [f"skipped: {name}: {why}" for name, why in said["skipped"].items()]
    lines.append(f"overhead of the batcher: {said['overhead_us']:.0f} us of CPU a request")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--quick", action="store_true", help="fewer settings, short slices")
    parser.add_argument("--json", action="store_true", help="print one object and nothing else")
    chosen = parser.parse_args(arguments)
    if importlib.util.find_spec("httptools") is None:
        parser.error("the clients need httptools; add it: pip install 'qbench[serve]'")
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(chosen.config, {"run.results": folder, "run.id": "serving"})
            said = measure(pipeline.start(config), chosen.quick)
    except QbenchError as error:
        parser.error(str(error))
    print(json.dumps(said) if chosen.json else table(said))


if __name__ == "__main__":
    main()
