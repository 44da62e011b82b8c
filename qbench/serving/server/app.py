"""The addresses of the server, its limits, and how each failure is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router

from qbench.errors import QbenchError
from qbench.serving.server import documents
from qbench.serving.server.answering import JSON_TYPES, Infer, Message, Receive, Send, Texts
from qbench.serving.server.asking import ClientGoneError
from qbench.serving.server.bodies import discard
from qbench.serving.server.face import CLOSING, STARTING, Face, UnreadyError
from qbench.serving.server.failing import Failure, failure_of
from qbench.serving.server.replies import error_body

_LOG = logging.getLogger(__name__)
_GONE = 499  # nobody reads it; it is counted
_DISCARD = 4  # bodies of the largest size that are taken in after a refusal
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


def make_app(face: Face) -> App:
    """Return the ASGI application."""
    face.idle.set()
    addresses = _Addresses(face)
    model = "/v2/models/{model}"
    stems = (model, model + "/versions/{version}")
    infer, texts = Infer(face), Texts(face)
    routes = [Route(f"{stem}/infer", infer, methods=["POST"]) for stem in stems]
    routes += [Route(f"{stem}/text", texts, methods=["POST"]) for stem in stems]
    routes.append(Route("/text", texts, methods=["POST"]))
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
    straight = {f"/v2/models/{face.model}/infer": infer, "/text": texts}
    return _Guard(Router(routes, redirect_slashes=False), straight, face)


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
        return _told(CLOSING if self._face.draining else STARTING, ready=False)

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
            return _told(STARTING)
        handled = self._face.metrics.handled()
        return _json(documents.statistics(self._face.model, service.stats(), handled))

    async def index(self, request: HttpRequest) -> Response:
        state = "READY" if self._face.ready else "UNAVAILABLE"
        told = {"name": self._face.model, "version": documents.VERSION, "state": state}
        return _json([{**told, "reason": ""}])

    def _check_model(self, request: HttpRequest) -> None:
        names = request.path_params
        self._face.check_model(names["model"], names.get("version"))

    async def metrics(self, request: HttpRequest) -> Response:
        metrics = self._face.metrics
        return Response(metrics.page(), headers={"content-type": metrics.content_type})


class _Guard:
    """Counts each request, tells failures, and closes connections that must not be used again."""

    def __init__(self, inner: App, straight: Mapping[str, App], face: Face) -> None:
        """Take the router, and what it would find for a POST to the addresses that answer."""
        self._inner, self._straight, self._face = inner, straight, face

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
        straight = self._straight.get(scope["path"]) if scope["method"] == "POST" else None
        try:
            await (straight or self._inner)(scope, receive, tell)
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
    if isinstance(error, UnreadyError):
        return error.failure
    return _unknown(error, scope) if isinstance(error, HTTPException) else failure_of(error)


_COUNTED = ("infer", "text", "live", "ready", "metrics", "config", "stats", "v2", "index")


def _unknown(error: HTTPException, scope: Message) -> Failure:
    """Tell an unknown address or a wrong method."""
    path, method = str(scope["path"])[:200], str(scope["method"])[:20]
    words = f"{method} is not allowed here" if error.status_code == 405 else "no such address"
    return Failure(error.status_code, "unknown", f"{words}: {path}")


def _told(failure: Failure, **more: Any) -> Response:
    if failure.retry_after_s is not None:
        more["retry_after_ms"] = round(failure.retry_after_s * 1e3)
    return Response(
        error_body(failure.reason, **more), failure.status, failure.headers, JSON_TYPES[0]
    )


def _json(content: Any) -> Response:
    import orjson

    option = orjson.OPT_SERIALIZE_NUMPY
    return Response(orjson.dumps(content, option=option), media_type=JSON_TYPES[0])
