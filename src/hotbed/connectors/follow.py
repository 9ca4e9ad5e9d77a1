# SPDX-License-Identifier: Apache-2.0
"""Follow: a directory that files arrive in, as an endless source. Content tells what was read."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotbed.connectors.base import (
    OPENED,
    PLACE,
    READ_ALL,
    READ_ROWS,
    TICK,
    BadRow,
    Position,
    ReadPlan,
    Source,
    schema_from_text,
    schema_to_text,
)
from hotbed.connectors.delimited import Csv, Libsvm
from hotbed.connectors.files import FileSource, Parquet, Section
from hotbed.connectors.identity import Content, Identity, name_of, text_of
from hotbed.connectors.journal import Live
from hotbed.connectors.lines import Jsonl
from hotbed.errors import ConfigError, DataError, DecodeError, printable

logger = logging.getLogger("hotbed.connectors")

RACY_SECONDS = 1.0
"""A file that changed so recently may change again without another time of change."""


@dataclass(frozen=True)
class Follow(Source):
    """A directory that files arrive in, for ever: each is read once, whole, and then the next.

    A file is there when it has its name: write it under one that begins with "." or ends in ".tmp"
    or ".partial", and rename it. For writers that cannot, `settle_seconds` is how long a file must
    not have changed. Which file is next is journalled before it is read. A file may be removed once
    a checkpoint has passed it.

    A file that was read is known by its name, the bytes that were read and a digest of their first
    and last 64 KiB: what was copied, touched or restored is not read again.

    Args:
        directory: Where the files arrive.
        pattern: Names, such as `*.parquet`.
        order: Of files that wait, by "name" or by "time" of change.
        settle_seconds: How long a file must not have changed before it is read.
        format: A source that says how to read (its own path is not used). None = by the ending:
            csv, tsv, jsonl, parquet, svm, also compressed. All files have the types of the first.
        grows: Read whole lines that are added to a file of plain lines. Else they are an error.
        replaced: What other content under a name that was read is: an error ("raise"), or new rows
            ("read").

    Raises:
        DecodeError: A file is torn.
        SchemaError: The columns are not those of the first file.
        DataError: A file changed or vanished before it was read to its end; lines were added, or
            content was replaced, where that is not asked for; a last line has no line end.

    With `on_error="skip"` all but SchemaError are logged, and are dead letters.

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
        if self.order not in ("name", "time"):
            raise ConfigError(f"order: 'name' or 'time' — received {self.order!r} — correct it")
        if self.replaced not in ("raise", "read"):
            raise ConfigError(f"replaced: unknown, got {self.replaced!r}. Give 'raise' or 'read'.")
        if self.format is not None and not isinstance(self.format, FileSource):
            kind = type(self.format).__name__
            choice = "Csv, Jsonl, Libsvm or Parquet"
            raise ConfigError(f"format: not a source of files, got {kind}. Give {choice}.")

    @property
    def endless(self) -> bool:
        return True

    def schema(self) -> pa.Schema:
        """That of the first file that holds something."""
        _, ready = self.listing(time.time())
        for entry in ready:
            if not Section(entry.path).is_blank():
                return self.reader(entry.name, "").schema()
        what = f"no file yet, got none that matches {self.pattern!r}"
        raise DataError(f"{self.directory}: {what}. Put the first one there.")

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        reading = _Reading(self, plan, position)
        while True:
            if not reading.next_block():
                yield TICK, reading.position()
                time.sleep(reading.live.tick_seconds)
                continue
            yield OPENED, reading.position()
            yield from reading.rows(batch_rows)

    def listing(self, now: float) -> tuple[set[str], list[os.DirEntry[str]]]:
        """The names of all files, and the files that do not change any more, in order."""
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
            hidden = entry.name.startswith(".") or entry.name.endswith((".tmp", ".partial"))
            if hidden or not fnmatch.fnmatch(entry.name, self.pattern) or not entry.is_file():
                continue
            try:
                changed = entry.stat()
            except FileNotFoundError:
                continue
            names.add(entry.name)
            if now - changed.st_mtime >= self.settle_seconds or not self.settle_seconds:
                time_of_change = changed.st_mtime_ns if self.order == "time" else 0
                ready.append((time_of_change, entry.name, entry))
        return names, [entry for _, _, entry in sorted(ready, key=lambda item: item[:2])]

    def path(self, text: str) -> str:
        """The path of a file, named as in a position."""
        return os.path.join(self.directory, name_of(text))

    def reader(self, name: str, types: str) -> FileSource:
        """What reads a file, with the types of the first one."""
        path = os.path.join(self.directory, name)
        stem = re.sub(r"\.(gz|zst|bz2|lz4)$", "", name.lower())
        kinds: dict[str, FileSource] = {
            ".csv": Csv(path),
            ".tsv": Csv(path, delimiter="\t"),
            ".jsonl": Jsonl(path),
            ".ndjson": Jsonl(path),
            ".parquet": Parquet(path),
            ".pq": Parquet(path),
            ".svm": Libsvm(path),
            ".libsvm": Libsvm(path),
        }
        kind = self.format or kinds.get(os.path.splitext(stem)[1])
        if kind is None:
            raise ConfigError(
                f"format: the ending of a name in {self.directory} tells no format, got "
                f"{text_of(name)!r}. Give `format`, or a `pattern` that leaves it out."
            )
        source: Any = replace(kind, path=path)  # type: ignore[type-var]
        if types:
            object.__setattr__(source, "_schema", schema_from_text(types))
        assert isinstance(source, FileSource)
        return source


