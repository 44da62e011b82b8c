"""``qbench export-triton``: an engine as a model repository for Triton."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qbench.cli.answers import Answer, answering
from qbench.cli.batching import Duration, batching_options
from qbench.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from qbench.engine.triton import Repository
    from qbench.exporting import ExportRequest
    from qbench.servable import Servable


@click.command(
    "export-triton",
    epilog="""\b
Examples:
  qbench export-triton results/demo model_repository
  qbench export-triton engines/mine model_repository --name mine --max-batch 32 --instances 2
  qbench export-triton engine.onnx repository --platform tensorrt_plan --plan-file engine.plan
""",
)
@click.argument("plan_or_engine")
@click.argument("folder", metavar="DIR")
@click.option("--name", metavar="NAME", help="Name of the model; that of run or file by default.")
@click.option("--engine", metavar="NAME", help="Engine of a run: plan (default), reference, int8 …")
@click.option(
    "--platform",
    type=click.Choice(["onnxruntime_onnx", "tensorrt_plan"]),
    help="What runs it in Triton; by the engine's backend by default.",
)
@click.option("--plan-file", metavar="FILE", help="Serialized TensorRT engine of this ONNX file.")
@batching_options("requests", max_batch=16)
@click.option(
    "--preferred", multiple=True, type=int, metavar="N", help="Preferred batch size; repeat it."
)
@click.option(
    "--timeout-ms",
    type=Duration(0, 1000),
    default=0.0,
    show_default=True,
    metavar="MS",
    help="Longest wait in the queue; 0 for no limit.",
)
@click.option("--instances", type=int, metavar="N", help="Copies; one a core (GPU: 1) by default.")
@click.option(
    "--threads", type=int, default=1, show_default=True, metavar="N", help="Threads of a copy."
)
@click.option("--gpu/--cpu", default=None, help="Where it runs; by the backend by default.")
@click.option("--no-warmup", is_flag=True, help="Leave out the warm-up.")
@click.option("--force", is_flag=True, help="Replace the model in a repository that exists.")
@answering()
def command(plan_or_engine: str, folder: str, **options: Any) -> Answer:
    """Write an engine as a model repository for Triton.

    PLAN_OR_ENGINE is the folder of a run, its plan.yaml, the folder of an engine, or an ONNX
    file. The configuration is checked against the graph: names, types, dims, batch.
    """
    from qbench.exporting import export_triton
    from qbench.servable import find_servable

    servable = find_servable(plan_or_engine, engine=options["engine"])
    request = _request(servable, options)
    found = export_triton(servable, request, Path(folder), bool(options["force"]))
    content = {
        "repository": str(found.folder),
        "model": request.options.name,
        "platform": str(request.options.platform),
        "files": list(found.files),
        "remarks": list(found.remarks),
    }
    return Answer(content, lambda console: _show(console, found))


def _request(servable: Servable, options: Mapping[str, Any]) -> ExportRequest:
    from qbench.engine.tritonconfig import Platform, TritonOptions, preferred_sizes
    from qbench.exporting import ExportRequest, platform_of
    from qbench.serving.bench import cores

    given, plan_file = options["platform"], options["plan_file"]
    platform = platform_of(servable) if given is None else Platform(given)
    gpu = bool(options["gpu"]) or platform is Platform.TENSORRT
    if options["gpu"] is None:
        gpu = gpu or servable.backend.name == "ort-cuda"
    elif gpu is not options["gpu"]:
        raise InputError("tensorrt_plan runs on GPUs alone; leave --cpu away")
    threads, largest = options["threads"], options["max_batch"]
    per_core = 1 if gpu else max(cores() // max(threads, 1), 1)
    chosen = TritonOptions(
        options["name"] or servable.name,
        platform,
        largest,
        tuple(options["preferred"]) or preferred_sizes(largest),
        options["max_wait_ms"],
        options["queue"],
        options["timeout_ms"],
        per_core if options["instances"] is None else options["instances"],
        threads,
        gpu,
    )
    path = None if plan_file is None else Path(plan_file)
    return ExportRequest(chosen, path, not options["no_warmup"])


def _show(console: Console, found: Repository) -> None:
    console.print(f"model repository: {found.folder}", markup=False)
    for file in found.files:
        console.print(f"  {file}", markup=False)
    for remark in found.remarks:
        console.print(f"note: {remark}", markup=False)
    console.print(f"serve it: tritonserver --model-repository={found.folder}", markup=False)
