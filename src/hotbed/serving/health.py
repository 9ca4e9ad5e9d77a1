# SPDX-License-Identifier: Apache-2.0
"""Add the services of every gRPC server: grpc.health.v1, and reflection for tools like grpcurl."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

HEALTH_SERVICE = "grpc.health.v1.Health"
_WATCH_SECONDS = 0.5
_STATUS = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc has no types
    """Report whether the server is ready: the overall health, and that of each of `services`.

    The library's own servicer has to be notified of each change; this one calls `ready`.
    """

    def __init__(self, services: Sequence[str], ready: Callable[[], bool]) -> None:
        self._services = ("", *services)
        self._ready = ready
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End the watches, so that the server can stop."""
        self._closed.set()

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._services:
            reason = f"service {request.service[:100]!r}: unknown. Choose one of {self._services}."
            await context.abort(grpc.StatusCode.NOT_FOUND, reason)
        return _STATUS(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                yield _STATUS(status=status)
            last = status
            if self._closed.is_set():
                return
            try:
                await asyncio.wait_for(self._closed.wait(), _WATCH_SECONDS)
            except TimeoutError:
                continue

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(_STATUS.SERVICE_UNKNOWN)
        ready = self._ready() and not self._closed.is_set()
        return int(_STATUS.SERVING if ready else _STATUS.NOT_SERVING)


def add_health_and_reflection(
    server: Any, service: str, pool: Any, ready: Callable[[], bool]
) -> Health:
    """Add both to a gRPC server of `service`, whose messages are described in `pool`."""
    health = Health([service], ready)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for module in (health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    names = [service, HEALTH_SERVICE, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server, pool)
    return health
