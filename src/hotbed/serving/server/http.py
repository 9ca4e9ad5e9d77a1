# SPDX-License-Identifier: Apache-2.0
"""The server: the Open Inference Protocol over REST, metrics and a page; gRPC beside it. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import signal
import socket
import ssl
import sys
import tempfile
import threading
import traceback
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from hotbed import config
from hotbed.errors import ConfigError, HotbedError, MissingExtra, NotServed, Overloaded, PersistError, ServingError
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.rows import RowDtype
from hotbed.serving.server.batching import Limits
from hotbed.serving.server.models import Models, open_follower
from hotbed.serving.server.protocol import HEADER_LENGTH, about, read_ask, read_object, write_answer

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtra(f"a server needs {error.name} — it is not installed — pip install hotbed[serve]") from error

log = logging.getLogger("hotbed.serving")
_OPEN = ("/v2/health/live", "/v2/health/ready")  # what probes ask, who hold no token
_PAGE = Path(__file__).with_name("page.html")
_BODY_SECONDS, _LAST_SECONDS = 30, 30


@dataclass(frozen=True)
class Options:
    """Where a server listens and whom it answers.

    `port`, `grpc_port`: 0 = a free one; None = no gRPC. `token_file`: one token a line; who sends none of them is refused.
    `tls_cert`, `tls_key`: PEM files. `drain_seconds`: on SIGTERM, how long it answers on while readiness says no. `rows`: folder
    of mapped rows (None: a temporary one); `dtype`: float32, float16 or int8 rows.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = 8001
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_seconds: float = 1.0
    rows: str | None = None
    dtype: RowDtype = "float32"


def status_of(error: Exception) -> int:
    """The HTTP status that tells of an error."""
    for kind, status in ((NotServed, 404), (Overloaded, 429), (PersistError, 409), (HotbedError, 400)):
        if isinstance(error, kind):
            return status
    return 500


class Tokens:
    """The tokens of a file, compared in constant time."""

    def __init__(self, path: str) -> None:
        try:
            lines = Path(path).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"token_file: cannot be read — received {path}: {error} — give a file of tokens"
            ) from error
        if not lines:
            raise ConfigError(f"token_file: no token — received {path}, an empty file — write one a line")
        self._digests = [hashlib.sha256(line.encode()).digest() for line in lines]

    def admit(self, authorization: str | None) -> bool:
        """Whether `Bearer TOKEN`, or `Basic` with any user and the token as password, is right."""
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() == "basic":
            try:
                token = b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif kind.lower() != "bearer":
            return False
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        return any([hmac.compare_digest(digest, one) for one in self._digests])


