from __future__ import annotations

import pytest

from qbench.backends import (
    BACKENDS,
    Kernel,
    applicability,
    applicable_formats,
    backend_named,
    in_uniform,
    support_rows,
)
from qbench.errors import InputError
from qbench.formats import FORMATS
from qbench.records import Kind, Status

CPU = backend_named("ort-cpu")


@pytest.mark.parametrize("kind", list(Kind))
def test_high_precision_and_narrow_floats_apply_to_every_kind(kind: Kind) -> None:
    assert applicable_formats(kind, CPU)[:3] == ("fp32", "fp16", "bf16")


def test_what_quantizes_what() -> None:
    quantized = {kind: applicable_formats(kind, CPU)[3:] for kind in Kind}
    matrix = ("int8", "int8_dynamic", "w8a16", "w4a16", "w4a8", "fp8")
    assert quantized.pop(Kind.LINEAR) == matrix
    assert quantized.pop(Kind.EMBEDDING) == ("int8", "w8a16")
    assert quantized.pop(Kind.ACTIVATION) == quantized.pop(Kind.RESIDUAL_ADD) == ()
    assert set(quantized.values()) == {("int8",)}


@pytest.mark.parametrize(
    ("kind", "form", "status", "words"),
    [
        (Kind.RESIDUAL_ADD, "int8", Status.NOT_YET, "not offered by this version"),
        (Kind.CONV, "w8a16", Status.NOT_YET, "not offered by this version"),
        (Kind.SOFTMAX, "w4a16", Status.NOT_APPLICABLE, "softmax has none"),
        (Kind.EMBEDDING, "int8_dynamic", Status.NOT_APPLICABLE, "looks up rows"),
    ],
)
def test_the_rest_says_why_not(kind: Kind, form: str, status: Status, words: str) -> None:
    got, reason = applicability(kind, form, CPU)
    assert got is status and words in reason


def test_a_format_that_a_backend_has_not_names_those_that_it_has() -> None:
    got, reason = applicability(Kind.LINEAR, "int8_dynamic", BACKENDS["tensorrt"])
    assert got is Status.NOT_APPLICABLE and "tensorrt cannot run int8_dynamic" in reason


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(InputError, match="did you mean 'int8'"):
        applicability(Kind.LINEAR, "int88", CPU)


def test_a_uniform_engine_quantizes_what_multiplies_by_a_matrix() -> None:
    def kinds(form: str) -> set[Kind]:
        return {kind for kind in Kind if in_uniform(kind, form, CPU)}

    assert kinds("fp16") == set(Kind)
    assert kinds("int8") == kinds("int8_dynamic") == kinds("w4a16") == kinds("fp8") == {Kind.LINEAR}
    assert kinds("w8a16") == {Kind.LINEAR, Kind.EMBEDDING}
    assert in_uniform(Kind.CONV, "int8", BACKENDS["tensorrt"])


def test_every_backend_says_how_it_computes_each_format() -> None:
    for backend in BACKENDS.values():
        assert backend.formats[0] == backend.high_precision
        assert set(backend.formats) <= set(FORMATS) and backend.hardware
        for name in backend.formats:
            offered = [k for k in Kind if applicability(k, name, backend)[0] is Status.OK]
            assert offered == [k for k in Kind if backend.kernel(k, name) is not Kernel.NONE]
        if not backend.contrib:
            assert not {"int8_dynamic", "w4a8", "w8a16"} & set(backend.formats)
    rows = {(row.backend, row.format): row for row in support_rows()}
    assert len(rows) == sum(len(b.formats) for b in BACKENDS.values())
    assert rows["ort-cpu", "int8"].native == "linear, embedding"
    assert "kv" in rows["ort-cpu", "int8"].emulated
    assert rows["tensorrt", "fp8"].hardware == "SM89"
