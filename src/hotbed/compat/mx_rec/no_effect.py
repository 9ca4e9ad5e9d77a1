# SPDX-License-Identifier: Apache-2.0
"""Arguments of Rec SDK that have no effect here."""

from __future__ import annotations

from collections.abc import Mapping

from hotbed.compat.no_effect import NoEffect

_OWNERS = "each rank owns a part of the rows of every table"
_LAUNCHER = "the launcher says which ranks there are"
_GLOO = "ranks are connected by torch.distributed over gloo"
_GROWS = "a table grows with its rows"
_ONE_UPDATE = "a row is updated by one thread at a time"
_NAMES = "state has no names of its own"
_EXPANSION = "in dynamic expansion all rows of a table lie in memory"
_GRAPH = "a program in PyTorch keeps no graph"
REASONS: Mapping[str, str] = {
    "init.eval_steps": "an evaluation ends with its loop",
    "init.bind_cpu": "threads are placed by the system",
    "init.use_lccl": _GLOO,
    "init.use_shm_swap": "rows of training lie in memory",
    "init.use_mpi": _GLOO,
    "init.rank_id": _LAUNCHER,
    "init.rank_size": _LAUNCHER,
    "init.local_rank_size": _LAUNCHER,
    "init.use_hot": "rows of frequent ids need no place of their own",
    "init.prefetch_batch_number": "ids are mapped two batches ahead",
    "init.recent_key_count_threshold": "a delta holds every row that changed",
    "optimizer.use_locking": _ONE_UPDATE,
    "optimizer.use_fusion_optim": "one native call updates all tables",
    "optimizer.accum_name": _NAMES,
    "optimizer.linear_name": _NAMES,
    "feature_spec.batch_size": "batches have their own size",
    "feature_spec.feat_count": "a sample has any number of ids",
    "insert.dump_graph": _GRAPH,
    "create_table.ssd_data_path": "rows lie in memory without ssd_vocabulary_size",
    "create_table.host_vocabulary_size": _EXPANSION,
    "create_table.ssd_vocabulary_size": _EXPANSION,
    "create_table.key_dtype": "any integer of 64 bits is an id",
    "create_table.is_dp": _OWNERS,
    "create_table.enable_merge": "one native call looks up all tables",
    "create_table.padding_keys_len": "batches have their own size",
    "create_table.shard_num": _OWNERS,
    "create_table.fusion_optimizer_var": "a row holds its state beside its values",
    "create_table.hashtable_threshold": _GROWS,
    "create_table.mode": "ids always become rows on the host",
    "create_table.apply_gradients_strategy": "the gradients of an id are summed before its update",
    "sparse_lookup.name": "a lookup has no node in a graph",
    "modify_graph.full_graph": _GRAPH,
    "modify_graph.dump_graph": "report.picture(path) draws the model",
    "slicer.op_types": "step 8 finds what computes the ids, whatever operations these are",
    "slicer.orphans": "ids that do not come from the batch are looked up in the forward pass",
    "clear_channel.channel": "each loop over data begins anew",
}
"""Argument -> why it has no effect."""

WARNED = (
    "init.rank_id",
    "init.rank_size",
    "init.local_rank_size",
    "init.use_shm_swap",
    "init.recent_key_count_threshold",
    "create_table.ssd_data_path",
    "create_table.host_vocabulary_size",
    "create_table.ssd_vocabulary_size",
    "create_table.is_dp",
    "create_table.enable_merge",
    "create_table.shard_num",
    "create_table.apply_gradients_strategy",
)
"""What concerns rows, updates or devices: these lines are warnings."""

ARGUMENTS = NoEffect("mx_rec", REASONS, WARNED)
