# SPDX-License-Identifier: Apache-2.0
"""TableDescription: what a program says of a sparse table, in `create_table` and its lookups."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.compat.mx_rec.checks import MOST_INT
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.feature_spec import Thresholds
from hotbed.compat.mx_rec.updates import RowOptimizer
from hotbed.embedding.init import Init
from hotbed.embedding.policy import ADMISSION_BYTES
from hotbed.embedding.table import Table
from hotbed.embedding.tier import Ram, Ssd, Tier
from hotbed.errors import ConfigError


class TableDescription(nn.Module, ABC):
    """The description of a sparse table; its rows exist from step 8 on.

    It is a module without parameters, so that a model may contain it.

    Attributes:
        name: of the table.
        dim: lanes of a row.
        key_dtype: of its ids, torch.int64 or torch.int32.
        initializer: how a row starts.
        device_vocabulary_size: rows that are expected on the device.
        host_vocabulary_size: rows that are expected in main memory beside them.
        ssd_vocabulary_size: rows that are expected on a disk beside them; 0 = none lie there.
        is_save: whether a `Saver` saves it.
        optimizer: its own optimizer; None = the only one.
        send_count: distinct ids of a batch at most, in static shape; None = not known yet.
        default: the value of ids without a row; None = not known yet, and 0.
        padding: ids whose rows take no update.
        admission_bytes: memory for the counts of ids that wait for their row.
        folder: of the rows on a disk; "" = the working directory.
        thresholds: those of its features; None before step 8.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        key_dtype: torch.dtype,
        initializer: Init,
        sizes: tuple[int, int, int],
        *,
        is_save: bool = True,
    ) -> None:
        super().__init__()
        self.name = name
        self.dim = dim
        self.key_dtype = key_dtype
        self.initializer = initializer
        self.device_vocabulary_size, self.host_vocabulary_size, self.ssd_vocabulary_size = sizes
        self.is_save = is_save
        self.optimizer: RowOptimizer | None = None
        self.send_count: int | None = None
        self.default: float | None = None
        self.padding: tuple[int, ...] = ()
        self.admission_bytes = ADMISSION_BYTES
        self.averages = False
        self.folder = ""
        self.thresholds: Thresholds | None = None

    def extra_repr(self) -> str:
        return f"{self.name!r}, dim={self.dim}"

    @property
    def embedding_dim(self) -> int:
        """Lanes of a row, by the name that traces of models ask for."""
        return self.dim

    def forward(self, ids: Tensor) -> Tensor:
        """Reject a call: traces of models put a stand-in here."""
        raise CallError(
            f"table {self.name!r}: it is looked up by sparse_lookup, got a call of the table. Use "
            "mx_rec.sparse_lookup(table, ids, modify_graph=True)."
        )

    def set_lookup(self, send_count: int | None, default: Any, *, needs_count: bool) -> None:
        """Set what a lookup says of the whole table: `send_count`, and the value of absent ids.

        Args:
            send_count: of the lookup; None = not given.
            default: its `serving_default_value`; None = not given.
            needs_count: whether shapes are static, so that `send_count` is needed.

        Raises:
            ConfigError: a value is wrong or missing, or another lookup of the table gave another.
        """
        if needs_count:
            where = f"sparse_lookup in {self.name!r}: send_count"
            if send_count is None:
                raise ConfigError(
                    f"{where}: static shape needs the most distinct ids of a batch, got None. Give "
                    "send_count, or init(use_dynamic=True)."
                )
            checks.whole_number(where, send_count, 1, MOST_INT)
            self.send_count = _same(where, self.send_count, send_count)
        if default is not None:
            where = f"sparse_lookup in {self.name!r}: serving_default_value"
            default = _one_lane(where, default, self.dim)
            checks.finite_number(where, default)
            self.default = _same(where, self.default, default)

    @property
    def table_name(self) -> str:
        """The name of the table."""
        return self.name

    @property
    @abstractmethod
    def table(self) -> Table:
        """The engine's table with its rows, which networks and exports of Hotbed take.

        Raises:
            CallError: step 8 has not run.
        """

    def export(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows as Arrow batches, by rising id within a partition.

        Columns: partition, id, value [dim], state, and the count and times that the table keeps.

        Raises:
            CallError: step 8 has not run.
        """
        return self.table.export()

    def size(self) -> int:
        """Return the number of its rows."""
        return len(self.table)

    @property
    def expected_rows(self) -> int | None:
        """The rows that the program expects; None where it has left its sizes out."""
        expected = self.rows_in_memory + self.ssd_vocabulary_size
        return expected if expected > 1 else None

    @property
    def rows_in_memory(self) -> int:
        """The rows that the program expects on the device and the host together."""
        return self.device_vocabulary_size + self.host_vocabulary_size

    def tier(self, num_ranks: int) -> Tier:
        """Where its rows lie; of several ranks each has its part of those in memory."""
        if not self.ssd_vocabulary_size:
            return Ram()
        rows = math.ceil(self.rows_in_memory / num_ranks)
        name = "device_vocabulary_size + host_vocabulary_size"
        return Ssd(self.folder or os.getcwd(), rows).named(f"{name} of each rank")


def _one_lane(where: str, default: Any, dim: int) -> Any:
    """Return the number of a default that may be a tensor of one lane, or of all lanes alike."""
    if isinstance(default, np.ndarray | list | tuple):
        try:
            default = torch.as_tensor(default)
        except (TypeError, ValueError):  # not numbers
            return default
    if not isinstance(default, Tensor):
        return default
    if default.numel() not in (1, dim) or (default != default.flatten()[0]).any():
        raise ConfigError(
            f"{where}: a table has one default for all of its {dim} lanes, got "
            f"{default.tolist()!s:.80}. Give a number, or a tensor of equal lanes."
        )
    return default.flatten()[0].item()


def _same(where: str, before: Any, value: Any) -> Any:
    """Return a value of a table; raise ConfigError if another lookup gave another."""
    if before not in (None, value):
        raise ConfigError(
            f"{where}: all lookups of a table give the same, also those before a restoration, got "
            f"{value} and {before}. Give one."
        )
    return value
