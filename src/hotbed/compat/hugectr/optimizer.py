# SPDX-License-Identifier: Apache-2.0
"""`hugectr.optimizer`: the place of `CreateOptimizer` up to v3.0.1, with the learning rate."""

from __future__ import annotations

import dataclasses
from typing import Any

from hotbed.compat.hugectr.clause import by_order
from hotbed.compat.hugectr.clauses import LearningRate, OptParams

__all__ = ["CreateOptimizer"]

_ORDER = [
    "optimizer_type",
    "update_type",
    "learning_rate",
    "warmup_steps",
    "decay_start",
    "decay_steps",
    "decay_power",
    "end_lr",
    "beta1",
    "beta2",
    "epsilon",
    "momentum_factor",
    "atomic_update",
    "use_mixed_precision",
]


def CreateOptimizer(*args: Any, **keywords: Any) -> OptParams:
    """Return an optimizer and its learning rate, by the arguments of v3.0.

    `use_mixed_precision` is that of the solver, which decides.
    """
    values = by_order("optimizer", _ORDER, args, keywords)
    values.pop("use_mixed_precision", None)
    rate = {}
    for field in dataclasses.fields(LearningRate):
        key = "learning_rate" if field.name == "lr" else field.name
        if key in values:
            rate[field.name] = values.pop(key)
    return OptParams(**values, learning_rate=LearningRate(**rate))
