"""What a plan may lose and how long its batches may take, as people write it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from qbench.errors import ConfigError


class MaxDrop(BaseModel):
    """The largest loss of the task metric that is allowed.

    Attributes:
        amount: A fraction of the reference value where ``relative``, else the metric's own unit.
        relative: Whether it was written with ``%``.
    """

    model_config = ConfigDict(frozen=True)
    amount: float
    relative: bool

    def margin(self, reference: float) -> float:
        """Return the allowed drop in the metric's unit, given the reference's value."""
        return self.amount * abs(reference) if self.relative else self.amount

    def __str__(self) -> str:
        return f"{self.amount * 100:g} %" if self.relative else f"{self.amount:g}"


def parse_max_drop(given: str | float) -> MaxDrop:
    """Return a drop written as ``"5 %"`` (of the reference) or ``0.02`` (in the metric's unit).

    Raises:
        ConfigError: If it is neither, or negative.
    """
    text = str(given).strip()
    relative = text.endswith("%")
    try:
        amount = float(text.removesuffix("%"))
    except ValueError:
        amount = float("nan")
    if not 0 <= amount < float("inf"):
        raise ConfigError(
            f"max_drop: got {given!r}; allowed: a share of the reference value such as '5 %', "
            "or a number ≥ 0 in the metric's own unit such as 0.02"
        )
    return MaxDrop(amount=amount / 100 if relative else amount, relative=relative)


class MaxLatency(BaseModel):
    """The longest time of a batch that is allowed.

    Attributes:
        amount: A fraction of the high precision's time where ``relative``, else milliseconds.
        relative: Whether it was written with ``%``.
    """

    model_config = ConfigDict(frozen=True)
    amount: float
    relative: bool

    def share(self, reference_ms: float) -> float:
        """Return the fraction of the high precision's time, given that time in milliseconds."""
        return self.amount if self.relative else self.amount / reference_ms

    def __str__(self) -> str:
        return f"{self.amount * 100:g} %" if self.relative else f"{self.amount:g} ms"


def parse_max_latency(given: str) -> MaxLatency:
    """Return a time written as ``"60 %"`` (of the high precision's) or ``"3.5 ms"`` (a batch).

    Raises:
        ConfigError: If it is neither, or not above zero.
    """
    text = given.strip().lower()
    relative = text.endswith("%")
    try:
        amount = float(text.removesuffix("%") if relative else text.removesuffix("ms"))
    except ValueError:
        amount = float("nan")
    if not (relative or text.endswith("ms")) or not 0 < amount < float("inf"):
        raise ConfigError(
            f"max_latency: got {given!r}; allowed: a share of the high precision's time such as "
            "'60 %', or the milliseconds of a batch such as '3.5 ms'"
        )
    return MaxLatency(amount=amount / 100 if relative else amount, relative=relative)
