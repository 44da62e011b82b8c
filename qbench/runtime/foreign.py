"""Loading an ONNX file that somebody else made: what it leaves open is asked for, not guessed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from qbench.errors import MeasurementError, ModelError, did_you_mean, unknown_name
from qbench.graph.folders import POOLINGS
from qbench.graph.model import Model, TensorSpec, store_model
from qbench.graph.normal import MIN_OPSET, normalise, opset_of
from qbench.graph.pooling import add_pooling
from qbench.graph.reading import read_onnx
from qbench.runtime.ort import open_model

#: Largest difference before and after conversion, relative to the largest output.
_TOLERANCES = {"float16": 1e-2}
_TOLERANCE = 1e-3

#: Graphs above this size are not run a second time to compare.
_COMPARED_BYTES = 1 << 30

_MASKS = ("mask",)


class Choices(Protocol):
    """What of the options of a loader an ONNX file needs."""

    @property
    def head(self) -> str:
        """What is scored: ``embedding``, ``classification``, ``output``; ``any``: nothing."""

    @property
    def pooling(self) -> str | None:
        """How hidden states become one vector a text."""

    @property
    def normalize(self) -> bool | None:
        """Whether embeddings are scaled to length 1."""

    @property
    def output(self) -> str | None:
        """The output that is scored."""

    @property
    def tokenizer(self) -> str | None:
        """What turns texts into token ids."""

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens."""

    @property
    def samples(self) -> Mapping[str, np.ndarray]:
        """Feeds of real samples."""


def load_onnx(path: Path, source: str, folder: Path, options: Choices) -> Model:
    """Load an ONNX file, bring it to the normal form, check it and store it in ``folder``.

    Raises:
        ModelError: If it cannot be read, converted or run; if a choice is missing.
    """
    if options.pooling is not None and options.pooling not in POOLINGS:
        raise ModelError(unknown_name("pooling", options.pooling, POOLINGS))
    raw = read_onnx(path)
    outputs, opset, size = _outputs_told(raw), opset_of(raw), _bytes_of(raw)
    output = _choose_output(raw, options)
    scored = options.head != "any" or options.output is not None
    graph = normalise(raw, output if scored else None)
    card: dict[str, Any] = {
        "kind": "onnx",
        "tokenizer": options.tokenizer,
        "max_length": options.max_length,
        "output": output,
        "outputs": outputs,
        "head": options.head,
        "opset": opset,
        "producer": f"{raw.producer_name or 'unknown'} {raw.producer_version or ''}".strip(),
    }
    model = None
    if opset < MIN_OPSET and size < _COMPARED_BYTES:
        model = store_model(graph, folder / "unpooled", source, card)
        card["conversion_check"] = check_conversion(path, model, options.samples)
    if options.head in ("embedding", "classification"):
        rank = _rank(graph, folder, source, options)
        if options.head == "classification":
            _check_logits(rank, output, outputs)
        else:
            card |= _pool(graph, rank, options)
    shutil.rmtree(folder / "unpooled", ignore_errors=True)
    model = store_model(graph, folder, source, card)
    open_model(model.path, source, light=True).close()
    return model


def _bytes_of(model: ir.Model) -> int:
    values = model.graph.initializers.values()
    return sum(v.const_value.nbytes for v in values if v.const_value is not None)


def _outputs_told(model: ir.Model) -> str:
    return ", ".join(f"{value.name} {_shape_text(value)}" for value in model.graph.outputs)


def _shape_text(value: ir.Value) -> str:
    return "[" + ", ".join(str(d) for d in value.shape) + "]" if value.shape is not None else "[?]"


def _choose_output(model: ir.Model, options: Choices) -> str:
    names = [str(v.name) for v in model.graph.outputs]
    if options.output is not None:
        if options.output not in names:
            near = did_you_mean(options.output, names)
            raise ModelError(
                f"the graph has no output {options.output!r}{near}; outputs: {_outputs_told(model)}"
            )
        return options.output
    if len(names) > 1 and options.head != "any":
        raise ModelError(
            f"the graph has {len(names)} outputs; choose the one to score with --output: "
            f"{_outputs_told(model)}"
        )
    return names[0]


def _rank(graph: ir.Model, folder: Path, source: str, options: Choices) -> int:
    """Return the number of dimensions of the one output; from a run where the graph hides it."""
    shape = graph.graph.outputs[0].shape
    if shape is not None:
        return shape.rank()
    model = store_model(graph, folder / "unpooled", source, {})
    with open_model(model.path, source, light=True) as session:
        try:
            values = session.run(feeds_for(session.inputs, options.samples))
        except MeasurementError as error:
            raise ModelError(
                f"the graph does not tell the shape of output {model.output!r}, and cannot be run "
                f"on a sample to see it ({str(error)[:300]}); save it with its output shapes"
            ) from error
    rank = values[model.output].ndim
    graph.graph.outputs[0].shape = ir.Shape([None] * rank)
    return rank


