# SPDX-License-Identifier: Apache-2.0
"""Follow: a directory that files arrive in, as an endless source."""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.connectors.endings import source_for
from hotbed.connectors.file_identity import Content, FileIdentity, name_of, text_of
from hotbed.connectors.files import FileSource, Section, rows_of_section
from hotbed.connectors.live import Live
from hotbed.connectors.position import (
    OPENED,
    PLACE,
    TICK,
    Batches,
    Position,
    schema_from_text,
    schema_to_text,
)
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, BadRow, ReadPlan
from hotbed.connectors.source import Source
from hotbed.connectors.status import SourceReading, SourceStatus
from hotbed.connectors.types import completed, has_open, types_of, with_open_as_null
from hotbed.errors import ConfigError, DataError, DecodeError, printable
from hotbed.objects import is_url

T = TypeVar("T")
logger = logging.getLogger("hotbed.connectors")

RACY_SECONDS = 1.0
"""A file that changed this recently may change again and keep its time of change."""


@dataclass(frozen=True)
class Follow(Source):
    """A directory that files arrive in, as a source without end. Each file is read whole and once.

    Write a file under a name that begins with "." or ends in ".tmp" or ".partial", and rename it
    when it is complete. If the writer cannot do this, use `settle_seconds`. The choice of the next
    file is in the journal before the file is read. A file may be removed once a checkpoint has
    passed it.

    A file that was read is identified by its name, the number of bytes that were read and a digest
    of their first and last 64 KiB. A copied, touched or restored file is not read again.

    Args:
        directory: where the files arrive.
        pattern: names, such as `*.parquet`.
        order: read waiting files by "name" or by "time" of change.
        settle_seconds: how long a file must not have changed before it is read.
        format: a source whose options are used to read (its path is not used). None = by the
            ending: csv, tsv, jsonl, parquet, svm, also compressed. A column keeps the type of its
            first value.
        grows: read whole lines that are added to a file of plain lines. If False, they are an
            error.
        replaced: other content under a name that was read raises an error ("raise"), or is read as
            new rows ("read").

    Raises:
        DecodeError: a file is torn.
        SchemaError: a column of the first file is absent, or its type does not widen to the type
            that the column had first.
        DataError: a file changed or vanished before it was read to its end; lines were added, or
            content was replaced, where that is not asked for; a last line has no line end.

    With `on_error="skip"` all but SchemaError are logged and become dead letters.

    Example: `hb.sources.Follow("/data/incoming", "*.jsonl.gz")`
    """

    directory: str | Path
    pattern: str = "*"
    order: Literal["name", "time"] = "name"
    settle_seconds: float = 0.0
    format: Source | None = None
    _: KW_ONLY
    grows: bool = False
    replaced: Literal["raise", "read"] = "raise"

    def __post_init__(self) -> None:
        if is_url(self.directory):
            raise ConfigError(
                f"Follow.directory: must be a local folder, got {str(self.directory)!r}. Send "
                "events to a topic, or read the objects that are there with hb.sources.Parquet."
            )
        checks.one_of("order", self.order, ("name", "time"))
        checks.one_of("replaced", self.replaced, ("raise", "read"))
        if self.format is not None and not isinstance(self.format, FileSource):
            kind = type(self.format).__name__
            choice = "Csv, Jsonl, Libsvm or Parquet"
            raise ConfigError(f"format: not a source of files, got {kind}. Give {choice}.")

    @property
    def endless(self) -> bool:
        return True

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        return {"format": None if self.format is None else self.format.settings}

    def schema(self) -> pa.Schema:
        """Return the schema of the first file that is not blank."""
        return self._first().schema()

    @property
    def inferred(self) -> pa.Schema:
        return self._first().inferred

    def _first(self) -> FileSource:
        """Return the first file that is not blank."""
        _, ready = self.listing(time.time())
        for entry in ready:
            if not Section(entry.path).is_blank():
                return self.reader(entry.name, "")
        raise DataError(
            f"{self.directory}: no file yet that matches {self.pattern!r}. Put the first one there."
        )

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        reading = _FollowReading(self, plan, position)
        return SourceReading(self._batches(reading, batch_rows), lambda: reading.status)

    def _batches(self, reading: _FollowReading, batch_rows: int) -> Batches:
        while True:
            if not reading.next_block():
                yield TICK, reading.position()
                time.sleep(reading.live.tick_seconds)
                continue
            yield OPENED, reading.position()
            yield from reading.rows(batch_rows)

    def check_ready(self) -> None:
        """Raise DataError if the directory cannot be listed."""
        self.listing(0.0)

    def listing(self, now: float) -> tuple[set[str], list[os.DirEntry[str]]]:
        """Return the names of all files, and the files that are ready to be read, in order."""
        names: set[str] = set()
        ready: list[tuple[int, str, os.DirEntry[str]]] = []
        try:
            entries = list(os.scandir(self.directory))
        except OSError as error:
            raise DataError(
                f"{os.fspath(self.directory)!r}: cannot follow it, got {error.strerror}. "
                "Make the directory, or correct its path or rights."
            ) from error
        for entry in entries:
            if not self._matches(entry.name) or not entry.is_file():
                continue
            try:
                changed = entry.stat()
            except FileNotFoundError:
                continue
            names.add(entry.name)
            if now - changed.st_mtime >= self.settle_seconds or not self.settle_seconds:
                time_of_change = 0
                if self.order == "time":
                    time_of_change = changed.st_mtime_ns
                ready.append((time_of_change, entry.name, entry))
        ready.sort(key=lambda item: item[:2])
        return names, [entry for _, _, entry in ready]

    def _matches(self, name: str) -> bool:
        """Return whether a file of this name is to be read."""
        if name.startswith(".") or name.endswith((".tmp", ".partial")):
            return False
        return fnmatch.fnmatch(name, self.pattern)

    def path(self, text: str) -> str:
        """Return the path of a file from its name in a position."""
        return os.path.join(self.directory, name_of(text))

    def words_for(self, place: Mapping[str, Any]) -> str:
        name = name_of(place["file"])
        reader = self.reader(name, "")
        return str(reader.place(Section(self.path(place["file"])), place["row"] - 1))

    def reader(self, name: str, types: str) -> FileSource:
        """Return the source that reads a file, with the types of the files before it."""
        path = os.path.join(self.directory, name)
        first = None
        if types:
            first = schema_from_text(types)
        source = self.format or source_for(path)
        if source is None:
            raise ConfigError(
                f"format: unknown ending of a file in {self.directory}, got "
                f"{text_of(name)!r}. Give `format`, or a `pattern` that leaves it out."
            )
        assert isinstance(source, FileSource)
        return source.like_first(path, first)


