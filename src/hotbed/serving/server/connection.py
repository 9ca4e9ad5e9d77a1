# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 with uvicorn: the application that answers, and time limits that uvicorn lacks."""

from __future__ import annotations

import asyncio
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from socket import socket
from ssl import SSLContext
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

_HEAD_BYTES = 64 << 10
_LINGER_SECONDS = 2.0  # for a client to read the last answer
_LAST_SECONDS = 30  # for requests under way at the end


@dataclass(slots=True)
class Request:
    """A request. `path`: as received, without the query; `headers`: by name in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(slots=True)
class Response:
    """The answer to a request. `kind`: its media type."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error with its reason, in the form of the Open Inference Protocol."""
    return Response(status, json.dumps({"error": reason}).encode(), headers=headers or {})


class App(ABC):
    """Answers the requests of an `HttpServer`."""

    @abstractmethod
    def refuse(self, request: Request) -> Response | None:
        """Return an answer that rejects a request by its headers, or None to read its body."""

    @abstractmethod
    def body_bytes(self, request: Request) -> int:
        """Return the longest body of a request, in bytes; called when its headers are complete."""

    @abstractmethod
    def answer(self, request: Request) -> Response | asyncio.Future[Response]:
        """Answer a complete request. A future is cancelled when the client disconnects."""

    @abstractmethod
    def failed(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request for which `answer`, or its future, raised `error`."""


class HttpServer(uvicorn.Server):
    """uvicorn in a running loop: `serve([socket])` answers until `should_exit` is set.

    The caller handles signals. If `closing` is set, answers carry `Connection: close`.

    Args:
        app: Answers the requests.
        request_seconds: Limit for a request to arrive completely, and for a client to read an
            answer.
        idle_seconds: Limit for the next request of a connection to begin.
        tls: Certificate and key; None = plain HTTP.
    """

    def __init__(
        self, app: App, request_seconds: float, idle_seconds: float, tls: SSLContext | None = None
    ) -> None:
        self.routes = app
        self.closing = False
        self.request_seconds = request_seconds
        self.idle_seconds = idle_seconds
        super().__init__(
            uvicorn.Config(
                self,  # type: ignore[arg-type]
                interface="asgi3",
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=math.ceil(idle_seconds),
                timeout_graceful_shutdown=_LAST_SECONDS,
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )

    async def serve(self, sockets: list[socket] | None = None) -> None:
        watching = asyncio.create_task(self._watch())
        await self._serve(sockets)  # uvicorn's `serve` without its signal handlers
        watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = asyncio.get_running_loop().time()
            for connection in list[Any](self.server_state.connections):
                connection.look(now)


class _Flow(FlowControl):
    """Resumes reading only if no requests of the connection wait.

    With uvicorn's own flow control, a client that only sends requests could fill the memory.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """The connection of a client, and the ASGI application for its requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._server = cast(HttpServer, self.app)
        self.flow = _Flow(transport, self.pipeline)
        self._last: RequestResponseCycle | None = None  # the newest request whose answer began
        self._future: asyncio.Future[Response] | None = None  # its answer
        self._head = False  # whether the headers of a request are being received
        self._header_bytes = 0  # of the lines of headers and trailers that are complete
        self._unread_bytes = 0  # received since the body grew or a request was complete
        self._ended = False
        self._since = 0.0
        self._state: tuple[object, ...] = ()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._last = cycle
        super()._start_asgi_task(cycle, self._respond)

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        request = Request(scope["method"], scope["raw_path"].decode("ascii"), headers)
        body = bytearray()
        more = True
        routes = self._server.routes
        most = routes.body_bytes(request)
        response = _violation(scope) or routes.refuse(request)
        response = response or _too_long(int(headers.get("content-length", 0)), most)
        while response is None and more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
            response = _too_long(len(body), most)
        if response is None:
            request.body = bytes(body)
            response = await self._answer(request)
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": self._headers(response),
            }
        )
        await send({"type": "http.response.body", "body": response.body, "more_body": more})
        # Read the rest of a rejected request: if the connection closed now, the client would lose
        # the answer.
        if more:
            while (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.body"})

    async def _answer(self, request: Request) -> Response:
        app = self._server.routes
        try:
            answer = app.answer(request)
            if isinstance(answer, Response):
                return answer
            self._future = answer
            return await answer
        except asyncio.CancelledError:
            return refusal(503, "the server stops")  # or the client has left
        except Exception as error:
            return app.failed(request, error)

    def _headers(self, response: Response, last: bool = False) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": response.kind,
            "content-length": str(len(response.body)),
            **response.headers,
        }
        if last or self._server.closing:
            headers["connection"] = "close"
        return [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    # The loop, the parser and uvicorn call these.

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._last is not None:
            self._last.disconnected = True
        if self._future is not None:
            self._future.cancel()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unread_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._reject_bytes()
        else:
            if self._unread_bytes > _HEAD_BYTES:
                self._reject_bytes()

    def _feed(self, data: bytes) -> None:
        """Parse `data`, and ignore `Upgrade`, as HTTP allows.

        A request with `Upgrade` is parsed again without it: the parser would read its body as data
        of the other protocol.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._upgrades():  # CONNECT
                    return
                rest = data[upgrade.args[0] :]
                data = self._without_upgrade() + rest
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn

    def _upgrades(self) -> bool:
        """Return whether the parsed headers ask for another protocol."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _without_upgrade(self) -> bytes:
        """Return the line and the headers of the request without those that ask for an upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = True
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._head:  # trailers are dropped
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _HEAD_BYTES:
            raise ValueError("the headers are too long")  # stops the parser

    def on_headers_complete(self) -> None:
        if not self._upgrades():
            super().on_headers_complete()
            self._head = False

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unread_bytes = 0

    def on_message_complete(self) -> None:
        if not self._upgrades():
            super().on_message_complete()
        self._unread_bytes = 0

    def _reject_bytes(self) -> None:
        """Reject bytes that are not a request, or headers or trailers that are too long."""
        if max(self._header_bytes, self._unread_bytes) > _HEAD_BYTES:
            reason = (
                f"the headers are too long: expected at most {_HEAD_BYTES} bytes, got more. "
                "Send less."
            )
            self._end(refusal(431, reason))
        else:
            reason = "the request: expected HTTP/1.1, got other bytes. Send an HTTP request."
            self._end(refusal(400, reason))

    # Time limits.

    @property
    def _open(self) -> RequestResponseCycle | None:
        """The request whose answer has not been sent completely."""
        if self._last is None or self._last.response_complete:
            return None
        return self._last

    def look(self, now: float) -> None:
        """Close the connection if nothing has changed for longer than its state allows."""
        seconds = self._server.request_seconds
        last = self._open
        full = self.transport.get_write_buffer_size() > 0
        coming = self._head if last is None else last.more_body
        ended = self._ended or self.transport.is_closing()
        if full:
            limit = seconds
        elif last is not None and not coming:
            limit = math.inf
        elif ended:
            limit = _LINGER_SECONDS
        elif coming:
            limit = seconds
        else:
            limit = self._server.idle_seconds
        state = (limit, self._last)
        if state != self._state:
            self._state = state
            self._since = now
        elif now - self._since > limit:
            if full or ended:
                self.transport.abort()
            elif coming:
                self._end(refusal(408, f"the request did not come within {seconds:g} seconds"))
            else:
                self.transport.close()

    def _end(self, response: Response) -> None:
        """Send a last answer, unless another one is under way, and take no more requests.

        Only the sending side is closed if possible, so that a client that still sends can read the
        answer.
        """
        self._ended = True
        last = self._open
        if last is not None and not last.more_body:
            return
        if last is not None:
            last.disconnected = True
            last.message_event.set()
        if last is None or not last.response_started:
            lines = b"".join(b"%b: %b\r\n" % line for line in self._headers(response, last=True))
            self.transport.write(STATUS_LINE[response.status] + lines + b"\r\n" + response.body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()


def _violation(scope: Mapping[str, Any]) -> Response | None:
    """Return the answer to a request that breaks HTTP/1.1 but passes the parser, else None.

    Intermediaries may read such requests differently from the server.
    """
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    version = scope["http_version"]
    if version not in ("1.0", "1.1"):
        return refusal(400, f"the request: expected HTTP/1.1, got HTTP/{version}. Send HTTP/1.1.")
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return refusal(400, f"host: expected one header, got {hosts}. Send one.")
    lines = [value.decode("latin-1") for name, value in headers if name == b"transfer-encoding"]
    codings = ", ".join(lines)
    if codings and codings.strip().lower() != "chunked":
        reason = (
            f"transfer-encoding: expected chunked, got {codings[:60]!r}. Send the body as it is."
        )
        return refusal(501, reason)
    return None


def _too_long(size: int, most: int) -> Response | None:
    if size <= most:
        return None
    return refusal(
        413, f"the body is too long: expected at most {most} bytes, got {size}. Send less."
    )
