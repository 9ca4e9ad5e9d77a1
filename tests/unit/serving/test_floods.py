# SPDX-License-Identifier: Apache-2.0
"""Floods of HTTP/2 frames: their connections are closed, and the memory of the server stays."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from hotbed.serving.server.endpoints.grpc import MESSAGES, SERVICE
from hotbed.serving.server.endpoints.relay import HEAD_BYTES, FrameCheck

from .conftest import Process, Running, at_once
from .test_half_calls import INFER, PREFACE, begin, frame

BEGIN = PREFACE + frame(4, 0, 0)  # SETTINGS
ACK = frame(4, 1, 0)
CALL = begin(INFER)[len(BEGIN) :]
FIELD = b"\x40\1a\1b"  # which is a byte from then on, \xbe


def endless(*frames: bytes) -> Callable[[int], bytes]:
    """Frames again and again, so many bytes."""
    block = b"".join(frames)
    return lambda size: block * (size // len(block) + 1)


def heads(num_bytes: int, start: bytes = b"") -> Callable[[int], bytes]:
    """Heads of so many bytes, each of another call."""

    def make(size: int) -> bytes:
        calls = range(1, 2 * (size // num_bytes) + 1, 2)
        return start + b"".join(frame(1, 4, call, b"\x83" * num_bytes) for call in calls)

    return make


FLOODS = {
    "fields in CONTINUATION": (CALL[:4] + b"\0" + CALL[5:], endless(frame(9, 0, 1, b"\xbe" * 9))),
    "large CONTINUATION": (frame(1, 0, 1, FIELD), endless(frame(9, 0, 1, b"\xbe" * 16384))),
    "empty CONTINUATION": (frame(1, 0, 1, FIELD), endless(frame(9, 0, 1))),
    "trailers": (CALL + frame(1, 1, 1, FIELD), endless(frame(9, 0, 1, b"\xbe" * 999))),
    "a head after a call": (CALL + frame(1, 0, 3, FIELD), endless(frame(9, 0, 3, b"\xbe" * 99))),
    "one head": (frame(1, 4, 1, b"\x83" * (HEAD_BYTES + 1)), endless(b"\0")),
    "acknowledged": (ACK + frame(1, 0, 1, FIELD), endless(frame(9, 0, 1, b"\xbe" * 16384))),
    "heads before the settings": (b"", heads(9000)),
    "PING": (b"", endless(frame(6, 0, 0, b"12345678"))),
    "SETTINGS": (b"", endless(frame(4, 0, 0, b"\0\4\0\1\0\0"))),
    "acknowledgements": (b"", endless(ACK)),
    "PRIORITY": (b"", endless(frame(2, 0, 1, b"\0\0\0\0\1"))),
    "WINDOW_UPDATE": (CALL, endless(frame(8, 0, 1, b"\0\0\0\1"))),
    "RST_STREAM": (CALL, endless(frame(3, 0, 1, b"\0\0\0\x08"))),
    "empty DATA": (CALL, endless(frame(0, 0, 1))),
    "unknown frames": (b"", endless(frame(77, 0, 0, b"x" * 9))),
}


SERVED = ("large CONTINUATION", "trailers", "heads before the settings", "PING")


def verdict(data: bytes, cuts: Iterator[int]) -> str:
    """Of a check that is given the data in pieces."""
    check = FrameCheck()
    place = 0
    while place < len(data):
        size = next(cuts)
        if violation := check.violation(data[place : place + size]):
            return violation
        place += size
    return ""


@pytest.mark.parametrize("name", FLOODS)
def test_floods_are_found_however_they_are_cut(name: str) -> None:
    start, more = FLOODS[name]
    data = BEGIN + start + more(250_000)
    draw = random.Random(name)
    cuts = [itertools.repeat(size) for size in (1 << 18, 1000, 16_393)]
    cuts.append(iter(lambda: draw.randrange(1, 70), 0))
    (found,) = {verdict(data, each) for each in cuts}
    assert found


@pytest.mark.parametrize("name", ["PING", "SETTINGS", "WINDOW_UPDATE", "RST_STREAM", "empty DATA"])
def test_frames_before_the_acknowledgement_are_few(name: str) -> None:
    start, more = FLOODS[name]
    assert verdict(BEGIN + start + more(2_000), itertools.repeat(70))
    assert not verdict(BEGIN + start + ACK + more(2_000), itertools.repeat(70))


def test_other_bytes_than_http_2_are_refused() -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", PREFACE[:-1] + b"x"):
        assert verdict(data, itertools.repeat(3)) == "other bytes than HTTP/2"
    assert verdict(PREFACE[:10], itertools.repeat(3)) == ""


def test_calls_messages_and_answers_are_not_floods() -> None:
    check = FrameCheck()
    ends = frame(8, 0, 0, b"\0\0\1\0") + frame(8, 0, 1, b"\0\0\1\0") + frame(6, 0, 0, b"12345678")
    call = CALL + frame(0, 1, 1, b"x" * 20) + ends + frame(3, 0, 1, b"\0\0\0\x08")
    assert check.violation(BEGIN + ACK + call * 1000) == ""
    for _ in range(10):
        assert check.violation(call * 1000) == ""  # calls that are cancelled
    assert check.violation(CALL) == ""
    for _ in range(100):
        assert check.violation(frame(0, 0, 1, b"x" * 16384) * 64) == ""  # a message
    for _ in range(20_000):  # an answer of 320 MB, of which each part is said to be read
        check.answered(16384)
        assert check.violation(ends) == ""
    assert check.violation(heads(60_000)(600_000)) == ""  # which the library bounds


def resident(process: int) -> int:
    """MiB of memory."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) >> 10
    raise AssertionError


