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


_CHARACTERS = 16  # of each token that may be served: so much of a long text is looked at first


class Tokenizer(Protocol):
    """Turns texts into token ids."""

    @property
    def max_length(self) -> int:
        """Longest encoding in tokens; the rest is cut."""
        ...

    @property
    def pad_id(self) -> int:
        """Token id of padded positions."""
        ...

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
            found.append(contract.fill(checked))
        return found

    return encode


def first_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None = None
) -> list[Mapping[str, Sequence[int]]]:
    """Return what a tokenizer gives for texts, from no more of them than it needs.

    A tokenizer that cuts has turned the whole text into tokens before: half a minute for
    megabytes, in which nobody else's texts are tokenized. So it gets the beginning of a long
    text, then twice as much, until two beginnings give as much as it may and the same.
    """
    size = _CHARACTERS * tokenizer.max_length
    found = list(tokenizer([one[:size] for one in texts], _beginnings(pairs, size)))
    for place, text in enumerate(texts):
        pair = None if pairs is None else pairs[place]
        if max(len(text), len(pair or "")) > size:
            found[place] = _settled(tokenizer, Text(text, pair), size, found[place])
    return found


def _settled(
    tokenizer: Tokenizer, given: Text, size: int, found: Mapping[str, Sequence[int]]
) -> Mapping[str, Sequence[int]]:
    """Return the tokens of a text, given those of its first ``size`` characters."""
    while size < max(len(given.text), len(given.pair or "")):
        size, before = 2 * size, found
        pairs = None if given.pair is None else [given.pair]
        (found,) = tokenizer([given.text[:size]], _beginnings(pairs, size))
        full = max(map(len, found.values()), default=0) >= tokenizer.max_length
        if full and dict(found) == dict(before):
            break
    return found


def _beginnings(texts: Sequence[str] | None, size: int) -> list[str] | None:
    return None if texts is None else [one[:size] for one in texts]


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
        return first_tokens(tokenizer, [one.text for one in texts], pairs)
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
    longest = contract.longest or contract.fixed_length
    if longest is not None and len(first) > longest:
        raise TextError(f"the text is longer than {longest} tokens, the most served")
    if contract.longest is None and longest not in (None, len(first)) and not contract.fills:
        raise TextError(f"the text has {len(first)} tokens, and the engine takes {longest} alone")
    for key, bound in bounds.items():
        ids = given.get(key)
        if ids is not None and not 0 <= min(ids) <= max(ids) < bound:
            raise TextError(f"{key} of the text go to {max(ids)}; allowed: 0 to {bound - 1}")
