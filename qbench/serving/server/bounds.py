"""How large the values of an input may be: the rows of the tables that it looks up."""

from __future__ import annotations

import onnx_ir as ir

_SAME_VALUES = ("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten")
_SAME_ROWS = ("DequantizeLinear", "Cast", "Identity")


def index_bounds(model: ir.Model) -> dict[str, int]:
    """Return the rows of the smallest table that an input's values are looked up in, by input.

    Only inputs whose own values are the places (as token ids are) are in it.
    """
    found: dict[str, int] = {}
    for value in model.graph.inputs:
        if value.dtype is None or not value.dtype.is_integer():
            continue
        rows = _tables(value)
        if rows:
            found[str(value.name)] = min(rows)
    return found


def _tables(value: ir.Value) -> list[int]:
    rows: list[int] = []
    for node, place in value.uses():
        if node.op_type in ("Gather", "GatherBlockQuantized") and place == 1:
            axis = node.attributes.get_int("gather_axis", node.attributes.get_int("axis", 0))
            size = _rows(node.inputs[0])
            if axis == 0 and size:
                rows.append(size)
        elif node.op_type in _SAME_VALUES and place == 0:
            rows += _tables(node.outputs[0])
    return rows


def _rows(table: ir.Value | None) -> int:
    """Return the rows of a table: a weight, or what is unpacked from one."""
    while table is not None and table.const_value is None:
        node = table.producer()
        if node is None or node.op_type not in _SAME_ROWS:
            return 0
        table = node.inputs[0]
    if table is None or table.const_value is None or len(table.const_value.shape) < 1:
        return 0
    size = table.const_value.shape[0]
    return size if isinstance(size, int) else 0
