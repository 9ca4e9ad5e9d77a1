# SPDX-License-Identifier: Apache-2.0
"""The access log and the traces of a server: what is said about each request, and to whom."""

from __future__ import annotations

import fcntl
import gzip
import http.server
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as grpc_client
from started import start_process
from tritonclient.utils import InferenceServerException

import hotbed as hb
from hotbed.errors import ConfigError, HotbedError, NotServed
from hotbed.logs import LogLines
from hotbed.serving.request_log.writer import in_sample
from hotbed.serving.server.options import LogOptions
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.spans import open_spans
from hotbed.serving.trace_context import in_trace, read_trace, trace_headers

from .conftest import Held, Process, Running, draw, wait_for
from .test_http import ask, body
from .test_request_log import stock_tensors

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The fields of the lines of the access log, as they come."""
    fields = list[dict[str, Any]]()

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = LogLines(as_json=True)._line(record)
            fields.append(json.loads(line))

    log = logging.getLogger("hotbed.access")
    handler = Collecting()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield fields
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


def observed(exported: Path, share: float) -> Running:
    models = Models(hb.ParameterServer(), logs=LogOptions(access_log=share))
    models.add("m", exported)
    return Running(exported, models=models)


def test_each_request_and_each_error_has_a_line(
    exported: Path, lines: list[dict[str, Any]]
) -> None:
    running = observed(exported, 1.0)
    headers = {"x-request-id": "mine", "traceparent": PARENT}
    with hb.Client(f"http://{running.http}") as client:
        client.predict("m", draw(3, 1), headers=headers)
        with pytest.raises(NotServed):
            client.predict("other", draw(3, 1))
    status, answered, _ = ask(running.http, "POST", "/v2/models/m/infer", body(3))
    assert status == 200
    status, refused, _ = ask(running.http, "POST", "/v2/models/m/infer", {"inputs": 3})
    ask(running.http, "GET", "/v2/models/m")
    ask(running.http, "GET", "/nothing")
    with grpc_client.InferenceServerClient(running.grpc) as stub:
        stub.infer("m", stock_tensors(grpc_client, draw(4, 1)), headers=headers)
        with pytest.raises(InferenceServerException):
            stub.infer("m", stock_tensors(grpc_client, draw(4, 1))[:1])
        with pytest.raises(InferenceServerException):
            stub.load_model("other")
        stub.is_server_ready()
    version = running.models.named("m").current.version.version
    running.close()

    times = [line.pop("milliseconds") for line in lines]
    assert all(0 < milliseconds < 60_000 for milliseconds in times)
    names = [line.pop("request_id") for line in lines]
    assert names[0] == names[5] == "mine"
    assert names[2] == answered["x-request-id"]
    assert names[3] == refused["x-request-id"]
    assert len(set(names)) == len(names) - 1
    for line in lines:
        assert (line.pop("logger"), line.pop("level")) == ("hotbed.access", "INFO")
        assert line.pop("time") > 1.7e9
    infer = "POST /v2/models/m/infer"
    good = {"model": "m", "version": version, "candidates": 3, "protocol": "http", "status": 200}
    call = "inference.GRPCInferenceService/"
    reasons = [line.pop("reason", "") for line in lines]
    assert lines == [
        {"message": infer, **good, "trace_id": TRACE_ID},
        {
            "message": infer.replace("/m/", "/other/"),
            "model": "other",
            "protocol": "http",
            "status": 404,
        },
        {"message": infer, **good},
        {"message": infer, "model": "m", "protocol": "http", "status": 400},
        {"message": "GET /nothing", "protocol": "http", "status": 404},
        {
            "message": f"{call}ModelInfer",
            **good,
            "candidates": 4,
            "protocol": "grpc",
            "status": "OK",
            "trace_id": TRACE_ID,
        },
        {
            "message": f"{call}ModelInfer",
            "model": "m",
            "protocol": "grpc",
            "status": "INVALID_ARGUMENT",
        },
        {"message": f"{call}RepositoryModelLoad", "protocol": "grpc", "status": "NOT_FOUND"},
    ]
    assert [bool(reason) for reason in reasons] == [
        line["status"] not in (200, "OK") for line in lines
    ]
    assert "inputs" in reasons[3]


def test_a_request_without_its_body_has_a_line_with_the_status_that_was_sent(
    exported: Path, lines: list[dict[str, Any]]
) -> None:
    models = Models(hb.ParameterServer(), logs=LogOptions(access_log=1.0))
    models.add("m", exported)
    running = Running(exported, models=models, request_seconds=0.2)
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    for leaves in (False, True):
        with socket.create_connection(("127.0.0.1", running.server.port), 20) as connection:
            connection.sendall(head)
            if not leaves:
                assert connection.recv(99).startswith(b"HTTP/1.1 408 ")
                wait_for(lambda: len(lines) == 1, "the request that was too slow")
    wait_for(lambda: len(lines) == 2, "the client that left")
    running.close()
    assert [line["status"] for line in lines] == [408, 499]


def test_a_share_of_the_answers_has_lines_and_a_server_without_a_log_has_none(
    exported: Path, lines: list[dict[str, Any]]
) -> None:
    for share in (0.0, 0.5):
        running = observed(exported, share)
        with hb.Client(f"http://{running.http}") as client:
            for number in range(40):
                client.predict("m", draw(1, 1), headers={"x-request-id": f"r{number}"})
        running.close()
        assert bool(lines) == bool(share)
    assert 5 < len(lines) < 35
    chosen = {f"r{number}" for number in range(40) if in_sample(f"r{number}", 0.5)}
    assert {line["request_id"] for line in lines} == chosen


@pytest.mark.slow
def test_a_reader_of_stderr_that_stops_holds_up_no_answer(exported: Path) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)  # a few lines fill it
    program = "from hotbed.cli.commands import main; main()"
    options = ("--http-port", "0", "--grpc-port=-1", "--set", "access_log=1")
    server = start_process(
        [sys.executable, "-c", program, "serve", f"m={exported}", *options], stderr=writing
    )
    os.close(writing)
    with os.fdopen(reading) as lines:
        port = None
        while port is None:
            port = re.search(r"listening on port (\d+)", lines.readline())
        with hb.Client(f"http://127.0.0.1:{port[1]}") as client:
            for number in range(100):
                client.predict("m", draw(1, 1), headers={"x-request-id": f"r{number}"})
            names = [json.loads(lines.readline()).get("request_id") for _ in range(100)]
            assert names == [f"r{number}" for number in range(100)]
            for number in range(100):
                client.predict("m", draw(1, 1), headers={"x-request-id": f"r{number}"})
        server.send_signal(signal.SIGTERM)  # nobody reads its last lines
        assert server.wait(60) == 0


@pytest.mark.parametrize(
    ("header", "is_valid"),
    [
        (PARENT, True),
        (PARENT[:-2] + "00", True),
        ("01" + PARENT[2:], True),
        ("01" + PARENT[2:] + "-more", True),
        ("01" + PARENT[2:] + "more", False),
        (PARENT + "-more", False),
        ("ff" + PARENT[2:], False),
        (PARENT.upper(), False),
        (PARENT.replace(TRACE_ID, "0" * 32), False),
        (PARENT.replace("b7ad6b7169203331", "0" * 16), False),
        (f"{PARENT}, {PARENT}", False),
        ("", False),
    ],
)
def test_a_wrong_traceparent_counts_as_none(header: str, is_valid: bool) -> None:
    trace = read_trace(header, "vendor=1")
    assert (trace is not None) == is_valid
    if trace is not None:
        assert trace.header[2:53] == PARENT[2:53]
        assert trace.state == "vendor=1"


class Collector(http.server.ThreadingHTTPServer):
    """A receiver of OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Received)
        self.spans = list[dict[str, Any]]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]


