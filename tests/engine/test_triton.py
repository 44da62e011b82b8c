"""Model repositories: what they say, what is checked, and that a real Triton serves them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qbench.cli.main import run_command_line
from qbench.engine.tritoncheck import problems_of
from qbench.engine.tritonconfig import Platform, TritonOptions
from qbench.errors import MissingDependencyError, ModelError
from qbench.exporting import ExportRequest, export_triton, platform_of
from qbench.graph.model import save_graph
from qbench.records import EngineReport, Serialized
from qbench.rundir import RunDir
from qbench.runtime.ort import SessionSettings, open_session
from qbench.servable import find_servable
from qbench.testing.graphs import Sketch, tiny_convnet, tiny_encoder
from qbench.testing.tritonserver import find_server, running_triton

pytest.importorskip("tritonclient", reason="needs the extra 'triton'")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an encoder with external data, in a folder of its own."""
    folder = tmp_path_factory.mktemp("mine")
    save_graph(tiny_encoder(hidden=64), folder / "engine.onnx")
    assert (folder / "engine.onnx.data").is_file()
    return folder


def export(*arguments: object) -> int:
    return run_command_line(["export-triton", *map(str, arguments)])


@pytest.fixture
def repository(engine: Path, tmp_path: Path) -> Path:
    assert export(engine, tmp_path / "models", "--name", "mine", "--max-batch", 8) == 0
    return tmp_path / "models"


def test_the_files_lie_where_triton_looks(repository: Path) -> None:
    found = {str(p.relative_to(repository)) for p in repository.rglob("*") if p.is_file()}
    assert found == {
        "mine/config.pbtxt",
        "mine/1/model.onnx",
        "mine/1/engine.onnx.data",
        "mine/warmup/input_ids.bin",
        "mine/warmup/attention_mask.bin",
    }
    settings = SessionSettings(threads=1)
    with open_session(repository / "mine" / "1" / "model.onnx", settings) as session:
        assert session.inputs[0].name == "input_ids"


def test_the_configuration_says_what_was_asked_for(repository: Path) -> None:
    from google.protobuf import text_format

    from qbench.engine.tritonconfig import model_config_messages

    messages = model_config_messages()
    text = (repository / "mine" / "config.pbtxt").read_text()
    config = text_format.Parse(text, messages.ModelConfig())
    assert (config.name, config.platform, config.max_batch_size) == ("mine", "onnxruntime_onnx", 8)
    assert [(t.name, list(t.dims)) for t in config.input] == [
        ("input_ids", [-1]),
        ("attention_mask", [-1]),
    ]
    batching = config.dynamic_batching
    assert list(batching.preferred_batch_size) == [2, 4, 8]
    assert batching.max_queue_delay_microseconds == 5000
    assert (batching.priority_levels, batching.default_priority_level) == (2, 1)
    assert batching.default_queue_policy.max_queue_size == 256
    assert batching.priority_queue_policy[2].allow_timeout_override
    assert [warm.batch_size for warm in config.model_warmup] == [1, 8]
    assert config.instance_group[0].kind == messages.ModelInstanceGroup.Kind.Value("KIND_CPU")
    assert problems_of(repository / "mine") == []


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.pbtxt"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (replaced('name: "mine"', 'name: "other"'), "the folder 'mine'"),
        (replaced('platform: "onnxruntime_onnx"', 'platform: "onnx"'), "platform"),
        (replaced("max_batch_size: 8", "max_batch_size: 4"), "over max_batch_size"),
        (replaced("max_batch_size: 8", "max_batch_size: 0"), "1 or more"),
        (replaced("max_batch_size", "max_batch"), "no field named"),
        (replaced('name: "input_ids"', 'name: "input_id"'), "is not in the graph"),
        (replaced("TYPE_INT64", "TYPE_INT32"), "TYPE_INT64 in the graph"),
        (replaced("TYPE_INT64", "TYPE_INT65"), "cannot be read"),
        (replaced("dims: -1", "dims: -1\n  dims: 3"), "dims"),
        (replaced("dims: 64", "dims: 63"), "'embedding' has dims"),
        (replaced("default_priority_level: 1", "default_priority_level: 3"), "no level"),
        (replaced("key: 2", "key: 3"), "names level 3 of 2"),
        (replaced("kind: KIND_CPU", "kind: KIND_CPU\n  gpus: 0"), "names GPUs"),
        (lambda folder: (folder / "1" / "engine.onnx.data").unlink(), "engine.onnx.data"),
        (lambda folder: (folder / "1" / "model.onnx").unlink(), "model.onnx is missing"),
        (lambda folder: shutil.rmtree(folder / "1"), "no version folder"),
        (lambda folder: (folder / "warmup" / "input_ids.bin").unlink(), "warm-up data"),
        (lambda folder: (folder / "config.pbtxt").unlink(), "cannot be read"),
    ],
)
def test_what_does_not_fit_is_found(
    repository: Path, edit: Callable[[Path], None], words: str
) -> None:
    edit(repository / "mine")
    assert any(words in problem for problem in problems_of(repository / "mine"))


