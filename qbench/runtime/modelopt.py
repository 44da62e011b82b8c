"""Scales of SmoothQuant and AWQ from nvidia-modelopt, which quantizes torch modules.

Only its scales are taken: the engine is lowered by our own rewrites, as with scales of our own.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qbench.gate import require

Vector = npt.NDArray[np.float32]


def smoothquant_scales(
    module: Any,
    paths: Sequence[str],
    feeds: Sequence[Mapping[str, npt.NDArray[Any]]],
    alpha: float = 1.0,
) -> dict[str, Vector]:
    """Return what SmoothQuant divides the activation of each linear module by.

    Args:
        module: A torch module; modelopt changes it in place.
        paths: Paths of its linear modules.
        feeds: Keyword arguments of its forward, as arrays.
        alpha: How much goes over to the weight; modelopt's own default is 1.

    Returns:
        Vectors of shape [K], by path; a module that modelopt left alone is left out.

    Raises:
        MissingDependencyError: If modelopt is not installed.
    """
    rules = [
        rule
        for path in paths
        for rule in (
            {"quantizer_name": f"{path}.weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
            {"quantizer_name": f"{path}.input_quantizer", "cfg": {"num_bits": 8, "axis": -1}},
        )
    ]
    algorithm = {"method": "smoothquant", "alpha": alpha}
    return _scales(module, paths, feeds, rules, algorithm)


def awq_scales(
    module: Any,
    blocks: Mapping[str, int],
    feeds: Sequence[Mapping[str, npt.NDArray[Any]]],
    alpha_step: float = 0.1,
) -> dict[str, Vector]:
    """Return what AWQ divides the activation of each linear module by, for 4-bit weights.

    Args:
        module: A torch module; modelopt changes it in place.
        blocks: Elements that share a scale, by path of a linear module.
        feeds: Keyword arguments of its forward, as arrays.
        alpha_step: Step of the search.

    Returns:
        Vectors of shape [K], by path; a module that modelopt left alone is left out.

    Raises:
        MissingDependencyError: If modelopt is not installed.
    """
    rules = [
        {
            "quantizer_name": f"{path}.weight_quantizer",
            "cfg": {"num_bits": 4, "block_sizes": {-1: block, "type": "static"}},
        }
        for path, block in blocks.items()
    ]
    algorithm = {"method": "awq_lite", "alpha_step": alpha_step}
    return _scales(module, list(blocks), feeds, rules, algorithm)


def _scales(
    module: Any,
    paths: Sequence[str],
    feeds: Sequence[Mapping[str, npt.NDArray[Any]]],
    rules: Sequence[Mapping[str, Any]],
    algorithm: Mapping[str, Any],
) -> dict[str, Vector]:
    import torch

    batches = [{name: torch.tensor(array) for name, array in feed.items()} for feed in feeds]

    def forward(changed: Any) -> None:
        with torch.no_grad():
            for batch in batches:
                changed(**batch)

    with _quiet():
        quantization = require("modelopt.torch.quantization")
        every_off = {"quantizer_name": "*", "enable": False}
        config = {"quant_cfg": [every_off, *rules], "algorithm": dict(algorithm)}
        changed = quantization.quantize(module, config, forward)
    found = dict(changed.named_modules())
    scales: dict[str, Vector] = {}
    for path in paths:
        inverse = getattr(found[f"{path}.input_quantizer"], "pre_quant_scale", None)
        if inverse is not None:
            scales[path] = (1 / inverse.detach().reshape(-1).float()).numpy()
    return scales


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what modelopt prints and warns of out of answers."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