class Api:
    """The routes of the protocol."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def app(self, tokens: Tokens | None) -> Any:
        """The ASGI application."""
        one, repository = "/v2/models/{name}", "/v2/repository"
        routes = [Route(path, _told(handler), methods=[method]) for method, path, handler in [
            ("GET", "/v2/health/live", self._live),
            ("GET", "/v2/health/ready", self._ready),
            ("GET", "/v2", self._server),
            *[("GET", f"{path}/ready", self._model_ready) for path in (one, one + "/versions/{version}")],
            *[("GET", path, self._metadata) for path in (one, one + "/versions/{version}")],
            *[("POST", f"{path}/infer", self._infer) for path in (one, one + "/versions/{version}")],
            ("GET", "/metrics", self._metrics),
            ("GET", "/status", self._status),
            ("GET", "/", self._page),
            ("POST", f"{repository}/index", self._index),
            ("POST", f"{repository}/models/{{name}}/load", self._load),
            ("POST", f"{repository}/models/{{name}}/unload", self._unload),
        ]]  # fmt: skip
        return Gate(Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown}), self._models, tokens)

    async def _live(self, request: Request) -> Response:
        return Response()

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._models.ready else 503)

    async def _server(self, request: Request) -> Response:
        return JSONResponse(about())

    async def _model_ready(self, request: Request) -> Response:
        self._models.metadata(*_asked(request))  # raises where it is not
        return Response()

    async def _metadata(self, request: Request) -> Response:
        return JSONResponse(self._models.metadata(*_asked(request)))

    async def _infer(self, request: Request) -> Response:
        name, version = _asked(request)
        with self._models.meters.answering(name, "http"):
            ask = read_ask(await self._body(request), request.headers.get(HEADER_LENGTH))
            answer = await self._models.score(name, version, ask.tensors)
            body, split = write_answer(ask, name, answer.version, answer.outputs)
        if split is None:
            return Response(body, media_type="application/json")
        return Response(body, headers={HEADER_LENGTH: str(split)}, media_type="application/octet-stream")

    async def _metrics(self, request: Request) -> Response:
        return Response(self._models.meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _status(self, request: Request) -> Response:
        return JSONResponse({**about(), "models": self._models.status()}, headers={"Cache-Control": "no-store"})

    async def _page(self, request: Request) -> Response:
        once = secrets.token_urlsafe(16)  # only the page's own script runs
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{once}'; connect-src 'self'; img-src data:"
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(_PAGE.read_text(encoding="utf-8").replace("$nonce", once), headers=headers)

    async def _index(self, request: Request) -> Response:
        body = await self._body(request)
        return JSONResponse(self._models.index(ready=bool(read_object(body or b"{}").get("ready"))))

    async def _load(self, request: Request) -> Response:
        await asyncio.to_thread(self._models.load, request.path_params["name"])
        return Response()

    async def _unload(self, request: Request) -> Response:
        await asyncio.to_thread(self._models.unload, request.path_params["name"])
        return Response()

    async def _body(self, request: Request) -> bytes:
        limit, parts, size = self._models.limits.body_bytes, [], 0
        if request.headers.get("content-encoding", "identity") != "identity":
            raise _Refused(415, f"content-encoding: not taken — received {request.headers['content-encoding'][:40]!r} — "
                                "send the body as it is")  # fmt: skip
        length = request.headers.get("content-length", "0")
        async with asyncio.timeout(_BODY_SECONDS):
            if length.isdecimal() and int(length[:20]) <= limit:
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > limit:
                        break
                else:
                    return b"".join(parts)
        raise _Refused(
            413, f"the body is too long — received {max(size, int(length[:20]))} bytes — send at most {limit}"
        )


class _Refused(ServingError):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _asked(request: Request) -> tuple[str, str]:
    return request.path_params["name"], request.path_params.get("version", "")


def _told(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A handler whose errors become an answer with their reason."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except _Refused as error:
            return _error(error.status, str(error))
        except HotbedError as error:
            return _error(status_of(error), str(error))
        except (TimeoutError, ClientDisconnect):
            return _error(408, f"the body did not come within {_BODY_SECONDS} seconds")
        except Exception:
            log.exception("a request failed: %s %s", request.method, request.url.path)
            return _error(500, "an error of the server; its log has more")

    return answer


def _error(status: int, reason: str) -> Response:
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": 'Bearer, Basic realm="hotbed"'}}.get(status)
    return JSONResponse({"error": reason}, status, headers)


async def _unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return _error(status, f"{request.method} {request.url.path[:200]}: there is nothing — see docs/serving.md")


class Gate:
    """Before every request: is the token right; after it: does the server stop, so that clients leave."""

    def __init__(self, app: Any, models: Models, tokens: Tokens | None) -> None:
        self._app, self._models, self._tokens = app, models, tokens

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.start" and self._models.stopping:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        authorization = Headers(scope=scope).get("authorization")
        if self._tokens is None or scope["path"] in _OPEN or self._tokens.admit(authorization):
            await self._app(scope, receive, send_on)
        else:
            await _error(401, "no token, or a wrong one — send Authorization: Bearer TOKEN")(scope, receive, send_on)


class Server:
    """Answers for `models` until it is stopped.

    `run` blocks, and in the main thread ends on SIGTERM and SIGINT: readiness says no, requests are answered on for
    `drain_seconds`, then nothing new is taken and what is under way is finished. Raises ConfigError where it cannot listen.

    Example: `Server(models, Options(port=8000)).run()`
    """

    def __init__(self, models: Models, options: Options | None = None) -> None:
        self._models, self._options = models, options or Options()
        self._tokens = None if self._options.token_file is None else Tokens(self._options.token_file)
        self._tls = _tls(self._options)
        self._socket = _listen(self._options.host, self._options.port)
        self.port: int = self._socket.getsockname()[1]
        self.grpc_port: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self.started = threading.Event()

    def run(self) -> None:
        """Serve until stopped."""
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    def stop(self) -> None:
        """From any thread: drain, then end."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stopped.set)
        config = uvicorn.Config(Api(self._models).app(self._tokens), log_config=None, access_log=False, ws="none", lifespan="off",
                                server_header=False, timeout_graceful_shutdown=_LAST_SECONDS,
                                ssl_certfile=self._options.tls_cert, ssl_keyfile=self._options.tls_key)  # fmt: skip
        http = uvicorn.Server(config)
        http.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        remote = await self._start_grpc()
        task = asyncio.create_task(http.serve(sockets=[self._socket]))
        log.info("listening on port %d, gRPC %s", self.port, self.grpc_port or "off")
        self.started.set()
        await self._stopped.wait()
        self._models.stopping = True
        log.info("draining")
        await asyncio.sleep(self._options.drain_seconds)
        http.should_exit = True
        if remote is not None:
            await remote.stop(_LAST_SECONDS)
        await task
        await asyncio.to_thread(self._models.close)
        log.info("stopped")

    async def _start_grpc(self) -> Any:
        if self._options.grpc_port is None:
            return None
        from hotbed.serving.server.grpc import start

        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        admit = None if self._tokens is None else self._tokens.admit
        server, self.grpc_port = await start(self._models, f"{host}:{self._options.grpc_port}", admit, self._tls)
        return server


