# SPDX-License-Identifier: Apache-2.0
"""The parameter server as a separate process: versions and rows over gRPC.

Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, TypeAlias

import grpc
import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError, DataError, HotbedError, NotServed, PersistError, StoreError
from hotbed.files import map_file
from hotbed.persist.container.format import Reader
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.process import Stoppable, open_listener
from hotbed.serving.request_log.writer import RequestIds
from hotbed.serving.rows import ServedTable
from hotbed.serving.server.access import Trails
from hotbed.serving.server.endpoints.grpc_server import (
    STREAMS,
    GrpcService,
    UnaryHandler,
    abort_with,
    start_grpc,
    unary_handler,
)
from hotbed.serving.server.meters import CallMeters
from hotbed.serving.server.options import RowsOptions
from hotbed.serving.server.spans import open_spans
from hotbed.serving.server.tokens import INFER
from hotbed.serving.stores.base import ModelVersion
from hotbed.serving.stores.following import (
    LOAD_SECONDS,
    START_SECONDS,
    KeepsOn,
    hanging,
    open_newest,
)
from hotbed.serving.stores.messages import CALLS, MESSAGE_BYTES, MESSAGES, PART_BYTES, SERVICE
from hotbed.serving.threads import DaemonThreads

log = logging.getLogger("hotbed.serving")
_INLINE_IDS = 2048  # the most that are looked up on the loop
_REQUEST_SECONDS = 30.0  # for the message of a call to arrive
_IDLE_SECONDS = 600  # connections without a call are closed after this time
_ANSWER_BYTES = MESSAGE_BYTES // 2  # the most rows that a call returns

NamedBytes: TypeAlias = tuple[str, memoryview]
TableLookup: TypeAlias = tuple[ServedTable, NDArray[np.int64]]
StreamHandler: TypeAlias = Callable[[bytes, Any], AsyncIterator[Any]]


class RowsService:
    """The calls; each takes and returns messages of `hotbed.serving.stores.messages`.

    Args:
        server: has the versions.
        names: of the models that are served.
        most_calls: calls that are answered at the same time; health and reflection are not among
            them.
    """

    def __init__(self, server: ParameterServer, names: Sequence[str], most_calls: int) -> None:
        self._server = server
        self._most_calls = most_calls
        self._num_calls = 0
        self._names = names
        self.meters = CallMeters(self._newest)
        self.stopping = False

    def handlers(self) -> Any:
        """Return the handlers of the calls for a gRPC server."""
        handlers = {}
        for name, (request_name, answer_name, is_streamed) in CALLS.items():
            request = MESSAGES[request_name]
            write = MESSAGES[answer_name].SerializeToString
            call = getattr(self, f"_{name.lower()}")
            if is_streamed:
                stream = self._timed_stream(name, _stream_handler(call, request))
                handlers[name] = grpc.unary_stream_rpc_method_handler(stream, None, write)
            else:
                answer = self._timed(name, unary_handler(call, request, request.FromString))
                handlers[name] = grpc.unary_unary_rpc_method_handler(answer, None, write)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _timed(self, name: str, handler: UnaryHandler) -> UnaryHandler:
        async def answer(data: bytes, context: Any) -> Any:
            with self.meters.timed(name, context):
                async with self._counted(context):
                    return await handler(data, context)

        return answer

    def _timed_stream(self, name: str, handler: StreamHandler) -> StreamHandler:
        async def answer(data: bytes, context: Any) -> AsyncIterator[Any]:
            with self.meters.timed(name, context):
                async with self._counted(context):
                    async for part in handler(data, context):
                        yield part

        return answer

    @contextlib.asynccontextmanager
    async def _counted(self, context: Any) -> AsyncIterator[None]:
        """Count a call; end it at once if too many are being answered."""
        if self._num_calls >= self._most_calls:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"too many calls: {self._num_calls} are being answered, the most that this server "
                "takes. Try again later, or raise its setting calls.",
            )
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    def _newest(self) -> dict[str, ModelVersion]:
        """Return the newest version of each model that has one."""
        newest = dict[str, ModelVersion]()
        for name in self._names:
            with contextlib.suppress(ConfigError, PersistError):
                newest[name] = self._server.model(name)
        return newest

    def is_ready(self) -> bool:
        """Return whether every model has a version, and the server does not stop."""
        if self.stopping:
            return False
        try:
            for name in self._names:
                self._server.model(name)
        except (ConfigError, PersistError):
            return False
        return True

    async def _ready(self, request: Any) -> Any:
        return MESSAGES["Readiness"](ready=self.is_ready())

    async def _describe(self, request: Any) -> Any:
        name = request.model
        version = self._model(name)
        rule = self._server.held.rule(name)
        answer = MESSAGES["Description"]()
        if request.key:
            version = rule.versions.get(request.key)
            if version is None:
                raise StoreError(
                    f"model {name!r}: the rule in force names no such version, got "
                    f"{request.key[:12]!r}. Ask for the rule."
                )
        elif request.routed:
            version = self._server.model(name)
            if rule.routes is not None:
                answer.routes = json.dumps(rule.routes.to_json()).encode()
        if (version.digest, version.mended) == (request.known, request.mended):
            answer.same = True
        else:
            answer.json = json.dumps(version.to_json()).encode()
        return answer

    async def _rows(self, request: Any) -> Any:
        version = self._version(request.model, request.digest)
        if len(request.wanted) > len(version.tables):
            raise DataError(
                f"wanted: expected at most {len(version.tables)} tables, got "
                f"{len(request.wanted)}. Request each table of the model once."
            )
        lookups = list[TableLookup]()
        num_rows = 0
        num_bytes = 0
        for part in request.wanted:
            table = version.table(part.table)
            ids = _to_ids(part.ids)
            lookups.append((table, ids))
            num_rows += len(ids)
            num_bytes += 4 * table.dim * len(ids)
        if num_bytes > _ANSWER_BYTES:
            raise DataError(
                f"too many rows: expected at most {_ANSWER_BYTES} bytes, got ids for {num_bytes}. "
                "Send several calls."
            )
        self.meters.asked(request.model, num_rows)
        if num_rows <= _INLINE_IDS:
            rows = _find_rows(lookups)
        else:
            rows = await asyncio.to_thread(_find_rows, lookups)
        return MESSAGES["Rows"](rows=rows)

    def _graph(self, request: Any) -> Iterator[NamedBytes]:
        version = self._version(request.model, request.digest)
        yield "", version.blobs["graph"]
        if "ids" in version.blobs:
            yield "ids", version.blobs["ids"]

    def _weights(self, request: Any) -> Iterator[NamedBytes]:
        version = self._version(request.model, request.digest)
        yield "", version.blobs["weights"]

    def _map(self, request: Any) -> Iterator[NamedBytes]:
        version = self._version(request.model, request.digest)
        for fitted in version.schema.maps:
            if fitted.digest == request.map:
                yield "", map_file(fitted.path)
                return
        raise DataError(
            f"map: version {version.version} of {version.name!r} has no such map, got "
            f"{request.map[:64]!r}. Use a digest of its schema."
        )

    def _changes(self, request: Any) -> Iterator[NamedBytes]:
        self._model(request.model)
        changes = self._server.changes(request.model, request.since, request.to) or {}
        for table, ids in changes.items():
            yield table, _to_bytes(ids)

    def _hot(self, request: Any) -> Iterator[NamedBytes]:
        version = self._model(request.model)
        ids = version.hot(request.table, max(0, request.n))
        yield "", _to_bytes(ids)

    def _model(self, name: str) -> Any:
        if name not in self._names:
            raise NotServed(
                f"model: unknown name, got {name[:100]!r}. Use one of {sorted(self._names)}."
            )
        return self._server.held.rule(name).pinned or self._server.model(name)

    def _version(self, name: str, digest: str) -> Any:
        self._model(name)
        return self._server.version(name, digest)


def _find_rows(lookups: Sequence[TableLookup]) -> list[bytes]:
    """Return the rows of the ids of each table, as raw float32."""
    answers = []
    for table, ids in lookups:
        rows, _ = table.find(ids)
        answers.append(np.ascontiguousarray(rows, "<f4").tobytes())
    return answers


def _to_ids(data: bytes) -> NDArray[np.int64]:
    if len(data) % 8:
        raise DataError(f"ids: expected 8 bytes for each id, got {len(data)} bytes. Send int64.")
    return np.frombuffer(data, "<i8")


def _to_bytes(ids: NDArray[np.int64]) -> memoryview:
    return memoryview(ids.astype("<i8").tobytes())


def _stream_handler(call: Callable[[Any], Iterator[NamedBytes]], message: Any) -> StreamHandler:
    """Return a handler that sends a long answer in parts; `call` runs on a thread."""

    async def answer(data: bytes, context: Any) -> AsyncIterator[Any]:
        try:
            request = message.FromString(data)
            answers = await asyncio.to_thread(list, call(request))
            for name, whole in answers:
                for start in range(0, max(1, len(whole)), PART_BYTES):  # also of an empty answer
                    part = bytes(whole[start : start + PART_BYTES])
                    yield MESSAGES["Part"](name=name, data=part)
        except Exception as error:
            await abort_with(error, message, context)

    return answer


class RowsServer(Stoppable):
    """A parameter server that listens.

    `run` blocks. In the main thread, SIGTERM and SIGINT end it, once calls under way have ended.
    Raises ConfigError if it cannot listen.
    """

    def __init__(self, server: ParameterServer, names: Sequence[str], options: RowsOptions) -> None:
        super().__init__()
        self._server = server
        self._service = RowsService(server, names, options.calls)
        self._options = options
        self._tokens = options.tokens()
        self._tls = options.tls()
        self.port = 0
        self.metrics_port: int | None = None

    def load(self, name: str, source: str | Reader) -> None:
        """Load the newest version under `source` as model `name`; see `ParameterServer.load`."""
        version = self._server.load(name, source)
        self._service.meters.since[name] = time.time()
        self._service.meters.damaged[name] = False
        log.info("model %s has version %d (%s)", name, version.version, version.digest[:12])

    def load_from(self, name: str, source: str, *, is_followed: bool) -> None:
        """Load the newest version under `source`, which must be of the model if it is followed."""
        self.load(name, open_newest(source) if is_followed else source)

    def load_or_keep(
        self,
        name: str,
        source: str,
        *,
        is_followed: bool = False,
        start_seconds: float = START_SECONDS,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        """Load a model; if it cannot be loaded, keep the version that the folder of rows holds.

        If the folder holds none, or a damaged one, a source that is followed may be empty, and a
        read that hangs may end later; other errors are raised.

        Args:
            name: name of the model.
            source: where it lies.
            is_followed: whether `source` is followed.
            start_seconds: for the source to be read while a version is kept.
            load_seconds: and while none is.
        """
        seconds = load_seconds if self._server.find(name) is None else start_seconds
        loading = DaemonThreads(1, "hotbed-read").submit(
            partial(self.load_from, name, source, is_followed=is_followed)
        )
        wait([loading], seconds)
        try:
            if not loading.done():
                raise hanging(f"model {name!r}", seconds)
            loading.result()
        except (HotbedError, OSError) as error:
            if self._server.damaged(name):
                self._server.unload(name)
            version = self._server.find(name)
            if version is None and not isinstance(error, NotServed) and loading.done():
                raise
            stays = "it is not served" if version is None else f"version {version.version} stays"
            log.warning("model %s: %s; %s", name, error, stays)

    def check(self, name: str, keeps_on: KeepsOn) -> bool:
        """Read the kept files of a model; return whether it has to be loaded anew."""
        damaged = self._server.check(name, keeps_on)
        is_rule_damaged = bool(self._server.held.damaged(name))
        self._service.meters.damaged[name] = bool(damaged) or is_rule_damaged
        if damaged:
            log.error("model %s: damaged files: %s", name, ", ".join(sorted(damaged)))
        return bool(damaged)

    def run(self) -> None:
        meters = self._service.meters
        with meters.listening(self._options.host, self._options.metrics_port) as metrics_port:
            self.metrics_port = metrics_port
            super().run()

    async def _serve(self, stopped: asyncio.Event) -> None:
        options = self._options
        channel_options = {
            "grpc.max_receive_message_length": MESSAGE_BYTES,
            "grpc.max_send_message_length": MESSAGE_BYTES,
            "grpc.max_connection_idle_ms": _IDLE_SECONDS * 1000,
            "grpc.max_concurrent_streams": STREAMS,
        }
        service = self._service
        spans = open_spans()
        server = await start_grpc(
            GrpcService(
                SERVICE,
                service.handlers(),
                MESSAGES,
                service.is_ready,
                service.meters.connection_closed,
                ("Ready",),
                dict.fromkeys(CALLS, INFER),
                Trails(RequestIds(is_logging=False), spans=spans),
            ),
            open_listener(options.host, options.port),
            self._tokens,
            self._tls,
            _REQUEST_SECONDS,
            channel_options,
        )
        self.port = server.port
        log.info("parameter server on port %d, metrics %s", self.port, self.metrics_port or "off")
        self.started.set()
        await stopped.wait()
        self._service.stopping = True
        log.info("draining")
        await server.stop(options.drain_seconds)
        if spans is not None:
            await asyncio.to_thread(spans.close)
        log.info("stopped")
