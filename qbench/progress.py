"""How a pipeline tells where it is; what is shown is for the faces to decide."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Hears of stages and steps."""

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin a stage of ``total`` steps; ``None`` where the number is not known."""

    def step(self, note: str = "") -> None:
        """One step is done."""


class Silence:
    """Hears and says nothing."""

    def stage(self, name: str, total: int | None = None) -> None:
        """Do nothing."""

    def step(self, note: str = "") -> None:
        """Do nothing."""
