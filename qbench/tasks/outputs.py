"""Checks and measures of raw model outputs that several tasks share."""

from __future__ import annotations

import numpy as np

from qbench.errors import MeasurementError, ModelError
from qbench.tasks.base import Array


def as_items(outputs: Array, items: int) -> Array:
    """Return outputs as float64 ``[items, ...]``.

    Raises:
        ModelError: If the first axis is not ``items`` long.
        MeasurementError: If a number is NaN or infinite; the message names the first item.
    """
    outputs = np.asarray(outputs)
    if outputs.ndim == 0 or outputs.shape[0] != items:
        raise ModelError(
            f"the task has {items} items, and the model's outputs have shape"
            f" {list(outputs.shape)}: the first axis must be the batch"
        )
    flat = outputs.reshape(items, -1)
    finite = np.isfinite(flat).all(axis=1)
    if not finite.all():
        raise MeasurementError(
            f"{items - int(finite.sum())} of {items} outputs hold NaN or infinity,"
            f" item {int(np.argmin(finite))} is the first"
        )
    return outputs.astype(np.float64)


def as_vectors(outputs: Array, items: int) -> Array:
    """Return outputs as float64 ``[items, width]``.

    Raises:
        ModelError: If an output is no vector.
        MeasurementError: If a number is NaN or infinite.
    """
    checked = as_items(outputs, items)
    if checked.ndim != 2:
        raise ModelError(
            f"this task needs one vector an item, [items, width], and the model's output is"
            f" {list(checked.shape)}: choose model.pooling (mean, cls, max or last) or"
            " model.output"
        )
    return checked


def as_rows(outputs: Array, items: int) -> Array:
    """Return outputs flattened to float64 ``[items, width]``, whatever their rank."""
    return as_items(outputs, items).reshape(items, -1)


def normalised(vectors: Array) -> Array:
    """Return vectors ``[..., width]`` at length one; zero vectors stay zero."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0))


def cosine_distance(reference: Array, outputs: Array) -> Array:
    """Return ``1 − cosine`` ``[n]`` of rows ``[n, width]``, exactly 0 where they are equal.

    NOTE: computed as half the squared distance of unit vectors, because ``1 − a·b`` leaves
    rounding noise of either sign on equal rows. A zero row has cosine 0 to all but a zero row.
    """
    first, second = normalised(reference), normalised(outputs)
    distance = 0.5 * np.square(first - second).sum(axis=-1)
    one_is_zero = first.any(axis=-1) != second.any(axis=-1)
    return np.where(one_is_zero, 1.0, distance)


def log_softmax(logits: Array) -> Array:
    """Return the logarithm of the softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def kl_divergence(reference: Array, outputs: Array) -> Array:
    """Return KL(softmax(reference) ‖ softmax(outputs)) over the last axis, in nats, ≥ 0."""
    log_p, log_q = log_softmax(reference), log_softmax(outputs)
    return np.asarray(np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=-1), 0.0))


def collapsed(outputs: Array) -> str | None:
    """Return why outputs ``[items, ...]`` carry no information, or ``None`` where they do.

    Outputs that do not depend on the item can still give a metric that looks plausible.
    """
    given = np.asarray(outputs, np.float64)
    if given.size == 0:
        return "the model gave no outputs"
    flat = given.reshape(len(given), -1)
    if not np.isfinite(flat).any():
        return "no output is a finite number"
    if not flat.any():
        return f"all outputs of all {len(flat)} items are zero"
    spread = np.ptp(flat, axis=0).max() if len(flat) > 1 else np.inf
    if spread <= 1e-6 * np.abs(flat).max():
        return f"all {len(flat)} items have the same output"
    if flat.shape[1] > 1 and np.ptp(flat, axis=1).max() <= 1e-6 * np.abs(flat).max():
        return f"every one of the {flat.shape[1]} elements of an output is the same number"
    return None
