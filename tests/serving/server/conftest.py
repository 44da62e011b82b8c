"""A served tiny encoder on a real socket, and clients for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
sys.path.insert(0, str(Path(__file__).parent))

from served import Served, serve_graph

from qbench.testing.graphs import tiny_encoder


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return an encoder of 100 words and at most 64 tokens, served for the whole session."""
    with serve_graph(tiny_encoder(), tmp_path_factory.mktemp("served")) as one:
        yield one


@pytest.fixture(scope="session")
def direct(served: Served):  # noqa: ANN201
    """Return what runs rows of token ids straight through the engine, one by one."""

    def run(ids: list[list[int]]) -> np.ndarray:
        rows = []
        for row in ids:
            feeds = {"input_ids": np.array([row]), "attention_mask": np.ones((1, len(row)), int)}
            rows.append(served.session.run(feeds)["embedding"][0])
        return np.array(rows)

    return run
