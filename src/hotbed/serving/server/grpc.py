# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol over gRPC. Needs the extra `serve`.

The messages are described here, field by field; see `hotbed.serving.stores.messages`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from hotbed.errors import ConfigError, DataError, HotbedError, NotServed, Overloaded, PersistError, ServingError
from hotbed.serving.server.models import Models
from hotbed.serving.server.protocol import Tensor, about, choose, text_of
from hotbed.serving.session import Scores
from hotbed.serving.stores.messages import messages

log = logging.getLogger("hotbed.serving")
SERVICE = "inference.GRPCInferenceService"
_STREAMS = 256  # calls of one connection that are under way

# Message -> its fields by number: `*` repeated, `%` a map from strings, `|` one of the choice of that name.
_PARAMETERS = (
    "bool bool_param | parameter_choice; int64 int64_param | parameter_choice; string string_param | parameter_choice"
)
_NAMED = "string name; string version"
_CHANGE = "string repository_name; string model_name; % ModelRepositoryParameter parameters"
_TENSOR = "string name; string datatype; * int64 shape"
_MESSAGES: Mapping[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name; string version; * string extensions",
    "ModelMetadataRequest": _NAMED,
    "TensorMetadata": _TENSOR,
    "ModelMetadataResponse": "string name; * string versions; string platform; * TensorMetadata inputs; * TensorMetadata outputs",
    "InferParameter": f"{_PARAMETERS}; double double_param | parameter_choice; uint64 uint64_param | parameter_choice",
    "InferTensorContents": "* bool bool_contents; * int32 int_contents; * int64 int64_contents; * uint32 uint_contents; "
    "* uint64 uint64_contents; * float fp32_contents; * double fp64_contents; * bytes bytes_contents",
    "InferInputTensor": f"{_TENSOR}; % InferParameter parameters; InferTensorContents contents",
    "InferRequestedOutputTensor": "string name; % InferParameter parameters",
    "ModelInferRequest": "string model_name; string model_version; string id; % InferParameter parameters; "
    "* InferInputTensor inputs; * InferRequestedOutputTensor outputs; * bytes raw_input_contents",
    "InferOutputTensor": f"{_TENSOR}; % InferParameter parameters; InferTensorContents contents",
    "ModelInferResponse": "string model_name; string model_version; string id; % InferParameter parameters; "
    "* InferOutputTensor outputs; * bytes raw_output_contents",
    "ModelRepositoryParameter": f"{_PARAMETERS}; bytes bytes_param | parameter_choice",
    "RepositoryIndexRequest": "string repository_name; bool ready",
    "ModelIndex": "string name; string version; string state; string reason",
    "RepositoryIndexResponse": "* ModelIndex models",
    "RepositoryModelLoadRequest": _CHANGE,
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": _CHANGE,
    "RepositoryModelUnloadResponse": "",
}


MESSAGES = messages("inference", _MESSAGES)

# Datatype -> the field of InferTensorContents that holds its values. FP16 has none: it comes raw.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP16": "raw_input_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def code_of(error: Exception) -> grpc.StatusCode:
    """The gRPC status that tells of an error."""
    codes = grpc.StatusCode
    for kind, code in ((NotServed, codes.NOT_FOUND), (Overloaded, codes.RESOURCE_EXHAUSTED), (ServingError, codes.UNAVAILABLE),
                       (PersistError, codes.FAILED_PRECONDITION), (HotbedError, codes.INVALID_ARGUMENT)):  # fmt: skip
        if isinstance(error, kind):
            return code
    return codes.INTERNAL


class Service:
    """The calls of the protocol; each takes and gives a message of `MESSAGES`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def handlers(self) -> Any:
        """What a gRPC server is given."""
        calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "ServerLive": self._live, "ServerReady": self._ready, "ServerMetadata": self._server,
            "ModelReady": self._model_ready, "ModelMetadata": self._metadata, "ModelInfer": self._infer,
            "RepositoryIndex": self._index, "RepositoryModelLoad": self._load, "RepositoryModelUnload": self._unload,
        }  # fmt: skip
        # requests come as bytes, so that those which are no message are told apart from errors of ours
        return grpc.method_handlers_generic_handler(SERVICE, {
            name: grpc.unary_unary_rpc_method_handler(
                told(call, MESSAGES[f"{name}Request"]), None, MESSAGES[f"{name}Response"].SerializeToString)
            for name, call in calls.items()
        })  # fmt: skip

    async def _live(self, request: Any) -> Any:
        return MESSAGES["ServerLiveResponse"](live=True)

    async def _ready(self, request: Any) -> Any:
        return MESSAGES["ServerReadyResponse"](ready=self._models.ready)

    async def _server(self, request: Any) -> Any:
        return MESSAGES["ServerMetadataResponse"](**about())

    async def _model_ready(self, request: Any) -> Any:
        return MESSAGES["ModelReadyResponse"](ready=self._models.named(request.name, request.version).ready)

    async def _metadata(self, request: Any) -> Any:
        return MESSAGES["ModelMetadataResponse"](**self._models.metadata(request.name, request.version))

    async def _index(self, request: Any) -> Any:
        return MESSAGES["RepositoryIndexResponse"](models=self._models.index(request.ready))

    async def _load(self, request: Any) -> Any:
        await asyncio.wrap_future(self._models.aside.submit(self._models.load, request.model_name))
        return MESSAGES["RepositoryModelLoadResponse"]()

    async def _unload(self, request: Any) -> Any:
        await asyncio.wrap_future(self._models.aside.submit(self._models.unload, request.model_name))
        return MESSAGES["RepositoryModelUnloadResponse"]()

    async def _infer(self, request: Any) -> Any:
        name, started, meters = request.model_name, time.perf_counter(), self._models.meters
        wanted = [one.name for one in request.outputs] or None

        def write(scores: Scores) -> Any:
            response = MESSAGES["ModelInferResponse"](model_name=name, model_version=str(scores.version), id=request.id)
            for output, values in choose(scores.outputs, wanted).items():
                response.outputs.add(name=output, datatype="FP32", shape=[len(values)])
                response.raw_output_contents.append(np.ascontiguousarray(values, "<f4").tobytes())
            if scores.late:
                response.parameters["late_rows"].int64_param = scores.late
            return response

        try:
            found = await self._models.score(name, request.model_version, list(tensors(request)), write)
        except BaseException as error:
            meters.ended(name, "grpc", started, error)
            raise
        meters.ended(name, "grpc", started)
        return found


def tensors(request: Any) -> Iterator[Tensor]:
    """The inputs of a ModelInferRequest: raw, or typed. Raises DataError where both or neither come."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise DataError(
            f"raw_input_contents: one for each input — received {len(raw)} for {len(request.inputs)} — correct them"
        )
    for number, one in enumerate(request.inputs):
        if raw and one.HasField("contents"):
            raise DataError(f"input {one.name[:100]!r}: raw and typed contents — received both — give one")
        yield Tensor(one.name, one.datatype, one.shape, raw[number] if raw else _contents(one))


