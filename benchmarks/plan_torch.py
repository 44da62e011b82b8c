"""What the tools that read torch modules need: the module, its feeds and a loss."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from plan_sentiment import Probe

from qbench.graph.hf import HeadOptions, load_torch
from qbench.graph.wrappers import Embedder
from qbench.runtime.loading import resolve_source
from qbench.tasks.batches import Batch
from qbench.torch_scales import unpadded
from qbench.workbench import Workbench

#: Batches that calibrate.
BATCHES = 24
#: Sharpness of the loss that an embedder is given, which has none of its own.
_TEMPERATURE = 0.05


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


def calibration(work: Workbench) -> list[Batch]:
    """Return the batches that calibrate."""
    return list(work.batches("calibration")[:BATCHES])


def pieces(work: Workbench) -> Iterator[dict[str, np.ndarray]]:
    """Yield the feeds that calibrate, without padding: a tool counts every position."""
    wanted = [spec.name for spec in work.model.inputs]
    for batch in calibration(work):
        for piece in unpadded(batch.feeds, len(batch.rows)):
            yield {name: piece[name] for name in wanted}


def tensors(batch: Batch) -> dict[str, Any]:
    """Return the rows of a batch that count, as tensors."""
    import torch

    return {name: torch.tensor(array[: len(batch.rows)]) for name, array in batch.feeds.items()}


def loss_of(work: Workbench) -> Callable[[Any, Batch], Any]:
    """Return a loss of a module's output of one batch of calibration.

    A classifier has cross-entropy; an embedder is asked to tell each text from its batch-mates,
    since it has no loss of its own.
    """
    import torch

    labels = getattr(work.task("calibration"), "labels", None)

    def loss(output: Any, batch: Batch) -> Any:
        if labels is None:
            logits, target = output @ output.T / _TEMPERATURE, torch.arange(len(output))
        else:
            logits, target = output, torch.tensor(labels[batch.rows])
        return torch.nn.functional.cross_entropy(logits, target)

    return loss


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
