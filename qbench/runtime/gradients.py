"""Squared gradients of a torch model's output at its modules' outputs, in one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qbench.errors import ModelError
from qbench.graph.export import quiet


def load_module(card: Mapping[str, Any], trust_remote_code: bool = False) -> Any:
    """Return the torch module that a stored graph was exported from, in evaluation mode.

    Args:
        card: The model's card; ``kind`` must be ``hf``.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        ModelError: If the source is no Hugging Face folder, has gone, or cannot be loaded.
    """
    if card.get("kind") != "hf":
        raise ModelError("the source is an ONNX file: it has no torch module and no backward pass")
    folder = Path(str(card.get("tokenizer", "")))
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model's folder {str(folder)!r} has gone: no module can be loaded")
    import torch
    import transformers

    from qbench.graph.wrappers import Classifier, Embedder

    architecture = str(card.get("architecture", ""))
    kind: Any = getattr(transformers, architecture, None) or transformers.AutoModel
    try:
        with quiet():
            module = kind.from_pretrained(
                str(folder),
                attn_implementation="eager",
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                dtype=torch.float32,
                weights_only=True,
            )
    except Exception as error:  # transformers raises ValueError, OSError, KeyError, ImportError …
        raise ModelError(f"{str(folder)!r} cannot be loaded: {error}") from error
    if getattr(module.config, "use_cache", False):
        module.config.use_cache = False
    module = module.eval()
    if card.get("head") == "classification":
        return Classifier(module)
    return Embedder(module, str(card.get("pooling", "mean")), bool(card.get("normalize")))


def output_gradients(
    module: Any,
    batches: Sequence[Mapping[str, np.ndarray]],
    names: Mapping[str, str],
    *,
    seed: int = 0,
) -> dict[str, float]:
    """Return the sum of squared gradients of the output at each layer's output, mean a text.

    What is derived is the output times random signs, so that its squared gradient is, in
    expectation, the squared norm of the Jacobian of all outputs (M. Hutchinson, 1989): one backward
    pass a batch instead of one an output.

    Args:
        module: Gives [items, …] from the feeds; its model is its attribute ``model``.
        batches: Feeds, each [items, sequence].
        names: Module path by layer; paths that the module does not have are left out.
        seed: Seed of the signs.
    """
    import torch

    modules = dict(module.model.named_modules())
    sums: dict[str, float] = {}
    hooks = [
        modules[path].register_forward_hook(_adder(sums, layer))
        for layer, path in names.items()
        if path in modules
    ]
    signs = torch.Generator().manual_seed(seed)
    texts = 0
    try:
        for feeds in batches:
            tensors = {name: torch.from_numpy(np.array(feed)) for name, feed in feeds.items()}
            with torch.enable_grad():
                output = module(**tensors)
                drawn = torch.randint(0, 2, output.shape, generator=signs) * 2 - 1
                (output * drawn).sum().backward()
            texts += len(output)
            module.zero_grad(set_to_none=True)
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: total / max(texts, 1) for layer, total in sums.items()}


def _adder(sums: dict[str, float], layer: str) -> Any:
    """Return a forward hook that adds the squared gradient at a module's output to ``sums``."""

    def add(gradient: Any) -> None:
        sums[layer] = sums.get(layer, 0.0) + float(gradient.double().square().sum())

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(add)

    return hook
