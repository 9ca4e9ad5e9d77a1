# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 over one connection: requests whole, answers in order, and nobody may take for ever. Needs httptools.

A request of half a millisecond notices what lies between it and the socket: here that is one parser (llhttp) and one write.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httptools

_HEAD_BYTES = 64 << 10
_LINGER_SECONDS = 2.0
_LINES = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n" for one in HTTPStatus}


@dataclass(slots=True)
class Request:
    """What a client asks. `target`: path and query as they came; `headers`: by name in lower case; `stay`: it asks on."""

    method: str
    target: bytes
    headers: Mapping[str, str]
    body: bytes = b""
    stay: bool = True


@dataclass(slots=True)
class Response:
    """What it is told."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error with its reason, as the Open Inference Protocol has it."""
    return Response(status, json.dumps({"error": reason}).encode(), headers=headers or {})


class App(ABC):
    """What answers requests."""

    @abstractmethod
    def refuse(self, request: Request) -> Response | None:
        """Asked when the headers are there and the body is not: the answer to who is turned away."""

    @abstractmethod
    def answer(self, request: Request) -> Response | asyncio.Future[Response]:
        """Of a whole request. A future is cancelled when the client goes away."""

    @abstractmethod
    def failed(self, request: Request, error: BaseException) -> Response:
        """Where `answer`, or its future, raised."""


@dataclass(frozen=True)
class Patience:
    """`body_bytes`: of one request; `request_seconds`: for a request to come whole, and for an answer to be taken;
    `idle_seconds`: until the next request begins."""

    body_bytes: int = 16 << 20
    request_seconds: float = 30.0
    idle_seconds: float = 60.0


