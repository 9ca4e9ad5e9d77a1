# SPDX-License-Identifier: Apache-2.0
"""Dead letters: rows that could not be read, each with its place."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hotbed import checks
from hotbed.config import parse_json
from hotbed.errors import FormatError
from hotbed.files import append_bytes, local_path, writing

logger = logging.getLogger("hotbed.connectors")


MOST_BYTES = 256 << 20
KEPT_LETTERS = 1_000_000
"""Digests of dead letters (8 bytes each) in memory, so that a row that is read again after a crash
is not written twice.
"""


class DeadLetters:
    """Rows that could not be read, each with its place, as JSON lines.

    A line is `{"place": {...}, "reason": "...", "payload": "..."}`; a payload that is not UTF-8 is
    written as `payload_base64`. The same row is written once, also if it is read again after a
    crash; other content at the same place is another row. Rows beyond `max_bytes` are counted
    and no longer written, which the log says: the first rows of a fault tell its cause.

    Args:
        path: the file; None = rows are only counted and logged.
        max_bytes: the most that the file may take. Move it away, and rows are written again.

    Example: `letters.add({"topic": "clicks", "partition": 0, "offset": 7}, "undecodable", b"{")`
    """

    def __init__(self, path: str | Path | None = None, max_bytes: int = MOST_BYTES) -> None:
        checks.at_least("DeadLetters.max_bytes", max_bytes, 0)
        self.max_bytes = max_bytes
        self._is_full = False
        self.path: Path | None = None
        if path is not None:
            self.path = local_path(path, "DeadLetters.path")
        self.counts: dict[str, int] = {}
        self._seen: dict[bytes, None] = {}
        self._mutex = threading.Lock()
        if self.path is not None and self.path.exists():
            self._recall(self.path)

    @property
    def total(self) -> int:
        """Number of all rows, also of earlier runs."""
        return sum(self.counts.values())

    @property
    def num_bytes(self) -> int:
        """Size of the file; 0 if it does not exist."""
        if self.path is None or not self.path.exists():
            return 0
        return self.path.stat().st_size

    def add(self, place: Mapping[str, Any], reason: str, payload: bytes | str) -> None:
        """Write one row; it is on disk when this returns.

        Raises:
            PersistError: the file cannot be written.
        """
        self.add_all([(place, reason, payload)])

    def add_all(self, letters: Iterable[tuple[Mapping[str, Any], str, bytes | str]]) -> None:
        """Write several rows at once, as `add` does for one."""
        lines: list[bytes] = []
        with self._mutex:
            for place, reason, payload in letters:
                letter = _letter(place, reason, payload)
                if self._is_new(letter):
                    self._count(reason, place)
                    lines.append(_line_of(letter))
            if self.path is None or not lines:
                return
            lines = self._that_fit(lines)
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                append_bytes(self.path, b"".join(lines))

    def _that_fit(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines that the file has room for; log where it begins to lack it."""
        room = self.max_bytes - self.num_bytes
        sizes = itertools.accumulate(map(len, lines))
        num_fitting = sum(1 for size in sizes if size <= room)
        is_full = num_fitting < len(lines)
        if is_full and not self._is_full:
            logger.error(
                "%s: %d bytes are reached, further dead letters are counted and not written; "
                "move the file away to have them written again",
                self.path,
                self.max_bytes,
            )
        self._is_full = is_full
        return lines[:num_fitting]

    def _is_new(self, letter: Mapping[str, Any]) -> bool:
        text = json.dumps(letter, sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=8).digest()
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > KEPT_LETTERS:
            del self._seen[next(iter(self._seen))]
        return True

    def _count(self, reason: str, place: Mapping[str, Any]) -> None:
        count = self.counts.get(reason, 0) + 1
        self.counts[reason] = count
        # log the 1st, 2nd, 4th, 8th ...: many bad rows must not flood the log
        if count & (count - 1) == 0:
            logger.warning("dead letter (%s), %d so far: %s", reason, count, dict(place))

    def _recall(self, path: Path) -> None:
        """Read the counts and digests of earlier runs.

        A last line that a crash tore is cut off; its row is written again when it is read again.
        """
        num_whole = 0
        with path.open("rb") as file:  # line by line: it may be large
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self._cut(path, num_whole, line)
                    break
                num_whole += len(line)
                try:
                    letter = parse_json(line)
                    reason = letter["reason"]
                    self.counts[reason] = self.counts.get(reason, 0) + 1
                    self._is_new(letter)
                except (ValueError, KeyError, TypeError) as error:
                    raise FormatError(
                        f"{path}, line {number}: not a dead letter, got {error}. "
                        "Move the file away."
                    ) from error

    def _cut(self, path: Path, num_whole: int, torn: bytes) -> None:
        """Cut off a torn line behind the whole ones."""
        begin = _BEGIN[: len(torn)]
        if not num_whole and torn[: len(begin)].strip(b"\0") != begin:
            raise FormatError(
                f"{path}: not dead letters, got a file that begins with {torn[:60]!r}. Move "
                "the file away."
            )
        os.truncate(path, num_whole)


_BEGIN = b'{"place": {'


def _line_of(letter: Mapping[str, Any]) -> bytes:
    # file names may hold bytes that are not UTF-8: write them as escapes of JSON
    return json.dumps(letter, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _letter(place: Mapping[str, Any], reason: str, payload: bytes | str) -> dict[str, Any]:
    letter: dict[str, Any] = {"place": dict(place), "reason": reason}
    if isinstance(payload, str):
        letter["payload"] = payload
        return letter
    try:
        letter["payload"] = payload.decode()
    except UnicodeDecodeError:
        letter["payload_base64"] = base64.b64encode(payload).decode()
    return letter
