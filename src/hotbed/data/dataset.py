# SPDX-License-Identifier: Apache-2.0
"""Dataset: what users hand over. Batches of a source, shuffled if asked, read and encoded ahead, resumable at any batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from hotbed.connectors.base import READ_ROWS, Position, ReadPlan, Skips, Source
from hotbed.data.batch import Batch
from hotbed.data.encode import Encoder
from hotbed.data.schema import Dense, Label, Schema, Weight
from hotbed.data.transforms import Extract, Map
from hotbed.errors import ConfigError, DecodeError

T = TypeVar("T")
Encoded = tuple[Batch, Position | None]
"""Encoded rows and the source's position BEFORE them."""


@dataclass(frozen=True)
class _Buffer:
    """Rows in the order of emission, and where they came from: `skip` encoded rows after the source position `start`."""

    rows: Batch
    start: Position | None
    skip: int
    index: int


class Dataset:
    """Iterable of `Batch`; the first iteration is epoch 0, the next epoch 1, and so on.

    `shuffle`: rows of the shuffle buffer (0 = off); order is a function of (seed, epoch), memory is bounded by the buffer. `drop_last`:
    leave out a last batch of fewer than `batch_size` rows. `on_error`: "raise", or "skip" = bad rows and torn files are left
    out, counted in `skips` and logged. `prefetch`: batches read and encoded ahead on a thread (0 = none). `cache`: keep
    the encoded rows in memory after the first reading; then a shuffle is of the whole epoch.

    Raises SchemaError, DecodeError while iterating, ConfigError for wrong arguments.

    Example:
        >>> for batch in hb.Dataset(hb.sources.Csv("train.csv"), schema, batch_size=1024, shuffle=100_000):
        ...     train_on(batch)
    """

    def __init__(
        self, source: Source, schema: Schema, batch_size: int = 1024, shuffle: int = 0, seed: int = 0, drop_last: bool = False,
        on_error: str = "raise", prefetch: int = 2, cache: bool = False,
    ) -> None:  # fmt: skip
        for name, value, least in (("batch_size", batch_size, 1), ("shuffle", shuffle, 0), ("prefetch", prefetch, 0)):
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"dataset.{name}: an integer >= {least} — received {value!r} — correct it")
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"dataset.on_error: 'raise' or 'skip' — received {on_error!r} — correct it")
        self.source, self.schema = source, schema
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.drop_last, self.on_error, self.prefetch, self.cache = drop_last, on_error, prefetch, cache
        self.skips = Skips()
        self._maps: tuple[Callable[[Batch], Batch], ...] = ()
        self._next_epoch = 0
        self._resume: Position | None = None
        self._position = Position({"epoch": 0, "source": None, "skip": 0, "buffer": 0, "emitted": 0})
        self._cached: Batch | None = None
        self._num_rows: int | None = None

    @property
    def position(self) -> Position:
        """Where iteration is: after the last batch handed out."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(self._next_epoch)

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of epoch `number`, or the rest of it after `resume`."""
        resume, self._resume = self._resume, None
        start = resume if resume is not None and resume["epoch"] == number else None
        self._next_epoch = number + 1
        return self._run(number, start)

    def resume(self, position: Position | Mapping[str, Any] | str) -> Dataset:
        """Makes the next iteration go on after `position` (of this dataset's or an equal one's batch). Returns itself."""
        self._resume = self._position = Position.from_json(position)
        self._next_epoch = int(self._resume["epoch"])
        return self

    def map(self, fn: Callable[[Batch], Batch]) -> Dataset:
        """A dataset of `fn(batch)`; `fn` runs on the reading thread."""
        other = Dataset(self.source, self.schema, self.batch_size, self.shuffle, self.seed, self.drop_last,
                        self.on_error, self.prefetch, self.cache)  # fmt: skip
        other._maps = (*self._maps, fn)
        return other

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch where that is known: from the source, or after a whole epoch."""
        return self._num_rows if self._num_rows is not None else self.source.num_rows()

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch where that is known."""
        rows = self.num_rows
        if rows is None:
            return None
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __len__(self) -> int:
        known = self.num_batches
        if known is None:
            raise TypeError("the number of batches is not known before a whole epoch was read; use num_batches, which may be None")
        return known

    def __bool__(self) -> bool:
        return True

    def _run(self, epoch: int, start: Position | None) -> Iterator[Batch]:
        self._position = start or Position({"epoch": epoch, "source": None, "skip": 0, "buffer": 0, "emitted": 0})
        batches = self._batches(epoch, start)
        if self.prefetch:
            batches = run_ahead(batches, self.prefetch)
        try:
            for batch in batches:
                assert batch.position is not None
                self._position = batch.position
                yield batch
        finally:
            batches.close()

    def _batches(self, epoch: int, start: Position | None) -> Generator[Batch, None, None]:
        """Buffers cut into batches; a batch may span buffers."""
        parts: list[Batch] = []
        missing = self.batch_size
        emitted = int(start["emitted"]) if start is not None else 0
        for buffer in self._buffers(epoch, start):
            size = buffer.rows.num_samples
            row, emitted = emitted, 0
            while row < size:
                taken = min(missing, size - row)
                parts.append(buffer.rows[row : row + taken])
                row, missing = row + taken, missing - taken
                state = {"epoch": epoch, "source": buffer.start and buffer.start.to_json(), "skip": buffer.skip,
                         "buffer": buffer.index, "emitted": row}  # fmt: skip
                if missing == 0:
                    yield self._finish(parts, Position(state))
                    parts, missing = [], self.batch_size
        if parts and not self.drop_last:
            yield self._finish(parts, Position(state))

    def _finish(self, parts: list[Batch], position: Position) -> Batch:
        batch = Batch.concat(parts).at(position)
        for fn in self._maps:
            batch = fn(batch)
        return batch

    def _buffers(self, epoch: int, start: Position | None) -> Iterator[_Buffer]:
        if self.cache:
            yield from self._cached_buffers(epoch, start)
            return
        source_position = Position.from_json(start["source"]) if start is not None and start["source"] else None
        skip, index = (int(start["skip"]), int(start["buffer"])) if start is not None else (0, 0)
        chunks = self._encoded(source_position)
        if not self.shuffle:
            for rows, before in chunks:
                if skip >= rows.num_samples > 0:
                    skip -= rows.num_samples
                    continue
                yield _Buffer(rows[skip:] if skip else rows, before, skip, 0)
                skip = 0
            return
        yield from self._shuffled(chunks, epoch, index, skip)

    def _shuffled(self, chunks: Iterator[Encoded], epoch: int, index: int, skip: int) -> Iterator[_Buffer]:
        """Buffers of `shuffle` rows, each permuted by (seed, epoch, its number). The first is shorter by a random part, so that
        buffers of different epochs do not hold the same rows."""
        held: list[Encoded] = []
        num_held = -skip
        for chunk in chunks:
            held.append(chunk)
            num_held += chunk[0].num_samples
            while num_held >= self._buffer_rows(epoch, index):
                size = self._buffer_rows(epoch, index)
                buffer, skip = self._permuted(held, skip, size, epoch, index)
                yield buffer
                index, num_held = index + 1, num_held - size
        if num_held > 0:
            yield self._permuted(held, skip, num_held, epoch, index)[0]

    def _permuted(self, held: list[Encoded], skip: int, size: int, epoch: int, index: int) -> tuple[_Buffer, int]:
        """The next `size` rows of `held` after `skip`, permuted; removes used chunks from `held`; returns the new skip."""
        while held and skip >= held[0][0].num_samples:
            skip -= held.pop(0)[0].num_samples
        start, first, parts, need = held[0][1], skip, [], size
        while need:
            rows = held[0][0]
            taken = min(need, rows.num_samples - skip)
            parts.append(rows[skip : skip + taken])
            need, skip = need - taken, skip + taken
            if skip == rows.num_samples and need:
                held.pop(0)
                skip = 0
        order = np.random.default_rng((self.seed, epoch, index)).permutation(size)
        return _Buffer(Batch.concat(parts).take(order), start, first, index), skip

    def _buffer_rows(self, epoch: int, index: int) -> int:
        if index or self.shuffle == 1:
            return self.shuffle
        return int(np.random.default_rng((self.seed, epoch)).integers(self.shuffle // 2 + 1, self.shuffle + 1))

    def _cached_buffers(self, epoch: int, start: Position | None) -> Iterator[_Buffer]:
        if self._cached is None:
            chunks = [rows for rows, _ in self._encoded(None)]
            self._cached = Batch.concat(chunks) if chunks else Batch(num_samples=0)
        rows = self._cached
        order = np.random.default_rng((self.seed, epoch)).permutation(rows.num_samples) if self.shuffle else None
        first = int(start["skip"]) if start is not None else 0
        for at in range(first, rows.num_samples, READ_ROWS):
            stop = min(at + READ_ROWS, rows.num_samples)
            yield _Buffer(rows[at:stop] if order is None else rows.take(order[at:stop]), None, at, 0)

    def _encoded(self, position: Position | None) -> Iterator[Encoded]:
        """Every chunk of the source after `position`, encoded."""
        skips = self.skips if self.on_error == "skip" else None
        encoder = Encoder(self.schema, self.on_error)
        encoder.stats.skips = self.skips
        plan = ReadPlan(tuple(self.schema.raw_columns()), number_types(self.schema), skips)
        num_rows, whole = 0, position is None
        chunk_rows = max(self.batch_size, min(READ_ROWS, self.shuffle or READ_ROWS))
        before = position
        for raw, after in self.source.read(position, chunk_rows, plan):
            try:
                rows = encoder(raw)
            except DecodeError as error:
                raise self._located(error, raw, after) from error
            num_rows += rows.num_samples
            yield rows, before
            before = after
        if whole:
            self._num_rows = num_rows

    def _located(self, error: DecodeError, raw: pa.RecordBatch, after: Position) -> DecodeError:
        file, row = self.source.locate(after, raw.num_rows - (error.row or 1) + 1)
        where = f"{file}, line {row}: " if file else ""
        return DecodeError(f"{where}{error}", file, row, error.column)


def number_types(schema: Schema) -> dict[str, pa.DataType]:
    """Raw columns that are read only as numbers: text sources parse them as floats whatever the first rows look like."""
    numbers: dict[str, bool] = {}
    for column in schema.columns:
        text = isinstance(column, Label) and column.positive is not None
        text = text or (isinstance(column, Dense) and bool(column.transforms) and isinstance(column.transforms[0], (Extract, Map)))
        fits = isinstance(column, (Label, Weight, Dense)) and not text
        numbers[column.source] = fits and numbers.get(column.source, True)
        for transform in getattr(column, "transforms", ()):
            numbers.update(dict.fromkeys(transform.inputs(), False))
    return {name: pa.float64() for name, fits in numbers.items() if fits}


class _End:
    """The last thing in the queue: the iterator ended, by `error` or well."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def run_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yields `items`, at most `depth` of them made ahead. Closing the generator stops the thread and waits for it."""
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: T | _End) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(_End())
        except BaseException as error:  # handed to the consumer, which raises it
            put(_End(error))

    thread = threading.Thread(target=work, name="hotbed-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        while not ready.empty():  # a producer that waits for room sees the stop at once
            ready.get_nowait()
        thread.join()
