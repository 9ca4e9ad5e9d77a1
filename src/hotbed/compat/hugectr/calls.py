# SPDX-License-Identifier: Apache-2.0
"""The functions of HugeCTR that make clauses."""

from __future__ import annotations

from typing import Any

from hotbed.compat.hugectr.clause import by_order
from hotbed.compat.hugectr.clauses import (
    EmbeddingTableConfig,
    EmbeddingTrainingCacheParams,
    FitParams,
    HMemCacheConfig,
    OptParams,
    ParamFiles,
    Solver,
)
from hotbed.compat.hugectr.enums import TrainPSType_t
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError

__all__ = [
    "CreateETC",
    "CreateHMemCache",
    "CreateMOS",
    "CreateOptimizer",
    "CreateSolver",
    "EmbeddingTablePlaceHolder",
    "solver_parser_helper",
]

CreateSolver = Solver
CreateOptimizer = OptParams
CreateHMemCache = HMemCacheConfig
EmbeddingTablePlaceHolder = EmbeddingTableConfig  # its name in v3.7

_SOLVER = [
    "seed",
    "max_eval_batches",
    "batchsize_eval",
    "batchsize",
    "model_file",
    "dense_opt_states_file",
    "embedding_files",
    "sparse_opt_states_file",
    "vvgpu",
    "use_mixed_precision",
    "enable_tf32_compute",
    "scaler",
    "i64_input_key",
    "use_algorithm_search",
    "use_cuda_graph",
    "repeat_dataset",
    "max_iter",
    "num_epochs",
    "display",
    "snapshot",
    "eval_interval",
    "use_model_oversubscriber",
    "temp_embedding_dir",
]
_FILES = {
    "model_file": "dense_model_file",
    "dense_opt_states_file": "dense_opt_states_file",
    "embedding_files": "sparse_model_files",
    "sparse_opt_states_file": "sparse_opt_states_files",
}
_FIT = ("max_iter", "num_epochs", "display", "snapshot", "eval_interval")


def solver_parser_helper(*args: Any, **keywords: Any) -> Solver:
    """Return a solver by the arguments of v2.3 to v3.0.1.

    `eval_batches` of v2.3 is `max_eval_batches`. Files of weights and the arguments of `fit` are
    fields of the solver. A model keeps its rows in memory, so that `use_model_oversubscriber` and
    `temp_embedding_dir` change nothing.
    """
    values = by_order("solver", _SOLVER, args, keywords)
    if "eval_batches" in values:
        values["max_eval_batches"] = values.pop("eval_batches")
    repeats = values.get("repeat_dataset", True)
    files = {new: values.pop(old) for old, new in _FILES.items() if old in values}
    fit = {key: values.pop(key) for key in _FIT if key in values}
    if repeats:
        fit = {**fit, "max_iter": fit.get("max_iter") or 10_000, "num_epochs": 0}
    else:
        fit = {**fit, "num_epochs": fit.get("num_epochs") or 1, "max_iter": 0}
    return Solver(**values, fit=FitParams(**fit), files=ParamFiles(**files))


def CreateETC(*args: Any, **keywords: Any) -> EmbeddingTrainingCacheParams:
    """Return the settings of an embedding training cache; `hcache_configs` is its other name."""
    order = ["ps_types", "sparse_models", "local_paths", "hmem_cache_configs"]
    values = by_order("etc", order, args, keywords)
    if "hcache_configs" in values:
        values["hmem_cache_configs"] = values.pop("hcache_configs")
    return EmbeddingTrainingCacheParams(**values)


_MOS = ["train_from_scratch", "use_host_memory_ps", "trained_sparse_models", "dest_sparse_models"]


def CreateMOS(*args: Any, **keywords: Any) -> EmbeddingTrainingCacheParams:
    """Return the settings of a model oversubscriber, the embedding training cache up to v3.2.1.

    v3.1 and v3.2 say whether training starts from scratch and name the files of both cases; v3.2.1
    has the arguments of `CreateETC`.
    """
    is_old = bool(args) and isinstance(args[0], bool)
    if not is_old and keywords.keys().isdisjoint(_MOS):
        return CreateETC(*args, **keywords)
    values = by_order("mos", _MOS, args, keywords)
    for key in values:
        if key not in _MOS:
            advice = did_you_mean(key, _MOS)
            raise ConfigError(f"mos.{key}: unknown argument, got {values[key]!r:.80}. {advice}")
    key = "dest_sparse_models" if values.get("train_from_scratch") else "trained_sparse_models"
    models = values.get(key) or []
    return EmbeddingTrainingCacheParams((TrainPSType_t.Staged,) * len(models), tuple(models))
