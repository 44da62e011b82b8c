"""Normalisations: the operators, and LayerNorm and RMSNorm written out in primitives."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from qbench.graph.layers.found import Claims, Found, edges_into, plain_attributes
from qbench.graph.layers.operators import NORMS, SKIP_NORMS
from qbench.graph.layers.view import Origin, View, behind_casts
from qbench.records import Kind


@dataclass
class _Match:
    """A decomposed normalisation while it is being followed."""

    x: ir.Value
    mean: bool
    axes: tuple[int, ...]
    epsilon: float
    nodes: list[ir.Node] = field(default_factory=list)
    output: ir.Value | None = None
    gamma: Origin | None = None
    beta: Origin | None = None
    attributes: dict[str, float | int | str] = field(default_factory=dict)


def find_norms(view: View, claims: Claims) -> None:
    """Claim every normalisation of the graph."""
    for node in view.nodes:
        if node.op_type in NORMS | SKIP_NORMS:
            claims.add(_operator(view, node))
        elif node.op_type in ("Sqrt", "Pow") and not node.domain:
            match = _decomposed(view, node)
            if match is not None and match.output is not None:
                claims.add(_layer(view, match, node))


def _operator(view: View, node: ir.Node) -> Found:
    data = 2 if node.op_type in SKIP_NORMS else 1
    first = 1 if node.op_type not in SKIP_NORMS else 2
    weight, bias = (
        view.origin(node.inputs[index]) if index < len(node.inputs) else None
        for index in (first, first + 1)
    )
    return Found(
        kind=Kind.LAYERNORM,
        op=node.op_type,
        nodes=(node,),
        reads=tuple(_constant_or_self(view, value) for value in node.inputs),
        output=node.outputs[0],
        edges=tuple((node, index) for index in range(data)),
        anchor=node,
        attributes=plain_attributes(node),
        weight=weight,
        bias=bias,
    )


def _constant_or_self(view: View, value: ir.Value | None) -> ir.Value | None:
    origin = view.origin(value)
    return value if origin is None else origin.value


def _layer(view: View, match: _Match, root: ir.Node) -> Found:
    assert match.output is not None
    nodes = view.sort(match.nodes)
    last = match.axes[-1] if match.axes else -1
    attributes: dict[str, float | int | str] = {"axis": match.axes[0] if match.axes else -1}
    attributes["epsilon"] = match.epsilon
    if len(match.axes) > 1 or (last >= 0 and not _is_last(match.x, last)):
        attributes["axes"] = ",".join(map(str, match.axes))
    return Found(
        kind=Kind.LAYERNORM,
        op="LayerNormalization" if match.mean else "RMSNormalization",
        nodes=nodes,
        reads=(
            match.x,
            None if match.gamma is None else match.gamma.value,
            None if match.beta is None else match.beta.value,
        ),
        output=match.output,
        edges=edges_into(nodes, match.x),
        anchor=root,
        attributes=attributes | match.attributes,
        weight=match.gamma,
        bias=match.beta,
    )


def _is_last(value: ir.Value, axis: int) -> bool:
    return value.shape is not None and axis == len(value.shape) - 1


def _decomposed(view: View, root: ir.Node) -> _Match | None:
    """Match a normalisation whose root of the variance is ``root``."""
    power = 0.5 if root.op_type == "Sqrt" else view.number(root.inputs[1])
    if power not in (0.5, -0.5) or root.inputs[0] is None:
        return None
    variance, passed = behind_casts(root.inputs[0])
    epsilon, rest = _constant_term(view, variance)
    if rest is not None:
        producer = variance.producer()
        assert producer is not None
        passed.append(producer)
        variance, casts = behind_casts(rest)
        passed += casts
    match = _variance(view, variance)
    if match is None:
        return None
    match.nodes += [root, *passed]
    scale = root.outputs[0]
    if rest is None:
        scale = _epsilon_outside(view, match, scale)
    else:
        match.epsilon = epsilon
    if not _scaled(view, match, scale, inverse=power < 0):
        return None
    assert match.output is not None
    return match if view.closed(match.nodes, match.output) else None


def _constant_term(view: View, value: ir.Value) -> tuple[float, ir.Value | None]:
    """Return c and v where the value is v + c, else (0, None)."""
    node = view.producer(value, "Add")
    if node is not None:
        for number, rest in (node.inputs, node.inputs[::-1]):
            constant = view.number(number)
            if constant is not None:
                return constant, rest
    return 0.0, None


def _epsilon_outside(view: View, match: _Match, scale: ir.Value) -> ir.Value:
    user = view.only_user(scale)
    if user is not None and user.op_type == "Add":
        epsilon, rest = _constant_term(view, user.outputs[0])
        if rest is scale:
            match.epsilon = epsilon
            match.attributes["epsilon_at"] = "deviation"
            match.nodes.append(user)
            return user.outputs[0]
    return scale


def _variance(view: View, value: ir.Value) -> _Match | None:
    """Match mean((x − mean(x))²), mean(x²), or mean(x²) − mean(x)²."""
    clamp = view.producer(value, "Relu", "Max", "Clip")
    if clamp is not None:
        inner = _variance(view, clamp.inputs[0]) if clamp.inputs[0] is not None else None
        if inner is not None:
            inner.nodes.append(clamp)
        return inner
    difference = view.producer(value, "Sub")
    if difference is not None:
        return _fast_variance(view, difference)
    reduce = view.producer(value, "ReduceMean")
    if reduce is None or reduce.inputs[0] is None:
        return None
    square, casts = behind_casts(reduce.inputs[0])
    base, squarer = _squared(view, square)
    axes = view.axes(reduce)
    if base is None or squarer is None or axes is None:
        return None
    nodes = [reduce, squarer, *casts]
    centred, more = behind_casts(base)
    centre = _centred(view, centred)
    if centre is not None:
        return _Match(centre[0], True, axes, 0.0, [*nodes, *more, *centre[1]])
    return _Match(base, False, axes, 0.0, nodes)


def _fast_variance(view: View, difference: ir.Node) -> _Match | None:
    squares, squared_mean = difference.inputs
    match = _variance(view, squares) if squares is not None else None
    if match is None or match.mean or squared_mean is None:
        return None
    mean, squarer = _squared(view, squared_mean)
    node = view.producer(mean, "ReduceMean")
    if squarer is None or node is None or node.inputs[0] is not match.x:
        return None
    match.mean = True
    match.nodes += [difference, squarer, node]
    return match


def _squared(view: View, value: ir.Value) -> tuple[ir.Value | None, ir.Node | None]:
    node = view.producer(value, "Pow", "Mul")
    if node is None:
        return None, None
    first, second = node.inputs
    is_square = first is second if node.op_type == "Mul" else view.number(second) == 2.0
    return (first, node) if is_square else (None, None)


def _centred(view: View, value: ir.Value) -> tuple[ir.Value, list[ir.Node]] | None:
    """Return x and the nodes where the value is x − mean(x)."""
    node = view.producer(value, "Sub")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return None
    mean, casts = behind_casts(node.inputs[1])
    reduce = view.producer(mean, "ReduceMean")
    if reduce is None or reduce.inputs[0] is None:
        return None
    x = node.inputs[0]
    more: list[ir.Node] = []
    if reduce.inputs[0] is not x:
        base, more = behind_casts(reduce.inputs[0])
        if base is not x:
            return None
    return x, [node, reduce, *casts, *more]


def _scaled(view: View, match: _Match, scale: ir.Value, inverse: bool) -> bool:
    """Follow the deviation to the normalised value, then through gamma and beta."""
    scale = _past_casts(view, match, scale)
    user = view.only_user(scale)
    if user is not None and not inverse and _inverts(view, user, scale):
        match.nodes.append(user)
        scale, inverse = _past_casts(view, match, user.outputs[0]), True
        user = view.only_user(scale)
    if user is None:
        return False
    if user.op_type == ("Mul" if inverse else "Div") and (inverse or user.inputs[1] is scale):
        other = user.inputs[0] if user.inputs[1] is scale else user.inputs[1]
        numerator = None if other is None else _numerator(view, match, other)
        if numerator is not None:
            match.nodes += [user, *numerator]
            _affine(view, match, user.outputs[0])
            return True
    return inverse and match.mean and _folded_affine(view, match, user, scale)


def _inverts(view: View, node: ir.Node, value: ir.Value) -> bool:
    if node.op_type == "Reciprocal":
        return True
    return node.op_type == "Div" and node.inputs[1] is value and view.number(node.inputs[0]) == 1.0


def _past_casts(view: View, match: _Match, value: ir.Value) -> ir.Value:
    user = view.only_user(value)
    while user is not None and user.op_type in ("Cast", "Identity"):
        match.nodes.append(user)
        value = user.outputs[0]
        user = view.only_user(value)
    return value


def _numerator(view: View, match: _Match, value: ir.Value) -> list[ir.Node] | None:
    """Return the nodes between x and the numerator, or ``None`` if it is not this pattern's."""
    if not match.mean:
        if value is match.x:
            return []
        if behind_casts(match.x)[0] is value:
            match.nodes += behind_casts(match.x)[1]
            match.x = value
            return []
    base, casts = behind_casts(value)
    if not match.mean:
        return casts if base is match.x else None
    centre = _centred(view, base)
    return [*casts, *centre[1]] if centre is not None and centre[0] is match.x else None


