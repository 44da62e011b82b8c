"""The plan file: YAML that a person can read, edit and build again.

History of the format:
    1: first version; published as ``qbench/schemas/plan-1.schema.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from qbench.backends import Backend, applicable_formats, backend_named
from qbench.errors import PlanError
from qbench.formats import format_named
from qbench.planning.plancheck import check_document, check_plan
from qbench.records import Kind, Layers, Plan, PlanLayer, from_dict, to_dict
from qbench.remedies import in_use
from qbench.storage import atomic_write
from qbench.yamlfile import read_yaml

_HEADER = """\
# The plan of one model for {backend}: the format of every layer. The engine is built from it.
#
# To change it, edit the `format` of a layer; then build and verify the engine again:
#     qbench build RUN
#     qbench verify RUN
# Formats that {backend} can run, by kind of layer:
{formats}
# `reason`, `divergence`, `alternatives`, `predicted`, `measured` and `verified` are evidence for
# the formats as they were planned: they do not change the engine, an edit does not update them.
# `clips` are the calibrated ranges that int8 needs; they are listed wherever they are known.
# `treatment` is a remedy for the format that was planned: a clip or a scale of its own. With
# another format it does nothing; delete it to lower the layer plainly.
# Every layer must stay listed, under its own name. Schema: qbench/schemas/plan-1.schema.json
"""


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan file whole, or leave what was there.

    Raises:
        PlanError: If the plan could not be read back: a duplicate layer, a format that does not
            apply, int8 without a clip.
        InputError: If the disk is full.
    """
    document = _document(plan)
    check_document(document, str(path))
    check_plan(plan, str(path))
    text = _header(plan) + yaml.dump(
        _with_flow(document),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    with atomic_write(path) as file:
        file.write(text.encode())


def read_plan(
    path: Path,
    layers: Layers | None = None,
    backend: Backend | str | None = None,
    *,
    model_sha256: str | None = None,
) -> Plan:
    """Return the plan in a file, hand edits included, after checking that it can be built.

    Args:
        path: The file.
        layers: The layers of the model; without them names, kinds and ties are taken on trust.
        backend: The backend that is asked for, or ``None`` for the plan's own.
        model_sha256: Hash of the model that is to be built, or ``None`` for any.

    Returns:
        The plan, its layers in the model's order.

    Raises:
        PlanError: With every problem found: not YAML, a wrong type, an unknown key, layer,
            format or kind (with near misses), a layer that is missing or given twice, a format
            that the backend cannot run or that does not apply to the kind, tied layers with
            different formats, a format that needs a clip and has none, another model or backend.
    """
    path = Path(path)
    document = read_yaml(path, "plan", PlanError)
    check_document(document, str(path))
    model = document.pop("model")
    plan = from_dict(
        Plan,
        {**document, "model_source": model.get("source", ""), "model_sha256": model["sha256"]},
    )
    name = backend.name if isinstance(backend, Backend) else backend
    check_plan(plan, str(path), layers=layers, backend=name, model_sha256=model_sha256)
    if layers is None:
        return plan
    rows = {row.name: row for row in plan.layers}
    return replace(plan, layers=tuple(rows[layer.name] for layer in layers.layers))


def plan_sha256(plan: Plan) -> str:
    """Return the hash of what determines the engine, and of nothing else.

    That is: the backend, the model's hash, the session options, and each layer's format, with
    its clips where the format needs a range, and with its block and its treatment where it has
    them. Reasons and evidence do not count.
    """
    content = {
        "backend": plan.backend,
        "model": plan.model_sha256,
        "session_options": dict(sorted(plan.session_options.items())),
        "layers": sorted(_determining(row) for row in plan.layers),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _determining(row: PlanLayer) -> list[Any]:
    clips = sorted(row.clips.items()) if format_named(row.format).needs_range else []
    content = [row.name, row.format, [[tensor, float(clip)] for tensor, clip in clips]]
    block: list[Any] = [] if row.block is None else [row.block]
    own = in_use(row)
    if own is None:
        return [*content, *block]
    return [
        *content,
        *block,
        own.variant,
        [[tensor, float(clip)] for tensor, clip in sorted(own.clips.items())],
        sorted(own.vectors.items()),
        own.block,
    ]


def _document(plan: Plan) -> dict[str, Any]:
    rest = plain(to_dict(plan))
    layers = rest.pop("layers")
    model = {"source": rest.pop("model_source"), "sha256": rest.pop("model_sha256")}
    history = rest.pop("history")
    version, backend = rest.pop("version"), rest.pop("backend")
    for row in layers:
        for key in ("clips", "alternatives"):
            if not row[key]:
                del row[key]
        if row["block"] is None:
            del row["block"]
        if row["treatment"] is None:
            del row["treatment"]
        else:
            row["treatment"] = {key: item for key, item in row["treatment"].items() if item}
    order = ("name", "kind", "format", "block", "reason", "divergence", "alternatives")
    evidence = ("clips", "treatment")
    listed = [{key: row[key] for key in (*order, *evidence) if key in row} for row in layers]
    head = {"version": version, "backend": backend, "model": model}
    return {**head, **rest, "layers": listed, "history": history}


def plain(value: Any) -> Any:
    """Return a value with NumPy scalars and arrays as Python's own numbers and lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _header(plan: Plan) -> str:
    backend = backend_named(plan.backend)
    kinds_of: dict[tuple[str, ...], list[str]] = {}
    for kind in Kind:
        kinds_of.setdefault(applicable_formats(kind, backend), []).append(str(kind))
    common = max(kinds_of, key=lambda formats: len(kinds_of[formats]))
    lines = [
        f"#     {', '.join(kinds) if formats != common else 'every other kind'}: "
        f"{', '.join(formats)}"
        for formats, kinds in sorted(kinds_of.items(), key=lambda item: item[0] == common)
    ]
    return _HEADER.format(backend=backend.name, formats="\n".join(lines))


class _Flow(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """Writes shared values twice rather than as anchors, and small mappings on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_flow(dumper: _Dumper, data: _Flow) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True)


_Dumper.add_representer(_Flow, _represent_flow)


def _with_flow(document: Mapping[str, Any]) -> dict[str, Any]:
    layers = [
        {key: _Flow(item) if isinstance(item, dict) else item for key, item in row.items()}
        for row in document["layers"]
    ]
    history = [_Flow(entry) for entry in document["history"]]
    return {**document, "layers": layers, "history": history}
