"""Texts: no more of a long one is tokenized than is served, and short ones fill fixed lengths."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from served import JSON, OPTIONS, serve_graph, tokenize

from qbench.serving.server.texts import first_tokens
from qbench.tasks.tokens import CallableTokenizer
from qbench.testing.graphs import Sketch, tiny_encoder

LONGEST = 8


class Counting:
    """A tokenizer that cuts at the end, and counts the characters that it is given."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[list[int]]:
        self.seen += sum(map(len, texts))
        found = tokenize(texts)
        if pairs is None:
            return found
        self.seen += sum(map(len, pairs))
        return [one[:4] + other[:4] for one, other in zip(found, tokenize(pairs), strict=True)]


def cutting(function: Counting) -> CallableTokenizer:
    return CallableTokenizer(function, "counting", {}, 0, LONGEST)


@pytest.mark.parametrize(
    "text",
    [
        "a few words " * 10_000,
        "x" * 100 + " then words" * 10_000,
        " " * 5_000 + "the words come late " * 10_000,
        "word " * 3,
        "",
        "y" * 300_000,
    ],
)
def test_beginnings_give_the_tokens_of_the_whole(text: str) -> None:
    counting = Counting()
    tokenizer = cutting(counting)
    texts = ["short", text, "also short"]
    wanted = tokenizer(texts)
    counting.seen = 0
    assert first_tokens(tokenizer, texts) == wanted
    words = text.split()
    if len(words) > LONGEST:
        assert counting.seen < 50_000
    else:
        assert counting.seen <= 3 * len(text) + 200


def test_beginnings_of_random_texts_and_pairs_give_the_tokens_of_the_whole() -> None:
    rng = random.Random(0)
    tokenizer = cutting(Counting())
    for _ in range(200):
        texts, pairs = (
            ["".join(rng.choices("ab ", [9, 9, rng.random()], k=rng.choice((3, 90, 900))))] * 2
            for _ in range(2)
        )
        assert first_tokens(tokenizer, texts, pairs) == tokenizer(texts, pairs)
        assert first_tokens(tokenizer, texts) == tokenizer(texts)


def test_a_huge_text_does_not_keep_others_waiting(tmp_path) -> None:
    def slow(texts: Sequence[str]) -> list[list[int]]:
        time.sleep(sum(map(len, texts)) * 1e-5)
        return tokenize(texts)

    options = {"tokenizer": CallableTokenizer(slow, "slow", {}, 0, 512)}
    with serve_graph(tiny_encoder(), tmp_path, **options) as served:
        began_s = time.monotonic()
        body = json.dumps({"text": "word " * 200_000}).encode()
        status, _, answer = served.call("POST", "/text", body, JSON)
        assert status == 400 and "longer than 64 tokens" in answer["error"]
        assert time.monotonic() - began_s < 3  # the whole would take ten seconds


def fixed_length() -> ir.Model:
    """Return a graph of six tokens: the mean of their words, without masked ones."""
    s = Sketch(0)
    ids = s.input("input_ids", ir.DataType.INT64, ("batch", 6))
    mask = s.input("attention_mask", ir.DataType.INT64, ("batch", 6))
    counts = s.op("Unsqueeze", s.op("Cast", mask, to=ir.DataType.FLOAT), s.ints(-1))
    words = s.op("Mul", s.op("Gather", s.weight("words.weight", 100, 4), ids, axis=0), counts)
    total = s.op("ReduceSum", words, s.ints(1), keepdims=0)
    return s.model(y=s.op("Div", total, s.op("ReduceSum", counts, s.ints(1), keepdims=0)))


@pytest.mark.parametrize("truncate", [True, False])
def test_short_texts_fill_a_fixed_length_up_and_long_ones_are_cut_or_refused(
    tmp_path, truncate: bool
) -> None:
    limits = replace(OPTIONS.requests, truncate=truncate)
    with serve_graph(fixed_length(), tmp_path, requests=limits) as served:
        for text in ("two words", "there are six words in this", "more words than six of them fit"):
            body = json.dumps({"text": text}).encode()
            status, _, answer = served.call("POST", "/text", body, JSON)
            (ids,) = tokenize([text])
            if len(ids) > 6 and not truncate:
                assert status == 400 and "longer than 6 tokens" in answer["error"]
                continue
            assert status == 200, answer
            ids = ids[:6]
            mask = np.array([[1] * len(ids) + [0] * (6 - len(ids))])
            feeds = {"input_ids": np.array([ids + [0] * (6 - len(ids))]), "attention_mask": mask}
            straight = served.session.run(feeds)["y"][0]
            got = answer["answers"][0]["outputs"]["y"]
            np.testing.assert_allclose(got, straight, atol=1e-6)
