from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qbench.errors import ModelError
from qbench.runtime.gradients import load_module, output_gradients
from qbench.testing.models import bert_folder


def card_of(folder: Path, **head: object) -> dict[str, object]:
    """What an export writes down of a folder."""
    return {"kind": "hf", "tokenizer": str(folder), **head}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory):
    folder = bert_folder(tmp_path_factory.mktemp("m") / "model", layers=1)
    head = {"architecture": "BertModel", "head": "embedding", "pooling": "mean"}
    return load_module(card_of(folder, normalize=True, **head))


def feeds(seed: int = 0, items: int = 3) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(5, 45, (items, 7))
    mask = np.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_every_linear_module_has_a_gradient(module) -> None:
    import torch

    names = {
        name: name
        for name, part in module.model.named_modules()
        if isinstance(part, torch.nn.Linear) and "pooler" not in name
    }
    found = output_gradients(module, [feeds(0), feeds(1)], names)
    assert len(names) == 6 and set(found) == set(names)
    assert all(value > 0 for value in found.values())
    assert all(p.grad is None for p in module.parameters())
    assert output_gradients(module, [feeds(0), feeds(1)], names) == pytest.approx(found, rel=1e-4)
    assert output_gradients(module, [feeds()], {"x": "no.such.module"}) == {}


def test_random_signs_estimate_the_squared_jacobian(module) -> None:
    import torch

    name = "encoder.layer.0.output.dense"
    fed = {k: torch.from_numpy(v[:1]) for k, v in feeds().items()}
    kept = []
    layer = dict(module.model.named_modules())[name]
    hook = layer.register_forward_hook(lambda m, i, o: kept.append(o))
    output = module(**fed)[0]
    hook.remove()
    exact = sum(
        float(torch.autograd.grad(value, kept[0], retain_graph=True)[0].square().sum())
        for value in output
    )
    one = {k: v[:1] for k, v in feeds().items()}
    drawn = [output_gradients(module, [one], {name: name}, seed=seed)[name] for seed in range(60)]
    assert np.mean(drawn) == pytest.approx(exact, rel=0.25)


def test_a_classifier_is_derived_too(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "model", classes=3, layers=1)
    card = card_of(folder, architecture="BertForSequenceClassification", head="classification")
    found = output_gradients(load_module(card), [feeds()], {"classifier": "classifier"})
    assert found["classifier"] == pytest.approx(3.0), "the logits are the layer's own output"


@pytest.mark.parametrize(
    ("card", "words"),
    [({"kind": "onnx"}, "is an ONNX file"), ({"kind": "hf", "tokenizer": "/nowhere"}, "has gone")],
)
def test_where_there_is_no_torch_module_it_says_why(card: dict[str, str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_module(card)
