"""Where rows come from: a local file, a hub data set, or a package; always canonical columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.config import DataConfig
from qbench.data.columns import Form, canonical, form_of
from qbench.data.content import file_sha256
from qbench.data.files import read_file
from qbench.data.hub import read_hub
from qbench.data.packages import LICENCES, package_version, read_package
from qbench.errors import DataError

if TYPE_CHECKING:
    import pandas

UNKNOWN_LICENCE = "not stated"


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows with canonical columns.

    Attributes:
        frame: The rows: ``query, answer``; ``text, text_pair, score``; ``text[, text_pair],
            label``; or ``text[, text_pair][, label]``; with ``id`` where the data has one.
        form: Which of these it is.
        origin: Where it came from: source, and its version, hash or fingerprint.
        licence: Licence of the data.
        remarks: What was left out, in words.
    """

    frame: pandas.DataFrame
    form: Form
    origin: Mapping[str, str]
    licence: str
    remarks: tuple[str, ...] = ()


def load_table(config: DataConfig, kind: str = "embedding") -> Table:
    """Load the rows of a data source.

    Args:
        config: Source, columns, subset and split.
        kind: Kind of task that the rows are for.

    Raises:
        DataError: If the source is missing or unreadable, a column is missing, or a cell holds
            what it may not.
        MissingDependencyError: If a data package is not installed.
    """
    raw, origin, licence, remarks = _read(config)
    names = [str(name) for name in raw.columns]
    columns = {str(role): name for role, name in config.columns.items()}
    form = form_of(kind, names, columns)
    frame, more = canonical(raw, form, columns)
    stated = config.licence or licence or UNKNOWN_LICENCE
    return Table(frame, form, origin, stated, (*remarks, *more))


def source_identity(config: DataConfig) -> dict[str, str]:
    """Return what identifies the content of a source without reading all of it.

    Raises:
        DataError: If a local file is missing.
        MissingDependencyError: If a data package is not installed.
    """
    scheme, _, rest = config.source.partition(":")
    if scheme == "hub":
        return {"source": config.source}
    if scheme == "package":
        return {"source": config.source, "version": package_version(rest)}
    path = Path(config.source)
    if not path.is_file():
        read_file(path)  # says what is wrong with it
        raise DataError(f"data {config.source!r}: there is no such file")
    return {"source": path.name, "sha256": file_sha256(path)}


def _read(
    config: DataConfig,
) -> tuple[pandas.DataFrame, dict[str, str], str, tuple[str, ...]]:
    """Return the raw rows, their origin, licence and remarks."""
    scheme, _, rest = config.source.partition(":")
    if scheme == "package":
        frame, remarks = read_package(rest)
        return frame, source_identity(config), LICENCES[rest], remarks
    if scheme == "hub":
        frame, info = read_hub(rest, config.subset, config.split)
        origin = {"source": config.source, "fingerprint": info["fingerprint"]}
        return frame, origin, info["licence"], ()
    for key in ("subset", "split"):
        if getattr(config, key) is not None:
            raise DataError(f"data.{key} is for hub data sets, and {config.source!r} is a file")
    path = Path(config.source)
    return read_file(path), source_identity(config), "", ()
