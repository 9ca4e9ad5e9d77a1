# SPDX-License-Identifier: Apache-2.0
"""The server: the Open Inference Protocol over REST, metrics and a page; it also starts gRPC.

Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

from hotbed import checks, config
from hotbed.errors import (
    ConfigError,
    DataError,
    HotbedError,
    MissingExtra,
    NotServed,
    Overloaded,
    PersistError,
    ServingError,
    Unauthorized,
)
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.process import (
    DAY,
    LAST_PORT,
    Elsewhere,
    JsonLines,
    Stoppable,
    Tokens,
    address,
    followed_of,
    models_of,
    tls,
)
from hotbed.serving.rows import RowDtype
from hotbed.serving.server.asks import HEADER_LENGTH, Ask, Asks, read_object
from hotbed.serving.server.batching import Limits
from hotbed.serving.server.meters import together
from hotbed.serving.server.models import Current, Models, Reading, is_remote
from hotbed.serving.server.protocol import about, check_load, write_answer
from hotbed.serving.server.triton import model_config, model_statistics
from hotbed.serving.session import Scores
from hotbed.serving.stores.following import collecting, open_follower

try:
    from hotbed.serving.server.connection import App, HttpServer, Request, Response, refusal
except ImportError as error:
    raise MissingExtra(
        f"a server needs {error.name}, which is not installed. Run pip install hotbed[serve]."
    ) from error

log = logging.getLogger("hotbed.serving")
_OPEN = ("/v2/health/live", "/v2/health/ready")  # probes send no token
_PAGE = Path(__file__).with_name("page.html")
_LAST_SECONDS = 30
_BACKLOG = 2048
_BODY_BYTES = 64 << 10  # of a request other than for predictions
# a thread that loads a version delays requests by so much, not by Python's default of 5 ms
_SWITCH_SECONDS = 0.0005
T = TypeVar("T")
Reply: TypeAlias = "Response | asyncio.Future[Response]"


@dataclass(frozen=True)
class Options:
    """Where a server listens, its limits of time and its rows.

    Args:
        host: Address to listen at.
        port: Port of REST; 0 = a free port.
        grpc_port: Port of gRPC; 0 = a free port; None = no gRPC.
        token_file: File with one token a line; requests without one of them are rejected.
        tls_cert: PEM file of the certificate, for both ports.
        tls_key: PEM file of its key.
        drain_seconds: How long requests are still answered after SIGTERM, while readiness is
            false.
        request_seconds: Limit for a request to arrive completely, and for a client to read an
            answer.
        idle_seconds: Connections without a request are closed after this time.
        rows: Folder of mapped rows; None = a temporary folder.
        dtype: float32, float16 or int8 rows.
        workers: Number of processes that answer.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = 8001
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_seconds: float = 1.0
    request_seconds: float = 30.0
    idle_seconds: float = 60.0
    rows: str | None = None
    dtype: RowDtype = "float32"
    workers: int = 1

    def __post_init__(self) -> None:
        checks.between("Options.port", self.port, 0, LAST_PORT)
        checks.between("Options.grpc_port", self.grpc_port, 0, LAST_PORT)
        checks.at_least("Options.workers", self.workers, 1)
        checks.between("Options.drain_seconds", self.drain_seconds, 0, DAY)
        checks.between("Options.request_seconds", self.request_seconds, 0.001, DAY)
        checks.between("Options.idle_seconds", self.idle_seconds, 0.001, DAY)


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    for kind, status in (
        (NotServed, 404),
        (Overloaded, 429),
        (Unauthorized, 401),
        (ServingError, 503),
        (PersistError, 409),
        (HotbedError, 400),
    ):
        if isinstance(error, kind):
            return status
    return 500


