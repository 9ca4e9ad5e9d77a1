# SPDX-License-Identifier: Apache-2.0
"""The journal of an endless source's decisions, and dead letters: rows that could not be read."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotbed.errors import FormatError, PersistError
from hotbed.files import Lock, local_path, sync_folder

logger = logging.getLogger("hotbed.connectors")

KEPT_ENTRIES = 100_000
"""Decisions of each topic that a journal in memory keeps, the newest ones."""

KEPT_LETTERS = 1_000_000
"""Digests of dead letters (8 bytes each) in memory, so that a row that is read again after a crash
is not written twice.
"""


class Journal:
    """A log of the decisions that depend on the clock.

    Each decision is on disk before it takes effect, so that a run after a crash decides the same.
    Entries are numbered within a topic, rising, not always by one. The topics are "block": the rows
    that a source read at once; "cut": a batch that ended early; "evict": a step with an eviction. A
    line is the CRC-32 of its JSON, a space and the JSON `[topic, number, value]`. A last line that
    a crash tore is cut off. Safe for several threads.

    Args:
        path: A file that one process writes; None = in memory only.

    Raises:
        FormatError: Another line is damaged (file, line).
        PersistError: Another journal has the file open, or the file cannot be written.

    Example:
        >>> journal = Journal()
        >>> journal.append("block", 0, {"take": 100})
        >>> journal.get("block", 0), journal.get("block", 1), journal.last("block")
        ({'take': 100}, None, 0)
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._file: int | None = None
        self._lock: Lock | None = None
        self._entries: dict[str, dict[int, dict[str, Any]]] = {}
        self._mutex = threading.Lock()
        self.path = None if path is None else local_path(path, "Journal.path")
        if self.path is not None:
            self._lock = Lock(self.path)
            try:
                self._open(self.path)
            except BaseException:
                self.close()
                raise

    def get(self, topic: str, number: int) -> dict[str, Any] | None:
        """Return a decision, or None."""
        with self._mutex:
            return self._entries.get(topic, {}).get(number)

    def last(self, topic: str) -> int:
        """Return the highest number of a topic; -1 = no entries."""
        with self._mutex:
            return next(reversed(self._entries.get(topic, {})), -1)

    def append(self, topic: str, number: int, value: Mapping[str, Any]) -> None:
        """Write a decision; it is on disk when this returns.

        Raises:
            PersistError: The journal already has a decision of this number or a later one, or it
                cannot be written.
        """
        line = _line(topic, number, dict(value))
        with self._mutex:
            entries = self._entries.setdefault(topic, {})
            latest = next(reversed(entries), -1)
            if number <= latest:
                raise PersistError(
                    f"{self._name()}: a decision on record stands, got {topic} {number} after "
                    f"{latest}. To resume from an older state, use `hotbed restore`."
                )
            if self._file is not None:
                self._write(line)
            elif len(entries) >= KEPT_ENTRIES:
                del entries[next(iter(entries))]
            entries[number] = json.loads(line[9:])[2]  # as a run after a crash would read it

    def revise(self, topic: str, number: int, value: Mapping[str, Any]) -> None:
        """Replace the last decision of a topic, because its subject, such as a file, changed.

        The new decision is on disk when this returns.

        Raises:
            PersistError: `number` is not the last one, or the journal cannot be written.
        """
        revised = json.loads(json.dumps(dict(value)))
        with self._mutex:
            entries = self._entries.get(topic, {})
            if next(reversed(entries), -1) != number:
                raise PersistError(
                    f"{self._name()}: {topic} {number} is not the last decision, got {topic} "
                    f"{next(reversed(entries), -1)} after it. Read it with get() instead."
                )
            changed = {**self._entries, topic: {**entries, number: revised}}
            self._write_all(changed)
            self._entries = changed

    def after(self, topic: str, number: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (number, decision) of all entries with numbers above `number`, rising."""
        with self._mutex:
            entries = list(self._entries.get(topic, {}).items())
        yield from (entry for entry in entries if entry[0] > number)

    def forget(self, before: Mapping[str, int]) -> None:
        """Drop the entries of each topic whose number is below `before[topic]`.

        The file is replaced as a whole.
        """
        with self._mutex:
            self._keep(lambda topic, number: number >= before.get(topic, 0))

    def cut(self, after: Mapping[str, int]) -> None:
        """Drop the entries of each topic whose number is above `after[topic]`.

        They are decided again.
        """
        with self._mutex:
            self._keep(lambda topic, number: topic not in after or number <= after[topic])

    def _keep(self, is_needed: Callable[[str, int], bool]) -> None:
        """Drop the entries for which `is_needed(topic, number)` is False."""
        old = self._entries
        rest = {
            topic: {n: value for n, value in entries.items() if is_needed(topic, n)}
            for topic, entries in old.items()
        }
        if all(len(rest[topic]) == len(old[topic]) for topic in old):
            return
        self._write_all(rest)
        self._entries = rest

    def close(self) -> None:
        """Close and release the file; the entries can still be read."""
        with self._mutex:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self.close()

    def _name(self) -> str:
        return str(self.path or "journal in memory")

    def _open(self, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        *lines, rest = data.split(b"\n")
        valid = 0
        for line_number, line in enumerate(lines, 1):
            entry = _parse(line)
            if entry is None:
                # a crash may tear a last line that has its end: blocks reach the disk in any order
                if line_number == len(lines) and not rest:
                    break
                raise FormatError(
                    f"{path}, line {line_number}: its digest does not match, got {line[:60]!r}. "
                    "Restore the file, or remove it together with the checkpoints next to it."
                )
            topic, number, value = entry
            self._entries.setdefault(topic, {})[number] = value
            valid += len(line) + 1
        self._file = _appended(path)
        if valid < len(data):
            logger.warning("%s: a crash tore the last line, which is cut off", path)
            os.ftruncate(self._file, valid)
            os.fsync(self._file)
        sync_folder(path.parent)

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("only a part of the line was written")
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)  # remove a half line, which would join the next one
            raise PersistError(
                f"{self._name()}: cannot be written, got {error}. Free space or correct the rights."
            ) from error

    def _write_all(self, entries: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
        """Replace the content of the file, if there is one, with these entries."""
        if self.path is not None and self._file is not None:
            lines = [
                _line(topic, n, value) for topic in entries for n, value in entries[topic].items()
            ]
            self._replace(self.path, b"".join(lines))

    def _replace(self, path: Path, data: bytes) -> None:
        new = path.with_name(path.name + ".new")
        try:
            with open(new, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
            sync_folder(path.parent)
        except OSError as error:
            raise PersistError(
                f"{path}: cannot be written, got {error}. Free space or correct the rights."
            ) from error
        assert self._file is not None
        os.close(self._file)
        self._file = _appended(path)


def _line(topic: str, number: int, value: Mapping[str, Any]) -> bytes:
    data = json.dumps([topic, number, value], separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _parse(line: bytes) -> tuple[str, int, dict[str, Any]] | None:
    """Return topic, number and value of a line; None = it is damaged."""
    data = line[9:]
    if line[:9] != b"%08x " % zlib.crc32(data) or not data:
        return None
    topic, number, value = json.loads(data)
    return topic, number, value


def _appended(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


class DeadLetters:
    """Rows that could not be read, each with its place, as JSON lines.

    A line is `{"place": {...}, "reason": "...", "payload": "..."}`; a payload that is not UTF-8 is
    written as `payload_base64`. The same row is written once, also if it is read again after a
    crash; other content at the same place is another row.

    Args:
        path: The file; None = rows are only counted and logged.

    Example: `letters.add({"topic": "clicks", "partition": 0, "offset": 7}, "undecodable", b"{")`
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else local_path(path, "DeadLetters.path")
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
            PersistError: The file cannot be written.
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
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "ab") as file:
                    file.write(b"".join(lines))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise PersistError(
                    f"{self.path}: cannot be written, got {error}. Free space or correct "
                    "the rights."
                ) from error

    def _is_new(self, letter: Mapping[str, Any]) -> bool:
        key = hashlib.blake2b(json.dumps(letter, sort_keys=True).encode(), digest_size=8).digest()
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
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                letter = json.loads(line)
                self.counts[letter["reason"]] = self.counts.get(letter["reason"], 0) + 1
                self._is_new(letter)
            except (ValueError, KeyError, TypeError) as error:
                raise FormatError(
                    f"{path}, line {number}: not a dead letter, got {error}. Move the file away."
                ) from error
        if len(whole) < len(data):
            os.truncate(path, len(whole))


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


@dataclass
class Live:
    """The state that an endless source shares with its reader.

    Args:
        journal: The decisions.
        dead_letters: The rows that could not be read.
        tick_seconds: The source yields at least this often, so that its reader can stop.
        lag: Rows that wait at the source; None = unknown.
        clock: Returns seconds since 1970; tests replace it.

    Example: `dataset.live.journal = Journal("run/journal")` before the first batch is read.
    """

    journal: Journal = field(default_factory=Journal)
    dead_letters: DeadLetters = field(default_factory=DeadLetters)
    tick_seconds: float = 0.2
    lag: int | None = None
    clock: Callable[[], float] = time.time

    def now(self) -> int:
        """Return the clock in microseconds since 1970."""
        return int(self.clock() * 1e6)
