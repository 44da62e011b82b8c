"""What an engine takes and gives: read from its graph, then seen by running it.

A graph says neither how long a request may be, nor which axes of its outputs are as long, nor
whether a row's answer depends on its neighbours or on padding. A few runs do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from qbench.errors import MeasurementError, ModelError
from qbench.runtime.ort import Session
from qbench.serving.request import Encoded, Feeds
from qbench.serving.server.contract import DATATYPES, Contract, Merging, Tensor

_LONGEST = 512
#: Sizes of free dimensions; the first one on which the engine runs begins the search.
_SIZES = (3, 8, 32, 64, 128, 224)
_PROBES = 4
#: Padded positions of a probe, beside the row's own.
_PADDING = 9
#: Differences as shares of an output's largest number. Quantized activations depend on the batch a
#: little, which is no reason to run rows apart; a row that reads another one differs by far more.
_OTHER_ANSWER = 0.5
_NOTICEABLE = 0.02
_SPREADS = 10

Runner: TypeAlias = Callable[[Sequence[Encoded]], dict[str, np.ndarray]]


def find_contract(
    session: Session,
    bounds: Mapping[str, int],
    *,
    longest: int | None = None,
    pad_id: int = 0,
    source: str = "the engine",
) -> Contract:
    """Return what an engine takes and gives, after running it on requests of several lengths.

    Args:
        session: The engine.
        bounds: Rows of the table that an input looks up, by input.
        longest: Longest request in tokens, if the engine runs on it; else the longest that it
            runs on. ``None`` stands for 512.
        pad_id: Token id of padded positions.
        source: What the user gave, for messages.

    Raises:
        ModelError: If the graph has no batch dimension, a type that cannot be sent, or does
            not run on requests of the shapes that it states.
    """
    one_row = _check_batch(session, source)
    inputs = tuple(
        Tensor(spec.name, spec.dtype, _dims(spec.shape), bounds.get(spec.name))
        for spec in session.inputs
    )
    ordered = tuple(sorted(inputs, key=lambda one: (one.key != "input_ids", None not in one.dims)))
    outputs = tuple(
        Tensor(one.name, _output_dtype(one, source), _dims(tuple(one.shape)))
        for one in session.raw.get_outputs()
    )
    contract = Contract(ordered, outputs, _merging(ordered, one_row), one_row, pad_id=pad_id)
    try:
        contract = _with_lengths(contract, session, longest or _LONGEST)
        return contract if one_row else _with_neighbours(contract, session)
    except MeasurementError as error:
        raise ModelError(
            f"{source} does not run on requests of the shapes that its graph states: "
            f"{' '.join(str(error).split())[:400]}"
        ) from error


def _dims(shape: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) and size >= 0 else None for size in shape[1:])


def _check_batch(session: Session, source: str) -> bool:
    """Return whether a batch is one row; refuse a graph without a batch dimension."""
    if not session.inputs:
        raise ModelError(f"{source}: the graph has no input: there is nothing to ask it")
    shapes = {spec.name: tuple(spec.shape) for spec in session.inputs}
    for spec in session.inputs:
        if spec.dtype not in DATATYPES:
            raise ModelError(f"{source}: input {spec.name!r} is {spec.dtype}, which cannot be sent")
        if not spec.shape:
            raise ModelError(
                f"{source}: input {spec.name!r} is a scalar, or of no stated rank: the graph has "
                "no batch dimension; export it with one, as [batch, …]"
            )
    firsts = {shape[0] for shape in shapes.values()}
    fixed = {size for size in firsts if isinstance(size, int)}
    if fixed - {1} or (fixed and len(firsts) > 1):
        told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ModelError(
            f"{source}: the first dimension is no free batch ({told}); export it with a batch "
            "dimension of free size"
        )
    return bool(fixed)


def _output_dtype(output: Any, source: str) -> str:
    kinds = {"tensor(float)": "float32", "tensor(double)": "float64"}
    dtype = kinds.get(output.type, output.type.removeprefix("tensor(").removesuffix(")"))
    if dtype not in DATATYPES:
        raise ModelError(f"{source}: output {output.name!r} is {output.type}; it cannot be sent")
    return str(dtype)


def _merging(inputs: Sequence[Tensor], one_row: bool) -> Merging:
    """Return how rows may share a batch as far as the graph tells."""
    free = [tensor for tensor in inputs if None in tensor.dims]
    if one_row:
        return Merging.ALONE
    if not free:
        return Merging.EQUAL
    lines = all(tensor.dims == (None,) for tensor in inputs)
    if lines and any(tensor.is_mask for tensor in inputs):
        return Merging.PADDED
    leading = all(tensor.dims[0] is None and None not in tensor.dims[1:] for tensor in free)
    return Merging.EQUAL if leading else Merging.ALONE


def _runner(contract: Contract, session: Session) -> Runner:
    def run(encoded: Sequence[Encoded]) -> dict[str, np.ndarray]:
        outputs = session.run(contract.pad(encoded))
        for name, array in outputs.items():
            if array.ndim < 1 or array.shape[0] != len(encoded):
                raise ModelError(
                    f"output {name!r} has shape {list(array.shape)} for a batch of "
                    f"{len(encoded)}: the graph has no batch dimension there; export it with one"
                )
        return outputs

    return run


def _with_lengths(contract: Contract, session: Session, wanted: int) -> Contract:
    """Return the contract with the lengths that the engine takes, and the axes that follow them."""
    run = _runner(contract, session)

    def run_on(length: int) -> dict[str, np.ndarray]:
        return run([contract.sample(length, seed) for seed in range(1 if contract.one_row else 2)])

    if not any(None in tensor.dims for tensor in contract.inputs):
        run_on(1)
        return replace(contract, sequence_axes={})
    short = next((size for size in _SIZES if _runs(run_on, size)), _SIZES[0])
    first = run_on(short)
    limit = _longest(run_on, short, wanted)
    lengths = [n for n in (short + 2, limit) if short < n <= limit and _runs(run_on, n)]
    contract = replace(contract, longest=limit, shortest=min(short, limit))
    if not lengths:
        axes: dict[str, tuple[int, ...]] = dict.fromkeys(first, ())
        return replace(contract, merging=_stricter(contract.merging), sequence_axes=axes)
    return _with_axes(contract, (short, first), (lengths[0], run_on(lengths[0])))


def _with_axes(
    contract: Contract,
    one: tuple[int, Mapping[str, np.ndarray]],
    other: tuple[int, Mapping[str, np.ndarray]],
) -> Contract:
    """Return the contract with the axes that were as long as the request in both runs."""
    axes: dict[str, tuple[int, ...]] = {}
    for name, array in one[1].items():
        sizes = list(zip(array.shape[1:], other[1][name].shape[1:], strict=True))
        axes[name] = tuple(n for n, pair in enumerate(sizes) if pair == (one[0], other[0]))
        if any(a != b and (a, b) != (one[0], other[0]) for a, b in sizes):
            contract = replace(contract, merging=_stricter(contract.merging))
    return replace(contract, sequence_axes=axes)


def _stricter(merging: Merging) -> Merging:
    """Return the merging under which nothing is cut: an axis follows the length in its own way."""
    return Merging.EQUAL if merging is Merging.PADDED else merging


def _longest(run_on: Callable[[int], Any], short: int, wanted: int) -> int:
    """Return the longest request, up to the one wanted, that the engine runs on; by bisection."""
    if wanted <= short or _runs(run_on, wanted):
        return wanted
    good, bad = short, wanted
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _runs(run_on, middle) else (good, middle)
    return good


def _runs(run: Callable[[Any], Any], given: Any) -> bool:
    try:
        run(given)
    except MeasurementError:
        return False
    return True


def _with_neighbours(contract: Contract, session: Session) -> Contract:
    """Return the contract with a merging under which rows keep their answers in any batch."""
    if contract.merging is Merging.EQUAL and _lengths_are_apart(contract, session):
        return replace(contract, merging=Merging.ALONE)
    if contract.merging is Merging.ALONE:
        return contract
    run = _runner(contract, session)
    short = contract.fixed_length or contract.shortest
    padded = min(short + _PADDING, contract.longest or short)
    beside, behind = [], []
    for seed in range(_PROBES):
        row = contract.sample(short, seed)
        alone = run([row])
        neighbour = contract.sample(short, seed + _PROBES)
        beside.append(difference(_last(run([neighbour, row])), _last(alone)))
        if contract.merging is Merging.PADDED and padded > short:
            longer = contract.sample(padded, seed + _PROBES)
            own = contract.cut(_last(run([longer, row])), short)
            behind.append(difference(own, _last(alone)))
    spread = statistics.median(beside)
    if spread > _OTHER_ANSWER:
        return replace(contract, merging=Merging.ALONE)
    if behind and statistics.median(behind) > max(_SPREADS * spread, _NOTICEABLE):
        return replace(contract, merging=Merging.EQUAL)
    return contract


def _lengths_are_apart(contract: Contract, session: Session) -> bool:
    """Return whether inputs may differ in length within one request, as question and passage do."""
    free = [tensor for tensor in contract.inputs if None in tensor.dims]
    longest, short = contract.longest or 0, contract.shortest
    masked = any(tensor.is_mask for tensor in free)
    if masked or len(free) < 2 or short + len(free) - 1 > longest:
        return False
    lengths = {tensor.key: short + place for place, tensor in enumerate(free)}
    samples = [
        {
            tensor.key: contract.sample(lengths.get(tensor.key, short), seed)[tensor.key]
            for tensor in contract.inputs
        }
        for seed in range(2)
    ]
    feeds: Feeds = {
        tensor.name: np.stack([one[tensor.key] for one in samples]) for tensor in contract.inputs
    }
    return _runs(session.run, feeds)


def _last(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of the last row of a batch."""
    return {name: array[-1] for name, array in outputs.items()}


def difference(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    """Return how far a row's outputs differ, the worst one's: 0 for equal ones.

    Numbers differ by a share of the output's largest, whole ones by the share that is another.
    """
    return max(_difference(found[name], wanted[name]) for name in wanted)


def _difference(found: np.ndarray, wanted: np.ndarray) -> float:
    if found.shape != wanted.shape:
        return np.inf
    if not wanted.size:
        return 0.0
    if wanted.dtype.kind != "f":
        return float(np.mean(found != wanted))
    one, other = found.astype(np.float64), wanted.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        gap = np.nan_to_num(np.where(same, 0.0, np.abs(one - other)), nan=np.inf)
    scale = np.abs(other[np.isfinite(other)]).max(initial=0.0) or 1.0
    return float(gap.max() / scale)
