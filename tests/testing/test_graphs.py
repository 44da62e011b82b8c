"""The tiny graphs run, and their rewrites keep what they compute."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qbench.testing.graphs import anonymise, decompose, tiny_convnet, tiny_decoder, tiny_encoder

_random = np.random.default_rng(0)
IDS = {"input_ids": _random.integers(0, 100, (2, 7))}
MASK = {"attention_mask": np.array([[1] * 7, [1] * 4 + [0] * 3])}
CACHE = {
    f"past_key_values.{index}.{part}": _random.normal(size=(2, 2, 3, 8)).astype(np.float32)
    for index in range(2)
    for part in ("key", "value")
}
IMAGE = {"image": _random.normal(size=(2, 3, 16, 16)).astype(np.float32)}
CASES = {
    "encoder": (tiny_encoder, IDS | MASK, (2, 32)),
    "encoder without pooling": (lambda: tiny_encoder(pooled=False), IDS | MASK, (2, 7, 32)),
    "decoder": (tiny_decoder, IDS, (2, 7, 100)),
    "decoder with a cache": (lambda: tiny_decoder(past=True), IDS | CACHE, (2, 7, 100)),
    "convnet": (tiny_convnet, IMAGE, (2, 10)),
}


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, feeds)


@pytest.mark.parametrize("name", CASES)
def test_rewrites_keep_what_is_computed(name):
    build, feeds, shape = CASES[name]
    model = build()
    reference = run(model, feeds)
    assert reference[0].shape == shape
    for changed in (decompose(model), anonymise(model, 1), anonymise(decompose(model), 2)):
        for expected, got in zip(reference, run(changed, feeds), strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-5)
    assert [n.name for n in model.graph] == [n.name for n in build().graph]


def test_the_decoder_is_causal_and_its_cache_continues_it():
    model = tiny_decoder(past=True)
    empty = {name: array[:, :, :0] for name, array in CACHE.items()}
    whole = run(model, IDS | empty)[0]
    first, *present = run(model, {"input_ids": IDS["input_ids"][:, :4]} | empty)
    rest, *_ = run(
        model,
        {"input_ids": IDS["input_ids"][:, 4:]} | dict(zip(CACHE, present, strict=True)),
    )
    np.testing.assert_allclose(np.concatenate([first, rest], axis=1), whole, atol=2e-5)


def test_masked_tokens_do_not_count():
    model = tiny_encoder()
    short = {"input_ids": IDS["input_ids"][1:, :4], "attention_mask": np.ones((1, 4), np.int64)}
    np.testing.assert_allclose(run(model, short)[0], run(model, IDS | MASK)[0][1:], atol=2e-5)


def test_anonymise_leaves_nothing_to_read():
    model = tiny_encoder()
    next(iter(model.graph)).metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'a', 'b']"
    changed = anonymise(model, 0)
    assert not any(node.metadata_props for node in changed.graph)
    assert [v.name for v in changed.graph.inputs] == ["input_ids", "attention_mask"]
    assert all(name[0] == "v" and name[1:].isdigit() for name in changed.graph.initializers)
