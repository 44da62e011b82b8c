"""Files of a run that say how far its sweep can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qbench import storage
from qbench.records import Cause, Noise, ProxyAudit, RestoredView, from_dict, to_dict


class TrustFiles:
    """The part of a run folder that holds noise, the restored view and the audit of proxies."""

    path: Path

    def write_noise(self, noise: Noise) -> None:
        """Write the noise floors and what they say of layers."""
        storage.write_json(self._noise_path, to_dict(noise))

    def read_noise(self) -> Noise:
        """Return the noise floors.

        Raises:
            RunDirError: If they are missing, damaged, or of another version.
        """
        return from_dict(Noise, storage.read_json(self._noise_path, "qbench sweep"))

    def known_noise(self) -> Noise | None:
        """Return the noise floors, or ``None`` where none were measured."""
        return self.read_noise() if self._noise_path.is_file() else None

    def write_restored(self, view: RestoredView) -> None:
        """Write the view with all layers low and one restored."""
        storage.write_json(self._restored_path, to_dict(view))

    def read_restored(self) -> RestoredView:
        """Return the view with all layers low and one restored.

        Raises:
            RunDirError: If it is missing, damaged, or of another version.
        """
        return from_dict(RestoredView, storage.read_json(self._restored_path, "qbench sweep"))

    def known_restored(self) -> RestoredView | None:
        """Return the restored view, or ``None`` where it was not measured."""
        return self.read_restored() if self._restored_path.is_file() else None

    def write_audit(self, audit: ProxyAudit) -> None:
        """Write the audit of proxies."""
        storage.write_json(self._audit_path, to_dict(audit))

    def read_audit(self) -> ProxyAudit:
        """Return the audit of proxies.

        Raises:
            RunDirError: If it is missing, damaged, or of another version.
        """
        return from_dict(ProxyAudit, storage.read_json(self._audit_path, "qbench audit"))

    def known_audit(self) -> ProxyAudit | None:
        """Return the audit of proxies, or ``None`` where none was made."""
        return self.read_audit() if self._audit_path.is_file() else None

    def write_causes(self, causes: Sequence[Cause]) -> None:
        """Write why cells are in trouble."""
        storage.write_json(self._causes_path, {"causes": [to_dict(cause) for cause in causes]})

    def read_causes(self) -> tuple[Cause, ...]:
        """Return why cells are in trouble.

        Raises:
            RunDirError: If it is missing, damaged, or of another version.
        """
        content = storage.read_json(self._causes_path, "qbench sweep")
        return tuple(from_dict(Cause, item) for item in content["causes"])

    def known_causes(self) -> tuple[Cause, ...]:
        """Return why cells are in trouble; none where it was not looked for."""
        return self.read_causes() if self._causes_path.is_file() else ()

    @property
    def _causes_path(self) -> Path:
        return self.path / "causes.json"

    @property
    def _noise_path(self) -> Path:
        return self.path / "noise.json"

    @property
    def _restored_path(self) -> Path:
        return self.path / "restored.json"

    @property
    def _audit_path(self) -> Path:
        return self.path / "audit.json"
