"""Peak memory of sweep, plan and build on a transformer that barely fits.

Makes a random encoder (embeddings, attention, GELU, LayerNorm) with weights in external data of
2.4 GB, written piece by piece, with a tokenizer and a few texts. Then runs, as a user would,

    qbench sweep MODEL --task none --format fp16 --format int8 --format w8a16 --format w4a16 …
    qbench plan RUN
    qbench build RUN

and prints the peak of resident memory of each command, stage by stage. What a command maps from
files counts as resident. Exits with 1 if a command fails or passes the limit:

    python benchmarks/large_model.py
    python benchmarks/large_model.py --json
    python benchmarks/large_model.py --gigabytes 0.2 --limit 1 --folder /tmp/large --keep
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qbench.testing.graphs import Sketch, encoder_on

FORMATS = ("fp16", "int8", "w8a16", "w4a16")
#: Layers that are swept: one of each kind of product, early, in the middle, and the table.
INCLUDE = (
    "embeddings.word_embeddings",
    "encoder.layer.0.attention.self.query",
    "encoder.layer.1.intermediate.dense",
    "encoder.layer.1.output.dense",
)
WORDS = 2000
TEXTS = 24
SHARD_BYTES = 512 << 20
_LAZY_BYTES = 1 << 20


class LargeSketch(Sketch):
    """A sketch whose matrices are made when they are written, one after another."""

    def weight(
        self, name: str, *shape: int, mean: float = 0.0, scale: float | None = None
    ) -> ir.Value:
        """Add a float32 initializer; a large one is no array until it is saved."""
        if 4 * int(np.prod(shape)) < _LAZY_BYTES:
            return super().weight(name, *shape, mean=mean, scale=scale)
        seed = int(self._random.integers(1 << 31))
        spread = np.float32(1 / np.sqrt(shape[0]) if scale is None else scale)

        def make() -> ir.Tensor:
            array = np.random.default_rng(seed).standard_normal(shape, np.float32)
            array *= spread
            array += np.float32(mean)
            return ir.Tensor(array, name=name)

        lazy = ir.LazyTensor(make, ir.DataType.FLOAT, ir.Shape(shape), name=name)
        value = ir.val(name, dtype=ir.DataType.FLOAT, shape=ir.Shape(shape), const_value=lazy)
        self._graph.register_initializer(value)
        return value


def write_model(folder: Path, gigabytes: float, hidden: int) -> Path:
    """Write the encoder and return its file; the number of blocks follows from the size."""
    block = 4 * 12 * hidden * hidden
    blocks = max(2, round((gigabytes * 1e9 - 4 * WORDS * hidden) / block))
    model = encoder_on(LargeSketch(0), blocks, (hidden, max(hidden // 128, 1)), WORDS)
    path = folder / "large.onnx"
    for old in folder.glob("large*.onnx*"):
        old.unlink()
    ir.save(model, path, external_data="large.onnx.data", max_shard_size_bytes=SHARD_BYTES)
    return path


def write_texts(folder: Path) -> tuple[Path, Path]:
    """Write a tokenizer of whole words and some texts; return their files."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"word{i}": i for i in range(2, WORDS)}}
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "Whitespace"},
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
            }
        )
    )
    random = np.random.default_rng(0)
    rows = [
        " ".join(f"word{i}" for i in random.integers(2, WORDS, 4 + 2 * (row % 3)))
        for row in range(TEXTS)
    ]
    data = folder / "texts.csv"
    data.write_text("\n".join(["text", *rows, ""]))
    return tokenizer, data


@dataclass(slots=True)
class Ran:
    """What one command took.

    Attributes:
        command: Its name.
        wall_s: Seconds.
        peak_mb: Peak of resident memory, MB.
        stages: Peak by stage, MB.
        exit_code: What it ended with.
        said: The last of what it said.
    """

    command: str
    wall_s: float = 0.0
    peak_mb: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    exit_code: int = 0
    said: str = ""


