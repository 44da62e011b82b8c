"""How far a sweep can be trusted: noise floors, both views of a layer, and proxies audited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qbench.records.measurements import Estimate


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """What an unchanged graph gives in another batch composition.

    Attributes:
        what: ``reference``, or the format of an engine with all layers in that format.
        composition: How the same items were batched anew.
        divergence: From the same graph in the sweep's own composition; mean a sample.
        flip_rate: Share of samples whose answer changed.
        from_reference: Divergence from the reference in this composition; engines only.
        samples: Divergence of each sample, shape [n].
    """

    what: str
    composition: str
    divergence: Estimate
    flip_rate: float
    from_reference: Estimate | None = None
    samples: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CalibrationSpread:
    """One cell measured with clips from several draws of the calibration split.

    Attributes:
        layer: Name of the layer.
        format: Name of the format.
        divergence: Mean divergence with the clips of the whole split.
        draws: Mean divergence with the clips of each draw.
    """

    layer: str
    format: str
    divergence: float
    draws: tuple[float, ...]

    @property
    def low(self) -> float:
        """The smallest divergence over the draws."""
        return min(self.draws)

    @property
    def high(self) -> float:
        """The largest divergence over the draws."""
        return max(self.draws)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Whether a layer is called sensitive in a format, and why.

    Attributes:
        layer: Name of the layer.
        format: Name of the format.
        sensitive: Whether both halves of the sweep split call it so.
        ranks: Its rank by divergence in each half, 1 for the most divergent.
        reason: In words.
    """

    layer: str
    format: str
    sensitive: bool
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Noise:
    """Everything that moves a sweep's numbers without a layer's doing.

    Attributes:
        floors: Each graph in each other composition.
        calibration: Cells over draws of the calibration split.
        calls: What two halves of the sweep split say of each layer and format.
        remarks: What was not covered, and why.
        key: Hash of what the numbers depend on.
    """

    floors: tuple[NoiseFloor, ...] = ()
    calibration: tuple[CalibrationSpread, ...] = ()
    calls: tuple[LayerCall, ...] = ()
    remarks: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True, slots=True)
class RestoredRecord:
    """One layer back in high precision while every other one is low.

    Attributes:
        layer: Name of the layer.
        kind: Its kind.
        format: Format of all other layers.
        divergence: Divergence from the reference with the layer restored.
        gain: What restoring wins: divergence with all low minus this one, paired.
        single: Divergence with this layer alone low.
        interaction: ``single − gain``, paired: above zero the layer costs less in company.
        flip_rate: Share of samples whose answer differs from the reference's.
        view: Always ``restored``.
        samples: Divergence of each sample, shape [n].
    """

    layer: str
    kind: str
    format: str
    divergence: Estimate
    gain: Estimate
    single: Estimate | None
    interaction: Estimate | None
    flip_rate: float
    view: str = "restored"
    samples: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoredView:
    """All layers low, one restored at a time.

    Attributes:
        format: The low format.
        lowered: Layers that take it.
        all_low: Divergence from the reference with all of them low.
        records: One a restored layer.
        remarks: What was not covered, and why.
        key: Hash of what the numbers depend on.
    """

    format: str
    lowered: int
    all_low: Estimate
    records: tuple[RestoredRecord, ...] = ()
    remarks: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True, slots=True)
class ProxyCell:
    """The proxies of one cell; all are larger where a layer should be more sensitive.

    Attributes:
        layer: Name of the layer.
        format: Name of the format.
        divergence: Mean divergence.
        drop: Drop of the task metric, or ``None`` where its interval holds zero.
        proxies: Value of each proxy that the cell has.
    """

    layer: str
    format: str
    divergence: float
    drop: float | None
    proxies: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProxyScore:
    """How well a proxy orders cells.

    Attributes:
        proxy: Name of the proxy.
        format: The format whose cells were ordered, or ``all``.
        with_divergence: Spearman's ρ with divergence over all cells that have the proxy.
        with_drop: Spearman's ρ with the metric's drop over resolvable cells; ``None`` below two.
        alone: Whether it may be used alone for these cells.
        reason: In words.
    """

    proxy: str
    format: str
    with_divergence: Estimate
    with_drop: Estimate | None
    alone: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ProxyAudit:
    """The audit of all proxies of a run.

    Attributes:
        metric: The task metric whose drop was used.
        threshold: ρ above which the whole interval must lie for a proxy to be used alone.
        scores: One a proxy and format, ``all`` first.
        skipped: Why a proxy is missing, by its name.
        cells: The values themselves.
        partial: Cells whose divergence is an estimate from a part of the samples.
    """

    metric: str
    threshold: float
    scores: tuple[ProxyScore, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    cells: tuple[ProxyCell, ...] = ()
    partial: int = 0
