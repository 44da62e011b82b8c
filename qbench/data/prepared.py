"""Prepared splits: Parquet files beside a manifest, written once, checked whenever they are read.

    calib_data/<name>/manifest.json
    calib_data/<name>/calibration.parquet, sweep.parquet, verification.parquet

History of the manifest's format:
    1: first version.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import shutil
import tempfile
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench import storage
from qbench.config import DataConfig
from qbench.data.columns import Form
from qbench.data.content import content_hash, file_sha256
from qbench.data.sources import Table, load_table, source_identity
from qbench.data.splits import RULE, SPLITS, Keys, Splits, split_table
from qbench.errors import DataError

if TYPE_CHECKING:
    import pandas

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Splits as they lie on disk.

    Attributes:
        name: Name of the data.
        folder: Where the files are.
        form: What the columns say.
        splits: The splits.
        manifest: Origin, licence, rows, hashes, columns, rule and remarks.
    """

    name: str
    folder: Path
    form: Form
    splits: Splits
    manifest: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """Hash over the files of all splits."""
        files = self.manifest["files"]
        return content_hash(*(str(files[name]["sha256"]) for name in SPLITS))


def prepare_splits(config: DataConfig, kind: str, keys: Keys | None = None) -> Prepared:
    """Return the splits of a data source: those prepared before, or new ones, now written.

    The folder is ``<prepared>/<name>``; without a name it is named after the source and a hash of
    what was asked, so two requests never meet in one folder. A source that is itself a folder of
    prepared splits is read as it is.

    Args:
        config: Source, columns, sizes and folder.
        kind: Kind of task that the rows are for.
        keys: A further key of texts, such as token ids, that joins rows when splits are made.

    Raises:
        DataError: If source or rows cannot be used, or the folder holds splits that were made
            from something else or edited since.
    """
    source = Path(config.source)
    if (source / MANIFEST).is_file():
        prepared = read_prepared(source)
        _check_apart(prepared, keys)
        return prepared
    request = _request(config, kind)
    name = config.name or f"{_stem(config.source)}-{content_hash(_canonical(request))[:8]}"
    folder = Path(config.prepared) / name
    if (folder / MANIFEST).is_file():
        prepared = read_prepared(folder)
        _check_request(prepared, request)
        _check_apart(prepared, keys)
        return prepared
    if folder.is_dir() and any(folder.iterdir()):
        raise DataError(
            f"{folder} holds files and no {MANIFEST}: it is no folder of prepared splits; choose"
            " another data.name"
        )
    table = load_table(config, kind)
    splits = split_table(table, config.splits, limit=config.limit, keys=keys)
    write_prepared(folder, table, splits, request)
    return read_prepared(folder)


def write_prepared(folder: Path, table: Table, splits: Splits, request: Mapping[str, Any]) -> None:
    """Write splits and manifest; the folder appears with everything in it or not at all.

    Raises:
        InputError: If the disk is full.
    """
    with storage.clear_disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            files = {name: _write_split(draft, name, splits) for name in SPLITS}
            manifest = _manifest(folder.name, table, splits, files, request)
            text = json.dumps(manifest, indent=1, ensure_ascii=False)
            (draft / MANIFEST).write_text(text + "\n", encoding="utf-8")
            draft.chmod(0o755)
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()  # an empty folder may be in the way
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def read_prepared(folder: Path) -> Prepared:
    """Read prepared splits.

    Raises:
        DataError: If manifest or a file is missing, damaged, or edited since it was written.
    """
    manifest = _read_manifest(folder / MANIFEST)
    frames = {name: _read_split(folder, name, manifest["files"][name]) for name in SPLITS}
    samples = {name: int(manifest["files"][name]["samples"]) for name in SPLITS}
    splits = Splits(**frames, samples=samples, remarks=tuple(manifest.get("remarks", ())))
    return Prepared(str(manifest["name"]), folder, Form(manifest["form"]), splits, manifest)


