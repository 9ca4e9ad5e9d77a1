# SPDX-License-Identifier: Apache-2.0
"""Columns and readers: which ids of a batch the pipeline looks up in which table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hotbed.compat.mx_rec.feature_spec import FeatureSpec
from hotbed.data.batch import Batch
from hotbed.embedding.lookups.host_ids import shaped_ids
from hotbed.errors import DataError
from hotbed.training.step.example import seconds_as_times

if TYPE_CHECKING:
    from hotbed.data.batch import Ids


@dataclass(frozen=True)
class Column:
    """One feature of a batch: `name` in the collection, and the name of its `table`."""

    name: str
    table: str


class Reader(ABC):
    """Reads the ids of each column from the batches of a data set.

    Attributes:
        columns: in the order in which their ids are looked up.
        rest: columns whose ids are looked up in a call of their own, and not mapped ahead.
        is_training: whether lookups of these batches may change tables.
    """

    columns: tuple[Column, ...]
    rest: tuple[Column, ...] = ()
    is_training: bool

    def column_of(self, spec: FeatureSpec) -> Column:
        """Return the column of a feature."""
        return Column(f"{spec.table}/{spec.key}", spec.table)

    @abstractmethod
    def read(self, raw: Any) -> tuple[Batch, dict[str, tuple[int, ...]]]:
        """Return the ids of each column with the times, and the shape of each column's ids.

        Args:
            raw: a batch of tensors, as the loop gets it.
        """


class InsertFunction(Protocol):
    """The insert function of a data set, as step 8 and the pipeline see it.

    Attributes:
        features: those of its specs that have ids.
        timestamp: where the times of a batch lie; None = they are not read.
        reader: reads them.
    """

    @property
    def features(self) -> list[FeatureSpec]: ...

    @property
    def timestamp(self) -> str | int | None: ...

    @property
    def reader(self) -> Reader: ...

    def check(self, tables: Container[str]) -> None:
        """Raise ConfigError if a table is missing, or the times that an eviction needs."""


class SpecReader(Reader):
    """Reads the features of an insert function: the values at their `index_key`.

    Each feature has a column of its own, also where two have one key and table: Rec SDK looks up
    and counts the ids of all features of a table.
    """

    def __init__(self, specs: Sequence[FeatureSpec], *, is_training: bool) -> None:
        self._columns: list[tuple[FeatureSpec, Column]] = []
        for spec in specs:
            if not spec.is_timestamp:
                self._columns.append((spec, self._new_column(spec)))
        self.columns = tuple(column for _, column in self._columns)
        self.is_training = is_training
        self._keys = [spec.key for spec, _ in self._columns]
        self._clock = next((spec for spec in specs if spec.is_timestamp), None)

    def column_of(self, spec: FeatureSpec) -> Column:
        """Return the column of a feature; a feature of another insert function has the first of
        its key and table.
        """
        alike = []
        for feature, column in self._columns:
            if feature is spec:
                return column
            if (feature.table, feature.key) == (spec.table, spec.key):
                alike.append(column)
        return alike[0] if alike else super().column_of(spec)

    def _new_column(self, spec: FeatureSpec) -> Column:
        """Return a column for the next feature, with a name of its own."""
        names = {column.name for _, column in self._columns}
        column = super().column_of(spec)
        name = column.name
        number = 1
        while name in names:
            number += 1
            name = f"{column.name} ({number})"
        return Column(name, column.table)

    def read(self, raw: Any) -> tuple[Batch, dict[str, tuple[int, ...]]]:
        ids: dict[str, Ids] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for column, key in zip(self.columns, self._keys, strict=True):
            values = raw.ids if isinstance(raw, Batch) else raw
            ids[column.name], shapes[column.name] = shaped_ids(_entry(values, key), column.name)
        time = None
        if self._clock is not None and isinstance(raw, Batch):
            time = raw.time
        elif self._clock is not None:
            time = seconds_as_times(_entry(raw, self._clock.key), len(next(iter(ids.values()))))
        return Batch(ids, time=time), shapes


def _entry(values: Any, key: str | int) -> Any:
    """Return the values of a feature; raise DataError if the batch lacks them."""
    try:
        if isinstance(values, Mapping | tuple | list):
            return values[key]  # type: ignore[index]  # a wrong key is caught below
        return getattr(values, str(key))
    except (AttributeError, KeyError, IndexError, TypeError):
        raise DataError(
            f"FeatureSpec: a batch has no values at its index_key, got {key!r} and a batch of "
            f"{_names(values)}. Correct index_key, or the batch."
        ) from None


def _names(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"the keys {list(values)}"
    if isinstance(values, tuple | list):
        return f"{len(values)} entries"
    return type(values).__name__
