# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol over gRPC, asked by its stock client and by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from hotbed.serving.server.endpoints import grpc as endpoint
from hotbed.serving.server.endpoints.grpc import MESSAGES, SERVICE, InferenceService
from hotbed.serving.server.endpoints.grpc_server import Gate
from hotbed.serving.server.tokens import Tokens

from .conftest import Running, draw

KINDS = {"user": "INT64", "item": "BYTES", "genres": "BYTES", "price": "FP32"}


def tensors(columns: dict[str, Any]) -> list[Any]:
    found = []
    for name, values in columns.items():
        array = np.array(values, object) if KINDS[name] == "BYTES" else np.asarray(values)
        found.append(triton.InferInput(name, list(array.shape), KINDS[name]))
        found[-1].set_data_from_numpy(array)
    return found


def typed(columns: dict[str, Any]) -> Any:
    """A message that asks for scores of columns."""
    request = MESSAGES["ModelInferRequest"](model_name="m")
    fields = {"INT64": "int64_contents", "BYTES": "bytes_contents", "FP32": "fp32_contents"}
    for name, values in columns.items():
        given = [one.encode() for one in values] if KINDS[name] == "BYTES" else values.tolist()
        request.inputs.add(
            name=name,
            datatype=KINDS[name],
            shape=[len(given)],
            contents={fields[KINDS[name]]: given},
        )
    return request


