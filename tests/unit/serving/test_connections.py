# SPDX-License-Identifier: Apache-2.0
"""HTTP connections of clients that idle, dawdle, vanish, send garbage or much at once: nobody else
notices.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import hotbed as hb
from hotbed.serving.server.endpoints.grpc import MESSAGES, SERVICE
from hotbed.serving.server.options import ServerLimits

from .conftest import Process, Running, draw, wait_for
from .test_grpc import typed
from .test_http import body

opened = list[socket.socket]()


@pytest.fixture(autouse=True)
def closed_after_each_test() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


def connected(running: Any) -> socket.socket:
    host, _, port = running.http.partition(":")
    opened.append(socket.create_connection((host, int(port)), timeout=20))
    return opened[-1]


def read(client: socket.socket) -> bytes:
    """Until the server closes."""
    found = b""
    while part := client.recv(1 << 16):
        found += part
    return found


def answers(client: socket.socket, n: int) -> list[tuple[int, bytes]]:
    """The next n answers, each its status and body."""
    file, found = client.makefile("rb"), []
    for _ in range(n):
        status = int(file.readline().split()[1])
        length = 0
        while (line := file.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        found.append((status, file.read(length)))
    return found


def infer(asked: Any = None, **headers: str) -> bytes:
    data = json.dumps(asked or body()).encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return (
        "POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: "
        f"{len(data)}\r\n{more}\r\n".encode()
        + data
    )


@pytest.fixture(scope="module")
def hasty(exported: Path) -> Iterator[Running]:
    """A server without patience."""
    found = Running(exported, request_seconds=1.0, idle_seconds=1.0)
    yield found
    found.close()


def alive(running: Running) -> None:
    with hb.Client(f"http://{running.http}") as client:
        assert client.predict("m", draw(3, 1)).shape == (3,)


def test_connections_that_ask_nothing_are_closed(hasty: Running) -> None:
    silent, asked = connected(hasty), connected(hasty)
    asked.sendall(infer())
    assert answers(asked, 1)[0][0] == 200
    assert read(silent) == b""
    assert read(asked) == b""
    alive(hasty)


def test_a_request_that_begins_within_the_idle_limit_may_end_after_it(exported: Path) -> None:
    running = Running(exported, idle_seconds=1.0, request_seconds=20.0, grpc_port=None)
    client = connected(running)
    request = infer()
    client.sendall(request)
    assert answers(client, 1)[0][0] == 200
    client.sendall(request[:90])
    time.sleep(3.0)  # both limits of idle connections have passed: uvicorn's timer and ours
    client.sendall(request[90:])
    assert answers(client, 1)[0][0] == 200
    running.close()


@pytest.mark.parametrize("slowly", [b"POST /v2/models/m/infer HT", infer()[:90], infer()[:-5]])
def test_a_request_that_drips_in_is_given_up(hasty: Running, slowly: bytes) -> None:
    client, stop = connected(hasty), threading.Event()
    client.sendall(slowly[:-20])

    def drip() -> None:
        for byte in slowly[-20:]:
            if stop.wait(0.2):
                return
            try:
                client.sendall(bytes([byte]))
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    found = answers(client, 1)
    stop.set()
    thread.join()
    assert found[0][0] == 408
    assert b"did not come within 1 seconds" in found[0][1]
    alive(hasty)


@pytest.mark.parametrize("batches", [10, 1_000_000], ids=["the server reads all", "endless"])
def test_a_client_that_reads_no_answers_is_disconnected(hasty: Running, batches: int) -> None:
    client = connected(hasty)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(0.2)
    with contextlib.suppress(OSError):  # the server reads no more, or has left
        for _ in range(batches):
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    wait_for_end(client)
    alive(hasty)


def test_a_client_that_reads_no_answers_over_tls_is_disconnected(
    exported: Path, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    running = Running(exported, request_seconds=1.0, grpc_port=None, tls_cert=cert, tls_key=key)
    trust = ssl.create_default_context(cafile=cert)
    for _ in range(2):  # the first one does not end the watch over the others
        client = trust.wrap_socket(connected(running), server_hostname="127.0.0.1")
        opened.append(client)
        client.settimeout(0.2)
        with contextlib.suppress(OSError):
            for _ in range(20):
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        wait_for_end(client)
    running.close()


def wait_for_end(client: socket.socket) -> None:
    """Wait until the server has left, without a look at what it has sent."""
    poll = select.poll()
    poll.register(client, 0)  # tells only of errors and of the end
    wait_for(lambda: poll.poll(0), "the server has left")


def test_requests_that_come_together_are_answered_in_their_order(
    running: Running, session: Any
) -> None:
    client, asked = connected(running), [body(n, id=str(n)) for n in range(1, 9)]
    order = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    client.sendall(b"".join(infer(one) + order for one in asked))
    found = answers(client, 16)
    assert [status for status, _ in found] == [200] * 16
    for one, (_, data) in zip(asked, found[::2], strict=True):
        answer = json.loads(data)
        assert answer["id"] == one["id"]
        assert (
            np.abs(answer["outputs"][0]["data"] - session.predict(draw(int(one["id"]), 5))).max()
            < 1e-6
        )


def test_a_request_is_read_however_it_is_cut(running: Running) -> None:
    whole = infer()
    for size in (1, 7, 100):
        client = connected(running)
        for start in range(0, len(whole), size):
            client.sendall(whole[start : start + size])
        assert answers(client, 1)[0][0] == 200
        client.close()


@pytest.mark.parametrize(
    "sent, status",
    [
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (b"GET /v2 HTTP/9.9\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: "
            b"chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
            400,
        ),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 40_000, 431),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000, 431),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 65_536 + b"\r\n\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", 431),
        (b"GET /" + b"v" * 66_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (
            b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: "
            b"websocket\r\n\r\nrest",
            200,
        ),
        (
            b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nHost: "
            b"a\r\n\r\n",
            400,
        ),
        (b"GET /v2 HTTP/1.0\r\n\r\n", 200),
        (b"GET http://x/v2?a=b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        (b"HEAD /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    ],
)
def test_bytes_that_are_not_a_request_are_rejected_and_the_connection_closed(
    running: Running, sent: bytes, status: int
) -> None:
    client = connected(running)
    client.sendall(sent)
    found = read(client)
    assert found.startswith(f"HTTP/1.1 {status} ".encode()), found
    assert b"connection: close\r\n" in found
    assert found.endswith(b"\r\n\r\n") == sent.startswith(b"HEAD")
    alive(running)


@pytest.mark.parametrize(
    "trailer",
    [b"a:b\r\n", b"a:" + b"b" * 250_000 + b"\r\n", b"b" * 1000],
    ids=["short", "long", "one without an end"],
)
def test_trailers_are_bounded(running: Running, trailer: bytes) -> None:
    client = connected(running)
    client.sendall(
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    client.sendall(trailer * (1_000_000 // len(trailer)))
    assert answers(client, 1)[0][0] == 431
    assert read(client) == b""
    alive(running)


def test_trailers_are_not_headers(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    running = Running(exported, token_file=str(tmp_path / "tokens"), grpc_port=None)
    client = connected(running)
    data = json.dumps(body()).encode()
    client.sendall(
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"%x\r\n%b\r\n0\r\nAuthorization: Bearer secret\r\n\r\n" % (len(data), data)
    )
    assert answers(client, 1)[0][0] == 401
    running.close()


def test_a_request_to_upgrade_is_answered_over_http_1(running: Running) -> None:
    wish = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2_Settings": "AAMAAABkAAQAAP__",
    }
    whole = infer(**wish)
    data = json.dumps(body()).encode()
    chunked = (
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    )
    client = connected(running)
    client.sendall(whole * 300 + chunked + infer())
    assert [status for status, _ in answers(client, 302)] == [200] * 302
    for size in (7, 100):
        client = connected(running)
        for start in range(0, len(chunked), size):
            client.sendall(chunked[start : start + size])
        assert answers(client, 1)[0][0] == 200
        client.sendall(whole)
        assert answers(client, 1)[0][0] == 200


def test_random_bytes_are_answered_or_left(running: Running) -> None:
    draws, whole = np.random.default_rng(0), infer()
    for number in range(200):
        data = bytearray(whole if number % 3 else draws.bytes(int(draws.integers(1, 300))))
        for place in draws.integers(0, len(data), int(draws.integers(1, 6))):
            data[place] = draws.integers(0, 256)
        client = connected(running)
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        found = read(client)
        assert not found or found.split()[1] in (
            b"200",
            b"400",
            b"401",
            b"404",
            b"405",
            b"408",
            b"413",
            b"415",
        ), found
        alive(running)


@pytest.mark.parametrize("before", [b"", b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_refused_body_is_taken_in_so_that_its_sender_can_read_why(
    running: Running, before: bytes
) -> None:
    client, size = connected(running), 20 << 20
    client.sendall(
        before
        + "POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
        f"{size}\r\n\r\n".encode()
    )
    for _ in range(20):
        client.sendall(b" " * (1 << 20))
    assert [status for status, _ in answers(client, 2 if before else 1)][-1] == 413
    assert client.recv(1) == b""


def test_a_refused_body_that_does_not_come_is_given_up(hasty: Running) -> None:
    client = connected(hasty)
    client.sendall(
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n "
    )
    assert answers(client, 1)[0][0] == 413  # it is not waited for with the answer
    assert read(client) == b""
    alive(hasty)


def test_a_request_before_garbage_is_answered(exported: Path) -> None:
    running = Running(exported, ServerLimits(batch_seconds=0.2), grpc_port=None)
    client = connected(running)
    client.sendall(infer() + b"\x00\r\n\r\n" + infer())
    assert answers(client, 1)[0][0] == 200
    assert read(client) == b""
    alive(running)
    running.close()


def test_a_long_body_before_a_head_is_no_long_head(running: Running) -> None:
    client, long = connected(running), json.dumps(body(4000)).encode()
    asked = (
        "POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: "
        f"{len(long)}\r\n\r\n".encode()
        + long
    )
    client.sendall(asked * 3 + asked[:10])
    assert [status for status, _ in answers(client, 3)] == [200] * 3
    client.sendall(asked[10:])
    assert answers(client, 1)[0][0] == 200


def test_a_client_that_expects_100_continue_gets_it(running: Running) -> None:
    client, whole = connected(running), infer(Expect="100-continue")
    head, _, data = whole.partition(b"\r\n\r\n")
    client.sendall(head + b"\r\n\r\n")
    assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(data)
    assert answers(client, 1)[0][0] == 200


def test_clients_that_leave_before_their_answer_cost_nobody_one(
    exported: Path, session: Any
) -> None:
    running, columns = Running(exported), draw(20, 3)
    model, request = running.models.named("m"), infer(body(50))
    held, expected = model.queue()._changed, session.predict(columns)
    call = MESSAGES["ModelInferRequest"](model_name="m")
    call.inputs.add(name="price", datatype="FP32", shape=[1], contents={"fp32_contents": [1.0]})
    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as channel:
        remote = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for _ in range(20):
            client = connected(running)
            client.sendall(request * 3)
            client.close()
            later = remote.future(call.SerializeToString())
            later.cancel()
    with hb.Client(f"http://{running.http}") as client:
        for _ in range(20):
            assert np.abs(client.predict("m", columns) - expected).max() < 1e-6
    with held:
        assert model.queue().waiting_rows == 0
    running.close()


def test_a_waiting_request_of_a_disconnected_client_is_not_scored(exported: Path) -> None:
    running = Running(exported, ServerLimits(batch_seconds=1.0), grpc_port=None)
    model, client = running.models.named("m"), connected(running)
    client.sendall(infer(body(50)))
    wait_for(lambda: model.waiting_rows == 50, "it waits for others")
    client.close()
    wait_for(lambda: model.waiting_rows == 0, "its time has come")
    alive(running)
    assert (model.batches, model.rows) == (1, 3)  # that of another client
    running.close()


def test_a_waiting_call_of_a_disconnected_grpc_client_is_not_scored(exported: Path) -> None:
    # until there are as many
    running = Running(exported, ServerLimits(batch_seconds=3600.0, batch_rows=53))
    model, address = running.models.named("m"), f"127.0.0.1:{running.server.grpc_port}"
    with grpc.insecure_channel(address) as channel:
        asked = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(
            typed(draw(50, 5)).SerializeToString()
        )
        wait_for(lambda: model.waiting_rows == 50, "it waits for others")
        assert not asked.done()
    left = b'hotbed_requests_total{model="m",outcome="cancelled",protocol="grpc"} 1.0'
    wait_for(lambda: left in running.models.meters.text(), "it is told that the client has left")
    with grpc.insecure_channel(address) as channel:
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(
            typed(draw(3, 5)).SerializeToString(), timeout=20
        )
    assert (model.batches, model.rows, model.waiting_rows) == (1, 3, 0)  # that of the other client
    running.close()


def test_a_channel_that_idles_is_closed_and_opens_again_when_it_is_used(hasty: Running) -> None:
    seen = list[grpc.ChannelConnectivity]()
    before = set(threading.enumerate())
    with grpc.insecure_channel(f"127.0.0.1:{hasty.server.grpc_port}") as channel:
        channel.subscribe(seen.append)
        live = channel.unary_unary(f"/{SERVICE}/ServerLive")
        assert live(b"", timeout=60) == b"\x08\x01"
        wait_for(lambda: grpc.ChannelConnectivity.READY in seen, "it is told that it is open")
        wait_for(lambda: seen[-1] is grpc.ChannelConnectivity.IDLE, "it is closed")
        assert live(b"", timeout=60) == b"\x08\x01"
        channel.unsubscribe(seen.append)
        # closing the channel under gRPC's watching thread is an error of that thread
        wait_for(lambda: not watching_threads(before), "it is watched no longer")


def watching_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return gRPC's threads that watch a channel, without those of `before`."""
    new = set(threading.enumerate()) - before
    return [thread for thread in new if thread.name.endswith("(_run)")]


