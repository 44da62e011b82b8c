"""What AutoRound's AutoScheme chooses for each layer, for our emitter: it exports none of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

from plan_torch import TorchModel, calibration, loss_of, tensors

from qbench.gate import require
from qbench.judging import Candidate
from qbench.planning.foreign import formats_of
from qbench.tasks.batches import Batch
from qbench.workbench import Workbench

SCHEME = "autoround-autoscheme"
#: Mean bits of a weight that it may spend, and our format of each of its schemes by its bits.
BITS = 6.0
FORMATS = {4: "w4a16", 8: "w8a16"}
_OPTIONS = ("W4A16", "W8A16")


def autoround_scheme(work: Workbench, torch_model: TorchModel) -> Candidate:
    """Return what AutoScheme chooses between 4-bit and 8-bit weights.

    NOTE: it asks the model itself for a loss and reads texts of corpora by name, in pieces of one
    length. So the module is wrapped in one that has a loss, and its reader of texts is replaced by
    one of the run's batches. Without a model's name it keeps no scores from one run to the next.
    """
    require("auto_round")
    gen = require("auto_round.auto_scheme.gen_auto_scheme")
    import torch

    module, batches = Scored(torch_model.load(), loss_of(work)), calibration(work)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0  # scores are taken in training mode
        elif isinstance(part, torch.nn.Embedding):  # its weights are frozen, and gradients end
            part.register_forward_hook(lambda *told: told[-1].requires_grad_())
    names = [
        path
        for path, part in module.named_modules()
        if isinstance(part, torch.nn.Linear) and "pooler" not in path and path != "inner.last"
    ]
    wanted = gen.AutoScheme(
        avg_bits=BITS,
        options=list(_OPTIONS),
        ignore_scale_zp_bits=True,
        nsamples=len(batches),
        low_gpu_mem_usage=False,
        low_cpu_mem_usage=False,
        enable_torch_compile=False,
    )
    reader = "auto_round.auto_scheme.delta_loss.get_dataloader"
    with mock.patch(reader, lambda *_, **__: [{"batch": batch} for batch in batches]):
        scheme = gen.GenScheme(
            wanted, module, names, {}, dataset="own", device_map="cpu", tokenizer=object()
        )
        chosen = scheme.get_layer_config()
    recipes = {
        path.removeprefix("inner."): FORMATS.get(told["bits"], "NONE")
        for path, told in chosen.items()
    }
    return Candidate(SCHEME, formats_of(recipes, work.layers, work.backend, "AutoRound"))


def Scored(inner: Any, loss: Any) -> Any:  # noqa: N802 — a class that needs torch
    """Return a module that gives the loss of a batch as its output's attribute ``loss``."""
    import types

    import torch

    class Module(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32

        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: Batch, **_: Any) -> Any:
            return types.SimpleNamespace(loss=loss(self.inner(**tensors(batch)), batch))

    return Module()
