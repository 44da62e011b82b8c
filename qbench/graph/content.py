"""What a graph holds, looked at in pieces: its weights may be larger than memory.

External weights are read from their file and not through a memory map: mapped pages that were
touched once stay resident until the system wants them back.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qbench.errors import ModelError

_PIECE_BYTES = 1 << 23

#: Tensors below this size are never worth sharing.
_SHARED_BYTES = 1024

#: Operators whose constant operand is a trained weight: infinity there is damage, not a mask.
WEIGHTED = frozenset(
    {
        "BatchNormalization",
        "Conv",
        "ConvTranspose",
        "Gemm",
        "GroupNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "MatMul",
        "RMSNormalization",
    }
)


@dataclass(frozen=True, slots=True)
class Survey:
    """What one pass over all weights found.

    Attributes:
        sha256: Hash of the graph and its weights.
        damaged: Initializers with NaN, and weights with infinities.
    """

    sha256: str
    damaged: tuple[str, ...]


def pieces(tensor: ir.TensorProtocol) -> Iterator[bytes]:
    """Yield a tensor's bytes in order, at most 8 MiB at once where it lies in a file.

    Raises:
        ModelError: If the file ends before the tensor does, or its bytes do not fit its shape.
    """
    if isinstance(tensor, ir.StringTensor) or tensor.dtype == ir.DataType.STRING:
        yield repr([bytes(item) for item in tensor.numpy().reshape(-1).tolist()]).encode()
    elif isinstance(tensor, ir.ExternalTensor):
        yield from _pieces_of_file(tensor)
    else:
        data = tensor.tobytes()
        if len(data) != tensor.nbytes:
            raise ModelError(
                f"initializer {tensor.name!r} of shape {list(tensor.shape)} needs "
                f"{tensor.nbytes} bytes and has {len(data)}: the file is damaged"
            )
        yield data


def _pieces_of_file(tensor: ir.ExternalTensor) -> Iterator[bytes]:
    left = tensor.nbytes
    if not left:
        return
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset or 0)
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ModelError(f"{tensor.path!r} ends inside weight {tensor.name!r}")
            left -= len(piece)
            yield piece


def survey(model: ir.Model) -> Survey:
    """Hash a graph and look for numbers that are none, in one pass over its weights.

    The hash covers operators, names, attributes, inputs, outputs, opsets and the content of all
    initializers; metadata does not count.
    """
    digest, damaged = hashlib.sha256(), []
    for line in _lines_of(model):
        digest.update(line.encode())
    for graph in model.graphs():
        for name, value in sorted(graph.initializers.items()):
            tensor = value.const_value
            if tensor is None:
                continue
            dims = tuple(tensor.shape.numpy())
            digest.update(repr((name, str(tensor.dtype), dims)).encode())
            check = _Finite(value)
            for piece in pieces(tensor):
                digest.update(piece)
                check.look(piece)
            if check.damaged:
                damaged.append(_told(value))
    return Survey(digest.hexdigest(), tuple(damaged))


def _lines_of(model: ir.Model) -> Iterator[str]:
    yield repr(sorted(model.opset_imports.items()))
    for value in (*model.graph.inputs, *model.graph.outputs):
        yield repr((value.name, str(value.dtype), str(value.shape)))
    for node in model.graph.all_nodes():
        names = [v.name if v is not None else "" for v in (*node.inputs, *node.outputs)]
        attributes = sorted((a.name, _attribute_text(a)) for a in node.attributes.values())
        yield repr((node.domain, node.op_type, node.name, names, attributes))


def _attribute_text(attribute: ir.Attr) -> str:
    value = attribute.value
    if isinstance(value, ir.TensorProtocol):
        digest = hashlib.sha256(repr((str(value.dtype), tuple(value.shape.numpy()))).encode())
        for piece in pieces(value):
            digest.update(piece)
        return digest.hexdigest()
    if isinstance(value, ir.Graph):
        return repr([(n.op_type, n.name) for n in value])
    return repr(value)


def _told(value: ir.Value) -> str:
    """Return the name of a weight, and the parameter that it was made from where it is told."""
    origin = value.metadata_props.get("pkg.onnxscript.optimizer.folded_from")
    return f"{value.name} (from {origin})" if origin else str(value.name)


class _Finite:
    """Looks for NaN in a floating initializer, and for infinity in a weight."""

    def __init__(self, value: ir.Value) -> None:
        tensor = value.const_value
        self.damaged = False
        self._dtype: np.dtype[np.generic] | None = None
        if tensor is not None and tensor.dtype.is_floating_point() and tensor.dtype.bitwidth >= 8:
            self._dtype = np.dtype(tensor.dtype.numpy())
        self._weighted = any(use.node.op_type in WEIGHTED for use in value.uses())

    def look(self, piece: bytes) -> None:
        if self._dtype is None or self.damaged:
            return
        array = np.frombuffer(piece, self._dtype)
        bad = ~np.isfinite(array) if self._weighted else np.isnan(array)
        self.damaged = bool(bad.any())


def share_equal_weights(graph: ir.Graph) -> int:
    """Make initializers of equal content one, in place; return how many went.

    Exporters write a weight that a model uses several times (ALBERT's one layer) as often as it is
    used. Matrices and higher ranks alone are looked at: equal vectors are zeros and ones of
    layers that share nothing.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[ir.Value]] = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or value.is_graph_output() or value.is_graph_input():
            continue
        dims = tuple(int(d) for d in tensor.shape.numpy())
        if len(dims) >= 2 and tensor.nbytes >= _SHARED_BYTES:
            groups.setdefault((str(tensor.dtype), dims), []).append(value)
    return sum(_share(graph, values) for values in groups.values() if len(values) > 1)


