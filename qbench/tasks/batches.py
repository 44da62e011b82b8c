"""Frozen batches: encoded items turned into the feeds that a graph asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qbench.errors import DataError, ModelError
from qbench.tasks.base import Array, Encoding


class InputSpec(Protocol):
    """An input of a graph, as the model states it."""

    @property
    def name(self) -> str:
        """Name of the input."""
        ...

    @property
    def dtype(self) -> str:
        """Element type by its numpy name."""
        ...

    @property
    def shape(self) -> tuple[int | str | None, ...]:
        """Sizes: a number where fixed."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some items, ready to run.

    Attributes:
        rows: Indices of the items, ``[b]``. A graph with a fixed batch may get more rows than
            that: the rows from ``b`` on repeat the last item and their outputs are to be dropped.
        feeds: Array of each graph input, ``[batch, sequence]``.
        tokens: Tokens of the items.
        padded_tokens: Positions that the graph computes, padding and repeated rows included.
    """

    rows: Array
    feeds: Mapping[str, Array]
    tokens: int
    padded_tokens: int


@dataclass(frozen=True, slots=True)
class _Signature:
    """How the graph wants its feeds: canonical source of each input, fixed sizes or ``None``."""

    sources: Mapping[str, str]
    dtypes: Mapping[str, np.dtype[np.generic]]
    batch: int | None
    sequence: int | None


_SYNTHESISED = ("attention_mask", "token_type_ids", "position_ids")
_ALIASES = {"input_mask": "attention_mask", "segment_ids": "token_type_ids"}
_STATE = ("past_key_values", "past_", "cache_", "use_cache_branch", "decoder_input_ids")


def make_batches(
    encoded: Sequence[Encoding],
    input_specs: Sequence[InputSpec],
    *,
    max_tokens: int,
    equal_length: bool = True,
    pad_id: int = 0,
) -> tuple[Batch, ...]:
    """Group items into batches of at most ``max_tokens`` positions, at least one item each.

    Items are sorted by length (equal lengths keep their order). By default only items of equal
    length share a batch, so nothing is padded; a graph with a fixed sequence gets padding and a
    mask whatever was asked, and one with a fixed batch gets its last rows repeated.

    Args:
        encoded: Token ids, and what else the tokenizer gives, of each item.
        input_specs: Inputs of the graph.
        max_tokens: Budget of a batch in positions, padding included.
        equal_length: Whether only items of equal length may share a batch.
        pad_id: Token id of padded positions.

    Raises:
        ModelError: If the graph asks for an input that nothing gives, or has unusable shapes.
        DataError: If there are no items, an encoding is empty, or longer than a fixed sequence.
    """
    if not encoded:
        raise DataError("there is nothing to run: the data has no items")
    signature = _signature(input_specs, encoded[0])
    lengths = np.array([len(item["input_ids"]) for item in encoded])
    _check_lengths(lengths, signature)
    padding = signature.sequence is not None or not equal_length
    if not equal_length and "attention_mask" not in signature.sources.values():
        raise ModelError(
            "the graph has no attention_mask input, so padded positions would count:"
            " ask for batches of equal length"
        )
    groups = _groups(lengths, signature, max_tokens, padding)
    return tuple(_batch(encoded, rows, signature, pad_id) for rows in groups)


def _signature(specs: Sequence[InputSpec], item: Encoding) -> _Signature:
    given = [name for name in item if name != "input_ids"]
    known = {"input_ids", *given, *_SYNTHESISED}
    sources = {spec.name: _ALIASES.get(spec.name, spec.name) for spec in specs}
    unknown = [name for name, source in sources.items() if source not in known]
    if unknown:
        raise ModelError(_unknown_inputs(unknown, [spec.name for spec in specs], known))
    if "input_ids" not in sources.values():
        raise ModelError(
            f"the graph has no input input_ids; its inputs are {', '.join(sources) or 'none'}:"
            " rename the input of token ids in the ONNX file"
        )
    for spec in specs:
        if len(spec.shape) != 2:
            raise ModelError(
                f"graph input {spec.name!r} has shape {list(spec.shape)}, and [batch, sequence]"
                " is what this version feeds"
            )
    return _Signature(
        sources=sources,
        dtypes={spec.name: np.dtype(spec.dtype) for spec in specs},
        batch=_fixed(specs, 0, "batch"),
        sequence=_fixed(specs, 1, "sequence"),
    )


def _unknown_inputs(unknown: Sequence[str], wanted: Sequence[str], known: Iterable[str]) -> str:
    if any(name.startswith(_STATE) or ".key" in name for name in unknown):
        return (
            f"the graph takes a cache or decoder state ({unknown[0]!r} and {len(unknown) - 1}"
            " more inputs), which this version cannot feed: export the model without a cache"
        )
    return (
        f"the graph asks for {', '.join(map(repr, unknown))}, and nothing gives that;"
        f" graph inputs: {', '.join(wanted)}; the tokenizer gives or qbench makes:"
        f" {', '.join(sorted(known))}. Rename the graph's inputs, or use a tokenizer"
        " (--tokenizer file.py:callable) that gives them"
    )


def _fixed(specs: Sequence[InputSpec], axis: int, what: str) -> int | None:
    sizes = {spec.shape[axis]: spec.name for spec in specs if isinstance(spec.shape[axis], int)}
    sizes = {size: name for size, name in sizes.items() if isinstance(size, int) and size > 0}
    if len(sizes) > 1:
        listed = ", ".join(f"{name}: {size}" for size, name in sizes.items())
        raise ModelError(f"the graph's inputs have different fixed {what} sizes ({listed})")
    return next((size for size in sizes if isinstance(size, int)), None)


def _check_lengths(lengths: Array, signature: _Signature) -> None:
    if lengths.min() == 0:
        raise DataError(f"item {int(lengths.argmin())} has no tokens: its text cannot be run")
    if signature.sequence is not None and lengths.max() > signature.sequence:
        raise DataError(
            f"item {int(lengths.argmax())} has {lengths.max()} tokens, and the graph's sequence is"
            f" fixed at {signature.sequence}: cut texts with --max-length {signature.sequence}"
            " (model.max_length)"
        )


def _groups(lengths: Array, signature: _Signature, max_tokens: int, padding: bool) -> list[Array]:
    """Return the item indices of each batch, shortest items first."""
    order = np.argsort(lengths, kind="stable")
    groups: list[list[int]] = []
    for row in order:
        length = signature.sequence or int(lengths[row])
        current = groups[-1] if groups else []
        size = len(current) + 1
        fits = size * length <= max_tokens if signature.batch is None else size <= signature.batch
        same = padding or (current and lengths[current[-1]] == lengths[row])
        if current and fits and same:
            current.append(int(row))
        else:
            groups.append([int(row)])
    return [np.array(group, np.int64) for group in groups]


def _batch(encoded: Sequence[Encoding], rows: Array, signature: _Signature, pad_id: int) -> Batch:
    members = [encoded[row] for row in rows]
    tokens = sum(len(item["input_ids"]) for item in members)
    repeated = 0 if signature.batch is None else signature.batch - len(members)
    members += [members[-1]] * repeated
    length = signature.sequence or max(len(item["input_ids"]) for item in members)
    feeds = {
        name: _feed(source, members, length, pad_id).astype(signature.dtypes[name])
        for name, source in signature.sources.items()
    }
    for feed in feeds.values():
        feed.setflags(write=False)
    return Batch(rows, feeds, tokens, len(members) * length)


def _feed(source: str, members: Sequence[Encoding], length: int, pad_id: int) -> Array:
    """Return ``[batch, length]`` int64 of one canonical input, made up where it is not given."""
    feed = np.full((len(members), length), pad_id if source == "input_ids" else 0, np.int64)
    for row, item in enumerate(members):
        size = len(item["input_ids"])
        if source in item:
            feed[row, :size] = item[source]
        elif source == "attention_mask":
            feed[row, :size] = 1
        elif source == "position_ids":
            feed[row] = np.arange(length)
    return feed


def gather_outputs(batches: Sequence[Batch], outputs: Iterable[Array]) -> Array:
    """Return the outputs of all batches ``[items, ...]`` in item order, repeated rows dropped.

    Args:
        batches: The batches, together holding every item once.
        outputs: One array ``[batch, ...]`` a batch, in the same order.

    Raises:
        ModelError: If outputs of different batches differ in more than the batch axis.
    """
    parts = [
        np.asarray(output)[: len(batch.rows)]
        for batch, output in zip(batches, outputs, strict=True)
    ]
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        listed = ", ".join(str(list(shape)) for shape in sorted(shapes)[:3])
        raise ModelError(
            f"the model's output depends on the sequence length (shapes {listed} … of an item):"
            " choose model.pooling (mean, cls, max or last) or model.output"
        )
    order = np.concatenate([batch.rows for batch in batches])
    gathered = np.empty((len(order), *parts[0].shape[1:]), parts[0].dtype)
    gathered[order] = np.concatenate(parts)
    return gathered


def batches_sha256(batches: Sequence[Batch]) -> str:
    """Return the hash of the batches: items, order, composition and every fed number."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(f"rows {batch.rows.shape}".encode())
        digest.update(np.ascontiguousarray(batch.rows, np.int64).tobytes())
        for name in sorted(batch.feeds):
            feed = batch.feeds[name]
            digest.update(f"{name} {feed.dtype.str} {feed.shape}".encode())
            digest.update(np.ascontiguousarray(feed).tobytes())
    return digest.hexdigest()
