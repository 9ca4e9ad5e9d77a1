# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol over gRPC. Needs the extra `serve`.

`inference.proto` describes the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from ssl import SSLContext
from typing import Any, NamedTuple, TypeAlias

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from hotbed.errors import DataError, HotbedError, NotServed, Overloaded, PersistError, ServingError
from hotbed.serving.health import HEALTH_SERVICE, Health, add_health_and_reflection
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
    server_metadata,
    times_parameter,
)
from hotbed.serving.protocol.tensors import Tensor
from hotbed.serving.server.endpoints.relay import FILES, Relay
from hotbed.serving.server.endpoints.triton import model_config, model_statistics
from hotbed.serving.server.scoring.batching import DecodedRequest, ServedVersion
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.tokens import (
    ANY_ROLE,
    FORWARDED,
    INFER,
    OPERATE,
    SCRAPE,
    Caller,
    Denied,
    Tokens,
    denied,
    is_open,
)
from hotbed.serving.session import Scores
from hotbed.serving.stores.messages import load_service

log = logging.getLogger("hotbed.serving")
UnaryHandler: TypeAlias = Callable[[bytes, Any], Awaitable[Any]]
_OPEN = (f"/{HEALTH_SERVICE}/Check", f"/{HEALTH_SERVICE}/Watch")  # calls that need no token
_LAST_PART_SECONDS = 1.0  # at the end, for messages to arrive and answers to be sent
STREAMS = 256  # calls of one connection at the same time
_MOST_CONNECTIONS = 1 << 20  # where the system does not limit open files
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


def grpc_status(error: Exception) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    codes = grpc.StatusCode
    for kind, code in (
        (NotServed, codes.NOT_FOUND),
        (Overloaded, codes.RESOURCE_EXHAUSTED),
        (ServingError, codes.UNAVAILABLE),
        (PersistError, codes.FAILED_PRECONDITION),
        (HotbedError, codes.INVALID_ARGUMENT),
    ):
        if isinstance(error, kind):
            return code
    return codes.INTERNAL


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
            ready = self._models.named(request.name, request.version).ready
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
        request_id = self._request_id(request.id, context)

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
            return DecodedRequest(candidates, write, name, request.model_version, request_id)

        try:
            model = self._models.named(name, request.model_version)
            num_bytes = 0 if call.packed else len(data)  # binary numbers are not decoded
            response = await model.batcher.submit(num_bytes, decode)
        except BaseException as error:
            meters.ended(name, "grpc", started, error)
            raise
        meters.ended(name, "grpc", started)
        return response

    def _request_id(self, named: str, context: Any) -> str:
        """Return the name of a request in the log, and send it back; "" if nothing is logged."""
        if self._models.request_ids is None:
            return ""
        metadata = dict(context.invocation_metadata() or ())
        request_id = self._models.request_id(metadata.get(REQUEST_ID, ""), named)
        context.set_trailing_metadata(((REQUEST_ID, request_id),))
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
    for name, count in answer_parameters(scores).items():
        response.parameters[name].int64_param = count
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


def unary_handler(
    call: Callable[[Any], Awaitable[Any]], message: Any, decode: Callable[[bytes], Any]
) -> UnaryHandler:
    """Return a handler that decodes a request and awaits `call`.

    Errors end the call with a status and their reason.
    """

    async def answer(data: bytes, context: Any) -> Any:
        try:
            return await call(decode(data))
        except Exception as error:
            await abort_with(error, message, context)

    return answer


async def abort_with(error: Exception, message: Any, context: Any) -> None:
    """End a call whose request is a `message`, with the status and the reason of `error`."""
    if isinstance(error, HotbedError):
        await context.abort(grpc_status(error), str(error))
    if isinstance(error, DecodeError):
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request is not a {message.DESCRIPTOR.name}: {error}",
        )
    log.error("a request failed", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "an error of the server; its log has more")


