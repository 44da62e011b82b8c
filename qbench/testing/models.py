"""Small random models and data with the shape of real ones, made on the spot."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

WORDS = tuple(
    f"{colour}{thing}"
    for colour in ("red", "green", "blue", "grey", "pink")
    for thing in ("cat", "dog", "bird", "tree", "stone", "cloud", "bridge", "candle")
)
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def bert_folder(folder: Path, *, classes: int = 0, layers: int = 2, seed: int = 0) -> Path:
    """Write a small random BERT with its tokenizer as a Hugging Face folder, and return it.

    Args:
        folder: Where it goes.
        classes: Classes of a sequence classifier; 0 for an encoder.
        layers: Encoder layers.
        seed: Seed of the weights.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    config: Any = BertConfig(  # type: ignore[call-arg]  # of the base class
        vocab_size=len(_SPECIAL) + len(WORDS),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=max(classes, 2),
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    model: Any = BertForSequenceClassification(config) if classes else BertModel(config)
    model.eval().save_pretrained(folder)
    word_tokenizer(folder)
    return folder


def word_tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words from ``WORDS`` into a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *WORDS))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=raw,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
    ).save_pretrained(folder)


def pairs_csv(path: Path, rows: int = 120, seed: int = 0) -> Path:
    """Write questions and answers that share words, as ``question,reply`` rows."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("question", "reply"))
        for _ in range(rows):
            words = list(rng.choice(WORDS, size=int(rng.integers(4, 9)), replace=False))
            more = list(rng.choice(WORDS, size=2))
            writer.writerow((" ".join(words), " ".join([*words[: len(words) // 2 + 1], *more])))
    return path


def labelled_csv(path: Path, rows: int = 120, classes: int = 3, seed: int = 0) -> Path:
    """Write texts with a class index, as ``text,label`` rows."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("text", "label"))
        for _ in range(rows):
            words = rng.choice(WORDS, size=int(rng.integers(4, 9)))
            writer.writerow((" ".join(words), int(rng.integers(classes))))
    return path