class _Reading:
    """One reading of a followed directory: what was read, and the block at hand.

    A block is a section of a file. Its decision on record is {file, begin, rows, size, digest,
    now}: bytes `begin` to `size`, before which lie `rows` rows, and the digest of the bytes before
    `size`. "failed": its rows could not be used, so that the file may be corrected. "left": the
    rest of it is not read.
    """

    def __init__(self, source: Follow, plan: ReadPlan, position: Position | None) -> None:
        state = dict(position.state) if position else {}
        self.source = source
        self.plan = plan
        self.live = plan.live or Live()
        self.number: int = state.get("block", 0)
        self.now: int = state.get("now", 0)
        self.types: str = state.get("schema", "")
        self.seen = _identities(state.get("seen", {}))  # by name; replaced, never changed
        self._incomplete = {text for text, (_, digest, _) in self.seen.items() if not digest}
        self.row: int = state.get("row", 0)  # rows of the block that were handed out
        self.block: dict[str, Any] | None = None
        if state.get("file") is not None:
            self.block = _decision(state)
        self._last_row = 0  # number of the last row that was read, in its file
        self._ready: deque[os.DirEntry[str]] = deque()  # not looked at since they were listed
        self._hints: dict[str, _Hint] = {}  # of files that hold nothing to read
        self._refused: dict[str, str] = {}  # what was logged of files that changed

    def position(self) -> Position:
        """After `row` rows of the block at hand."""
        return Position(
            {
                "block": self.number,
                **(self.block or _NO_BLOCK),
                "row": self.row,
                "seen": self.seen,
                "now": self.now,
                "schema": self.types,
            }
        )

    def next_block(self) -> bool:
        """Whether there is a block to read. It is on record when this returns, and can be read."""
        while True:
            entry = self.live.journal.get("block", self.number)
            if entry is None and self.block is None:
                entry = self._choose()
            elif entry is None and self.block is not None:
                entry = {**self.block, "now": self.now}  # a position that came without its journal
                if self.live.journal.last("block") < self.number:
                    self.live.journal.append("block", self.number, entry)
            if entry is not None:
                self.block = _decision({**(self.block or {}), **entry})
                self.now = entry["now"]
            if self.block is None:
                return False
            left = entry is not None and entry.get("left", False)
            if not left and self._is_readable(self.block, entry or {}):
                return True
            self._end_block()

    def rows(self, batch_rows: int) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """The rest of the block at hand; the last position is the one before the next block."""
        assert self.block is not None
        last = TICK
        for batch in self._batches(self.block, batch_rows):
            if last.num_rows:
                self.row += last.num_rows
                yield last, self.position()
            last = batch
        identity = Identity(self.block["size"], self.block["digest"], self._last_row)
        self.seen = {**self.seen, self.block["file"]: identity.to_json()}
        self._end_block()
        yield last, self.position()

    def _end_block(self) -> None:
        self.number += 1
        self.block = None
        self.row = 0

    # --- which file is next

    def _choose(self) -> dict[str, Any] | None:
        """The next section to read, put on record; None where there is none."""
        if not self._ready:
            self._list()
        while self._ready:
            entry = self._ready.popleft()
            section = self._new_section(entry)
            if section is not None:
                self.live.lag = None
                return self._record(text_of(entry.name), section)
        self.live.lag = 0
        return None

    def _list(self) -> None:
        """The files that are there now, in order; they are listed anew when all were looked at."""
        names, ready = self.source.listing(self.live.clock())
        present = {text_of(name) for name in names}
        if not self.seen.keys() <= present:  # those that were removed need not be remembered
            self.seen = {text: value for text, value in self.seen.items() if text in present}
            self._hints = {text: hint for text, hint in self._hints.items() if text in present}
        self._complete()
        self._ready = deque(ready)

    def _complete(self) -> None:
        """Give names that come from a position of an older version the digest of what is there."""
        incomplete = self._incomplete & self.seen.keys()
        self._incomplete = set()
        for text in incomplete:
            path = self.source.path(text)
            try:
                identity = Identity.of(path, os.stat(path).st_size)
            except OSError:
                self._incomplete.add(text)
                continue
            self.seen = {**self.seen, text: identity.to_json()}

    def _record(self, text: str, section: Section) -> dict[str, Any] | None:
        assert section.end is not None
        try:
            identity = Identity.of(section.file, section.end)
        except FileNotFoundError:
            return None
        decision = {
            "file": text,
            "begin": section.begin,
            "rows": section.rows,
            "size": identity.size,
            "digest": identity.digest,
            "now": self.live.now(),
        }
        self.live.journal.append("block", self.number, decision)
        return decision

    def _new_section(self, entry: os.DirEntry[str]) -> Section | None:
        """What is to be read of a file that is there; None for nothing."""
        text = text_of(entry.name)
        changed = entry.stat()
        racy = 0 <= time.time() - changed.st_mtime < RACY_SECONDS
        hint = _Hint(changed.st_size, changed.st_mtime_ns, changed.st_ino, racy)
        if self._hints.get(text) in (hint, replace(hint, racy=False)):
            return None
        section = None
        try:
            section = self._look(text, changed.st_size)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(text, f"it cannot be read: {error.strerror}", "Correct its rights.", 0)
        if section is None:
            self._hints[text] = hint
        return section

    def _look(self, text: str, size: int) -> Section | None:
        path = self.source.path(text)
        reader = self.source.reader(name_of(text), self.types)
        begin = 0
        rows = 0
        if text in self.seen:
            identity = Identity.from_json(self.seen[text])
            content = identity.compare(path, size)
            grown = content == "longer" and reader.holds_lines(path)
            if content == "same" or (grown and Section(path, identity.size, size).is_blank()):
                return None
            if grown:
                begin = identity.size
                rows = identity.rows
            if not self._may_read(text, identity, size, grown=grown):
                return None
        section = Section(path, begin, size, rows)
        return None if section.is_blank() else self._whole_rows(text, section, reader)

    def _may_read(self, text: str, identity: Identity, size: int, *, grown: bool) -> bool:
        """Whether a change of a file that was read is to be read; an error if not, or left out."""
        if self.source.grows if grown else self.source.replaced == "read":
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
        """The whole rows of a section. A last line without its end may be torn, and is not read."""
        end = reader.rows_end(section) if reader.holds_lines(section.file) else section.end
        if end is None or end == section.end:
            return section
        if not self.source.grows and (self.plan.skips is None or end == section.begin):
            advice = (
                "End each line, and rename a file when it is whole; grows=True waits for the rest, "
                "on_error='skip' leaves it out."
            )
            self._refuse(text, "its last line has no line end and may be torn", advice, end)
        return replace(section, end=end) if end > section.begin else None

    def _refuse(self, text: str, what: str, advice: str, begin: int) -> None:
        """Rows from byte `begin` on are not read: an error, or left out where the plan says so."""
        message = f"{self.source.path(text)}: {what}"
        if self.plan.skips is None:
            raise DataError(f"{message}. {advice}")
        if self._refused.get(text) == message:
            return
        self._refused[text] = message
        self.plan.skips.add("file", f"{message}; the bytes from {begin} on are left out")
        self.live.dead_letters.add({"file": text, "byte": begin}, "changed", what)

    # --- the block at hand

    def _is_readable(self, block: dict[str, Any], entry: Mapping[str, Any]) -> bool:
        """Whether the block can be read: its file holds what it held when the decision was taken.

        A file that failed may have been corrected or removed; then the decision is revised. Any
        other change is a DataError, or the rest of the block is left out where the plan says so.
        """
        path = self.source.path(block["file"])
        identity = Identity(block["size"], block["digest"])
        content = self._content(block)
        if content == "same":
            block["digest"] = identity.digest or Identity.of(path, identity.size).digest
            return True
        if entry.get("failed") and content != "gone":
            size = os.stat(path).st_size
            now = Identity.of(path, size)
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
        """What the file of a block holds now, as far as the block goes."""
        path = self.source.path(block["file"])
        content = Identity(block["size"], block["digest"]).compare(path)
        if content == "longer":
            reader = self.source.reader(name_of(block["file"]), self.types)
            return "same" if reader.holds_lines(path) else "other"
        return content

    def _refuse_change(self, block: Mapping[str, Any], content: Content) -> None:
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
        """The rows of the block after `row`, each with its place."""
        text = block["file"]
        section = Section(self.source.path(text), block["begin"], block["size"], block["rows"])
        plan = replace(self.plan, aside=lambda bad: self._put_aside(text, bad))
        self._last_row = section.rows
        try:
            reader = self.source.reader(name_of(text), self.types)
            self.types = self.types or schema_to_text(reader.schema())
            for whole, numbers in reader.read_file(section, self.row, batch_rows, plan):
                self._last_row = int(numbers[-1])
                placed = whole.append_column(PLACE, _places(text, numbers))
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

    def _put_aside(self, text: str, bad: Sequence[BadRow]) -> None:
        letters = [({"file": text, "row": number}, "value", payload) for number, payload in bad]
        self.live.dead_letters.add_all(letters)


@dataclass(frozen=True)
class _Hint:
    """How a file was at the last look, without its content; `racy`: it had just changed then."""

    size: int
    time: int
    inode: int
    racy: bool


_NO_BLOCK: dict[str, Any] = {"file": None, "begin": 0, "rows": 0, "size": 0, "digest": ""}


def _decision(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a position or the journal says of a block; those of older versions say less."""
    return {key: state.get(key, default) for key, default in _NO_BLOCK.items()}


def _identities(seen: Mapping[str, Any] | Sequence[str]) -> dict[str, list[Any]]:
    """The files that were read; positions of older versions hold names only."""
    if isinstance(seen, Mapping):
        return dict(seen)
    return {text: Identity(0, "").to_json() for text in seen}


def _places(text: str, numbers: np.ndarray) -> pa.Array:
    file = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(numbers), np.int8)), [text])
    return pa.StructArray.from_arrays([file, pa.array(numbers)], ["file", "row"])