class Api(App):
    """The routes of the protocol."""

    def __init__(self, models: Models, tokens: Tokens | None) -> None:
        self._models = models
        self._tokens = tokens
        self._asks = Asks()
        model = r"/v2/models/([^/]+)(?:/versions/([^/]+))?"
        repository = r"/v2/repository"
        routes: list[tuple[str, str, Callable[..., Reply]]] = [
            ("POST", f"{model}/infer", self._infer),
            ("GET", "/v2/health/live", self._live),
            ("GET", "/v2/health/ready", self._ready),
            ("GET", "/v2/?", self._server),
            ("GET", f"{model}/ready", self._model_ready),
            ("GET", f"{model}/config", self._config),
            ("GET", f"{model}/stats", self._model_statistics),
            ("GET", "/v2/models/stats", self._statistics),
            ("GET", model, self._metadata),
            ("GET", "/metrics", self._metrics),
            ("GET", "/status", self._status),
            ("GET", "/", self._page),
            ("POST", f"{repository}/index", self._index),
            ("POST", f"{repository}/models/([^/]+)/load", self._load),
            ("POST", f"{repository}/models/([^/]+)/unload", self._unload),
        ]
        self._routes = [
            (method, re.compile(pattern), handler) for method, pattern, handler in routes
        ]
        self._route = lru_cache(256)(self._find)

    def refuse(self, request: Request) -> Response | None:
        """Reject requests without a valid token or with a Content-Encoding."""
        token = request.headers.get("authorization")
        if self._tokens is not None and request.path not in _OPEN and not self._tokens.admit(token):
            return refusal(
                401,
                "no token, or a wrong one. Send Authorization: Bearer TOKEN.",
                {"WWW-Authenticate": 'Bearer, Basic realm="hotbed"'},
            )
        coding = request.headers.get("content-encoding", "identity")
        if coding != "identity":
            return refusal(
                415,
                f"content-encoding: expected none, got {coding[:40]!r}. Send the body as it is.",
            )
        return None

    def body_bytes(self, request: Request) -> int:
        """Return the longest body of the request; of predictions, the limit of their model."""
        handler, values = self._route(request.method, request.path)
        if handler != self._infer:
            return _BODY_BYTES
        model = self._models.find(values[0])
        if model is None:
            return self._models.bounds.body_bytes
        return model.bounds.body_bytes

    def answer(self, request: Request) -> Reply:
        handler, values = self._route(request.method, request.path)
        return handler(request, *values)

    def failed(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HotbedError):
            status = status_of(error)
            return refusal(status, str(error), {"Retry-After": "1"} if status == 429 else None)
        log.error("a request failed: %s %s", request.method, request.path, exc_info=error)
        return refusal(500, "an error of the server; its log has more")

    def _find(self, method: str, path: str) -> tuple[Callable[..., Reply], tuple[str, ...]]:
        """Return the handler of a path, and the names in the path."""
        allowed: list[str] = []
        for wanted, pattern, handler in self._routes:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            methods = ["GET", "HEAD"] if wanted == "GET" else [wanted]
            if method in methods:
                return handler, tuple(unquote(name or "") for name in match.groups())
            allowed += methods
        reason = f"{method} {unquote(path)[:200]}: there is no such route. See docs/serving.md."
        if not allowed:
            return lambda request: refusal(404, reason), ()
        allow = {"Allow": ", ".join(dict.fromkeys(allowed))}
        return lambda request: refusal(405, reason, allow), ()

    def _live(self, request: Request) -> Response:
        return _json({"live": True})

    def _ready(self, request: Request) -> Response:
        ready = self._models.ready
        return replace(_json({"ready": ready}), status=200 if ready else 503)

    def _server(self, request: Request) -> Response:
        return _json(about())

    def _model_ready(self, request: Request, name: str, version: str) -> Response:
        self._models.metadata(name, version)  # raises NotServed unless it is ready
        return _json({"name": name, "ready": True})

    def _metadata(self, request: Request, name: str, version: str) -> Response:
        return _json(self._models.metadata(name, version))

    def _config(self, request: Request, name: str, version: str) -> Response:
        return _json(model_config(self._models, name, version))

    def _statistics(self, request: Request) -> Reply:
        return self._model_statistics(request, "", "")

    def _model_statistics(self, request: Request, name: str, version: str) -> Reply:
        ask = partial(model_statistics, self._models, name, version)
        return asyncio.ensure_future(_gathered(ask, lambda stats: _json({"model_stats": stats})))

    def _infer(self, request: Request, name: str, version: str) -> Reply:
        started = time.perf_counter()
        meters = self._models.meters

        length = request.headers.get(HEADER_LENGTH.lower())

        def read(current: Current) -> Reading[Response]:
            ask = binary or self._asks.read(request.body, length, current.bounds)
            columns = current.inputs.columns(ask.tensors, current.bounds)
            return Reading(columns, partial(_written, ask, name))

        try:
            binary = self._asks.known(request.body, length)
            size = 0 if binary else len(request.body)  # binary numbers are not decoded
            future = self._models.score(name, version, size, read)
        except Exception as error:
            meters.ended(name, "http", started, error)
            raise
        meters.watch(name, "http", started, future)
        return future

    def _metrics(self, request: Request) -> Reply:
        parent = self._models.parent
        if parent is None:
            return _text(self._models.meters.text())
        return asyncio.ensure_future(_gathered(parent.metrics, _text))

    def _status(self, request: Request) -> Reply:
        parent = self._models.parent
        if parent is None:
            return _shown({"models": together([self._models.status()])})
        return asyncio.ensure_future(_gathered(parent.status, _shown))

    def _page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)  # only the page's own script runs
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; "
            f"script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
        }
        page = _PAGE.read_text(encoding="utf-8").replace("$nonce", nonce)
        return Response(200, page.encode(), "text/html; charset=utf-8", headers)

    def _index(self, request: Request) -> Response:
        return _json(
            self._models.index(ready=bool(read_object(request.body or b"{}").get("ready")))
        )

    def _load(self, request: Request, name: str) -> Reply:
        parameters = read_object(request.body or b"{}").get("parameters", {})
        if not isinstance(parameters, dict):
            raise DataError(
                f"parameters: expected an object, got {type(parameters).__name__}. Leave them out."
            )
        check_load(parameters)
        return asyncio.ensure_future(_after(self._models.aside.submit(self._models.load, name)))

    def _unload(self, request: Request, name: str) -> Reply:
        return asyncio.ensure_future(_after(self._models.aside.submit(self._models.unload, name)))


