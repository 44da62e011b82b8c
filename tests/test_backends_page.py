from __future__ import annotations

import importlib.util
from pathlib import Path

from qbench.backends import BACKENDS, support_rows

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_backends_is_what_the_code_declares() -> None:
    spec = importlib.util.spec_from_file_location("make_backends", ROOT / "docs/make_backends.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    assert page == maker.render(), "make docs writes it anew"
    for row in support_rows():
        assert f"| {row.backend} | `{row.format}` |" in page
    assert all(f"## {name}\n" in page for name in BACKENDS)