def run_command(arguments: Sequence[str], folder: Path) -> Ran:
    """Run ``qbench`` in a process of its own and watch its memory.

    The peak is the kernel's own (``VmHWM``); it is set back at each stage that the command names.
    """
    ran, started = Ran(arguments[0]), time.perf_counter()
    command = [sys.executable, "-m", "qbench.cli.main", *arguments]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    with (folder / f"{arguments[0]}.out").open("w+") as out:
        process = subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=subprocess.PIPE, env=environment
        )
        _watch(process, ran)
        ran.exit_code = process.wait()
        out.seek(0)
        ran.said = "\n".join([ran.said, *out.read().splitlines()[-6:]]).strip()
    ran.wall_s = time.perf_counter() - started
    ran.peak_mb = max(ran.stages.values(), default=0.0)
    return ran


def _watch(process: subprocess.Popen[bytes], ran: Ran) -> None:
    """Note the peak of each stage until the process ends; stages are lines that it prints."""
    assert process.stderr is not None
    handle, stage, heard = process.stderr.fileno(), "start", b""
    os.set_blocking(handle, False)
    while process.poll() is None:
        ran.stages[stage] = max(ran.stages.get(stage, 0.0), _peak_mb(process.pid))
        before = heard.count(b"\n")
        heard += _read(handle)
        new = heard.decode(errors="replace").split("\n")[before:-1]
        for line in (text.strip() for text in new if text.strip() and not text.startswith(" ")):
            stage = line
            _reset_peak(process.pid)
        time.sleep(0.01)
    heard += _read(handle)
    process.stderr.close()
    ran.said = "\n".join(heard.decode(errors="replace").splitlines()[-4:])


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except BlockingIOError:
        return b""


def _peak_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(x.split()[1]) / 1e3 * 1.024 for x in lines if x.startswith("VmHWM")), 0.0)


def _reset_peak(pid: int) -> None:
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return


def commands(folder: Path, model: Path, layers: Sequence[str]) -> Iterator[list[str]]:
    """Yield the commands of a user, in order."""
    tokenizer, data = write_texts(folder)
    run = folder / "results" / "large"
    yield [
        *("sweep", str(model), "--tokenizer", str(tokenizer), "--task", "none"),
        *("--data", str(data), "--column", "text=text", "--splits", "8,12,rest"),
        *(word for name in FORMATS for word in ("--format", name)),
        *(word for name in layers for word in ("--include", name)),
        *("--results", str(folder / "results"), "--run-id", "large"),
    ]
    yield ["plan", str(run), "--levels", "2", "--objective", "bytes", "--max-drop", "0.9"]
    yield ["build", str(run)]


def measure(folder: Path, gigabytes: float, hidden: int) -> tuple[list[Ran], int]:
    """Make the model, run every command, and return what they took and the model's bytes."""
    model = write_model(folder, gigabytes, hidden)
    size = sum(file.stat().st_size for file in folder.glob("large*") if file.is_file())
    ran: list[Ran] = []
    for arguments in commands(folder, model, INCLUDE):
        ran.append(run_command(arguments, folder))
        if ran[-1].exit_code:
            break
    return ran, size


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether the limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.4, help="size of the weights")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the encoder")
    parser.add_argument("--limit", type=float, default=6.0, help="GB that a command may take")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    parser.add_argument("--json", action="store_true", help="print one object")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="qbench-large-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        ran, size = measure(folder, chosen.gigabytes, chosen.hidden)
    finally:
        if not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)
    peak = max(item.peak_mb for item in ran)
    done = len(ran) == 3 and not ran[-1].exit_code
    if chosen.json:
        said = {"model_mb": size / 1e6, "peak_rss_mb": peak, "limit_mb": chosen.limit * 1e3}
        print(json.dumps({**said, "commands": [asdict(item) for item in ran]}))
    else:
        print(table(ran, size))
    return int(not done or peak > chosen.limit * 1e3)


def table(ran: Sequence[Ran], size: int) -> str:
    """Return what was measured, as text."""
    lines = [f"weights {size / 1e6:,.0f} MB"]
    for item in ran:
        code = f", exit code {item.exit_code}: {item.said}" if item.exit_code else ""
        lines.append(f"{item.command:<46}{item.peak_mb:>9,.0f} MB {item.wall_s:>7.0f} s{code}")
        lines += [f"  {name[:44]:<44}{mb:>9,.0f} MB" for name, mb in item.stages.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
