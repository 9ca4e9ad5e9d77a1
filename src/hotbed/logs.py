# SPDX-License-Identifier: Apache-2.0
"""Log lines of commands and servers: with time and level, as text or as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

from hotbed.errors import ConfigError

VARIABLE = "HOTBED_LOG"
"""The variable of the environment that chooses `text` or `json`; other processes inherit it."""


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

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. Never raises: a full disk, say, must not end the thread that logs."""
        try:
            print(self._line(record), file=sys.stderr, flush=True)
        except Exception:
            with contextlib.suppress(Exception):
                self.handleError(record)

    def _line(self, record: logging.LogRecord) -> str:
        message = record.getMessage().rstrip()
        trace = ""
        if record.exc_info:
            trace = "".join(traceback.format_exception(record.exc_info[1]))
        if not self.as_json:
            return self._text(record, message, trace)
        spec: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        if self._worker is not None:
            spec["worker"] = self._worker
        if trace:
            spec["trace"] = trace
        return json.dumps(spec, ensure_ascii=False)

    def _text(self, record: logging.LogRecord, message: str, trace: str) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        worker = "" if self._worker is None else f"worker {self._worker}: "
        text = f"{moment.removesuffix('+00:00')}Z {record.levelname} {worker}{message}"
        return f"{text}\n{trace.rstrip()}" if trace else text


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
