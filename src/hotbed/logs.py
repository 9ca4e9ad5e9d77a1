# SPDX-License-Identifier: Apache-2.0
"""Log lines of commands and servers: with time and level, as text or as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from hotbed.errors import ConfigError

VARIABLE = "HOTBED_LOG"
"""The variable of the environment that chooses `text` or `json`; other processes inherit it."""

FIELDS = "fields"
"""The attribute of a log record with a mapping of what its line also says: a line for a request."""

_QUEUE_BYTES = 4 << 20  # of lines that wait for the reader of stderr
_GATHER_SECONDS = 0.01  # for lines that one write takes together
_FLUSH_SECONDS = 2.0  # at the end of the process, for the next line to be written
_PLAIN = re.compile(r"[\w./:+-]+")


class LogLines(logging.Handler):
    """Writes log records to stderr.

    Args:
        as_json: each as a line of JSON; else as a line of text, with its trace below it.
        worker: the number of the server's worker, if there are several.
    """

    def __init__(self, *, as_json: bool, worker: int | None = None) -> None:
        super().__init__()
        self.as_json = as_json
        self._worker = worker
        self._queue: LineQueue | None = None

    def write_aside(self) -> None:
        """Write on a thread from now on, so that whoever logs never waits for a slow reader."""
        if self._queue is None:
            sys.stderr.flush()
            self._queue = LineQueue(sys.stderr.fileno(), self._dropped)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. Never raises: a full disk, say, must not end the thread that logs."""
        try:
            line = self._line(record)
            if self._queue is None:
                print(line, file=sys.stderr, flush=True)
            else:  # lines of requests leave room for others
                most_bytes = _QUEUE_BYTES // 2 if hasattr(record, FIELDS) else _QUEUE_BYTES
                self._queue.put(line, most_bytes)
        except Exception:
            with contextlib.suppress(Exception):
                self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, or the reader has stopped; `logging` calls it last."""
        if self._queue is not None:
            self._queue.flush()

    def _dropped(self, num_lines: int) -> str:
        message = "%d log lines were dropped: stderr was not read fast enough"
        return self._line(
            logging.LogRecord("hotbed", logging.WARNING, "", 0, message, (num_lines,), None)
        )

    def _line(self, record: logging.LogRecord) -> str:
        message = record.getMessage().rstrip()
        trace = ""
        if record.exc_info:
            trace = "".join(traceback.format_exception(record.exc_info[1]))
        fields: Mapping[str, Any] = getattr(record, FIELDS, {})
        if not self.as_json:
            pairs = "".join(f" {name}={_plain(value)}" for name, value in fields.items())
            return self._text(record, message + pairs, trace)
        spec: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        if self._worker is not None:
            spec["worker"] = self._worker
        spec.update(fields)
        if trace:
            spec["trace"] = trace
        return json.dumps(spec, ensure_ascii=False)

    def _text(self, record: logging.LogRecord, message: str, trace: str) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        worker = "" if self._worker is None else f"worker {self._worker}: "
        text = f"{moment.removesuffix('+00:00')}Z {record.levelname} {worker}{message}"
        return f"{text}\n{trace.rstrip()}" if trace else text


class LineQueue:
    """Lines that a thread writes, so that whoever puts them never waits for their reader.

    Args:
        descriptor: of the file to write to. No lock of Python is held while a write waits.
        dropped: returns a line about lines that found no room, from their number.
    """

    def __init__(self, descriptor: int, dropped: Callable[[int], str]) -> None:
        self._descriptor = descriptor
        self._dropped = dropped
        self._lines = deque[bytes]()
        self._waiting_bytes = 0  # also of lines that are being written
        self._num_dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="hotbed-stderr", daemon=True).start()

    def put(self, line: str, most_bytes: int) -> None:
        """Queue a line; drop and count it if more than `most_bytes` would wait."""
        data = f"{line}\n".encode(errors="backslashreplace")
        with self._changed:
            if self._waiting_bytes + len(data) > most_bytes:
                self._num_dropped += 1
                return
            self._waiting_bytes += len(data)
            self._lines.append(data)
            if len(self._lines) == 1:
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, or until none has been for two seconds."""
        with self._changed:
            while self._waiting_bytes and self._changed.wait(_FLUSH_SECONDS):
                pass

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
            time.sleep(_GATHER_SECONDS)
            with self._changed:
                data = self._next_lines()
                num_dropped = self._num_dropped
                self._num_dropped = 0
            with contextlib.suppress(OSError):  # a closed pipe or a full disk: the lines are lost
                self._write(data)
                if num_dropped:
                    self._write(f"{self._dropped(num_dropped)}\n".encode())
            with self._changed:
                self._waiting_bytes -= len(data)
                self._changed.notify_all()

    def _next_lines(self) -> bytes:
        """Take lines for one write: a pipe that workers share keeps so much together."""
        data = self._lines.popleft()
        while self._lines and len(data) + len(self._lines[0]) <= select.PIPE_BUF:
            data += self._lines.popleft()
        return data

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process made the pipe so
                select.select([], [self._descriptor], [])


def write_logs_aside() -> None:
    """Write the `LogLines` of this process on a thread from now on, until it ends."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogLines):
            handler.write_aside()


def _plain(value: Any) -> str:
    """Return a value of a line of text; one with blanks or other characters is quoted."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def logs_as_json() -> bool:
    """Return whether this process writes its log lines as JSON."""
    handlers = logging.getLogger().handlers
    return any(isinstance(handler, LogLines) and handler.as_json for handler in handlers)


def log_lines(default: str, worker: int | None = None) -> None:
    """Log what this process reports, and its warnings, as `LogLines`.

    A program that has its own handlers keeps them.

    Args:
        default: `text` or `json`, where the variable `HOTBED_LOG` is not set.
        worker: as in `LogLines`.

    Raises:
        ConfigError: the variable is neither.
    """
    form = os.environ.get(VARIABLE) or default
    if form not in ("text", "json"):
        raise ConfigError(f"{VARIABLE}: unknown form of log lines, got {form!r}. Set text or json.")
    root = logging.getLogger()
    if root.handlers:
        return
    root.addHandler(LogLines(as_json=form == "json", worker=worker))
    logging.getLogger("hotbed").setLevel(logging.INFO)
    logging.captureWarnings(True)