def _affine(view: View, match: _Match, value: ir.Value) -> None:
    """Take in a constant gamma and beta where they follow."""
    match.output = value
    probe = _Match(match.x, match.mean, match.axes, match.epsilon)
    gamma_out = _constant_step(view, probe, value, "Mul")
    if gamma_out is not None:
        match.output, match.gamma = gamma_out, probe.gamma
        match.nodes += probe.nodes
    probe = _Match(match.x, match.mean, match.axes, match.epsilon)
    beta_out = _constant_step(view, probe, match.output, "Add")
    if beta_out is not None and (match.gamma is None or _same_size(probe.beta, match.gamma)):
        match.output, match.beta = beta_out, probe.beta
        match.nodes += probe.nodes


def _same_size(first: Origin | None, second: Origin) -> bool:
    return first is not None and first.tensor.size == second.tensor.size


def _constant_step(view: View, match: _Match, value: ir.Value, op: str) -> ir.Value | None:
    value = _past_casts(view, match, value)
    user = view.only_user(value)
    if user is None or user.op_type != op or user.domain:
        return None
    other = user.inputs[1] if user.inputs[0] is value else user.inputs[0]
    origin = _vector(view, other)
    if origin is None:
        return None
    if op == "Mul":
        match.gamma = origin
    else:
        match.beta = origin
    match.nodes.append(user)
    return user.outputs[0]


