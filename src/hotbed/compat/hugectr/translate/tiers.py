# SPDX-License-Identifier: Apache-2.0
"""Where the rows of embeddings lie: the parameter servers of an embedding training cache."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.compat.hugectr.clauses import EmbeddingTrainingCacheParams, SparseEmbedding
from hotbed.compat.hugectr.enums import TrainPSType_t
from hotbed.embedding.tier import Ssd, Tier
from hotbed.errors import ConfigError


def tiers_of(
    cache: EmbeddingTrainingCacheParams | None, embeddings: Sequence[object], rank: int
) -> dict[str, Tier]:
    """Return the tier of each embedding whose parameter server is `Cached`, by its name.

    A `Staged` one has all rows in memory. Memory of a `Cached` one holds `num_blocks` passes, each
    at most as large as the workspace of the embedding: so many rows stay there, the others lie in
    the path of this process.

    Raises:
        ConfigError: the path, the blocks or the workspace is missing.
    """
    tiers: dict[str, Tier] = {}
    if cache is None:
        return tiers
    sparse = [embedding for embedding in embeddings if isinstance(embedding, SparseEmbedding)]
    for number, (kind, embedding) in enumerate(zip(cache.ps_types, sparse, strict=False)):
        if kind is not TrainPSType_t.Cached:
            continue
        name = embedding.sparse_embedding_name
        if len(cache.local_paths) <= rank:
            raise ConfigError(
                f"etc.local_paths: the rows of {name!r}, which is Cached, lie in a folder of each "
                f"process, got {len(cache.local_paths)} paths for process {rank}. Give one to "
                "each process, or TrainPSType_t.Staged."
            )
        if len(cache.hmem_cache_configs) <= number:
            raise ConfigError(
                f"etc.hmem_cache_configs: each Cached embedding has one, got "
                f"{len(cache.hmem_cache_configs)}, none for {name!r}. Give CreateHMemCache(…) in "
                "their order."
            )
        num_blocks = max(cache.hmem_cache_configs[number].num_blocks, 1)
        tiers[name] = Ssd(cache.local_paths[rank], num_blocks * _rows_of_workspace(embedding))
    return tiers


def _rows_of_workspace(embedding: SparseEmbedding) -> int:
    """Return the rows that a GPU holds, as HugeCTR counts them."""
    num_rows = embedding.max_vocabulary_size_per_gpu
    if embedding.workspace_size_per_gpu_in_mb:
        num_rows = (embedding.workspace_size_per_gpu_in_mb << 20) // (
            4 * embedding.embedding_vec_size
        )
    if num_rows < 1:
        raise ConfigError(
            f"sparse_embedding.workspace_size_per_gpu_in_mb: it says how many rows of "
            f"{embedding.sparse_embedding_name!r}, which is Cached, stay in memory, got none. Give "
            "it, or TrainPSType_t.Staged."
        )
    return num_rows
