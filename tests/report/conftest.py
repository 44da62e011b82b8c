from __future__ import annotations

from typing import Any

import pytest

from qbench.report.figures import figures_of, spec_of
from qbench.report.page import render_page
from qbench.report.run_records import RunRecords
from qbench.testing.runs import made_records


@pytest.fixture(scope="session")
def records() -> RunRecords:
    return made_records()


@pytest.fixture(scope="session")
def specs(records: RunRecords) -> dict[str, dict[str, Any]]:
    return {name: spec_of(figure.chart) for name, figure in figures_of(records).items()}


@pytest.fixture(scope="session")
def page(records: RunRecords) -> str:
    return render_page(records)
