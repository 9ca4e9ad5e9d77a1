# SPDX-License-Identifier: Apache-2.0
"""Connections to the port of gRPC whose calls do not arrive: they end, and bar nobody else."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import hotbed as hb

from .conftest import Process, Running, wait_for

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data
    )


def begin(method: str) -> bytes:
    """The head of a call."""

    def text(name: bytes, value: bytes) -> bytes:
        return bytes([0, len(name)]) + name + bytes([len(value)]) + value

    head = b"\x83\x86\x04" + bytes([len(method)]) + method.encode() + b"\x01\x09localhost"
    head += text(b"content-type", b"application/grpc") + text(b"te", b"trailers")
    return PREFACE + frame(4, 0, 0) + frame(1, 4, 1, head)


INFER = "/inference.GRPCInferenceService/ModelInfer"
HALVES = {
    "nothing": b"",
    "half a preface": PREFACE[:10],
    "no call": PREFACE + frame(4, 0, 0),
    "half a head": begin(INFER)[:-10],
    "a head that goes on": PREFACE + frame(4, 0, 0) + frame(1, 0, 1, b"\x83\x86"),
    "a prediction": begin(INFER),
    "half a message": begin(INFER) + frame(0, 0, 1, b"\0\0\0\0\x64" + b"x" * 50),
    "index": begin("/inference.GRPCInferenceService/RepositoryIndex"),
    "health": begin("/grpc.health.v1.Health/Check"),
    "watch": begin("/grpc.health.v1.Health/Watch"),
    "reflection": begin("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    "unknown method": begin("/some.Service/Call"),
}


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    """The connections of a test."""
    with contextlib.ExitStack() as stack:
        yield stack


def connect(opened: contextlib.ExitStack, port: int, data: bytes) -> socket.socket:
    client = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
    client.sendall(data)
    return client


def is_closed(client: socket.socket) -> bool:
    """Whether the server has closed; what it sent meanwhile is read, and SETTINGS are answered."""
    client.setblocking(False)
    try:
        data = client.recv(1 << 16)
        if data:
            client.send(frame(4, 1, 0))
        return not data
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("has_tokens", [False, True])
def test_calls_that_do_not_arrive_are_ended(
    exported: Path, tmp_path: Path, opened: contextlib.ExitStack, has_tokens: bool
) -> None:
    (tmp_path / "tokens").write_text("secret")
    options = {"token_file": str(tmp_path / "tokens")} if has_tokens else {}
    running = Running(exported, request_seconds=0.3, idle_seconds=0.3, **options)
    port = running.server.grpc_port
    assert port is not None
    waiting = {name: connect(opened, port, data) for name, data in HALVES.items()}

    def all_are_closed() -> bool:
        for name, client in list(waiting.items()):
            if is_closed(client):
                del waiting[name]
        return not waiting

    with contextlib.suppress(AssertionError):
        wait_for(all_are_closed, "all are closed")
    assert not list(waiting)
    running.close()


@pytest.mark.slow
def test_many_half_calls_leave_rest_and_liveness(
    exported: Path, opened: contextlib.ExitStack
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        server = Process(f"m={exported}", "--set", "request_seconds=3", "--set", "idle_seconds=3")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    port = int(server.grpc.partition(":")[2])
    half = begin("/grpc.health.v1.Health/Check")
    clients = []
    for _ in range(300):
        with contextlib.suppress(OSError):
            clients.append(connect(opened, port, half))
    with hb.Client(f"http://{server.http}") as client:
        for _ in range(10):
            assert client.models()[0]["state"] == "READY"
    wait_for(lambda: all([is_closed(each) for each in clients]), "they are closed")
    with grpc.insecure_channel(server.grpc) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", timeout=20, wait_for_ready=True) == b"\x08\x01"
    assert server.stop() == 0


REST_HALVES = {
    "nothing": b"",
    "half a line": b"POST /v2/mod",
    "half a head": b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n",
    "no body": b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n",
    "half a body": b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    "half a chunk": b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "no 100": b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
    b"Expect: 100-continue\r\n\r\n",
    "refused": b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n{",
    "answered": b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "answered and a half": b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\nGET /v2",
    "upgrade": b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    "a handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


def test_server_stops_soon_beside_requests_that_do_not_arrive(
    exported: Path, opened: contextlib.ExitStack
) -> None:
    running = Running(exported, request_seconds=600)
    assert running.server.grpc_port is not None
    for data in HALVES.values():
        connect(opened, running.server.grpc_port, data)
    clients = {}
    for name, data in REST_HALVES.items():
        clients[name] = connect(opened, running.server.port, data)
    time.sleep(0.3)  # so that all arrive
    running.close()
    assert clients["half a body"].recv(1 << 16).startswith(b"HTTP/1.1 503 ")


@pytest.mark.slow
def test_server_stops_soon_beside_clients_of_tls_that_do_nothing(
    exported: Path, opened: contextlib.ExitStack, certificate: tuple[str, str]
) -> None:
    """In the midst of a handshake, and of a request after it."""
    cert, key = certificate
    settings = ("request_seconds=600", f"tls_cert={cert}", f"tls_key={key}")
    server = Process(f"m={exported}", *(word for one in settings for word in ("--set", one)))
    ports = [int(address.partition(":")[2]) for address in (server.http, server.grpc)]
    context = ssl.create_default_context(cafile=cert)
    for port in ports:
        for data in (b"", REST_HALVES["a handshake"]):
            connect(opened, port, data)
    for data in filter(None, REST_HALVES.values()):
        client = context.wrap_socket(connect(opened, ports[0], b""), server_hostname="127.0.0.1")
        opened.enter_context(client).sendall(data)
    assert server.stop() == 0
