from __future__ import annotations

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from qbench.lowering import LOWERINGS, lowering_for
from qbench.testing.lowerings import LoweringCase, LoweringContract, fake_product

_spec = importlib.util.spec_from_file_location(
    "layer_cases", Path(__file__).with_name("layer_cases.py")
)
layer_cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layer_cases)


class LinearContract(LoweringContract):
    @pytest.fixture(params=layer_cases.LINEAR)
    def case(self, request) -> LoweringCase:
        return layer_cases.LINEAR[request.param]()

    def reference(self, case):
        return fake_product(self.format_name, case)

    def step(self, case):
        return case.clip / 127 * float(np.abs(case.weight).max())


class TestInt8(LinearContract):
    format_name = "int8"


class TestInt8Dynamic(LinearContract):
    format_name = "int8_dynamic"


class Blocks(LinearContract):
    #: Elements of K that share a scale, by K: 128, or a power of two or a divisor of K below it.
    BLOCKS = {32: 32, 576: 64, 100: 100, 17: 17, 131: 131, 256: 128, 3: 3, 1: 1}

    def reference(self, case):
        return fake_product(self.format_name, case, self.BLOCKS[len(case.weight)])

    def share(self):
        return 1.0

    def step(self, case):
        return 0.0


class TestW8A16(Blocks):
    format_name = "w8a16"


class TestW4A16(Blocks):
    format_name = "w4a16"


class TestW4A8(Blocks):
    format_name = "w4a8"
    #: The last block of K may be a part of one.
    BLOCKS = {32: 32, 576: 128, 100: 128, 17: 32, 131: 128, 256: 128, 3: 32, 1: 32}

    def share(self):
        return 0.9

    def step(self, case):
        return case.clip / 127 * float(np.abs(case.weight).max())


class TestFp8(LinearContract):
    format_name = "fp8"

    def step(self, case):
        return case.clip / 16 * float(np.abs(case.weight).max())


class TestBf16(LinearContract):
    format_name = "bf16"

    def step(self, case):
        return 4 * 2.0**-7  # outputs lie within ±4

    def share(self):
        return 0.9


class TestFp16(LinearContract):
    format_name = "fp16"

    def step(self, case):
        return 4 * 2.0**-10  # outputs lie within ±4

    def share(self):
        return 0.9


class EmbeddingContract(LoweringContract):
    @pytest.fixture(params=layer_cases.EMBEDDING)
    def case(self, request) -> LoweringCase:
        return layer_cases.EMBEDDING[request.param]()

    def step(self, case):
        return 0.0

    def share(self):
        return 1.0


class TestEmbeddingFp16(EmbeddingContract):
    format_name = "fp16"

    def reference(self, case):
        rows = case.weight.astype(np.float16).astype(np.float32)
        return lambda ids: rows[ids]


class TestEmbeddingBf16(EmbeddingContract):
    format_name = "bf16"

    def reference(self, case):
        rows = case.weight.astype(ml_dtypes.bfloat16).astype(np.float32)
        return lambda ids: rows[ids]


class TestEmbeddingInt8(EmbeddingContract):
    format_name = "int8"

    def reference(self, case):
        step = np.abs(case.weight).max(axis=0) / 127
        rows = np.clip(np.rint(case.weight / step), -127, 127) * step
        return lambda ids: rows[ids]


class TestEmbeddingW8A16(EmbeddingContract):
    format_name = "w8a16"

    def reference(self, case):
        step = np.abs(case.weight).max(axis=1, keepdims=True) / 127
        step[step == 0] = 1
        rows = np.clip(np.rint(case.weight / step), -127, 127) * step
        return lambda ids: rows[ids]


@pytest.mark.parametrize("name", list(LOWERINGS))
def test_a_weight_that_is_used_twice_is_stored_once(name: str) -> None:
    case = layer_cases.LINEAR["shared weight"]()
    model = case.model.clone()
    lowering_for(name).apply(model, case.layer, case.clips)
    size = 32 * 16 if name == "w4a8" else 32 * 32  # two elements a byte
    large = [v for v in model.graph.initializers.values() if v.const_value.size == size]
    assert len(large) == 1 and len(large[0].uses()) == 2
    kept = "DynamicQuantizeLinear" if name == "int8_dynamic" else "QuantizeLinear"
    if name.startswith("int8"):
        assert sum(n.op_type == kept for n in model.graph) == 2, "a pair of its own for each use"
