# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol over gRPC. Needs the extra `serve`.

`inference.proto` describes the messages.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from ssl import SSLContext
from typing import Any, NamedTuple

import grpc
import numpy as np

from hotbed.errors import DataError, NotServed
from hotbed.serving.protocol.bodies import (
    SLICE,
    DividedRequest,
    Undecoded,
    ValueSpan,
    divide_message,
)
from hotbed.serving.protocol.inputs import HeadCache, InputHead, PackedTensors, RequestHead
from hotbed.serving.protocol.offered import (
    REQUEST_ID,
    answer_parameters,
    check_load,
    check_tensor_parameters,
    choose_outputs,
    request_id_header,
    server_metadata,
    times_parameter,
)
from hotbed.serving.protocol.tensors import Tensor
from hotbed.serving.server.access import Trail, Trails
from hotbed.serving.server.endpoints.grpc_server import (
    STREAMS,
    GrpcServer,
    GrpcService,
    UnaryHandler,
    abort_with,
    current_trail,
    start_grpc,
    unary_handler,
)
from hotbed.serving.server.endpoints.triton import model_config, model_statistics
from hotbed.serving.server.options import Options
from hotbed.serving.server.scoring.batching import DecodedRequest, ServedVersion
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.tokens import INFER, OPERATE, SCRAPE, Tokens
from hotbed.serving.session import Scores
from hotbed.serving.stores.messages import load_service

log = logging.getLogger("hotbed.serving")
_CALL_BYTES = 64 << 10  # of a request other than for predictions
# the longest message, unless an option or a loaded model allows longer ones
_INFER_BYTES = 16 << 20

_ROLES = {
    "ModelInfer": INFER,
    "ModelStatistics": SCRAPE,
    "RepositoryModelLoad": OPERATE,
    "RepositoryModelUnload": OPERATE,
}
_TYPES = load_service(Path(__file__).with_name("inference.binpb"))
SERVICE = _TYPES.name
MESSAGES = _TYPES.messages

# Datatype -> the field of InferTensorContents with its values. FP16 has none: it is always raw.
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


class MessageHead(NamedTuple):
    """A head without an id whose tensors are binary numbers of these sizes."""

    message: Any
    tensors: RequestHead
    raw_sizes: Sequence[int]


@dataclass(frozen=True)
class InferCall:
    """A ModelInferRequest, not decoded yet.

    Attributes:
        data: the bytes of the message.
        divided: its head and its values.
        head: the head as a message.
        packed: its tensors, if the head is cached.
    """

    data: bytes
    divided: DividedRequest
    head: Any
    packed: PackedTensors | None = None


