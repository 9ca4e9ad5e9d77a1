# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 with uvicorn, and the limits of time and size that uvicorn lacks.

This is the only file that builds on the inside of uvicorn: the attributes of its protocol, none of
which is private. `tests/unit/serving/test_uvicorn.py` holds what it needs of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence, Sized
from http import HTTPStatus
from socket import SO_LINGER, SOL_SOCKET, socket
from ssl import SSLContext
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hotbed.serving.server.http_interface import App, HttpRequest, HttpResponse, refusal

_HEAD_BYTES = 64 << 10
_WATCH_SECONDS = 1.0
_LINGER_SECONDS = 2.0  # for a client to read the last answer
_LAST_SECONDS = 30  # for requests under way at the end
_LAST_PART_SECONDS = 1.0  # then, for the rest of a request to arrive, or an answer to be read
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: drop what has not been sent


class HttpServer(uvicorn.Server):
    """uvicorn in a running loop: `serve([socket])` answers until `should_exit` is set.

    The caller handles signals. If `closing` is set, answers carry `Connection: close`. `arrived`:
    the connections with a request that is complete and not yet given to the app.

    Args:
        app: answers the requests.
        request_seconds: limit for a request to arrive completely, and for a client to read an
            answer.
        idle_seconds: limit for the next request of a connection to begin.
        tls: certificate and key; None = plain HTTP.
    """

    def __init__(
        self, app: App, request_seconds: float, idle_seconds: float, tls: SSLContext | None = None
    ) -> None:
        self.app = app
        self.closing = False
        self.arrived = set[Connection]()
        self.request_seconds = request_seconds
        self.idle_seconds = idle_seconds
        super().__init__(
            uvicorn.Config(
                self,  # type: ignore[arg-type]  # Connection.connection_made replaces it
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
                timeout_graceful_shutdown=_LAST_SECONDS,
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield

    async def serve(self, sockets: list[socket] | None = None) -> None:
        watching = asyncio.create_task(self._watch())
        await super().serve(sockets)
        watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = asyncio.get_running_loop().time()
            for connection in list[Any](self.server_state.connections):
                connection.check_time(now)


class _Flow(FlowControl):
    """Resumes reading only if no requests of the connection wait.

    With uvicorn's own flow control, a client that only sends requests could fill the memory.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if self.read_paused and not self._waiting:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """The connection of a client, and the ASGI application for its requests."""

    # uvicorn narrows the transport, too
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._http_server = cast(HttpServer, self.app)
        self.app = self._respond
        self.flow = _Flow(transport, self.pipeline)
        self._last: RequestResponseCycle | None = None  # the newest request whose answer began
        self._future: asyncio.Future[HttpResponse] | None = None  # its answer
        self._in_head = False  # whether the headers of a request are being received
        self._header_bytes = 0  # of the lines of headers and trailers that are complete
        self._unread_bytes = 0  # received since the body grew or a request was complete
        self._ended = False
        self._last_answer: HttpResponse | None = None  # to a request that has not arrived
        self._state: tuple[object, ...] = ()  # what limits the connection
        self._state_began = 0.0

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request; the ASGI application."""
        cycle = cast(RequestResponseCycle, self._last)
        app = self._http_server.app
        request = _request_of(scope)
        route = app.route(request)
        app.begin(request, route)
        most = route.body_bytes()
        length = int(request.headers.get("content-length", 0))
        response = _violation(scope) or app.refuse(request) or _too_long(length, most)
        body = bytearray()
        more = True
        while response is None and more:
            message = await receive()
            if message["type"] == "http.disconnect":
                app.ended(request, self._last_answer)
                return
            body += message["body"]
            more = message["more_body"]
            response = _too_long(len(body), most)
        arrived = self._http_server.arrived
        arrived.discard(self)
        if response is None:
            request.body = bytes(body)
            request.is_last = not arrived
            try:
                reply = route.answer(request)
                if isinstance(reply, HttpResponse):
                    response = reply
                else:
                    self._future = reply
                    response = await reply
            except asyncio.CancelledError:
                response = refusal(503, "the server stops")  # or the client has left
            except Exception as error:
                response = app.failed(request, error)
        app.ended(request, None if cycle.disconnected else response)
        await self._send(cycle, request.method, response)
        # Read the rest of a rejected request: if the connection closed now, the client would lose
        # the answer.
        while more:
            more = (await receive()).get("more_body", False)
        self._complete(cycle)

    async def _send(self, cycle: RequestResponseCycle, method: str, response: HttpResponse) -> None:
        """Send an answer in one write, once the client reads those before it.

        The `send` of uvicorn writes the head and the body one by one, and takes longer than both.
        """
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if cycle.disconnected:
            return
        if self._http_server.closing:
            cycle.keep_alive = False
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        answer = _head_of(response, is_last=not cycle.keep_alive)
        if method != "HEAD":
            answer += response.body
        self.transport.write(answer)

    def _complete(self, cycle: RequestResponseCycle) -> None:
        """Take the next request of the connection, or close it."""
        if cycle.disconnected:
            return
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    # The loop, the parser and uvicorn call these.

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app = self._http_server  # no reference to itself is left
        self._http_server.arrived.discard(self)
        if self._last is not None:
            self._last.disconnected = True
        if self._future is not None:
            self._future.cancel()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unread_bytes += len(data)
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    data = b""
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._reject_bytes()
        else:
            if self._unread_bytes > _HEAD_BYTES:
                self._reject_bytes()

    def _ignore_upgrade(self, body: bytes) -> bytes:
        """Return a request without `Upgrade`, for a new parser; HTTP allows to ignore it.

        The parser of the request would read its `body` as data of the other protocol.
        """
        if not self._upgrades():  # CONNECT
            return b""
        data = self._without_upgrade() + body
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        return data

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
        self._in_head = True
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        if self._in_head:  # trailers are dropped
            super().on_header(name, value)

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _HEAD_BYTES:
            raise ValueError("the headers are too long")  # stops the parser

    def on_headers_complete(self) -> None:
        if self._upgrades():
            return
        super().on_headers_complete()
        self._in_head = False
        if not self.pipeline:  # no other answer comes first
            self._last = self.cycle

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unread_bytes = 0

    def on_message_complete(self) -> None:
        if not self._upgrades():
            super().on_message_complete()
            if self.cycle is self._last and not self.cycle.response_started:
                self._http_server.arrived.add(self)
        self._unread_bytes = 0

    def on_response_complete(self) -> None:
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._last = self.pipeline[-1][0]
            super().on_response_complete()
        else:  # without the timer of uvicorn: `check_time` closes connections that are idle
            self.flow.resume_reading()

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
    def _unanswered(self) -> RequestResponseCycle | None:
        """The request whose answer has begun and has not been sent completely."""
        if self._last is None or self._last.response_complete:
            return None
        return self._last

    def check_time(self, now: float) -> None:
        """Close the connection if nothing has changed for longer than its state allows."""
        seconds = self._http_server.request_seconds
        stops = self._http_server.should_exit
        if stops:
            seconds = min(seconds, _LAST_PART_SECONDS)
        last = self._unanswered
        is_full = self.transport.get_write_buffer_size() > 0  # the client does not read
        is_arriving = self._in_head if last is None else last.more_body
        is_ending = self._ended or self.transport.is_closing()
        if is_full:
            limit = seconds
        elif last is not None and not is_arriving:
            limit = math.inf
        elif is_ending:
            limit = min(seconds, _LINGER_SECONDS)
        elif is_arriving:
            limit = seconds
        else:
            limit = self._http_server.idle_seconds
        state = (limit, self._last)
        if state != self._state:
            self._state = state
            self._state_began = now
        elif now - self._state_began > limit:
            if is_full:
                self._reset()
            elif is_ending:
                self.transport.abort()
            elif is_arriving and stops:
                self._end(refusal(503, "the server stops"))
                self.transport.close()
            elif is_arriving:
                self._end(refusal(408, f"the request did not come within {seconds:g} seconds"))
            else:
                self.transport.close()

    def _reset(self) -> None:
        """Close the connection and drop what has not been sent.

        Otherwise the system would keep megabytes of answers, and the connection, for minutes: it
        waits for the client to read them.
        """
        with contextlib.suppress(OSError):  # the connection is lost already
            self.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
        self.transport.abort()

    def _end(self, response: HttpResponse) -> None:
        """Send a last answer, unless another one is under way, and take no more requests.

        Only the sending side is closed if possible, so that a client that still sends can read the
        answer.
        """
        self._ended = True
        last = self._unanswered
        if last is not None and not last.more_body:
            return
        if last is not None:
            last.disconnected = True
            last.message_event.set()
            self._last_answer = response
        if last is None or not last.response_started:
            self.transport.write(_head_of(response, is_last=True) + response.body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()


def _head_of(response: HttpResponse, *, is_last: bool) -> bytes:
    """Return the status line and the headers of an answer; `is_last`: of its connection."""
    lines = [
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
        f"content-type: {response.kind}",
        f"content-length: {len(response.body)}",
    ]
    lines += [f"{name.lower()}: {value}" for name, value in response.headers.items()]
    if is_last:
        lines.append("connection: close")
    return "\r\n".join([*lines, "", ""]).encode()


def _request_of(scope: Mapping[str, Any]) -> HttpRequest:
    lines = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    headers = dict(lines)
    if len(headers) < len(lines):  # lines of one name are one header, RFC 9110, 5.2
        values = dict[str, list[str]]()
        for name, value in lines:
            values.setdefault(name, []).append(value)
        headers = {name: ", ".join(parts) for name, parts in values.items()}
    peer, _ = scope["client"] or ("", 0)
    return HttpRequest(scope["method"], scope["raw_path"].decode("ascii"), headers, peer)


def _violation(scope: Mapping[str, Any]) -> HttpResponse | None:
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


def _too_long(size: int, most: int) -> HttpResponse | None:
    if size <= most:
        return None
    return refusal(
        413, f"the body is too long: expected at most {most} bytes, got {size}. Send less."
    )
