# SPDX-License-Identifier: Apache-2.0
"""The dense parameters, the sparse tables, and the collections of a step."""

from __future__ import annotations

from torch import Tensor, nn

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.core.embedding import SparseTable
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError
from hotbed.optim.sparse import dense_parameters

__all__ = ["get_collection", "get_dense_and_sparse_variable"]

LOCAL_EMB = "ASCEND_SPARSE_LOOKUP_LOCAL_EMB"
ID_OFFSET = "ASCEND_SPARSE_LOOKUP_ID_OFFSET"


def get_dense_and_sparse_variable(
    *models: nn.Module,
) -> tuple[list[nn.Parameter], list[SparseTable]]:
    """Return the parameters of models for a dense optimizer, and all sparse tables: step 7."""
    owner = framework.current()
    owner.models += [model for model in models if model not in owner.models]
    dense = [parameter for model in models for parameter in dense_parameters(model)]
    return dense, list(owner.tables.values())


def get_collection(key: str) -> list[Tensor]:
    """Return the rows or the addresses of the lookups that wait for an update.

    Args:
        key: "ASCEND_SPARSE_LOOKUP_LOCAL_EMB": the distinct rows, float32 [u, dim], one tensor a
            table and training forward pass. "ASCEND_SPARSE_LOOKUP_ID_OFFSET": their addresses,
            int64 [u]; -1 = an id without a row.
    """
    if key not in (LOCAL_EMB, ID_OFFSET):
        advice = did_you_mean(key, [LOCAL_EMB, ID_OFFSET])
        raise ConfigError(f"get_collection: unknown key, got {key!r}. {advice}")
    targets = framework.current().started("get_collection").updates.waiting
    if key == LOCAL_EMB:
        return [target.rows for target in targets]
    return [target.slots for target in targets]