def share_transposed_tables(graph: ir.Graph) -> int:
    """Read a table that is stored once more, transposed, from one storage; return how many went.

    That is how exporters write an output projection that is tied to the word table: they fold its
    Transpose. It is put back.
    """
    tables, others = dict[tuple[int, ...], list[ir.Value]](), list[ir.Value]()
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or value.is_graph_output() or value.is_graph_input():
            continue
        dims = tuple(int(d) for d in tensor.shape.numpy())
        if len(dims) != 2 or tensor.nbytes < _SHARED_BYTES or not tensor.dtype.is_floating_point():
            continue
        looked_up = any(u.node.op_type == "Gather" and u.idx == 0 for u in value.uses())
        if looked_up:
            tables.setdefault(dims, []).append(value)
        else:
            others.append(value)
    gone = 0
    for value in others:
        assert value.const_value is not None
        dims = tuple(int(d) for d in value.const_value.shape.numpy())
        for table in tables.get(dims[::-1], ()):
            if _is_transposed(table, value):
                _read_transposed(graph, table, value)
                gone += 1
                break
    return gone


def _is_transposed(table: ir.Value, other: ir.Value) -> bool:
    assert table.const_value is not None and other.const_value is not None
    if table.dtype is not other.dtype:
        return False
    rows, columns = table.const_value.numpy(), other.const_value.numpy()
    step = max(1, _PIECE_BYTES // max(1, rows[0].nbytes))
    return all(
        np.array_equal(rows[at : at + step], columns[:, at : at + step].T)
        for at in range(0, len(rows), step)
    )


def _read_transposed(graph: ir.Graph, table: ir.Value, other: ir.Value) -> None:
    made = ir.node("Transpose", [table], attributes={"perm": [1, 0]}, name=f"{other.name}/tied")
    out = made.outputs[0]
    out.name, out.type, out.shape = f"{other.name}/tied:0", other.type, other.shape
    graph.insert_before(graph[0], made)
    other.replace_all_uses_with(out)
    graph.initializers.pop(str(other.name))


def _share(graph: ir.Graph, values: list[ir.Value]) -> int:
    kept: dict[bytes, ir.Value] = {}
    gone = 0
    for value in values:
        digest = hashlib.sha256()
        assert value.const_value is not None
        for piece in pieces(value.const_value):
            digest.update(piece)
        first = kept.setdefault(digest.digest(), value)
        if first is not value:
            value.replace_all_uses_with(first)
            graph.initializers.pop(str(value.name))
            gone += 1
    return gone


def release_weights(model: ir.Model) -> None:
    """Take the pages of all mapped weights that were read out of this process.

    A page of a memory map stays resident once it was touched: what looks at every weight of a
    model would hold all of it. Arrays over the maps stay valid; they are read from the file again.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)
    tensors = [value.const_value for value in model.graph.initializers.values()]
    for tensor in tensors:
        if advice is not None and isinstance(tensor, ir.ExternalTensor) and tensor.raw is not None:
            tensor.raw.madvise(advice)


def drop_weights(model: ir.Model) -> None:
    """Let go of the weights of a graph that nobody needs any more.

    A graph refers to itself in circles, which the collector finds late: what a lowering made would
    pile up until then. Tensors that other graphs share stay theirs.
    """
    for value in model.graph.initializers.values():
        value.const_value = None
