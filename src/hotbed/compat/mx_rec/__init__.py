# SPDX-License-Identifier: Apache-2.0
"""Rec SDK's names: `from hotbed.compat import mx_rec as mx`.

The eight steps of a training program become values of the engine, which does the work.
docs/migrate/recsdk.md shows both side by side.

util/            init and its end, collections, ranks
core/            features, tables, lookups and eviction
optimizers/      sparse optimizers
saver/           saving, restoring, warm start
graph/           automatic graph modification
constants/       names that programs import
framework.py     Framework: the state of a program between init and its end
feature_spec.py  FeatureSpec, Thresholds: a feature, its table and its thresholds
automatic.py     Automatic: the lookups of a model from step 8 on
options.py       Options: the keywords of `init`
description.py   TableDescription: what a program says of a sparse table
tables.py        tables and pipeline of the engine from these descriptions
pipeline.py      Pipeline: batches, lookups and updates from step 8 on
columns.py       Column, Reader: which ids of a batch belong to which table
progress.py      Progress: how far training has come, and what is mapped ahead
updates.py       Updates: the lookups that wait for an update
ranks.py         ProgramRanks: the processes of a program
checks.py        checks of arguments that only Rec SDK needs
errors.py        errors of calls at a wrong time
no_effect.py     arguments without effect, with their reasons
"""

from hotbed import __version__ as __version__
from hotbed.compat.mx_rec import optimizers
from hotbed.compat.mx_rec.core.asc.helper import get_asc_insert_func
from hotbed.compat.mx_rec.core.asc.manager import start_asc_pipeline
from hotbed.compat.mx_rec.core.embedding import SparseTable, create_table, sparse_lookup
from hotbed.compat.mx_rec.core.feature_process import EvictHook
from hotbed.compat.mx_rec.feature_spec import FeatureSpec
from hotbed.compat.mx_rec.graph.modifier import GraphModifierHook, modify_graph_and_start_emb_cache
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer
from hotbed.compat.mx_rec.saver.hook import CheckpointSaverHook
from hotbed.compat.mx_rec.saver.saver import Saver, latest_checkpoint
from hotbed.compat.mx_rec.saver.warm_start import WarmStartSettings, warm_start
from hotbed.compat.mx_rec.util.initialize import (
    ConfigInitializer,
    get_initializer,
    get_rank_id,
    get_rank_size,
    init,
    terminate_config_initializer,
    version,
)
from hotbed.compat.mx_rec.util.ops import import_host_pipeline_ops
from hotbed.compat.mx_rec.util.variable import (
    add_to_collection,
    get_collection,
    get_dense_and_sparse_variable,
)

__all__ = [
    "CheckpointSaverHook",
    "ConfigInitializer",
    "EvictHook",
    "FeatureSpec",
    "GraphModifierHook",
    "HashOptimizer",
    "Saver",
    "SparseTable",
    "WarmStartSettings",
    "add_to_collection",
    "create_table",
    "get_asc_insert_func",
    "get_collection",
    "get_dense_and_sparse_variable",
    "get_initializer",
    "get_rank_id",
    "get_rank_size",
    "import_host_pipeline_ops",
    "init",
    "latest_checkpoint",
    "modify_graph_and_start_emb_cache",
    "optimizers",
    "sparse_lookup",
    "start_asc_pipeline",
    "terminate_config_initializer",
    "version",
    "warm_start",
]
