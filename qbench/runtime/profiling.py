"""Times of single nodes as the runtime's own profiler gives them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qbench.errors import MeasurementError
from qbench.runtime.ort import SessionSettings, open_session

_KERNEL = "_kernel_time"


@dataclass(frozen=True, slots=True)
class NodeTime:
    """One node in one run.

    Attributes:
        node: Name of the node in the runtime's optimised graph.
        op: Its operator there.
        ms: Milliseconds.
        provider: The execution provider that ran it.
    """

    node: str
    op: str
    ms: float
    provider: str = ""


def profile_nodes(
    graph: ir.Model | Path,
    settings: SessionSettings,
    batches: Sequence[Mapping[str, np.ndarray]],
    repeats: int = 3,
) -> list[list[tuple[NodeTime, ...]]]:
    """Return the times of every node, by batch and repeat, in the order in which nodes ran.

    Each batch runs ``repeats`` times after one run that does not count. The profiler costs a
    little at each node: times are to be compared with those of another profile.

    Args:
        graph: A graph in memory or an ONNX file.
        settings: Session settings.
        batches: Feeds of each batch.
        repeats: Runs of each batch that count.

    Raises:
        MeasurementError: If the graph does not run, or the profile does not hold every run.
    """
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder) / "profile"
        with open_session(graph, replace(settings, profile_stem=stem)) as session:
            for feeds in batches:
                for _ in range(repeats + 1):
                    session.run(feeds)
            file = session.end_profiling()
        runs = _runs_of(json.loads(file.read_text(encoding="utf-8")))
    if len(runs) != len(batches) * (repeats + 1):
        raise MeasurementError(
            f"the profile holds {len(runs)} runs of {len(batches) * (repeats + 1)}"
        )
    step = repeats + 1
    return [runs[at + 1 : at + step] for at in range(0, len(runs), step)]


def _runs_of(events: Sequence[Mapping[str, object]]) -> list[tuple[NodeTime, ...]]:
    """Cut the events into runs; a run's own event comes when its nodes are done."""
    runs: list[tuple[NodeTime, ...]] = []
    nodes: list[NodeTime] = []
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_KERNEL):
            args = event.get("args")
            told = args if isinstance(args, Mapping) else {}
            op, provider = str(told.get("op_name", "")), str(told.get("provider", ""))
            duration = float(str(event.get("dur", 0)))
            nodes.append(NodeTime(name.removesuffix(_KERNEL), op, duration / 1e3, provider))
        elif name == "model_run":
            runs.append(tuple(nodes))
            nodes = []
    return runs