class _FollowReading:
    """One reading of a followed directory: the files that were read, and the current block.

    A block is a section of a file. Its decision in the journal is {file, begin, rows, size, digest,
    now}: bytes `begin` to `size`, the number of rows before them, and the digest of the bytes
    before `size`. "failed": its rows could not be used, so that the file may be corrected. "left":
    the rest of it is not read.
    """

    def __init__(self, source: Follow, plan: ReadPlan, position: Position | None) -> None:
        state = {}
        if position and position.state:
            position.require("Follow", source)
            if isinstance(source.format, FileSource):
                position.require_types(source.format.declared_types)
            state = dict(position.state)
        self.source = source
        self.plan = plan
        self.live = plan.live or Live()
        self.status = SourceStatus()
        self.number: int = state.get("block", 0)
        self.now: int = state.get("now", 0)
        self.types: str = state.get("schema", "")
        self.seen = _identities(state.get("seen", {}))  # by name; replaced, never changed
        self._incomplete: set[str] = set()  # names without a digest
        for text, (_, digest, _) in self.seen.items():
            if not digest:
                self._incomplete.add(text)
        self.row: int = state.get("row", 0)  # rows of the block that were yielded
        self.block: dict[str, Any] | None = None
        if state.get("file") is not None:
            self.block = _decision(state)
        self._last_row = 0  # number of the last row that was read, in its file
        self._ready: deque[os.DirEntry[str]] = deque()  # listed, but not checked yet
        self._hints: dict[str, _Hint] = {}  # of files without new rows
        self._refused: dict[str, str] = {}  # the last message about a changed file

    def position(self) -> Position:
        """Return the position after `row` rows of the current block."""
        state = {
            "block": self.number,
            **(self.block or _NO_BLOCK),
            "row": self.row,
            "seen": self.seen,
            "now": self.now,
            "schema": self.types,
        }
        if self.block is None:  # any format may read the files to come
            return Position(state)
        return Position.of(self.source, state)

    def next_block(self) -> bool:
        """Return whether there is a block to read; its decision is then in the journal."""
        while True:
            entry: Mapping[str, Any] | None
            if self.block is None:
                entry = self.live.journal.decide("block", self.number, self._choose, dense=True)
            else:
                # the position may have no journal
                position_block = {**self.block, "now": self.now}
                entry = self.live.journal.decide("block", self.number, position_block.copy)
                entry = entry or position_block
            if entry is not None:
                self.block = _decision({**(self.block or {}), **entry})
                self.now = entry["now"]
                if not entry.get("failed"):  # else its types may be what was corrected
                    self.types = entry.get("types", self.types)
            if self.block is None:
                return False
            left = entry is not None and entry.get("left", False)
            if not left and self._is_readable(self.block, entry or {}):
                return True
            self._end_block()

    def rows(self, batch_rows: int) -> Batches:
        """Yield the rest of the current block; the last position precedes the next block."""
        assert self.block is not None
        last = TICK
        for batch in self._batches(self.block, batch_rows):
            if last.num_rows:
                self.row += last.num_rows
                yield last, self.position()
            last = batch
        identity = FileIdentity(self.block["size"], self.block["digest"], self._last_row)
        self.seen = {**self.seen, self.block["file"]: identity.to_json()}
        self._end_block()
        yield last, self.position()

    def _end_block(self) -> None:
        self.number += 1
        self.block = None
        self.row = 0

    # --- the choice of the next file

    def _choose(self) -> dict[str, Any] | None:
        """Return the decision to read the next section; None if there is nothing to read."""
        if not self._ready:
            self._list()
        while self._ready:
            entry = self._ready.popleft()
            section = self._new_section(entry)
            if section is not None:
                self.status = SourceStatus()
                return self._decision_on(text_of(entry.name), section)
        self.status = SourceStatus(lag=0)
        return None

    def _list(self) -> None:
        """List the files that are ready, in order, and drop the entries of removed files."""
        names, ready = self.source.listing(self.live.clock())
        present = {text_of(name) for name in names}
        if not self.seen.keys() <= present:
            self.seen = _only(self.seen, present)
            self._hints = _only(self._hints, present)
        self._complete()
        self._ready = deque(ready)

    def _complete(self) -> None:
        """Add digests to names without one, which come from positions of older versions."""
        incomplete = self._incomplete & self.seen.keys()
        self._incomplete = set()
        for text in incomplete:
            path = self.source.path(text)
            try:
                identity = FileIdentity.of(path, os.stat(path).st_size)
            except OSError:
                self._incomplete.add(text)
                continue
            self.seen = {**self.seen, text: identity.to_json()}

    def _decision_on(self, text: str, section: Section) -> dict[str, Any] | None:
        """Return the decision to read a section; None if its file is gone."""
        assert section.end is not None
        try:
            identity = FileIdentity.of(section.file, section.end)
        except FileNotFoundError:
            return None
        return {
            "file": text,
            "begin": section.begin,
            "rows": section.rows,
            "size": identity.size,
            "digest": identity.digest,
            "now": self.live.now(),
        }

    def _new_section(self, entry: os.DirEntry[str]) -> Section | None:
        """Return the section of a listed file that is to be read; None if there is nothing new."""
        text = text_of(entry.name)
        changed = entry.stat()
        racy = 0 <= time.time() - changed.st_mtime < RACY_SECONDS
        hint = _Hint(changed.st_size, changed.st_mtime_ns, changed.st_ino, racy)
        if self._hints.get(text) in (hint, replace(hint, racy=False)):
            return None
        section = None
        try:
            section = self._inspect(text, changed.st_size)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(text, f"it cannot be read: {error.strerror}", "Correct its rights.", 0)
        if section is None:
            self._hints[text] = hint
        return section

    def _inspect(self, text: str, size: int) -> Section | None:
        """Compare a file with the content that was read; return the section that is new."""
        path = self.source.path(text)
        reader = self.source.reader(name_of(text), self.types)
        begin = 0
        rows = 0
        if text in self.seen:
            identity = FileIdentity.from_json(self.seen[text])
            content = identity.compare(path, size)
            if content == "same":
                return None
            grown = content == "longer" and reader.holds_lines(path)
            if grown and Section(path, identity.size, size).is_blank():
                return None
            if grown:
                begin = identity.size
                rows = identity.rows
            if not self._may_read(text, identity, size, grown=grown):
                return None
        section = Section(path, begin, size, rows)
        if section.is_blank():
            return None
        return self._whole_rows(text, section, reader)

    def _may_read(self, text: str, identity: FileIdentity, size: int, *, grown: bool) -> bool:
        """Return whether a change of a file that was read is to be read.

        If not, it raises, or is left out where the plan has `skips`.
        """
        if grown:
            is_wanted = self.source.grows
        else:
            is_wanted = self.source.replaced == "read"
        if is_wanted:
            return True
        if grown:
            what = f"it has {size} bytes, and {identity.size} of them were read before"
            advice = "Set grows=True to read added lines, or write new rows to a new file"
        else:
            what = f"it holds other content than the {identity.size} bytes that were read"
            advice = "Give new rows a new name, or set replaced='read' to read them"
        self._refuse(text, what, f"{advice}; on_error='skip' leaves them out.", identity.size)
        return False

    def _whole_rows(self, text: str, section: Section, reader: FileSource) -> Section | None:
        """Return the whole rows of a section, without a last line that has no line end."""
        if not reader.holds_lines(section.file):
            return section
        end = reader.rows_end(section, grows=self.source.grows)
        if end == section.end:
            return section
        is_refused = self.plan.skips is None or end == section.begin
        if is_refused and not self.source.grows:
            advice = (
                "End each line, and rename a file when it is whole; grows=True waits for the rest, "
                "on_error='skip' leaves it out."
            )
            self._refuse(text, "its last line has no line end and may be torn", advice, end)
        if end <= section.begin:
            return None
        return replace(section, end=end)

    def _refuse(self, text: str, what: str, advice: str, begin: int) -> None:
        """Raise DataError, or leave out the bytes from `begin` on if the plan has `skips`."""
        message = f"{self.source.path(text)}: {what}"
        if self.plan.skips is None:
            raise DataError(f"{message}. {advice}")
        if self._refused.get(text) == message:
            return
        self._refused[text] = message
        self.plan.skips.add("file", f"{message}; the bytes from {begin} on are left out")
        self.live.dead_letters.add({"file": text, "byte": begin}, "changed", what)

    # --- the current block

    def _is_readable(self, block: dict[str, Any], entry: Mapping[str, Any]) -> bool:
        """Return whether the file of the block has the same content as at the decision.

        A file that failed may have been corrected or removed; the decision is then revised. Any
        other change raises DataError, or the rest of the block is left out if the plan has `skips`.
        """
        path = self.source.path(block["file"])
        identity = FileIdentity(block["size"], block["digest"])
        content = self._content(block)
        if content == "same":
            block["digest"] = identity.digest or FileIdentity.of(path, identity.size).digest
            return True
        if entry.get("failed") and content != "gone":
            size = os.stat(path).st_size
            now = FileIdentity.of(path, size)
            if now.begins_as(identity):
                row = block["rows"] + self.row
                logger.warning("%s was corrected; resuming after its row %d", printable(path), row)
                corrected = {"size": size, "digest": now.digest, "failed": False}
                self.live.journal.revise("block", self.number, {**entry, **corrected})
                block |= {"size": size, "digest": now.digest}
                return True
        if entry.get("failed"):
            logger.warning("%s stopped the stream and was corrected or removed", printable(path))
        else:
            self._refuse_change(block, content)
        self.live.journal.revise("block", self.number, {**block, "now": self.now, "left": True})
        return False

    def _content(self, block: Mapping[str, Any]) -> Content:
        """Compare the file of a block with its content at the decision, up to the block's end."""
        path = self.source.path(block["file"])
        content = FileIdentity(block["size"], block["digest"]).compare(path)
        if content == "longer":
            reader = self.source.reader(name_of(block["file"]), self.types)
            if reader.holds_lines(path):
                return "same"
            return "other"
        return content

    def _refuse_change(self, block: Mapping[str, Any], content: Content) -> None:
        """Refuse the rows of a block whose file changed or was removed."""
        path = self.source.path(block["file"])
        now = "it was removed"
        if content != "gone":
            now = f"it has {os.stat(path).st_size} bytes of other content"
        what = f"it changed before it was read to its end: it had {block['size']} bytes and {now}"
        advice = (
            "Put it back as it was, or use on_error='skip' to leave the rest of it out. Write "
            "files under another name and rename them; remove them after a checkpoint."
        )
        self._refuse(block["file"], what, advice, block["begin"])

    def _batches(self, block: Mapping[str, Any], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the block after `row`, each with its place."""
        text = block["file"]
        section = Section(self.source.path(text), block["begin"], block["size"], block["rows"])
        plan = replace(self.plan, aside=lambda bad: self._put_aside(text, bad))
        self._last_row = section.rows
        try:
            reader = self.source.reader(name_of(text), self.types)
            for whole, numbers in rows_of_section(reader, section, self.row, batch_rows, plan):
                self._last_row = int(numbers[-1])
                rows = self._with_types(whole, reader.inferred)
                placed = rows.append_column(PLACE, _places(text, numbers))
                for start in range(0, placed.num_rows, batch_rows):
                    yield placed.slice(start, batch_rows)
        except DecodeError as error:
            if self.plan.skips is None:
                raise
            self.plan.skips.add("file", f"{error}; the rest of {text} is left out")
            place = {"file": text, "row": self._last_row + 1}
            self.live.dead_letters.add(place, "torn", str(error))
        content = self._content(block)
        if content != "same":
            self._refuse_change(block, content)

    def _with_types(self, rows: pa.RecordBatch, inferred: pa.Schema) -> pa.RecordBatch:
        """Return `rows` with the types that the columns have in all files.

        The first rows decide the types, and the first value that of a column of nulls. The decision
        is in the journal before the rows are yielded.
        """
        types = schema_from_text(self.types)
        if not self.types:
            types = inferred
        if has_open(types):
            types = completed(types, types_of(rows))
        text = schema_to_text(types)
        if text != self.types:
            self.types = text
            self.live.journal.amend("block", self.number, {"types": self.types})
        return with_open_as_null(rows, types)

    def _put_aside(self, text: str, bad: Sequence[BadRow]) -> None:
        """Write bad rows to the dead letters."""
        letters = []
        for row in bad:
            place = {"file": text, "row": row.number}
            letters.append((place, "value", row.content))
        self.live.dead_letters.add_all(letters)


@dataclass(frozen=True)
class _Hint:
    """The state of a file at the last check, without its content; `racy`: it had just changed."""

    size: int
    time: int
    inode: int
    racy: bool


_NO_BLOCK: dict[str, Any] = {"file": None, "begin": 0, "rows": 0, "size": 0, "digest": ""}


def _decision(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decision about a block from a position or the journal, also of older versions."""
    return {key: state.get(key, default) for key, default in _NO_BLOCK.items()}


def _only(values: Mapping[str, T], names: set[str]) -> dict[str, T]:
    """Return the values of these names."""
    return {name: value for name, value in values.items() if name in names}


def _identities(seen: Mapping[str, Any] | Sequence[str]) -> dict[str, list[Any]]:
    """Return the files that were read; positions of older versions hold only names."""
    if isinstance(seen, Mapping):
        return dict(seen)
    return {text: FileIdentity(0, "").to_json() for text in seen}


def _places(text: str, numbers: np.ndarray) -> pa.Array:
    """Return file and row number of each row."""
    zeros = pa.array(np.zeros(len(numbers), np.int8))
    files = pa.DictionaryArray.from_arrays(zeros, [text])
    columns = [files, pa.array(numbers)]
    return pa.StructArray.from_arrays(columns, ["file", "row"])
