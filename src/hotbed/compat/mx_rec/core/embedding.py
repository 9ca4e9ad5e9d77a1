# SPDX-License-Identifier: Apache-2.0
"""Sparse tables, and the lookups of a model in them: steps 5 and 6."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.core.arguments import (
    KEY_DTYPES,
    MOST,
    MOST_SHARDS,
    SUMS,
    check_initializer,
    check_name,
    check_padding,
    lanes,
    rows_of,
)
from hotbed.compat.mx_rec.core.asc.feature_spec import FeatureSpec
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.framework import TracedLookup
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer
from hotbed.compat.mx_rec.util.initialize import boolean
from hotbed.embedding.init import Init

__all__ = ["SparseTable", "create_table", "sparse_lookup"]

log = logging.getLogger("hotbed.compat.mx_rec")


class SparseTable(nn.Module):
    """The description of a sparse table; its rows exist from step 8 on.

    `create_table` makes it. It is a module without parameters, so that a model may hold it.

    Attributes:
        name: of the table.
        dim: lanes of a row.
        key_dtype: of its ids, torch.int64 or torch.int32.
        initializer: how a row starts.
        device_vocabulary_size: rows that are expected on the device.
        host_vocabulary_size: rows that are expected in main memory beside them.
        is_save: whether a `Saver` saves it.
        optimizer: its own optimizer; None = the only one.
        send_count: distinct ids of a batch at most, in static shape; None = not given yet.
        default: the value of ids without a row; None = 0.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        key_dtype: torch.dtype,
        initializer: Init,
        sizes: tuple[int, int],
        *,
        is_save: bool = True,
    ) -> None:
        super().__init__()
        self.name = name
        self.dim = dim
        self.key_dtype = key_dtype
        self.initializer = initializer
        self.device_vocabulary_size, self.host_vocabulary_size = sizes
        self.is_save = is_save
        self.optimizer: HashOptimizer | None = None
        self.send_count: int | None = None
        self.default: float | None = None

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

    def size(self) -> int:
        """Return the number of its rows."""
        return len(framework.current().started("SparseTable.size").tables[self.name])

    def capacity(self) -> int:
        """Return the rows that it was made for, device and host together, or its rows if more."""
        expected = self.device_vocabulary_size + self.host_vocabulary_size
        if framework.current().pipeline is None:
            return expected
        return max(expected, self.size())


def create_table(
    key_dtype: torch.dtype,
    dim: int,
    name: str,
    emb_initializer: Init,
    device_vocabulary_size: int = 1,
    host_vocabulary_size: int = 0,
    ssd_vocabulary_size: int = 0,
    ssd_data_path: Sequence[str] = (),
    is_save: bool = True,
    is_dp: bool = False,
    init_param: float = 1.0,
    all2all_gradients_op: str = "sum_gradients",
    enable_merge: bool = False,
    padding_keys: Any = None,
    padding_keys_mask: bool = False,
    padding_keys_len: int | None = None,
    value_dtype: torch.dtype = torch.float32,
    shard_num: int = 1,
    fusion_optimizer_var: bool = True,
    hashtable_threshold: int = 0,
    optimizer_list: Sequence[HashOptimizer] = (),
) -> SparseTable:
    """Describe a sparse table: step 5.

    Args:
        key_dtype: of its ids, torch.int64 or torch.int32.
        dim: lanes of a row, 1 to 8192.
        name: of the table, 1 to 100 letters, digits, underscores and dots.
        emb_initializer: how a row starts, for example `hb.Normal(std=0.01)`.
        device_vocabulary_size: rows that you expect; the table grows past them.
        host_vocabulary_size: rows that you expect beside them.
        ssd_vocabulary_size: must be 0: rows on a disk are not built.
        is_save: whether a `Saver` saves it.
        init_param: multiplies initial rows, -10 to 10.
        optimizer_list: its own optimizer, where there are several.

    Raises:
        ConfigError: a value is wrong, or the name is taken.
        StateError: step 8 has run.
    """
    owner = framework.current()
    owner.check_not_started(f"create_table {name!r}")
    check_name(name, owner.tables)
    where = f"create_table {name!r}"
    checks.one_of(f"{where}: key_dtype", key_dtype, KEY_DTYPES)
    checks.one_of(f"{where}: value_dtype", value_dtype, (torch.float32,))
    checks.one_of(f"{where}: all2all_gradients_op", all2all_gradients_op, SUMS)
    check_initializer(where, emb_initializer, init_param)
    checks.whole_number(f"{where}: shard_num", shard_num, 1, MOST_SHARDS)
    checks.whole_number(f"{where}: hashtable_threshold", hashtable_threshold, 0, MOST)
    check_padding(where, padding_keys, padding_keys_len, masked=padding_keys_mask)
    sizes = rows_of(
        where,
        device_vocabulary_size,
        host_vocabulary_size,
        ssd_vocabulary_size,
        grows=owner.options.use_dynamic_expansion,
    )
    table = SparseTable(
        name,
        lanes(where, dim),
        key_dtype,
        emb_initializer.scaled(init_param),
        sizes,
        is_save=is_save,
    )
    table.optimizer = next(iter(optimizer_list), None)
    owner.tables[name] = table
    return table


def sparse_lookup(
    hashtable: SparseTable,
    ids: FeatureSpec | Tensor,
    send_count: int | None = None,
    is_train: bool = True,
    name: str | None = None,
    modify_graph: bool | str = False,
    batch: Any = None,
    access_and_evict_config: Mapping[str, int | None] | None = None,
    is_grad: bool = True,
    serving_default_value: Any = None,
) -> Tensor:
    """Return the rows of ids, float32 [*ids.shape, dim]: step 6.

    Args:
        hashtable: the table.
        ids: a FeatureSpec of the table; with `modify_graph`, a tensor of ids that the model
            computed.
        send_count: distinct ids of a batch at most; needed in static shape.
        is_train: whether the lookup counts, inserts and learns. False reads only.
        name: not needed.
        modify_graph: whether ids come from the model.
        batch: the batch, needed with a FeatureSpec.
        access_and_evict_config: thresholds, with `modify_graph`.
        is_grad: whether a gradient flows back.
        serving_default_value: the value of ids without a row; None = 0.
    """
    owner = framework.current()
    training = boolean("sparse_lookup: is_train", is_train)
    is_computed = boolean("sparse_lookup: modify_graph", modify_graph)
    if owner.traced is not None and is_computed:
        options = {
            "send_count": send_count,
            "is_train": training,
            "access_and_evict_config": access_and_evict_config,
            "serving_default_value": serving_default_value,
        }
        owner.traced.append(TracedLookup(hashtable, options))
        rows: Tensor = hashtable(ids)
        return rows if is_grad else rows.detach()
    pipeline = owner.started("sparse_lookup")
    if is_computed:
        assert isinstance(ids, Tensor)
        rows = pipeline.look_up_ids(hashtable, ids, training=training)
    else:
        assert isinstance(ids, FeatureSpec)
        rows = pipeline.look_up_spec(hashtable, ids, batch, training=training)
    return rows if is_grad else rows.detach()
