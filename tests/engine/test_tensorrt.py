"""Serialized engines: really built by TensorRT-RTX where it is installed, with no GPU."""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.engine.build import ENGINE_FILE, write_engine
from qbench.engine.patterns import layer_graph, patterns_of
from qbench.engine.shapes import Sizes
from qbench.engine.tensorrt import (
    COMMAND_FILE,
    SERIALIZED_FILE,
    NotBuiltError,
    Wanted,
    check_builder,
    serialize,
)
from qbench.errors import InputError, MeasurementError, MissingDependencyError, PlanError
from qbench.graph.layers import find_layers
from qbench.graph.model import Model, save_graph, store_model
from qbench.graph.normal import normalise
from qbench.records import Kind, Layers, Plan, PlanLayer
from qbench.runtime import tensorrt as runtime
from qbench.testing.graphs import tiny_encoder

RTX, ENTERPRISE = BACKENDS["tensorrt-rtx"], BACKENDS["tensorrt"]
SIZES = {"batch": Sizes(1, 4, 8), "sequence": Sizes(4, 16, 32)}
MIXED = ("int8", "w4a16", "fp16", "fp32")

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the extra tensorrt-rtx"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    graph = normalise(tiny_encoder(layers=1, hidden=64))
    return store_model(graph, tmp_path_factory.mktemp("encoder"), "tiny", {})


@pytest.fixture(scope="module")
def layers(model: Model) -> Layers:
    return find_layers(model.ir)


def mixed_plan(model: Model, layers: Layers, backend: str = "tensorrt-rtx") -> Plan:
    def choose(index: int, kind: Kind) -> str:
        if kind is Kind.LINEAR:
            return MIXED[index % len(MIXED)]
        return "int8" if kind in (Kind.SOFTMAX, Kind.ATTENTION_SCORES) else "fp16"

    rows = tuple(
        PlanLayer(x.name, x.kind, choose(i, x.kind), clips={e.tensor: 4.0 for e in x.edges})
        for i, x in enumerate(layers.layers)
    )
    return Plan(1, backend, "tiny", model.sha256, rows)


def write(model: Model, layers: Layers, folder: Path) -> tuple[Path, ir.Model]:
    return write_engine(model, layers, mixed_plan(model, layers), "plan-hash", folder)


def wanted(model: Model, backend=RTX, **more) -> Wanted:
    return Wanted(backend, model.inputs, SIZES, **more)


@pytest.fixture(scope="module")
def built(model, layers, tmp_path_factory):
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("needs the extra tensorrt-rtx")
    path, graph = write(model, layers, tmp_path_factory.mktemp("built"))
    return path, graph, serialize(path, graph, wanted(model))


def test_a_mixed_engine_is_built_without_a_gpu(built, model) -> None:
    path, graph, made = built
    assert path.with_name(SERIALIZED_FILE).stat().st_size == made.bytes > 0
    assert made.builder.startswith("tensorrt-rtx 1.") and "no device ran it" in made.remark
    assert made.shapes == {"batch": (1, 4, 8), "sequence": (4, 16, 32)}
    quantizers = [n.op_type for n in graph.graph]
    assert made.network["quantize"] == quantizers.count("QuantizeLinear") > 0
    assert made.network["dequantize"] == quantizers.count("DequantizeLinear") > 0
    assert {n.domain for n in graph.graph.all_nodes()} == {""}


@pytest.mark.parametrize("file", [ENGINE_FILE, SERIALIZED_FILE])
def test_no_path_and_no_user_is_in_any_byte(built, file: str) -> None:
    data = built[0].with_name(file).read_bytes()
    words = [str(built[0].parent), os.getcwd(), sys.prefix, "/tmp/", str(Path.home())]
    words += [f"/{getpass.getuser()}/", "stack_trace"]
    assert [word for word in words if word.encode() in data] == []


def copied(path: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in (path, path.with_name(f"{path.name}.data")):
        if file.is_file():
            shutil.copy(file, folder)
    return folder / path.name


SCRIPT = """
import sys
from pathlib import Path
import onnx_ir as ir
sys.path.insert(0, sys.argv[1])
import test_tensorrt as t
from qbench.graph.model import open_stored
path = Path(sys.argv[3])
made = t.serialize(path, ir.load(path), t.wanted(open_stored(Path(sys.argv[2]))))
print(made.sha256, made.repeatable)
"""


def test_the_same_graph_is_the_same_bytes_elsewhere(built, model, root, tmp_path) -> None:
    path, _, made = built
    if not made.repeatable:
        pytest.skip("this system gives memory at random places")
    far = copied(path, tmp_path / "a longer way to the file" / "and on")
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root), "SOME": "x" * 999}
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", SCRIPT, here, str(model.path.parent), str(far)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == [made.sha256, "True"]


