# SPDX-License-Identifier: Apache-2.0
"""Call functions of another process of the same server."""

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
_CALLS = 64  # threads for calls, some of which may wait for a source


class ProcessGone(ServingError):
    """The other process has ended, or does not answer."""


class Wire:
    """Calls between two processes over a socket. Safe to use from several threads.

    Each call and each answer is one line of JSON.

    Args:
        end: the socket, which the wire closes.
        calls: the functions that the other process may call, by name. Each call has a thread.
        ended: called once the other process has closed its end.
    """

    def __init__(
        self, end: socket.socket, calls: Mapping[str, Callable[..., Any]], ended: Callable[[], None]
    ) -> None:
        self._end = end
        self._calls = calls
        self._ended = ended
        self._lines = end.makefile("rb")
        self._lock = threading.Lock()
        self._waiting = dict[int, Future[Any]]()
        self._number = 0
        self._is_open = True
        self._threads = DaemonThreads(_CALLS, "hotbed-wire")
        reader = threading.Thread(target=self._read, daemon=True, name="hotbed-wire")
        reader.start()

    def call(self, name: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """Call a function of the other process and return its result.

        Raises what the function raised, ProcessGone without an answer within `seconds`.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._waiting[number] = answer
        try:
            self._send({"call": name, "number": number, "given": arguments})
            return answer.result(seconds)
        except (OSError, TimeoutError) as error:
            raise ProcessGone(
                f"{name}: another process of this server did not answer, got {error!r}. Look at "
                "its log."
            ) from error
        finally:
            self._waiting.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if not self._is_open:
                raise OSError("the other process has ended")
            self._end.sendall(line)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                message = json.loads(line)
                if "call" in message:
                    self._threads.submit(self._answer, message)
                else:
                    self._take(message)
        with self._lock:
            self._is_open = False
        for answer in list(self._waiting.values()):
            with contextlib.suppress(Exception):
                answer.set_exception(OSError("the other process has ended"))
        self._lines.close()
        self._end.close()
        self._ended()

    def _take(self, message: Mapping[str, Any]) -> None:
        """Resolve the call that an answer belongs to, unless that no longer waits."""
        answer = self._waiting.get(message["number"])
        if answer is None:
            return
        if "error" in message:
            answer.set_exception(_error(*message["error"]))
        else:
            answer.set_result(message["result"])

    def _answer(self, message: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"number": message["number"]}
        try:
            call = self._calls[message["call"]]
            answer["result"] = call(*message["given"])
        except Exception as error:
            if not isinstance(error, HotbedError):
                log.exception("%s failed", message["call"])
            answer["error"] = [type(error).__name__, str(error)]
        with contextlib.suppress(OSError):
            self._send(answer)


def _error(name: str, text: str) -> Exception:
    """Return an error of Hotbed by the name of its class, ServingError for any other name."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HotbedError):
        return kind(text)
    return ServingError(text)