def _refusing(code: grpc.StatusCode, reason: str) -> Any:
    """Return a handler of any call that ends it before its message is received."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(code, reason)

    return grpc.stream_unary_rpc_method_handler(refuse)


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Rejects calls that their caller may not make, before their message is received.

    Args:
        tokens: the valid ones; None = no token is needed.
        open_methods: full names of the methods that need none, such as
            "/inference.GRPCInferenceService/ServerLive".
        roles: the role that a method needs, by full name; any token may call other methods.
        host_of: returns the address of a client, from what gRPC takes for it.
    """

    def __init__(
        self,
        tokens: Tokens | None,
        open_methods: Iterable[str],
        roles: Mapping[str, str],
        host_of: Callable[[str], str],
    ) -> None:
        self._tokens = tokens
        self._open_methods = frozenset(open_methods)
        self._roles = roles
        self._host_of = host_of

    async def intercept_service(self, proceed: Any, details: Any) -> Any:
        role = self._roles.get(details.method, ANY_ROLE)
        handler = await proceed(details)
        if details.method in self._open_methods or is_open(self._tokens, role):
            return handler
        # the first one of a name counts
        headers = dict(reversed(details.invocation_metadata or ()))
        is_forwarded = any(name in headers for name in FORWARDED)
        token = headers.get("authorization")
        caller = Caller(token, "", headers.get("origin", ""), is_forwarded=is_forwarded)
        if role != OPERATE:
            reason = denied(self._tokens, role, caller)
            return handler if reason is None else _refusing(*_status_of(reason))
        return self._operating(handler, caller)

    def _operating(self, handler: Any, caller: Caller) -> Any:
        """Return a handler that looks at the address of its caller first."""

        async def answer(requests: Any, context: Any) -> Any:
            peer = self._host_of(context.peer())
            reason = denied(self._tokens, OPERATE, caller._replace(peer=peer))
            if reason is not None:
                await context.abort(*_status_of(reason))
            return await handler.stream_unary(requests, context)

        return grpc.stream_unary_rpc_method_handler(
            answer, handler.request_deserializer, handler.response_serializer
        )


def _status_of(reason: Denied) -> tuple[grpc.StatusCode, str]:
    codes = grpc.StatusCode
    return codes.PERMISSION_DENIED if reason.is_known else codes.UNAUTHENTICATED, reason.reason


