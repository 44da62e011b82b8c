from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS, applicable_formats
from qbench.graph.layers import find_layers
from qbench.graph.segments import inside_layers, live_sets
from qbench.lowering import Change, lowering_for
from qbench.records import Layer
from qbench.runtime.ort import open_session, settings_for
from qbench.sensitivity.activations import Limits
from qbench.sensitivity.replay import Replay
from qbench.tasks.batches import Batch, gather_outputs
from qbench.testing.graphs import anonymise, decompose, tiny_convnet, tiny_decoder, tiny_encoder
from qbench.testing.lowerings import graph_text

_spec = importlib.util.spec_from_file_location(
    "odd_graphs", Path(__file__).with_name("odd_graphs.py")
)
odd = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(odd)

BACKEND = BACKENDS["ort-cpu"]
SETTINGS = settings_for(BACKEND, threads=1)


def batches_of(*feeds) -> tuple[Batch, ...]:
    made, start = [], 0
    for feed in feeds:
        size = len(next(iter(feed.values())))
        made.append(Batch(np.arange(start, start + size), feed, size, size))
        start += size
    return tuple(made)


def token_feeds(seed: int, rows: int, length: int, mask: bool) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(1, 99, (rows, length))
    return {"input_ids": ids} | ({"attention_mask": np.ones_like(ids)} if mask else {})


def cached(seed: int) -> dict[str, np.ndarray]:
    names = [f"past_key_values.0.{part}" for part in ("key", "value")]
    past = {n: odd.floats(2, 2, 3, 8, seed=seed + i) for i, n in enumerate(names)}
    return token_feeds(seed, 2, 4, mask=False) | past


def wide(**shapes: int) -> tuple[Batch, ...]:
    return batches_of(
        *(
            {n: odd.floats(2, length, 16, seed=9 * s + i) for i, n in enumerate(("x", "z"))}
            for s, length in enumerate((3, 5))
        )
    )


GRAPHS = {
    "encoder": lambda: (tiny_encoder(), "embedding"),
    "encoder, decomposed": lambda: (anonymise(decompose(tiny_encoder(layers=1))), "embedding"),
    "decoder": lambda: (tiny_decoder(layers=1), "logits"),
    "decoder with cache": lambda: (tiny_decoder(layers=1, past=True), "logits"),
    "convnet": lambda: (tiny_convnet(), "logits"),
    "shared blocks": odd.shared_blocks,
    "never narrow": odd.never_narrow,
    "diamond": odd.diamond,
    "early output": odd.early_output,
    "bypass": odd.bypass,
}


def batches_for(name: str) -> tuple[Batch, ...]:
    if name.startswith("encoder"):
        return batches_of(token_feeds(0, 3, 5, True), token_feeds(1, 2, 8, True))
    if name == "decoder":
        return batches_of(token_feeds(0, 3, 4, False), token_feeds(1, 3, 4, False))
    if name == "decoder with cache":
        return batches_of(cached(0), cached(5))
    if name == "convnet":
        return batches_of(*({"image": odd.floats(2, 3, 16, 16, seed=s)} for s in range(2)))
    return tuple(Batch(b.rows, b.feeds, 6, 6) for b in wide())


def pooled(outputs: list[np.ndarray]) -> list[np.ndarray]:
    return [o.mean(axis=1) if o.ndim == 3 else o for o in outputs]


def whole(model: ir.Model, batches, output: str) -> list[np.ndarray]:
    with open_session(model, SETTINGS) as session:
        return [session.run(b.feeds, [output])[output] for b in batches]


def clips_for(model: ir.Model, batches, layers) -> dict[str, float]:
    tapped = model.clone()
    names = {e.tensor for layer in layers.layers for e in layer.edges}
    given = {v.name for v in tapped.graph.outputs}
    found = {v.name: v for n in tapped.graph for v in n.outputs}
    tapped.graph.outputs.extend(found[n] for n in sorted(names) if n in found and n not in given)
    clips: dict[str, float] = {}
    with open_session(tapped, SETTINGS) as session:
        for batch in batches:
            values = {**batch.feeds, **session.run(batch.feeds)}
            for name in names & set(values):
                clips[name] = max(clips.get(name, 0.0), float(np.abs(values[name]).max()))
    return clips


def lower_with(format_name: str, clips):
    return lambda model, layer: lowering_for(format_name).apply(model, layer, clips)


def same_lengths(batches) -> bool:
    return len({b.feeds[next(iter(b.feeds))].shape[1:] for b in batches}) == 1


class Chain:
    """One graph, cut, beside itself whole."""

    def __init__(self, name: str, limits: Limits | None = None) -> None:
        self.model, self.output = GRAPHS[name]()
        self.layers, self.batches = find_layers(self.model), batches_for(name)
        if not same_lengths(self.batches) and not name.startswith("encoder"):
            self.batches = self.batches[:1]
        self.before = graph_text(self.model)
        self.replay = Replay(self.model, self.layers, self.batches, SETTINGS, self.output, limits)
        self.clips = clips_for(self.model, self.batches, self.layers)
        self.reference = self.replay.run_reference()

    def lowered(self, layer: Layer, format_name: str) -> np.ndarray:
        graph = self.replay.model.clone()
        lowering_for(format_name).apply(graph, layer, self.clips)
        return gather_outputs(self.batches, whole(graph, self.batches, self.output))

    def replayed(self, layer: Layer, format_name: str) -> tuple[np.ndarray, Change]:
        changed = self.replay.change(layer, lower_with(format_name, self.clips))
        try:
            return self.replay.run_changed(changed), changed.change
        finally:
            changed.close()


