"""Scales from nvidia-modelopt in a run: beside our own where the model is a torch module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qbench.errors import InputError
from qbench.gate import require
from qbench.graph.hf import HeadOptions, load_torch
from qbench.records import Layer, Treatment
from qbench.records.packed import pack, unpack
from qbench.runtime.loading import resolve_source
from qbench.runtime.modelopt import Vector, awq_scales, smoothquant_scales
from qbench.workbench import Workbench

#: What follows the name of a remedy whose scale is modelopt's.
SUFFIX = "modelopt"
#: Calibration batches that modelopt sees.
_BATCHES = 16


def check_scales(work: Workbench) -> None:
    """Check that modelopt can give scales where it was asked to, before anything takes time.

    Raises:
        MissingDependencyError: If it is not installed.
        InputError: If the model is no torch module.
    """
    sweep, source = work.config.sweep, resolve_source(work.config.model.source)
    if sweep.scales == "own" or not sweep.remedies:
        return
    if Path(source).suffix.lower() == ".onnx" or Path(source).is_file():
        raise InputError(
            f"scales: got {sweep.scales!r}, and {work.config.model.source!r} is an ONNX file; "
            "modelopt reads torch modules: give the Hugging Face model, or leave it at own"
        )
    require("modelopt.torch.quantization")


def foreign_scales(
    work: Workbench, remedy: str, layers: Sequence[Layer], blocks: Mapping[str, int]
) -> dict[str, Vector]:
    """Return modelopt's scales of some linear layers, shape [K] each, by the layer's name.

    Args:
        work: The workbench of the run.
        remedy: ``smoothquant`` or ``awq``.
        layers: The layers; one that is no module of the model is left out.
        blocks: Elements that share a scale by layer, for ``awq``.
    """
    options = work.config.model
    head = str(work.model.card.get("head", "any"))
    module = load_torch(
        resolve_source(options.source),
        HeadOptions(
            head=head, revision=options.revision, trust_remote_code=options.trust_remote_code
        ),
    )
    names = {name for name, part in module.named_modules() if hasattr(part, "weight")}
    paths = {layer.name: path for layer in layers if (path := _path_of(layer, names))}
    batches = work.batches("calibration")[:_BATCHES]
    feeds = [piece for batch in batches for piece in unpadded(batch.feeds, len(batch.rows))]
    if remedy == "smoothquant":
        found = smoothquant_scales(module, list(paths.values()), feeds)
    else:
        own = {path: blocks[name] for name, path in paths.items() if name in blocks}
        found = awq_scales(module, own, feeds)
    return {name: found[path] for name, path in paths.items() if path in found}


def treatment_from_scale(
    remedy: str, scale: Vector, tensor: str, absmax: Vector, block: int | None
) -> Treatment:
    """Return the treatment of a layer by a scale that came from elsewhere.

    Args:
        remedy: ``smoothquant`` or ``awq``.
        scale: What the activation is divided by, shape [K].
        tensor: Name of the activation's tensor.
        absmax: Largest magnitude of each channel of the activation, shape [K].
        block: Elements that share a scale, for ``awq``.
    """
    level = float(np.sqrt(scale.max() * scale.min()))
    packed = pack(scale / (level or 1.0))
    variant, vectors = f"{remedy}:{SUFFIX}", {"scale": packed}
    if remedy == "awq":
        return Treatment(variant, {}, vectors, block)
    clip = float(np.float32((absmax / unpack(packed)).max())) or 1.0
    return Treatment(variant, {tensor: clip}, vectors)


def _path_of(layer: Layer, names: set[str]) -> str:
    """Return the path of a layer's module in the model as loaded, or ""."""
    told = layer.module or layer.name
    if told in names:
        return told
    fitting = [name for name in names if name.endswith(f".{told}") or told.endswith(f".{name}")]
    return fitting[0] if len(fitting) == 1 else ""


def unpadded(feeds: Mapping[str, Any], items: int) -> list[dict[str, Any]]:
    """Return a batch as pieces without padding: items of one length each, as modelopt needs.

    It counts every position. A batch without a mask, or padded elsewhere than at the end, stays
    as it is.

    Args:
        feeds: Arrays by input, shape [batch, sequence] each.
        items: Rows that count.
    """
    whole = {name: array[:items] for name, array in feeds.items()}
    mask = whole.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return [whole]
    lengths = mask.astype(bool).sum(axis=1)
    at_the_end = np.arange(mask.shape[1])[None, :] < lengths[:, None]
    if not np.array_equal(at_the_end, mask.astype(bool)):
        return [whole]
    return [
        {name: array[lengths == length, :length] for name, array in whole.items()}
        for length in sorted(set(lengths.tolist()))
        if length
    ]
