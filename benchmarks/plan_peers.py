"""Engines of other tools for one run: their own files, or what they choose through our emitter."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from plan_sentiment import Probe

from qbench import judging
from qbench.engine.build import ENGINE_FILE
from qbench.gate import require
from qbench.graph.hf import HeadOptions, load_torch
from qbench.graph.wrappers import Embedder
from qbench.judging import Candidate
from qbench.planning.foreign import formats_of, read_modelopt
from qbench.records import Kind
from qbench.runtime.loading import resolve_source
from qbench.torch_scales import unpadded
from qbench.workbench import Workbench

DYNAMIC, STATIC = "quantize_dynamic", "quantize_static"
INT8, SEARCHED = "modelopt-int8", "modelopt-autoquantize"
#: Batches that calibrate, and mean bits of a weight that AutoQuantize may spend.
BATCHES, EFFECTIVE_BITS = 24, 9.0
#: Sharpness of the loss that an embedder is given, which has none of its own.
_TEMPERATURE = 0.05
Feeds = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TorchModel:
    """What a graph was made of.

    Attributes:
        source: The embedder, as a configuration names it.
        probe: What was folded in behind it, or ``None``.
    """

    source: str
    probe: Probe | None = None

    def load(self) -> Any:
        """Return the torch module that gives embeddings, or logits."""
        import torch

        embedder = Embedder(load_torch(resolve_source(self.source), HeadOptions()), "mean", True)
        if self.probe is None:
            return embedder.eval()
        last = torch.nn.Linear(*self.probe.weight.shape)
        with torch.no_grad():
            last.weight.copy_(torch.tensor(self.probe.weight.T))
            last.bias.copy_(torch.tensor(self.probe.bias))
        return Probed(embedder, last).eval()


def Probed(embedder: Any, last: Any) -> Any:  # noqa: N802 — a class that needs torch
    """Return a module that gives a linear layer's logits of embeddings."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedder, self.last = embedder, last

        def forward(self, **feeds: Any) -> Any:
            return self.last(self.embedder(**feeds))

    return Module()


def ort_dynamic(work: Workbench, name: str) -> None:
    """Quantize the run's model by ``quantize_dynamic`` with its defaults."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(work.model.path), str(_engine_file(work, name)))


def ort_static(work: Workbench, name: str) -> None:
    """Quantize the run's model by ``quantize_static`` with its defaults."""
    from onnxruntime.quantization import quantize_static

    batches = iter(work.batches("calibration")[:BATCHES])
    wanted = [spec.name for spec in work.model.inputs]

    class Reader:
        """Gives feeds until there are none."""

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(batches, None)
            return None if batch is None else {key: batch.feeds[key] for key in wanted}

    quantize_static(str(work.model.path), str(_engine_file(work, name)), Reader())


def _engine_file(work: Workbench, name: str) -> Path:
    folder = work.run.engine_dir(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / ENGINE_FILE


def modelopt_int8(work: Workbench, _: TorchModel) -> Candidate:
    """Return ModelOpt's INT8: every linear layer; its scales come from ``modelopt_clips``."""
    linear = [x.name for x in work.layers.layers if x.kind is Kind.LINEAR and x.weight]
    return Candidate(INT8, dict.fromkeys(linear, "int8"))


def modelopt_clips(work: Workbench, torch_model: TorchModel) -> dict[str, float]:
    """Return the clipping magnitude that ModelOpt's INT8 gives to the input of linear layers."""
    import torch

    with _quiet():
        quantization = require("modelopt.torch.quantization")
        module, feeds = torch_model.load(), list(_feeds(work))

        def forward(changed: Any) -> None:
            with torch.no_grad():
                for feed in feeds:
                    changed(**feed)

        changed = quantization.quantize(module, quantization.INT8_DEFAULT_CFG, forward)
    found: dict[str, float] = {}
    for path, part in changed.named_modules():
        amax = getattr(getattr(part, "input_quantizer", None), "amax", None)
        if amax is not None:
            found[path] = float(amax)
    clips = {}
    for layer in work.layers.layers:
        own = [clip for path, clip in found.items() if _is_of(path, layer.name, layer.module)]
        if len(own) == 1 and layer.kind is Kind.LINEAR:
            clips |= {edge.tensor: own[0] for edge in layer.edges}
    return clips


def _is_of(path: str, *names: str) -> bool:
    return any(name and f".{path}".endswith(f".{name}") for name in names)


def _feeds(work: Workbench) -> Iterator[dict[str, Any]]:
    import torch

    for batch in work.batches("calibration")[:BATCHES]:
        for piece in unpadded(batch.feeds, len(batch.rows)):
            yield {name: torch.tensor(array) for name, array in piece.items()}


def modelopt_searched(work: Workbench, torch_model: TorchModel) -> Candidate:
    """Return what AutoQuantize chooses between INT8 and nothing, by gradients of a loss.

    A classifier has cross-entropy; an embedder is asked to tell each text from its batch-mates,
    since it has no loss of its own.
    """
    import torch

    labels = getattr(work.task("calibration"), "labels", None)
    batches = work.batches("calibration")[:BATCHES]

    def loss(output: Any, batch: Any) -> Any:
        if labels is None:
            logits, target = output @ output.T / _TEMPERATURE, torch.arange(len(output))
        else:
            logits, target = output, torch.tensor(labels[batch.rows])
        return torch.nn.functional.cross_entropy(logits, target)

    def step(module: Any, batch: Any) -> Any:
        return module(**{k: torch.tensor(v[: len(batch.rows)]) for k, v in batch.feeds.items()})

    with _quiet(), tempfile.TemporaryDirectory() as folder:
        quantization = require("modelopt.torch.quantization")
        _, state = quantization.auto_quantize(
            torch_model.load(),
            constraints={"effective_bits": EFFECTIVE_BITS},
            quantization_formats=["INT8_DEFAULT_CFG"],
            data_loader=list(batches),
            forward_step=step,
            loss_func=loss,
            disabled_layers=["*pooler*", "last"],
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
        )
        path = Path(folder) / "state.pth"
        torch.save(state, path)
        recipes = read_modelopt(path)
    return Candidate(SEARCHED, formats_of(recipes, work.layers, work.backend, "ModelOpt"))


def build_peers(
    work: Workbench, torch_model: TorchModel, clips: Mapping[str, float]
) -> tuple[list[str], dict[str, str]]:
    """Build every peer's engine in the run; return their names, and why others are missing."""
    theirs: dict[str, float] = {}

    def emit(choose: Callable[[Workbench, TorchModel], Candidate]) -> None:
        if not theirs:
            theirs.update(modelopt_clips(work, torch_model))
        candidate = choose(work, torch_model)
        plan = judging.plan_for(work, candidate, {**clips, **theirs})
        judging.build(work, candidate.name, plan)

    ways: dict[str, Callable[[], None]] = {
        DYNAMIC: lambda: ort_dynamic(work, DYNAMIC),
        STATIC: lambda: ort_static(work, STATIC),
        INT8: lambda: emit(modelopt_int8),
        SEARCHED: lambda: emit(modelopt_searched),
    }
    return build_each(ways)


def build_each(ways: Mapping[str, Callable[[], None]]) -> tuple[list[str], dict[str, str]]:
    """Run each way; return the names that worked and the errors of those that did not.

    Whatever another tool raises is told in the table: one that fails does not end the others.
    """
    built, missing = [], {}
    for name, build in ways.items():
        try:
            with _quiet():
                build()
        except Exception as error:  # noqa: BLE001 — foreign tools raise anything; it is told
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        else:
            built.append(name)
    return built, missing


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the tools print and warn of out of the answer."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
