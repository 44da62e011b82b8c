from __future__ import annotations

import pytest

from qbench.backends import applicability, applicable_formats, backend_named
from qbench.errors import InputError
from qbench.records import Kind, Status

CPU = backend_named("ort-cpu")


@pytest.mark.parametrize("kind", list(Kind))
def test_high_precision_and_fp16_apply_to_every_kind(kind: Kind) -> None:
    assert applicable_formats(kind, CPU)[:2] == ("fp32", "fp16")


def test_what_quantizes_what() -> None:
    quantized = {kind: applicable_formats(kind, CPU)[2:] for kind in Kind}
    assert quantized.pop(Kind.LINEAR) == ("int8", "int8_dynamic", "w8a16", "w4a16")
    assert quantized.pop(Kind.EMBEDDING) == ("w8a16",)
    assert set(quantized.values()) == {()}


@pytest.mark.parametrize(
    ("kind", "form", "status", "words"),
    [
        (Kind.LAYERNORM, "int8", Status.NOT_YET, "not offered by this version"),
        (Kind.CONV, "w8a16", Status.NOT_YET, "not offered by this version"),
        (Kind.SOFTMAX, "w4a16", Status.NOT_APPLICABLE, "softmax has none"),
        (Kind.EMBEDDING, "int8", Status.NOT_APPLICABLE, "looks up rows"),
        (Kind.LINEAR, "fp8", Status.NOT_APPLICABLE, "ort-cpu cannot run fp8"),
    ],
)
def test_the_rest_says_why_not(kind: Kind, form: str, status: Status, words: str) -> None:
    got, reason = applicability(kind, form, CPU)
    assert got is status and words in reason


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(InputError, match="did you mean 'int8'"):
        applicability(Kind.LINEAR, "int88", CPU)
