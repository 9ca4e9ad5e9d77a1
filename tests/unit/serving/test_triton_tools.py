# SPDX-License-Identifier: Apache-2.0
"""What Triton's tools, gRPC's tools and Kubernetes ask for beside the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import hotbed as hb
from hotbed.errors import ServingError, Unauthorized
from hotbed.serving.health import Health
from hotbed.serving.server.endpoints.grpc import MESSAGES, SERVICE

from .conftest import Held, Running, draw, wait_for
from .test_grpc import call, typed
from .test_http import ask, body
from .test_http import tensors as rest_tensors

# the stock client's sockets
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def rest(running: Running) -> Iterator[Any]:
    with tritonclient.http.InferenceServerClient(running.http) as client:
        yield client


@pytest.fixture
def channel(running: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def test_the_configuration_says_what_perf_analyzer_reads(
    rest: Any, stub: Any, running: Running
) -> None:
    config = rest.get_model_config("m")
    assert {one["name"]: one["data_type"] for one in config["input"]} == {
        "user": "TYPE_INT64",
        "item": "TYPE_STRING",
        "genres": "TYPE_STRING",
        "price": "TYPE_FP32",
    }
    assert config["max_batch_size"] == running.models.limits.batch_rows
    assert "dynamic_batching" in config
    ours = stub.ModelConfig(service_pb2.ModelConfigRequest(name="m"), timeout=60).config
    assert (ours.name, ours.platform, ours.backend) == ("m", config["platform"], config["backend"])
    assert [(one.name, one.data_type, list(one.dims)) for one in ours.output] == [
        ("prediction", 11, [])
    ]
    # empty as they are, perf_analyzer looks for them
    assert ours.HasField("model_transaction_policy")
    assert ours.HasField("dynamic_batching")
    for name, version in (("nobody", ""), ("m", "99")):
        with pytest.raises(InferenceServerException):
            rest.get_model_config(name, version)
        with pytest.raises(grpc.RpcError):
            stub.ModelConfig(service_pb2.ModelConfigRequest(name=name, version=version), timeout=60)


def test_statistics_count_requests_candidates_and_batches(rest: Any, stub: Any) -> None:
    def told() -> Any:
        (model,) = stub.ModelStatistics(
            service_pb2.ModelStatisticsRequest(name="m"), timeout=10
        ).model_stats
        return model

    before = told()
    rest.infer("m", rest_tensors(draw(5, 1)))
    stub.ModelInfer(
        service_pb2.ModelInferRequest.FromString(typed(draw(3, 2)).SerializeToString()), timeout=10
    )
    with pytest.raises(InferenceServerException):
        rest.infer("m", rest_tensors({"user": draw(5, 1)["user"]}))
    after = told()
    assert after.inference_count - before.inference_count == 8
    assert after.execution_count - before.execution_count == 2
    for name, count in (("success", 2), ("fail", 1), ("queue", 2), ("compute_infer", 2)):
        duration = getattr(after.inference_stats, name)
        assert duration.count - getattr(before.inference_stats, name).count == count, name
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert after.last_inference > 1_600_000_000_000
    for stats in (rest.get_inference_statistics("m"), rest.get_inference_statistics()):
        (model,) = stats["model_stats"]
        assert model["inference_count"] == after.inference_count
        assert model["inference_stats"]["success"] == {
            "count": after.inference_stats.success.count,
            "ns": after.inference_stats.success.ns,
        }
    with pytest.raises(InferenceServerException, match="unknown"):
        rest.get_inference_statistics("nobody")


def test_a_model_that_is_not_served_is_not_ready_over_grpc(stub: Any) -> None:
    for name, version in (("nobody", ""), ("m", "99")):
        request = service_pb2.ModelReadyRequest(name=name, version=version)
        assert not stub.ModelReady(request, timeout=60).ready


@pytest.mark.parametrize(
    "changes", [{"config": "{}"}, {"files": {"file:1/model.onnx": b"x"}, "config": "{}"}]
)
def test_a_load_with_a_model_of_its_own_is_refused(
    changes: Any, running: Running, rest: Any
) -> None:
    where = f"127.0.0.1:{running.server.grpc_port}"
    for module, client in ((tritonclient.http, rest), (tritonclient.grpc, None)):
        client = client or module.InferenceServerClient(where)
        with pytest.raises(InferenceServerException, match="loaded as it was exported"):
            client.load_model("m", **changes)
        client.load_model("m")
    for junk in (b"\xff", b"[]", b'{"parameters": 7}'):
        assert ask(running.http, "POST", "/v2/repository/models/m/load", junk)[0] == 400


@pytest.mark.parametrize(
    "parameters",
    [{"shared_memory_region": "r", "shared_memory_byte_size": 12}, {"classification": 2}],
)
def test_features_that_are_not_offered_are_rejected_and_not_ignored(
    parameters: dict[str, Any], running: Running
) -> None:
    for asked in (
        body(outputs=[{"name": "prediction", "parameters": parameters}]),
        body(inputs=[{**one, "parameters": parameters} for one in body()["inputs"]]),
    ):
        status, _, answer = ask(running.http, "POST", "/v2/models/m/infer", asked)
        assert (status, b"does not offer" in answer) == (400, True), answer
    for place in ("inputs", "outputs"):
        request = typed(draw(3, 10))
        if place == "outputs":
            request.outputs.add(name="prediction")
        for name, value in parameters.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(getattr(request, place)[0].parameters[name], kind, value)
        with pytest.raises(grpc.RpcError, match="does not offer"):
            call(running, "ModelInfer", request)


def test_flags_that_are_not_booleans_are_refused(running: Running) -> None:
    for asked in (
        body(outputs=[{"name": "prediction", "parameters": {"binary_data": "false"}}]),
        body(parameters={"binary_data_output": "false"}),
        body(parameters={"binary_data_output": 1}),
    ):
        status, _, answer = ask(running.http, "POST", "/v2/models/m/infer", asked)
        assert (status, b"binary_data" in answer) == (400, True), answer


def test_health_has_a_body_and_a_wrong_method_is_answered_with_the_right_ones(
    running: Running,
) -> None:
    expected = {
        "/v2/health/live": {"live": True},
        "/v2/health/ready": {"ready": True},
        "/v2/models/m/ready": {"name": "m", "ready": True},
    }
    for path, told in expected.items():
        status, headers, answer = ask(running.http, "GET", path)
        assert (status, json.loads(answer), headers["content-type"]) == (
            200,
            told,
            "application/json",
        )
        status, headers, _ = ask(running.http, "POST", path, b"")
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    status, headers, _ = ask(running.http, "GET", "/v2/models/m/infer")
    assert (status, headers["allow"]) == (405, "POST")


def test_the_page_is_shown_in_no_frame(running: Running) -> None:
    headers = ask(running.http, "GET", "/")[1]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"


def test_a_wrong_token_is_an_error_of_its_own(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    running = Running(exported, token_file=str(tmp_path / "tokens"))
    for token in ("wrong", None):
        with (
            hb.Client(f"http://{running.http}", token=token) as client,
            pytest.raises(Unauthorized, match="token"),
        ):
            client.predict("m", draw(2, 1))
    assert issubclass(Unauthorized, ServingError)
    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as channel:
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING  # probes hold no token
        with pytest.raises(grpc.RpcError) as refused:
            list(services(channel))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    running.close()


def health(channel: grpc.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status)


def test_health_follows_readiness_and_a_watch_ends_with_the_server(exported: Path) -> None:
    states = health_pb2.HealthCheckResponse
    running = Running(exported)
    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as channel:
        assert health(channel) == health(channel, SERVICE) == states.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health(channel, "nobody")
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60
        )
        assert next(watch).status == states.SERVING
        running.models.unload("m")
        assert health(channel) == states.NOT_SERVING
        assert next(watch).status == states.NOT_SERVING
        running.models.load("m")
        assert next(watch).status == states.SERVING
        rest: list[int] = []
        # A client that is not reading when the server ends drops what it has not read.
        reader = threading.Thread(target=lambda: rest.extend(one.status for one in watch))
        reader.start()
        running.close()  # within its own time limit, although a watch is open
        reader.join()
        assert rest == [states.NOT_SERVING]


def services(channel: grpc.Channel, **question: Any) -> Iterator[Any]:
    request = reflection_pb2.ServerReflectionRequest(**(question or {"list_services": ""}))
    yield from reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([request]), timeout=10
    )


def test_reflection_describes_a_service_well_enough_to_call_it(channel: grpc.Channel) -> None:
    (answer,) = services(channel)
    names = {one.name for one in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    for name in names:
        (answer,) = services(channel, file_containing_symbol=name)
        pool = descriptor_pool.DescriptorPool()
        for data in answer.file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
        methods = pool.FindServiceByName(name).methods_by_name
        assert methods
    assert (
        MESSAGES["ModelInferRequest"]
        .DESCRIPTOR.file.services_by_name[SERVICE.rpartition(".")[2]]
        .methods
    )


def test_a_parameter_server_has_health_and_reflection(exported: Path, tmp_path: Path) -> None:
    held = Held(tmp_path / "rows", f"m={exported}")
    with grpc.insecure_channel(f"127.0.0.1:{held.port}") as channel:
        wait_for(lambda: health(channel) == health_pb2.HealthCheckResponse.SERVING, "it is ready")
        (answer,) = services(channel)
        assert "hotbed.ParameterServer" in {
            one.name for one in answer.list_services_response.service
        }


def test_the_metadata_separates_lists_from_single_values(tmp_path: Path) -> None:
    schema = hb.Schema(
        [
            hb.Label("label"),
            hb.Id("user"),
            hb.Id("history", table="item", pooling="mean"),
            hb.Id("liked", table="item", weights="strength"),
            hb.Dense("vector", width=2),
        ]
    )
    model = hb.RecModel(
        hb.models.DNN(schema, hb.make_tables(schema, dim=2)), "bce", hb.Adam(lr=0.01)
    )
    columns = {
        "user": [1, 2],
        "history": [[1], [2, 3]],
        "liked": [[1], []],
        "strength": [[0.5], []],
        "vector": [[0.1, 0.2], [0.3, 0.4]],
        "label": [0, 1],
    }
    model.fit(hb.Dataset(hb.sources.Memory(columns), schema, 2), progress=False)
    model.export(tmp_path / "exported")
    running = Running(tmp_path / "exported")
    with tritonclient.http.InferenceServerClient(running.http) as client:
        shapes = {one["name"]: one["shape"] for one in client.get_model_metadata("m")["inputs"]}
        dims = {one["name"]: one["dims"] for one in client.get_model_config("m")["input"]}
    running.close()
    assert shapes == {
        "user": [-1],
        "history": [-1, -1],
        "liked": [-1, -1],
        "strength": [-1, -1],
        "vector": [-1, 2],
    }
    assert dims == {name: shape[1:] for name, shape in shapes.items()}


def test_a_model_cannot_have_the_name_that_the_protocol_keeps(
    running: Running, exported: Path
) -> None:
    with pytest.raises(hb.errors.ConfigError, match="keeps this name"):
        running.models.add("stats", exported)


@pytest.mark.parametrize(
    "lines, status",
    [
        (["Host: a"], 200),
        ([], 400),
        (["Host: a", "Host: b"], 400),
        (["Host: a", "Host: a"], 400),
        (["Host: a", "Transfer-Encoding: gzip, chunked"], 501),
        (["Host: a", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked"], 501),
        (["Host: a", "Transfer-Encoding: Chunked"], 200),
    ],
)
def test_requests_that_intermediaries_read_in_other_ways_are_refused(
    running: Running, lines: list[str], status: int
) -> None:
    chunked = any("hunked" in line for line in lines)
    data = "\r\n".join(
        ["GET /v2 HTTP/1.1", *lines, "Connection: close", "", "0\r\n\r\n" if chunked else ""]
    )
    host, port = running.http.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data.encode())
        with connection.makefile("rb") as answer:
            assert answer.readline().split()[1] == str(status).encode()


def open_watch(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)


def test_watches_without_a_token_take_no_calls_from_a_parameter_server(
    exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("one\n")
    tokens = ("--token-file", tmp_path / "tokens", "--set", "calls=4")
    held = Held(tmp_path / "rows", f"m={exported}", *tokens)
    own = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{held.port}", own) as channel:
        wait_for(lambda: health(channel) == health_pb2.HealthCheckResponse.SERVING, "it is ready")
        watches = [open_watch(channel) for _ in range(100)]
        states = {next(watch).status for watch in watches}
        assert states == {health_pb2.HealthCheckResponse.SERVING}
        store = hb.ParameterServer.connect(f"grpc://127.0.0.1:{held.port}", "one")
        assert store.model("m").find({"user": np.arange(3)}, seconds=10)["user"].shape[0] == 3
        for watch in watches:
            watch.cancel()


def test_watches_are_bounded_and_end_with_age() -> None:
    """The oldest one ends when there are too many; a watch that is over is to be made again."""

    class Stub:
        """The context of a call."""

        async def abort(self, code: grpc.StatusCode, reason: str) -> None:
            raise ConnectionAbortedError(code, reason)

    async def check() -> None:
        request = health_pb2.HealthCheckRequest()
        health = Health([SERVICE], lambda: True, most_watches=2)
        watches = [health.Watch(request, Stub()) for _ in range(3)]
        for watch in watches:
            await anext(watch)
        with pytest.raises(ConnectionAbortedError, match="Watch again"):
            await anext(watches[0])
        waiting = asyncio.ensure_future(anext(watches[1]))
        health.close()
        assert (await waiting).status == health_pb2.HealthCheckResponse.NOT_SERVING
        aged = Health([SERVICE], lambda: True, watch_seconds=0.0).Watch(request, Stub())
        await anext(aged)
        with pytest.raises(ConnectionAbortedError, match="because of its age"):
            await anext(aged)

    asyncio.run(check())


def test_a_change_that_is_undone_at_once_reaches_a_watch() -> None:
    """A watch may see the first change by itself, before anybody polls."""

    async def check() -> None:
        ready = True
        health = Health([SERVICE], lambda: ready)
        watch = health.Watch(health_pb2.HealthCheckRequest(), None)
        answers = []
        for is_ready in (True, False):
            ready = is_ready
            answers.append(await asyncio.wait_for(anext(watch), timeout=60))
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        ready = True
        answers.append(await asyncio.wait_for(waiting, timeout=60))
        states = health_pb2.HealthCheckResponse
        expected = [states.SERVING, states.NOT_SERVING, states.SERVING]
        assert [answer.status for answer in answers] == expected
        await watch.aclose()

    asyncio.run(check())
