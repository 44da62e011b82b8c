"""A tokenizer of SMILES over a ``vocab.txt``, as BERT models of chemical reactions use it.

    --tokenizer configs/smiles_tokenizer.py:tokenize

The vocabulary is ``vocab.txt`` in the model's folder, one token a line.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

# A bracket atom, a ring bond of two digits, an element of two letters, the arrow, or one character.
TOKEN = re.compile(r"\[[^]]*\]|%\d\d|Br|Cl|>>|\S")


@functools.cache
def read_vocabulary(path: Path) -> dict[str, int]:
    """Return the index of each token."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {token: index for index, token in enumerate(lines)}


def tokenize(
    texts: list[str], pairs: list[str] | None = None, *, model_dir: Path, max_length: int = 512
) -> list[dict[str, list[int]]]:
    """Return ``input_ids`` and ``token_type_ids`` of each SMILES, or of each pair of them."""
    vocabulary = read_vocabulary(Path(model_dir) / "vocab.txt")
    unknown, start, end = (vocabulary[name] for name in ("[UNK]", "[CLS]", "[SEP]"))

    def encode(smiles: str) -> list[int]:
        return [vocabulary.get(token, unknown) for token in TOKEN.findall(smiles)]

    encoded = []
    for row, text in enumerate(texts):
        first = [start, *encode(text)[: max_length - 2], end]
        second = [*encode(pairs[row]), end][: max_length - len(first)] if pairs else []
        kinds = [0] * len(first) + [1] * len(second)
        encoded.append({"input_ids": first + second, "token_type_ids": kinds})
    return encoded