def close(first: np.ndarray, second: np.ndarray, tolerance: float) -> bool:
    return bool(np.abs(first - second).max() <= tolerance * np.abs(first).max())


@pytest.fixture(scope="module", params=GRAPHS)
def chain(request):
    made = Chain(request.param)
    yield made
    made.replay.close()


def test_the_graph_is_cut_and_not_changed(chain) -> None:
    assert len(chain.replay.segments) > 1
    assert graph_text(chain.model) == chain.before


def test_the_chained_reference_is_the_whole_graph(chain) -> None:
    expected = gather_outputs(chain.batches, whole(chain.model, chain.batches, chain.output))
    assert close(expected, chain.reference, 1e-5)


def test_no_cut_is_inside_a_layer(chain) -> None:
    assert not set(chain.replay.cuts) & inside_layers(chain.replay.model, chain.layers)
    for layer in chain.layers.layers:
        for use in layer.occurrences:
            names = {*use.nodes, *(edge.node for edge in use.edges)}
            homes = {s.index for s in chain.replay.segments if names & set(s.nodes)}
            assert len(homes) == 1, layer.name


def test_cells_equal_those_of_the_whole_graph(chain) -> None:
    for layer in chain.layers.layers:
        for name in applicable_formats(layer.kind, BACKEND):
            if name == BACKEND.high_precision:
                continue
            got, change = chain.replayed(layer, name)
            assert change.changed
            expected = chain.lowered(layer, name)
            if name in ("w8a16", "w4a16"):
                assert close(expected, got, 1e-5), (layer.name, name)
                continue
            # A value on the border between two steps may fall to either side.
            error = np.abs(expected - got) / np.abs(expected).max()
            assert error.max() <= 0.02 and np.median(error) <= 1e-5, (layer.name, name)


@pytest.mark.parametrize("name", ["encoder", "shared blocks", "diamond", "early output", "bypass"])
@pytest.mark.parametrize("most", [1, 3])
def test_fewer_cuts_give_the_same(name: str, most: int) -> None:
    chain = Chain(name, Limits(max_segments=most))
    assert len(chain.replay.segments) <= most
    assert close(
        gather_outputs(chain.batches, whole(chain.model, chain.batches, chain.output)),
        chain.reference,
        1e-5,
    )
    for layer in chain.layers.layers:
        got, _ = chain.replayed(layer, "fp16")
        error = np.abs(chain.lowered(layer, "fp16") - got) / np.abs(got).max()
        assert error.max() <= 1e-3 and np.median(error) <= 1e-5
    chain.replay.close()


@pytest.fixture
def every_cut(monkeypatch) -> None:
    """Cut at every position that is inside no layer."""

    def choose(costs, live_bytes, forbidden=(), max_segments=32):
        return [i for i in range(1, len(costs)) if i not in forbidden]

    monkeypatch.setattr("qbench.sensitivity.chain.choose_cuts", choose)


@pytest.mark.parametrize("name", ["bypass", "diamond", "early output", "never narrow", "convnet"])
def test_cuts_at_every_position_give_the_same(name: str, every_cut: None) -> None:
    chain = Chain(name)
    assert len(chain.replay.segments) > 6
    expected = gather_outputs(chain.batches, whole(chain.model, chain.batches, chain.output))
    assert close(expected, chain.reference, 1e-5)
    for layer in chain.layers.layers:
        for form in applicable_formats(layer.kind, BACKEND)[1:]:
            got, _ = chain.replayed(layer, form)
            error = np.abs(chain.lowered(layer, form) - got) / np.abs(got).max()
            assert error.max() <= 0.02 and np.median(error) <= 1e-5, (layer.name, form)
    chain.replay.close()


def test_a_change_that_skips_a_segment_is_not_taken_for_none(every_cut: None) -> None:
    chain = Chain("bypass")
    first = chain.layers.layers[0]
    for name in ("int8", "w4a16"):
        got, _ = chain.replayed(first, name)
        assert not np.array_equal(got, chain.reference)
    chain.replay.close()


def test_layers_after_the_scored_output_change_nothing() -> None:
    chain = Chain("early output")
    head = next(x for x in chain.layers.layers if x.name == "head")
    got, change = chain.replayed(head, "w4a16")
    assert change.changed
    np.testing.assert_array_equal(got, chain.reference)
    chain.replay.close()


def test_cuts_lie_where_little_is_alive() -> None:
    chain = Chain("encoder")
    sizes = [len(names) for names in live_sets(chain.replay.model)]
    typical = float(np.median(sizes))
    assert all(sizes[cut] <= typical for cut in chain.replay.cuts)
    chain.replay.close()


def test_a_reused_layer_is_changed_in_every_segment_that_holds_it() -> None:
    chain = Chain("shared blocks")
    up = next(x for x in chain.layers.layers if x.name == "block.up")
    assert len(up.occurrences) == 4
    assert len(chain.replay.segments_of(up)) > 1
    chain.replay.close()