def test_a_folder_that_exists_is_kept_unless_forced(engine: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "models"
    (target / "other").mkdir(parents=True)
    assert export(engine, target, "--name", "mine") == 2
    assert "--force" in capsys.readouterr().err and not (target / "mine").exists()
    for batch in (8, 4):
        assert export(engine, target, "--name", "mine", "--force", "--max-batch", batch) == 0
        assert f"max_batch_size: {batch}" in (target / "mine" / "config.pbtxt").read_text()
    assert (target / "other").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]


@pytest.mark.parametrize("name", [".", ".."])
def test_force_replaces_nothing_but_a_model_of_the_repository(
    engine: Path, tmp_path: Path, name: str, capsys
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "mine.txt").write_text("kept")
    assert export(engine, tmp_path / "models", "--name", name, "--force") == 2
    assert (tmp_path / "mine.txt").is_file() and (tmp_path / "models").is_dir()


@pytest.mark.parametrize("linked", [True, False])
def test_what_is_no_folder_is_not_replaced(
    engine: Path, tmp_path: Path, linked: bool, capsys
) -> None:
    target = tmp_path / "models" / "mine"
    target.parent.mkdir()
    if linked:
        target.symlink_to(engine)
    else:
        target.write_text("notes")
    assert export(engine, tmp_path / "models", "--name", "mine", "--force") == 2
    assert "is no folder" in capsys.readouterr().err
    assert (engine / "engine.onnx").is_file() and target.exists()


def test_each_input_has_warm_up_data_of_its_own(tmp_path: Path) -> None:
    s = Sketch(0)
    a = s.input("a.x", ir.DataType.FLOAT, ("batch", 2))
    b = s.input("a_x", ir.DataType.FLOAT, ("batch", 4))
    save_graph(s.model(y=s.op("Concat", a, b, axis=1)), tmp_path / "x.onnx")
    assert export(tmp_path / "x.onnx", tmp_path / "models") == 0
    sizes = {path.stat().st_size for path in (tmp_path / "models/x/warmup").iterdir()}
    assert sizes == {8, 16}


def test_tensors_without_values_are_refused(tmp_path: Path, capsys) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 0))
    save_graph(s.model(y=s.op("Identity", x)), tmp_path / "x.onnx")
    assert export(tmp_path / "x.onnx", tmp_path / "models") == 2
    assert "no value in it" in capsys.readouterr().err


def test_weights_that_are_inputs_too_are_asked_of_nobody(tmp_path: Path) -> None:
    import onnx

    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    old (float[batch, 2] x, float[2] w) => (float[batch, 2] y) <float[2] w = {1.0, 2.0}> {
       y = Add (x, w)
    }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "old.onnx")
    assert export(tmp_path / "old.onnx", tmp_path / "models") == 0
    assert 'name: "w"' not in (tmp_path / "models/old/config.pbtxt").read_text()


def fixed_batch(size: int) -> ir.Model:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, (size, 4))
    return s.model(y=s.op("Relu", x))


def no_batch() -> ir.Model:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("length", 4))
    return s.model(y=s.op("ReduceSum", x, s.ints(0), keepdims=0))


