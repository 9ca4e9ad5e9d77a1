# SPDX-License-Identifier: Apache-2.0
"""Connections of gRPC clients, on their way to the library: TLS ends here, and floods of frames.

The library keeps up to 16 MiB of the head of a call whose client has not acknowledged its settings,
takes calls from such a client, and a connection may send frames that belong to no call without end.
So it listens at a socket of this process only. Each connection is relayed to it from the moment on
that it acknowledges the settings, and closed at the first frame beyond a bound.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from abc import ABC
from collections.abc import Callable
from ssl import SSLContext
from typing import cast

from hotbed.serving.stores.locking import TemporaryFolder

log = logging.getLogger("hotbed.serving")
HEAD_BYTES = 64 << 10
"""The most bytes of the head of a call, and of all heads before SETTINGS are acknowledged."""
EARLY_BYTES = 192 << 10
"""The most bytes of a client that has not acknowledged: heads, and the windows of its messages."""
FILES = 3
"""The files that a connection takes."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD_BYTES = 9
_DATA = 0  # kinds of frames
_HEADERS = 1
_SETTINGS = 4
_CONTINUATION = 9
_ACK = 1  # flag of SETTINGS
_END_HEADERS = 4  # flag of HEADERS and CONTINUATION
# Frames that a client may send beside those of its calls: at once, a second, and for each call,
# byte of messages and byte of answers.
_EARLY_FRAMES = 100.0  # before the client has acknowledged
_MOST_FRAMES = 10_000.0
_FRAMES_A_SECOND = 100.0
_FRAMES_A_CALL = 8.0
_FRAMES_A_BYTE = 1 / 512
_SHUTDOWN_SECONDS = 1.0  # for a client of TLS to say that it closes
_MOST_LOGGED = 1024  # addresses whose connections were closed, which are logged once each


class FrameCheck:
    """Follows the HTTP/2 frames that a client sends, by their heads.

    Attributes:
        is_acknowledged: whether the client has acknowledged the settings of the server.
    """

    def __init__(self) -> None:
        self.is_acknowledged = False
        self._skipped = 0  # bytes of the frame under way that have not come yet
        self._rest = b""  # the begin of the head of a frame
        self._has_preface = False
        self._head_bytes = 0  # of the head of a call that has not ended
        self._frames = _EARLY_FRAMES  # that the client may still send
        self._time = time.monotonic()

    def answered(self, num_bytes: int) -> None:
        """Count bytes that were sent to the client, which says when it has read them."""
        self._frames += num_bytes * _FRAMES_A_BYTE

    def violation(self, data: bytes) -> str:
        """Return how the next bytes of the client exceed a bound; "" if they do not."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        place = self._skipped
        size = len(data)
        if not self._has_preface:
            if size < len(_PREFACE) and _PREFACE.startswith(data):
                self._rest = data
                return ""
            if not data.startswith(_PREFACE):
                return "other bytes than HTTP/2"
            self._has_preface = True
            place = len(_PREFACE)
        while place + _FRAME_HEAD_BYTES <= size:
            length = int.from_bytes(data[place : place + 3])
            violation = self._count(data[place + 3], data[place + 4], length)
            if violation:
                return violation
            place += _FRAME_HEAD_BYTES + length
        self._skipped = max(0, place - size)
        self._rest = data[place:]
        return ""

    def _count(self, kind: int, flags: int, length: int) -> str:
        """Count a frame; return how it exceeds a bound."""
        if kind == _DATA and length:
            self._frames += length * _FRAMES_A_BYTE
        elif kind in (_HEADERS, _CONTINUATION):
            self._head_bytes += length
            if self._head_bytes > HEAD_BYTES:
                return f"a head of more than {HEAD_BYTES} bytes"
            if flags & _END_HEADERS:
                self._frames += _FRAMES_A_CALL
                if self.is_acknowledged:
                    self._head_bytes = 0
        elif kind == _SETTINGS and flags & _ACK and not self.is_acknowledged:
            self.is_acknowledged = True
            self._head_bytes = 0
            self._frames = _MOST_FRAMES
        self._frames -= 1
        return "" if self._frames > 0 else self._refill()

    def _refill(self) -> str:
        now = time.monotonic()
        self._frames = min(_MOST_FRAMES, self._frames + (now - self._time) * _FRAMES_A_SECOND)
        self._time = now
        return "" if self._frames > 0 else "too many frames that are not of calls"


class Relay:
    """Relays connections to a gRPC server in this process.

    Args:
        most_connections: at the same time; further ones are closed.
        begin_seconds: limit for a client to acknowledge the settings, TLS included.
        closed: called for each connection that is closed at a bound.

    Attributes:
        address: what the gRPC server has to listen at.
    """

    def __init__(
        self, most_connections: int, begin_seconds: float, closed: Callable[[], None]
    ) -> None:
        self._folder = TemporaryFolder("hotbed-grpc-")
        self.address = f"unix:{self._folder.path / 'server'}"
        self.begin_seconds = begin_seconds
        self._most_connections = most_connections
        self._closed = closed
        self._clients: dict[str, _Outer] = {}  # by what gRPC takes for their address
        self._number = 0
        self._logged = set[str]()
        self._server: asyncio.Server | None = None

    async def listen(self, listener: socket.socket, tls: SSLContext | None) -> None:
        """Take the connections that arrive at a socket."""
        loop = asyncio.get_running_loop()
        if tls is None:
            self._server = await loop.create_server(lambda: _Outer(self), sock=listener)
            return
        tls.set_alpn_protocols(["h2"])
        self._server = await loop.create_server(
            lambda: _Outer(self),
            sock=listener,
            ssl=tls,
            ssl_handshake_timeout=self.begin_seconds,
            ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
        )

    def stop(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Close what is left, once the gRPC server has stopped."""
        for client in list(self._clients.values()):
            client.transport.abort()
        self._folder.remove()

    def host_of(self, peer: str) -> str:
        """Return the address of the client that gRPC takes for `peer`."""
        return self._clients[peer].host if peer in self._clients else peer

    # Connections call these.

    def connected(self, client: _Outer) -> tuple[str, socket.socket] | None:
        """Return a name for a client and a connection to the gRPC server; None if it is full."""
        if len(self._clients) >= self._most_connections:
            return None
        self._number += 1
        path = self._folder.path / str(self._number)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.bind(str(path))
            connection.connect(str(self._folder.path / "server"))
        except OSError:  # no more files, or it stops
            connection.close()
            return None
        finally:
            path.unlink(missing_ok=True)
        name = f"unix:{path}"
        self._clients[name] = client
        return name, connection

    def disconnected(self, name: str) -> None:
        self._clients.pop(name, None)

    def violated(self, host: str, violation: str) -> None:
        """Count a connection that is closed; log the first one of an address."""
        self._closed()
        if host in self._logged:
            return
        if len(self._logged) >= _MOST_LOGGED:
            self._logged.clear()
        self._logged.add(host)
        log.warning(
            "gRPC: closed a connection from %s, which sent %s; further ones of this address are "
            "counted only",
            host,
            violation,
        )


