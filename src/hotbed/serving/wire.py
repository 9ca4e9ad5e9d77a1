# SPDX-License-Identifier: Apache-2.0
"""Calls between the processes of one server."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from hotbed import errors
from hotbed.errors import HotbedError, ServingError
from hotbed.serving.threads import DaemonThreads

log = logging.getLogger("hotbed.serving")
ANSWER_SECONDS = 5.0


class Gone(ServingError):
    """The other process is not there, or does not answer."""


class Wire:
    """Calls between two processes over a socket: a line of JSON each way. Safe to use from several
        threads.

    `calls`: what the other side may ask for, by name; each runs on a thread. `ended`: called once
    the other side is gone.
    """

    def __init__(
        self, end: socket.socket, calls: Mapping[str, Callable[..., Any]], ended: Callable[[], None]
    ) -> None:
        self._end = end
        self._calls = calls
        self._ended = ended
        self._lines = end.makefile("rb")
        self._lock = threading.Lock()
        self._asked = dict[int, Future[Any]]()
        self._number = 0
        self._open = True
        self._pool = DaemonThreads(16, "hotbed-wire")
        threading.Thread(target=self._read, daemon=True, name="hotbed-wire").start()

    def call(self, name: str, *given: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """What the other side's `name` gives. Raises what it raised, ServingError where no answer
        comes in time.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._asked[number] = answer
        try:
            self._send({"call": name, "number": number, "given": given})
            return answer.result(seconds)
        except (OSError, TimeoutError) as error:
            raise Gone(
                f"{name}: another process of this server gave no answer — {error!r} — see its log"
            ) from error
        finally:
            self._asked.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            if not self._open:
                raise OSError("it is gone")
            self._end.sendall(data)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                message = json.loads(line)
                if "call" in message:
                    self._pool.submit(self._answer, message)
                elif (
                    asked := self._asked.get(message["number"])
                ) is not None and "error" in message:
                    asked.set_exception(_error(*message["error"]))
                elif asked is not None:
                    asked.set_result(message["result"])
        with self._lock:
            self._open = False
        for asked in list(self._asked.values()):
            with contextlib.suppress(Exception):
                asked.set_exception(OSError("it ended"))
        self._lines.close()
        self._end.close()
        self._ended()

    def _answer(self, message: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"number": message["number"]}
        try:
            answer["result"] = self._calls[message["call"]](*message["given"])
        except Exception as error:
            if not isinstance(error, HotbedError):
                log.exception("%s failed", message["call"])
            answer["error"] = [type(error).__name__, str(error)]
        with contextlib.suppress(OSError):
            self._send(answer)


def _error(kind: str, text: str) -> Exception:
    found = getattr(errors, kind, ServingError)
    return (
        found(text)
        if isinstance(found, type) and issubclass(found, HotbedError)
        else ServingError(text)
    )
