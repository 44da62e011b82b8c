"""A served tiny encoder on a real socket, and clients for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from qbench.hosting import PARTS
from qbench.testing.graphs import tiny_encoder

if TYPE_CHECKING:
    from served import Served

sys.path.insert(0, str(Path(__file__).parent))
#: Without the extra ``serve`` there is nothing to test here.
collect_ignore_glob = [] if all(map(importlib.util.find_spec, PARTS)) else ["test_*.py"]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return an encoder of 100 words and at most 64 tokens, served for the whole session."""
    from served import serve_graph

    with serve_graph(tiny_encoder(), tmp_path_factory.mktemp("served")) as one:
        yield one


@pytest.fixture(scope="session")
def direct(served: Served) -> Callable[[list[list[int]]], np.ndarray]:
    """Return what runs rows of token ids straight through the engine, one by one."""

    def run(ids: list[list[int]]) -> np.ndarray:
        rows = []
        for row in ids:
            feeds = {"input_ids": np.array([row]), "attention_mask": np.ones((1, len(row)), int)}
            rows.append(served.session.run(feeds)["embedding"][0])
        return np.array(rows)

    return run
