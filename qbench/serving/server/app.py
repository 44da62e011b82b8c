"""The addresses of the server, its limits, and how each failure is told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router

from qbench.errors import QbenchError, did_you_mean
from qbench.serving.request import Answer
from qbench.serving.server import documents
from qbench.serving.server.asking import ClientGoneError, ask
from qbench.serving.server.bodies import discard, read_body
from qbench.serving.server.defaults import fill_default
from qbench.serving.server.failing import Failure, failure_of
from qbench.serving.server.metrics import Metrics
from qbench.serving.server.replies import Body, error_body, infer_body, text_body
from qbench.serving.server.terms import Asked, BadRequestError, parse_asked
from qbench.serving.server.texts import parse_texts
from qbench.serving.server.wire import RequestLimits, parse_infer, parse_json, split_body
from qbench.serving.service import Request, Service

if TYPE_CHECKING:
    from qbench.serving.server.contract import Contract

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_LOG = logging.getLogger(__name__)
_JSON_TYPES = ("application/json", "application/vnd.api+json")
_BYTES_TYPE = "application/octet-stream"
_STARTING = Failure(503, "starting", "the engine is warming up; try again", 1.0)
_CLOSING = Failure(503, "closing", "the server is going down; ask another one", 1.0)
_GONE = 499  # nobody reads it; it is counted
_DISCARD = 4  # bodies of the largest size that are taken in after a refusal


@dataclass(slots=True)
class Face:
    """What the addresses share.

    Attributes:
        model: Name of the model.
        contract: What the engine takes and gives.
        limits: What a request may be.
        metrics: Counts.
        body_timeout_s: Longest time until a body is here.
        max_wait_ms: Longest wait of the batcher, for the configuration that is told.
        service: The served engine, once it is warm.
        draining: Whether nothing new is taken.
        inside: Requests that were taken and have no answer yet.
        idle: Set while there is none.
    """

    model: str
    contract: Contract
    limits: RequestLimits
    metrics: Metrics
    body_timeout_s: float = 30.0
    max_wait_ms: float = 5.0
    service: Service | None = None
    draining: bool = False
    inside: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.service is not None and self.service.ready and not self.draining

    def check_ready(self) -> Service:
        """Return the service.

        Raises:
            _UnreadyError: If it is not warm yet, or going down.
        """
        if self.draining:
            raise _UnreadyError(_CLOSING)
        if self.service is None:
            raise _UnreadyError(_STARTING)
        return self.service

    def enter(self) -> None:
        """Note that a request was taken."""
        self.inside += 1
        self.idle.clear()

    def leave(self) -> None:
        """Note that a request that was taken has its answer, written."""
        self.inside -= 1
        if not self.inside:
            self.idle.set()


class _UnreadyError(Exception):
    """Nothing is taken now."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def make_app(face: Face) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    """Return the ASGI application."""
    face.idle.set()
    addresses = _Addresses(face)
    model = "/v2/models/{model}"
    stems = (model, model + "/versions/{version}")
    routes = [Route(f"{stem}/infer", addresses.infer, methods=["POST"]) for stem in stems]
    routes += [Route(f"{stem}/text", addresses.text, methods=["POST"]) for stem in stems]
    routes.append(Route("/text", addresses.text, methods=["POST"]))
    routes += [Route("/metrics", addresses.metrics), Route("/v2", addresses.server)]
    routes += [Route("/v2/health/live", addresses.live), Route("/v2/health/ready", addresses.ready)]
    routes.append(Route("/v2/models/stats", addresses.stats))
    routes.append(Route("/v2/repository/index", addresses.index, methods=["POST"]))
    for stem in stems:
        routes += [
            Route(stem, addresses.metadata),
            Route(f"{stem}/ready", addresses.model_ready),
            Route(f"{stem}/config", addresses.config),
            Route(f"{stem}/stats", addresses.stats),
        ]
    # NOTE: a bare router: Starlette's middleware would answer 500 to what the guard tells.
    return _Guard(Router(routes, redirect_slashes=False), face)


class _Addresses:
    """What each address does."""

    def __init__(self, face: Face) -> None:
        self._face = face

    async def live(self, request: HttpRequest) -> Response:
        return _json({"live": True})

    async def ready(self, request: HttpRequest) -> Response:
        return self._told_ready()

    async def model_ready(self, request: HttpRequest) -> Response:
        self._check_model(request)
        return self._told_ready()

    def _told_ready(self) -> Response:
        if self._face.ready:
            return _json({"ready": True})
        return _told(_CLOSING if self._face.draining else _STARTING, ready=False)

    async def server(self, request: HttpRequest) -> Response:
        return _json(documents.server_metadata())

    async def metadata(self, request: HttpRequest) -> Response:
        self._check_model(request)
        return _json(documents.model_metadata(self._face.model, self._face.contract))

    async def config(self, request: HttpRequest) -> Response:
        face = self._face
        self._check_model(request)
        content = documents.model_config(
            face.model, face.contract, face.limits.items, face.max_wait_ms
        )
        return _json(content)

    async def stats(self, request: HttpRequest) -> Response:
        if "model" in request.path_params:
            self._check_model(request)
        service = self._face.service
        if service is None:
            return _told(_STARTING)
        return _json(documents.statistics(self._face.model, service.stats()))

    async def index(self, request: HttpRequest) -> Response:
        state = "READY" if self._face.ready else "UNAVAILABLE"
        told = {"name": self._face.model, "version": documents.VERSION, "state": state}
        return _json([{**told, "reason": ""}])

    async def metrics(self, request: HttpRequest) -> Response:
        metrics = self._face.metrics
        return Response(metrics.page(), headers={"content-type": metrics.content_type})

    async def infer(self, request: HttpRequest) -> Response:
        face, headers = self._face, request.headers
        self._check_model(request)
        header_length = headers.get("inference-header-content-length")
        _check_type(headers, binary=header_length is not None)
        body = await self._body(request)
        text, rest = split_body(body, header_length)
        asked = parse_infer(parse_json(text), rest, headers, face.contract, face.limits)
        answers = await self._answers(asked.rows, asked.asked, request)
        rows = [_row_of(answer, face.contract, asked.length) for answer in answers]
        served_by = _served_by(answers)
        told = infer_body((face.model, documents.VERSION), asked.asked, rows, served_by)
        return _with(told, served_by)

    async def text(self, request: HttpRequest) -> Response:
        face, headers = self._face, request.headers
        if "model" in request.path_params:
            self._check_model(request)
        _check_type(headers, binary=False)
        head = parse_json(await self._body(request))
        asked = parse_asked(head, headers, face.contract)
        texts = parse_texts(head, face.limits)
        answers = await self._answers(texts, asked, request)
        rows = [_row_of(answer, face.contract, answer.tokens) for answer in answers]
        body = text_body((face.model, documents.VERSION), asked, answers, rows)
        return _with(body, _served_by(answers))

    async def _body(self, request: HttpRequest) -> bytes:
        face = self._face
        face.check_ready()
        headers: Mapping[str, str] = request.headers
        return await read_body(
            request.receive, headers, face.limits.body_bytes, face.body_timeout_s
        )

    async def _answers(
        self, payloads: Sequence[Any], asked: Asked, request: HttpRequest
    ) -> list[Answer]:
        """Take the request in and return the answer to each of its payloads."""
        service = self._face.check_ready()
        self._face.enter()
        request.scope["qbench.taken"] = True
        answers = await ask(
            service,
            [Request(one, asked.tenant, asked.priority, asked.timeout_s) for one in payloads],
            request.receive,
        )
        self._face.metrics.answered(answers)
        return answers

    def _check_model(self, request: HttpRequest) -> None:
        given, version = request.path_params["model"], request.path_params.get("version")
        if given != self._face.model:
            near = did_you_mean(given[:256], [self._face.model])
            raise BadRequestError(
                f"unknown model {given[:256]!r}{near}; served here: {self._face.model!r}", 404
            )
        if version not in (None, documents.VERSION):
            raise BadRequestError(
                f"model {given!r} has no version {version[:40]!r}; served here: "
                f"{documents.VERSION!r}",
                404,
            )


class _Guard:
    """Counts each request, tells failures, and closes connections that must not be used again."""

    def __init__(
        self, inner: Callable[[Message, Receive, Send], Awaitable[None]], face: Face
    ) -> None:
        self._inner, self._face = inner, face

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        began_s, code = time.perf_counter(), _GONE

        async def tell(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                if self._face.draining:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        scope["app"] = self  # the router then raises what is unknown
        try:
            await self._inner(scope, receive, tell)
        except ClientGoneError:
            pass
        except Exception as error:  # what failed a request is the client's to know, by its status
            failure = _failure(error, scope)
            if failure.status == 500:
                _LOG.error(
                    "a request failed: %s", error, exc_info=not isinstance(error, QbenchError)
                )
            self._face.metrics.rejected(failure.kind)
            await self._tell_failure(failure, scope, receive, tell)
        finally:
            if scope.pop("qbench.taken", False):
                self._face.leave()
            endpoint = str(scope.get("path", "")).rsplit("/", 1)[-1]
            self._face.metrics.requested(
                endpoint if endpoint in _COUNTED else "other", code, time.perf_counter() - began_s
            )

    async def _tell_failure(
        self, failure: Failure, scope: Message, receive: Receive, send: Send
    ) -> None:
        response = _told(failure)
        if failure.status not in (408, 413, 415, 503):  # else the body may not have been read
            await response(scope, receive, send)
            return
        headers = [*response.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": failure.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        if failure.status != 408:
            await discard(receive, _DISCARD * self._face.limits.body_bytes, 2.0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _failure(error: Exception, scope: Message) -> Failure:
    if isinstance(error, _UnreadyError):
        return error.failure
    return _unknown(error, scope) if isinstance(error, HTTPException) else failure_of(error)


_COUNTED = ("infer", "text", "live", "ready", "metrics", "config", "stats", "v2", "index")


def _check_type(headers: Mapping[str, str], binary: bool) -> None:
    given = headers.get("content-type")
    if given is None:
        return
    kind = given.split(";", 1)[0].strip().lower()
    allowed = (_BYTES_TYPE, *_JSON_TYPES) if binary else _JSON_TYPES
    if kind not in allowed:
        raise BadRequestError(
            f"Content-Type is {given[:80]!r}; allowed: {_JSON_TYPES[0]}, or {_BYTES_TYPE} with "
            "Inference-Header-Content-Length",
            415,
        )


def _unknown(error: HTTPException, scope: Message) -> Failure:
    """Tell an unknown address or a wrong method."""
    path, method = str(scope["path"])[:200], str(scope["method"])[:20]
    words = f"{method} is not allowed here" if error.status_code == 405 else "no such address"
    return Failure(error.status_code, "unknown", f"{words}: {path}")


def _told(failure: Failure, **more: Any) -> Response:
    if failure.retry_after_s is not None:
        more["retry_after_ms"] = round(failure.retry_after_s * 1e3)
    return Response(
        error_body(failure.reason, **more), failure.status, failure.headers, _JSON_TYPES[0]
    )


def _json(content: Any) -> Response:
    import orjson

    option = orjson.OPT_SERIALIZE_NUMPY
    return Response(orjson.dumps(content, option=option), media_type=_JSON_TYPES[0])


def _row_of(answer: Answer, contract: Contract, length: int) -> dict[str, Any]:
    """Return the outputs of an answer to a request of that length."""
    if answer.served_by == "default":
        return fill_default(answer.value, contract, length)
    return contract.cut(answer.value, length)


def _served_by(answers: Sequence[Answer]) -> str:
    return next((a.served_by for a in answers if a.served_by != "engine"), "engine")


def _with(body: Body, served_by: str) -> Response:
    headers = {} if served_by == "engine" else {"X-Served-By": served_by}
    if body.header_length is not None:
        headers["Inference-Header-Content-Length"] = str(body.header_length)
    return Response(body.content, headers=headers, media_type=body.media_type)
