"""Reading the result of ModelOpt's ``auto_quantize``: a format for each module it searched.

Three forms are read: the state that ``auto_quantize`` returns (or its ``best`` or ``recipe``
alone), saved with ``torch.save``; the same as JSON with recipes by name; and the configuration that
``get_auto_quantize_config`` gives, as JSON. ModelOpt need not be installed.

NOTE: ``torch.load(weights_only=True)`` refuses a checkpoint, since it holds ModelOpt's own classes,
and without it a file may run code. Here every class becomes an inert record and every function call
an empty one: nothing of the file is run, and its tensors are not read.
"""

from __future__ import annotations

import collections
import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qbench.backends import Backend, applicability
from qbench.errors import PlanError, did_you_mean
from qbench.planning.costs import fused_layers, ties_of
from qbench.records import Layer, Layers, Status

#: Our format of each recipe of ModelOpt; ``NONE`` keeps the high precision.
RECIPES = {
    "INT8_DEFAULT_CFG": "int8",
    "INT8_SMOOTHQUANT_CFG": "int8",
    "INT8_WEIGHT_ONLY_CFG": "w8a16",
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG": "w4a16",
    "INT4_AWQ_CFG": "w4a16",
    "FP8_DEFAULT_CFG": "fp8",
}
_KEPT = "NONE"
#: Our format of (bits of the weight, bits of the activation) as its configuration spells them.
_BITS = {(8, 8): "int8", (8, None): "w8a16", (4, None): "w4a16", ((4, 3), (4, 3)): "fp8"}
_FORMS = (
    "the state that auto_quantize returns, saved with torch.save or as JSON ('best', "
    "'candidate_stats'), or what get_auto_quantize_config gives, as JSON ('quant_cfg')"
)


def read_modelopt(path: Path) -> dict[str, str]:
    """Return the recipe of each module, as our format's name, or ``NONE`` where it is kept.

    Raises:
        PlanError: If the file is missing or none of the forms, or a recipe has no format of ours;
            all such recipes are named.
    """
    content = _content_of(path)
    if isinstance(content.get("quant_cfg"), Sequence):
        return _from_entries(content["quant_cfg"], path)
    stats = content.get("candidate_stats", {})
    if not isinstance(stats, Mapping):
        raise PlanError(f"{path}: 'candidate_stats' is no mapping; allowed: {_FORMS}")
    found: dict[str, str] = {}
    strange: dict[str, str] = {}
    for name, recipe in _best_of(content, path).items():
        own = _recipe_name(recipe)
        modules = _modules_of(stats.get(name)) or [str(name).removesuffix(".quant_recipe")]
        form = _KEPT if own == _KEPT else RECIPES.get(own)
        for module in modules:
            if form is None:
                strange[module] = own
            else:
                found[module] = form
    _refuse_strange(path, strange)
    return found


def _modules_of(candidate: object) -> list[str]:
    """Return the modules that ModelOpt searched together; none where the file does not tell."""
    names = candidate.get("module_names") if isinstance(candidate, Mapping) else None
    told = names if isinstance(names, (list, tuple)) else [names] if names else []
    return [str(name) for name in told]


