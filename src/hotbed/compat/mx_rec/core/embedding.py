# SPDX-License-Identifier: Apache-2.0
"""Sparse tables, and the lookups of a model in them: steps 5 and 6."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.checks import boolean
from hotbed.compat.mx_rec.constants.constants import ApplyGradientsStrategy, MxRecMode
from hotbed.compat.mx_rec.core.arguments import TableArguments, check_lookup_name
from hotbed.compat.mx_rec.description import TableDescription
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.feature_spec import FeatureSpec, Thresholds
from hotbed.compat.mx_rec.framework import Framework, TracedLookup
from hotbed.compat.mx_rec.no_effect import ARGUMENTS
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer
from hotbed.compat.mx_rec.updates import RowOptimizer
from hotbed.embedding.init import Init
from hotbed.embedding.policy import ADMISSION_BYTES
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.parallel import at

__all__ = ["SparseTable", "create_table", "sparse_lookup"]

log = logging.getLogger("hotbed.compat.mx_rec")


class SparseTable(TableDescription):
    """A sparse table, which `create_table` describes; its rows exist from step 8 on."""

    @property
    def table(self) -> Table:
        """The engine's table with its rows, which networks and exports of Hotbed take.

        Raises:
            CallError: step 8 has not run.
        """
        return framework.current().started(f"table {self.name!r}").tables[self.name]

    def capacity(self) -> int:
        """Return the rows that it was made for, on all levels together, or its rows if more."""
        expected = self.rows_in_memory + self.ssd_vocabulary_size
        if framework.current().pipeline is None:
            return expected
        return max(expected, self.size())


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
    on_disk = [each for each in owner.tables.values() if each.ssd_vocabulary_size]
    table.folder = arguments.folder(len(on_disk))
    table.admission_bytes = admission_bytes
    table.averages = arguments.averages
    table.optimizer = _optimizer_of(arguments.where, optimizer_list, owner.optimizers)
    owner.tables[name] = table
    return table


def _optimizer_of(where: str, listed: Any, every: Sequence[RowOptimizer]) -> RowOptimizer | None:
    if listed is None:
        return None
    is_list = isinstance(listed, list | tuple)
    if not is_list or len(listed) > 1 or not all(optimizer in every for optimizer in listed):
        raise ConfigError(
            f"{where}: optimizer_list holds the one optimizer of the table, got {listed!r}. Give "
            "one that a factory of mx_rec.optimizers returned."
        )
    return next(iter(listed), None)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
@at("sparse_lookup")
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
        serving_default_value: the value of each lane of an id without a row: in training one that
            was not admitted, in evaluation and serving also an unknown one. A tensor has one
            number, or equal lanes. It belongs to the table. None: 0 with an access threshold of 0
            or more; without one, such an id reads as the row that it would start with.
        dim: the lanes of the table, or None; older programs pass it.

    Raises:
        ConfigError: the arguments do not fit the table, the mode or the batch.
        CallError: step 8 has not run.
    """
    owner = framework.current()
    training = boolean("sparse_lookup: is_train", is_train)
    is_computed = boolean("sparse_lookup: modify_graph", modify_graph)
    flows = boolean("sparse_lookup: is_grad", is_grad)
    _check_table(hashtable, owner.tables, dim)
    check_lookup_name(hashtable.name, name)
    ARGUMENTS.log_no_effect("sparse_lookup.name", when=name is not None)
    hashtable.set_lookup(
        send_count, serving_default_value, needs_count=not owner.options.use_dynamic
    )
    if is_computed and owner.traced is not None:
        options = {"is_train": training, "access_and_evict_config": access_and_evict_config}
        owner.traced.append(TracedLookup(hashtable, options))
        rows: Tensor = hashtable(_checked_ids(hashtable, ids))
    elif is_computed:
        rows = _look_up_computed(owner, hashtable, ids, training=training)
    else:
        pipeline = owner.started("sparse_lookup")
        pipeline.note_lookup(hashtable)
        spec = _checked_spec(hashtable, ids, access_and_evict_config)
        rows = pipeline.look_up_spec(spec, batch, training=training)
    return rows if flows else rows.detach()


def _look_up_computed(owner: Framework, table: SparseTable, ids: Any, *, training: bool) -> Tensor:
    """Return the rows of ids that a model computed, in automatic mode."""
    owner.started("sparse_lookup").note_lookup(table)
    computed = _checked_ids(table, ids)
    if owner.automatic is None:
        raise CallError(
            "sparse_lookup: ids of a model need modify_graph_and_start_emb_cache(model, ...), got "
            "a pipeline that start_asc_pipeline started. Give a FeatureSpec."
        )
    return owner.automatic.look_up(table.name, computed, training=training)


def _check_table(table: Any, tables: Mapping[str, TableDescription], dim: int | None) -> None:
    if not isinstance(table, SparseTable) or tables.get(table.name) is not table:
        raise ConfigError(
            f"sparse_lookup: hashtable: not a table of this program, got {table!r}. Give what "
            "create_table returned after init."
        )
    if dim not in (None, table.dim):
        raise ConfigError(
            f"sparse_lookup in {table.name!r}: dim is that of the table, {table.dim}, got {dim}. "
            "Leave it out."
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
