# SPDX-License-Identifier: Apache-2.0
"""What `server/connection.py` builds on is in the installed uvicorn, and none of it is private.

`make matrix` runs this file and the tests of connections with the newest uvicorn.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hotbed.serving.server.endpoints import connection
from hotbed.serving.server.http_interface import App, HttpRequest, HttpResponse, Route

SOURCE = Path(connection.__file__)
BASES = (uvicorn.Server, HttpToolsProtocol, FlowControl)
# What connection.py uses of uvicorn's objects.
USED: dict[type, set[str]] = {
    uvicorn.Server: {"capture_signals", "serve", "server_state", "should_exit"},
    HttpToolsProtocol: {
        "app",
        "connection_lost",
        "connection_made",
        "cycle",
        "data_received",
        "flow",
        "headers",
        "on_body",
        "on_header",
        "on_headers_complete",
        "on_message_begin",
        "on_message_complete",
        "on_response_complete",
        "on_url",
        "parser",
        "pipeline",
        "transport",
        "url",
    },
    RequestResponseCycle: {
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
        "response_started",
        "waiting_for_100_continue",
    },
    FlowControl: {"drain", "read_paused", "resume_reading", "write_paused"},
}


def names_of(kind: type) -> set[str]:
    """The methods of a class, and the attributes that its methods set."""
    tree = ast.parse(inspect.getsource(kind))
    return set(dir(kind)) | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def attributes(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every attribute that a file reads, sets or defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def test_uvicorn_has_what_connections_use() -> None:
    missing = {kind.__name__: names - names_of(kind) for kind, names in USED.items()}
    assert not any(missing.values()), f"uvicorn {uvicorn.__version__} lacks {missing}"


def test_connections_use_no_private_name_of_uvicorn() -> None:
    private = {
        name
        for kind in (*BASES, RequestResponseCycle)
        for name in names_of(kind)
        if name.startswith("_") and not name.endswith("__")
    }
    own = {"_transport"} & private  # a name of FlowControl; connections do not use it
    used = [(line, name) for line, name in attributes(SOURCE) if name in private - own]
    assert not used


def test_no_other_file_builds_on_uvicorn() -> None:
    root = SOURCE.parents[3]
    files = [path for path in root.rglob("*.py") if "uvicorn" in path.read_text()]
    imports = [
        path.relative_to(root).as_posix()
        for path in files
        if any(
            isinstance(node, ast.Import | ast.ImportFrom) and "uvicorn" in ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert imports == ["serving/server/endpoints/connection.py"]


def test_an_answer_begins_before_the_next_request_of_its_connection() -> None:
    """uvicorn queues (cycle, app) at the left and takes from the right, as `_last` assumes."""
    source = inspect.getsource(HttpToolsProtocol)
    assert "self.pipeline.appendleft((self.cycle, app))" in source
    assert "self.pipeline.pop()" in source


class Ok(App):
    """Answers each request with two letters, of bodies of at most ten bytes."""

    def __init__(self) -> None:
        self.asked = list[tuple[str, bool]]()  # path, and whether it was the last

    def answer(self, request: HttpRequest) -> HttpResponse:
        self.asked.append((request.path, request.is_last))
        return HttpResponse(200, b"ok")

    def refuse(self, request: HttpRequest) -> None:
        return None

    def route(self, request: HttpRequest) -> Route:
        return Route(self.answer, lambda: 10)

    def begin(self, request: HttpRequest, route: Route) -> None: ...

    def ended(self, request: HttpRequest, response: HttpResponse | None) -> None: ...

    def failed(self, request: HttpRequest, error: Exception) -> HttpResponse:
        raise error


class Writes(asyncio.Transport):
    """Keeps what is written, a call an element."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = list[bytes]()
        self.closed = False

    def write(self, data: bytes) -> None:
        self.parts.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def writes_of(request: bytes) -> list[bytes]:
    server = connection.HttpServer(Ok(), request_seconds=5, idle_seconds=5)
    server.config.load()
    transport = Writes()
    protocol = connection.Connection(server.config, server.server_state, {})
    protocol.connection_made(transport)
    protocol.data_received(request)
    for _ in range(10):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    return transport.parts


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "request_bytes, bodies",
    [
        (GET + b"\r\n", [b"ok"]),
        (GET + b"Connection: close\r\n\r\n", [b"ok"]),
        (b"HEAD" + GET[3:] + b"\r\n", [b""]),
        (2 * (GET + b"\r\n"), [b"ok", b"ok"]),
    ],
)
def test_an_answer_is_one_write(request_bytes: bytes, bodies: list[bytes]) -> None:
    parts = asyncio.run(writes_of(request_bytes))
    assert all(part.startswith(b"HTTP/1.1 200 OK\r\n") for part in parts)
    assert [part.partition(b"\r\n\r\n")[2] for part in parts] == bodies


async def asked_of(turns: list[list[bytes]]) -> list[tuple[str, bool]]:
    """What reaches the app: each turn of the loop brings bytes to some connections."""
    app = Ok()
    server = connection.HttpServer(app, request_seconds=5, idle_seconds=5)
    server.config.load()
    protocols = list[connection.Connection]()
    for _ in range(max(map(len, turns))):
        protocol = connection.Connection(server.config, server.server_state, {})
        protocol.connection_made(Writes())
        protocols.append(protocol)
    for turn in turns:
        for protocol, data in zip(protocols, turn, strict=False):
            protocol.data_received(data)
        for _ in range(3):
            await asyncio.sleep(0)
    for protocol in protocols:
        protocol.connection_lost(None)
    assert not server.arrived
    return app.asked


def post(path: str, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n%b" % (path.encode(), body)


@pytest.mark.parametrize(
    "turns, asked",
    [
        ([[post("/a", b"body")], [post("/b", b"body")]], [("/a", True), ("/b", True)]),
        ([[post("/a", b"body"), post("/b", b"body")]], [("/a", False), ("/b", True)]),
        ([[post("/a", b"bo"), post("/b", b"body")]], [("/b", True)]),
        ([[post("/a", b"bo")], [b"dy", post("/b", b"body")]], [("/a", False), ("/b", True)]),
        ([[post("/a", b"body") + post("/b", b"body")]], [("/a", True), ("/b", True)]),
        # a body that is too long is refused, and so is a request without a host
        ([[b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n"]], []),
        ([[b"GET / HTTP/1.1\r\n\r\n", post("/b", b"body")]], [("/b", True)]),
    ],
)
def test_a_request_says_whether_others_arrived_with_it(
    turns: list[list[bytes]], asked: list[tuple[str, bool]]
) -> None:
    assert asyncio.run(asked_of(turns)) == asked
