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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from hotbed import checks, config
from hotbed.errors import ConfigError, DataError, NotServed, NotWritten, PersistError
from hotbed.persist.format import Reader
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.process import (
    DAY,
    LAST_PORT,
    JsonLines,
    Stoppable,
    Tokens,
    address,
    followed_of,
    models_of,
    tls,
)
from hotbed.serving.rows import RowDtype
from hotbed.serving.server.grpc import Listening, listen, refuse, told
from hotbed.serving.server.meters import CallMeters
from hotbed.serving.stores.base import ModelVersion
from hotbed.serving.stores.following import Following, collecting, open_follower
from hotbed.serving.stores.messages import CALLS, MESSAGE_BYTES, MESSAGES, PART_BYTES, SERVICE

log = logging.getLogger("hotbed.serving")
_INLINE_IDS = 2048  # the most that are looked up on the loop
_LAST_SECONDS = 30


@dataclass(frozen=True)
class RowsOptions:
    """Where a parameter server listens, its rows and its load.

    Args:
        host: Address to listen at.
        port: Port of gRPC; 0 = a free port.
        token_file: File with one token a line; calls without one of them are rejected.
        tls_cert: PEM file of the certificate.
        tls_key: PEM file of its key.
        rows: Folder of mapped rows; None = a temporary folder.
        dtype: float32, float16 or int8 rows.
        calls: Calls that are answered at the same time; further calls are rejected at once.
        drain_seconds: How long calls under way may take to end after SIGTERM.
        metrics_port: Port for Prometheus, without TLS or token; 0 = a free port; None = no metrics.
    """

    host: str = "127.0.0.1"
    port: int = 8002
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    rows: str | None = None
    dtype: RowDtype = "float32"
    calls: int = 256
    drain_seconds: float = 10.0
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        checks.between("RowsOptions.port", self.port, 0, LAST_PORT)
        checks.at_least("RowsOptions.calls", self.calls, 1)
        checks.between("RowsOptions.drain_seconds", self.drain_seconds, 0, DAY)
        checks.between("RowsOptions.metrics_port", self.metrics_port, 0, LAST_PORT)


class Service:
    """The calls; each takes and returns messages of `hotbed.serving.stores.messages`."""

    def __init__(self, server: ParameterServer, names: Sequence[str]) -> None:
        self._server = server
        self._names = names
        self.meters = CallMeters(self._newest)
        self.stopping = False

    def handlers(self) -> Any:
        """Return the handlers of the calls for a gRPC server."""
        handlers = {}
        for name, (request, answer, streamed) in CALLS.items():
            call = getattr(self, f"_{name.lower()}")
            write = MESSAGES[answer].SerializeToString
            if streamed:
                parts = self._timed_parts(name, _parts(call, MESSAGES[request]))
                handlers[name] = grpc.unary_stream_rpc_method_handler(parts, None, write)
            else:
                whole = self._timed(
                    name, told(call, MESSAGES[request], MESSAGES[request].FromString)
                )
                handlers[name] = grpc.unary_unary_rpc_method_handler(whole, None, write)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _timed(
        self, name: str, call: Callable[[bytes, Any], Awaitable[Any]]
    ) -> Callable[[bytes, Any], Awaitable[Any]]:
        async def answer(data: bytes, context: Any) -> Any:
            with self.meters.timed(name, context):
                return await call(data, context)

        return answer

    def _timed_parts(
        self, name: str, call: Callable[[bytes, Any], AsyncIterator[Any]]
    ) -> Callable[[bytes, Any], AsyncIterator[Any]]:
        async def answer(data: bytes, context: Any) -> AsyncIterator[Any]:
            with self.meters.timed(name, context):
                async for part in call(data, context):
                    yield part

        return answer

    def _newest(self) -> dict[str, ModelVersion]:
        """Return the newest version of each model that has one."""
        newest = dict[str, ModelVersion]()
        for name in self._names:
            with contextlib.suppress(ConfigError, PersistError):
                newest[name] = self._server.model(name)
        return newest

    def is_ready(self) -> bool:
        """Return whether every model has a version, and the server does not stop."""
        try:
            return not self.stopping and all(self._server.model(name) for name in self._names)
        except (ConfigError, PersistError):
            return False

    async def _ready(self, request: Any) -> Any:
        return MESSAGES["Readiness"](ready=self.is_ready())

    async def _describe(self, request: Any) -> Any:
        newest = self._model(request.model)
        if newest.digest == request.known:
            return MESSAGES["Description"](same=True)
        return MESSAGES["Description"](json=json.dumps(newest.to_json()).encode())

    async def _rows(self, request: Any) -> Any:
        version = self._version(request.model, request.digest)
        if len(request.wanted) > len(version.tables):
            raise DataError(
                f"wanted: expected at most {len(version.tables)} tables, got "
                f"{len(request.wanted)}. Request each table of the model once."
            )
        wanted = [(version.table(part.table), _ids(part.ids)) for part in request.wanted]
        size = sum(4 * table.dim * len(ids) for table, ids in wanted)
        if size > MESSAGE_BYTES // 2:
            raise DataError(
                f"too many rows: expected at most {MESSAGE_BYTES // 2} bytes, got ids for {size}. "
                "Send several calls."
            )

        num_rows = sum(len(ids) for _, ids in wanted)
        self.meters.asked(request.model, num_rows)

        def find() -> list[bytes]:
            return [
                np.ascontiguousarray(table.find(ids)[0], "<f4").tobytes() for table, ids in wanted
            ]

        if num_rows <= _INLINE_IDS:
            rows = find()
        else:
            rows = await asyncio.to_thread(find)
        return MESSAGES["Rows"](rows=rows)

    def _graph(self, request: Any) -> Iterator[tuple[str, memoryview]]:
        yield "", self._version(request.model, request.digest).blobs["graph"]

    def _weights(self, request: Any) -> Iterator[tuple[str, memoryview]]:
        yield "", self._version(request.model, request.digest).blobs["weights"]

    def _changes(self, request: Any) -> Iterator[tuple[str, memoryview]]:
        self._model(request.model)
        changes = self._server.changes(request.model, request.since, request.to) or {}
        for table, ids in changes.items():
            yield table, _bytes(ids)

    def _hot(self, request: Any) -> Iterator[tuple[str, memoryview]]:
        yield "", _bytes(self._model(request.model).hot(request.table, max(0, request.n)))

    def _model(self, name: str) -> Any:
        if name not in self._names:
            raise NotServed(
                f"model: unknown name, got {name[:100]!r}. Use one of {sorted(self._names)}."
            )
        return self._server.model(name)

    def _version(self, name: str, digest: str) -> Any:
        self._model(name)
        return self._server.version(name, digest)


