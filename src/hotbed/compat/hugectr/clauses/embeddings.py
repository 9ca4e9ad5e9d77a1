# SPDX-License-Identifier: Apache-2.0
"""Tables and their lookups, alone and in collections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotbed.compat.hugectr.clause import by_order, clause, required
from hotbed.compat.hugectr.clauses.training import OptParams
from hotbed.compat.hugectr.enums import (
    CommunicationStrategy,
    CommunicationType,
    CompressionStrategy,
    Embedding_t,
    HybridEmbeddingType,
    Initializer_t,
)
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError


def _hybrid_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `use_train_precompute_indices` and `use_eval_…` of v3.3.1 to v3.9.1, too."""
    order = [
        "max_num_frequent_categories",
        "max_num_infrequent_samples",
        "p_dup_max",
        "max_all_reduce_bandwidth",
        "max_all_to_all_bandwidth",
        "efficiency_bandwidth_ratio",
        "communication_type",
        "hybrid_embedding_type",
    ]
    precomputed = ["use_train_precompute_indices", "use_eval_precompute_indices"]
    if len(args) > len(order):
        order[6:6] = precomputed
    values = by_order("hybrid_embedding_param", order, args, keywords)
    return {key: value for key, value in values.items() if key not in precomputed}


@clause("hybrid_embedding_param", _hybrid_form)
class HybridEmbeddingParam:
    """Settings of a hybrid embedding; all of them are placement."""

    max_num_frequent_categories: int = required()
    max_num_infrequent_samples: int = required()
    p_dup_max: float = required()
    max_all_reduce_bandwidth: float = required()
    max_all_to_all_bandwidth: float = required()
    efficiency_bandwidth_ratio: float = required()
    communication_type: CommunicationType = required()
    hybrid_embedding_type: HybridEmbeddingType = required()


_HYBRID = HybridEmbeddingParam(
    1,
    -1,
    0.01,
    1.3e11,
    2.6e11,
    1.0,
    CommunicationType.NVLink_SingleNode,
    HybridEmbeddingType.Distributed,
)
_COMBINERS = ("sum", "mean")


@clause("sparse_embedding")
class SparseEmbedding:
    """A table and its lookup.

    Attributes:
        combiner: "sum" or "mean"; 0 and 1 mean the same, as up to v3.0.1.
        optimizer: of the table; None takes that of the model.
        max_vocabulary_size_per_gpu: rows, the name up to v3.0.1.
        max_vocabulary_size_global: rows in all, a key of JSON files.
        plan_file: of a JSON file.
    """

    embedding_type: Embedding_t = required()
    workspace_size_per_gpu_in_mb: int = 0
    embedding_vec_size: int = required()
    combiner: str | int = required()
    sparse_embedding_name: str = required()
    bottom_name: str = required()
    slot_size_array: tuple[int, ...] = ()
    optimizer: OptParams | None = None
    hybrid_embedding_param: HybridEmbeddingParam = _HYBRID
    max_vocabulary_size_per_gpu: int = 0
    max_vocabulary_size_global: int = 0
    plan_file: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        if self.combiner in (0, 1):
            object.__setattr__(self, "combiner", _COMBINERS[int(self.combiner)])
        if self.combiner not in _COMBINERS:
            raise ConfigError(
                f"sparse_embedding.combiner: unknown combiner, got {self.combiner!r}. Use 'sum' "
                "or 'mean'."
            )
        if not 1 <= self.embedding_vec_size <= 1024:
            raise ConfigError(
                "sparse_embedding.embedding_vec_size: not between 1 and 1024, got "
                f"{self.embedding_vec_size}. Give the length of a row."
            )


@clause("init_param")
class InitParams:
    """Initial rows of a table of an embedding collection."""

    initializer_type: Initializer_t = Initializer_t.Default
    up_bound: float | None = None


def _table_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take a table's number for its name, and the initial values, of v3.7 to v4.1 too."""
    order = ["name", "max_vocabulary_size", "ev_size", "opt_params_or_empty", "init_param_or_empty"]
    is_old = bool(args) and not isinstance(args[0], str)
    if "min_key" in keywords or (len(args) > 3 and isinstance(args[3], int)):
        order = ["table_id", *order[1:3], "min_key", "max_key", "opt_params_py"]
    elif is_old or "table_id" in keywords:
        order = ["table_id", *order[1:3], "opt_params_py", *_INITIAL]
    values = by_order("embedding_table", order, args, keywords)
    for key in ("table_id", "id_space"):
        if key in values:
            values["name"] = f"table{values.pop(key)}"
    for key in ("min_key", "max_key"):
        values.pop(key, None)
    if "opt_params_py" in values:
        values["opt_params_or_empty"] = values.pop("opt_params_py")
    initial = {key: values.pop(key) for key in _INITIAL if key in values}
    if "initializer_type" in initial:
        bound = initial.get("up_bound", -1)
        values["init_param_or_empty"] = InitParams(
            initial["initializer_type"], bound if bound > 0 else None
        )
    return values


_INITIAL = ("initializer_type", "up_bound", "max_sequence_len")  # arguments of v4.1


@clause("embedding_table", _table_form)
class EmbeddingTableConfig:
    """A table of an embedding collection. `max_vocabulary_size` -1: the table grows."""

    name: str = required()
    max_vocabulary_size: int = required()
    ev_size: int = required()
    opt_params_or_empty: OptParams | None = None
    init_param_or_empty: InitParams | None = None


