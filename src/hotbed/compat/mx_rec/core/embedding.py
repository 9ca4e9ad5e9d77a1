# SPDX-License-Identifier: Apache-2.0
"""Sparse tables, and the lookups of a model in them: steps 5 and 6."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import pyarrow as pa
import torch
from torch import Tensor, fx, nn

from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.checks import MOST_INT, boolean
from hotbed.compat.mx_rec.constants.constants import ApplyGradientsStrategy, MxRecMode
from hotbed.compat.mx_rec.core.arguments import TableArguments, check_lookup_name
from hotbed.compat.mx_rec.core.asc.feature_spec import FeatureSpec, Thresholds
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.framework import TracedLookup
from hotbed.compat.mx_rec.no_effect import log_no_effect
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer
from hotbed.embedding.init import Init
from hotbed.embedding.policy import ADMISSION_BYTES
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError

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
        send_count: distinct ids of a batch at most, in static shape; None = not known yet.
        default: the value of ids without a row; None = not known yet, and 0.
        padding: ids whose rows take no update.
        admission_bytes: memory for the counts of ids that wait for their row.
        thresholds: those of its features; None before step 8.
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
        self.padding: tuple[int, ...] = ()
        self.admission_bytes = ADMISSION_BYTES
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
            if isinstance(default, Tensor) and default.numel() == 1:
                default = default.item()
            checks.finite_number(where, default)
            self.default = _same(where, self.default, default)

    @property
    def table_name(self) -> str:
        """The name of the table."""
        return self.name

    @property
    def table(self) -> Table:
        """The engine's table with its rows, which networks and exports of Hotbed take.

        Raises:
            CallError: step 8 has not run.
        """
        return framework.current().started(f"table {self.name!r}").tables[self.name]

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

    def capacity(self) -> int:
        """Return the rows that it was made for, device and host together, or its rows if more."""
        expected = self.device_vocabulary_size + self.host_vocabulary_size
        if framework.current().pipeline is None:
            return expected
        return max(expected, self.size())

    @property
    def expected_rows(self) -> int | None:
        """The rows that the program expects; None where it has left its sizes out."""
        expected = self.device_vocabulary_size + self.host_vocabulary_size
        return expected if expected > 1 else None


def _same(where: str, before: Any, value: Any) -> Any:
    """Return a value of a table; raise ConfigError if another lookup gave another."""
    if before not in (None, value):
        raise ConfigError(
            f"{where}: all lookups of a table give the same, got {value} and {before}. Give one."
        )
    return value


def create_table(
    key_dtype: torch.dtype,
    dim: int | Sequence[int],
    name: str,
    emb_initializer: Init,
    device_vocabulary_size: int = 1,
    host_vocabulary_size: int = 0,
    ssd_vocabulary_size: int = 0,
    ssd_data_path: Sequence[str] = (),
    is_save: bool | str = True,
    is_dp: bool | str = False,
    init_param: float = 1.0,
    all2all_gradients_op: str = "sum_gradients",
    enable_merge: bool | str = False,
    padding_keys: Any = None,
    padding_keys_mask: bool | str = False,
    padding_keys_len: int | None = None,
    value_dtype: torch.dtype = torch.float32,
    shard_num: int = 1,
    fusion_optimizer_var: bool = True,
    hashtable_threshold: int = 0,
    optimizer_list: Sequence[HashOptimizer] | None = (),
    mode: MxRecMode | str = MxRecMode.ASC,
    apply_gradients_strategy: ApplyGradientsStrategy | str = ApplyGradientsStrategy.DIRECT_APPLY,
    admission_bytes: int = ADMISSION_BYTES,
) -> SparseTable:
    """Describe a sparse table: step 5. `TableArguments` says what the arguments mean.

    Raises:
        ConfigError: a value is wrong, or the name is taken.
        StateError: step 8 has run.

    Example: `mx.create_table(torch.int64, 16, "user", hb.Normal(std=0.01))`
    """
    arguments = TableArguments(**locals())
    owner = framework.current()
    owner.check_not_started(arguments.where)
    if name in owner.tables:
        raise ConfigError(
            f"create_table: each table has a name of its own, got the name {name!r} again. Rename "
            "the table, or look it up several times."
        )
    table = SparseTable(
        name,
        arguments.lanes,
        key_dtype,
        emb_initializer.scaled(init_param),
        arguments.rows(grows=owner.options.use_dynamic_expansion),
        is_save=arguments.saves,
    )
    table.padding = arguments.padding
    table.admission_bytes = admission_bytes
    table.optimizer = _own_optimizer(arguments.where, optimizer_list, owner.optimizers)
    owner.tables[name] = table
    return table


def _own_optimizer(where: str, own: Any, every: Sequence[HashOptimizer]) -> HashOptimizer | None:
    if own is None:
        return None
    is_list = isinstance(own, list | tuple)
    if not is_list or len(own) > 1 or not all(optimizer in every for optimizer in own):
        raise ConfigError(
            f"{where}: optimizer_list holds the one optimizer of the table, got {own!r}. Give "
            "one that a factory of mx_rec.optimizers returned."
        )
    return next(iter(own), None)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
def sparse_lookup(
    hashtable: SparseTable,
    ids: FeatureSpec | Tensor,
    send_count: int | None = None,
    is_train: bool | str = True,
    name: str | None = None,
    modify_graph: bool | str = False,
    batch: Any = None,
    access_and_evict_config: Mapping[str, int | None] | None = None,
    is_grad: bool | str = True,
    serving_default_value: Any = None,
    dim: int | None = None,
) -> Tensor:
    """Return the rows of ids, [...] -> float32 [..., dim]: step 6.

    Args:
        hashtable: the table.
        ids: a FeatureSpec of the table; with `modify_graph`, a tensor of ids that the model
            computed.
        send_count: the most distinct ids of a batch in this table. Static shape needs it, and all
            lookups of the table give the same.
        is_train: whether the lookup counts, inserts and learns. False reads only.
        name: not needed.
        modify_graph: whether ids come from the model.
        batch: the batch as the loop got it, needed with a FeatureSpec.
        access_and_evict_config: thresholds, with `modify_graph`.
        is_grad: whether a gradient flows back.
        serving_default_value: the value of each lane of an id that was not admitted; None = 0. It
            belongs to the table: serving uses it, too. It needs an access threshold of 0 or more:
            without one, an id without a row reads as the row that it would start with.
        dim: the lanes of the table, or None; older programs pass it.

    Raises:
        ConfigError: the arguments do not fit the table, the mode or the batch.
        CallError: step 8 has not run.
    """
    owner = framework.current()
    training = boolean("sparse_lookup: is_train", is_train)
    is_computed = boolean("sparse_lookup: modify_graph", modify_graph)
    flows = boolean("sparse_lookup: is_grad", is_grad)
    _check_table(hashtable, owner.tables)
    if dim not in (None, hashtable.dim):
        raise ConfigError(
            f"sparse_lookup in {hashtable.name!r}: dim is that of the table, {hashtable.dim}, got "
            f"{dim}. Leave it out."
        )
    check_lookup_name(hashtable.name, name)
    log_no_effect("sparse_lookup", name=name is not None)
    hashtable.set_lookup(
        send_count, serving_default_value, needs_count=not owner.options.use_dynamic
    )
    if is_computed and owner.traced is not None:
        options = {"is_train": training, "access_and_evict_config": access_and_evict_config}
        owner.traced.append(TracedLookup(hashtable, options))
        rows: Tensor = hashtable(_checked_ids(hashtable, ids))
        return rows if flows else rows.detach()
    pipeline = owner.started("sparse_lookup")
    pipeline.note_lookup(hashtable)
    if is_computed:
        computed = _checked_ids(hashtable, ids)
        rows = pipeline.look_up_ids(hashtable, computed, training=training)
    else:
        spec = _checked_spec(hashtable, ids, access_and_evict_config)
        rows = pipeline.look_up_spec(spec, batch, training=training)
    return rows if flows else rows.detach()


def _check_table(table: Any, tables: Mapping[str, SparseTable]) -> None:
    if not isinstance(table, SparseTable) or tables.get(table.name) is not table:
        raise ConfigError(
            f"sparse_lookup: hashtable: not a table of this program, got {table!r}. Give what "
            "create_table returned after init."
        )


def _checked_ids(table: SparseTable, ids: Any) -> Tensor:
    if not isinstance(ids, Tensor | fx.Proxy):  # a proxy stands for a tensor in a trace
        raise ConfigError(
            f"sparse_lookup in {table.name!r}: modify_graph takes a tensor of ids, got "
            f"{type(ids).__name__}. Leave out modify_graph to look up a FeatureSpec."
        )
    return cast(Tensor, ids)


def _checked_spec(table: SparseTable, spec: Any, config: Any) -> FeatureSpec:
    where = f"sparse_lookup in {table.name!r}"
    if not isinstance(spec, FeatureSpec):
        raise ConfigError(
            f"{where}: ids must be a FeatureSpec, got {type(spec).__name__}. Give the FeatureSpec, "
            "or modify_graph=True for ids that the model computes."
        )
    if config is not None:
        raise ConfigError(
            f"{where}: access_and_evict_config belongs to modify_graph=True, got {config!r} with "
            f"FeatureSpec {spec.name!r}. Give the thresholds to the FeatureSpec."
        )
    if spec.is_timestamp or spec.table != table.name:
        kind = "a timestamp" if spec.is_timestamp else f"a feature of table {spec.table!r}"
        raise ConfigError(
            f"{where}: the feature belongs to another table, got FeatureSpec {spec.name!r}, "
            f"{kind}. Look it up in its own table."
        )
    agreed = table.thresholds or Thresholds()
    if spec.thresholds.values != agreed.values:
        raise ConfigError(
            f"{where}: the thresholds of a table are those of its insert function, got "
            f"{spec.thresholds} of FeatureSpec {spec.name!r} and {agreed}. Give this FeatureSpec "
            "to get_asc_insert_func(tgt_key_specs=...)."
        )
    return spec
