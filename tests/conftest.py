"""What every test shares: no network, few threads, and the labelled data that some need."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(_name, _value)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of labelled data that ``QBENCH_TEST_DATA`` names; skips without."""
    folder = os.environ.get("QBENCH_TEST_DATA")
    if not folder:
        pytest.skip("QBENCH_TEST_DATA names no folder")
    return Path(folder)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium; skips without one, and in the CI that skip is a failure."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("CI"):
        pytest.fail("the CI must have a Chromium; .ci/run installs it")
    pytest.skip("no Chromium on this machine")
