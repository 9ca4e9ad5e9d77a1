# SPDX-License-Identifier: Apache-2.0
"""A worker: a process that answers, and maps the rows that its parent writes."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

from hotbed.logs import log_lines, write_logs_aside
from hotbed.serving.server.options import LogOptions, Options, RemoteOptions, ServerLimits
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.server import Server
from hotbed.serving.server.tokens import Roles, Tokens
from hotbed.serving.stores.opening import is_remote, open_row_store
from hotbed.serving.workers.wire import ANSWER_SECONDS, Wire

POLL_SECONDS = 0.2  # between reads of CURRENT
LOAD_SECONDS = 3600.0  # for a load of a model by all processes


class WorkerState(TypedDict):
    """What a parent keeps its workers informed of.

    Attributes:
        problems: why models cannot be loaded, by name; "" = loaded.
        roles: the valid tokens; None = no token is needed.
        store_token: the token to send to parameter servers; None = no token.
    """

    problems: Mapping[str, str]
    roles: Roles | None
    store_token: str | None


class RemoteParent:
    """The parent as a worker sees it: what it does for all workers."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number

    def load(self, name: str) -> None:
        """Load a model; return once every worker serves the version that was loaded."""
        self._wire.call("load", name, seconds=LOAD_SECONDS)

    def unload(self, name: str) -> None:
        """Unload a model; return once no worker serves it."""
        self._wire.call("unload", name, seconds=LOAD_SECONDS)

    def metrics(self) -> bytes:
        """Return the metrics of all processes."""
        text: str = self._wire.call("metrics", seconds=2 * ANSWER_SECONDS)
        return text.encode()

    def status(self) -> dict[str, Any]:
        """Return the status of all processes, and the number of this worker."""
        status: dict[str, Any] = self._wire.call("status", seconds=2 * ANSWER_SECONDS)
        return {"worker": self._number, **status}


class Worker:
    """A server at the ports of its parent, which loads and follows its models.

    Args:
        wire_end: this process's end of the wire to its parent.
        listener: the socket at which all workers listen.
    """

    def __init__(self, wire_end: socket.socket, listener: socket.socket) -> None:
        self._built = threading.Event()
        self._orphaned = threading.Event()  # the parent is gone
        self._server: Server | None = None
        calls: dict[str, Callable[..., Any]] = {
            "set_wanted": self._set_wanted,
            "set_state": self._set_state,
            "prepare": self._prepare,
            "look": self._look,
            "metrics": self._metrics,
            "status": self._status,
        }
        self._wire = Wire(wire_end, calls, self._lose_parent)
        spec = self._wire.call("spec")
        log_lines("json", spec["number"])
        write_logs_aside()
        options = Options(**spec["options"])
        self._state: WorkerState = spec["state"]
        self._models = self._build_models(spec, options)
        tokens = None if self._state["roles"] is None else Tokens(self._valid_roles)
        self._server = Server(self._models, options, listener, tokens)
        self._built.set()
        self._set_state(self._state)

    def run(self) -> None:
        """Answer until SIGTERM, or until the parent is gone: the next one needs its ports."""
        server = self._server
        assert server is not None
        threading.Thread(target=self._report_up, args=(server,), daemon=True).start()
        if not self._orphaned.is_set():
            server.run()

    def _build_models(self, spec: Mapping[str, Any], options: Options) -> Models:
        remote = RemoteOptions(**spec["remote"])
        store = options.parameter_server()
        limits = ServerLimits(**spec["limits"])
        token = None if self._state["store_token"] is None else self._valid_store_token
        reach = partial(open_row_store, token=token, trusted=remote.store_trusted)
        logs = LogOptions(**spec["logs"])
        models = Models(store, limits, reach, remote.cache(), logs=logs)
        models.parent = RemoteParent(self._wire, spec["number"])
        for name, source in spec["models"].items():
            if is_remote(source):
                models.add(name, source)
            else:
                models.watch(name, partial(store.model, name), POLL_SECONDS)
            if name in spec["unloaded"]:
                models.named(name).set_wanted(False)
        return models

    def _report_up(self, server: Server) -> None:
        server.started.wait()
        self._wire.call("up")
        if self._orphaned.is_set():
            server.stop()

    def _valid_roles(self) -> Roles:
        return self._state["roles"] or ()

    def _valid_store_token(self) -> str:
        return self._state["store_token"] or ""

    # The parent calls these.

    def _set_wanted(self, name: str, wanted: bool) -> None:
        self._built.wait(LOAD_SECONDS)
        self._models.named(name).set_wanted(wanted)

    def _prepare(self, name: str, keys: Sequence[str]) -> None:
        self._built.wait(LOAD_SECONDS)
        self._models.rules.prepare(name, keys)

    def _look(self, name: str) -> None:
        self._built.wait(LOAD_SECONDS)
        self._models.rules.look_at(name)

    def _set_state(self, state: WorkerState) -> None:
        self._built.wait(ANSWER_SECONDS)
        self._state = state
        for name, problem in state["problems"].items():
            self._models.named(name).outside_problem = problem

    def _metrics(self) -> str:
        self._built.wait(ANSWER_SECONDS)
        return self._models.meters.text().decode()

    def _status(self) -> list[dict[str, Any]]:
        self._built.wait(ANSWER_SECONDS)
        return self._models.status()

    def _lose_parent(self) -> None:
        self._orphaned.set()
        if self._server is not None:
            self._server.stop()


def main() -> None:
    """Run a worker; the arguments are the numbers of two inherited sockets."""
    wire_number, listener_number = sys.argv[1:3]
    wire_end = socket.socket(fileno=int(wire_number))
    listener = socket.socket(fileno=int(listener_number))
    Worker(wire_end, listener).run()
