# SPDX-License-Identifier: Apache-2.0
"""The routes of REST: the Open Inference Protocol, metrics, the status and a page."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import unquote

from hotbed.errors import (
    HotbedError,
    NotServed,
    Overloaded,
    PersistError,
    RequestTooLarge,
    ServingError,
    Unauthorized,
)
from hotbed.memory_limit import memory_limits
from hotbed.serving.protocol.offered import (
    REQUEST_ID,
    check_load,
    request_id_header,
    server_metadata,
)
from hotbed.serving.protocol.rest import (
    HEADER_LENGTH,
    InferRequest,
    RequestReader,
    check_type,
    read_object,
    write_answer,
)
from hotbed.serving.server.access import RequestName, Trails
from hotbed.serving.server.endpoints.page import page
from hotbed.serving.server.endpoints.triton import model_config, model_statistics
from hotbed.serving.server.http_interface import (
    App,
    HttpRequest,
    HttpResponse,
    Reply,
    Route,
    refusal,
)
from hotbed.serving.server.meters import combine_statuses
from hotbed.serving.server.scoring.batching import DecodedRequest, ServedVersion
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.tokens import (
    ANY_ROLE,
    FORWARDED,
    INFER,
    OPERATE,
    SCRAPE,
    Caller,
    Tokens,
    denied,
    is_open,
)
from hotbed.serving.session import Scores

log = logging.getLogger("hotbed.serving")
_OPEN = ("/v2/health/live", "/v2/health/ready")  # probes send no token
_BODY_BYTES = 64 << 10  # of a request other than for predictions
_CACHED_PATHS = 256
_MODEL = r"/v2/models/([^/]+)(?:/versions/([^/]+))?"
_INFER = "/v2/models/{model}/infer"
_INFER_VERSION = "/v2/models/{model}/versions/{version}/infer"
_CLIENT_LEFT = 499  # nginx's status of a request whose client did not wait for the answer
_REPOSITORY = r"/v2/repository"
_ROLE_PATHS = [
    (INFER, re.compile(f"{_MODEL}/infer")),
    (OPERATE, re.compile(f"{_REPOSITORY}/models/[^/]+/(?:load|unload)")),
    (SCRAPE, re.compile(f"/|/metrics|/status|/v2/models/stats|{_MODEL}/stats")),
]
T = TypeVar("T")


def http_status(error: Exception) -> int:
    """Return the HTTP status of an error."""
    for kind, status in (
        (NotServed, 404),
        (Overloaded, 429),
        (Unauthorized, 401),
        (ServingError, 503),
        (PersistError, 409),
        (RequestTooLarge, 413),
        (HotbedError, 400),
    ):
        if isinstance(error, kind):
            return status
    return 500


class Api(App):
    """The routes of the protocol.

    A handler takes the names in the path, then the request.

    Args:
        models: the models to serve.
        tokens: the tokens of which requests need one; None = no token is needed.
        trails: follows the requests; None = only those that are in a trace.
        scheme: http, or https.
    """

    def __init__(
        self,
        models: Models,
        tokens: Tokens | None,
        trails: Trails | None = None,
        scheme: str = "http",
    ) -> None:
        self._models = models
        self._tokens = tokens
        self._trails = trails or Trails(models.request_ids)
        self._scheme = scheme
        self._reader = RequestReader()
        routes: list[tuple[str, str, Callable[..., Reply]]] = [
            ("POST", f"{_MODEL}/infer", self._infer),
            ("GET", "/v2/health/live", self._live),
            ("GET", "/v2/health/ready", self._ready),
            ("GET", "/v2/?", self._server),
            ("GET", f"{_MODEL}/ready", self._model_ready),
            ("GET", f"{_MODEL}/config", self._config),
            ("GET", f"{_MODEL}/stats", self._model_statistics),
            ("GET", "/v2/models/stats", self._statistics),
            ("GET", _MODEL, self._metadata),
            ("GET", "/metrics", self._metrics),
            ("GET", "/status", self._status),
            ("GET", "/", self._page),
            ("POST", f"{_REPOSITORY}/index", self._index),
            ("POST", f"{_REPOSITORY}/models/([^/]+)/load", self._load),
            ("POST", f"{_REPOSITORY}/models/([^/]+)/unload", self._unload),
        ]
        self._routes = [
            (method, re.compile(pattern), handler) for method, pattern, handler in routes
        ]
        self._find_cached = lru_cache(_CACHED_PATHS)(self._find)
        self._find_role = lru_cache(_CACHED_PATHS)(_role_of)

    def refuse(self, request: HttpRequest) -> HttpResponse | None:
        """Reject requests that the caller may not make, and those with a Content-Encoding."""
        role = self._find_role(request.path)
        if request.path not in _OPEN and not is_open(self._tokens, role):
            reason = denied(self._tokens, role, _caller(request))
            if reason is not None and reason.is_known:
                return refusal(403, reason.reason)
            if reason is not None:
                challenge = {"WWW-Authenticate": 'Bearer, Basic realm="hotbed"'}
                return refusal(401, reason.reason, challenge)
        coding = request.headers.get("content-encoding")
        if coding and any(
            name.strip().lower() not in ("", "identity") for name in coding.split(",")
        ):
            return refusal(
                415,
                f"content-encoding: expected none, got {coding[:40]!r}. Send the body as it is.",
            )
        return None

    def route(self, request: HttpRequest) -> Route:
        return self._find_cached(request.method, request.path)

    def begin(self, request: HttpRequest, route: Route) -> None:
        headers = request.headers
        if not self._trails.needs(headers):
            return
        name = f"{request.method} {request.path}"
        span_name = f"{request.method} {route.template}".rstrip()
        call = RequestName("http", name, bool(route.template), span_name)
        values = {
            "http.request.method": request.method,
            "url.path": request.path,
            "url.scheme": self._scheme,
            "http.route": route.template,
            "network.protocol.version": "1.1",
            "client.address": request.peer,
            "user_agent.original": headers.get("user-agent", ""),
        }
        attributes = {key: value for key, value in values.items() if value}
        request_id = headers.get(REQUEST_ID, "")
        request.trail = self._trails.begin(call, headers, request_id, attributes)

    def ended(self, request: HttpRequest, response: HttpResponse | None) -> None:
        trail = request.trail
        if trail is None:
            return
        if response is None:
            trail.ended(_CLIENT_LEFT, "the client has left")
            return
        trail.ended(response.status, _reason_of(response))
        response.headers = {**response.headers, **trail.answer_headers()}

    def failed(self, request: HttpRequest, error: Exception) -> HttpResponse:
        if isinstance(error, HotbedError):
            status = http_status(error)
            headers = {"Retry-After": "1"} if status == 429 else None
            return refusal(status, str(error), headers)
        log.error("a request failed: %s %s", request.method, request.path, exc_info=error)
        return refusal(500, "an error of the server; its log has more")

    def _find(self, method: str, path: str) -> Route:
        """Return the route of a path; for an unknown path, one that answers with an error."""
        allowed: list[str] = []
        for expected, pattern, handler in self._routes:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            methods = ["GET", "HEAD"] if expected == "GET" else [expected]
            if method in methods:
                names = [unquote(name or "") for name in match.groups()]
                answer = partial(handler, *names)
                if handler == self._infer:
                    template = _INFER_VERSION if names[1] else _INFER
                    return Route(answer, partial(self._infer_bytes, names[0]), template)
                return Route(answer, _call_bytes)
            allowed += methods
        reason = f"{method} {unquote(path)[:200]}: there is no such route. See docs/serving.md."
        if not allowed:
            return Route(lambda request: refusal(404, reason), _call_bytes)
        headers = {"Allow": ", ".join(dict.fromkeys(allowed))}
        return Route(lambda request: refusal(405, reason, headers), _call_bytes)

    def _infer_bytes(self, name: str) -> int:
        """Return the longest body of a request to a model."""
        model = self._models.find(name)
        if model is None:
            return self._models.bounds.body_bytes
        return model.bounds.body_bytes

    def _live(self, request: HttpRequest) -> HttpResponse:
        return _json({"live": True})

    def _ready(self, request: HttpRequest) -> HttpResponse:
        ready = self._models.ready
        return replace(_json({"ready": ready}), status=200 if ready else 503)

    def _server(self, request: HttpRequest) -> HttpResponse:
        return _json(server_metadata())

    def _model_ready(self, name: str, version: str, request: HttpRequest) -> HttpResponse:
        self._models.metadata(name, version)  # raises NotServed unless it is ready
        return _json({"name": name, "ready": True})

    def _metadata(self, name: str, version: str, request: HttpRequest) -> HttpResponse:
        return _json(self._models.metadata(name, version))

    def _config(self, name: str, version: str, request: HttpRequest) -> HttpResponse:
        return _json(model_config(self._models, name, version))

    def _statistics(self, request: HttpRequest) -> Reply:
        return self._model_statistics("", "", request)

    def _model_statistics(self, name: str, version: str, request: HttpRequest) -> Reply:
        collect = partial(model_statistics, self._models, name, version)
        return _on_thread(collect, lambda statistics: _json({"model_stats": statistics}))

    def _infer(self, name: str, version: str, request: HttpRequest) -> Reply:
        started = time.perf_counter()
        meters = self._models.meters
        length = request.headers.get(HEADER_LENGTH.lower())
        request_id = request.headers.get(REQUEST_ID, "")
        trail = request.trail
        if trail is not None:
            trail.model = name

        def decode(served: ServedVersion) -> DecodedRequest[HttpResponse]:
            infer = self._reader.read(request.body, length, served.bounds)
            candidates = served.inputs.columns(infer.tensors, served.bounds)
            known_as = self._models.request_ids.name(request_id, infer.id)
            write = partial(_write_scores, infer, name, known_as)
            return DecodedRequest(candidates, write, name, version, known_as, trail)

        try:
            num_bytes = self._reader.decoded_bytes(request.body, length)
            queue = self._models.named(name).queue(version)
            future = queue.submit(num_bytes, decode, is_last=request.is_last)
        except Exception as error:
            meters.ended(name, "http", started, error)
            raise
        meters.watch(name, "http", started, future)
        return future

    def _metrics(self, request: HttpRequest) -> Reply:
        parent = self._models.parent
        if parent is None:
            return _text(self._models.meters.text())
        return _on_thread(parent.metrics, _text)

    def _status(self, request: HttpRequest) -> Reply:
        return self._with_status(_status_json)

    def _with_status(self, write: Callable[[Mapping[str, Any]], HttpResponse]) -> Reply:
        """Answer with what `write` makes of the state of all processes."""
        parent = self._models.parent
        if parent is None:
            return write({"models": combine_statuses([self._models.status()])})
        return _on_thread(parent.status, write)

    def _page(self, request: HttpRequest) -> Reply:
        return self._with_status(_page_html)

    def _index(self, request: HttpRequest) -> HttpResponse:
        spec = read_object(request.body or b"{}")
        ready: bool = check_type(spec.get("ready", False), bool, "ready")
        return _json(self._models.index(ready))

    def _load(self, name: str, request: HttpRequest) -> Reply:
        spec = read_object(request.body or b"{}")
        check_load(check_type(spec.get("parameters", {}), dict, "parameters"))
        model = self._models.named(name)
        return asyncio.ensure_future(_change(model.aside.submit(self._models.load, name)))

    def _unload(self, name: str, request: HttpRequest) -> Reply:
        model = self._models.named(name)
        return asyncio.ensure_future(_change(model.aside.submit(self._models.unload, name)))


def _role_of(path: str) -> str:
    """Return the role that the requests for a path need."""
    for role, pattern in _ROLE_PATHS:
        if pattern.fullmatch(path):
            return role
    return ANY_ROLE


def _caller(request: HttpRequest) -> Caller:
    headers = request.headers
    return Caller(
        headers.get("authorization"),
        request.peer,
        headers.get("origin", ""),
        headers.get("host", ""),
        any(name in headers for name in FORWARDED),
    )


def _reason_of(response: HttpResponse) -> str:
    """Return the reason in an error, "" of an answer."""
    if response.status < 400:
        return ""
    reason: str = json.loads(response.body).get("error", "")
    return reason


def _call_bytes() -> int:
    return _BODY_BYTES


def _write_scores(
    request: InferRequest, name: str, request_id: str, scores: Scores
) -> HttpResponse:
    body, head_bytes = write_answer(request, name, scores)
    headers = request_id_header(request_id)
    if head_bytes is None:
        return HttpResponse(200, body, headers=headers)
    headers[HEADER_LENGTH] = str(head_bytes)
    return HttpResponse(200, body, "application/octet-stream", headers)


def _on_thread(work: Callable[[], T], write: Callable[[T], HttpResponse]) -> Reply:
    """Answer with what `work` returns; it runs on a thread, since it waits for other processes."""

    async def answer() -> HttpResponse:
        return write(await asyncio.to_thread(work))

    return asyncio.ensure_future(answer())


async def _change(done: Future[None]) -> HttpResponse:
    await asyncio.wrap_future(done)
    return HttpResponse()


def _text(metrics: bytes) -> HttpResponse:
    return HttpResponse(200, metrics, "text/plain; version=0.0.4; charset=utf-8")


def _status_json(status: Mapping[str, Any]) -> HttpResponse:
    memory = [asdict(limit) for limit in memory_limits()[:1]]  # none where the system says none
    plain = {**server_metadata(), **status, "memory": memory[0] if memory else None}
    return _json(plain, {"Cache-Control": "no-store"})


def _page_html(status: Mapping[str, Any]) -> HttpResponse:
    nonce = secrets.token_urlsafe(16)  # only the page's own script runs
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
        "Cache-Control": "no-store",
    }
    body = page(server_metadata(), status, nonce)
    return HttpResponse(200, body, "text/html; charset=utf-8", headers)


def _json(value: Any, headers: Mapping[str, str] | None = None) -> HttpResponse:
    body = json.dumps(value, separators=(",", ":")).encode()
    return HttpResponse(200, body, headers=headers or {})