class ArrivalLimit(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Ends calls whose messages do not arrive in time.

    gRPC calls a handler of one message when that has arrived, and waits for it without a limit.
    Each such handler becomes one of a stream here, which reads its message itself.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waits = set[asyncio.Timeout]()  # for messages
        self._num_answered = 0  # calls that are being answered
        self._idle = asyncio.Event()
        self._idle.set()
        self._limited: dict[Any, Any] = {}  # by handler of the server, of which there are a few

    async def close(self) -> None:
        """End the calls whose messages do not arrive now; return when all others are answered."""
        self._seconds = min(self._seconds, _LAST_PART_SECONDS)
        deadline = asyncio.get_running_loop().time() + self._seconds
        for waiting in self._waits:
            waiting.reschedule(deadline)
        if self._waits:
            await asyncio.sleep(self._seconds)
        await self._idle.wait()

    async def intercept_service(self, proceed: Any, details: Any) -> Any:
        handler = await proceed(details)
        if handler is None or handler.stream_unary:  # those only reject calls
            return handler
        limited = self._limited.get(handler)
        if limited is None:
            limited = self._limited[handler] = self._limit(handler)
        return limited

    def _limit(self, handler: Any) -> Any:
        codecs = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(self._answer(handler.unary_unary), *codecs)
        stream = self._stream(handler.unary_stream) if handler.unary_stream else None
        stream = stream or self._converse(handler.stream_stream)
        return grpc.stream_stream_rpc_method_handler(stream, *codecs)

    def _answer(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answer(_: Any, context: Any) -> Any:
            message = await self._read_one(context)
            with self._answering():
                return await call(message, context)

        return answer

    def _stream(self, call: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def answer(_: Any, context: Any) -> AsyncIterator[Any]:
            message = await self._read_one(context)
            with self._answering():
                async for part in call(message, context):
                    yield part

        return answer

    def _converse(
        self, call: Callable[..., AsyncIterator[Any]]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def answer(_: Any, context: Any) -> AsyncIterator[Any]:
            async for part in call(self._messages(context), context):
                yield part

        return answer

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Count a call whose message is here."""
        self._num_answered += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_answered -= 1
            if not self._num_answered:
                self._idle.set()

    async def _messages(self, context: Any) -> AsyncIterator[Any]:
        while (message := await self._read(context)) is not grpc.aio.EOF:
            yield message

    async def _read_one(self, context: Any) -> Any:
        message = await self._read(context)
        if message is grpc.aio.EOF:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the call: expected a message, got none. Send it."
            )
        return message

    async def _read(self, context: Any) -> Any:
        """Return the next message of a call, or end the call."""
        seconds = self._seconds
        waiting = asyncio.timeout(seconds)
        try:
            async with waiting:
                self._waits.add(waiting)
                return await context.read()
        except TimeoutError:
            pass
        finally:
            self._waits.discard(waiting)
        if self._seconds < seconds:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")
        await context.abort(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the call: no message arrived within {seconds} s. Send it at once.",
        )


class UnknownMethods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Rejects calls of methods that no other handler has, and names them."""

    def service(self, details: Any) -> Any:
        return _refusing(
            grpc.StatusCode.UNIMPLEMENTED,
            f"method {details.method[:200]!r}: the server has no such method. "
            "Ask its reflection for those it has.",
        )


async def start_inference(
    models: Models,
    listener: socket.socket,
    tokens: Tokens | None,
    tls: SSLContext | None,
    request_seconds: float,
    idle_seconds: float,
) -> GrpcServer:
    """Start a gRPC server of the protocol.

    Args:
        models: the models to serve.
        listener: the socket to listen at.
        tokens: the tokens of which calls need one; None = no token is needed.
        tls: key and certificates; None = no TLS.
        request_seconds: limit for the message of a call to arrive.
        idle_seconds: connections without a call are closed after this time.
    """
    longest = models.limits.body_bytes or max(_INFER_BYTES, models.bounds.body_bytes)
    options = {
        "grpc.max_receive_message_length": longest,
        "grpc.max_connection_idle_ms": int(idle_seconds * 1000),
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
    )
    return await start_grpc(service, listener, tokens, tls, request_seconds, options)


@dataclass(frozen=True)
class GrpcService:
    """A service of a gRPC server.

    Attributes:
        name: its full name.
        handlers: of its calls.
        messages: by name.
        ready: whether it answers requests.
        connection_closed: called for each connection that is closed because of its frames.
        open_calls: names of the calls that need no token.
        roles: the role that a call needs, by name; any token may make other calls.
    """

    name: str
    handlers: Any
    messages: Mapping[str, Any]
    ready: Callable[[], bool]
    connection_closed: Callable[[], None]
    open_calls: Sequence[str]
    roles: Mapping[str, str]


class GrpcServer:
    """A gRPC server at `port` with its service, grpc.health.v1 and reflection."""

    def __init__(
        self, server: Any, port: int, relay: Relay, health: Health, arrivals: ArrivalLimit
    ) -> None:
        self.port = port
        self._server = server
        self._relay = relay
        self._health = health
        self._arrivals = arrivals

    async def stop(self, seconds: float) -> None:
        """Reject new calls, and wait at most `seconds` for those under way.

        Calls whose message does not arrive are not waited for, nor connections without a call.
        """
        self._relay.stop()
        self._health.close()
        stopping = asyncio.create_task(self._server.stop(seconds))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrivals.close(), seconds)
        await self._server.stop(_LAST_PART_SECONDS)  # for the last answers to be sent
        await stopping
        self._relay.close()


async def start_grpc(
    service: GrpcService,
    listener: socket.socket,
    tokens: Tokens | None,
    tls: SSLContext | None,
    request_seconds: float,
    options: Mapping[str, int],
) -> GrpcServer:
    """Start a gRPC server of any service.

    Args:
        service: the service.
        listener: the socket to listen at.
        tokens: the tokens of which calls need one; None = no token is needed.
        tls: key and certificates; None = no TLS.
        request_seconds: limit for a connection to begin, and for the message of a call to arrive.
        options: options of the gRPC channel.
    """
    open_methods = [*_OPEN, *(f"/{service.name}/{call}" for call in service.open_calls)]
    roles = {f"/{service.name}/{call}": role for call, role in service.roles.items()}
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most_connections = min(most_files // 2 // FILES, _MOST_CONNECTIONS)
    relay = Relay(most_connections, request_seconds, service.connection_closed)
    arrivals = ArrivalLimit(request_seconds)
    gates = [Gate(tokens, open_methods, roles, relay.host_of), arrivals]
    all_options = {**options, "grpc.server_handshake_timeout_ms": math.ceil(request_seconds * 1000)}
    server = grpc.aio.server(interceptors=gates, options=list(all_options.items()))
    server.add_generic_rpc_handlers((service.handlers,))
    pool = next(iter(service.messages.values())).DESCRIPTOR.file.pool
    health = add_health_and_reflection(server, service.name, pool, service.ready)
    server.add_generic_rpc_handlers((UnknownMethods(),))  # the last one
    server.add_insecure_port(relay.address)
    await server.start()
    await relay.listen(listener, tls)
    return GrpcServer(server, listener.getsockname()[1], relay, health, arrivals)