def _best_of(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the recipe of each searched group: of a state, of its ``best``, or by itself."""
    best = content.get("best", content)
    recipes = best.get("recipe") if isinstance(best, Mapping) else None
    if recipes is None and content and all(str(k).endswith(".quant_recipe") for k in content):
        recipes = content
    if not isinstance(recipes, Mapping):
        raise PlanError(f"{path}: holds no result of ModelOpt; allowed: {_FORMS}")
    if not recipes:
        raise PlanError(
            f"{path}: the search has no best recipe; a checkpoint of auto_quantize holds scores "
            "alone: save the state that it returns"
        )
    return recipes


def formats_of(
    recipes: Mapping[str, str], layers: Layers, backend: Backend, origin: str
) -> dict[str, str]:
    """Return the format of every layer; layers that the result does not name keep the high one.

    A module is a layer's by its name or module path, or by the end of it where a wrapper added
    or removed a prefix.

    Raises:
        PlanError: If a module is no layer or several, or a layer cannot take its format on the
            backend; all of them are named.
    """
    formats = dict.fromkeys(layers.by_name(), backend.high_precision)
    problems = []
    for module, recipe in recipes.items():
        found = _layers_of(module, layers)
        if not found and recipe == _KEPT:
            continue  # a pooler, say, that the graph does without: nothing is lost
        if len(found) != 1:
            words = f"fits {len(found)} layers: {', '.join(x.name for x in found)}"
            if not found:
                words = f"is no layer of this model{did_you_mean(module, formats)}"
            problems.append(f"module {module!r} {words}")
            continue
        form = backend.high_precision if recipe == _KEPT else recipe
        status, reason = applicability(found[0].kind, form, backend)
        if status is not Status.OK:
            problems.append(f"layer {found[0].name!r} cannot take {form}: {reason}")
        formats[found[0].name] = form
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:12])
        more = f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise PlanError(
            f"{origin}: {len(problems)} of {len(recipes)} modules cannot be taken over (layers: "
            f"qbench layers)\n{shown}{more}"
        )
    _check_groups(formats, layers, backend, origin)
    return formats


def _check_groups(
    formats: Mapping[str, str], layers: Layers, backend: Backend, origin: str
) -> None:
    """Refuse formats that differ within layers of one storage, or that the backend joins."""
    for bond, names in {**ties_of(layers), **fused_layers(layers, backend)}.items():
        if len({formats[name] for name in names}) > 1:
            told = ", ".join(f"{name} as {formats[name]}" for name in names)
            raise PlanError(
                f"{origin}: layers of one group ({bond}) must take one format on {backend.name}; "
                f"got {told}: search them as one group, or plan for a backend that keeps them apart"
            )


def _layers_of(module: str, layers: Layers) -> list[Layer]:
    exact = [x for x in layers.layers if module in (x.name, x.module)]
    weighted = [x for x in exact if x.weight] or exact
    if weighted:
        return weighted[:1] if len({x.name for x in weighted}) == 1 else weighted
    return [
        x
        for x in layers.layers
        if x.weight and (x.name.endswith(f".{module}") or module.endswith(f".{x.name}"))
    ]


def _content_of(path: Path) -> Mapping[str, Any]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*")])
        raise PlanError(f"no such file: {path}{near}; allowed: {_FORMS}") from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}; allowed: {_FORMS}") from None
    try:
        content = _unpickled(path) if zipfile.is_zipfile(path) else json.loads(raw)
    except (ValueError, KeyError, EOFError, AttributeError, TypeError, IndexError) as error:
        raise _unreadable(path, error) from None
    except (pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from None
    if not isinstance(content, Mapping):
        raise PlanError(f"{path}: holds no result of ModelOpt; allowed: {_FORMS}")
    return content


def _unreadable(path: Path, error: Exception) -> PlanError:
    return PlanError(f"{path}: cannot be read ({error}); allowed: {_FORMS}")


def _recipe_name(recipe: object) -> str:
    """Return a recipe's name: ``INT8_DEFAULT_CFG(effective-bits: 8.0)`` without its bits."""
    if isinstance(recipe, _Inert):
        recipe = recipe.state.get("_str_repr", "")
    return str(recipe).partition("(")[0].strip() or _KEPT


def _from_entries(entries: Sequence[Any], path: Path) -> dict[str, str]:
    """Return formats from quantizers by module: which of weight and input is on, in which bits."""
    bits: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name = str(entry.get("quantizer_name", "")) if isinstance(entry, Mapping) else ""
        module, _, quantizer = name.rpartition(".")
        if "*" in name or quantizer not in ("weight_quantizer", "input_quantizer"):
            continue
        config = entry.get("cfg") or {}
        number = config.get("num_bits", 8) if isinstance(config, Mapping) else "a sequence"
        number = tuple(number) if isinstance(number, list) else number
        bits.setdefault(module, {})[quantizer] = number if entry.get("enable", True) else None
    found, strange = {}, {}
    for module, own in bits.items():
        pair = own.get("weight_quantizer"), own.get("input_quantizer")
        if pair == (None, None):
            found[module] = _KEPT
        elif pair in _BITS:
            found[module] = _BITS[pair]
        else:
            strange[module] = f"weight bits {pair[0]}, activation bits {pair[1]}"
    if not found and not strange:
        raise PlanError(f"{path}: names no module; allowed: {_FORMS}")
    _refuse_strange(path, strange)
    return found


def _refuse_strange(path: Path, strange: Mapping[str, str]) -> None:
    if strange:
        told = "; ".join(f"{module}: {recipe}" for module, recipe in list(strange.items())[:8])
        raise PlanError(
            f"{path}: {len(strange)} modules have recipes without a format here ({told}); known: "
            f"{', '.join(RECIPES)}, {_KEPT}"
        )


class _Inert:
    """Stands for an object of any class: its state is kept and nothing is run."""

    def __init__(self, *args: object, **keywords: object) -> None:
        self.args, self.state = args, dict(keywords)

    def __setstate__(self, state: object) -> None:
        own = state[0] if isinstance(state, tuple) and state else state
        self.state = dict(own) if isinstance(own, Mapping) else {}

    def __call__(self, *args: object, **keywords: object) -> _Inert:
        return _Inert(*args, **keywords)

    def append(self, item: object) -> None:
        """Take an item of a list-like class and drop it."""

    def extend(self, items: object) -> None:
        """Take items of a list-like class and drop them."""

    def __setitem__(self, key: object, value: object) -> None:
        """Take an item of a mapping-like class and drop it."""


class _Reader(pickle.Unpickler):
    """Reads the structure of a pickle without its code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a plain container for Python's own, an inert class for any other name."""
        plain = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("collections", "defaultdict"): _default_dict,
            ("builtins", "set"): set,
            ("builtins", "frozenset"): frozenset,
        }
        return plain.get((module, name), type(name, (_Inert,), {}))

    def persistent_load(self, pid: object) -> Any:
        """Return an inert record in place of a tensor's storage."""
        return _Inert(pid)


def _default_dict(*_: object) -> dict[Any, Any]:
    return {}


def _unpickled(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("data.pkl")]
        if not names:
            raise ValueError("it is no file of torch.save")
        with archive.open(names[0]) as stream:
            return _Reader(stream).load()
