"""What ModelOpt chooses, and the scales that it finds, for our emitter."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from plan_torch import TorchModel, calibration, loss_of, pieces, tensors

from qbench.gate import require
from qbench.judging import Candidate
from qbench.planning.foreign import formats_of, read_modelopt
from qbench.records import Kind
from qbench.workbench import Workbench

INT8, SEARCHED = "modelopt-int8", "modelopt-autoquantize"
MIXED = "modelopt-int4-int8"
#: Mean bits of a weight that AutoQuantize may spend, and the formats that it chooses from.
BITS = {SEARCHED: 9.0, MIXED: 6.0}
RECIPES = {
    SEARCHED: ("INT8_DEFAULT_CFG",),
    MIXED: ("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "INT8_DEFAULT_CFG"),
}


def modelopt_int8(work: Workbench, _: TorchModel) -> Candidate:
    """Return ModelOpt's INT8: every linear layer; its scales come from ``modelopt_clips``."""
    linear = [x.name for x in work.layers.layers if x.kind is Kind.LINEAR and x.weight]
    return Candidate(INT8, dict.fromkeys(linear, "int8"))


def modelopt_clips(work: Workbench, torch_model: TorchModel) -> dict[str, float]:
    """Return the clipping magnitude that ModelOpt's INT8 gives to the input of linear layers."""
    quantization = require("modelopt.torch.quantization")
    import torch

    feeds = [{k: torch.tensor(v) for k, v in piece.items()} for piece in pieces(work)]

    def forward(changed: torch.nn.Module) -> None:
        with torch.no_grad():
            for feed in feeds:
                changed(**feed)

    module = torch_model.load()
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


def modelopt_searched(work: Workbench, torch_model: TorchModel) -> Candidate:
    """Return what AutoQuantize chooses between INT8 and nothing, by gradients of a loss."""
    return _search(work, torch_model, SEARCHED)


def modelopt_mixed(work: Workbench, torch_model: TorchModel) -> Candidate:
    """Return what AutoQuantize chooses between 4-bit weights, INT8 and nothing.

    The file that ModelOpt itself would export of it does not load in ONNX Runtime.
    """
    return _search(work, torch_model, MIXED)


def _search(work: Workbench, torch_model: TorchModel, name: str) -> Candidate:
    quantization = require("modelopt.torch.quantization")
    import torch

    batches: Sequence = calibration(work)
    with tempfile.TemporaryDirectory() as folder:
        _, state = quantization.auto_quantize(
            torch_model.load(),
            constraints={"effective_bits": BITS[name]},
            quantization_formats=list(RECIPES[name]),
            data_loader=batches,
            forward_step=lambda module, batch: module(**tensors(batch)),
            loss_func=loss_of(work),
            disabled_layers=["*pooler*", "last"],
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
        )
        path = Path(folder) / "state.pth"
        torch.save(state, path)
        recipes = read_modelopt(path)
    return Candidate(name, formats_of(recipes, work.layers, work.backend, "ModelOpt"))
