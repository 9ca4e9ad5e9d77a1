# SPDX-License-Identifier: Apache-2.0
"""History and Count: columns whose values the model keeps, and how their entries lie in rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotbed import checks, config
from hotbed.data.batch import Batch, Ids
from hotbed.data.schema import Dense, Id, KeptColumn, Schema
from hotbed.errors import ConfigError, DataError, RowShapeError

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
NO_LIMIT = 2**63 - 1
MOST_ENTRIES = 1 << 20
"""The longest history."""
MICROS = 1_000_000
_SECONDS = 2**32 - 1  # times of 4 bytes are below, since 1970
_TILES = 2**31
VALUES = ("matches", "rows", "rate")
"""What a Count gives of each window."""


@dataclass(frozen=True)
class EntryKind:
    """How the entries of a kept column lie in rows.

    Attributes:
        lanes: whole numbers of 32 bits of an entry.
        tick: microseconds of a unit of time.
        within: how old an entry may be that is seen, in units; NO_LIMIT = any age.
        length: how many entries are seen at most.
        sums: whether entries of one time are added up.
    """

    lanes: int
    tick: int
    within: int
    length: int
    sums: bool

    @property
    def keeps(self) -> int:
        """How old an entry is at most, counted from the newest row that was learned, in units."""
        return self.within if self.within == NO_LIMIT else 2 * self.within

    @property
    def seconds(self) -> float | None:
        """How long entries are kept; None = for good.

        A unit longer than `keeps`, as the newest row may lie anywhere in its own.
        """
        return None if self.within == NO_LIMIT else (self.keeps + 1) * self.tick / MICROS


class KeptByKey(KeptColumn):
    """Base of History and Count: what the rows of a key left, by the rule of time."""

    name: str
    where: Mapping[str, float]

    @property
    def newest_table(self) -> str:
        """The table of the newest entries, by key."""
        return f"{self.name}.newest"

    @property
    def older_table(self) -> str:
        """The table of the entries before those."""
        return f"{self.name}.older"

    @abstractmethod
    def kind_in(self, schema: Schema) -> EntryKind:
        """Return how its entries lie in rows."""

    @abstractmethod
    def entries_of(self, batch: Batch, known: Int64Array, kind: EntryKind) -> Int32Array:
        """Return the entry that each row would leave, [n, lanes]; `known`: its time in units."""

    @abstractmethod
    def leaving(self, batch: Batch, matches: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which rows leave an entry, of those that match `where` and the others."""

    @abstractmethod
    def times_of(self, entries: Int32Array, kind: EntryKind) -> Int64Array:
        """Return the times of entries [m, lanes] in units."""

    @abstractmethod
    def parts_in(self, schema: Schema) -> Sequence[str]:
        """Return what an entry has beside its time, in order."""

    @abstractmethod
    def numbers_of(self, entries: Int32Array) -> Int64Array:
        """Return the `parts_in` of entries [m, lanes] as whole numbers, [m, parts]."""

    @abstractmethod
    def features_of(
        self, seen: SeenEntries, schema: Schema
    ) -> tuple[dict[str, Ids], dict[str, Any]]:
        """Return the ids and the numbers that rows get of the entries that they see."""

    def matching(self, batch: Batch) -> NDArray[np.bool_]:
        """Return which rows have all values of `where`."""
        matches = np.ones(batch.num_samples, bool)
        for name, value in self.where.items():
            matches &= np.asarray(batch.labels[name]) == np.float32(value)
        return matches

    def _check(self, schema: Schema) -> None:
        where = f"{config.kind_of(type(self))} {self.name!r}"
        if schema.time is None:
            raise ConfigError(
                f"{where}: it needs the time of each row, got a schema without a Time column. Add "
                "hb.Time."
            )
        _single_id(schema, f"{where}: by", self.by)
        for name in self.where:
            labels = [label.name for label in schema.labels]
            if name not in labels:
                raise ConfigError(
                    f"{where}: where names labels, got {name!r}. "
                    f"{config.did_you_mean(name, labels)}"
                )


