"""Which uses are one layer: a model may run one block many times."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import onnx_ir as ir

from qbench.graph.layers.found import Claims, Found
from qbench.graph.layers.view import Origin, View
from qbench.records import Kind

_STORED = (Kind.LINEAR, Kind.CONV, Kind.EMBEDDING)
_SOURCES = (Kind.LINEAR, Kind.CONV)
_END = {"scores": 0, "k": -2, "v": -1}


def storage_of(origin: Origin | None) -> Hashable:
    """Return what tells two weights of one storage from two weights of equal content."""
    if origin is None:
        return None
    tensor = origin.value.const_value
    if isinstance(tensor, ir.ExternalTensor) and tensor.length:
        return ("file", str(tensor.path), tensor.offset, tensor.length)
    return ("value", id(origin.value) if tensor is None else id(tensor))


class Owners:
    """The linear or convolution that every other use follows and precedes.

    The one with the highest position among a node's ancestors can be reached without passing
    another: whatever lies between would come later still.
    """

    def __init__(self, view: View, claims: Claims) -> None:
        """Index the linears and convolutions."""
        self._view = view
        self._by_position = {view.position[layer.anchor]: layer for layer in claims.of(*_SOURCES)}
        self._mask = view.mask(layer.anchor for layer in self._by_position.values())

    def before(self, value: ir.Value | None) -> Found | None:
        """Return the last linear or convolution that a value depends on, or ``None``."""
        node = None if value is None else value.producer()
        if node is None or node not in self._view.position:
            return None
        mask = self._view.ancestors[self._view.position[node]] & self._mask
        return self._by_position[mask.bit_length() - 1] if mask else None

    def after(self, value: ir.Value) -> Found | None:
        """Return the first linear or convolution that depends on a value, or ``None``."""
        mask = self._view.after(value) & self._mask
        return self._by_position[(mask & -mask).bit_length() - 1] if mask else None


def place_of(view: View, use: Found) -> tuple[int, int]:
    """Return where a use stands in the order of layers."""
    return view.position[use.anchor], _END.get(use.role, 0)


def group_uses(view: View, claims: Claims) -> list[list[Found]]:
    """Return the uses of each layer, both in topological order.

    Uses of one weight are one layer. A use without a weight follows the linear or convolution
    before it: where that one is used several times, so is what follows it. Normalisations
    share a scale by chance where equal constants were merged, so they must follow or precede
    uses of one layer too.
    """
    uses = sorted(claims.found, key=lambda use: place_of(view, use))
    union = _Union(uses)
    stored: dict[Hashable, Found] = {}
    for use in uses:
        if use.kind in _STORED:
            union.join(use, stored.setdefault(_weight_key(use), use))
    _join_followers(view, claims, uses, union)
    groups: dict[Found, list[Found]] = {}
    for use in uses:
        groups.setdefault(union.root(use), []).append(use)
    return list(groups.values())


def _weight_key(use: Found) -> Hashable:
    settings = tuple(sorted((key, str(value)) for key, value in use.attributes.items()))
    return use.kind, use.op, storage_of(use.weight), settings


def _join_followers(view: View, claims: Claims, uses: Sequence[Found], union: _Union) -> None:
    owners = Owners(view, claims)
    shared = {root for root, members in union.groups() if len(members) > 1}
    ordinals: dict[Hashable, int] = defaultdict(int)
    firsts: dict[Hashable, Found] = {}
    for use in uses:
        for key in _keys(use, owners, union, shared, ordinals):
            union.join(use, firsts.setdefault(key, use))


def _keys(
    use: Found,
    owners: Owners,
    union: _Union,
    shared: set[Found],
    ordinals: dict[Hashable, int],
) -> Iterable[Hashable]:
    """Yield what a use without a stored weight has in common with others of its layer."""
    if use.kind in _STORED:
        return
    if use.kind is Kind.KV:
        yield "tensor", use.role, use.output
    before = owners.before(use.output)
    if use.weight is not None:
        gamma = storage_of(use.weight)
        for side, owner in (("before", before), ("after", owners.after(use.output))):
            if owner is not None and union.root(owner) in shared:
                yield side, use.op, gamma, union.root(owner)
    elif before is not None and union.root(before) in shared:
        ordinal = ordinals[before, use.kind, use.role]
        ordinals[before, use.kind, use.role] += 1
        yield "follower", use.kind, use.op, use.role, union.root(before), ordinal


def tied_names(groups: Iterable[tuple[str, Found]]) -> dict[str, str]:
    """Return the tie of each layer name whose weight shares its storage with another layer's."""
    by_storage: dict[Hashable, list[str]] = defaultdict(list)
    for name, use in groups:
        if use.kind in _STORED:
            by_storage[storage_of(use.weight)].append(name)
    return {name: names[0] for names in by_storage.values() if len(names) > 1 for name in names}


class _Union:
    """Disjoint sets of uses; the root of a set is its earliest member."""

    def __init__(self, uses: Sequence[Found]) -> None:
        self._rank = {use: index for index, use in enumerate(uses)}
        self._parent = {use: use for use in uses}

    def root(self, use: Found) -> Found:
        while self._parent[use] is not use:
            self._parent[use] = self._parent[self._parent[use]]
            use = self._parent[use]
        return use

    def join(self, first: Found, second: Found) -> None:
        low, high = sorted((self.root(first), self.root(second)), key=self._rank.__getitem__)
        self._parent[high] = low

    def groups(self) -> list[tuple[Found, list[Found]]]:
        ordered = sorted(self._parent, key=lambda use: self._rank[self.root(use)])
        return [(root, list(members)) for root, members in itertools.groupby(ordered, self.root)]