def _ids(data: bytes) -> NDArray[np.int64]:
    if len(data) % 8:
        raise DataError(f"ids: expected 8 bytes for each id, got {len(data)} bytes. Send int64.")
    return np.frombuffer(data, "<i8")


def _bytes(ids: NDArray[np.int64]) -> memoryview:
    return memoryview(ids.astype("<i8").tobytes())


def _parts(
    call: Callable[[Any], Iterator[tuple[str, memoryview]]], message: Any
) -> Callable[[bytes, Any], AsyncIterator[Any]]:
    """Return a handler as `told` does, for a long answer: in parts, read on a thread."""

    async def answer(data: bytes, context: Any) -> AsyncIterator[Any]:
        try:
            answers = await asyncio.to_thread(lambda: list(call(message.FromString(data))))
            for name, whole in answers:
                for start in range(0, max(1, len(whole)), PART_BYTES):  # also of an empty answer
                    part = bytes(whole[start : start + PART_BYTES])
                    yield MESSAGES["Part"](name=name, data=part)
        except Exception as error:
            await refuse(error, message, context)

    return answer


class RowsServer(Stoppable):
    """A parameter server that listens.

    `run` blocks. In the main thread, SIGTERM and SIGINT end it, once calls under way have ended.
    Raises ConfigError if it cannot listen.
    """

    def __init__(self, server: ParameterServer, names: Sequence[str], options: RowsOptions) -> None:
        super().__init__()
        self._server = server
        self._service = Service(server, names)
        self._options = options
        self._admit = None if options.token_file is None else Tokens(options.token_file).admit
        self._tls = tls(options.tls_cert, options.tls_key)[0]
        self.port = 0
        self.metrics_port: int | None = None

    def load(self, name: str, source: str | Reader) -> None:
        """Load the newest version under `source` as model `name`; see `ParameterServer.load`."""
        version = self._server.load(name, source)
        self._service.meters.since[name] = time.time()
        log.info("model %s has version %d (%s)", name, version.version, version.digest[:12])

    def start(self, name: str, source: str) -> None:
        """Load a model; if its rows cannot be written, keep the version that the folder holds."""
        try:
            self.load(name, source)
        except NotWritten as error:
            version = self._server.find(name)
            if version is None:
                raise
            log.warning("model %s: %s; version %d stays", name, error, version.version)

    def run(self) -> None:
        with self._service.meters.listening(
            self._options.host, self._options.metrics_port
        ) as self.metrics_port:
            super().run()

    async def _serve(self, stopped: asyncio.Event) -> None:
        place = address(self._options.host, self._options.port)
        options = {
            "grpc.max_receive_message_length": MESSAGE_BYTES,
            "grpc.max_send_message_length": MESSAGE_BYTES,
            "grpc.so_reuseport": 0,
        }
        listening = Listening(SERVICE, self._service.handlers(), MESSAGES, self._service.is_ready)
        server = await listen(
            listening, place, self._admit, self._tls, options, self._options.calls
        )
        self.port = server.port
        log.info("parameter server on port %d, metrics %s", self.port, self.metrics_port or "off")
        self.started.set()
        await stopped.wait()
        self._service.stopping = True
        log.info("draining")
        await server.stop(self._options.drain_seconds)
        log.info("stopped")


def serve_rows(sources: Sequence[str], watch: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Serve the rows of exported models until SIGTERM; the command `hotbed parameter-server`.

    Args:
        sources: The models, each `[NAME=]PATH`.
        watch: What models follow, each `[NAME=]SOURCE`.
        settings: Keys of `RowsOptions`.

    Raises:
        ConfigError: A source or a setting is wrong.
    """
    options = config.build(dict(settings), RowsOptions, "parameter-server")
    logging.basicConfig(level=logging.INFO, handlers=[JsonLines()])
    server = ParameterServer(options.rows, options.dtype)
    models = models_of(sources)
    followed = followed_of(watch, models)

    running = RowsServer(server, list(models), options)
    for name, source in models.items():
        running.start(name, source)
    following = Following(
        lambda name, error: log.warning("model %s: %s; what it has stays", name, error)
    )
    with collecting(source for _, source in followed) as cache:
        for number, (name, source) in enumerate(followed):
            following.follow(
                name,
                partial(open_follower, source, cache / str(number)),
                partial(running.load, name),
            )
        running.run()
        following.close()
