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
_POLL_SECONDS = 0.5
_WATCHES = 1024  # at the same time
_WATCH_SECONDS = 600.0  # after which a watch ends; its client asks again
_STATUS = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Report whether the server is ready: the overall health, and that of each of `services`.

    The library's own servicer has to be notified of each change; this one calls `ready`. Watches
    need no token, so that they must cost next to nothing: one task looks at the readiness for all
    of them, beyond `most_watches` the oldest one ends, and each ends after `watch_seconds`.
    """

    def __init__(
        self,
        services: Sequence[str],
        ready: Callable[[], bool],
        most_watches: int = _WATCHES,
        watch_seconds: float = _WATCH_SECONDS,
    ) -> None:
        self._services = ("", *services)
        self._ready = ready
        self._most_watches = most_watches
        self._watch_seconds = watch_seconds
        self._is_closed = False
        self._was_ready = False  # when it was last asked
        self._watches: dict[_Watch, None] = {}  # the oldest first
        self._poller: asyncio.Task[None] | None = None

    def close(self) -> None:
        """End the watches, so that the server can stop."""
        self._is_closed = True
        self._wake_all()

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._services:
            reason = f"service {request.service[:100]!r}: unknown. Choose one of {self._services}."
            await context.abort(grpc.StatusCode.NOT_FOUND, reason)
        return _STATUS(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        watch = self._begin_watch()
        last = None
        try:
            while not watch.is_over:
                status = self._status(request.service)
                if status != last:
                    last = status
                    yield _STATUS(status=status)
                elif self._is_closed:
                    return
                else:
                    await watch.woken.wait()
                    watch.woken.clear()
        finally:
            watch.timer.cancel()
            self._watches.pop(watch, None)
        reason = "the watch is over, because of its age or of newer ones. Watch again."
        await context.abort(grpc.StatusCode.UNAVAILABLE, reason)

    def _begin_watch(self) -> _Watch:
        """Return a new watch; end the oldest one if there are too many."""
        loop = asyncio.get_running_loop()
        watch = _Watch()
        watch.timer = loop.call_later(self._watch_seconds, watch.end)
        self._watches[watch] = None
        if len(self._watches) > self._most_watches:
            oldest = next(iter(self._watches))
            del self._watches[oldest]
            oldest.end()
        if self._poller is None or self._poller.done():
            self._poller = loop.create_task(self._poll())
        return watch

    async def _poll(self) -> None:
        """Ask again and again whether the server is ready, as long as there are watches."""
        while self._watches:
            await asyncio.sleep(_POLL_SECONDS)
            self._is_ready()

    def _is_ready(self) -> bool:
        """Return whether the server is ready; wake the watches when this has changed.

        Each call wakes them: a change that only one watch has seen would be missed if it is undone
        before the next poll.
        """
        ready = self._ready()
        if ready != self._was_ready:
            self._was_ready = ready
            self._wake_all()
        return ready

    def _wake_all(self) -> None:
        for watch in list(self._watches):
            watch.woken.set()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(_STATUS.SERVICE_UNKNOWN)
        ready = self._is_ready() and not self._is_closed
        return int(_STATUS.SERVING if ready else _STATUS.NOT_SERVING)


class _Watch:
    """A client that watches the readiness.

    Attributes:
        woken: set when the client has to look at the readiness, or when its watch is over.
        is_over: whether its watch ends.
        timer: ends it when it is old.
    """

    timer: asyncio.TimerHandle

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.woken.set()


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
