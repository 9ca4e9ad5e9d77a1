# SPDX-License-Identifier: Apache-2.0
"""FeatureLayout: which features are looked up in which tables, and how their results lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed import checks
from hotbed.data.batch import CountedTimes, SharedTimes
from hotbed.data.schema import POOLINGS
from hotbed.embedding.dates import checked_times, take_times
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, RowShapeError

NOTHING_NOTED: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)


@dataclass(frozen=True)
class Feature:
    """A feature: its `name` in the batch, the `table` of its ids, and its `pooling`."""

    name: str
    table: str
    pooling: str = "sum"


@dataclass(frozen=True)
class Buckets:
    """The numbers of rows that a module's results may have; () = any number.

    Rows of zeros fill up the rest, so that what follows sees few shapes.
    """

    sizes: tuple[int, ...]

    @staticmethod
    def of(where: str, sizes: Sequence[int]) -> Buckets:
        """Return the buckets of these sizes, the smallest first.

        Raises ConfigError unless they are integers >= 1. `where`: for the message.
        """
        for size in sizes:
            checks.whole_number(f"{where}: buckets", size, 1)
        return Buckets(tuple(sorted(sizes)))

    def size_for(self, num_rows: int, rows: str) -> int:
        """Return the smallest size with room for `num_rows`.

        Raises RowShapeError if the largest is too small. `rows`: what they are, for the message.
        """
        if not self.sizes:
            return num_rows
        for size in self.sizes:
            if size >= num_rows:
                return size
        raise RowShapeError(
            f"{rows}: a batch has more than the largest of its buckets {list(self.sizes)}, got "
            f"{num_rows}. Give a bucket of at least {num_rows}, or smaller batches."
        )


@dataclass(frozen=True)
class Group:
    """Tables of one dim whose gradients, summed by id, lie in one tensor, table after table.

    Attributes:
        dim: lanes of a row.
        tables: their numbers in the layout.
        names: of the tables, for messages.
        buckets: the numbers of rows that the tensor may have.
    """

    dim: int
    tables: tuple[int, ...]
    names: str
    buckets: Buckets

    def num_rows(self, num_uniques: int) -> int:
        """Return the rows of the tensor for that many distinct ids; the last ones are zeros."""
        return self.buckets.size_for(num_uniques, f"table {self.names}: distinct ids")

    def empty(self, uniques: Sequence[int]) -> Tensor:
        """Return the tensor, whose sums are not set.

        `uniques`: the number of distinct ids of each table of the layout.
        """
        num_uniques = sum(map(uniques.__getitem__, self.tables))
        num_rows = self.num_rows(num_uniques)
        sums = torch.empty(num_rows, self.dim, dtype=torch.float32, device="cpu")
        if num_rows > num_uniques:
            sums[num_uniques:] = 0.0
        return sums


class FeatureLayout:
    """The features of a module, the tables in which they are looked up, and how results lie.

    Args:
        tables: with different names.
        features: of these tables.
        buckets: the numbers of rows that results may have, see `TableModule`.
        of_samples: returns the times of a batch, as a lookup in train mode gets them, for the
            number of samples that its ids have; None = they have those of the batch.

    Attributes:
        numbers: of the table of each feature.
        columns: of each feature, the number of its table and its pooling.
        dims: of each feature.
        pooled: whether each feature is.
        sequences: the numbers of the features that are not.
        output_dim: lanes of all pooled features side by side.
        groups: tables of one dim and rule.
        dated: the tables that use times.
        admitting: the tables that refuse ids.

    Raises:
        ConfigError: two tables have one name, or a feature has an unknown table or pooling.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        buckets: Sequence[int] = (),
        of_samples: Callable[[Any, int], Any] | None = None,
    ) -> None:
        self.tables = list(tables)
        self.of_samples = of_samples
        self.features = tuple(features)
        number_of = {table.name: number for number, table in enumerate(self.tables)}
        if len(number_of) != len(self.tables):
            raise ConfigError(
                f"embedding: table names must differ, got {[t.name for t in self.tables]}. "
                "Rename one."
            )
        for feature in self.features:
            if feature.pooling not in POOLINGS:
                raise ConfigError(
                    f"feature {feature.name!r}: unknown pooling, got {feature.pooling!r}. "
                    f"Use one of {', '.join(POOLINGS)}."
                )
            if feature.table not in number_of:
                raise ConfigError(
                    f"feature {feature.name!r}: unknown table {feature.table!r}, got tables "
                    f"{sorted(number_of)}. Give that table."
                )
        self.numbers = [number_of[feature.table] for feature in self.features]
        self.columns = [(number_of[feature.table], feature.pooling) for feature in self.features]
        self.dims = [self.tables[number].dim for number in self.numbers]
        self.pooled = [feature.pooling != "none" for feature in self.features]
        self.sequences = [number for number, pooled in enumerate(self.pooled) if not pooled]
        self.output_dim = sum(
            dim for dim, pooled in zip(self.dims, self.pooled, strict=True) if pooled
        )
        self.buckets = Buckets.of(f"embedding {sorted(number_of)}", buckets)
        self.groups = self._grouped()
        self.dated = [table for table in self.tables if table.needs_times or table.keeps_times]
        self.admitting = [table for table in self.tables if table.native_admits]

    def _grouped(self) -> list[Group]:
        numbers: dict[tuple[int, Any], list[int]] = {}
        for number, table in enumerate(self.tables):
            numbers.setdefault((table.dim, table.rule), []).append(number)
        groups = []
        for (dim, _), members in numbers.items():
            names = ", ".join(repr(self.tables[number].name) for number in members)
            groups.append(Group(dim, tuple(members), names, self.buckets))
        return groups

    def table_of(self, number: int) -> Table:
        """Return the table of a feature."""
        return self.tables[self.numbers[number]]

    def times(self, time: Any, num_samples: int) -> np.ndarray | None:
        """Return the times of the samples, int64 microseconds [n], if a table uses them.

        Raises ConfigError or RowShapeError if they are missing or wrong.
        """
        if isinstance(time, (CountedTimes, SharedTimes)):
            time = time.time
        if not self.dated:
            return None
        if isinstance(time, Tensor):
            time = time.detach().cpu().numpy()
        times = [checked_times(table, time, num_samples) for table in self.dated]
        return next((checked for checked in times if checked is not None), None)

    def mapping(
        self, times: np.ndarray | None, *, training: bool
    ) -> AbstractContextManager[Callable[[], None]]:
        """Note around a native call that the tables map a batch; see `dates.take_times`.

        If the call raises, nothing is noted. The block gets what undoes it.
        """
        dated = self.dated if training else []
        if not dated and not self.admitting:
            return NOTHING_NOTED
        return self._noted(dated, times)

    @contextmanager
    def _noted(
        self, dated: Sequence[Table], times: np.ndarray | None
    ) -> Iterator[Callable[[], None]]:
        undos = [take_times(table, times) for table in dated]

        def undo() -> None:
            for undo_table in undos:
                undo_table()

        try:
            yield undo
        except Exception:
            undo()
            raise
        for table in self.admitting:
            table.watch_admission()

    def split(
        self, flat: Tensor | None, sequences: Sequence[Tensor | None]
    ) -> Iterator[Tensor | None]:
        """Yield the part of each feature of a result, or of its gradient."""
        rest = iter(sequences)
        start = 0
        for dim, pooled in zip(self.dims, self.pooled, strict=True):
            if not pooled:
                yield next(rest)
                continue
            yield None if flat is None else flat[:, start : start + dim]
            start += dim
