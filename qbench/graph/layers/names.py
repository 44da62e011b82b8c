"""Names of layers: module paths where metadata, weights or nodes tell them."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from qbench.graph.layers.found import Found, name_of
from qbench.graph.layers.groups import Owners
from qbench.graph.layers.view import Origin, View
from qbench.records import Kind

_SCOPES = "pkg.torch.onnx.name_scopes"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[\w@\-]+)*\.[A-Za-z_]\w*")
_PLAIN = frozenset({"weight", "bias", "kernel", "gamma", "beta", "scale"})
_WEIGHTED = (Kind.LINEAR, Kind.CONV, Kind.EMBEDDING, Kind.LAYERNORM)
_SUFFIX = {Kind.ACTIVATION: "activation", Kind.SOFTMAX: "softmax", Kind.LAYERNORM: "norm"}


class Namer:
    """Gives every layer a unique name and the module path that it lies in."""

    def __init__(self, view: View, owners: Owners, groups: Sequence[Sequence[Found]]) -> None:
        """Read module paths from the first use of each layer."""
        self._view = view
        self._owners = owners
        self._prefix = _wrapper(view, groups)
        self._paths: dict[Found, str] = {}
        self._taken: set[str] = set()
        claimed = Counter(path for uses in groups for path in set(_stored_paths(uses[0])))
        for uses in groups:
            if uses[0].kind in _WEIGHTED:
                path = next(filter(None, _weight_paths(uses[0], claimed)), "")
                if path:
                    self._paths |= dict.fromkeys(uses, self._short(path))

    def name(self, use: Found) -> tuple[str, str]:
        """Return the name of the layer whose first use is ``use``, and its module path."""
        if use in self._paths:
            path = self._paths[use]
            return self._unique(path), path
        if use.kind in _WEIGHTED and use.weight is not None:
            return self._unique(f"{use.kind}.{name_of(use.weight.value)}"), ""
        if use.role:
            return self._in_module(use, self._attention(use), use.role)
        if use.kind is Kind.RESIDUAL_ADD:
            return self._in_module(use, self._container(use), "residual")
        path = self._told(use)
        suffix = _SUFFIX.get(use.kind, str(use.kind))
        if path and not self._holds_layers(path):
            return self._unique(path), path
        return self._in_module(use, path or self._container(use), suffix)

    def _in_module(self, use: Found, module: str | None, part: str) -> tuple[str, str]:
        if module is None:
            return self._unique(f"{part}.{name_of(use.anchor)}"), ""
        return self._unique(f"{module}.{part}" if module else part), module

    def _unique(self, name: str) -> str:
        candidate, number = name, 0
        while candidate in self._taken:
            number += 1
            candidate = f"{name}_{number}"
        self._taken.add(candidate)
        return candidate

    def _short(self, path: str) -> str:
        if self._prefix and (path == self._prefix or path.startswith(self._prefix + ".")):
            return path[len(self._prefix) + 1 :]
        return path

    def _told(self, use: Found) -> str:
        """Return the module path that the node itself tells, or ""."""
        return self._short(_scope(use.anchor) or _slashed(use.anchor.name or ""))

    def _attention(self, use: Found) -> str | None:
        told = self._told(use)
        if told and (use.role != "softmax" or self._holds_layers(told)):
            return told
        paths = [self._paths[layer] for layer in self._sources(use) if layer in self._paths]
        if not paths:
            return _parent(told) if told else None
        common = os.path.commonprefix([path.split(".") for path in paths])
        return ".".join(common if len(set(paths)) > 1 else common[:-1])

    def _sources(self, use: Found) -> list[Found]:
        layers = [self._owners.before(value) for value in use.reads if value is not None]
        return [layer for layer in layers if layer is not None]

    def _container(self, use: Found) -> str | None:
        """Return the module that holds an addition or a function: told, or its source's parent."""
        told = self._told(use)
        if told:
            return told
        before = self._owners.before(use.output)
        path = None if before is None else self._paths.get(before)
        return None if path is None else _parent(path)

    def _holds_layers(self, path: str) -> bool:
        return any(p == path or p.startswith(path + ".") for p in self._paths.values())


def _weight_paths(use: Found, claimed: Mapping[str, int]) -> Iterable[str]:
    """Yield module paths of a layer with a weight, the most trustworthy first.

    A path that the weights of several layers tell (tied or equal constants that an exporter
    merged) is trusted less than what the node says.
    """
    stored = list(_stored_paths(use))
    yield from (path for path in stored if claimed[path] == 1)
    yield _scope(use.anchor)
    yield _slashed(use.anchor.name or "")
    yield from stored


def _stored_paths(use: Found) -> Iterable[str]:
    for origin in (use.weight, use.bias):
        if origin is not None:
            yield from _origin_paths(origin)


def _origin_paths(origin: Origin) -> Iterable[str]:
    folded = [name for name in _listed(origin.value, _FOLDED) if _DOTTED.fullmatch(name)]
    if len(folded) == 1:
        yield _without_parameter(folded[0])
    name = origin.value.name or ""
    if _DOTTED.fullmatch(name):
        yield _without_parameter(name)


def _without_parameter(name: str) -> str:
    """Drop ``.weight`` and its like; a parameter of another name is part of the layer's name."""
    module, _, parameter = name.rpartition(".")
    return module if parameter in _PLAIN else name


def _listed(thing: ir.Value | ir.Node, key: str) -> list[str]:
    text = thing.metadata_props.get(key, "")
    if not text:
        return []
    try:
        items = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return []
    return [item for item in items if isinstance(item, str)] if isinstance(items, list) else []


def _scope(node: ir.Node) -> str:
    """Return the module path that the exporter wrote on a node, or ""."""
    scopes = _listed(node, _SCOPES)
    return scopes[-2] if len(scopes) >= 2 and not scopes[-2].startswith("_") else ""


def _slashed(name: str) -> str:
    """Return the module path in a node name such as ``/encoder/layer.0/MatMul``, or ""."""
    parts = [part for part in name.replace("_._", ".").split("/") if part]
    return ".".join(parts[:-1]) if "/" in name and len(parts) > 1 else ""


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _wrapper(view: View, groups: Sequence[Sequence[Found]]) -> str:
    """Return the attribute that a bare export wrapper holds the model in, or "".

    It must begin the path of every named weight and every scope that the exporter wrote.
    """
    firsts = {path.split(".")[0] for uses in groups for path in _stored_paths(uses[0])}
    scopes = [_listed(node, _SCOPES) for node in view.nodes]
    firsts |= {s[1] for s in scopes if len(s) > 2 and s[0] == ""}
    told = any(len(s) > 2 for s in scopes)
    return firsts.pop() if told and len(firsts) == 1 else ""
