"""Results of ModelOpt's auto_quantize, in the forms in which it gives them."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qbench.backends import backend_named
from qbench.errors import PlanError
from qbench.planning.foreign import formats_of, read_modelopt
from qbench.records import Edge, Kind, Layer, Layers, Occurrence

CPU = backend_named("ort-cpu")
FOUND = {"encoder.query": "w4a16", "encoder.out": "int8", "head": "NONE"}


class QuantRecipe:
    """Stands where ModelOpt's class of this name is pickled."""

    def __init__(self, name: str) -> None:
        self._str_repr = name
        self.config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}]}


def state(recipe: Any = str) -> dict[str, Any]:
    names = {
        "encoder.query": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG(effective-bits: 4.0)",
        "encoder.out": "INT8_DEFAULT_CFG(effective-bits: 8.0)",
        "head": "NONE(effective-bits: 16.0)",
    }
    return {
        "method": "gradient",
        "candidate_stats": {
            f"{name}.quant_recipe": {"scores": [1.0], "module_names": [name]} for name in names
        },
        "best": {"recipe": {f"{n}.quant_recipe": recipe(told) for n, told in names.items()}},
    }


def layer(name: str, kind: Kind = Kind.LINEAR) -> Layer:
    use = Occurrence("MatMul", (f"{name}/n",), (f"{name}/in",), f"{name}/out",
                     (Edge(f"{name}/n", 0, f"{name}/in"),))  # fmt: skip
    weight = f"{name}.weight" if kind is Kind.LINEAR else ""
    return Layer(name, kind, (use,), module=name, weight=weight)


LAYERS = Layers(
    (
        layer("encoder.query"),
        layer("encoder.scores", Kind.ATTENTION_SCORES),
        layer("encoder.out"),
        layer("head"),
    ),
    (),
)


