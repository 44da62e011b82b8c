"""The metrics: unit, direction, range, and a statistic that is fast under resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from qbench.errors import DataError, InputError, unknown_name
from qbench.tasks.base import Array, Metric

_CHUNK = 4_000_000  # elements that a statistic holds at a time


def mean_statistic(payload: Array) -> Array:
    """Return the mean ``[...]`` of payloads ``[..., n, 1]``."""
    return np.asarray(np.asarray(payload, np.float64)[..., 0].mean(axis=-1))


def macro_f1_statistic(payload: Array) -> Array:
    """Return the macro F1 ``[...]`` of payloads ``[..., n, 2]``: predicted class, true class.

    The mean runs over the classes that occur in either column of a set, as scikit-learn's does.
    """
    payload = np.asarray(payload)
    lead, n = payload.shape[:-2], payload.shape[-2]
    pairs = payload.reshape(-1, n, 2).astype(np.int64)
    classes = int(pairs.max(initial=0)) + 1
    step = max(1, _CHUNK // max(classes, n))
    parts = [_macro_f1(pairs[i : i + step], classes) for i in range(0, len(pairs), step)]
    return np.concatenate(parts).reshape(lead)


def _macro_f1(pairs: Array, classes: int) -> Array:
    sets = len(pairs)
    offset = np.arange(sets)[:, None] * classes
    predicted, true = pairs[..., 0] + offset, pairs[..., 1] + offset
    size = sets * classes
    hits = np.bincount(true[predicted == true], minlength=size)
    total = np.bincount(predicted.ravel(), minlength=size)
    total += np.bincount(true.ravel(), minlength=size)
    f1 = 2 * hits / np.maximum(total, 1)
    seen = (total > 0).reshape(sets, classes).sum(axis=1)
    return np.asarray(f1.reshape(sets, classes).sum(axis=1) / np.maximum(seen, 1))


def spearman_statistic(payload: Array) -> Array:
    """Return Spearman's rank correlation ``[...]`` of payloads ``[..., n, 2]``; ties share ranks.

    A column that is constant ranks nothing: the correlation is then 0.
    """
    payload = np.asarray(payload, np.float64)
    lead, n = payload.shape[:-2], payload.shape[-2]
    pairs = payload.reshape(-1, n, 2)
    step = max(1, _CHUNK // max(n, 1))
    parts = [_spearman(pairs[i : i + step]) for i in range(0, len(pairs), step)]
    return np.concatenate(parts).reshape(lead)


def _spearman(pairs: Array) -> Array:
    first, second = (_centred_ranks(pairs[..., column]) for column in (0, 1))
    scale = np.sqrt((first * first).sum(axis=1) * (second * second).sum(axis=1))
    product = (first * second).sum(axis=1)
    return np.asarray(np.divide(product, scale, out=np.zeros_like(scale), where=scale > 0))


def _centred_ranks(values: Array) -> Array:
    """Return twice the average ranks ``[sets, n]``, centred.

    A bootstrap repeats few distinct values: they are found in the first sets, and counting them
    is much cheaper than sorting every set.
    """
    sets, n = values.shape
    distinct = np.unique(values[:64])
    codes = np.minimum(np.searchsorted(distinct, values), len(distinct) - 1)
    if len(distinct) > 4 * n or not np.array_equal(distinct[codes], values):
        return _sorted_ranks(values)
    flat = (codes + np.arange(sets)[:, None] * len(distinct)).ravel()
    counts = np.bincount(flat, minlength=sets * len(distinct)).reshape(sets, -1)
    twice = 2 * np.cumsum(counts, axis=1) - counts
    ranks = twice.ravel()[flat].reshape(sets, n).astype(np.float64)
    return np.asarray(ranks - n)


def _sorted_ranks(values: Array) -> Array:
    sets, n = values.shape
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    new = np.ones((sets, n), dtype=bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group = np.cumsum(new.ravel()) - 1
    size = np.bincount(group)
    first = np.flatnonzero(new.ravel()) % n
    twice = (2 * first + size)[group].reshape(sets, n).astype(np.float64)
    ranks = np.empty_like(twice)
    np.put_along_axis(ranks, order, twice, axis=1)
    return np.asarray(ranks - n)


MRR = Metric("mrr", "", True, 0.0, 1.0, mean_statistic)
NDCG = Metric("ndcg@10", "", True, 0.0, 1.0, mean_statistic)
SPEARMAN = Metric("spearman", "", True, -1.0, 1.0, spearman_statistic)
ACCURACY = Metric("accuracy", "", True, 0.0, 1.0, mean_statistic)
MACRO_F1 = Metric("macro_f1", "", True, 0.0, 1.0, macro_f1_statistic)
CROSS_ENTROPY = Metric("cross_entropy", "nat", False, 0.0, math.inf, mean_statistic)
COSINE = Metric("cosine", "", True, -1.0, 1.0, mean_statistic)
MSE = Metric("mse", "", False, 0.0, math.inf, mean_statistic)
KL = Metric("kl", "nat", False, 0.0, math.inf, mean_statistic)


def put_first(metrics: Sequence[Metric], chosen: str | None) -> tuple[Metric, ...]:
    """Return ``metrics`` with the one called ``chosen`` first.

    Raises:
        InputError: If there is no such metric; the message names near misses.
    """
    if chosen is None:
        return tuple(metrics)
    by_name: Mapping[str, Metric] = {metric.name: metric for metric in metrics}
    if chosen not in by_name:
        raise InputError(unknown_name("metric", chosen, by_name) + " for this task")
    return (by_name[chosen], *(metric for metric in metrics if metric.name != chosen))


def check_expectation(metric: str, value: float, expected: float, tolerance: float) -> None:
    """Check the reference's value of a metric against what the user expects of the model.

    A wrong tokenizer, pooling or label order shows here, before anything is measured on it.

    Raises:
        DataError: If they differ by more than ``tolerance``, or the value is not a number.
    """
    if math.isnan(value) or abs(value - expected) > tolerance:
        raise DataError(
            f"the reference model gives {metric} = {value:.6g}, and {expected:.6g} ± {tolerance:g}"
            " is expected: check tokenizer, pooling, label order and data, or change task.expect"
        )
