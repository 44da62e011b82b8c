"""Shapes of tensors, as far as the graph alone tells them."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass


def infer_shapes(model: ir.Model) -> None:
    """Write the shapes and element types that follow from the graph into it, in place.

    A runtime infers shapes too, and joins operators where they are fixed; a lowering that minds
    this must see what the runtime will see. Large weights are left out of what is handed to ONNX.
    """
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
