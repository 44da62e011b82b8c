"""The two addresses that answer requests: tensors, and texts.

NOTE: they are on the way of every answer, so they speak ASGI themselves: a framework's request and
response objects around them cost as much again as the batcher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from qbench.serving.request import Answer
from qbench.serving.server import documents
from qbench.serving.server.asking import ask
from qbench.serving.server.bodies import read_body
from qbench.serving.server.contract import Contract
from qbench.serving.server.defaults import fill_default
from qbench.serving.server.face import Face
from qbench.serving.server.replies import Body, infer_body, text_body
from qbench.serving.server.terms import Asked, BadRequestError, parse_asked
from qbench.serving.server.texts import parse_texts
from qbench.serving.server.wire import parse_infer, parse_json, split_body
from qbench.serving.service import Request

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Mapping[str, str]

JSON_TYPES = ("application/json", "application/vnd.api+json")
BYTES_TYPE = "application/octet-stream"


class Answering(ABC):
    """One address as an ASGI application."""

    def __init__(self, face: Face) -> None:
        """Take what is served."""
        self._face = face

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        names = scope.get("path_params", {})
        self._face.check_model(names.get("model"), names.get("version"))
        body, served_by = await self._answer(scope, _headers_of(scope), receive)
        headers = [
            (b"content-type", body.media_type.encode()),
            (b"content-length", str(len(body.content)).encode()),
        ]
        if body.header_length is not None:
            length = str(body.header_length).encode()
            headers.append((b"inference-header-content-length", length))
        if served_by != "engine":
            headers.append((b"x-served-by", served_by.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body.content})

    @abstractmethod
    async def _answer(self, scope: Message, headers: Headers, receive: Receive) -> tuple[Body, str]:
        """Return the body of the answer, and what answered."""

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        face = self._face
        face.check_ready()
        return await read_body(receive, headers, face.limits.body_bytes, face.body_timeout_s)

    async def _answers(self, payloads: Sequence[Any], asked: Asked, scope: Message) -> list[Answer]:
        """Take the request in and return the answer to each of its payloads."""
        service = self._face.check_ready()
        self._face.enter()
        scope["qbench.taken"] = True
        requests = [Request(one, asked.tenant, asked.priority, asked.timeout_s) for one in payloads]
        answers = await ask(service, requests, scope)
        self._face.metrics.answered(answers)
        return answers


class Infer(Answering):
    """Tensors in, tensors out: the Open Inference Protocol v2."""

    async def _answer(self, scope: Message, headers: Headers, receive: Receive) -> tuple[Body, str]:
        face = self._face
        header_length = headers.get("inference-header-content-length")
        _check_type(headers, binary=header_length is not None)
        text, rest = split_body(await self._read(headers, receive), header_length)
        asked = parse_infer(parse_json(text), rest, headers, face.contract, face.limits)
        answers = await self._answers(asked.rows, asked.asked, scope)
        rows = [_row_of(answer, face.contract, asked.length) for answer in answers]
        served_by = _served_by(answers)
        model = (face.model, documents.VERSION)
        return infer_body(model, asked.asked, rows, served_by), served_by


class Texts(Answering):
    """Texts in, outputs out."""

    async def _answer(self, scope: Message, headers: Headers, receive: Receive) -> tuple[Body, str]:
        face = self._face
        _check_type(headers, binary=False)
        head = parse_json(await self._read(headers, receive))
        asked = parse_asked(head, headers, face.contract)
        texts = parse_texts(head, face.limits)
        answers = await self._answers(texts, asked, scope)
        rows = [_row_of(answer, face.contract, answer.tokens) for answer in answers]
        body = text_body((face.model, documents.VERSION), asked, answers, rows)
        return body, _served_by(answers)


def _headers_of(scope: Message) -> Headers:
    """Return a request's headers by lower-case name; of one given twice, the first."""
    found = reversed(scope["headers"])
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in found}


def _check_type(headers: Headers, binary: bool) -> None:
    given = headers.get("content-type")
    if given is None:
        return
    kind = given.split(";", 1)[0].strip().lower()
    allowed = (BYTES_TYPE, *JSON_TYPES) if binary else JSON_TYPES
    if kind not in allowed:
        raise BadRequestError(
            f"Content-Type is {given[:80]!r}; allowed: {JSON_TYPES[0]}, or {BYTES_TYPE} with "
            "Inference-Header-Content-Length",
            415,
        )


def _row_of(answer: Answer, contract: Contract, length: int) -> Mapping[str, np.ndarray]:
    """Return the outputs of an answer to a request of that length."""
    if answer.served_by == "default":
        return fill_default(answer.value, contract, length)
    return contract.cut(answer.value, length)


def _served_by(answers: Sequence[Answer]) -> str:
    return next((a.served_by for a in answers if a.served_by != "engine"), "engine")