def _vector(view: View, value: ir.Value | None) -> Origin | None:
    """Return the constant vector behind a value; one plus a constant vector counts too."""
    origin = view.origin(value)
    if origin is None and value is not None:
        _, rest = _constant_term(view, value)
        origin = view.origin(rest)
    if origin is None or not origin.is_float or origin.tensor.size < 2:
        return None
    return origin if sum(size > 1 for size in origin.tensor.shape.numpy()) == 1 else None


def _folded_affine(view: View, match: _Match, node: ir.Node, scale: ir.Value) -> bool:
    """Match x·(γ/σ) + (β − mean·(γ/σ)), the way TensorFlow writes it; γ may be absent."""
    factor = scale
    if node.op_type == "Mul":
        other = node.inputs[1] if node.inputs[0] is scale else node.inputs[0]
        match.gamma = _vector(view, other)
        if match.gamma is None:
            return False
        match.nodes.append(node)
        factor = node.outputs[0]
    products = [user for user, _ in view.users(factor)]
    if len(products) != 2 or any(user.op_type != "Mul" for user in products):
        return False
    scaled = next((n for n in products if match.x in n.inputs), None)
    if scaled is None:
        return False
    shift = view.only_user(next(n for n in products if n is not scaled).outputs[0])
    if shift is None or shift.op_type != "Sub":
        return False
    match.beta = _vector(view, shift.inputs[0])
    final = view.only_user(shift.outputs[0])
    if match.beta is None or final is None or scaled.outputs[0] not in final.inputs:
        return False
    match.nodes += [*products, shift, final]
    match.output = final.outputs[0]
    return True
