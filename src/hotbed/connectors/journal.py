# SPDX-License-Identifier: Apache-2.0
"""The journal of an endless source's decisions."""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hotbed.errors import FormatError, PersistError
from hotbed.files import Lock, is_partial, local_path, new_file, not_written, sync_folder, writing

logger = logging.getLogger("hotbed.connectors")


_BEGIN = re.compile(rb"[0-9a-f\0]{8}[ \0]|[0-9a-f\0]{1,8}\Z")
"""The begin of a line, also of one that a crash tore; blocks that are not on disk are zeros."""

Entries = dict[str, dict[int, dict[str, Any]]]
"""Decisions by topic and number."""


class Journal:
    """A log of the decisions that depend on the clock.

    Each decision is on disk before it takes effect, so that a run after a crash decides the same.
    Entries are numbered within a topic, rising, not always by one. The topics are:

    - "block": the rows that a source read at once, and the types that they decided; "block.0",
      "block.1" and so on for the inputs of a join;
    - "cut": a batch that ended early;
    - "evict": a step with an eviction;
    - "threads": a step after which training uses another number of threads.

    A line is the CRC-32 of its JSON, a space and the JSON `[topic, number, value]`. A last line
    that a crash tore is cut off. Safe for several threads.

    Args:
        path: a file that one process writes; None = in memory only.
        most_entries: decisions of each topic that a journal in memory keeps, the newest ones.

    Raises:
        FormatError: another line is damaged (file, line).
        PersistError: another journal has the file open, or the file cannot be written.

    Example:
        >>> journal = Journal()
        >>> journal.append("block", 0, {"take": 100})
        >>> journal.get("block", 0), journal.get("block", 1), journal.last("block")
        ({'take': 100}, None, 0)
    """

    def __init__(self, path: str | Path | None = None, most_entries: int = 100_000) -> None:
        self._most_entries = most_entries
        self._file: int | None = None
        self._lock: Lock | None = None
        self._entries: Entries = {}
        self._mutex = threading.Lock()
        self.path: Path | None = None
        if path is not None:
            self.path = local_path(path, "Journal.path")
        if self.path is not None:
            self._lock = Lock(self.path)
            try:
                self._open(self.path)
            except BaseException:
                self.close()
                raise

    @property
    def topics(self) -> list[str]:
        """The topics that have entries."""
        with self._mutex:
            return [topic for topic, entries in self._entries.items() if entries]

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
            PersistError: the journal already has a decision of this number or a later one, or it
                cannot be written.
        """
        line = _line(topic, number, dict(value))
        with self._mutex:
            entries = self._entries.setdefault(topic, {})
            latest = next(reversed(entries), -1)
            if number <= latest:
                raise PersistError(
                    f"{self._name()}: this decision was recorded before, got {topic} {number} "
                    f"after {latest}. To resume from an older state, use `hotbed rollback`."
                )
            if self._file is not None:
                self._write(line)
            elif len(entries) >= self._most_entries:
                del entries[next(iter(entries))]
            entries[number] = json.loads(line[9:])[2]  # as a run after a crash would read it

    def decide(
        self,
        topic: str,
        number: int,
        propose: Callable[[], Mapping[str, Any] | None],
        *,
        dense: bool = False,
    ) -> Mapping[str, Any] | None:
        """Return a decision; None: nothing is decided.

        It is the one on record where the journal has come so far, else what `propose` returns,
        which is recorded first.

        Args:
            topic: of the decision.
            number: in its topic.
            propose: returns the decision where none is on record, or None where none is due.
            dense: whether the topic has a decision for every number.

        Raises:
            PersistError: the journal cannot be written; or the topic is dense, and has a later
                decision, but not this one.
        """
        recorded = self.get(topic, number)
        if recorded is not None or (self.last(topic) >= number and not dense):
            return recorded
        proposed = propose()
        if proposed is not None:
            self.append(topic, number, proposed)
        return proposed

    def amend(self, topic: str, number: int, more: Mapping[str, Any]) -> None:
        """Add members to the last decision of a topic; an earlier one, or none, stays as it is."""
        decision = self.get(topic, number)
        if decision is not None and self.last(topic) == number:
            self.revise(topic, number, {**decision, **more})

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
        rest: Entries = {}
        num_dropped = 0
        for topic, entries in self._entries.items():
            rest[topic] = {n: value for n, value in entries.items() if is_needed(topic, n)}
            num_dropped += len(entries) - len(rest[topic])
        if not num_dropped:
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
        for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
            if is_partial(partial.name):
                partial.unlink()  # a kill interrupted the replacement of the file
        data = _bytes_of(path)
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
        if data and not valid and not _BEGIN.match(data):
            raise FormatError(
                f"{path}: not a journal, got a file that begins with {data[:60]!r}. Move it away, "
                "or choose another file."
            )
        with writing(path):
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
            raise not_written(self._name(), error) from error

    def _write_all(self, entries: Entries) -> None:
        """Replace the content of the file, if there is one, with these entries."""
        if self.path is not None and self._file is not None:
            lines: list[bytes] = []
            for topic, values in entries.items():
                lines += [_line(topic, number, value) for number, value in values.items()]
            self._replace(self.path, b"".join(lines))

    def _replace(self, path: Path, data: bytes) -> None:
        assert self._file is not None
        replaced: int | None = None
        try:
            with writing(path), new_file(path) as file:
                file.write(data)
                replaced = _appended(Path(file.name))  # before the old file is gone: it may fail
        finally:
            if replaced is not None:
                self._take(replaced, path)

    def _take(self, handle: int, path: Path) -> None:
        """Go on with the file of `handle` if it is at `path` now, else with the one before."""
        unused = handle
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            assert self._file is not None
            unused = self._file
            self._file = handle
        os.close(unused)


def _line(topic: str, number: int, value: Mapping[str, Any]) -> bytes:
    text = json.dumps([topic, number, value], separators=(",", ":"))
    data = text.encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _bytes_of(path: Path) -> bytes:
    """Return the bytes of a journal; none if it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise FormatError(
            f"{path}: the journal cannot be read, got {error}. Correct its rights, or restore the "
            "file."
        ) from error


def _parse(line: bytes) -> tuple[str, int, dict[str, Any]] | None:
    """Return topic, number and value of a line; None = it is damaged."""
    data = line[9:]
    checksum = b"%08x " % zlib.crc32(data)
    if not data or line[:9] != checksum:
        return None
    topic, number, value = json.loads(data)
    return topic, number, value


def _appended(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
