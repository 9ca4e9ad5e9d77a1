# SPDX-License-Identifier: Apache-2.0
"""The dense parameters, the sparse tables, and the collections of a step."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.constants.constants import (
    ASCEND_SPARSE_LOOKUP_ID_OFFSET,
    ASCEND_SPARSE_LOOKUP_LOCAL_EMB,
    ASCEND_SPARSE_LOOKUP_UNIQUE_KEYS,
    ASCEND_TIMESTAMP,
)
from hotbed.compat.mx_rec.core.embedding import SparseTable
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError
from hotbed.optim.sparse import dense_parameters

__all__ = ["add_to_collection", "get_collection", "get_dense_and_sparse_variable"]

KEYS = (
    ASCEND_SPARSE_LOOKUP_ID_OFFSET,
    ASCEND_SPARSE_LOOKUP_LOCAL_EMB,
    ASCEND_SPARSE_LOOKUP_UNIQUE_KEYS,
    ASCEND_TIMESTAMP,
)
"""Collections that exist from step 8 on."""


def get_dense_and_sparse_variable(
    *models: nn.Module,
) -> tuple[list[nn.Parameter], list[SparseTable]]:
    """Return the parameters of models for a dense optimizer, and all sparse tables: step 7."""
    owner = framework.current()
    owner.models += [model for model in models if model not in owner.models]
    dense = [parameter for model in models for parameter in dense_parameters(model)]
    return dense, [table for table in owner.tables.values() if isinstance(table, SparseTable)]


def add_to_collection(key: str, value: Callable[[Any], Any] | str | int) -> None:
    """Say where the seconds of each batch are, before step 8 of automatic mode.

    Args:
        key: `ASCEND_TIMESTAMP`.
        value: returns the seconds of a batch, or the name or place of the seconds in it.

    Raises:
        ConfigError: the key is another one, or the value is a tensor: ids are mapped before the
            loop gets a batch.
        StateError: step 8 has run.

    Example: `mx.add_to_collection(ASCEND_TIMESTAMP, "timestamp")`
    """
    owner = framework.current()
    owner.check_not_started("add_to_collection")
    if key != ASCEND_TIMESTAMP:
        raise ConfigError(
            f"add_to_collection: only {ASCEND_TIMESTAMP!r} can be added to, got {key!r}. The "
            "lookups fill the other collections."
        )
    if callable(value):
        owner.times = value
    elif isinstance(value, str | int) and not isinstance(value, bool):
        owner.times = itemgetter(value)
    else:
        raise ConfigError(
            f"add_to_collection({ASCEND_TIMESTAMP!r}): a function of a batch is needed, or the "
            f"place of the seconds in it, got {type(value).__name__}. Give lambda batch: "
            'batch["timestamp"].'
        )


def get_collection(key: str) -> list[Any]:
    """Return what the program has under a key.

    Args:
        key: a name of `constants.constants`:

            * `ASCEND_SPARSE_LOOKUP_LOCAL_EMB`: the distinct rows that wait for an update, float32
              [u, dim], one tensor a table and training forward pass.
            * `ASCEND_SPARSE_LOOKUP_ID_OFFSET`, `ASCEND_SPARSE_LOOKUP_UNIQUE_KEYS`: their addresses,
              int64 [u]; -1 = an id without a row.
            * `ASCEND_TIMESTAMP`: the seconds of the current batch, int64 [1] or [n], in a list of
              one; an empty list = it has none.
            * `ASCEND_GLOBAL_HASHTABLE_COLLECTION`, or the name that a program gave to
              `train_params_config.ascend_global_hashtable_collection`: the sparse tables.

    Raises:
        ConfigError: the key is unknown.
        CallError: rows or times are asked for before step 8.
    """
    owner = framework.current()
    if key == owner.hashtable_collection:
        return list(owner.tables.values())
    if key not in KEYS:
        advice = did_you_mean(key, [*KEYS, owner.hashtable_collection])
        raise ConfigError(f"get_collection: unknown key, got {key!r}. {advice}")
    pipeline = owner.started("get_collection")
    if key == ASCEND_TIMESTAMP:
        time = None if pipeline.current is None else pipeline.current.batch.time
        return [] if time is None else [torch.as_tensor(time) // 1_000_000]
    targets = pipeline.updates.waiting
    if key == ASCEND_SPARSE_LOOKUP_LOCAL_EMB:
        return [target.rows for target in targets]
    return [target.slots for target in targets]
