# SPDX-License-Identifier: Apache-2.0
"""Paths and globs, positions inside a list of files, parquet, and a directory that files arrive in."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.connectors.base import (
    OPENED,
    PLACE,
    READ_ALL,
    READ_ROWS,
    TICK,
    Place,
    Position,
    ReadPlan,
    Source,
    cut,
    schema_from_text,
    schema_to_text,
)
from hotbed.connectors.journal import Live
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def expand(path: Paths) -> list[str]:
    """Files named by `path`: a file, a glob (sorted; `**` recurses) or a list of both. Raises DataError if one matches
    nothing."""
    if isinstance(path, (str, os.PathLike)):
        path = [path]
    found: list[str] = []
    for item in path:
        text = os.fspath(item)
        matches = [text] if os.path.isfile(text) else sorted(filter(os.path.isfile, glob.glob(text, recursive=True)))
        if not matches:
            raise DataError(
                f"no file to read — {text!r} matches nothing — check the path (a folder needs a glob: 'folder/*')"
            )
        found += matches
    return found


class FileSource(Source):
    """A list of files of one format, read one after another; the position is the file and the rows of it already
    read."""

    path: Paths

    def files(self) -> list[str]:
        """The files in reading order."""
        return expand(self.path)

    @abstractmethod
    def read_file(self, file: str, skip_rows: int, batch_rows: int, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
        """Batches of one file after its first `skip_rows` rows, cast to `schema()`. Raises DecodeError."""

    def locate(self, position: Position, back: int) -> Place:
        return self.place(self.files()[int(position["file"])], int(position["row"]) - back)

    def place(self, file: str, row: int) -> Place:
        """The row of a file that follows `row` others."""
        return Place(file, row + 1)

    def read(
        self, position: Position | None = None, batch_rows: int = READ_ROWS, plan: ReadPlan = READ_ALL
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        files = self.files()
        first, row = self._start(files, position)
        for index in range(first, len(files)):
            name = os.path.basename(files[index])
            try:
                for whole in self.read_file(files[index], row, batch_rows, plan):
                    for batch in cut(whole, batch_rows):
                        row += batch.num_rows
                        yield batch, Position({"file": index, "name": name, "row": row})
            except DecodeError as error:
                if plan.skips is None:
                    raise
                plan.skips.add("file", f"{error}; the rest of {files[index]} is left out")
            row = 0

    def _start(self, files: list[str], position: Position | None) -> tuple[int, int]:
        if position is None:
            return 0, 0
        index, name = int(position["file"]), position["name"]
        if index >= len(files) or os.path.basename(files[index]) != name:
            raise DataError(
                f"cannot resume — file {index} was {name!r} and is now "
                f"{os.path.basename(files[index]) if index < len(files) else 'absent'!r} — put the files back in "
                "the same order"
            )
        return index, int(position["row"])


@dataclass(frozen=True)
class Parquet(FileSource):
    """Parquet files; `path` is a file, a glob or a list. Only the columns that a schema needs are read.

    Raises DecodeError (file) for a torn file, SchemaError when a file lacks a column of the first one.

    Example: `hb.sources.Parquet("events/day=*/part-*.parquet")`
    """

    path: Paths

    def schema(self) -> pa.Schema:
        cached: pa.Schema | None = self.__dict__.get("_schema")
        return _open(self.files()[0]).schema_arrow.remove_metadata() if cached is None else cached

    def num_rows(self) -> int:
        return sum(_open(file).metadata.num_rows for file in self.files())

    def read_file(self, file: str, skip_rows: int, batch_rows: int, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
        parquet = _open(file)
        wanted = self.schema()
        if plan.columns is not None:
            wanted = pa.schema([column for column in wanted if column.name in plan.columns])
        groups: list[int] = []
        skip = skip_rows
        for group in range(parquet.metadata.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if not groups and skip >= rows:
                skip -= rows
            else:
                groups.append(group)
        done = skip_rows - skip
        try:
            for batch in parquet.iter_batches(batch_rows, row_groups=groups, columns=wanted.names):
                done += batch.num_rows
                dropped, skip = min(skip, batch.num_rows), max(0, skip - batch.num_rows)
                if batch.num_rows > dropped:
                    yield _conform(batch.slice(dropped), wanted, file)
        except (pa.ArrowException, OSError) as error:
            raise DecodeError(
                f"{file}: torn or damaged parquet after row {done} — {_first_line(error)} — write the file again or "
                "leave it out",
                file,
                done + 1,
            ) from error


def _open(file: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise DecodeError(
            f"{file}: not a whole parquet file — {_first_line(error)} — write the file again or leave it out", file
        ) from error


def _conform(batch: pa.RecordBatch, wanted: pa.Schema, file: str) -> pa.RecordBatch:
    """`batch` with exactly the columns and types of `wanted` (those of the first file)."""
    if batch.schema.equals(wanted):
        return batch
    missing = [name for name in wanted.names if name not in batch.schema.names]
    if missing:
        raise SchemaError(
            f"{file}: columns {missing} are absent — the first file has {wanted.names} — give all files one set of "
            "columns"
        )
    try:
        return pa.RecordBatch.from_arrays(
            [batch.column(field.name).cast(field.type) for field in wanted], schema=wanted
        )
    except pa.ArrowException as error:
        raise SchemaError(
            f"{file}: its types differ from the first file's — {_first_line(error)} — write all files with one schema"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Follow(Source):
    """A directory that files arrive in, for ever: each is read once, whole, and then the next.

    A file is there when it has its name: write it under one that begins with "." or ends in ".tmp" or ".partial", and
    rename it. For writers that cannot, `settle_seconds` is how long a file must not have changed. Which file is next is
    journalled before it is read. `pattern`: names, such as "*.parquet". `order`: of files that wait, by "name" or by
    "time" of change. `format`: a source that says how to read (its own path is not used); None = by the ending: csv,
    tsv, jsonl, parquet, svm, also compressed. All files are read with the types of the first. A file may be removed once
    a checkpoint has passed it.

    Raises DecodeError for a torn file (with `on_error="skip"` the rest of it is a dead letter), SchemaError for columns
    that are not those of the first file, DataError when a file changes or vanishes before it was read to its end.

    Example: `hb.sources.Follow("/data/incoming", "*.jsonl.gz")`
    """

    directory: str | Path
    pattern: str = "*"
    order: Literal["name", "time"] = "name"
    settle_seconds: float = 0.0
    format: Source | None = None

    def __post_init__(self) -> None:
        if self.order not in ("name", "time"):
            raise ConfigError(f"order: 'name' or 'time' — received {self.order!r} — correct it")
        if self.format is not None and not isinstance(self.format, FileSource):
            kind = type(self.format).__name__
            raise ConfigError(f"format: a source of files — received {kind} — give csv, jsonl, libsvm or parquet")

    @property
    def endless(self) -> bool:
        return True

    def schema(self) -> pa.Schema:
        """That of the first file that is there."""
        waiting = self._there(time.time())
        if not waiting:
            raise DataError(
                f"{self.directory}: no file yet — {self.pattern!r} matches nothing — put the first one there"
            )
        return self._source(waiting[0], "").schema()

    def read(
        self, position: Position | None = None, batch_rows: int = READ_ROWS, plan: ReadPlan = READ_ALL
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        live = plan.live or Live()
        state: dict[str, Any] = {"block": 0, "file": None, "size": 0, "row": 0, "seen": (), "now": 0, "schema": ""}
        state |= position.state if position else {}
        while True:
            if state["file"] is None:
                found = live.journal.get("block", state["block"]) or self._choose(state, live)
                if found is None:
                    yield TICK, Position(dict(state))
                    time.sleep(live.tick_seconds)
                    continue
                state |= found
                yield OPENED, Position(dict(state))
            last = None
            for batch in self._rows(state, batch_rows, plan, live):
                if last is not None:
                    state["row"] += last.num_rows
                    yield last, Position(dict(state))
                last = batch
            seen = (*state["seen"], state["file"])
            state |= {"block": state["block"] + 1, "file": None, "size": 0, "row": 0, "seen": seen}
            yield (TICK if last is None else last), Position(dict(state))

    def _choose(self, state: dict[str, Any], live: Live) -> dict[str, Any] | None:
        """The file to read next and its size, put on record; None where there is none."""
        there = self._there(live.clock())
        present, seen = set(there), set(state["seen"])
        if not seen <= present:  # those that were removed need not be remembered
            state["seen"] = tuple(name for name in state["seen"] if name in present)
        waiting = [name for name in there if name not in seen]
        live.lag = None if waiting else 0
        size = self._size(waiting[0]) if waiting else None
        if size is None:
            return None
        found = {"file": waiting[0], "size": size, "now": live.now()}
        live.journal.append("block", state["block"], found)
        return found

    def _there(self, now: float) -> list[str]:
        """Names of the files that are there, in order."""
        names: list[tuple[int, str]] = []
        try:
            entries = list(os.scandir(self.directory))
        except OSError as error:
            raise DataError(
                f"cannot follow {os.fspath(self.directory)!r} — {error.strerror} — make the directory, or correct its path or rights"
            ) from error
        for entry in entries:
            hidden = entry.name.startswith(".") or entry.name.endswith((".tmp", ".partial"))
            if hidden or not fnmatch.fnmatch(entry.name, self.pattern) or not entry.is_file():
                continue
            changed = entry.stat() if self.order == "time" or self.settle_seconds else None
            if changed is None or now - changed.st_mtime >= self.settle_seconds:
                names.append((changed.st_mtime_ns if changed and self.order == "time" else 0, entry.name))
        return [name for _, name in sorted(names)]

    def _rows(self, state: dict[str, Any], batch_rows: int, plan: ReadPlan, live: Live) -> Iterator[pa.RecordBatch]:
        """The rows of the file at hand after `row`, each with its place."""
        name, row = state["file"], state["row"]
        self._check_size(name, state["size"])
        try:
            source = self._source(name, state["schema"])
            state["schema"] = state["schema"] or schema_to_text(source.schema())
            for whole in source.read_file(os.path.join(self.directory, name), row, batch_rows, plan):
                for batch in cut(whole, batch_rows):
                    file = pa.DictionaryArray.from_arrays(pa.array(np.zeros(batch.num_rows, np.int8)), [name])
                    rows = pa.array(np.arange(row + 1, row + 1 + batch.num_rows))
                    place = pa.StructArray.from_arrays([file, rows], ["file", "row"])
                    yield batch.append_column(PLACE, place)
                    row += batch.num_rows
        except DecodeError as error:
            if plan.skips is None:
                raise
            plan.skips.add("file", f"{error}; the rest of {name} is left out")
            live.dead_letters.add({"file": name, "row": row + 1}, "torn", str(error))
        self._check_size(name, state["size"])

    def _source(self, name: str, types: str) -> FileSource:
        """What reads a file, with the types of the first one."""
        from hotbed.connectors.delimited import Csv, Libsvm
        from hotbed.connectors.lines import Jsonl

        path = os.path.join(self.directory, name)
        stem = re.sub(r"\.(gz|zst|bz2|lz4)$", "", name.lower())
        kinds: dict[str, FileSource] = {
            ".csv": Csv(path), ".tsv": Csv(path, delimiter="\t"), ".jsonl": Jsonl(path), ".ndjson": Jsonl(path),
            ".parquet": Parquet(path), ".pq": Parquet(path), ".svm": Libsvm(path), ".libsvm": Libsvm(path),
        }  # fmt: skip
        kind = self.format or kinds.get(os.path.splitext(stem)[1])
        if kind is None:
            raise ConfigError(
                f"format: the ending of {path} tells no format — received {name!r} — give `format`, or a `pattern` that "
                "leaves it out"
            )
        source: Any = replace(kind, path=path)  # type: ignore[type-var]
        if types:
            object.__setattr__(source, "_schema", schema_from_text(types))
        assert isinstance(source, FileSource)
        return source

    def _size(self, name: str) -> int | None:
        try:
            return os.stat(os.path.join(self.directory, name)).st_size
        except FileNotFoundError:
            return None

    def _check_size(self, name: str, size: int) -> None:
        now = self._size(name)
        if now != size:
            what = "was removed" if now is None else f"has {now} bytes"
            raise DataError(
                f"{os.path.join(self.directory, name)}: it changed before it was read to its end — it had {size} bytes "
                f"and {what} — write files under another name and rename them; remove them after a checkpoint"
            )
