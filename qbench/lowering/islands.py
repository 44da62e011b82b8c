"""fp16 islands: what a backend with fp16 kernels runs in fp16, with Casts at the borders alone.

It is a pass over a whole plan, after each layer has its format. Layers that compute in fp16 become
one island where they touch, together with what lies between them in no layer (reshapes, the scale
and the mask of attention scores). Their constants are stored in fp16; one Cast brings a tensor into
the islands and one takes it out, however many read it.

A norm that is spelled out in primitives is computed in fp32 between Casts: its squares may pass
fp16's range, and its epsilon may lie below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from qbench.graph.intermediates import MOVEMENT
from qbench.graph.lint import FP16_MAX
from qbench.graph.masks import find_fills
from qbench.graph.shapes import infer_shapes
from qbench.lowering.constants import constant_of, is_constant
from qbench.lowering.edit import LAYER_KEY, GraphEditor
from qbench.lowering.fp16 import Fp16Lowering
from qbench.lowering.fp32 import WIDE_KEY, wide_input
from qbench.records import Kind, Layer, Layers, Rewritten

#: Operators in no layer that join an island which they lie in.
_BETWEEN = MOVEMENT | {"Add", "Sub", "Mul", "Div", "Neg", "Where"}
#: Operators that have no fp16 form.
_NEVER = frozenset({"DynamicQuantizeLinear", "Resize", "Upsample", "Range", "ConstantOfShape"})
_NAME = "fp16_islands"
_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT


@dataclass(frozen=True, slots=True)
class Islands:
    """What became of a graph.

    Attributes:
        count: Number of islands.
        nodes: Number of nodes in them.
        casts: Number of Casts at their borders.
        rewritten: Constants of masks that enter them as fp16's least number.
    """

    count: int
    nodes: int
    casts: int
    rewritten: tuple[Rewritten, ...] = ()


def make_islands(
    model: ir.Model,
    layers: Layers,
    formats: Mapping[str, str],
    *,
    whole: bool = False,
    fills: Mapping[str, tuple[str, float]] | None = None,
) -> Islands:
    """Compute the layers of a plan that take fp16 in fp16, in place.

    Args:
        model: The graph, every other layer of the plan lowered already.
        layers: Its layers.
        formats: Format of each layer.
        whole: Whether fp16 is what surrounds the quantized layers too, so that their scales and
            products are in fp16: all is but the layers that take fp32, and nodes that are marked to
            stay in it (``fp32.mark_wide``).
        fills: What ``carried_fills`` gives of the whole graph, where this is a part of one.
    """
    infer_shapes(model)
    carried = carried_fills(model) if fills is None else fills
    builder = _Builder(GraphEditor(model, _NAME), carried)
    builder.members = _members(model, layers, formats, whole)
    for layer in _caches_apart(model, layers, formats, builder.members):
        Fp16Lowering().apply(model, layer, {})
    infer_shapes(model)
    norms = {name for layer in layers.layers if _is_spelled_out(layer) for name in layer.nodes}
    builder.spelled_out = {node for node in model.graph if node.name in norms}
    for node in [n for n in model.graph if n in builder.members]:
        builder.convert(node)
    builder.leave()
    return Islands(
        _count(builder.members), len(builder.members), builder.casts, tuple(builder.rewritten)
    )


def carried_fills(model: ir.Model) -> dict[str, tuple[str, float]]:
    """Return the constant, and its value, that each tensor carries as the fill of a mask."""
    return {
        tensor: (fills[0].constant, fills[0].value)
        for tensor, fills in find_fills(model).items()
        if fills
    }


def _members(
    model: ir.Model, layers: Layers, formats: Mapping[str, str], whole: bool
) -> set[ir.Node]:
    owner = {name: layer for layer in layers.layers for name in layer.nodes}
    by_name = layers.by_name()
    members: set[ir.Node] = set()
    between: set[ir.Node] = set()
    for node in model.graph:
        layer = owner.get(str(node.name)) or by_name.get(node.metadata_props.get(LAYER_KEY, ""))
        if node.op_type in _NEVER or (node.domain and not whole) or WIDE_KEY in node.metadata_props:
            continue
        if layer is not None:
            if _is_half(layer, formats.get(layer.name, ""), whole):
                members.add(node)
        elif node.op_type in _BETWEEN and not node.domain and _floats(node.outputs):
            between.add(node)
    return members | _joining(members, between)


def _is_half(layer: Layer, format_name: str, whole: bool) -> bool:
    half = format_name == "fp16" or (whole and format_name != "fp32")
    return half and not _is_spelled_out(layer)


def _caches_apart(
    model: ir.Model, layers: Layers, formats: Mapping[str, str], members: set[ir.Node]
) -> list[Layer]:
    """Return keys and values in fp16 that no island gives: they are rounded where they are read."""
    nodes = {str(node.name): node for node in model.graph}
    found = []
    for layer in layers.layers:
        if layer.kind is not Kind.KV or formats.get(layer.name) != "fp16":
            continue
        edges = [edge for edge in layer.edges if edge.node in nodes]
        if any(wide_input(e.index) in nodes[e.node].metadata_props for e in edges):
            continue
        reads = [nodes[edge.node].inputs[edge.index] for edge in edges]
        if not any(v is not None and v.producer() in members for v in reads):
            found.append(layer)
    return found


def _is_spelled_out(layer: Layer) -> bool:
    return layer.kind is Kind.LAYERNORM and any(len(use.nodes) > 1 for use in layer.occurrences)


def _joining(members: set[ir.Node], between: set[ir.Node]) -> set[ir.Node]:
    """Return the nodes in no layer that read an island and are read by islands alone."""
    joining = set(between)
    while True:
        inside = members | joining
        out = {
            node
            for node in joining
            if not any(v.producer() in inside for v in _floats(node.inputs))
            or not _read_inside(node, inside)
        }
        if not out:
            return joining
        joining -= out


def _read_inside(node: ir.Node, inside: set[ir.Node]) -> bool:
    readers = [reader for value in node.outputs for reader, _ in value.uses()]
    given = any(value.is_graph_output() for value in node.outputs)
    return bool(readers) and not given and all(reader in inside for reader in readers)


def _floats(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    return [v for v in values if v is not None and v.dtype is _FLOAT]


def _count(members: set[ir.Node]) -> int:
    """Return the number of groups of nodes that are joined by fp16 tensors."""
    left, groups = set(members), 0
    while left:
        groups += 1
        queue = [left.pop()]
        while queue:
            node = queue.pop()
            near = {v.producer() for v in node.inputs if v is not None and v.dtype is _HALF}
            near |= {r for v in node.outputs if v.dtype is _HALF for r, _ in v.uses()}
            found = left & {n for n in near if n is not None}
            left -= found
            queue += found
    return groups


@dataclass
class _Builder:
    editor: GraphEditor
    carried: Mapping[str, tuple[str, float]]
    members: set[ir.Node] = field(default_factory=set)
    spelled_out: set[ir.Node] = field(default_factory=set)
    casts: int = 0
    rewritten: list[Rewritten] = field(default_factory=list)
    _halves: dict[ir.Value, ir.Value] = field(default_factory=dict)
    _entered: dict[ir.Value, ir.Value] = field(default_factory=dict)
    _made: list[ir.Value] = field(default_factory=list)

    def convert(self, node: ir.Node) -> None:
        """Make a node read and give fp16."""
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype is not _FLOAT:
                continue
            if is_constant(value):
                node.replace_input_with(index, self._half(value))
            elif value.producer() not in self.members:
                node.replace_input_with(index, self._enter(node, value))
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) == int(_FLOAT):
            node.attributes["to"] = ir.AttrInt64("to", int(_HALF))
        for value in _floats(node.outputs):
            value.type = ir.TensorType(_HALF)
            self._made.append(value)

    def _half(self, value: ir.Value) -> ir.Value:
        """Return a constant in fp16; the fill of a mask becomes fp16's least number.

        One that is read transposed or reshaped is stored once, and read so again.
        """
        if value not in self._halves:
            node = value.producer()
            if value.const_value is not None or node is None or node.op_type == "Cast":
                self._halves[value] = self._stored(value)
            else:
                source, *others = node.inputs
                assert source is not None
                inputs = [self._half(source), *others]
                made = self.editor.op(node, node.op_type, inputs, "view", after=True)[0]
                made.type, made.shape = ir.TensorType(_HALF), value.shape
                copy = made.producer()
                assert copy is not None
                copy.attributes.update(node.attributes)
                self._halves[value] = made
        return self._halves[value]

    def _stored(self, value: ir.Value) -> ir.Value:
        array = constant_of(value)
        assert array is not None
        if str(value.name) in self.carried:
            array = np.clip(array, -FP16_MAX, FP16_MAX)
            self._say(value)
        return self.editor.constant("constant", array.astype(np.float16))

    def _enter(self, reader: ir.Node, value: ir.Value) -> ir.Value:
        """Return a tensor from outside in fp16, cast once."""
        if value in self._entered:
            return self._entered[value]
        producer = value.producer()
        anchor, after = (reader, False) if producer is None else (producer, True)
        if producer is None:  # before the first node: another island may read it earlier
            anchor = self.editor.graph[0]
        source = value
        if str(value.name) in self.carried:
            least = self.editor.constant("least", np.array(-FP16_MAX, np.float32))
            source = self.editor.op(anchor, "Max", [value, least], "fill", after=after)[0]
            source.type = ir.TensorType(_FLOAT)
            anchor = source.producer() or anchor if after else anchor
            self._say(value)
        half = self._cast(anchor, source, _HALF, after)
        self._entered[value] = half
        return half

    def _say(self, value: ir.Value) -> None:
        constant, number = self.carried[str(value.name)]
        if abs(number) > FP16_MAX:
            self.rewritten.append(Rewritten(_NAME, str(value.name), constant, number, -FP16_MAX))

    def _cast(self, anchor: ir.Node, value: ir.Value, to: ir.DataType, after: bool) -> ir.Value:
        attributes = {"to": int(to)}
        stem = "to_half" if to is _HALF else "to_float"
        made = self.editor.op(anchor, "Cast", [value], stem, after=after, attributes=attributes)[0]
        made.type, made.shape = ir.TensorType(to), value.shape
        self.casts += 1
        return made

    def leave(self) -> None:
        """Give what lies outside, and the graph's outputs, fp32."""
        inside = {*self.members, *(v.producer() for v in self._entered.values())}
        for value in self._made:
            readers = [reader for reader, _ in value.uses()]
            outer = [reader for reader in readers if reader not in inside]
            if not outer and not value.is_graph_output():
                continue
            producer = value.producer()
            assert producer is not None
            wide = self._cast(producer, value, _FLOAT, after=True)
            if any(reader in self.spelled_out for reader in outer):
                wide = self._apart(wide)
            kept = [reader for reader, _ in value.uses() if reader not in outer]
            self.editor.replace_uses(value, wide, keep=kept)
        for value in self._halves:
            node = value.producer()
            if node is None:
                self.editor.drop_initializer(value)
            else:
                self.editor.drop_unused([node])

    def _apart(self, wide: ir.Value) -> ir.Value:
        """Return the sum of one term: it keeps a Cast out of a norm that the runtime fuses."""
        cast = wide.producer()
        assert cast is not None
        made = self.editor.op(cast, "Sum", [wide], "apart", after=True)[0]
        made.type, made.shape = wide.type, wide.shape
        return made
