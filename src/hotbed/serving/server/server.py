# SPDX-License-Identifier: Apache-2.0
"""The server of models: REST and gRPC in one process. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import TYPE_CHECKING

from hotbed.errors import MissingExtra
from hotbed.serving.process import Stoppable, open_listener
from hotbed.serving.server.access import Trails
from hotbed.serving.server.endpoints.http import Api
from hotbed.serving.server.options import Options
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.spans import open_spans
from hotbed.serving.server.tokens import Tokens

try:
    from hotbed.serving.server.endpoints.connection import HttpServer
except ImportError as error:
    raise MissingExtra(
        f"a server needs {error.name}, which is not installed. Run pip install hotbed[serve]."
    ) from error

if TYPE_CHECKING:
    from hotbed.serving.server.endpoints.grpc_server import GrpcServer

log = logging.getLogger("hotbed.serving")
_LAST_SECONDS = 30
# a thread that loads a version delays requests by so much, not by Python's default of 5 ms
_SWITCH_SECONDS = 0.0005


class Server(Stoppable):
    """Answers requests for `models` until it is stopped.

    `run` blocks. In the main thread, SIGTERM and SIGINT end it: readiness turns false, requests are
    answered for another `drain_seconds`, then no new requests are accepted and those under way are
    finished.

    Args:
        models: the models.
        options: where to listen, and limits of time.
        listener: a socket that other processes listen at as well; they share the gRPC port, too.
        tokens: the tokens; None = those of `options`.

    Raises:
        ConfigError: it cannot listen, or a variable of OpenTelemetry is wrong.

    Example: `Server(models, Options(port=8000)).run()`
    """

    def __init__(
        self,
        models: Models,
        options: Options | None = None,
        listener: socket.socket | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        super().__init__()
        self._models = models
        self._options = options or Options()
        self._shares_ports = listener is not None
        self._tokens = tokens or self._options.tokens()
        self._tls = self._options.tls()
        self._spans = open_spans()
        self._trails = Trails(models.request_ids, models.access_log, self._spans)
        self._listener = listener or open_listener(self._options.host, self._options.port)
        self.port: int = self._listener.getsockname()[1]
        self.grpc_port: int | None = None

    def run(self) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        super().run()

    async def _serve(self, stopped: asyncio.Event) -> None:
        options = self._options
        grpc_server = await self._start_grpc()
        scheme = "http" if self._tls is None else "https"
        app = Api(self._models, self._tokens, self._trails, scheme)
        http = HttpServer(app, options.request_seconds, options.idle_seconds, self._tls)
        serving = asyncio.create_task(http.serve([self._listener]))
        log.info("listening on port %d, gRPC %s", self.port, self.grpc_port or "off")
        self.started.set()
        await stopped.wait()
        self._models.stopping = True
        http.closing = True
        log.info("draining")
        await asyncio.sleep(options.drain_seconds)
        http.should_exit = True
        if grpc_server is not None:
            await grpc_server.stop(_LAST_SECONDS)
        await serving
        await asyncio.to_thread(self._models.close)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        log.info("stopped")

    async def _start_grpc(self) -> GrpcServer | None:
        options = self._options
        if options.grpc_port is None:
            return None
        from hotbed.serving.server.endpoints.grpc import start_inference

        server = await start_inference(
            self._models,
            open_listener(options.host, options.grpc_port, shares_port=self._shares_ports),
            self._tokens,
            self._tls,
            options,
            self._trails,
        )
        self.grpc_port = server.port
        return server