def _request(config: DataConfig, kind: str) -> dict[str, Any]:
    """Return everything that decides what the splits hold."""
    return {
        **source_identity(config),
        "subset": config.subset,
        "split": config.split,
        "columns": {str(role): name for role, name in sorted(config.columns.items())},
        "task": kind
        if kind in ("embedding", "retrieval", "similarity", "classification")
        else "none",
        "splits": {name: getattr(config.splits, name) for name in SPLITS},
        "limit": config.limit,
        "rule": RULE,
    }


def _canonical(request: Mapping[str, Any]) -> str:
    return json.dumps(request, sort_keys=True, ensure_ascii=False)


def _check_request(prepared: Prepared, request: Mapping[str, Any]) -> None:
    """Refuse splits that were made from another request; the message names what differs."""
    made = prepared.manifest.get("request", {})
    differ = [key for key in request if made.get(key) != request[key]]
    if differ:
        key = differ[0]
        raise DataError(
            f"{prepared.folder} holds splits made with {key} = {made.get(key)!r}, and"
            f" {request[key]!r} is asked now: choose another data.name, or delete the folder to"
            " make them anew"
        )


def _check_apart(prepared: Prepared, keys: Keys | None) -> None:
    """Refuse splits in which an answer of one is, to this tokenizer, an answer of another."""
    if keys is None or prepared.form is not Form.RETRIEVAL:
        return
    split_of: dict[Hashable, str] = {}
    for name in SPLITS:
        answers = list(prepared.splits.named(name)["answer"])
        for text, key in zip(answers, keys(answers), strict=True):
            if split_of.setdefault(key, name) != name:
                raise DataError(
                    f"{prepared.folder} was prepared for another tokenizer: answer {text[:60]!r} of"
                    f" {name} has the token ids of one of {split_of[key]}; choose another data.name"
                )


def _stem(source: str) -> str:
    scheme, _, rest = source.partition(":")
    bare = rest if scheme in ("hub", "package") else Path(source).stem
    return re.sub(r"[^A-Za-z0-9._]+", "-", bare).strip("-.") or "data"


def _write_split(folder: Path, name: str, splits: Splits) -> dict[str, Any]:
    frame, path = splits.named(name), folder / f"{name}.parquet"
    frame.to_parquet(path, index=False, compression="zstd")
    return {
        "file": path.name,
        "sha256": file_sha256(path),
        "rows": len(frame),
        "samples": splits.samples[name],
    }


def _manifest(
    name: str,
    table: Table,
    splits: Splits,
    files: Mapping[str, Any],
    request: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "qbench": FORMAT_VERSION,
        "name": name,
        "created_by": f"qbench {_version()}",
        "origin": dict(table.origin),
        "licence": table.licence,
        "form": str(table.form),
        "columns": list(splits.sweep.columns),
        "split_rule": RULE,
        "rows": {"source": len(table.frame), "used": sum(f["rows"] for f in files.values())},
        "files": dict(files),
        "remarks": list(splits.remarks),
        "request": dict(request),
    }


def _version() -> str:
    try:
        return importlib.metadata.version("qbench")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path.parent} has no {MANIFEST}: it holds no prepared splits") from None
    except ValueError as error:
        raise DataError(
            f"{path} is damaged ({error}): delete the folder and prepare anew"
        ) from None
    version = manifest.get("qbench") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version!r}, and this qbench reads {FORMAT_VERSION}:"
            " delete the folder and prepare anew"
        )
    absent = [key for key in ("name", "form", "files") if key not in manifest]
    absent += [name for name in SPLITS if name not in manifest.get("files", {})]
    if absent:
        raise DataError(f"{path} lacks {absent[0]!r}: delete the folder and prepare anew")
    return dict(manifest)


def _read_split(folder: Path, name: str, entry: Mapping[str, Any]) -> pandas.DataFrame:
    import pandas

    path = folder / f"{name}.parquet"
    if not path.is_file():
        raise DataError(f"{path} is missing: delete {folder} and prepare anew")
    if file_sha256(path) != entry.get("sha256"):
        raise DataError(
            f"{path} was changed after it was prepared (its SHA-256 is not the manifest's): restore"
            f" it, or delete {folder} and prepare anew"
        )
    return pandas.read_parquet(path)
