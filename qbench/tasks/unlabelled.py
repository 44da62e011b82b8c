"""No labels: how far outputs lie from those of the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qbench.tasks.base import Array, Encoding, Metric, Scores, Text, Tokenizer
from qbench.tasks.items import read_items
from qbench.tasks.metrics import COSINE, KL, MSE
from qbench.tasks.outputs import as_rows, cosine_distance, kl_divergence

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Texts without labels; every metric compares with the outputs of the reference."""

    ids: tuple[str, ...]
    texts: tuple[Text, ...]
    encoded: tuple[Encoding, ...]
    metrics: tuple[Metric, ...] = (COSINE, MSE)
    name: str = "none"

    @property
    def n(self) -> int:
        """Number of texts."""
        return len(self.ids)

    @property
    def items(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def score(self, outputs: Array, reference: Array | None = None) -> Scores:
        """Return cosine, squared error and KL against the reference, an item each.

        Outputs of any shape are flattened. The answer is the largest element.

        Raises:
            ValueError: If no reference is given.
        """
        if reference is None:
            raise ValueError("without labels the outputs of the reference model are needed")
        after, before = as_rows(outputs, self.items), as_rows(reference, self.items)
        payloads = {
            COSINE.name: 1.0 - cosine_distance(before, after)[:, None],
            MSE.name: np.square(before - after).mean(axis=1)[:, None],
        }
        if KL in self.metrics:
            payloads[KL.name] = kl_divergence(before, after)[:, None]
        return Scores(payloads, np.argmax(after, axis=1))

    def divergence(self, reference: Array, outputs: Array) -> Array:
        """Return ``1 − cosine`` of the outputs ``[n]``."""
        return cosine_distance(as_rows(reference, self.items), as_rows(outputs, self.items))


def make_unlabelled(
    rows: pandas.DataFrame, tokenizer: Tokenizer, logits: bool = False
) -> Unlabelled:
    """Return the task of a split with columns ``id``, ``text`` and maybe ``text_pair``.

    Args:
        rows: The split.
        tokenizer: The model's tokenizer.
        logits: Whether outputs are logits, so that KL means something.
    """
    items = read_items(rows, tokenizer)
    metrics = (COSINE, MSE, KL) if logits else (COSINE, MSE)
    return Unlabelled(items.ids, items.texts, items.encoded, metrics)
