"""Reading an ONNX file that somebody else wrote, and saying plainly what is wrong with it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from qbench.errors import ModelError, did_you_mean


def read_onnx(path: Path) -> ir.Model:
    """Read an ONNX file, its external data memory-mapped.

    Raises:
        ModelError: If the file is missing, is no ONNX model, is cut short, or lacks its
            external data; the message names the missing file.
    """
    if not path.is_file():
        _raise_missing(path)
    _check_first_bytes(path)
    try:
        with _silenced():
            model = ir.load(path, format="protobuf")
    except Exception as error:  # the protobuf and IR layers raise many unrelated classes
        raise ModelError(
            f"{str(path)!r} cannot be read as ONNX: it is not an ONNX model or is cut short "
            f"({type(error).__name__}: {str(error)[:200]}); export or copy it again"
        ) from error
    if not model.graph.outputs or not (len(model.graph) or model.graph.initializers):
        raise ModelError(
            f"{str(path)!r} holds no graph with nodes and outputs: it is empty, not an ONNX model, "
            "or cut short; export or copy it again"
        )
    if not model.opset_imports:
        raise ModelError(f"{str(path)!r} names no opset: it is cut short; export or copy it again")
    _check_complete(model, path)
    _check_external_data(model, path)
    return model


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep the graph library's remarks off the terminal: what is wrong is said here."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check_complete(model: ir.Model, path: Path) -> None:
    """Refuse a graph that reads a tensor which nothing gives, or a weight with too few bytes."""
    given = {value for graph in model.graphs() for value in graph.inputs}
    given |= {value for graph in model.graphs() for value in graph.initializers.values()}
    read = (value for node in model.graph.all_nodes() for value in node.inputs if value is not None)
    for value in (*read, *model.graph.outputs):
        if value.producer() is None and value not in given:
            raise ModelError(
                f"{str(path)!r} is damaged: its graph reads {value.name!r}, which no node, input "
                "or weight gives; export it again"
            )
    for value in given:
        tensor = value.const_value
        if isinstance(tensor, ir.TensorProtoTensor) and tensor.raw.HasField("raw_data"):
            stored = len(tensor.raw.raw_data)
            if stored != tensor.nbytes:
                raise ModelError(
                    f"{str(path)!r} is damaged: weight {value.name!r} of shape "
                    f"{list(tensor.shape.numpy())} needs {tensor.nbytes} bytes and has {stored}"
                )


def _raise_missing(path: Path) -> None:
    if path.is_dir():
        raise ModelError(f"{str(path)!r} is a folder; give the ONNX file inside it")
    beside = [p.name for p in path.parent.glob("*.onnx")] if path.parent.is_dir() else []
    near = did_you_mean(path.name, beside)
    listed = f"; ONNX files there: {', '.join(sorted(beside)[:8])}" if beside and not near else ""
    raise ModelError(f"model file {str(path)!r} does not exist{near}{listed}; give an ONNX file")


#: First bytes of files that are often given in place of an ONNX model.
_OTHERS = {
    b"PK\x03\x04": "a zip archive (a torch checkpoint, or a packed folder)",
    b"\x89PNG": "a PNG picture",
    b"\x1f\x8b": "a gzip archive; unpack it",
    b"GGUF": "a GGUF file",
    b"\x80\x02": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"version https://git-lfs": "a git-lfs pointer; run git lfs pull",
}


def _check_first_bytes(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(32)
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read ({error})") from error
    for magic, what in _OTHERS.items():
        if start.startswith(magic):
            raise ModelError(f"{str(path)!r} is not an ONNX model: it is {what}")
    if not start:
        raise ModelError(f"{str(path)!r} is empty: it is not an ONNX model")


def _external_tensors(model: ir.Model) -> Iterator[tuple[ir.Value, ir.ExternalTensor]]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value, value.const_value


def _check_external_data(model: ir.Model, path: Path) -> None:
    missing: set[str] = set()
    for value, tensor in _external_tensors(model):
        inside = os.path.normpath(tensor.location)
        if os.path.isabs(inside) or inside.split(os.sep)[0] == os.pardir:
            raise ModelError(
                f"{str(path)!r} keeps weight {value.name!r} in {str(tensor.location)!r}, outside "
                "its own folder; such files are not read. Save the model with relative paths"
            )
        file = Path(tensor.path)
        if not file.is_file():
            missing.add(str(tensor.location))
            continue
        _check_extent(value, tensor, path)
        if file.is_symlink() or file.stat().st_nlink > 1 or _is_linked(file, path.parent):
            value.const_value = _without_links(tensor)
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - 3} more files" if len(names) > 3 else ""
        raise ModelError(
            f"{str(path)!r} keeps its weights in {', '.join(map(repr, names[:3]))}{more}, missing "
            f"beside it; copy {'it' if len(names) == 1 else 'them'} to {str(path.parent)!r}"
        )


def _check_extent(value: ir.Value, tensor: ir.ExternalTensor, path: Path) -> None:
    size = Path(tensor.path).stat().st_size
    length = tensor.nbytes if tensor.length is None else tensor.length
    end = (tensor.offset or 0) + length
    if length != tensor.nbytes:
        raise ModelError(
            f"{str(path)!r} is damaged: weight {value.name!r} of shape "
            f"{list(tensor.shape.numpy())} needs {tensor.nbytes} bytes, and its entry says {length}"
        )
    if size < end:
        raise ModelError(
            f"external data {str(tensor.location)!r} of {str(path)!r} is cut short: it has {size} "
            f"bytes and weight {value.name!r} ends at {end}; copy it again"
        )


def _is_linked(file: Path, folder: Path) -> bool:
    return not file.resolve().is_relative_to(folder.resolve())


def _without_links(tensor: ir.ExternalTensor) -> ir.ExternalTensor:
    """Return a tensor that reads the file where it really lies.

    Hub caches link files to where their content is kept, and installers link packages; both are
    refused by the graph library, which cannot know that the location itself stayed inside.
    """
    return ir.ExternalTensor(
        os.path.realpath(tensor.path),
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name or "",
    )


def files_of(path: Path) -> list[Path]:
    """Return an ONNX file and every file that holds its external data.

    Raises:
        ModelError: As ``read_onnx``.
    """
    model = read_onnx(path)
    return [path, *sorted({Path(tensor.path) for _, tensor in _external_tensors(model)})]
