# SPDX-License-Identifier: Apache-2.0
"""Which models are scored by the forward pass that learns, once ids are mapped before it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hotbed.embedding.table import Table
from hotbed.training.step.network import ignores_mode

_OTHER_IN_EVAL_MODE = (
    nn.MultiheadAttention,  # these take a faster path there, whose results differ in bits
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RReLU,  # draws its slopes in training
)
_RATES = ("p", "rate", "dropout")
"""Attributes under which layers keep their dropout rate."""


def obstacle_to_one_pass(network: nn.Module, tables: Iterable[Table]) -> str:
    """Return why scores of a training pass differ from those before the ids are mapped.

    Where they have the same bits, return "". An id without a row reads as the row that it gets if
    every id gets one, and no map lets rows expire. So only ids that a policy may refuse, and new
    rows that are rounded, read otherwise before the map.
    """
    if not is_same_in_both_modes(network):
        return "the network may compute something else in train mode than in eval mode"
    for table in tables:
        if table.admit is not None:
            return f"ids that table {table.name!r} admits with a batch have no row before it"
        if table.always_default:
            return (
                f"ids that are new to table {table.name!r} read its default before they get a row"
            )
        if table.dtype != "float32":
            return f"new rows of table {table.name!r} are rounded to {table.dtype}"
    return ""


def is_same_in_both_modes(network: nn.Module) -> bool:
    """Return whether a network gives the same outputs in train and in eval mode.

    Dropout and norms by the batch's own statistics differ. False for a network that does not say
    `ignores_mode`: its code may do anything.
    """
    if not ignores_mode(network):
        return False
    return not any(_depends_on_mode(module) for module in network.modules())


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, _OTHER_IN_EVAL_MODE) or "running_mean" in module._buffers:
        return True
    rates = [getattr(module, name, 0.0) for name in _RATES]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)
