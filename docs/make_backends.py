"""Write docs/backends.md from what the backends declare. ``make docs`` runs it; a test compares."""

from __future__ import annotations

from pathlib import Path

from qbench.backends import BACKENDS, Backend, support_rows

PAGE = Path(__file__).with_name("backends.md")
_HEAD = """\
# Backends and formats

Written by `make docs` from what the code declares; do not edit.

What a backend cannot run is not offered by a plan. *Native* kinds of layers have a kernel of their
own; *emulated* ones get the rounding of the format and are computed in the backend's high
precision, so they have its numbers and not its speed, and each of their records says so.
`qbench doctor` tries every format of a backend that can run where it is called: it lowers a layer
of each kind, runs it, and reads the kernel back from the runtime's optimised graph. Where a
backend cannot run, its engine is built by its own builder, if that is installed (*builds*); where
it is not, its formats are *unverified*. TensorRT and TensorRT-RTX: [tensorrt.md](tensorrt.md).
"""


def render() -> str:
    """Return the page."""
    table = [
        "| backend | format | native | emulated | least hardware | remark |",
        "|---|---|---|---|---|---|",
    ]
    table += [
        f"| {r.backend} | `{r.format}` | {r.native or '–'} | {r.emulated or '–'} | {r.hardware} "
        f"| {r.remark or '–'} |"
        for r in support_rows()
    ]
    sections = [_section(backend) for backend in BACKENDS.values()]
    return "\n".join([_HEAD, *table, "", *sections])


def _section(backend: Backend) -> str:
    options = "".join(f"\n- `{k}`: `{v}`" for k, v in backend.session_options.items())
    holds = {
        "rounded": "computed in fp32, rounded to fp16 where a layer begins and ends",
        "islands": "computed in fp16; Casts stand where a run of fp16 layers begins and ends",
    }
    lines = [
        f"## {backend.name}\n",
        f"- high precision: `{backend.high_precision}`",
        f"- fp16: {holds[backend.variant]}",
        f"- opset: {backend.opset}",
        f"- operators of ONNX Runtime's own domain: {'allowed' if backend.contrib else 'never'}",
        f"- query, key and value, and gate and up: "
        f"{'one product, one format' if backend.fuses_siblings else 'products of their own'}",
    ]
    if not backend.stand_in:
        lines.append(f"- runs in ONNX Runtime's `{backend.provider}`{_told(backend)}")
    if backend.stand_in:
        lines.append(
            f"- its graphs are run by `{backend.stand_in}` here, in its place; the serialized "
            f"engine is made by the Python module `{backend.builder}`"
        )
    return "\n".join(lines) + (f"\n\nSession options:\n{options}" if options else "") + "\n"


def _told(backend: Backend) -> str:
    given = ", ".join(f"`{k}`: `{v}`" for k, v in backend.provider_options.items())
    return f", with {given}; where it is not offered, commands end before anything is measured" * (
        bool(given)
    )


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
