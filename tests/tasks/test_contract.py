"""Every task passes the suite that qbench ships."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from qbench.tasks import make_task
from qbench.testing.tasks import TaskContract

N = 12


def settings(kind: str, metric: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, metric=metric)


def texts(prefix: str, n: int = N) -> list[str]:
    return [f"{prefix} number {i}" for i in range(n)]


IDS = [f"s{i}" for i in range(N)]


def outputs(items: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(items).normal(size=(items, *shape)).astype(np.float32)


class TestRetrieval(TaskContract):
    @pytest.fixture(autouse=True)
    def _tokenizer(self, words):
        self.words = words

    def make(self):
        rows = pd.DataFrame({"id": IDS, "query": texts("query"), "answer": texts("answer")})
        return make_task(settings("retrieval"), rows, self.words), outputs(2 * N, 6)


class TestSimilarity(TestRetrieval):
    def make(self):
        rows = pd.DataFrame({"id": IDS, "text": texts("a"), "text_pair": texts("b")})
        rows["score"] = np.arange(N) % 5 / 2
        return make_task(settings("embedding"), rows, self.words), outputs(2 * N, 6)


class TestClassification(TestRetrieval):
    def make(self):
        rows = pd.DataFrame({"id": IDS, "text": texts("a"), "label": np.arange(N) % 4})
        return make_task(settings("classification"), rows, self.words), outputs(N, 4)


class TestPairClassificationWithOneLogit(TestRetrieval):
    def make(self):
        rows = pd.DataFrame({"id": IDS, "text": texts("a"), "text_pair": texts("b")})
        rows["label"] = np.arange(N) % 2
        return make_task(settings("classification"), rows, self.words), outputs(N, 1)


class TestUnlabelled(TestRetrieval):
    def make(self):
        rows = pd.DataFrame({"id": IDS, "text": texts("a")})
        return make_task(settings("none"), rows, self.words), outputs(N, 3, 5)


class TestUnlabelledLogits(TestRetrieval):
    def make(self):
        rows = pd.DataFrame({"id": IDS, "text": texts("a")})
        return make_task(settings("none", "kl"), rows, self.words), outputs(N, 5)


class TestCustom(TestRetrieval):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path):
        self.file = tmp_path / "margins.py"
        self.file.write_text(
            "def margin(outputs, labels):\n"
            "    return [row[label] - max(row) for row, label in zip(outputs, labels)]\n"
            "margin.high = 0\n"
        )

    def make(self):
        rows = pd.DataFrame({"id": IDS, "text": texts("a"), "label": np.arange(N) % 4})
        return make_task(settings(f"{self.file}:margin"), rows, self.words), outputs(N, 4)
