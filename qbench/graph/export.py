"""Export of torch modules to ONNX: once, with dynamic batch and sequence, and with torch's answers.

What torch gives for several batches of different shape goes along, so that the graph can be held
against it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from qbench.errors import ModelError
from qbench.graph.folders import max_length_of, resolve_folder

__all__ = ["Check", "Exported", "export_module", "max_length_of", "quiet", "resolve_folder"]

OPSET = 21

#: Rows that are checked alone, without padding, beside the batch that was traced.
_SINGLE_ROWS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """What torch gave for one batch.

    Attributes:
        feeds: The inputs by name.
        expected: Torch's output.
    """

    feeds: Mapping[str, np.ndarray]
    expected: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """A graph that torch exported.

    Attributes:
        graph: The graph, as the exporter gave it.
        card: What it is: head, pooling, tokenizer, longest text.
        checks: Torch's answers: for the batch that was traced, and for single rows unpadded.
    """

    graph: ir.Model
    card: dict[str, Any]
    checks: tuple[Check, ...]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the chatter of torch and transformers off the terminal."""
    from transformers.utils import logging as chatter

    words: Any = chatter
    before, bars = words.get_verbosity(), words.is_progress_bar_enabled()
    level = logging.root.manager.disable
    words.set_verbosity_error()
    words.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        words.set_verbosity(before)
        if bars:
            words.enable_progress_bar()
        logging.disable(level)


def export_module(
    module: Any,
    feeds: Mapping[str, np.ndarray],
    output: str = "output",
    dynamic: Sequence[str] = ("batch", "sequence"),
    strict: bool = False,
) -> Exported:
    """Export a torch module that takes ``feeds`` by keyword and gives one tensor.

    Args:
        module: The module; it is put into evaluation mode.
        feeds: Sample inputs; the first axes of each are dynamic where the module allows it.
        output: Name of the output.
        dynamic: Names of the dynamic axes, the first axis first.
        strict: Whether it is an error that one of those axes turns out to be fixed.

    Raises:
        ModelError: If it cannot be run or exported, or a dynamic axis turns out to be fixed.
    """
    module = module.eval()
    traced = _widened(feeds)
    checks = tuple(
        Check(batch, _run(module, batch)) for batch in (traced, *_single_rows(traced, strict))
    )
    graph = _export(module, traced, output, len(dynamic))
    _name_axes(graph, dynamic)
    if strict:
        _check_dynamic(graph, len(dynamic))
    card = {"kind": "torch", "output": output, "architecture": type(module).__name__}
    return Exported(graph, card, checks)


def _widened(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return feeds of two rows where there is one: an axis of length 1 would be traced as fixed."""
    arrays = {name: np.array(array) for name, array in feeds.items()}
    if all(array.ndim and len(array) == 1 for array in arrays.values()):
        return {name: np.repeat(array, 2, axis=0) for name, array in arrays.items()}
    return arrays


def _single_rows(feeds: Mapping[str, np.ndarray], trim: bool) -> Iterator[dict[str, np.ndarray]]:
    """Yield the first rows alone, of token feeds without their padding."""
    lengths = {len(array) if array.ndim else 0 for array in feeds.values()}
    if len(lengths) != 1 or 0 in lengths:
        return
    for row in range(min(_SINGLE_ROWS, lengths.pop())):
        one = {name: array[row : row + 1] for name, array in feeds.items()}
        mask = one.get("attention_mask")
        if trim and mask is not None and mask.sum() > 1:
            one = {name: array[:, mask[0] != 0] for name, array in one.items()}
        yield one


def _run(module: Any, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    import torch

    with torch.no_grad(), quiet():
        try:
            result = module(**{name: torch.from_numpy(array) for name, array in feeds.items()})
        except Exception as error:  # a user's module may raise anything
            shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in feeds.items())
            raise ModelError(
                f"{type(module).__name__} cannot be run on its samples ({shapes}): "
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error
    if not isinstance(result, torch.Tensor):
        raise ModelError(
            f"{type(module).__name__} must give one tensor, and gives {type(result).__name__}; "
            "wrap it in a module that returns the tensor to score"
        )
    answer: np.ndarray = result.numpy()
    if not np.isfinite(answer).all():
        raise ModelError(
            f"{type(module).__name__} itself gives NaN or infinity on its samples: nothing can be "
            "measured; repair the model"
        )
    return answer


def _export(module: Any, feeds: Mapping[str, np.ndarray], output: str, axes: int) -> ir.Model:
    import torch

    example = {name: torch.from_numpy(array) for name, array in feeds.items()}
    dims = {
        n: {i: torch.export.Dim.AUTO for i in range(min(axes, t.ndim))} for n, t in example.items()
    }
    with torch.no_grad(), quiet():
        try:
            program = torch.onnx.export(
                module,
                kwargs=example,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=dims,
                input_names=list(example),
                output_names=[output],
                verbose=False,
            )
        except Exception as error:  # the exporter raises its own, torch's and plain errors
            cause = error.__cause__ or error
            raise ModelError(
                f"torch.onnx.export refused {type(module).__name__}: {type(cause).__name__}: "
                f"{' '.join(str(cause).split())[:400]}; export it to ONNX yourself and give the "
                "file"
            ) from error
    if program is None:
        raise ModelError(f"torch.onnx.export gave nothing for {type(module).__name__}")
    graph: ir.Model = program.model
    if program.exported_program is not None:
        _fix_axes(graph, program.exported_program.range_constraints)
    return graph


def _fix_axes(model: ir.Model, ranges: Mapping[Any, Any]) -> None:
    """Write the number in place of a symbol that can have one value only."""
    fixed = {str(s): int(r.lower) for s, r in ranges.items() if r.lower == r.upper}
    _rename_axes(model, fixed)


def _name_axes(model: ir.Model, dynamic: Sequence[str]) -> None:
    """Name the dynamic axes of inputs, and what follows from them, in every tensor."""
    names: dict[str | None, str] = {}
    for value in model.graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and axis < len(dynamic):
                names.setdefault(dim.value, dynamic[axis])
    _rename_axes(model, names)


def _rename_axes(model: ir.Model, names: Mapping[Any, str | int]) -> None:
    produced = (value for node in model.graph.all_nodes() for value in node.outputs)
    for value in (*model.graph.inputs, *produced):
        if value.shape is not None:
            value.shape = ir.Shape(
                [names.get(d.value, d) if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
            )


def _check_dynamic(model: ir.Model, axes: int) -> None:
    for value in model.graph.inputs:
        fixed = [d for d in list(value.shape or ())[:axes] if isinstance(d, int)]
        if fixed:
            raise ModelError(
                f"the exporter fixed input {value.name!r} to the shape {list(value.shape or ())}, "
                "so the model depends on the length of its samples; export it to ONNX yourself and "
                "give the file"
            )