class Received(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            attributes = attributes_of(resource.resource)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.server.spans.append(  # type: ignore[attr-defined]
                        {
                            "service": attributes["service.name"],
                            "name": span.name,
                            "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(),
                            "above": span.parent_span_id.hex(),
                            "kind": span.kind,
                            "error": span.status.code == 2,
                            **attributes_of(span),
                        }
                    )
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *_: Any) -> None: ...


def attributes_of(message: Any) -> dict[str, Any]:
    """Return the attributes in a message of OTLP."""
    attributes = {}
    for pair in message.attributes:
        attributes[pair.key] = getattr(pair.value, pair.value.WhichOneof("value"))
    return attributes


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A receiver of spans, to which the processes that a test starts send theirs."""
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry absent")
    receiver = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield receiver
    receiver.shutdown()
    receiver.server_close()


@pytest.mark.slow
def test_spans_of_a_request_reach_from_its_caller_to_the_parameter_server(
    exported: Path, tmp_path: Path, collector: Collector
) -> None:
    rows = Held(tmp_path / "rows", f"m={exported}")
    server = Process(f"m=grpc://127.0.0.1:{rows.port}", "--set", "access_log=1")
    wait_for(lambda: ask(server.http, "GET", "/v2/health/ready")[0] == 200, "it is ready")
    version = int(json.loads(ask(server.http, "GET", "/v2/models/m")[2])["versions"][0])
    headers = {"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "mine"}
    status, answered, _ = ask(server.http, "POST", "/v2/models/m/infer", body(3), headers)
    assert status == 200
    with grpc_client.InferenceServerClient(server.grpc) as stub:
        stub.infer("m", stock_tensors(grpc_client, draw(4, 1)))
    ask(server.http, "POST", "/v2/models/other/infer", body(3))
    assert server.stop() == 0  # sends the last spans
    assert rows.stop() == 0

    (request,) = collector.named("POST /v2/models/{model}/infer")[:1]
    assert (request["trace"], request["above"]) == (TRACE_ID, "b7ad6b7169203331")
    assert answered["traceresponse"] == f"00-{TRACE_ID}-{request['id']}-01"
    assert (request["kind"], request["service"]) == (2, "hotbed")
    assert request["http.response.status_code"] == 200
    assert request["http.request.method"] == "POST"
    assert request["http.route"] == "/v2/models/{model}/infer"
    assert request["url.path"] == "/v2/models/m/infer"
    assert request["url.scheme"] == "http"
    assert request["hotbed.model"] == "m"
    assert request["hotbed.candidates"] == 3
    assert request["hotbed.version"] == version
    score, *_ = [span for span in collector.named("score") if span["above"] == request["id"]]
    fetch, *_ = [span for span in collector.spans if span["above"] == score["id"]]
    assert (fetch["kind"], fetch["rpc.system.name"]) == (3, "grpc")
    remote, *_ = [span for span in collector.spans if span["above"] == fetch["id"]]
    assert remote["kind"] == 2
    assert remote["name"] == remote["rpc.method"] == fetch["name"]
    assert {span["trace"] for span in (score, fetch, remote)} == {TRACE_ID}
    call, *_ = collector.named("inference.GRPCInferenceService/ModelInfer")
    assert (call["rpc.response.status_code"], call["hotbed.candidates"]) == ("OK", 4)
    assert call["trace"] != TRACE_ID
    missing = collector.named("POST /v2/models/{model}/infer")[1]
    assert (missing["http.response.status_code"], missing["error"]) == (404, False)
    assert {span["trace"] for span in collector.spans} == {
        TRACE_ID,
        call["trace"],
        missing["trace"],
    }


def test_without_opentelemetry_a_trace_is_passed_on_as_it_came(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the loop that scores a request alone, and by the thread that scores batches."""
    ask_session = hb.InferenceSession.ask
    sent = list[Mapping[str, str]]()

    def recorded(session: Any, *arguments: Any, **options: Any) -> Any:
        sent.append(trace_headers())
        return ask_session(session, *arguments, **options)

    running = Running(exported)
    monkeypatch.setattr(hb.InferenceSession, "ask", recorded)
    expected = {"traceparent": PARENT, "tracestate": "vendor=1"}
    with hb.Client(f"http://{running.http}") as client:
        client.predict("m", draw(1, 1), headers=expected)
        client.predict("m", draw(1000, 1), headers=expected)  # too many for the loop
        client.predict("m", draw(1, 1), headers={"traceparent": "wrong"})
    with grpc_client.InferenceServerClient(running.grpc) as stub:
        stub.infer("m", stock_tensors(grpc_client, draw(1, 1)), headers=expected)
    running.close()
    assert sent == [expected, expected, {}, expected]