def test_a_state_as_json(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    for content in (state(), state()["best"], state()["best"]["recipe"]):
        file.write_text(json.dumps(content))
        assert read_modelopt(file) == FOUND


def test_a_state_saved_by_torch_is_read_without_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    module = types.ModuleType("modelopt_algorithms")
    module.QuantRecipe = QuantRecipe  # type: ignore[attr-defined]
    monkeypatch.setattr(QuantRecipe, "__module__", module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    file = tmp_path / "state.pth"
    torch.save(state(QuantRecipe) | {"weights": torch.ones(3)}, file)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert read_modelopt(file) == FOUND


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    import torch

    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harm",))

    file = tmp_path / "state.pth"
    torch.save(state() | {"harm": Harm()}, file)
    assert read_modelopt(file) == FOUND
    assert not (tmp_path / "harm").exists()


def test_a_configuration(tmp_path: Path) -> None:
    def entries(module: str, weight: Any, activation: Any) -> list[dict[str, Any]]:
        return [
            {
                "quantizer_name": f"{module}.{name}_quantizer",
                "enable": bits is not None,
                **({} if bits is None else {"cfg": {"num_bits": bits}}),
            }
            for name, bits in (("weight", weight), ("input", activation), ("output", None))
        ]

    file = tmp_path / "config.json"
    listed = [{"quantizer_name": "*", "enable": False}]
    listed += entries("encoder.query", 4, None) + entries("encoder.out", 8, 8)
    listed += entries("head", None, None)
    file.write_text(json.dumps({"quant_cfg": listed, "algorithm": "max"}))
    assert read_modelopt(file) == FOUND
    file.write_text(json.dumps({"quant_cfg": entries("head", [4, 3], [4, 3])}))
    assert read_modelopt(file) == {"head": "fp8"}
    file.write_text(json.dumps({"quant_cfg": entries("head", [2, 1], [2, 1])}))
    with pytest.raises(PlanError, match=r"head: weight bits \(2, 1\), activation bits \(2, 1\)"):
        read_modelopt(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no result of ModelOpt"),
        ("{}", "holds no result of ModelOpt"),
        ('{"best": {"recipe": {}}}', "holds scores alone"),
        ('{"recipe": {"a.quant_recipe": "NVFP4_DEFAULT_CFG(effective-bits: 4.0)"}}', "a: NVFP4"),
        ('{"quant_cfg": [{"quantizer_name": "*", "enable": false}]}', "names no module"),
        ('{"best": {"recipe": {"a": "NONE"}}, "candidate_stats": [1]}', "'candidate_stats' is no"),
    ],
)
def test_what_is_no_result(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "state.json"
    file.write_text(content)
    with pytest.raises(PlanError, match=words):
        read_modelopt(file)


def test_a_kept_module_that_the_graph_does_without_is_no_error() -> None:
    formats = formats_of({"encoder.out": "int8", "pooler.dense": "NONE"}, LAYERS, CPU, "state")
    assert formats == dict.fromkeys(LAYERS.by_name(), "fp32") | {"encoder.out": "int8"}
    with pytest.raises(PlanError, match="'pooler.dense' is no layer"):
        formats_of({"encoder.out": "int8", "pooler.dense": "int8"}, LAYERS, CPU, "state")


def test_a_missing_file_has_near_misses(tmp_path: Path) -> None:
    (tmp_path / "state.pth").write_bytes(b"PK")
    with pytest.raises(PlanError, match=r"did you mean 'state\.pth'"):
        read_modelopt(tmp_path / "stat.pth")
    with pytest.raises(PlanError, match="cannot be read"):
        read_modelopt(tmp_path / "state.pth")
    with pytest.raises(PlanError, match="cannot be read"):
        read_modelopt(tmp_path)


def test_modules_become_layers() -> None:
    formats = formats_of(FOUND, LAYERS, CPU, "state.pth")
    assert formats == {
        "encoder.query": "w4a16",
        "encoder.scores": "fp32",
        "encoder.out": "int8",
        "head": "fp32",
    }
    wrapped = {f"model.{name}": form for name, form in FOUND.items()}
    assert formats_of(wrapped, LAYERS, CPU, "state.pth") == formats


def test_every_unknown_module_is_named() -> None:
    wrong = {"encoder.qury": "int8", "decoder.out2": "int8", "head": "int8"}
    with pytest.raises(PlanError) as caught:
        formats_of(wrong, LAYERS, CPU, "state.pth")
    told = str(caught.value)
    assert "2 of 3 modules" in told and "did you mean 'encoder.query'" in told
    assert "decoder.out2" in told


def test_modules_that_a_file_tells_in_odd_ways(tmp_path: Path) -> None:
    odd = {"best": {"recipe": {"a.quant_recipe": "NONE", "b": None, "c": "INT8_DEFAULT_CFG"}}}
    file = tmp_path / "state.json"
    file.write_text(json.dumps(odd | {"candidate_stats": {"b": 5, "c": {"module_names": "d"}}}))
    with pytest.raises(PlanError, match="b: None"):
        read_modelopt(file)
    del odd["best"]["recipe"]["b"]
    file.write_text(json.dumps(odd | {"candidate_stats": {"c": {"module_names": "d"}}}))
    assert read_modelopt(file) == {"a": "NONE", "d": "int8"}


def test_a_group_that_the_result_breaks_is_refused() -> None:
    one, two = (replace(layer(name), tie="weight") for name in ("encoder.query", "head"))
    tied = Layers((one, layer("encoder.out"), two), ())
    with pytest.raises(PlanError, match=r"state: layers of one group \(weight\) must take one"):
        formats_of({"encoder.query": "int8", "head": "NONE"}, tied, CPU, "state")
    siblings = tuple(replace(layer(n), occurrences=one.occurrences) for n in ("key", "value"))
    for name, fine in (("ort-cpu", True), ("tensorrt-rtx", False)):
        backend, recipes = backend_named(name), {"key": "int8", "value": "w4a16"}
        if fine:
            assert formats_of(recipes, Layers(siblings, ()), backend, "state") == recipes
        else:
            with pytest.raises(PlanError, match="key as int8, value as w4a16"):
                formats_of(recipes, Layers(siblings, ()), backend, "state")
