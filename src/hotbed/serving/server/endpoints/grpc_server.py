# SPDX-License-Identifier: Apache-2.0
"""A gRPC server of any service: who may call, limits of time, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from hotbed.errors import HotbedError, NotServed, Overloaded, PersistError, ServingError
from hotbed.serving.health import HEALTH_SERVICE, Health, add_health_and_reflection
from hotbed.serving.protocol.offered import REQUEST_ID
from hotbed.serving.server.access import RequestName, Trail, Trails
from hotbed.serving.server.endpoints.relay import FILES, Relay
from hotbed.serving.server.tokens import (
    ANY_ROLE,
    FORWARDED,
    OPERATE,
    Caller,
    Denied,
    Tokens,
    denied,
    is_open,
)

log = logging.getLogger("hotbed.serving")
UnaryHandler: TypeAlias = Callable[[bytes, Any], Awaitable[Any]]
_OPEN = (f"/{HEALTH_SERVICE}/Check", f"/{HEALTH_SERVICE}/Watch")  # calls that need no token
_LAST_PART_SECONDS = 1.0  # at the end, for messages to arrive and answers to be sent
STREAMS = 256  # calls of one connection at the same time
_MOST_CONNECTIONS = 1 << 20  # where the system does not limit open files


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


class Gate(grpc.aio.ServerInterceptor):
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


class ArrivalLimit(grpc.aio.ServerInterceptor):
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


_trail = ContextVar[Trail | None]("hotbed_trail", default=None)


def current_trail() -> Trail | None:
    """Return what is followed of the call that this task answers; None = nothing."""
    return _trail.get()


class CallTrails(grpc.aio.ServerInterceptor):
    """Follows calls from their begin to their end, also those that the other interceptors reject.

    Args:
        trails: follows them.
        predictions: full names of the methods that ask for predictions.
    """

    def __init__(self, trails: Trails, predictions: Collection[str]) -> None:
        self._trails = trails
        self._predictions = predictions

    async def intercept_service(self, proceed: Any, details: Any) -> Any:
        handler = await proceed(details)
        headers = dict(details.invocation_metadata or ())
        if handler is None or not self._trails.needs(headers):
            return handler
        name = details.method.lstrip("/")
        call = RequestName("grpc", name, name in self._predictions, name)
        codecs = handler.request_deserializer, handler.response_serializer
        if handler.stream_unary:
            follow = self._answer(handler.stream_unary, call, headers)
            return grpc.stream_unary_rpc_method_handler(follow, *codecs)
        stream = self._stream(handler.stream_stream, call, headers)
        return grpc.stream_stream_rpc_method_handler(stream, *codecs)

    def _answer(self, answer: Any, call: RequestName, headers: Mapping[str, str]) -> Any:
        async def follow(requests: Any, context: Any) -> Any:
            with self._followed(call, headers, context):
                return await answer(requests, context)

        return follow

    def _stream(self, answer: Any, call: RequestName, headers: Mapping[str, str]) -> Any:
        async def follow(requests: Any, context: Any) -> Any:
            with self._followed(call, headers, context):
                async for part in answer(requests, context):
                    yield part

        return follow

    @contextlib.contextmanager
    def _followed(
        self, call: RequestName, headers: Mapping[str, str], context: Any
    ) -> Iterator[None]:
        attributes = {"rpc.system.name": "grpc", "rpc.method": call.name}
        request_id = headers.get(REQUEST_ID, "")
        trail = self._trails.begin(call, headers, request_id, attributes)
        _trail.set(trail)
        status = "OK"
        try:
            yield
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        except BaseException:
            status = "UNKNOWN" if context.code() is None else context.code().name
            raise
        finally:
            trail.ended(status, context.details() or "")


class UnknownMethods(grpc.GenericRpcHandler):
    """Rejects calls of methods that no other handler has, and names them."""

    def service(self, details: Any) -> Any:
        return _refusing(
            grpc.StatusCode.UNIMPLEMENTED,
            f"method {details.method[:200]!r}: the server has no such method. "
            "Ask its reflection for those it has.",
        )


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
        trails: follows the calls.
        predictions: names of the calls that ask for predictions.
    """

    name: str
    handlers: Any
    messages: Mapping[str, Any]
    ready: Callable[[], bool]
    connection_closed: Callable[[], None]
    open_calls: Sequence[str]
    roles: Mapping[str, str]
    trails: Trails
    predictions: Sequence[str] = ()


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
    predictions = {f"{service.name}/{call}" for call in service.predictions}
    calls = CallTrails(service.trails, predictions)
    gates = [calls, Gate(tokens, open_methods, roles, relay.host_of), arrivals]
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
