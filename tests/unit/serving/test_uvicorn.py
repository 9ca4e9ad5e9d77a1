# SPDX-License-Identifier: Apache-2.0
"""What `server/connection.py` builds on is in the installed uvicorn, and none of it is private.

`make matrix` runs this file and the tests of connections with the newest uvicorn.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hotbed.serving.server.endpoints import connection

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
        "timeout_keep_alive_handler",
        "transport",
        "url",
    },
    RequestResponseCycle: {
        "disconnected",
        "message_event",
        "more_body",
        "response_complete",
        "response_started",
    },
    FlowControl: {"resume_reading"},
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
