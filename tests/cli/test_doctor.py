from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qbench.backends import BACKENDS
from qbench.cli.checkup import examine
from qbench.cli.main import run_command_line
from qbench.runtime.presence import why_absent
from qbench.runtime.tensorrt import has_builder

CUDA = why_absent(BACKENDS["ort-cuda"])


def test_every_format_of_a_ready_backend_really_runs() -> None:
    found = examine()
    assert found.problems == ()
    for probe in found.backends:
        backend = BACKENDS[probe.name]
        assert [f.format for f in probe.formats] == list(backend.formats)
        away = backend.stand_in and not has_builder(backend)
        if away or why_absent(BACKENDS[backend.executed_on]):
            assert probe.status == "no" and {f.status for f in probe.formats} == {"unverified"}
            continue
        if backend.stand_in:
            assert {probe.status, *(f.status for f in probe.formats)} == {"builds"}, probe.formats
            assert "no device runs it here" in probe.remark
            continue
        assert {f.status for f in probe.formats} == {"runs"}, probe.formats
        for form in probe.formats:
            proof = backend.support(form.format).proof
            assert set(form.kernels) <= proof and bool(form.kernels) == bool(proof)


def test_a_kernel_that_is_not_there_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = BACKENDS["ort-cpu"]
    odd = replace(cpu.support("int8"), proof=frozenset({"QuantumMatMul"}))
    kept = tuple(odd if s.format == "int8" else s for s in cpu.supports)
    monkeypatch.setitem(BACKENDS, "ort-cpu", replace(cpu, supports=kept))
    found = next(b for b in examine().backends if b.name == "ort-cpu")
    failed = [f for f in found.formats if f.status == "fails"]
    assert [f.format for f in failed] == ["int8"] and "QuantumMatMul" in failed[0].remark
    assert found.remark == "1 formats fail"


@pytest.mark.skipif(not CUDA, reason="ONNX Runtime runs on a GPU here")
def test_a_backend_that_is_not_here_is_named_with_what_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command_line(["doctor", "--backend", "ort-cuda"]) == 2
    told = " ".join(capsys.readouterr().out.split())
    assert "problem: ort-cuda: it needs CUDAExecutionProvider" in told
    assert "offers" in told and "qbench[gpu]" in told and "unverified" in told
    assert run_command_line(["doctor", "--backend", "ort-cpu"]) == 0


def test_doctor_refuses_a_backend_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["doctor", "--backend", "ort-gpu"]) == 2
    assert "did you mean 'ort-cpu'" in capsys.readouterr().err


def test_doctor_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "ort-cpu" in told and "int8_dynamic" in told
    assert run_command_line(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["versions"]["qbench"] and content["machine"]["cores"] >= 1
    assert {b["name"] for b in content["backends"]} == set(BACKENDS)