def _contents(one: Any) -> Any:
    """The typed contents of an input, which must be those of its datatype."""
    fields = one.contents.ListFields()
    if len(fields) > 1:
        names = [field.name for field, _ in fields]
        raise DataError(f"input {one.name[:100]!r}: contents of several types — received {names} — give one")
    if not fields:
        return []
    field, values = fields[0]
    expected = _CONTENTS.get(one.datatype, field.name)  # an unknown datatype is refused later
    if field.name != expected:
        raise DataError(
            f"input {one.name[:100]!r}: expected {expected} for {one.datatype}, got {field.name}. "
            "Fill the field of the tensor's datatype."
        )
    if expected == "bytes_contents":
        return [text_of(one.name, value) for value in values]
    return list(values)


def told(call: Callable[[Any], Awaitable[Any]], message: Any) -> Callable[[bytes, Any], Awaitable[Any]]:
    """A call whose errors become a status with their reason."""

    async def answer(data: bytes, context: Any) -> Any:
        try:
            return await call(message.FromString(data))
        except Exception as error:
            await refuse(error, message, context)

    return answer


async def refuse(error: Exception, message: Any, context: Any) -> None:
    """End a call that began with a `message`, with a status and a reason."""
    if isinstance(error, HotbedError):
        await context.abort(code_of(error), str(error))
    if isinstance(error, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is no {message.DESCRIPTOR.name} — {error}")
    log.error("a request failed", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "an error of the server; its log has more")


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a right token; health is open."""

    def __init__(self, admit: Callable[[str | None], bool]) -> None:
        async def refuse(requests: Any, context: Any) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "no token, or a wrong one — send authorization: Bearer TOKEN"
            )

        # of a stream: else the whole message would be taken first
        self._admit, self._refused = admit, grpc.stream_unary_rpc_method_handler(refuse)

    async def intercept_service(self, go_on: Any, details: Any) -> Any:
        given = next((value for name, value in details.invocation_metadata if name == "authorization"), None)
        if details.method.endswith(("/ServerLive", "/ServerReady", "/Ready")) or self._admit(given):
            return await go_on(details)
        return self._refused


async def start(
    models: Models,
    address: str,
    admit: Callable[[str | None], bool] | None,
    tls: tuple[bytes, bytes] | None,
    shared: bool = False,
    idle_seconds: float = 60.0,
) -> tuple[Any, int]:
    """A gRPC server that listens, and its port. `tls`: key and certificate; `shared`: by several processes; `idle_seconds`: when a
    connection without a call is closed. Raises ConfigError where it cannot listen."""
    options = {"grpc.max_receive_message_length": models.limits.body_bytes, "grpc.so_reuseport": int(shared),
               "grpc.max_connection_idle_ms": int(idle_seconds * 1000), "grpc.max_concurrent_streams": _STREAMS}  # fmt: skip
    return await listen(Service(models).handlers(), address, admit, tls, options)


async def listen(
    handlers: Any,
    address: str,
    admit: Callable[[str | None], bool] | None,
    tls: tuple[bytes, bytes] | None,
    options: Mapping[str, int],
    calls: int | None = None,
) -> tuple[Any, int]:
    """As `start`, of any handlers. `calls`: answered at the same time; None = any number."""
    gates = [] if admit is None else [Gate(admit)]
    server = grpc.aio.server(interceptors=gates, options=list(options.items()), maximum_concurrent_rpcs=calls)
    server.add_generic_rpc_handlers((handlers,))
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, grpc.ssl_server_credentials([tls]))
    except RuntimeError as error:
        raise ConfigError(f"serve: cannot listen — received {address}, {error} — give a free port, or 0") from error
    await server.start()
    return server, port
