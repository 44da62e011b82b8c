"""What the runtime makes of a graph: its optimised form, read back."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from qbench.runtime.ort import SessionSettings, open_session

#: The accuracy level at which MatMulNBits multiplies in int8.
_INT8_LEVEL = 4


def optimised_graph(graph: ir.Model | Path, settings: SessionSettings) -> ir.Model:
    """Return the graph that the runtime runs in place of the one that it is given.

    Args:
        graph: A graph in memory or an ONNX file.
        settings: How a session on it is opened.

    Raises:
        MeasurementError: If the runtime refuses the graph.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "optimised.onnx"
        entries = {
            **settings.entries,
            "session.optimized_model_external_initializers_file_name": "optimised.data",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        }
        saving = replace(settings, entries=entries, optimised_path=target)
        open_session(graph, saving).close()
        return ir.load(target)


def kernel_name(node: ir.Node) -> str:
    """Return the operator of a node, with what it computes in where an attribute decides that."""
    in_int8 = node.attributes.get_int("accuracy_level", 0) == _INT8_LEVEL
    return f"{node.op_type}(int8)" if node.op_type == "MatMulNBits" and in_int8 else node.op_type
