# SPDX-License-Identifier: Apache-2.0
"""Dataset: batches of a source, optionally shuffled, prefetched, resumable at any batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa

from hotbed import checks
from hotbed.connectors.endings import check_source
from hotbed.connectors.live import Live
from hotbed.connectors.position import OPENED, Position, decisions_of, is_preview
from hotbed.connectors.read_ahead import ReadAhead
from hotbed.connectors.read_plan import NO_WISHES, READ_ROWS, JoinWishes, ReadPlan, Skips
from hotbed.connectors.source import Source
from hotbed.connectors.status import SourceStatus
from hotbed.data.arrow_types import Shape, Type
from hotbed.data.bad_rows import dead_letters, located
from hotbed.data.batch import Batch, BatchSlice, changed, joined
from hotbed.data.encode import Encoder
from hotbed.data.grains import (
    Cut,
    Lane,
    RowRuns,
    Tally,
    cut_epoch,
    cut_runs,
    ends_of,
    ranges_of,
    shared_batch,
)
from hotbed.data.numbers import check_matched, warn_constant, with_unit_labels
from hotbed.data.order import (
    Buffer,
    CachedRows,
    Encoded,
    ShuffledBuffers,
    cached,
    place_at,
    random_of,
    source_position,
    unshuffled,
)
from hotbed.data.places import (
    TimeLimit,
    begins_at,
    check_begin,
    check_grains,
    check_layout,
    check_position,
)
from hotbed.data.previews import encoded_preview, mapped_batch, with_previews
from hotbed.data.schema import Schema, check_schema
from hotbed.data.source_rows import SourceRows, raw_types, require_from
from hotbed.data.stream import Block, StreamCuts, check_stream_arguments, without_ticks
from hotbed.errors import DataError, DecodeError, SchemaError


class Dataset:
    """Iterable of `Batch`; the first iteration is epoch 0, the next epoch 1, and so on.

    `shuffle`: rows of the shuffle buffer (0 = off). The order is a function of (seed, epoch), and
    memory is bounded by the buffer. `drop_last`: leave out a last batch of fewer than `batch_size`
    rows. `on_error`: "raise", or "skip" to leave out bad rows and torn files, which are counted in
    `skips` and logged. `prefetch`: batches read and encoded ahead on a thread (0 = none). `cache`:
    keep the encoded rows in memory after the first reading; then the whole epoch is shuffled.

    An endless source has one epoch, in the order of the source. `flush_seconds`: after this time
    without a new row, the pending rows become a batch, even if there are fewer than `batch_size`
    (None = wait for `batch_size`). `max_ahead_seconds`: rows whose event time lies further ahead of
    the clock are left out, and those of an endless source become dead letters. For a source that
    ends, the clock of the first reading counts, also after a resume. None = rows that are learned
    may lie before the end of the next day (UTC); of a source that ends, later ones are bad rows.
    Predictions have no limit. `live` holds the journal, the
    dead letters and the clock; assign your own before reading. `status` says what the source knows.
    `reading` has the batches that the thread of the newest iteration has read ahead.

    Raises SchemaError and DecodeError while iterating, and ConfigError for wrong arguments.

    Example:
        >>> source = hb.sources.Csv("train.csv")
        >>> for batch in hb.Dataset(source, schema, batch_size=1024, shuffle=100_000):
        ...     train_on(batch)
    """

    def __init__(
        self,
        source: Source,
        schema: Schema,
        batch_size: int = 1024,
        shuffle: int = 0,
        seed: int = 0,
        drop_last: bool = False,
        on_error: str = "raise",
        prefetch: int = 4,
        cache: bool = False,
        flush_seconds: float | None = None,
        max_ahead_seconds: float | None = None,
    ) -> None:
        check_source(source)
        check_schema(schema)
        checks.whole_number("dataset.batch_size", batch_size, 1)
        for name, number in (("shuffle", shuffle), ("seed", seed), ("prefetch", prefetch)):
            checks.whole_number(f"dataset.{name}", number, 0)
        for name, switch in (("drop_last", drop_last), ("cache", cache)):
            checks.one_of(f"dataset.{name}", switch, (True, False))
        checks.one_of("dataset.on_error", on_error, ("raise", "skip"))
        check_stream_arguments(source, schema, shuffle, cache, flush_seconds, max_ahead_seconds)
        self.source = source
        self.schema = schema
        self.batch_size = int(batch_size)
        self.shuffle = int(shuffle)
        self.seed = seed
        self.drop_last = drop_last
        self.on_error = on_error
        self.prefetch = int(prefetch)
        self.cache = cache
        self.flush_seconds = flush_seconds
        self.max_ahead_seconds = max_ahead_seconds
        self.grains = 1
        self.skips = Skips()
        self.live = Live()
        self._source_rows = SourceRows()
        self.encoder = Encoder(schema, on_error, self._put_aside if source.endless else None)
        self.encoder.stats.skips = self.skips
        self._labels = True
        self._features = True  # False: ids and dense columns are not read
        self._in_unit: frozenset[str] = frozenset()
        self._must_match = True
        self._streams = False  # whether it is read as a stream, in the order of events
        self._maps: tuple[Callable[[Batch], Batch], ...] = ()
        self._next_epoch = 0
        self._resume: Position | None = None
        self._limit = TimeLimit(max_ahead_seconds, endless=source.endless, timed=bool(schema.time))
        self._position = self._at(0, self._start)
        self.reading: ReadAhead[Batch | None] | None = None
        self._cached = CachedRows()
        self._num_rows: int | None = None

    def __repr__(self) -> str:
        text = repr(self.source)
        source = text if len(text) <= 80 else f"{type(self.source).__name__}(…)"
        names = [column.name for column in self.schema.columns]
        rows = "unknown" if self.num_rows is None else f"{self.num_rows:,}"
        order = f", shuffle={self.shuffle}" if self.shuffle else ""
        return (
            f"Dataset({source}, columns={names}, batch_size={self.batch_size}{order}, rows={rows})"
        )

    @property
    def position(self) -> Position:
        """Where iteration is: after the last batch handed out."""
        return self._position

    @property
    def begins(self) -> Position:
        """Where the next iteration begins."""
        return self._resume or self._at(self._next_epoch, self._start)

    @property
    def resumed_epoch(self) -> int | None:
        """The epoch whose rest the next iteration reads after `resume`; None without `resume`."""
        if self._resume is None:
            return None
        return int(self._resume["epoch"])

    @property
    def endless(self) -> bool:
        """Whether iteration never ends."""
        return self.source.endless

    @property
    def lag(self) -> int | None:
        """Rows that wait at an endless source; None if the source does not report it."""
        return self.status.lag

    @property
    def status(self) -> SourceStatus:
        """What an endless source knows, in the newest reading."""
        return self._source_rows.status

    @property
    def can_share_out(self) -> bool:
        """Whether ranks can read an epoch for some grains each.

        Each grain has a range of rows of its own, from which no row is left out for its values.
        Where the schema has histories, rows are read in the order of the source.
        """
        leaves_out = self.on_error == "skip" or self.max_ahead_seconds is not None
        if self.endless or leaves_out or self.cache or self._maps or self.schema.kept:
            return False
        least = min(self.batch_size, self.num_rows or 0)
        return self.source.divisible and least >= self.grains

    @property
    def has_next(self) -> bool:
        """Whether the newest iteration yields its next batch, or ends, without waiting.

        It is False without `prefetch`.
        """
        return self.reading is not None and self.reading.has_next

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(self._next_epoch)

    def epoch(
        self, number: int, own: range | None = None, runs: RowRuns | None = None
    ) -> Iterator[Batch]:
        """Iterate over the batches of epoch `number`, or over the rest of it after `resume`.

        Args:
            number: of the epoch.
            own: the grains whose ids and dense columns are read, if `can_share_out`; None = all.
                See `Batch.whole`.
            runs: ranges of numbers of rows, each of which is a batch without a position, if
                `can_share_out` and rows are in the order of the source. A run of neighbouring
                ranges is read at once.
                None = all rows.
        """
        self._streams = self.endless
        return without_ticks(self._begin(number, own=own, runs=runs))

    def stream(self, wishes: JoinWishes = NO_WISHES) -> Iterator[Batch | None]:
        """Iterate, and yield None when an endless source has no new rows.

        A batch or None comes at least every `live.tick_seconds`, so that the reader can run
        scheduled work or stop. `wishes`: what a join of streams is asked for, in this reading only.
        """
        self._streams = True
        return self._begin(self._next_epoch, wishes)

    def raw_types(self) -> tuple[dict[str, Type], dict[str, Shape]]:
        """Return the types and shapes of the raw columns of the features before reading.

        Both are {} if the source does not know its columns. They lack a column without a value,
        as in a file of headers alone: its type is that of the values to come.
        """
        return raw_types(self.source, self.schema)

    def commit(self, position: Position) -> None:
        """Commit `position` after a checkpoint with it is safe on disk.

        Entries of the journal before the position are removed, and the source commits its own
        position.
        """
        source = None
        if self.endless:
            source = position["source"]
        if source is not None:
            used = {**decisions_of(source), "cut": position["rows"]}
            self.live.journal.forget(used)
            self.source.commit(Position.from_json(source))

    def received(
        self, batch: Batch, types: Mapping[str, Type], shapes: Mapping[str, Shape]
    ) -> Batch:
        """Take over a batch that another process read from an equal dataset, and return it.

        The batch counts as handed out here: `position` is the one after it.

        Args:
            batch: without an encoder.
            types: of the raw columns, as the encoder of that process has recorded them.
            shapes: of these columns.
        """
        assert batch.position is not None
        self.encoder.types = types
        self.encoder.shapes = shapes
        self._position = batch.position
        return changed(batch, {"encoder": self.encoder})

    def follow_rules(self, rules: int) -> None:
        """Read the next epochs by the rules of a model; `RecModel` calls this before it reads.

        Args:
            rules: as `Schema.rules`. A state that was saved with earlier rules keeps them.
        """
        if rules != self.encoder.rules:
            self._cached = CachedRows()
        self.encoder.rules = rules

    def divide(self, grains: int) -> None:
        """Read the next epochs by `grains` runs of samples; `RecModel` calls this before it reads.

        Each batch then has samples of each grain, one grain after another, and `Batch.grain_ends`
        says where they end. docs/connectors.md says which rows of a source belong to which grain.
        Batches of some sources have their rows as before, and empty `grain_ends`. So do batches of
        files if the schema has histories: these need the rows in their order.

        Raises:
            ConfigError: the dataset was resumed at a position of another number of grains.
        """
        checks.whole_number("dataset.grains", grains, 1)
        if grains == self.grains:
            return
        if self._resume is not None:
            check_grains(self._resume, grains)
        self.grains = grains
        self._position = self._at(self._next_epoch, self._start)

    def undivided(self) -> Dataset:
        """Return a dataset of the same rows in the order of the source, or of its shuffle.

        Iterating over the returned dataset does not move this one.
        """
        if self.grains == 1:
            return self
        other = copy.copy(self)
        other.divide(1)
        return other

    def restrict_labels(self, in_unit: Iterable[str] = (), *, must_match: bool = True) -> None:
        """Set the requirements of the next epochs on labels; `RecModel` does so before it reads.

        Args:
            in_unit: labels whose values must lie in [0, 1], as under a cross-entropy. A value
                outside is a bad row: see `on_error`.
            must_match: whether a label with `positive` that matches no row of a whole epoch is an
                error. In a stream, 100,000 rows whose label is always 0, or always 1, are a
                warning.
        """
        names = frozenset(in_unit)
        if not names <= self._in_unit:
            self._cached = CachedRows()  # the rows before were not checked
        self._in_unit = names
        self._must_match = must_match
        self.encoder.unit_labels = names
        if self._maps:
            self.encoder.unit_labels = frozenset()

    def _begin(
        self,
        number: int,
        wishes: JoinWishes = NO_WISHES,
        own: range | None = None,
        runs: RowRuns | None = None,
    ) -> Generator[Batch | None, None, None]:
        if not self.endless and not self._cached.lanes:  # before another thread begins to read
            self._require_columns([])
        self._limit.begin(self.live, learns=self._must_match)
        start = self._resume
        self._resume = None
        if start is None or start["epoch"] != number:
            start = self._at(number, self._start)
        if self.endless:
            self._next_epoch = number
        else:
            self._next_epoch = number + 1
        may_divide = self.grains > 1 and not self._streams and not self.schema.kept
        divided = may_divide and self.source.divisible  # which may count rows
        check_layout(start, divided=divided)
        self._source_rows = SourceRows()
        batches = self._batches(number, start, wishes, own, divided=divided)
        if runs is not None:
            encoded = partial(self._encoded, position=None, tally=Tally(1, is_whole=False))
            batches = cut_runs(self.source, runs, encoded, self._start)
        return self._run(start, batches)

    def resume(self, position: Position | Mapping[str, Any] | str) -> Dataset:
        """Resume the next iteration after `position`.

        Args:
            position: a position of this or an equal dataset; an empty one is the start.

        Returns:
            This dataset.

        Raises:
            ConfigError: for a position that belongs to another order of rows.
        """
        start = Position.from_json(position)
        if not start.state:
            start = self._at(0, self._start)
        check_position(start, self._at(0, self._start), self.source)
        self._limit.resume(start.state)
        self._source_rows = SourceRows()
        self._resume = start
        self._position = start
        self._next_epoch = int(start["epoch"])
        return self

    def map(self, fn: Callable[[Batch], Batch]) -> Any:
        """Return a dataset of `fn(batch)` with the same schema and positions.

        `fn` runs on the reading thread. In prediction, a batch does not have labels or a weight. An
        object with a method `over` decides itself what it makes of the whole dataset: the result is
        `fn.over(dataset)`, as for `hb.Insert`.
        """
        over = getattr(fn, "over", None)
        if over is not None:
            return over(self)
        other = Dataset(
            self.source,
            self.schema,
            self.batch_size,
            self.shuffle,
            self.seed,
            self.drop_last,
            self.on_error,
            self.prefetch,
            self.cache,
            self.flush_seconds,
            self.max_ahead_seconds,
        )
        other.divide(self.grains)
        other._maps = (*self._maps, fn)
        other.live = self.live
        other._labels = self._labels
        return other

    def without_labels(self) -> Dataset:
        """Return a dataset of the same rows for prediction, at the position of this one.

        Columns of labels and weights are not read. They may be missing, and so may the time.
        Iterating over the returned dataset does not move this one.
        """
        other = copy.copy(self)
        other._labels = False
        other._num_rows = None
        if self.on_error == "skip":  # rows that were skipped for their labels are not in the cache
            other._cached = CachedRows()
        else:
            other._cached = self._cached.without_labels()
        return other

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch, from the source or after a whole epoch; None while unknown.

        Raises:
            DecodeError: a file is damaged, and `on_error` is "raise".
        """
        if self._num_rows is not None:
            return self._num_rows
        try:
            return self.source.num_rows()
        except DecodeError:
            if self.on_error == "raise":
                raise
            return None  # reading leaves out the file

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; None while unknown."""
        rows = self.num_rows
        if rows is None:
            return None
        if self.drop_last:
            return rows // self.batch_size
        return -(-rows // self.batch_size)

    def __len__(self) -> int:
        num_batches = self.num_batches
        if num_batches is None:
            raise TypeError(
                "the number of batches is not known before a whole epoch was read; use "
                "num_batches, which may be None"
            )
        return num_batches

    def __bool__(self) -> bool:
        return True

    def _run(
        self, start: Position, batches: Generator[Batch | None, None, None]
    ) -> Generator[Batch | None, None, None]:
        self._position = start
        items: Any = batches
        if self.prefetch:
            items = self.reading = ReadAhead(batches, self.prefetch)
        with closing(items):
            for batch in items:
                if batch is not None and batch.position is not None:
                    self._position = batch.position
                yield batch

    def _at(self, epoch: int, place: Mapping[str, Any]) -> Position:
        return Position({"epoch": epoch, **place, **self._limit.to_json(), "order": self._order})

    @property
    def _start(self) -> dict[str, Any]:
        """The place before the first row."""
        place = place_at(None, 0)
        if self.endless:
            place["rows"] = 0
        return place

    @property
    def _order(self) -> dict[str, Any]:
        """What orders the rows; resuming with another order would repeat and lose rows."""
        order: dict[str, Any] = {}
        if self.shuffle > self.endless:  # a stream keeps its order with shuffle=1
            order = {"shuffle": self.shuffle, "seed": self.seed, "cache": self.cache}
        if self.grains > 1:
            order["grains"] = self.grains
        # a position counts rows without those that lie further ahead
        if self.endless or self.max_ahead_seconds is not None:
            order["max_ahead_seconds"] = self.max_ahead_seconds
        return order

    def _batches(
        self, epoch: int, start: Position, wishes: JoinWishes, own: range | None, *, divided: bool
    ) -> Generator[Batch | None, None, None]:
        """Yield the batches of an epoch, and None at the ticks of an endless source."""
        cuts: Iterator[Cut | None]
        if self.endless:
            stream = StreamCuts(self.batch_size, self.flush_seconds, self.live)
            begin = source_position(start)
            if self.grains > 1 and self.source.divisible:
                cuts = stream.by_blocks(self._blocks(begin), start)
            else:
                chunks = self._encoded(self.source, begin, Tally(1), wishes)
                cuts = stream.across_blocks(chunks, start)
        else:
            first = int(start.state.get("batch", 0))
            lanes = self._lanes(epoch, start, own, divided=divided)
            cuts = cut_epoch(lanes, self.batch_size, first, drop_last=self.drop_last)
        for cut in cuts:
            if cut is None:
                yield None
            else:
                yield self._finish(cut, self._at(epoch, cut.place), own)

    def _lanes(
        self, epoch: int, start: Position, own: range | None, *, divided: bool
    ) -> list[Lane]:
        """Return the rows of each grain after `start`, or one lane of all rows."""
        sources = [self.source]
        if divided:
            sources = ranges_of(self.source, self.grains)
        if "grains" in start.state:
            places = start["grains"]
        else:
            places = [{key: start[key] for key in self._start}] * len(sources)
        tally = Tally(len(sources))
        others = copy.copy(self)
        others._features = False
        lanes: list[Lane] = []
        for number, place in enumerate(places):
            reader = self if own is None or number in own else others
            buffers = reader._buffers(sources, number, epoch, place, tally)
            lanes.append(Lane(buffers, place))
        return lanes

    def _finish(self, cut: Cut, position: Position, own: range | None) -> Batch:
        """Return the batch of a cut; functions of `map` are called grain by grain."""
        if own is not None:
            return shared_batch(cut.runs, own, self.schema).at(position, self.encoder)
        runs = cut.runs
        if self._maps:
            runs = [[BatchSlice.of(self._mapped(joined(run)))] if run else [] for run in runs]
        batch = joined([part for run in runs for part in run]).at(position, self.encoder)
        return batch if len(runs) == 1 else changed(batch, {"grain_ends": ends_of(runs)})

    def _mapped(self, batch: Batch) -> Batch:
        labels = [label for label in self.schema.labels if label.name in self._in_unit]
        skips = self.skips if self.on_error == "skip" else None
        return with_unit_labels(mapped_batch(batch, self._maps), labels, skips)

    def _buffers(
        self,
        sources: Sequence[Source],
        number: int,
        epoch: int,
        place: Mapping[str, Any],
        tally: Tally,
    ) -> Iterator[Buffer]:
        """Yield the rows of a lane, number `number` of those with these `sources`."""
        grain = None
        if len(sources) > 1:
            grain = number
        skip = int(place["skip"])
        if self.cache:
            segments = self.encoder.segments
            if not self._cached.has(len(sources), segments):
                lanes = [(source, self._encoded(source, None, tally)) for source in sources]
                self._cached = CachedRows.read(lanes, segments)
            lane = self._cached.lanes[number]
            order = None
            if self.shuffle:
                check_begin(place, lane.before)
                random = random_of((self.seed, epoch), grain)
                order = random.permutation(lane.rows.num_samples)
            if self.shuffle or begins_at(place, lane.before):
                return cached(lane, order, skip)
        chunks = self._encoded(sources[number], source_position(place), tally)
        if self.shuffle > 1:
            size = -(-self.shuffle // len(sources))
            shuffle = ShuffledBuffers(size, self.seed, epoch, grain)
            return shuffle.buffers(chunks, int(place["buffer"]), skip)
        return unshuffled(chunks, skip)

    def _encoded(
        self,
        source: Source,
        position: Position | None,
        tally: Tally,
        wishes: JoinWishes = NO_WISHES,
    ) -> Iterator[Encoded]:
        """Yield the encoded chunks of a source after `position`, and ticks."""
        num_rows = 0
        previews: list[Batch] = []
        before = position
        chunk_rows = max(self.batch_size, READ_ROWS) // tally.lanes
        if not tally.has_begun:
            tally.has_begun = True
            self.encoder.forget_labels()
        try:
            wishes = replace(wishes, known=bool(self.schema.kept))
            plan = tally.plan(replace(self._plan(), wishes=wishes, opens=True))
            for raw, after in self._source_rows.read(source, position, chunk_rows, plan):
                if raw is OPENED:
                    before = after
                    continue
                if is_preview(raw):
                    previews.append(encoded_preview(self.schema, raw))
                    continue
                if not isinstance(after, Position):
                    raise DataError(
                        f"{type(source).__name__}.read: the position after a batch is not a "
                        f"Position, got {type(after).__name__}. "
                        "Yield (batch, hb.sources.Position({…}))."
                    )
                if not raw.num_rows:  # a tick
                    yield with_previews(Batch(num_samples=0), previews), before, after
                    continue
                rows = self._encode(source, raw, after)
                if rows.num_samples:
                    num_rows += rows.num_samples
                    self._warn_constant()
                    yield with_previews(rows, previews), before, after
                before = after
        except (DecodeError, SchemaError):
            self._note_failure(before)
            raise
        if tally.ended(num_rows, whole=position is None):
            self._num_rows = tally.num_rows
            if self._must_match and not self.endless:
                check_matched(self.encoder.label_values)

    def _blocks(self, position: Position | None) -> Iterator[Block | None]:
        """Yield the encoded blocks of a topic after `position`, by grain, and None at ticks."""
        before = position
        self.encoder.forget_labels()
        plan = replace(self._plan(), grains=self.grains)
        items = self._source_rows.read(self.source, position, READ_ROWS, plan)
        try:
            for raw, after in items:
                if raw is not OPENED:
                    yield None
                    continue
                before = after
                grains: list[Batch] = []
                for rows, end in islice(items, self.grains):
                    grain = Batch(num_samples=0)
                    if rows.num_rows:
                        grain = self._encode(self.source, rows, end)
                    grains.append(grain)
                self._warn_constant()
                yield Block(grains, before, end)
        except (DecodeError, SchemaError):
            self._note_failure(before)
            raise

    def _plan(self) -> ReadPlan:
        skips = None
        if self.on_error == "skip":
            skips = self.skips
        live = None
        if self.endless:
            live = self.live
        columns = self.encoder.raw_columns(self._labels, self._features)
        columns = columns or self.schema.raw_columns()[:1]  # which says how many rows there are
        time = None
        if self.schema.time is not None:
            time = (self.schema.time.source, self.schema.time.unit)
            if not self._labels:
                columns.append(self.schema.time.source)  # read if it is there
        return ReadPlan(
            tuple(columns),
            self.schema.number_types(),
            skips,
            live,
            max_ahead_seconds=self.max_ahead_seconds,
            time=time,
        )

    def _require_columns(self, names: list[str]) -> None:
        """Raise SchemaError if the columns `names` do not include all that are read."""
        required = self.encoder.raw_columns(self._labels, self._features)
        require_from(self.source, required, names)

    def _warn_constant(self) -> None:
        """Warn once about a label that is always 0, or always 1, in a stream's first rows."""
        if self._streams:
            warn_constant(self.encoder.label_values)

    def _encode(self, source: Source, raw: pa.RecordBatch, after: Position) -> Batch:
        self._require_columns(raw.schema.names)
        try:
            return self.encoder(
                raw,
                labels=self._labels,
                features=self._features,
                latest=self._limit.latest(after, learns=self._must_match),
            )
        except DecodeError as error:
            raise located(error, source, raw, after) from error

    def _note_failure(self, before: Position | None) -> None:
        """Record in the journal that a block has bad rows, so that its file may be corrected.

        Args:
            before: a position in the block.
        """
        if not self.endless or before is None or "block" not in before.state:
            return
        self.live.journal.amend("block", int(before["block"]), {"failed": True})

    def _put_aside(self, rows: pa.RecordBatch, reason: str, message: str) -> None:
        """Store rows of an endless source that were left out as dead letters."""
        self.live.dead_letters.add_all(dead_letters(rows, reason))
