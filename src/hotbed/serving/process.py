# SPDX-License-Identifier: Apache-2.0
"""The event loop and the listeners of a server process."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from abc import ABC, abstractmethod

from hotbed.errors import ConfigError

_BACKLOG = 2048


class Stoppable(ABC):
    """Run a server on its own event loop.

    `run` blocks until `stop`; in the main thread also until SIGTERM or SIGINT. `started` is set
    once the server listens.
    """

    def __init__(self) -> None:
        self.started = threading.Event()
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Serve until stopped."""
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    def stop(self) -> None:
        """Finish the running requests, then stop. Any thread may call this."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)

    @abstractmethod
    async def _serve(self, stopped: asyncio.Event) -> None:
        """Listen, set `started`, wait for `stopped`, and shut down."""

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stopped.set)
        await self._serve(self._stopped)


def open_listener(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: address to listen at.
        port: 0 = a free port.
        shares_port: whether other processes listen at the port as well.

    Raises:
        ConfigError: that is not possible.
    """
    family = socket.AF_INET
    takes_both = False  # IPv4, too
    if ":" in host:
        family = socket.AF_INET6
        takes_both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port),
            family=family,
            backlog=_BACKLOG,
            reuse_port=shares_port,
            dualstack_ipv6=takes_both,
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"serve: cannot listen at {host}:{port}, got {error}. Give a free port, or 0."
        ) from error
