"""Duplicates merged by content, and an identity for each sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qbench.data.columns import Form
from qbench.data.content import ID_LENGTH, content_hash
from qbench.errors import DataError

if TYPE_CHECKING:
    import pandas


def merge_samples(frame: pandas.DataFrame, form: Form) -> tuple[pandas.DataFrame, tuple[str, ...]]:
    """Return rows without duplicates, with columns ``sample`` (content hash) and ``id``.

    A sample is a query (its answers are several rows), or a text with its pair. Equal pairs with
    different scores become one with the mean score; equal texts with different labels say nothing
    and are left out.

    Raises:
        DataError: If one id stands for two samples, or nothing is left.
    """
    keys = ["query"] if form is Form.RETRIEVAL else [k for k in ("text", "text_pair") if k in frame]
    parts = zip(*(frame[key] for key in keys), strict=True)
    remarks: tuple[tuple[int, str], ...] = ()
    frame = frame.assign(sample=[content_hash(*texts) for texts in parts])
    with_id = _identified(frame)
    if form is Form.RETRIEVAL:
        merged = with_id.drop_duplicates(["sample", "answer"])
    elif form is Form.SIMILARITY:
        merged, remarks = _mean_scores(with_id)
    else:
        merged, remarks = _same_labels(with_id)
    if merged.empty:
        raise DataError("no row is left after texts with contradicting labels are left out")
    twice = len(with_id) - len(merged) - sum(count for count, _ in remarks)
    said = (f"{twice} duplicate rows merged",) if twice else ()
    return merged.reset_index(drop=True), (*said, *(text for _, text in remarks))


def _identified(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Give every row the id of its sample: the smallest given one, else its content's hash."""
    if "id" not in frame:
        return frame.assign(id=[sample[:ID_LENGTH] for sample in frame["sample"]])
    by_sample = frame.groupby("sample")["id"].min()
    shared = by_sample[by_sample.duplicated()]
    if len(shared):
        raise DataError(
            f"id {shared.iloc[0]!r} stands for two rows with different texts: ids must be unique"
        )
    return frame.assign(id=frame["sample"].map(by_sample))


def _mean_scores(
    frame: pandas.DataFrame,
) -> tuple[pandas.DataFrame, tuple[tuple[int, str], ...]]:
    grouped = frame.groupby("sample")["score"]
    differ = int((grouped.nunique() > 1).sum())
    # Sorted first, so that the order of rows does not change the last bit of a mean.
    means = frame.sort_values("score").groupby("sample")["score"].mean()
    merged = frame.drop_duplicates("sample")
    merged = merged.assign(score=merged["sample"].map(means))
    said = f"{differ} pairs stand there with different scores: their mean is used"
    return merged, ((0, said),) if differ else ()


def _same_labels(
    frame: pandas.DataFrame,
) -> tuple[pandas.DataFrame, tuple[tuple[int, str], ...]]:
    if "label" not in frame:
        return frame.drop_duplicates("sample"), ()
    labels = frame.groupby("sample")["label"].nunique()
    wrong = frame["sample"].map(labels) > 1
    merged = frame[~wrong].drop_duplicates("sample")
    count = int(wrong.sum())
    said = f"{count} rows have a text that stands there with different labels: left out"
    return merged, ((count, said),) if count else ()