@needs_rtx
def test_what_the_parser_refuses_names_our_layer(model, layers, tmp_path) -> None:
    path, graph = write(model, layers, tmp_path)
    pair = next(n for n in graph.graph if n.op_type == "QuantizeLinear")
    owner = pair.metadata_props["qbench.layer"]
    shifted = ir.tensor(np.array(3, np.int8), name="shifted")
    value = ir.Value(
        name="shifted", const_value=shifted, shape=shifted.shape, type=ir.TensorType(shifted.dtype)
    )
    graph.graph.register_initializer(value)
    pair.replace_input_with(2, value)
    (tmp_path / "planted").mkdir()
    save_graph(graph, tmp_path / "planted" / ENGINE_FILE)
    with pytest.raises(NotBuiltError, match=f"tensorrt-rtx does not build.*layer '{owner}'"):
        serialize(tmp_path / "planted" / ENGINE_FILE, graph, wanted(model))
    assert not (tmp_path / "planted" / SERIALIZED_FILE).exists()


@needs_rtx
def test_a_pattern_that_hardware_lacks_fails_alone_and_its_neighbours_do_not(
    model, layers, tmp_path
) -> None:
    path, graph = write(model, layers, tmp_path)
    with pytest.raises(NotBuiltError):
        serialize(path, graph, wanted(model, hardware="SM75"))
    failing = set()
    for pattern, names in patterns_of(mixed_plan(model, layers), layers, "fp16").items():
        part = layer_graph(graph, names)
        assert part is not None
        save_graph(part, tmp_path / "part.onnx")
        shapes = {
            v.name: [d if isinstance(d, int) else 4 for d in v.shape] for v in part.graph.inputs
        }
        profile = {name: (tuple(s),) * 3 for name, s in shapes.items()}
        outcome = runtime.build_serialized(
            tmp_path / "part.onnx", tmp_path / "part.plan", RTX, profile, ["SM75"]
        )
        if outcome.problems:
            failing.add(pattern.format)
    assert "w4a16" in failing and "int8" not in failing


def test_where_the_builder_is_not_installed_the_command_is_written(model, layers, tmp_path) -> None:
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed here")
    path, graph = write(model, layers, tmp_path)
    made = serialize(path, graph, wanted(model, ENTERPRISE))
    script = (tmp_path / COMMAND_FILE).read_text()
    assert made.command in script and not made.path and "unverified" in made.remark
    assert made.command.startswith("trtexec --onnx=engine.onnx --stronglyTyped --minShapes=")
    assert "--optShapes=input_ids:4x16,attention_mask:4x16" in made.command
    assert "--maxShapes=input_ids:8x32" in made.command
    assert str(tmp_path) not in script
    again = serialize(path, graph, wanted(model, ENTERPRISE))
    assert again == made and not (tmp_path / SERIALIZED_FILE).exists()


def test_a_builder_that_could_be_installed_is_named(monkeypatch) -> None:
    gone = replace(RTX, builder="no_such_builder")
    with pytest.raises(MissingDependencyError, match=r'pip install "qbench\[tensorrt-rtx\]"'):
        check_builder(gone)
    check_builder(ENTERPRISE)  # its command is written instead


@needs_rtx
@pytest.mark.parametrize("hardware", ["SM90", "sm100"])
def test_hardware_that_the_builder_does_not_know(hardware) -> None:
    with pytest.raises(PlanError, match=f"got '{hardware}'; tensorrt-rtx builds for SM75, SM80"):
        check_builder(RTX, hardware)


def test_a_builder_that_dies_is_a_clear_error(model, layers, tmp_path, monkeypatch) -> None:
    path, graph = write(model, layers, tmp_path)
    (tmp_path / "dying_builder.py").write_text("import os\nos.abort()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MeasurementError, match="ended without an answer .SIGABRT."):
        serialize(path, graph, wanted(model, replace(RTX, builder="dying_builder")))


def test_a_full_disk_leaves_no_half_engine(built, model, monkeypatch, tmp_path) -> None:
    def full(made: Path, engine: Path) -> None:
        engine.write_bytes(made.read_bytes()[:100])
        raise OSError(28, "No space left on device")

    path = copied(built[0], tmp_path / "full")
    monkeypatch.setattr(runtime, "_copy", full)
    with pytest.raises(InputError, match="make room"):
        serialize(path, built[1], wanted(model))
    assert not path.with_name(SERIALIZED_FILE).exists()


def test_a_builder_that_hangs_is_a_clear_error(model, layers, tmp_path, monkeypatch) -> None:
    path, graph = write(model, layers, tmp_path)
    (tmp_path / "slow_builder.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(runtime, "_TIMEOUT_S", 0.5)
    with pytest.raises(MeasurementError, match="took over 0.5 s"):
        serialize(path, graph, wanted(model, replace(RTX, builder="slow_builder")))