@pytest.mark.slow
def test_five_thousand_idle_connections_cost_little_and_nobody_an_answer(exported: Path) -> None:
    count, (soft, hard) = 5000, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 200:
        pytest.skip(f"open files limited to {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    server = Process(f"m={exported}", "--set", "idle_seconds=2")
    try:
        alive(server)
        before = rss(server)
        idle = [connected(server) for _ in range(count)]
        for _ in range(20):
            alive(server)
        assert rss(server) - before < 100 << 20
        assert read(idle[0]) == b""  # they are dropped
        assert read(idle[-1]) == b""
        alive(server)
    finally:
        assert server.stop() == 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def rss(server: Process) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize(
    ("codings", "status"),
    [
        (["IDENTITY"], 200),
        ([""], 200),
        (["identity", "Identity"], 200),
        (["gzip", "identity"], 415),
        (["identity", "gzip"], 415),
    ],
)
def test_lines_of_one_header_are_read_as_one(
    running: Running, codings: list[str], status: int
) -> None:
    client = connected(running)
    lines = "".join(f"Content-Encoding: {coding}\r\n" for coding in codings)
    client.sendall(infer().replace(b"\r\n\r\n", f"\r\n{lines}\r\n".encode(), 1))
    assert answers(client, 1)[0][0] == status