def test_calls_of_rows_and_of_the_client_carry_the_trace(exported: Path) -> None:
    metadata = dict[str, str]()

    class Recording(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
        def service(self, details: Any) -> None:
            metadata.update(details.invocation_metadata)

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Recording(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    store = hb.ParameterServer.connect(f"grpc://127.0.0.1:{port}")
    with in_trace(read_trace(PARENT, "vendor=1")), pytest.raises(HotbedError):
        store.model("m")
    assert metadata["traceparent"] == PARENT
    assert metadata["tracestate"] == "vendor=1"
    metadata.clear()
    with pytest.raises(HotbedError):
        store.model("m")
    assert "user-agent" in metadata
    assert "traceparent" not in metadata
    store.close()
    server.stop(None).wait()


def test_the_client_sends_the_span_of_its_program(
    exported: Path, lines: list[dict[str, Any]]
) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="OpenTelemetry absent")
    place = trace.SpanContext(int(TRACE_ID, 16), 0xB7AD6B7169203331, True, trace.TraceFlags(1))
    running = observed(exported, 1.0)
    with (
        trace.use_span(trace.NonRecordingSpan(place)),
        hb.Client(f"http://{running.http}") as client,
    ):
        client.predict("m", draw(1, 1))
    running.close()
    assert [line["trace_id"] for line in lines] == [TRACE_ID]


def test_without_variables_that_ask_for_spans_opentelemetry_is_not_imported() -> None:
    program = """
import os, sys
import hotbed.serving.server.endpoints.grpc, hotbed.serving.server.server
from hotbed.serving.server.spans import open_spans
assert open_spans() is None
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://x"
for variables in ({"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}):
    os.environ.update(variables)
    assert open_spans() is None
    for name in variables:
        del os.environ[name]
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", program], env=bare, check=True)


def test_spans_that_cannot_be_made_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    assert open_spans() is None
    assert "pip install hotbed[tracing]" in caplog.text
    monkeypatch.undo()
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry absent")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(ConfigError, match="the exporter 'pigeon' is not installed"):
        open_spans()
