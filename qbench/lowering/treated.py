"""A lowering with a remedy: the graph is prepared, and then lowered as the format always is.

Calibrators bring clips of their own. SmoothQuant and AWQ move a scale from the activation to the
weight, AWQ may clip the blocks of the weight besides; what follows is the plain lowering.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from qbench.errors import PlanError
from qbench.formats import Format
from qbench.lowering import lowering_for
from qbench.lowering.awq import clip_blocks
from qbench.lowering.base import Change, Lowering, Refusal
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import linear_forms, present
from qbench.lowering.rows import apply_rows
from qbench.lowering.smooth import Readers, as_product, product_weight, replace_weight, smooth
from qbench.records import Layer, Status, Treatment
from qbench.records.packed import unpack
from qbench.remedies import check_treatment


def treated(
    lowering: Lowering, treatment: Treatment | None, readers: Readers | None = None
) -> Lowering:
    """Return a lowering with a remedy; the lowering itself where there is none.

    Args:
        lowering: The plain lowering of a format.
        treatment: The remedy.
        readers: What smoothing may do to other products that read the same activation.

    Raises:
        PlanError: If the remedy is unknown, or not for this format.
    """
    if treatment is None:
        return lowering
    wrong = check_treatment(treatment, lowering.format.name)
    if wrong:
        raise PlanError(wrong)
    if treatment.block is not None:
        lowering = lowering_for(lowering.format.name, treatment.block)
    return TreatedLowering(lowering, treatment, readers or Readers())


class TreatedLowering:
    """A lowering with a remedy.

    Args:
        plain: The format's own lowering.
        treatment: The remedy.
        readers: What smoothing may do to other products that read the same activation.
    """

    def __init__(self, plain: Lowering, treatment: Treatment, readers: Readers) -> None:
        self.plain, self.treatment, self.readers = plain, treatment, readers
        self.format: Format = plain.format

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format so, or ``None``."""
        refusal = self.plain.requires(model, layer)
        if refusal is not None:
            return refusal
        if not self.treatment.vectors:
            return None
        weight = product_weight(model, layer)
        if isinstance(weight, str):
            return Refusal(Status.NOT_APPLICABLE, f"{self.treatment.variant}: {weight}")
        for name, text in self.treatment.vectors.items():
            size = unpack(text).size
            if size != len(weight):
                return Refusal(
                    Status.INVALID,
                    f"vector {name!r} of {self.treatment.variant} has {size} numbers, and its "
                    f"products sum over {len(weight)}",
                    "delete the layer's `treatment`, or plan again",
                )
        return None

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Prepare the graph in place, then lower it."""
        remedy = self.treatment.remedy
        if remedy == "rows":
            return apply_rows(model, layer)
        own = {**clips, **self.treatment.clips}
        if remedy not in ("smoothquant", "awq"):
            return self.plain.apply(model, layer, own)
        if not present(model, layer):
            return self.plain.apply(model, layer, own)
        return self._scaled(model, layer, own)

    def _scaled(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Move the scale, clip the blocks, lower; only what the treatment has vectors for."""
        vectors, where, extra = self.treatment.vectors, "", 0
        if "scale" in vectors:
            scale = unpack(vectors["scale"])
            smoothed = smooth(model, layer, scale, self.readers)
            layer = smoothed.layer
            where = "scaled in the normalisation" if smoothed.folded else "scaled by a Mul"
            extra = 0 if smoothed.folded else 4 * scale.size
        if "importance" in vectors:
            layer = _clip_weight(model, layer, self.treatment, self.format.weight_bits)
        change = self.plain.apply(model, layer, clips)
        change = replace(change, weight_bytes=change.weight_bytes + extra)
        return _told(change, where)

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        return self.plain.ensures(model, layer)


def _clip_weight(model: ir.Model, layer: Layer, treatment: Treatment, bits: int) -> Layer:
    """Clip the blocks of a layer's weight in place; the importance is of the smoothed x."""
    importance = unpack(treatment.vectors["importance"])
    assert treatment.block is not None  # checked where the treatment was taken
    editor = GraphEditor(model, layer.name)
    weight: ir.Value | None = None
    uses = []
    for use in present(model, layer):
        for form in linear_forms(editor, [use]):
            if weight is None:
                clipped = clip_blocks(form.weight, importance, bits, treatment.block)
                weight = editor.constant("clipped_weight", clipped)
            replace_weight(editor, form.node, weight)
            uses.append(as_product(form, use))
    return replace(layer, occurrences=tuple(uses))


def _told(change: Change, remark: str) -> Change:
    if not change.changed:
        return change
    words = [text for text in (change.remark, remark) if text]
    return replace(change, remark="; ".join(words))