@dataclass(frozen=True)
class History(KeptByKey):
    """The newest entries that rows of the same key left before a row: ids, as a sequence.

    For networks it is an `Id` of pooling "none" that rows need not bring: training keeps it by the
    rows that it learns, and servers read it by key. A row sees what happened before its own time
    and was known by then; see docs/histories.md.

    Args:
        name: of the sequence of the first column in `of`.
        of: the `Id` columns that an entry has; each has one value a row. Those after the first give
            sequences `NAME_COLUMN`. The `Time` column gives `NAME_TIME`: the age of each entry as
            an id, 0 below one second, else 1 + floor(log2(seconds)).
        by: the `Id` column that is the key, such as the user.
        where: labels with the values that a row must have to leave an entry; none: every row does.
        length: the newest entries that a row sees.
        within_seconds: entries of this age and younger are seen; None = of any age. Rows that are
            later than this see fewer, as twice this time before the newest row all is forgotten.

    Example: `hb.History("liked_before", of=["movie"], by="user", where={"liked": 1}, length=100)`
    """

    name: str
    of: Sequence[str]
    by: str
    where: Mapping[str, float] = field(default_factory=dict)
    length: int = 100
    within_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", checks.names(self.of))
        where = f"history {self.name!r}"
        object.__setattr__(self, "where", _values_by_label(where, self.where))
        checks.whole_number(f"{where}: length", self.length, 1, MOST_ENTRIES)
        if self.within_seconds is not None:
            checks.seconds(f"{where}: within_seconds", self.within_seconds, above=0)

    def ids_in(self, schema: Schema) -> tuple[Id, ...]:
        features: list[Id] = []
        for name in self.of:
            feature = self.name if not features else f"{self.name}_{name}"
            table = feature
            if schema.time is None or name != schema.time.name:
                column = schema[name]
                assert isinstance(column, Id)
                table = str(column.table)
            features.append(Id(feature, table=table, pooling="none", max_length=self.length))
        return tuple(features)

    def dense_in(self, schema: Schema) -> tuple[Dense, ...]:
        return ()

    def check_in(self, schema: Schema) -> None:
        self._check(schema)
        assert schema.time is not None
        where = f"history {self.name!r}: of"
        if not self.of or self.of[0] == schema.time.name or len({*self.of}) != len(self.of):
            raise ConfigError(
                f"{where}: an entry is an Id column and maybe others, got {list(self.of)}. Name "
                "the Id column first, and each column once."
            )
        for name in self.of:
            if name != schema.time.name:
                _single_id(schema, where, name)
        kind = self.kind_in(schema)
        if kind.within == 0:
            raise ConfigError(
                f"history {self.name!r}: within_seconds: expected at least {kind.tick / MICROS:g} "
                f"for times of unit {schema.time.unit!r}, got {self.within_seconds}. Give a longer "
                "time."
            )

    def kind_in(self, schema: Schema) -> EntryKind:
        assert schema.time is not None
        tick = MICROS if schema.time.unit == "s" else 1
        time_lanes = 1 if tick == MICROS else 2
        within = NO_LIMIT
        if self.within_seconds is not None:
            within = round(self.within_seconds * MICROS) // tick
        num_ids = len([name for name in self.of if name != schema.time.name])
        return EntryKind(time_lanes + 2 * num_ids, tick, within, self.length, sums=False)

    def entries_of(self, batch: Batch, known: Int64Array, kind: EntryKind) -> Int32Array:
        columns: list[Int64Array] = []
        for name in self.of:
            if name in batch.ids:
                columns.append(single_ids(batch.ids[name], name)[0])
        entries = np.empty((len(known), kind.lanes), np.int32)
        lanes = 2
        if kind.tick == MICROS:
            lanes = 1
            entries[:, 0] = _as_seconds(self.name, known)
        else:
            entries[:, :2] = (known ^ np.int64(-(2**63))).view(np.int32).reshape(-1, 2)
        for column in columns:
            entries[:, lanes : lanes + 2] = column.view(np.int32).reshape(-1, 2)
            lanes += 2
        if lanes != kind.lanes:
            raise DataError(
                f"history {self.name!r}: a batch has all of its columns {list(self.of)}, "
                f"got ids of {sorted(batch.ids)}. Encode it with hb.Encoder(schema)."
            )
        return entries

    def leaving(self, batch: Batch, matches: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if not self.where and batch.counted is not None:
            matches = matches & np.asarray(batch.counted)
        for name in self.of:
            if name in batch.ids:
                matches = matches & single_ids(batch.ids[name], name)[1]
        return matches

    def times_of(self, entries: Int32Array, kind: EntryKind) -> Int64Array:
        if kind.tick == MICROS:
            return entries[:, 0].view(np.uint32).astype(np.int64) - 1
        return _wide(entries, 0) ^ np.int64(-(2**63))

    def features_of(
        self, seen: SeenEntries, schema: Schema
    ) -> tuple[dict[str, Ids], dict[str, Any]]:
        assert schema.time is not None
        ids: dict[str, Ids] = {}
        lanes = 1 if seen.kind.tick == MICROS else 2
        for name, feature in zip(self.of, self.ids_in(schema), strict=True):
            if name == schema.time.name:
                values = self._ages(seen)
            else:
                values = _wide(seen.entries, lanes)
                lanes += 2
            ids[feature.name] = Ids(values, seen.offsets)
        return ids, {}

    def parts_in(self, schema: Schema) -> Sequence[str]:
        assert schema.time is not None
        return [f"id of {name}" for name in self.of if name != schema.time.name]

    def numbers_of(self, entries: Int32Array) -> Int64Array:
        lanes = range(entries.shape[1] % 2 or 2, entries.shape[1], 2)
        return np.stack([_wide(entries, lane) for lane in lanes], 1)

    def _ages(self, seen: SeenEntries) -> Int64Array:
        """Return the ids of the ages of entries."""
        lengths = np.diff(seen.offsets)
        ages = np.repeat(seen.times, lengths) - self.times_of(seen.entries, seen.kind)
        return age_ids(ages, seen.kind.tick)


@dataclass(frozen=True)
class Count(KeptByKey):
    """How many rows of the same key there were before a row, in windows of time: dense numbers.

    For networks it is a `Dense` column that rows need not bring: training keeps it by the rows that
    it learns, and servers read it by key. Time is cut into tiles of `every` seconds. A window is
    the whole tiles before that of the row; see docs/histories.md.

    Args:
        name: of the column.
        by: the `Id` column that is the key, such as the item.
        where: labels with the values that a row must have to match.
        windows: lengths of the windows in seconds. Rows that are later than the longest one count
            fewer, as twice this time before the newest row all is forgotten.
        every: seconds of a tile, of which each window is a multiple; None: a 60th of the shortest
            window, at least 1.
        half_life: seconds after which a row counts half; None: all of a window count alike.
        prior: the rate of a key that has no rows yet.
        prior_rows: how many rows the prior weighs.
        values: of each window: "matches" and "rows", as log(1 + number), and "rate", the smoothed
            share of matches: (matches + prior * prior_rows) / (rows + prior_rows).

    Example: `hb.Count("item_clicks", by="item", where={"clicked": 1}, windows=[3600, 86400])`
    """

    name: str
    by: str
    where: Mapping[str, float]
    windows: Sequence[int]
    every: int | None = None
    half_life: float | None = None
    prior: float = 0.0
    prior_rows: float = 10.0
    values: Sequence[str] = VALUES

    def __post_init__(self) -> None:
        where = f"count {self.name!r}"
        object.__setattr__(self, "where", _values_by_label(where, self.where))
        if not isinstance(self.windows, Iterable):
            raise ConfigError(
                f"{where}: windows: expected a list of seconds, got {self.windows!r}. Give "
                f"[{self.windows!r}]."
            )
        object.__setattr__(self, "windows", tuple(self.windows))
        object.__setattr__(self, "values", checks.names(self.values))
        if not self.windows or not self.values:
            raise ConfigError(
                f"{where}: nothing to count, got windows={list(self.windows)} and values="
                f"{list(self.values)}. Give one window and one value at least."
            )
        for window in self.windows:
            checks.whole_number(f"{where}: windows", window, 1, 2**31)
        if self.every is None:
            object.__setattr__(self, "every", max(1, min(self.windows) // 60))
        checks.whole_number(f"{where}: every", self.every, 1)
        uneven = [window for window in self.windows if window % self.tile_seconds]
        if uneven:
            raise ConfigError(
                f"{where}: a window is a multiple of a tile, got {uneven[0]} seconds with every="
                f"{self.every}. Change one of them."
            )
        if self.half_life is not None:
            checks.seconds(f"{where}: half_life", self.half_life, above=0)
        checks.finite_number(f"{where}: prior", self.prior)
        checks.finite_number(f"{where}: prior_rows", self.prior_rows, least=0)
        for value in self.values:
            checks.one_of(f"{where}: values", value, VALUES)
        if "rate" in self.values:
            checks.finite_number(f"{where}: prior_rows", self.prior_rows, above=0)

    @property
    def tile_seconds(self) -> int:
        """Seconds of a tile."""
        assert self.every is not None
        return self.every

    def ids_in(self, schema: Schema) -> tuple[Id, ...]:
        return ()

    def dense_in(self, schema: Schema) -> tuple[Dense, ...]:
        return (Dense(self.name, width=len(self.windows) * len(self.values)),)

    def check_in(self, schema: Schema) -> None:
        self._check(schema)

    def kind_in(self, schema: Schema) -> EntryKind:
        within = max(self.windows) // self.tile_seconds
        return EntryKind(3, self.tile_seconds * MICROS, within, NO_LIMIT, sums=True)

    def entries_of(self, batch: Batch, known: Int64Array, kind: EntryKind) -> Int32Array:
        if len(known) and (known.min() < -_TILES or known.max() >= _TILES):
            raise DataError(
                f"count {self.name!r}: times lie too far from 1970 for tiles of {self.every} "
                f"seconds, got tiles {known.min()}..{known.max()}. Raise every."
            )
        entries = np.empty((len(known), kind.lanes), np.int32)
        entries[:, 0] = known
        entries[:, 1] = self.matching(batch)
        entries[:, 2] = 1 if batch.counted is None else np.asarray(batch.counted)
        return entries

    def leaving(self, batch: Batch, matches: NDArray[np.bool_]) -> NDArray[np.bool_]:
        counted = np.ones(batch.num_samples, bool)
        if batch.counted is not None:
            counted = np.asarray(batch.counted)
        either: NDArray[np.bool_] = matches | counted
        return either

    def times_of(self, entries: Int32Array, kind: EntryKind) -> Int64Array:
        return entries[:, 0].astype(np.int64)

    def parts_in(self, schema: Schema) -> Sequence[str]:
        return ("matches", "rows")

    def numbers_of(self, entries: Int32Array) -> Int64Array:
        return entries[:, 1:].astype(np.int64)

    def features_of(
        self, seen: SeenEntries, schema: Schema
    ) -> tuple[dict[str, Ids], dict[str, Any]]:
        n = len(seen.times)
        rows = np.repeat(np.arange(n), np.diff(seen.offsets))
        tiles = self.times_of(seen.entries, seen.kind)
        ages = seen.times[rows] - tiles
        weights = np.ones(len(rows))
        if self.half_life is not None:
            weights = 0.5 ** ((ages - 1) * self.tile_seconds / self.half_life)
        columns: list[NDArray[np.float64]] = []
        for window in self.windows:
            inside = weights * (ages <= window // self.tile_seconds)
            matches = np.bincount(rows, inside * seen.entries[:, 1], minlength=n)
            shown = np.bincount(rows, inside * seen.entries[:, 2], minlength=n)
            for value in self.values:
                if value == "rate":
                    total = shown + self.prior_rows
                    columns.append((matches + self.prior * self.prior_rows) / total)
                else:
                    columns.append(np.log1p(matches if value == "matches" else shown))
        numbers = np.stack(columns, 1).astype(np.float32)
        return {}, {self.name: numbers[:, 0] if numbers.shape[1] == 1 else numbers}


class SeenEntries(NamedTuple):
    """What each row of a batch sees.

    Attributes:
        kind: of the entries.
        times: when each row was shown, in units.
        offsets: where its entries begin, [n + 1].
        entries: oldest first, [m, lanes].
    """

    kind: EntryKind
    times: Int64Array
    offsets: Int64Array
    entries: Int32Array


def age_ids(ages: Int64Array, tick: int) -> Int64Array:
    """Return the ids of ages in units of `tick` microseconds, [m]: 0 below a second."""
    seconds = ages * tick // MICROS
    _, exponents = np.frexp(seconds.astype(np.float64))
    return exponents.astype(np.int64)


def single_ids(ids: Ids, name: str) -> tuple[Int64Array, NDArray[np.bool_]]:
    """Return the one id of each row, [n], and which rows have one; 0 where there is none.

    Raises:
        RowShapeError: a row has several.
    """
    values = np.asarray(ids.values)
    if ids.offsets is None:
        return values, np.ones(len(values), bool)
    lengths = np.diff(np.asarray(ids.offsets))
    if len(lengths) and lengths.max() > 1:
        raise RowShapeError(
            f"id {name!r}: histories need one value a row, got {lengths.max()}. Keep histories of "
            "a column with one value."
        )
    has_one = lengths == 1
    single = np.zeros(len(lengths), np.int64)
    single[has_one] = values
    return single, has_one


def _wide(entries: Int32Array, lane: int) -> Int64Array:
    """Return the whole numbers of 64 bits that begin in a lane of entries, [m], aligned."""
    lanes = entries[:, lane : lane + 2].copy()
    numbers: Int64Array = lanes.view(np.int64)
    return numbers.reshape(-1)


def _as_seconds(name: str, known: Int64Array) -> Int32Array:
    """Return times in whole seconds as 4 bytes; 0 is none of them."""
    if len(known) and (known.min() < 0 or known.max() >= _SECONDS):
        raise DataError(
            f"history {name!r}: times in seconds lie from 1970 to 2106, got "
            f"{known.min()}..{known.max()}. Give the Time another unit, such as 'us'."
        )
    return (known + 1).astype(np.uint32).view(np.int32)


def _values_by_label(where: str, values: object) -> dict[str, float]:
    """Return the values that a row must have, by label. Raises ConfigError for anything else."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where}: where maps labels to values, got {values!r}. Give a dict, such as "
            "{'clicked': 1}."
        )
    for label, value in values.items():
        if not isinstance(value, bool):
            checks.finite_number(f"{where}: where: {label}", value)
    return dict(values)


def _single_id(schema: Schema, where: str, name: str) -> None:
    columns = [column.name for column in schema.columns if isinstance(column, Id)]
    if name not in columns:
        raise ConfigError(
            f"{where}: it names Id columns, got {name!r}. {config.did_you_mean(name, columns)}"
        )
