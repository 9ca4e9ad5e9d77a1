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
    the path of this process. One `CreateHMemCache` is that of all Cached embeddings.

    Raises:
        ConfigError: the path, the blocks or the workspace is missing, or there is not a parameter
            server for each embedding.
    """
    if cache is None or not cache.ps_types:
        return {}
    sparse = [embedding for embedding in embeddings if isinstance(embedding, SparseEmbedding)]
    if len(cache.ps_types) != len(sparse):
        raise ConfigError(
            f"etc.ps_types: expected one for each of {len(sparse)} embeddings, got "
            f"{len(cache.ps_types)}. Give each its TrainPSType_t."
        )
    pairs = zip(cache.ps_types, sparse, strict=True)
    cached = [embedding for kind, embedding in pairs if kind is TrainPSType_t.Cached]
    if not cached:
        return {}
    if len(cache.local_paths) <= rank:
        raise ConfigError(
            f"etc.local_paths: the rows of {cached[0].sparse_embedding_name!r}, which is Cached, "
            f"lie in a folder of each process, got {len(cache.local_paths)} paths for process "
            f"{rank}. Give one to each process, or TrainPSType_t.Staged."
        )
    configs = cache.hmem_cache_configs
    if len(configs) not in (1, len(cached)):
        raise ConfigError(
            f"etc.hmem_cache_configs: expected one for all Cached embeddings, or one for each of "
            f"{len(cached)}, got {len(configs)}. Give CreateHMemCache(…) in their order."
        )
    if len(configs) == 1:
        configs *= len(cached)
    tiers: dict[str, Tier] = {}
    for embedding, config in zip(cached, configs, strict=True):
        num_rows = max(config.num_blocks, 1) * _rows_of_workspace(embedding)
        tier = Ssd(cache.local_paths[rank], num_rows)
        tiers[embedding.sparse_embedding_name] = tier.named(
            "num_blocks of CreateHMemCache times the rows of the workspace"
        )
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
