"""Texts: read from a body, and tokenized by the service's own workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qbench.errors import InputError
from qbench.serving.request import Encoded
from qbench.serving.server.contract import Contract
from qbench.serving.server.terms import BadRequestError
from qbench.serving.server.wire import RequestLimits

Encode = Callable[[Sequence[Any]], Sequence[Encoded]]


class Tokenizer(Protocol):
    """Turns texts into token ids."""

    def __call__(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> Sequence[Mapping[str, Sequence[int]]]:
        """Return ``input_ids``, and what else it gives, of each text."""
        ...


class TextError(InputError):
    """A text that cannot be served: it cannot be tokenized, or is too long."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text, or two that belong together."""

    text: str
    pair: str | None = None


def parse_texts(head: Mapping[str, Any], limits: RequestLimits) -> list[Text]:
    """Return the texts of a body: ``text`` or ``texts``, and ``pair`` or ``pairs`` beside them.

    Raises:
        BadRequestError: If there are none, too many, or pairs that do not match.
    """
    texts = _strings(head, "text", "texts")
    pairs = _strings(head, "pair", "pairs") if {"pair", "pairs"} & set(head) else None
    if len(texts) > limits.items:
        raise BadRequestError(f"{len(texts)} texts; at most {limits.items} are served at once")
    if pairs is not None and len(pairs) != len(texts):
        raise BadRequestError(f"{len(texts)} texts and {len(pairs)} pairs; give one for each")
    if pairs is None:
        return [Text(text) for text in texts]
    return [Text(text, pair) for text, pair in zip(texts, pairs, strict=True)]


def _strings(head: Mapping[str, Any], one: str, many: str) -> list[str]:
    if one in head and many in head:
        raise BadRequestError(f'give "{one}" or "{many}", not both')
    found = [head[one]] if one in head else head.get(many)
    if not isinstance(found, list) or not found or not all(isinstance(x, str) for x in found):
        raise BadRequestError(f'"{one}" must be a string, or "{many}" a list of strings')
    return found


def text_encoder(tokenizer: Tokenizer | None, contract: Contract) -> Encode:
    """Return what encodes texts; what is encoded already goes through.

    Args:
        tokenizer: Cuts at the longest length where texts are to be cut, and one token later
            where they are to be refused.
        contract: What the engine takes.
    """
    keys = [tensor.key for tensor in contract.inputs]
    bounds = {tensor.key: tensor.bound for tensor in contract.inputs if tensor.bound is not None}

    def encode(payloads: Sequence[Any]) -> Sequence[Encoded]:
        texts = [one for one in payloads if isinstance(one, Text)]
        tokens = iter(_tokens(tokenizer, texts))
        found: list[Encoded] = []
        for one in payloads:
            if not isinstance(one, Text):
                found.append(one)
                continue
            given = next(tokens)
            checked = {key: given[key] for key in keys if key in given}
            _check(checked, contract, bounds)
            found.append(checked)
        return found

    return encode


def _tokens(
    tokenizer: Tokenizer | None, texts: Sequence[Text]
) -> Sequence[Mapping[str, Sequence[int]]]:
    if not texts:
        return []
    if tokenizer is None:
        raise TextError("the server has no tokenizer; send token ids, or start it with --tokenizer")
    paired = any(one.pair is not None for one in texts)
    if paired and not all(one.pair is not None for one in texts):  # of several requests
        return [_tokens(tokenizer, [one])[0] for one in texts]
    pairs = [str(one.pair) for one in texts] if paired else None
    try:
        return tokenizer([one.text for one in texts], pairs)
    except InputError:
        raise
    except Exception as error:  # a tokenizer may be the user's: it may raise anything
        raise TextError(
            f"the text cannot be tokenized: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _check(
    given: Mapping[str, Sequence[int]],
    contract: Contract,
    bounds: Mapping[str, int],
) -> None:
    """Refuse a text whose tokens the engine cannot take."""
    first = given.get(contract.inputs[0].key)
    if first is None:
        raise TextError(f"the tokenizer gives no {contract.inputs[0].key!r}")
    if not len(first):
        raise TextError("the text has no tokens")
    if contract.longest is not None and len(first) > contract.longest:
        raise TextError(f"the text is longer than {contract.longest} tokens, the most served")
    if contract.fixed_length is not None and len(first) != contract.fixed_length:
        raise TextError(
            f"the text has {len(first)} tokens, and the engine takes {contract.fixed_length} alone"
        )
    for key, bound in bounds.items():
        ids = given.get(key)
        if ids is not None and not 0 <= min(ids) <= max(ids) < bound:
            raise TextError(f"{key} of the text go to {max(ids)}; allowed: 0 to {bound - 1}")