class InferenceService:
    """The calls of the protocol.

    Each takes and returns a message of `MESSAGES`; `_infer` takes the bytes of its message, and the
    context of its call.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._heads = HeadCache[MessageHead]()

    def handlers(self) -> Any:
        """Return the handlers of the calls for a gRPC server."""
        calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._metadata,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        # Requests are received as bytes, which are checked before they are decoded.
        answers: dict[str, UnaryHandler] = {"ModelInfer": self._infer}
        for name, call in calls.items():
            request = MESSAGES[f"{name}Request"]
            answers[name] = unary_handler(call, request, partial(_decode_call, request))
        handlers = {}
        for name, answer in answers.items():
            write = MESSAGES[f"{name}Response"].SerializeToString
            handlers[name] = grpc.unary_unary_rpc_method_handler(answer, None, write)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _live(self, request: Any) -> Any:
        return MESSAGES["ServerLiveResponse"](live=True)

    async def _ready(self, request: Any) -> Any:
        return MESSAGES["ServerReadyResponse"](ready=self._models.ready)

    async def _server(self, request: Any) -> Any:
        return MESSAGES["ServerMetadataResponse"](**server_metadata())

    async def _model_ready(self, request: Any) -> Any:
        try:
            self._models.named(request.name).loaded(request.version)
            ready = True
        except NotServed:
            ready = False
        return MESSAGES["ModelReadyResponse"](ready=ready)

    async def _metadata(self, request: Any) -> Any:
        metadata = self._models.metadata(request.name, request.version)
        for tensor in metadata["inputs"]:
            tensor.pop("parameters", None)  # the protocol has them in its REST form alone
        return MESSAGES["ModelMetadataResponse"](**metadata)

    async def _config(self, request: Any) -> Any:
        config = model_config(self._models, request.name, request.version)
        return MESSAGES["ModelConfigResponse"](config=config)

    async def _statistics(self, request: Any) -> Any:
        statistics = await asyncio.to_thread(
            model_statistics, self._models, request.name, request.version
        )
        return MESSAGES["ModelStatisticsResponse"](model_stats=statistics)

    async def _index(self, request: Any) -> Any:
        return MESSAGES["RepositoryIndexResponse"](models=self._models.index(request.ready))

    async def _load(self, request: Any) -> Any:
        check_load(request.parameters)
        models = self._models
        model = models.named(request.model_name)
        await asyncio.wrap_future(model.aside.submit(models.load, model.name))
        return MESSAGES["RepositoryModelLoadResponse"]()

    async def _unload(self, request: Any) -> Any:
        models = self._models
        model = models.named(request.model_name)
        await asyncio.wrap_future(model.aside.submit(models.unload, model.name))
        return MESSAGES["RepositoryModelUnloadResponse"]()

    async def _infer(self, data: bytes, context: Any) -> Any:
        try:
            return await self._scored(data, context)
        except Exception as error:
            await abort_with(error, MESSAGES["ModelInferRequest"], context)

    async def _scored(self, data: bytes, context: Any) -> Any:
        """Return the answer to the bytes of a ModelInferRequest."""
        started = time.perf_counter()
        meters = self._models.meters
        call = await self._models.readers.read(len(data), partial(self._read, data))
        request = call.head
        name = request.model_name
        trail = current_trail()
        request_id = self._request_id(request.id, context, trail)
        if trail is not None:
            trail.model = name

        def decode(served: ServedVersion) -> DecodedRequest[Any]:
            bounds = served.bounds
            if len(data) > bounds.body_bytes:
                raise DataError(
                    f"the request: expected at most {bounds.body_bytes} bytes, got {len(data)}. "
                    "Send fewer candidates, or raise body_bytes of the server."
                )
            tensors = call.packed or self._tensors(call)
            candidates = served.inputs.columns(tensors, bounds)
            write = partial(_write_answer, request)
            version = request.model_version
            return DecodedRequest(candidates, write, name, version, request_id, trail)

        try:
            queue = self._models.named(name).queue(request.model_version)
            num_bytes = 0 if call.packed else len(data)  # binary numbers are not decoded
            response = await queue.submit(num_bytes, decode)
        except BaseException as error:
            meters.ended(name, "grpc", started, error)
            raise
        meters.ended(name, "grpc", started)
        return response

    def _request_id(self, named: str, context: Any, trail: Trail | None) -> str:
        """Return the name of a request in the log, and send it back; "" if nothing is logged."""
        request_ids = self._models.request_ids
        request_id = ""
        if request_ids.is_logging:
            metadata = dict(context.invocation_metadata() or ())
            request_id = request_ids.name(metadata.get(REQUEST_ID, ""), named)
        headers = request_id_header(request_id)
        if trail is not None:
            trail.request_id = request_id or trail.request_id
            headers = trail.answer_headers()
        context.set_trailing_metadata(tuple(headers.items()))
        return request_id

    def _read(self, data: bytes) -> InferCall:
        """Return a ModelInferRequest in which no values are decoded."""
        divided = divide_message(data, self._models.bounds)
        cached = self._heads.find(divided.head)
        if cached and cached.raw_sizes == divided.raw_sizes and not divided.spans:
            packed = PackedTensors(cached.tensors, divided.raw)
            return InferCall(data, divided, cached.message, packed)
        return InferCall(data, divided, MESSAGES["ModelInferRequest"].FromString(divided.head))

    def _tensors(self, call: InferCall) -> list[Tensor]:
        """Return the inputs of a request, and cache its head if they are binary numbers."""
        request = call.head
        divided = call.divided
        for output in request.outputs:
            check_tensor_parameters(f"output {output.name[:100]!r}", output.parameters)
        tensors = list(input_tensors(request, call.data, divided))
        if divided.raw_sizes and not request.id:
            described = zip(tensors, divided.raw_sizes, strict=True)
            inputs = [
                InputHead(each.name, each.datatype, each.shape, num_bytes, each.times)
                for each, num_bytes in described
            ]
            head = RequestHead(inputs)
            if head.blocks is not None:
                self._heads.add(divided.head, MessageHead(request, head, divided.raw_sizes))
        return tensors


def _write_answer(request: Any, scores: Scores) -> Any:
    """Return the answer to a ModelInferRequest."""
    names = [output.name for output in request.outputs] or None
    version = str(scores.version)
    response = MESSAGES["ModelInferResponse"](
        model_name=request.model_name, model_version=version, id=request.id
    )
    for output, values in choose_outputs(scores.outputs, names).items():
        response.outputs.add(name=output, datatype="FP32", shape=values.shape)
        response.raw_output_contents.append(np.ascontiguousarray(values, "<f4").tobytes())
    for name, value in answer_parameters(scores).items():
        if isinstance(value, str):
            response.parameters[name].string_param = value
        else:
            response.parameters[name].int64_param = value
    return response


def input_tensors(request: Any, data: bytes, divided: DividedRequest) -> Iterator[Tensor]:
    """Yield the inputs of a ModelInferRequest: raw, or typed and not decoded yet.

    Args:
        request: the head of `data`.
        data: the bytes of the message.
        divided: its values.

    Raises:
        DataError: an input has raw and typed contents, or some inputs have no raw contents.
    """
    sizes = divided.raw_sizes
    if sizes and len(sizes) != len(request.inputs):
        raise DataError(
            f"raw_input_contents: expected {len(request.inputs)}, one for each input, got "
            f"{len(sizes)}. Send all inputs raw, or none."
        )
    end = 0
    typed: list[list[ValueSpan]] = [[] for _ in request.inputs]
    for span in divided.spans:
        typed[span.input].append(span)
    for number, tensor in enumerate(request.inputs):
        if sizes and typed[number]:
            raise DataError(
                f"input {tensor.name[:100]!r}: expected raw or typed contents, got both. "
                "Send one of them."
            )
        values: Any
        if sizes:
            start = end
            end += sizes[number]
            values = divided.raw[start:end]
        else:
            values = TypedValues(tensor.name, tensor.datatype, data, typed[number])
        where = f"input {tensor.name[:100]!r}"
        check_tensor_parameters(where, tensor.parameters)
        times = None
        if "arrow_type" in tensor.parameters:
            times = times_parameter(where, tensor.parameters["arrow_type"].string_param)
        yield Tensor(tensor.name, tensor.datatype, tensor.shape, values, times)


class TypedValues(Undecoded):
    """The typed `contents` of an input, at `spans` of `data`.

    Only the field of the input's datatype may be filled.
    """

    def __init__(self, name: str, datatype: str, data: bytes, spans: Sequence[ValueSpan]) -> None:
        self.entries = sum(span.entries for span in spans)
        self._name = name
        self._datatype = datatype
        self._data = data
        self._spans = spans

    def slices(self) -> Iterable[Any]:
        message = b"".join(self._data[span.start : span.end] for span in self._spans)
        fields = MESSAGES["InferTensorContents"].FromString(message).ListFields()
        if len(fields) > 1:
            names = [field.name for field, _ in fields]
            raise DataError(
                f"input {self._name[:100]!r}: expected contents of one type, got several types: "
                f"{names}. Fill one field."
            )
        if not fields:
            yield []
            return
        field, values = fields[0]
        # an unknown datatype is rejected later
        expected = _CONTENTS.get(self._datatype, field.name)
        if field.name != expected:
            raise DataError(
                f"input {self._name[:100]!r}: expected {expected} for {self._datatype}, got "
                f"{field.name}. Fill the field of the tensor's datatype."
            )
        for start in range(0, len(values), SLICE):
            yield list(values[start : start + SLICE])


def _decode_call(message: Any, data: bytes) -> Any:
    """Return the message in `data`. Raises DataError if it is longer than `_CALL_BYTES`."""
    if len(data) > _CALL_BYTES:
        raise DataError(
            f"the request: expected a {message.DESCRIPTOR.name} of at most {_CALL_BYTES} bytes, "
            f"got {len(data)}. Send less."
        )
    return message.FromString(data)


async def start_inference(
    models: Models,
    listener: socket.socket,
    tokens: Tokens | None,
    tls: SSLContext | None,
    options: Options,
    trails: Trails,
) -> GrpcServer:
    """Start a gRPC server of the protocol.

    Args:
        models: the models to serve.
        listener: the socket to listen at.
        tokens: the tokens of which calls need one; None = no token is needed.
        tls: key and certificates; None = no TLS.
        options: with the limits of time.
        trails: follows the calls.
    """
    longest = models.limits.body_bytes or max(_INFER_BYTES, models.bounds.body_bytes)
    channel_options = {
        "grpc.max_receive_message_length": longest,
        "grpc.max_connection_idle_ms": int(options.idle_seconds * 1000),
        "grpc.max_concurrent_streams": STREAMS,
    }
    handlers = InferenceService(models).handlers()
    open_calls = ("ServerLive", "ServerReady")
    service = GrpcService(
        SERVICE,
        handlers,
        MESSAGES,
        lambda: models.ready,
        models.meters.connection_closed,
        open_calls,
        _ROLES,
        trails,
        ("ModelInfer",),
    )
    seconds = options.request_seconds
    return await start_grpc(service, listener, tokens, tls, seconds, channel_options)