class Connections:
    """All connections of a server. Who idles or takes too long is dropped: they are looked over every second.

    `closing`: whether answers tell clients to leave.
    """

    def __init__(self, app: App, patience: Patience) -> None:
        self.app, self.patience, self.closing = app, patience, False
        self.all = set[Connection]()

    def make(self) -> Connection:
        """A protocol, for a loop's `create_server`."""
        return Connection(self)

    async def watch(self) -> None:
        """Look them over, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            now = loop.time()
            for connection in [one for one in self.all if one.deadline < now]:
                connection.drop()

    async def close(self, seconds: float) -> None:
        """Close what idles; wait for answers that are under way, `seconds` at most."""
        self.closing = True
        until = asyncio.get_running_loop().time() + seconds
        for connection in [one for one in self.all if one.idle]:
            connection.drop()
        while self.all and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)


class Connection(asyncio.Protocol):
    """One client: its request is read, answered, and then the next; those that come meanwhile wait."""

    def __init__(self, connections: Connections) -> None:
        self._connections, self._app, self._patience = connections, connections.app, connections.patience
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._request: Request | None = None  # that comes in
        self._headers, self._target, self._parts = dict[str, str](), b"", list[bytes]()
        self._head_size = self._size = 0
        self._begun = self._refused = self._full = self._done = False
        self._answering: Request | None = None
        self._future: asyncio.Future[Response] | None = None
        self._waiting = deque[Request]()
        self.deadline = self._loop.time() + self._patience.idle_seconds

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.all.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.all.discard(self)
        self._done = True
        self._waiting.clear()
        if self._future is not None:
            self._future.cancel()

    def data_received(self, data: bytes) -> None:
        if self._done:
            return
        if not self._begun:
            self._begun = True
            self.deadline = self._loop.time() + self._patience.request_seconds
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # it is answered over what it came by, and then left
        except httptools.HttpParserError as error:
            self._end(refusal(400, f"no HTTP request — received one with an error: {error} — send HTTP/1.1"))
            return
        if self._begun and self._request is None:
            self._head_size += len(data)
            if self._head_size > _HEAD_BYTES:
                self._end(refusal(431, f"the headers are too long — received over {_HEAD_BYTES} bytes — send less"))

    def pause_writing(self) -> None:
        self._full = True
        self._transport.pause_reading()
        self.deadline = self._loop.time() + self._patience.request_seconds

    def resume_writing(self) -> None:
        self._full = False
        self._go_on()

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._headers, self._target, self._parts = {}, b"", []
        self._head_size = self._size = 0
        self._begun, self._refused, self._request = True, False, None

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._request = Request(self._parser.get_method().decode("latin-1"), self._target, self._headers)
        length = self._headers.get("content-length", "0")
        if refused := self._app.refuse(self._request):
            self._refuse(refused)
        elif length.isdecimal() and int(length[:20]) > self._patience.body_bytes:
            self._refuse(self._too_long(int(length[:20])))
        elif self._headers.get("expect", "").lower() == "100-continue" and self._answering is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._refused:
            return
        if self._size > self._patience.body_bytes:
            self._refuse(self._too_long(self._size))
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        request, self._request, self._begun = self._request, None, False
        if request is None or self._done:
            return
        request.stay = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        request.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if not self._refused:
            self._waiting.append(request)
        self._go_on()

    # Answers.

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self._answering is None and not self._waiting and not self._begun and not self._done

    def drop(self) -> None:
        """Close: it idles, or takes too long."""
        if self._done:
            self._transport.abort()
        elif self._begun and not self._refused and self._answering is None:
            self._end(refusal(408, f"the request did not come within {self._patience.request_seconds:g} seconds"))
        else:
            self._done = True
            self._transport.close()
            self.deadline = self._loop.time() + _LINGER_SECONDS

    def _go_on(self) -> None:
        """Answer what waits; with nothing left, wait for the next request."""
        while self._waiting and self._answering is None and not self._full and not self._done:
            self._answer(self._waiting.popleft())
        if self._done or self._full:
            return
        if self._waiting:
            self._transport.pause_reading()
            self.deadline = float("inf")
        else:
            self._transport.resume_reading()
            if not self._begun and self._answering is None:
                self.deadline = self._loop.time() + self._patience.idle_seconds
                if self._connections.closing:
                    self.drop()

    def _answer(self, request: Request) -> None:
        self._answering, self.deadline = request, float("inf")
        try:
            found = self._app.answer(request)
        except Exception as error:
            found = self._app.failed(request, error)
        if isinstance(found, Response):
            self._answered(request, found)
        else:
            self._future = found
            found.add_done_callback(self._later)

    def _later(self, future: asyncio.Future[Response]) -> None:
        request, self._future = self._answering, None
        if request is None or future.cancelled():
            return
        error = future.exception()
        self._answered(request, future.result() if error is None else self._app.failed(request, error))
        self._go_on()

    def _answered(self, request: Request, response: Response) -> None:
        self._answering = None
        if request.stay and not self._connections.closing:
            self._write(response, request.method == "HEAD")
        else:
            self._end(response, request.method == "HEAD")

    def _refuse(self, response: Response) -> None:
        """Answer before the request has come whole; its rest is read and thrown away."""
        self._refused, self._parts = True, []
        if self._answering is None and not self._waiting:
            self._write(response)
        else:  # others wait for answers before it
            self._end(response)

    def _too_long(self, size: int) -> Response:
        return refusal(413, f"the body is too long — received {size} bytes — send at most {self._patience.body_bytes}")

    def _write(self, response: Response, bare: bool = False, last: str = "") -> None:
        if self._transport.is_closing():
            return
        more = "".join(f"{name.lower()}: {value}\r\n" for name, value in response.headers.items())
        head = (
            f"{_LINES[response.status]}content-type: {response.kind}\r\ncontent-length: {len(response.body)}\r\n{more}{last}\r\n"
        ).encode("latin-1")
        self._transport.write(head if bare else head + response.body)

    def _end(self, response: Response, bare: bool = False) -> None:
        """The last answer of this connection; what is under way is let go."""
        if self._done:
            return
        self._done = True
        self._waiting.clear()
        self.deadline = self._loop.time() + _LINGER_SECONDS
        if self._answering is None:
            self._write(response, bare, "connection: close\r\n")
        if self._begun and self._transport.can_write_eof():  # a close would take away the answer from who still sends
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()