@pytest.fixture
def client(running: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{running.server.grpc_port}") as found:
        yield found


def test_the_messages_are_those_of_the_stock_client() -> None:
    theirs = {
        **model_config_pb2.DESCRIPTOR.message_types_by_name,
        **service_pb2.DESCRIPTOR.message_types_by_name,
    }
    partly = {"ModelInput", "ModelOutput", "ModelDynamicBatching", "ModelConfig", "ModelStatistics"}
    nested = {
        "TensorMetadata": "ModelMetadataResponse",
        "InferInputTensor": "ModelInferRequest",
        "InferRequestedOutputTensor": "ModelInferRequest",
        "InferOutputTensor": "ModelInferResponse",
        "ModelIndex": "RepositoryIndexResponse",
    }
    for name, ours in MESSAGES.items():
        other = theirs[nested[name]].nested_types_by_name[name] if name in nested else theirs[name]
        fields = {(f.name, f.number, f.type, f.is_repeated) for f in ours.DESCRIPTOR.fields}
        others = {(f.name, f.number, f.type, f.is_repeated) for f in other.fields}
        assert fields <= others if name in partly else fields == others, name
    types = model_config_pb2.DataType.DESCRIPTOR.values
    assert [one.name for one in sorted(types, key=lambda one: one.number)] == list(
        MESSAGES["ModelInput"].DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name
    )


def test_the_stock_client_gets_the_scores_of_the_session(client: Any, session: Any) -> None:
    columns = draw(50, 8)
    found = client.infer(
        "m", tensors(columns), request_id="9", outputs=[triton.InferRequestedOutput("prediction")]
    )
    assert np.abs(found.as_numpy("prediction") - session.predict(columns)).max() < 1e-6
    assert (found.get_response().id, found.get_response().model_version) == (
        "9",
        str(session.model.version),
    )


def test_health_metadata_and_repository_are_answered(client: Any, session: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.get_server_metadata().name == "hotbed"
    told = client.get_model_metadata("m")
    kinds = {one.name: one.datatype for one in told.inputs}
    assert kinds == KINDS  # as they were in training
    assert [(one.name, one.datatype, list(one.shape)) for one in told.outputs] == [
        ("prediction", "FP32", [-1])
    ]
    (entry,) = client.get_model_repository_index().models
    assert (entry.name, entry.version, entry.state) == ("m", str(session.model.version), "READY")


def test_a_context_column_of_one_value_holds_for_every_candidate(client: Any, session: Any) -> None:
    columns = draw(20, 9)
    asked = {**columns, "user": np.array([7]), "genres": ["g1"]}
    found = client.infer("m", tensors(asked)).as_numpy("prediction")
    expected = session.predict({**columns, "user": np.full(20, 7), "genres": ["g1"] * 20})
    assert np.abs(found - expected).max() < 1e-6


def test_typed_contents_are_read_as_raw_ones(running: Running, session: Any) -> None:
    columns = draw(3, 10)
    request = typed(columns)
    found = np.frombuffer(call(running, "ModelInfer", request).raw_output_contents[0], np.float32)
    assert np.abs(found - session.predict(columns)).max() < 1e-6
    request.inputs[0].contents.int64_contents.pop()
    request.inputs[0].contents.fp32_contents.append(1)
    with pytest.raises(grpc.RpcError, match="several types"):
        call(running, "ModelInfer", request)


def call(running: Running, name: str, request: Any, seconds: float = 10) -> Any:
    data = request if isinstance(request, bytes) else request.SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as channel:
        return channel.unary_unary(
            f"/{SERVICE}/{name}", None, MESSAGES[f"{name}Response"].FromString
        )(data, timeout=seconds)


def without(columns: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in columns.items() if key != name}


@pytest.mark.parametrize(
    "change, code, reason",
    [
        (lambda c: ("nobody", "", tensors(c)), "NOT_FOUND", "unknown"),
        (lambda c: ("m", "99", tensors(c)), "NOT_FOUND", "version '99' is not loaded, got "),
        (
            lambda c: ("m", "", tensors(without(c, "item"))),
            "INVALID_ARGUMENT",
            "inputs are missing",
        ),
        (
            lambda c: ("m", "", tensors({**c, "user": c["user"][:3]})),
            "INVALID_ARGUMENT",
            "differ in length",
        ),
        (lambda c: ("m", "", tensors(draw(5000, 1))), "INVALID_ARGUMENT", "too many candidates"),
    ],
)
def test_a_wrong_request_is_refused_with_a_reason(
    client: Any, change: Any, code: str, reason: str
) -> None:
    name, version, inputs = change(draw(10, 2))
    with pytest.raises(InferenceServerException, match=reason) as told:
        client.infer(name, inputs, model_version=version)
    assert told.value.status() == f"StatusCode.{code}"


def test_random_bytes_neither_crash_nor_hang_it(running: Running, session: Any) -> None:
    draws = np.random.default_rng(0)
    good = MESSAGES["ModelInferRequest"](model_name="m")
    for name, values in draw(4, 3).items():
        raw = (
            b"".join(len(v).to_bytes(4, "little") + v.encode() for v in values)
            if KINDS[name] == "BYTES"
            else values.tobytes()
        )
        good.inputs.add(name=name, datatype=KINDS[name], shape=[4])
        good.raw_input_contents.append(raw)
    whole = good.SerializeToString()
    assert call(running, "ModelInfer", whole).outputs[0].shape == [4]
    errors = []
    for number in range(300):
        data = bytearray(whole if number % 3 else draws.bytes(int(draws.integers(0, 200))))
        for place in draws.integers(0, max(1, len(data)), int(draws.integers(1, 6))):
            if place < len(data):
                data[place] = draws.integers(0, 256)
        try:
            call(running, "ModelInfer", bytes(data))
        except grpc.RpcError as error:
            errors.append((error.code().name, error.details(), bytes(data)))
    assert {"INVALID_ARGUMENT", "NOT_FOUND"} <= {code for code, _, _ in errors}
    bad = [one for one in errors if one[0] not in ("INVALID_ARGUMENT", "NOT_FOUND")]
    assert not bad, bad[0]
    assert call(running, "ModelInfer", whole).outputs[0].shape == [4]
    assert threading.active_count() < 50


def test_a_call_without_a_token_is_rejected_before_its_message_is_received(
    exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    running, told = Running(exported, token_file=str(tmp_path / "tokens")), threading.Event()

    def never() -> Iterator[bytes]:
        told.wait(30)
        yield b""

    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.stream_unary(f"/{SERVICE}/ModelInfer")(never(), timeout=60)
        told.set()
    running.close()
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_each_call_of_the_descriptor_has_a_handler() -> None:
    handlers = InferenceService(cast(Any, None)).handlers()
    for name in (*endpoint._TYPES.calls, "NotACall"):
        handler = handlers.service(Mock(method=f"/{SERVICE}/{name}"))
        assert (handler is not None) is (name != "NotACall")


@pytest.mark.parametrize(
    ("method", "is_open"),
    [("/a.Service/Ready", True), ("/b.Service/Ready", False), ("/a.Service/NotReady", False)],
)
def test_only_methods_of_the_full_name_need_no_token(
    tmp_path: Path, method: str, is_open: bool
) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    gate = Gate(Tokens(str(tmp_path / "tokens")), ["/a.Service/Ready"], {}, str)

    async def proceed(details: Any) -> str:
        return "called"

    details = Mock(method=method, invocation_metadata=())
    outcome = asyncio.run(gate.intercept_service(proceed, details))
    assert (outcome == "called") is is_open


@pytest.mark.parametrize("method", [f"/{SERVICE}/ModelInfers", "/other.Service/Call"])
def test_an_unknown_method_is_answered_with_its_name(running: Running, method: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as unary:
            channel.unary_unary(method)(b"", timeout=60)
        with pytest.raises(grpc.RpcError) as stream:
            list(channel.stream_stream(method)(iter([b""]), timeout=60))
    for error in (unary.value, stream.value):
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        assert error.details().startswith(f"method '{method}': the server has no such method.")