def _written(ask: Ask, name: str, scores: Scores) -> Response:
    body, split = write_answer(ask, name, scores)
    if split is None:
        return Response(200, body)
    return Response(200, body, "application/octet-stream", {HEADER_LENGTH: str(split)})


async def _gathered(ask: Callable[[], T], write: Callable[[T], Response]) -> Response:
    return write(await asyncio.to_thread(ask))


def _text(metrics: bytes) -> Response:
    return Response(200, metrics, "text/plain; version=0.0.4; charset=utf-8")


def _shown(status: Mapping[str, Any]) -> Response:
    return _json({**about(), **status}, {"Cache-Control": "no-store"})


async def _after(done: Future[None]) -> Response:
    await asyncio.wrap_future(done)
    return Response()


def _json(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(200, json.dumps(value, separators=(",", ":")).encode(), headers=headers or {})


class Server(Stoppable):
    """Answers requests for `models` until it is stopped.

    `run` blocks. In the main thread, SIGTERM and SIGINT end it: readiness turns false, requests are
    answered for another `drain_seconds`, then no new requests are accepted and those under way are
    finished.

    Args:
        models: The models.
        options: Where to listen, and limits of time.
        listener: A socket that other processes listen at as well; they share the gRPC port, too.

    Raises:
        ConfigError: It cannot listen.

    Example: `Server(models, Options(port=8000)).run()`
    """

    def __init__(
        self, models: Models, options: Options | None = None, listener: socket.socket | None = None
    ) -> None:
        super().__init__()
        self._models = models
        self._options = options or Options()
        self._shared = listener is not None
        token_file = self._options.token_file
        self._tokens = None if token_file is None else Tokens(token_file)
        self._tls, self._secure = tls(self._options.tls_cert, self._options.tls_key)
        self._socket = listener or listen(self._options.host, self._options.port)
        self.port: int = self._socket.getsockname()[1]
        self.grpc_port: int | None = None

    def run(self) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        super().run()

    async def _serve(self, stopped: asyncio.Event) -> None:
        options = self._options
        remote = await self._start_grpc()
        app = Api(self._models, self._tokens)
        http = HttpServer(app, options.request_seconds, options.idle_seconds, self._secure)
        serving = asyncio.create_task(http.serve([self._socket]))
        log.info("listening on port %d, gRPC %s", self.port, self.grpc_port or "off")
        self.started.set()
        await stopped.wait()
        self._models.stopping = True
        http.closing = True
        log.info("draining")
        await asyncio.sleep(self._options.drain_seconds)
        http.should_exit = True
        if remote is not None:
            await remote.stop(_LAST_SECONDS)
        await serving
        await asyncio.to_thread(self._models.close)
        log.info("stopped")

    async def _start_grpc(self) -> Any:
        if self._options.grpc_port is None:
            return None
        from hotbed.serving.server.grpc import start

        admit = None if self._tokens is None else self._tokens.admit
        place = address(self._options.host, self._options.grpc_port)
        server = await start(
            self._models, place, admit, self._tls, self._shared, self._options.idle_seconds
        )
        self.grpc_port = server.port
        return server


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError if that is not possible."""
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"serve: cannot listen at {host}:{port}, got {error}. Give a free port, or 0."
        ) from error


_SETTINGS: tuple[Any, Any, Any] = (Options, Limits, Elsewhere)


def serve(sources: Sequence[str], watch: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Serve exported models until SIGTERM; the command `hotbed serve`.

    Args:
        sources: The models, each `[NAME=]PATH`.
        watch: What models follow, each `[NAME=]SOURCE`.
        settings: Keys of `Options`, `Limits` and `Elsewhere`.

    Raises:
        ConfigError: A source or a setting is wrong.
    """
    kinds = {field.name: kind for kind in _SETTINGS for field in fields(kind)}
    for key in settings:
        if key not in kinds:
            raise ConfigError(
                f"serve.{key}: unknown key, got {settings[key]!r}. "
                f"{config.did_you_mean(key, kinds)}"
            )
    by_kind = {
        kind: {key: settings[key] for key in settings if kinds[key] is kind} for kind in _SETTINGS
    }
    options, limits, elsewhere = (config.build(by_kind[kind], kind, "serve") for kind in _SETTINGS)
    logging.basicConfig(level=logging.INFO, handlers=[JsonLines()])
    logging.captureWarnings(True)
    named = models_of(sources)
    followed = followed_of(watch, named)
    store = ParameterServer(options.rows, options.dtype)
    models = Models(store, limits, elsewhere.reach, elsewhere.cache())
    for name, source in named.items():
        if options.workers == 1 or not is_remote(source):
            models.add(name, source)
    server: Any
    if options.workers == 1:
        server = Server(models, options)  # listens from here on
    else:
        from hotbed.serving.server.workers import Workers

        server = Workers(models, named, replace(options, rows=str(store.folder)), limits, elsewhere)
    with collecting(source for _, source in followed) as cache:
        for number, (name, source) in enumerate(followed):
            models.follow(name, partial(open_follower, source, cache / str(number)))
        server.run()