def _tls(options: Options) -> tuple[bytes, bytes] | None:
    """Key and certificate, where both are given and fit."""
    if options.tls_cert is None and options.tls_key is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise ConfigError("serve: TLS needs tls_cert and tls_key — received one of them — give both")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key)
        return Path(options.tls_key).read_bytes(), Path(options.tls_cert).read_bytes()
    except OSError as error:
        raise ConfigError(f"serve: TLS cannot start — received {options.tls_cert}, {options.tls_key}: {error} — "
                          "give a certificate and its key as PEM files") from error  # fmt: skip


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(f"serve: cannot listen — received {host}:{port}, {error} — give a free port, or 0") from error


def serve(sources: Sequence[str], watch: Sequence[str], settings: Mapping[str, Any]) -> None:
    """What `hotbed serve` does: serve exported models (`[NAME=]PATH`), each following `[NAME=]SOURCE` of `watch` where given, until
    SIGTERM. `settings`: keys of `Options` and `Limits`. Raises ConfigError for wrong ones."""
    known = {one.name: kind for kind in (Options, Limits) for one in fields(kind)}
    for key in settings:
        if key not in known:
            raise ConfigError(f"serve.{key}: unknown key — received {settings[key]!r} — {config.nearest(key, known)}")
    given = {kind: {key: settings[key] for key in settings if known[key] is kind} for kind in (Options, Limits)}
    options, limits = (config.build(given[kind], kind, "serve") for kind in (Options, Limits))
    logging.basicConfig(level=logging.INFO, handlers=[_JsonLines()])
    logging.captureWarnings(True)
    named = dict(_named(one, "") for one in sources)
    followed = [_named(one, next(iter(named))) for one in watch]
    for name, _ in followed:
        if name not in named:
            raise ConfigError(f"--watch: no model of that name — received {name!r} — {config.nearest(name, named)}")
    models = Models(ParameterServer(options.rows, options.dtype), limits)
    for name, source in named.items():
        models.add(name, source)
    server = Server(models, options)  # it listens from here on
    with tempfile.TemporaryDirectory(prefix="hotbed-follow-") as cache:
        for number, (name, source) in enumerate(followed):
            models.follow(name, partial(open_follower, source, Path(cache) / str(number)))
        server.run()


class _JsonLines(logging.Handler):
    """Log records on stderr, each a line of JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        spec = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            spec["trace"] = "".join(traceback.format_exception(record.exc_info[1]))
        print(json.dumps(spec, ensure_ascii=False), file=sys.stderr, flush=True)


def _named(text: str, default: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if equals and name and not set(name) & set("/:"):
        return name, rest
    return default or Path(text.rstrip("/")).name or "model", text