@pytest.mark.parametrize("graph", [fixed_batch(1), fixed_batch(3), no_batch()])
def test_a_graph_without_a_batch_is_one_clear_error(graph: ir.Model, tmp_path, capsys) -> None:
    save_graph(graph, tmp_path / "x.onnx")
    assert export(tmp_path / "x.onnx", tmp_path / "models") == 2
    told = capsys.readouterr().err
    assert "batch" in told and told.count("error:") == 1
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-batch", "0"], "--max-batch"),
        (["--preferred", "32"], "preferred batch size 32"),
        (["--instances", "0"], "instances"),
        (["--name", "a/b"], "name"),
        (["--name", "."], "no '.' in front"),
        (["--name", ".."], "no '.' in front"),
        (["--name", ".hidden"], "no '.' in front"),
        (["--name", "é"], "name"),
        (["--max-batch", "99999999999"], "max_batch"),
        (["--queue", "99999999999"], "queue"),
        (["--instances", "99999999999"], "instances"),
        (["--max-wait-ms", "nan"], "--max-wait-ms"),
        (["--max-wait-ms", "1e300"], "--max-wait-ms"),
        (["--timeout-ms", "inf"], "--timeout-ms"),
        (["--platform", "tensorrt_plan"], "trtexec"),
        (["--plan-file", "x.plan"], "--platform"),
        (["--platform", "tensorrt_plan", "--plan-file", "missing.plan"], "no file"),
        (["--platform", "tensorrt_plan", "--cpu"], "GPUs"),
    ],
)
def test_bad_options_are_one_clear_error(
    engine: Path, tmp_path: Path, arguments: list[str], words: str, capsys
) -> None:
    assert export(engine, tmp_path / "models", *arguments) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_tensorrt_engines_are_placed_and_described(engine: Path, tmp_path: Path, capsys) -> None:
    plan = tmp_path / "built.plan"
    plan.write_bytes(b"a serialized engine")
    arguments = ["--platform", "tensorrt_plan", "--plan-file", plan, "--name", "trt", "--json"]
    assert export(engine, tmp_path / "models", *arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["platform"] == "tensorrt_plan" and "trt/1/model.plan" in told["files"]
    assert (tmp_path / "models/trt/1/model.plan").read_bytes() == b"a serialized engine"
    text = (tmp_path / "models/trt/config.pbtxt").read_text()
    assert "KIND_GPU" in text and "intra_op_thread_count" not in text
    assert problems_of(tmp_path / "models/trt", engine / "engine.onnx") == []


def test_engines_of_tensorrt_rtx_are_no_tensorrt_plans(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "rtx")
    (tmp_path / "rtx" / "engine.plan").write_bytes(b"an engine of tensorrt-rtx")
    servable = find_servable(str(tmp_path / "rtx"), backend="tensorrt-rtx")
    with pytest.raises(ModelError, match="does not load"):
        platform_of(servable)
    request = ExportRequest(TritonOptions("rtx", Platform.TENSORRT, gpu=True))
    with pytest.raises(ModelError, match="does not load"):
        export_triton(servable, request, tmp_path / "models")
    assert not (tmp_path / "models").exists()
    named = replace(request, plan_file=tmp_path / "rtx" / "engine.plan")
    assert "rtx/1/model.plan" in export_triton(servable, named, tmp_path / "models").files


def test_a_tensorrt_engine_is_asked_for_no_more_than_it_was_built_for(
    engine: Path, tmp_path: Path
) -> None:
    (tmp_path / "trt").mkdir()
    for file in engine.iterdir():
        shutil.copy(file, tmp_path / "trt")
    (tmp_path / "trt" / "engine.plan").write_bytes(b"a serialized engine")
    run = RunDir.create(tmp_path, "run")
    made = Serialized("engine.plan", shapes={"batch": (1, 4, 8), "sequence": (2, 6, 16)})
    counts: dict[str, int] = {}
    report = EngineReport("plan", "x", "tensorrt", 1, "", counts, counts, counts, serialized=made)
    run.write_engines([report])
    found = find_servable(str(tmp_path / "trt"), backend="tensorrt")
    servable = replace(found, run=run, facts={"engine": "plan"})
    options = TritonOptions("trt", Platform.TENSORRT, gpu=True)
    with pytest.raises(ModelError, match="--max-batch 8"):
        export_triton(servable, ExportRequest(options), tmp_path / "models")
    fitting = replace(options, max_batch=8, preferred=(8,))
    export_triton(servable, ExportRequest(fitting), tmp_path / "models")
    assert (tmp_path / "models/trt/warmup/input_ids.bin").stat().st_size == 16 * 8


def test_external_data_outside_its_folder_is_refused(tmp_path: Path, capsys) -> None:
    import onnx

    save_graph(tiny_encoder(hidden=64), tmp_path / "x.onnx")
    model = onnx.load(tmp_path / "x.onnx", load_external_data=False)
    (tmp_path / "in").mkdir()
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../x.onnx.data"
    onnx.save(model, tmp_path / "in" / "x.onnx")
    assert export(tmp_path / "in" / "x.onnx", tmp_path / "models") == 2
    assert capsys.readouterr().err.count("error:") == 1
    assert not (tmp_path / "models").exists()


def test_external_data_in_folders_of_its_own_stays_there(tmp_path: Path) -> None:
    import onnx

    save_graph(tiny_encoder(hidden=64), tmp_path / "x.onnx")
    model = onnx.load(tmp_path / "x.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "weights/all.bin"
    (tmp_path / "weights").mkdir()
    (tmp_path / "x.onnx.data").rename(tmp_path / "weights" / "all.bin")
    onnx.save(model, tmp_path / "x.onnx")
    assert export(tmp_path / "x.onnx", tmp_path / "models") == 0
    placed = tmp_path / "models" / "x" / "1"
    assert (placed / "weights" / "all.bin").is_file()
    with open_session(placed / "model.onnx", SessionSettings(threads=1)) as session:
        assert session.outputs == ("embedding",)


def numbers() -> ir.Model:
    """Return a graph whose rows are a number and a vector in fp16, with two outputs."""
    s = Sketch(0)
    one = s.input("one", ir.DataType.INT64, ("batch",))
    half = s.input("a half", ir.DataType.FLOAT16, ("batch", 3))
    return s.model(positive=s.op("Greater", one, s.ints(0)), doubled=s.op("Add", half, half))


@pytest.mark.slow
def test_a_real_triton_serves_what_was_written(engine: Path, tmp_path: Path) -> None:
    try:
        find_server()
    except MissingDependencyError as error:
        if os.environ.get("CI"):
            pytest.fail(f"the CI must have a Triton server: {error}")
        pytest.skip(str(error))
    http = pytest.importorskip("tritonclient.http")
    save_graph(tiny_convnet(), tmp_path / "images.onnx")
    models = tmp_path / "models"
    assert export(engine, models, "--name", "mine", "--max-batch", 8, "--instances", 2) == 0
    assert export(tmp_path / "images.onnx", models, "--name", "images", "--force") == 0
    save_graph(numbers(), tmp_path / "numbers.onnx")
    assert export(tmp_path / "numbers.onnx", models, "--force", "--timeout-ms", 5000) == 0
    rng = np.random.default_rng(0)
    settings = SessionSettings(threads=1)
    with (
        running_triton(models, tmp_path) as server,
        http.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=8) as client,
        open_session(engine / "engine.onnx", settings) as session,
        open_session(tmp_path / "images.onnx", settings) as pictures,
    ):
        assert client.is_model_ready("mine") and client.is_model_ready("images")
        later, wanted = [], []
        for turn in range(24):
            shape = [1 + turn % 3, 4 + turn % 2]
            ids = rng.integers(1, 99, shape)
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            inputs = []
            for name, array in feeds.items():
                inputs.append(http.InferInput(name, shape, "INT64"))
                inputs[-1].set_data_from_numpy(array)
            later.append(client.async_infer("mine", inputs, priority=1 + turn % 2))
            wanted.append(session.run(feeds)["embedding"])
        for answer, expected in zip(later, wanted, strict=True):
            got = answer.get_result().as_numpy("embedding")
            np.testing.assert_allclose(got, expected, atol=1e-5)
        image = rng.normal(size=(2, 3, 16, 16)).astype(np.float32)
        asked = http.InferInput("image", [2, 3, 16, 16], "FP32")
        asked.set_data_from_numpy(image)
        got = client.infer("images", [asked]).as_numpy("logits")
        np.testing.assert_allclose(got, pictures.run({"image": image})["logits"], atol=1e-4)
        halves = rng.normal(size=(2, 3)).astype(np.float16)
        asked = [http.InferInput("one", [2, 1], "INT64"), http.InferInput("a half", [2, 3], "FP16")]
        asked[0].set_data_from_numpy(np.array([[3], [-3]]))
        asked[1].set_data_from_numpy(halves)
        answer = client.infer("numbers", asked)
        assert answer.as_numpy("positive").ravel().tolist() == [True, False]
        np.testing.assert_array_equal(answer.as_numpy("doubled"), halves * 2)
        config = client.get_model_config("mine")
        assert config["dynamic_batching"]["priority_levels"] == 2
        (stats,) = client.get_inference_statistics("mine")["model_stats"]
        warm = 2 * (1 + 10 * 8)  # each instance: a batch of one, then ten of the largest
        assert stats["inference_count"] == warm + sum(1 + turn % 3 for turn in range(24))