class _Side(asyncio.Protocol, ABC):
    """One of the two connections that are relayed to each other."""

    transport: asyncio.Transport
    other: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()
            self.other = None


class _Outer(_Side):
    """The connection of a client; `host` is its address."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._check = FrameCheck()
        self.host = ""
        self._name = ""
        self._early = bytearray()  # what is not relayed yet
        self._connecting: asyncio.Task[None] | None = None
        self._limit: asyncio.TimerHandle | None = None  # for it to be acknowledged

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.host = str(transport.get_extra_info("peername")[0])
        connected = self._relay.connected(self)
        if connected is None:
            self.transport.abort()
            return
        self._name, connection = connected
        self._connecting = asyncio.create_task(self._connect(connection))
        loop = asyncio.get_running_loop()
        self._limit = loop.call_later(self._relay.begin_seconds, self._end)

    async def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        inner = _Inner(self.transport, self._check)
        other, _ = await loop.create_unix_connection(lambda: inner, sock=connection)
        if self.transport.is_closing():
            other.abort()
            return
        self.other = other
        self._relay_early()

    def data_received(self, data: bytes) -> None:
        violation = self._check.violation(data)
        is_early = not self._check.is_acknowledged
        if not violation and is_early and len(self._early) + len(data) > EARLY_BYTES:
            violation = f"{EARLY_BYTES} bytes before it acknowledged the settings"
        if violation:
            self._relay.violated(self.host, violation)
            self._end()
        elif self._limit is not None:
            self._early += data
            self._relay_early()
        elif self.other is not None and not self.other.is_closing():
            self.other.write(data)

    def _relay_early(self) -> None:
        """Begin to relay, once the client has acknowledged and the server is connected."""
        if not self._check.is_acknowledged:
            return
        if self.other is None:
            self.transport.pause_reading()
            return
        self._cancel_limit()
        self.other.write(bytes(self._early))
        self._early.clear()
        self.transport.resume_reading()

    def _cancel_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _end(self) -> None:
        """Close at once, and drop what waits to be sent."""
        self.transport.abort()
        if self.other is not None:
            self.other.abort()

    def eof_received(self) -> bool:
        if self._limit is not None or self.other is None or self.other.is_closing():
            return False
        self.other.write_eof()
        # TLS cannot be closed by half
        return self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_limit()
        self._relay.disconnected(self._name)


class _Inner(_Side):
    """The connection to the gRPC server for a client."""

    def __init__(self, client: asyncio.Transport, check: FrameCheck) -> None:
        self.other = client
        self._check = check

    def data_received(self, data: bytes) -> None:
        if self.other is not None and not self.other.is_closing():
            self._check.answered(len(data))
            self.other.write(data)
