from __future__ import annotations

import json

import pytest

from qbench.backends import BACKENDS
from qbench.cli.checkup import examine
from qbench.cli.main import run_command_line


def test_every_format_of_a_ready_backend_really_runs() -> None:
    found = examine()
    assert found.problems == ()
    for probe in found.backends:
        backend = BACKENDS[probe.name]
        if not backend.ready:
            assert (probe.status, probe.formats) == ("no", ())
            continue
        assert [f.format for f in probe.formats] == list(backend.formats)
        assert {f.status for f in probe.formats} == {"runs"}, probe.formats


def test_doctor_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "ort-cpu" in told and "int8_dynamic" in told
    assert run_command_line(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["versions"]["qbench"] and content["machine"]["cores"] >= 1
    assert {b["name"] for b in content["backends"]} == set(BACKENDS)
