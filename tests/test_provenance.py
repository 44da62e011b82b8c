from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from qbench import provenance as origin
from qbench.provenance import (
    installed_versions,
    instruction_sets,
    machine_type,
    provenance,
    sha256_of_arrays,
    sha256_of_file,
    sha256_of_files,
    sha256_of_json,
)


def test_the_record_is_plain_and_names_what_changes_numbers() -> None:
    record = provenance({"run": {"seed": 3}}, seed=3)
    assert json.loads(json.dumps(record)) == record
    assert record["machine"]["cores"] >= 1 and record["machine"]["memory_gib"] > 0
    assert record["versions"]["numpy"] == np.__version__
    assert record["seed"] == 3
    assert record["machine_type"] == machine_type()
    assert record["machine_type"]["instructions"]


@pytest.mark.parametrize(
    ("fields", "sets"),
    [
        ({"flags": "fpu sse2 avx avx2 fma"}, "avx avx2 fma"),
        ({"flags": "fma avx512_vnni avx avx2 avx512f"}, "avx avx2 avx512_vnni avx512f fma"),
        ({"Features": "fp asimd evtstrm asimddp i8mm"}, "asimd asimddp i8mm"),
        ({"model name": "Something 9000"}, "Something 9000"),
    ],
)
def test_the_type_of_a_machine_is_its_kernels(
    fields: dict[str, str], sets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "_cpu_fields", lambda: fields)
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    assert instruction_sets() == sets
    assert machine_type()["instructions"] == sets
    assert machine_type()["architecture"] == "x86_64"


def test_packages_that_are_absent_are_left_out() -> None:
    assert installed_versions(["numpy", "no-such-distribution"]) == {"numpy": np.__version__}


def test_a_file_is_hashed_in_pieces_to_its_usual_sha256(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(3 * (1 << 20) + 17)
    path = tmp_path / "f"
    path.write_bytes(content)
    assert sha256_of_file(path) == hashlib.sha256(content).hexdigest()


def test_files_are_hashed_by_name_and_content_in_any_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    b.write_text("2")
    before = sha256_of_files([a, b])
    assert before == sha256_of_files([b, a])
    a.write_text("2")
    b.write_text("1")
    assert before != sha256_of_files([a, b])


def test_arrays_are_hashed_with_type_shape_and_name() -> None:
    x = np.arange(6, dtype=np.int64)
    variants = [
        {"x": x},
        {"y": x},
        {"x": x.reshape(2, 3)},
        {"x": x.astype(np.int32)},
        {"x": x[::-1]},
        {"x": x[:0]},
        {"x": np.float32(1.0).reshape(())},
    ]
    assert len({sha256_of_arrays(v) for v in variants}) == len(variants)
    assert sha256_of_arrays({"x": x.reshape(2, 3).T}) == sha256_of_arrays(
        {"x": np.ascontiguousarray(x.reshape(2, 3).T)}
    )


def test_json_is_hashed_without_regard_to_the_order_of_keys() -> None:
    assert sha256_of_json({"a": 1, "b": [2]}) == sha256_of_json({"b": [2], "a": 1})
    assert sha256_of_json({"a": 1}) != sha256_of_json({"a": 2})
