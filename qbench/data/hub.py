"""Data sets of the Hugging Face hub (or of a local folder in its layout) through ``datasets``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qbench.errors import DataError, unknown_name

if TYPE_CHECKING:
    import pandas


def read_hub(
    name: str, subset: str | None = None, split: str | None = None
) -> tuple[pandas.DataFrame, Mapping[str, str]]:
    """Return one split of a data set and where it came from; no remote code runs.

    Args:
        name: Hub name (``glue``, ``owner/name``) or a local folder of data files.
        subset: Its configuration, where there are several.
        split: Its split, where there are several.

    Raises:
        DataError: If it cannot be reached or read, or subset or split is missing or unknown.
    """
    import datasets

    progress = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    try:
        found = datasets.load_dataset(name, subset)
    except ConnectionError as error:
        raise DataError(
            f"data hub:{name}: not reachable and not in the local cache ({error}); check the name"
            " and the network, or give a local file (.csv, .tsv, .jsonl, .json, .parquet)"
        ) from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise DataError(f"data hub:{name}: cannot be loaded: {reason}") from error
    finally:
        if progress:
            datasets.utils.logging.enable_progress_bar()
    chosen = _choose(found, name, split)
    info = {"fingerprint": str(chosen._fingerprint), "licence": str(chosen.info.license or "")}
    return chosen.to_pandas(), info


def _choose(found: Any, name: str, split: str | None) -> Any:
    splits = list(found)
    if split is None and len(splits) == 1:
        split = splits[0]
    if split is None:
        raise DataError(f"data hub:{name} has several splits: set data.split to {_any_of(splits)}")
    if split not in found:
        raise DataError(f"data hub:{name}: {unknown_name('split', split, splits)}")
    return found[split]


def _any_of(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
