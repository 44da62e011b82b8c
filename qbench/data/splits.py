"""Three disjoint splits by content hash: which rows calibrate, which decide, which verify.

Rows that share content stand in one split. For retrieval that joins all queries and answers of a
connected component, so that no answer of one split is a candidate of another. Groups are taken in
the order of their content's hash, so the order of rows in a file changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from qbench.data.columns import TEXT_ROLES, Form
from qbench.data.content import content_hash, loose_key
from qbench.data.merging import merge_samples
from qbench.data.sources import Table
from qbench.errors import DataError, InputError, unknown_name

if TYPE_CHECKING:
    import pandas

SPLITS = ("calibration", "sweep", "verification")
RULE = "content-hash groups; retrieval by connected components of queries and answers; version 1"
MINIMUM = 4
"""Samples a split has at least, unless fewer are asked for."""

Keys = Callable[[Sequence[str]], Sequence[Hashable]]
"""Gives a key of each text; texts with equal keys share a split."""


class SplitSizes(Protocol):
    """Samples asked for."""

    @property
    def calibration(self) -> int:
        """Samples that calibrate ranges."""
        ...

    @property
    def sweep(self) -> int:
        """Samples that decide a plan."""
        ...

    @property
    def verification(self) -> int | Literal["rest"]:
        """Samples that verify it; ``rest`` takes all that the others leave."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Disjoint splits, rows in the order of their content's hash.

    Attributes:
        calibration: Rows that calibrate ranges.
        sweep: Rows that decide a plan.
        verification: Rows that verify it.
        samples: Samples (queries, pairs or texts) of each split.
        remarks: What was merged, scaled or left out, in words.
    """

    calibration: pandas.DataFrame
    sweep: pandas.DataFrame
    verification: pandas.DataFrame
    samples: Mapping[str, int]
    remarks: tuple[str, ...] = ()

    def named(self, name: str) -> pandas.DataFrame:
        """Return the split called ``name``.

        Raises:
            InputError: If there is no such split.
        """
        if name not in SPLITS:
            raise InputError(unknown_name("split", name, SPLITS))
        rows: pandas.DataFrame = getattr(self, name)
        return rows


@dataclass(frozen=True, slots=True)
class _Group:
    """Samples that must share a split."""

    samples: tuple[str, ...]
    order: str


def split_table(
    table: Table, sizes: SplitSizes, *, limit: int | None = None, keys: Keys | None = None
) -> Splits:
    """Split a table.

    Where there are too few samples for the sizes asked, each split gets its minimum and the others
    are shared in proportion (``rest`` then counts as a quarter of all), and a remark says so.

    Args:
        table: Rows with canonical columns.
        sizes: Samples of each split.
        limit: Most samples used in all.
        keys: A further key of texts, such as token ids, that joins rows beside the text itself.

    Raises:
        DataError: If there are too few samples, or so many share content that they cannot be
            separated.
    """
    frame, remarks = merge_samples(table.frame, table.form)
    groups = _groups(frame, table.form, keys)
    total = sum(len(group.samples) for group in groups)
    used = min(total, limit or total)
    targets, scaled = _targets(used, sizes)
    assigned = _assign(groups, targets, used)
    _check(assigned, targets, groups, total)
    parts = {name: _rows(frame, assigned[name]) for name in SPLITS}
    counts = {name: len(assigned[name]) for name in SPLITS}
    left = total - sum(counts.values())
    unused = (f"{left} of {total} samples are in no split: the sizes asked leave them out",)
    return Splits(
        **parts, samples=counts, remarks=(*table.remarks, *remarks, *scaled, *unused[: left > 0])
    )


def _groups(frame: pandas.DataFrame, form: Form, keys: Keys | None) -> list[_Group]:
    """Return the groups of samples that share a key, in the order of their hash."""
    parents: dict[Hashable, Hashable] = {}
    samples = list(frame["sample"])
    for sample, row_keys in zip(samples, _row_keys(frame, form, keys), strict=True):
        for key in row_keys:
            _join(parents, ("sample", sample), key)
    members: dict[Hashable, list[str]] = defaultdict(list)
    for sample in dict.fromkeys(samples):
        members[_root(parents, ("sample", sample))].append(sample)
    groups = [_Group(tuple(sorted(m)), content_hash(*sorted(m))) for m in members.values()]
    return sorted(groups, key=lambda group: group.order)


def _row_keys(
    frame: pandas.DataFrame, form: Form, keys: Keys | None
) -> Iterable[tuple[Hashable, ...]]:
    """Return what joins each row to others: its query and answer, or its text with its pair."""
    roles = [role for role in TEXT_ROLES if role in frame]
    families = [[loose_key(text) for role in roles for text in frame[role]]]
    if keys is not None:
        families.append(list(keys([text for role in roles for text in frame[role]])))  # type: ignore[arg-type]
    n = len(frame)
    for row in range(n):
        found: list[Hashable] = []
        for family, flat in enumerate(families):
            parts = [flat[row + n * index] for index in range(len(roles))]
            if form is Form.RETRIEVAL:
                found += [(family, role, part) for role, part in zip(roles, parts, strict=True)]
            elif form is Form.SIMILARITY:
                found.append((family, frozenset(parts)))
            else:
                found.append((family, *parts))
        yield tuple(found)


def _root(parents: dict[Hashable, Hashable], key: Hashable) -> Hashable:
    while (parent := parents.setdefault(key, key)) != key:
        parents[key] = parents[parent]
        key = parent
    return key


def _join(parents: dict[Hashable, Hashable], first: Hashable, second: Hashable) -> None:
    parents[_root(parents, first)] = _root(parents, second)


def _targets(total: int, sizes: SplitSizes) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the most samples that each split may get, and a remark where they were scaled."""
    asked = {name: getattr(sizes, name) for name in SPLITS}
    rest = asked["verification"] == "rest"
    fixed = sum(size for size in asked.values() if size != "rest")
    least = {n: MINIMUM if size == "rest" else min(MINIMUM, size) for n, size in asked.items()}
    if total < sum(least.values()):
        raise DataError(
            f"the data has {total} samples after merging duplicates, and three splits need at"
            f" least {sum(least.values())}"
        )
    if fixed <= (total * 3 // 4 if rest else total):
        return {n: total if size == "rest" else size for n, size in asked.items()}, ()
    shares = {n: fixed / 3 if size == "rest" else size for n, size in asked.items()}
    spare, whole = total - sum(least.values()), sum(shares.values())
    targets = {n: min(least[n] + int(spare * shares[n] / whole), int(shares[n])) for n in asked}
    targets["verification"] = total - targets["calibration"] - targets["sweep"]
    words = ", ".join(f"{name} {asked[name]}" for name in SPLITS)
    got = ", ".join(f"{name} {targets[name]}" for name in SPLITS)
    remark = f"{total} samples are too few for {words}: scaled to {got}"
    return {**targets, "verification": total if rest else targets["verification"]}, (remark,)


def _assign(
    groups: Sequence[_Group], targets: Mapping[str, int], used: int
) -> dict[str, list[str]]:
    """Give each group to the first split that has room for all of it."""
    assigned: dict[str, list[str]] = {name: [] for name in SPLITS}
    for group in groups:
        if sum(map(len, assigned.values())) + len(group.samples) > used:
            continue
        for name in SPLITS:
            if len(assigned[name]) + len(group.samples) <= targets[name]:
                assigned[name].extend(group.samples)
                break
    return assigned


def _check(
    assigned: Mapping[str, Sequence[str]],
    targets: Mapping[str, int],
    groups: Sequence[_Group],
    total: int,
) -> None:
    starved = [name for name in SPLITS if len(assigned[name]) < min(MINIMUM, targets[name])]
    if starved:
        largest = max(len(group.samples) for group in groups)
        name = starved[0]
        raise DataError(
            f"split {name} got {len(assigned[name])} samples: {largest} of {total} samples share"
            " texts with one another and cannot be separated (for retrieval: queries joined by"
            " common answers); give data whose samples share less"
        )


def _rows(frame: pandas.DataFrame, samples: Sequence[str]) -> pandas.DataFrame:
    """Return the rows of some samples in the order of their hashes, without the hash."""
    chosen = frame[frame["sample"].isin(set(samples))]
    by = [name for name in ("sample", "answer") if name in chosen]
    return chosen.sort_values(by, kind="stable").drop(columns="sample").reset_index(drop=True)