@clause("embedding_lookup")
class EmbeddingLookup:
    """A lookup of an embedding collection.

    Attributes:
        table: that is looked up.
        bottom_name: of the sparse slots, of which there is one.
        top_name: of the result.
        combiner: "sum", "mean" (also "average") or "concat".
        is_part: whether the call gave lists: its results are one tensor, side by side.
    """

    table: EmbeddingTableConfig = required()
    bottom_name: str = required()
    top_name: str = required()
    combiner: str = required()
    is_part: bool = False

    def __post_init__(self) -> None:
        if self.combiner not in ("sum", "mean", "average", "concat"):
            raise ConfigError(
                f"embedding_lookup.combiner: unknown combiner, got {self.combiner!r}. Use 'sum', "
                "'mean' or 'concat'."
            )


_COLLECTION: Mapping[str, Any] = {
    "use_exclusive_keys": False,
    "comm_strategy": CommunicationStrategy.Uniform,
    "indices_only": False,
}
"""Arguments of an embedding collection without effect, and their defaults."""
_LAYOUTS = ("feature_major", "batch_major")


def _collection_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `output_layout` and `indices_only` of v4.3.1 and v23.02, too."""
    order = ["use_exclusive_keys", "comm_strategy"]
    if args and isinstance(args[0], str):
        order = ["output_layout", "indices_only"]
    values = by_order("embedding_collection", order, args, keywords)
    names = ("output_layout", *_COLLECTION)
    for key in values:
        if key not in names:
            raise ConfigError(
                f"embedding_collection.{key}: unknown argument, got {values[key]!r:.80}. "
                f"{did_you_mean(key, names)}"
            )
    return values


class EmbeddingCollectionConfig:
    """Tables of an embedding collection and their lookups, which calls add.

    Attributes:
        shards: matrix, strategy and compression of the last `shard`; they are placement.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        values = _collection_form(args, keywords)
        for key, default in _COLLECTION.items():
            differs = values.get(key, default) != default
            KNOBS.log_no_effect(f"embedding_collection.{key}", when=differs)
        layout = values.get("output_layout") or _LAYOUTS[0]
        if layout not in _LAYOUTS:
            raise ConfigError(
                f"embedding_collection.output_layout: unknown layout, got {layout!r:.80}. Use "
                "'feature_major' or 'batch_major'."
            )
        self._is_batch_major = layout == "batch_major"
        self._lookups: list[EmbeddingLookup] = []
        self.shards: tuple[Any, ...] = ()

    @property
    def lookups(self) -> list[EmbeddingLookup]:
        """The lookups in the order of the calls; of `batch_major`, their results are one tensor."""
        if not self._is_batch_major:
            return self._lookups
        top = ",".join(dict.fromkeys(lookup.top_name for lookup in self._lookups))
        return [replace(lookup, top_name=top, is_part=True) for lookup in self._lookups]

    def embedding_lookup(
        self,
        table_config: EmbeddingTableConfig | list[EmbeddingTableConfig],
        bottom_name: str | list[str],
        top_name: str,
        combiner: str | list[str],
    ) -> None:
        """Add one lookup, or several whose results lie side by side in one tensor."""
        tables = table_config if isinstance(table_config, (list, tuple)) else [table_config]
        bottoms = [bottom_name] if isinstance(bottom_name, str) else bottom_name
        combiners = [combiner] if isinstance(combiner, str) else combiner
        if not len(tables) == len(bottoms) == len(combiners):
            sizes = f"{len(tables)}, {len(bottoms)} and {len(combiners)}"
            raise ConfigError(
                "embedding_lookup: expected lists of one length for table_config, bottom_name "
                f"and combiner, got {sizes} entries. Give one of each for each lookup."
            )
        is_part = not isinstance(bottom_name, str)
        for table, bottom, pooling in zip(tables, bottoms, combiners, strict=True):
            self._lookups.append(EmbeddingLookup(table, bottom, top_name, pooling, is_part))

    def shard(
        self,
        shard_matrix: Any,
        shard_strategy: Any,
        compression_strategy: Mapping[CompressionStrategy, Any] | None = None,
    ) -> None:
        """Say which devices hold which tables; here rows lie on processes by their ids."""
        KNOBS.log_no_effect("embedding_collection.shard")
        self.shards = (shard_matrix, shard_strategy, compression_strategy)


class EmbeddingPlanner(EmbeddingCollectionConfig):
    """The builder of an embedding collection in v3.7 to v4.0."""

    def embedding_lookup(self, *args: Any, **keywords: Any) -> None:
        """Add lookups; `emb_table` is the name of `table_config` in v3.7."""
        if "emb_table" in keywords:
            keywords["table_config"] = keywords.pop("emb_table")
        super().embedding_lookup(*args, **keywords)

    def create_embedding_collection(
        self,
        shard_matrix: Any = None,
        emb_table_group_strategy: Any = None,
        emb_table_placement_strategy: Any = None,
        plan_file: str = "",
    ) -> EmbeddingCollectionConfig:
        """Return the collection; the plan, a file in v3.7, says which devices hold which tables."""
        has_plan = shard_matrix is not None or bool(plan_file)
        KNOBS.log_no_effect("embedding_collection.shard", when=has_plan)
        return self
