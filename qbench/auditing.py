"""The audit of a run's proxies: which cheap number orders layers as the measurement does."""

from __future__ import annotations

import functools

from qbench.errors import ModelError, QbenchError, RunDirError
from qbench.progress import Listener, Silence
from qbench.records import Kind, Layer, ProxyAudit, Status
from qbench.runtime.gradients import load_module, output_gradients
from qbench.sensitivity.proxies import GRADIENT, audit_proxies, proxy_cells, weight_mse
from qbench.tasks import make_batches
from qbench.workbench import Workbench

#: Calibration texts that the gradient is taken over, and positions of one batch of them.
GRADIENT_TEXTS, GRADIENT_TOKENS = 32, 512


def audit(work: Workbench, listener: Listener | None = None) -> ProxyAudit:
    """Compare each proxy with divergence and drop over the cells of a run; write and return it.

    A proxy that cannot be had here is named in ``skipped`` with the reason.

    Raises:
        RunDirError: If the run has no sweep, or no cell with a number.
    """
    listener = listener or Silence()
    records = work.run.read_sweep()
    if not any(r.status is Status.OK and r.divergence is not None for r in records):
        raise RunDirError(f"{work.run.path} has no cell with a number: there is nothing to audit")
    layers = work.layers.by_name()
    ranges = {seen.tensor: seen for seen in work.run.read_ranges()}
    listener.stage("audit: gradients")
    skipped: dict[str, str] = {}
    gradients = _gradients(work, skipped)
    listener.stage("audit: rounding of weights", len(records))

    @functools.cache
    def mse(name: str, format_name: str) -> float | None:
        return weight_mse(work.model.ir, layers[name], format_name)

    def told(layer: Layer, format_name: str) -> float | None:
        listener.step(f"{layer.name} {format_name}")
        return mse(layer.name, format_name)

    cells = proxy_cells(records, layers, ranges, told, gradients)
    found = audit_proxies(records, cells, skipped, seed=work.config.run.seed)
    work.run.write_audit(found)
    return found


def _gradients(work: Workbench, skipped: dict[str, str]) -> dict[str, float]:
    """Return the squared output gradient by layer; why there is none goes into ``skipped``."""
    model = work.model
    names = {
        layer.name: layer.module or layer.name
        for layer in work.layers.layers
        if layer.kind in (Kind.LINEAR, Kind.EMBEDDING)
    }
    try:
        module = load_module(model.card, work.config.model.trust_remote_code)
    except (ModelError, ImportError) as error:
        skipped[GRADIENT] = str(error)
        return {}
    encoded = work.task("calibration").encoded[:GRADIENT_TEXTS]
    batches = make_batches(
        encoded, model.inputs, max_tokens=GRADIENT_TOKENS, pad_id=work.tokenizer.pad_id
    )
    try:
        found = output_gradients(
            module, [batch.feeds for batch in batches], names, seed=work.config.run.seed
        )
    except (RuntimeError, QbenchError) as error:
        skipped[GRADIENT] = f"the backward pass failed: {error}"
        return {}
    if not found:
        skipped[GRADIENT] = "no layer of the graph is a module of the torch model"
    return found
