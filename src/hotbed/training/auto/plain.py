# SPDX-License-Identifier: Apache-2.0
"""The way back: the weights of a converted model, as the model before its conversion loads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from hotbed.embedding.modules import TableModule
from hotbed.embedding.modules.state import EXTRA, DenseState
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError

from .lookups import MovedLookup


def plain_state_dict(model: nn.Module, *, leave_out_new_ids: bool = False) -> dict[str, Any]:
    """Return a `state_dict` that loads into the model as it was before `hb.auto`.

    Row `i` of a weight is what evaluation reads for id `i`, also where the table has no row of it.
    The plain model then gives the scores of the converted one for ids of 0 to `num_embeddings - 1`.
    Rows of other ids have no place in a weight. The state of the optimizer is not part of it.

    Args:
        model: one that `hb.auto` converted, or a model around it. It stays as it is.
        leave_out_new_ids: whether rows of ids outside of 0 to `num_embeddings - 1` are left out.
            False = they are an error.

    Returns:
        Tensors by the names of the plain model. Weights are copies, others are those of the model.

    Raises:
        ConfigError: a table has rows that no weight can hold.

    Example:
        >>> from hotbed.training.auto import plain_state_dict
        >>> plain = Ranker()
        >>> plain.load_state_dict(plain_state_dict(model))
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"plain_state_dict: expected an nn.Module, got {type(model).__name__}. Give the model "
            "that hb.auto converted; of a RecModel, its network."
        )
    state: dict[str, Any] = model.state_dict(destination=DenseState())
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(module, MovedLookup):
            _check_whole(module)
            _check_ids(module, leave_out_new_ids)
            state[f"{prefix}weight"] = module.plain_weight()
        elif isinstance(module, TableModule):
            state[prefix + EXTRA] = module.get_extra_state()
    return state


def _check_whole(module: MovedLookup) -> None:
    """Raise ConfigError if other ranks hold rows of the table of a module."""
    if module.tables[0].is_spread:
        raise ConfigError(
            f"plain_state_dict: several ranks hold the rows of {module.path!r}, got one of them. "
            "Save the RecModel, and restore it in one process."
        )


def _check_ids(module: MovedLookup, leave_out: bool) -> None:
    """Raise ConfigError if the table of a module has rows that its weight cannot hold."""
    if module.unbounded:
        raise ConfigError(
            f"plain_state_dict: a weight has one row a bin, got {module.path!r}, whose table has "
            "rows of ids before '% bins' (unbounded). Convert without unbounded to come back."
        )
    if module.has_raw_ids:
        raise ConfigError(
            f"plain_state_dict: a weight has rows of remapped ids, got {module.path!r}, whose "
            "table has rows of raw ids (managed collisions). Save the RecModel instead."
        )
    if leave_out:
        return
    new_ids = _ids_outside(module.tables[0], module.num_embeddings)
    if len(new_ids):
        raise ConfigError(
            f"plain_state_dict: the weight of {module.path!r} holds ids of 0 to "
            f"{module.num_embeddings - 1:,}, got rows of {len(new_ids):,} other ids, such as "
            f"{new_ids[0]}. Leave them out with leave_out_new_ids=True."
        )


def _ids_outside(table: Table, num_embeddings: int) -> np.ndarray:
    """Return the ids of a table that are not rows of a weight."""
    ids = [batch.column("id").to_numpy() for batch in table.export()]
    every = np.concatenate(ids)
    return every[(every < 0) | (every >= num_embeddings)]