def send_all(address: str, tls: ssl.SSLContext | None, data: bytes) -> None:
    """As much as the server takes."""
    host, _, port = address.partition(":")
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        client = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        if tls is not None:
            client = stack.enter_context(tls.wrap_socket(client, server_hostname=host))
        client.sendall(data)
        client.recv(1)


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "TLS and tokens"])
def test_floods_cost_a_server_no_memory(
    exported: Path, tmp_path: Path, certificate: tuple[str, str], is_closed: bool
) -> None:
    (tmp_path / "tokens").write_text("secret")
    cert, key = certificate
    options = ["--set", f"tls_cert={cert}", "--set", f"tls_key={key}"]
    options += ["--token-file", tmp_path / "tokens"]
    server = Process(f"m={exported}", *(options if is_closed else []))
    tls = None
    if is_closed:
        tls = ssl.create_default_context(cafile=cert)
        tls.set_alpn_protocols(["h2"])
    send_all(server.grpc, tls, BEGIN)
    before = resident(server.process.pid)
    most = before
    for name in SERVED:
        start, more = FLOODS[name]
        data = BEGIN + start + more(2_000_000)
        at_once(lambda _, data=data: send_all(server.grpc, tls, data), 4)  # type: ignore[misc]
        most = max(most, resident(server.process.pid))
        assert server.process.poll() is None, name
    assert most - before < 30
    if not is_closed:
        with grpc.insecure_channel(server.grpc) as channel:
            live = channel.unary_unary(f"/{SERVICE}/ServerLive")
            assert live(b"", timeout=20) == b"\x08\x01"
    server.stop()
    assert sum("closed a connection from 127.0.0.1" in line for line in server.lines) == 1
    assert not [line for line in server.lines if "ERROR" in line]


def streams_answered(client: socket.socket, seconds: float) -> set[int]:
    """Return the streams of the frames that arrive within a time."""
    client.settimeout(seconds)
    data = b""
    with contextlib.suppress(TimeoutError):
        while part := client.recv(1 << 16):
            data += part
    streams = set()
    while len(data) >= 9:
        streams.add(int.from_bytes(data[5:9]))
        data = data[9 + int.from_bytes(data[:3]) :]
    return streams


def test_calls_wait_until_the_client_has_acknowledged_the_settings(exported: Path) -> None:
    running = Running(exported, request_seconds=1)
    assert running.server.grpc_port is not None
    place = ("127.0.0.1", running.server.grpc_port)
    live = begin(f"/{SERVICE}/ServerLive") + frame(0, 1, 1, bytes(5))
    with socket.create_connection(place) as client, socket.create_connection(place) as flood:
        client.sendall(live)
        flood.sendall(BEGIN + CALL + frame(0, 0, 1, b"x" * 16384) * 20)
        assert streams_answered(client, 0.2) == {0}
        client.sendall(ACK)
        assert streams_answered(client, 0.3) == {0, 1}
        with contextlib.suppress(ConnectionResetError):
            assert streams_answered(flood, 5) <= {0}, "it is closed"
    with socket.create_connection(place) as client, contextlib.suppress(ConnectionResetError):
        client.sendall(live)
        assert streams_answered(client, 5) == {0}, "it is closed after a second"
    running.close()


def test_long_metadata_and_messages_pass(exported: Path) -> None:
    server = Process(f"m={exported}")
    request = MESSAGES["ModelInferRequest"](model_name="nobody")
    request.raw_input_contents.append(b"x" * 900_000)
    data = request.SerializeToString()
    metadata = [(f"x-{number}", "y" * 90) for number in range(50)]
    codes = set()

    def call(number: int) -> None:
        try:
            infer(data, timeout=30, metadata=metadata)
        except grpc.RpcError as error:
            codes.add(error.code())

    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(INFER)
        at_once(call, 20)
    assert codes == {grpc.StatusCode.NOT_FOUND}, "an error of the model that is not there"
    server.stop()
