"""Models made on the spot: Hugging Face folders with random weights, and small ONNX files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}


@pytest.fixture(scope="session")
def samples() -> dict[str, np.ndarray]:
    """Token ids of four texts, two of them padded on the right: [4, 9]."""
    ids = np.random.default_rng(0).integers(5, 100, (4, 9), dtype=np.int64)
    mask = np.ones_like(ids)
    mask[1, 6:] = 0
    mask[2, 3:] = 0
    return {"input_ids": np.where(mask == 1, ids, 1), "attention_mask": mask}


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a random model: class name, overrides, safetensors or not."""

    def make(name: str, pickled: bool = False, **overrides: Any) -> Path:
        import torch
        import transformers

        torch.manual_seed(0)
        cls = getattr(transformers, name)
        model = cls(cls.config_class(**{**SIZES, **overrides})).eval()
        with torch.no_grad():
            for weight in model.parameters():  # biases and norms that are neither 0 nor 1
                weight.add_(torch.randn_like(weight) * 0.05)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        if pickled:
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
        return folder

    return make


@pytest.fixture
def onnx_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes an ONNX file from text, with weights beside the text."""

    def write(
        body: str,
        weights: dict[str, np.ndarray] | None = None,
        opset: int = 21,
        name: str = "given.onnx",
        change: Callable[[onnx.ModelProto], None] | None = None,
        external: str | None = None,
    ) -> Path:
        more = ', "my.domain" : 1' if "my.domain" in body else ""
        text = f'<ir_version: 8, opset_import: ["" : {opset}{more}]> g {body}'
        model = onnx.parser.parse_model(text)
        for key, array in (weights or {}).items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
        if change is not None:
            change(model)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if external is not None:
            onnx.save(
                model,
                path,
                save_as_external_data=True,
                all_tensors_to_one_file=bool(external),
                location=external or None,
                size_threshold=0,
            )
        else:
            onnx.save(model, path)
        return path

    return write