def _check_logits(rank: int, output: str, outputs: str) -> None:
    if rank != 2:
        raise ModelError(
            f"output {output!r} has {rank} dimensions, and a classifier's has 2 [batch, classes]; "
            f"name another with --output: {outputs}"
        )


def _pool(graph: ir.Model, rank: int, options: Choices) -> dict[str, Any]:
    output, pooling = graph.graph.outputs[0], options.pooling
    if rank not in (2, 3):
        raise ModelError(
            f"output {output.name!r} has shape {_shape_text(output)}; an embedding has 2 "
            "dimensions [batch, hidden], or 3 [batch, sequence, hidden] that pooling makes 2"
        )
    if rank == 2 and pooling not in (None, "none"):
        raise ModelError(
            f"output {output.name!r} already is one vector a text (2 dimensions): leave --pooling "
            "out, or name the output with one vector a token with --output"
        )
    if rank == 3 and pooling is None:
        raise ModelError(
            f"output {output.name!r} has shape {_shape_text(output)}, one vector a token; say how "
            f"they become one vector a text with --pooling: {', '.join(POOLINGS)}"
        )
    if rank == 2 and options.normalize:
        return {"output": add_pooling(graph, "none", True), "pooling": "none", "normalize": True}
    if pooling in (None, "none"):
        return {"pooling": "none", "normalize": False}
    normalize = bool(options.normalize)
    name = add_pooling(graph, str(pooling), normalize)
    return {"pooling": pooling, "normalize": normalize, "output": name}


def feeds_for(
    specs: Sequence[TensorSpec], samples: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return feeds of the right shape and type; given samples are used where they fit.

    Where there are none: 2 texts of 4 tokens, ids 0 and 1, nothing masked.
    """
    rng = np.random.default_rng(0)
    if samples and all(s.name in samples and _fits(s, samples[s.name]) for s in specs):
        return {s.name: np.asarray(samples[s.name]).astype(s.dtype) for s in specs}
    return {spec.name: _made_up(spec, rng) for spec in specs}


def _fits(spec: TensorSpec, array: np.ndarray) -> bool:
    same = all(
        not isinstance(d, int) or d == n for d, n in zip(spec.shape, array.shape, strict=False)
    )
    return len(spec.shape) == array.ndim and same


def _made_up(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    shape = [d if isinstance(d, int) else (4 if axis else 2) for axis, d in enumerate(spec.shape)]
    if any(word in spec.name.lower() for word in _MASKS):
        return np.ones(shape, spec.dtype)
    if np.issubdtype(np.dtype(spec.dtype), np.floating):
        return rng.standard_normal(shape).astype(spec.dtype)
    return rng.integers(0, 2, shape).astype(spec.dtype)


def check_conversion(path: Path, model: Model, samples: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Run a file as it came and its normal form on the same input and return how far they differ.

    Raises:
        ModelError: If they disagree, or the normal form alone does not run.
    """
    try:
        original = open_model(path, str(path))
    except ModelError as error:
        return {"not_checked": f"the file does not load as it came: {str(error)[:200]}"}
    with original as session, open_model(model.path, str(path)) as converted:
        feeds = feeds_for(session.inputs, samples)
        names = [name for name in converted.outputs if name in session.outputs]
        try:
            before = session.run(feeds, names)
        except MeasurementError as error:
            return {"not_checked": f"the file does not run on made-up input: {str(error)[:200]}"}
        try:
            after = converted.run(feeds, names)
        except MeasurementError as error:
            raise ModelError(
                f"{str(path)!r} does not run after its opset was raised: {error}"
            ) from error
    worst = max((_apart(before[n], after[n]) for n in names), default=(0.0, 0.0))
    if not worst[0] <= 1.0:
        raise ModelError(
            f"{str(path)!r} gives other numbers after its opset was raised to {MIN_OPSET}: largest "
            f"relative difference {worst[1]:.3g}; export it again with opset_version={MIN_OPSET}"
        )
    return {"max_rel_diff": worst[1]}


def _apart(left: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Return the relative difference, in tolerances and as it is."""
    if left.shape != right.shape:
        return float("inf"), float("inf")
    wide, other = left.astype(np.float64), right.astype(np.float64)
    same = (wide == other) | (np.isnan(wide) & np.isnan(other))
    top = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0)) or 1.0
    apart = float(np.where(same, 0.0, np.abs(wide - other)).max(initial=0.0)) / top
    return apart / _TOLERANCES.get(str(left.dtype), _TOLERANCE), apart
