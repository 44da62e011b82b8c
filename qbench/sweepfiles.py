"""The part of a run folder that holds the sweep: its journal, and the machine it was made on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qbench.errors import RunDirError
from qbench.journal import Journal, differences
from qbench.lock import give_lock, take_lock
from qbench.provenance import machine_type
from qbench.records import SweepRecord, from_dict, to_dict


class SweepFiles:
    """The sweep of a run: records that are appended, one at a time, under one key."""

    path: Path

    def lock(self) -> None:
        """Take the run for writing until this process ends or calls ``unlock``.

        Raises:
            RunDirError: If another process has it; its pid and host are named.
        """
        take_lock(self.path)

    def unlock(self) -> None:
        """Give the run back to other processes."""
        give_lock(self.path)

    def start_journal(self, key: Mapping[str, Any]) -> None:
        """Begin or continue the journal of the sweep; the type of this machine joins its key.

        A line that a killed process left half written is cut off; whole lines stay.

        Args:
            key: What the records depend on: hashes of weights and data, configuration, versions.

        Raises:
            RunDirError: If the journal was made with another key (each difference is named) or
                edited, or another process writes to the run.
            InputError: If the disk is full.
        """
        self.lock()
        self.check_machine()
        self._journal.start({**to_dict(key), "machine": machine_type()})

    def check_machine(self) -> None:
        """Check that the records were made on a machine of this type; without any, all is well.

        Raises:
            RunDirError: If they were not: numbers of two types are never mixed.
        """
        if not self.has_journal:
            return
        key = self._journal.read_key()
        told = differences({"machine": key.get("machine")}, {"machine": machine_type()})
        if key and told:
            raise RunDirError(
                f"{self.path} was measured on another type of machine, whose kernels give other "
                f"numbers: {told}. Go on there, read it here with `qbench report`, or use another "
                "run id"
            )

    def append_sweep(self, record: SweepRecord) -> None:
        """Add one record to the journal; it is on the disk when this returns.

        Raises:
            InputError: If the disk is full; earlier records stay whole.
            RunDirError: If ``start_journal`` was not called.
        """
        self._journal.append(to_dict(record))

    def read_sweep(self) -> tuple[SweepRecord, ...]:
        """Return the journal's plain records; the last one of each (layer, format) counts.

        A last line that a killed process left half written is passed over.

        Raises:
            RunDirError: If it is missing, edited, or of another version.
        """
        plain = (r for r in self._read_records() if r.treatment is None)
        return tuple({(r.layer, r.format): r for r in plain}.values())

    def read_remedies(self) -> tuple[SweepRecord, ...]:
        """Return the journal's cells with a remedy; the last one of each variant counts.

        Raises:
            RunDirError: As ``read_sweep``.
        """
        treated = (r for r in self._read_records() if r.treatment is not None)
        return tuple({(r.layer, r.format, r.variant): r for r in treated}.values())

    def _read_records(self) -> Iterator[SweepRecord]:
        _, lines = self._journal.read()
        return (from_dict(SweepRecord, line) for line in lines)

    @property
    def has_journal(self) -> bool:
        """Whether a sweep was begun here: what it was begun with must not change."""
        return self._journal.path.is_file()

    def read_journal_key(self) -> dict[str, Any]:
        """Return the key that the journal was started with.

        Raises:
            RunDirError: If there is no journal, or its first line was edited.
        """
        return self._journal.read_key()

    @property
    def _journal(self) -> Journal:
        return Journal(self.path / "sweep.jsonl", made_by="qbench sweep")
