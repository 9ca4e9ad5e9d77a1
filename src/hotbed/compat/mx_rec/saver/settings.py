# SPDX-License-Identifier: Apache-2.0
"""What decides a program beside its rows and weights, as plain values that a resume compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hotbed.compat.mx_rec.framework import Framework
from hotbed.data.dataset import Dataset
from hotbed.persist.state.resume import meaning
from hotbed.training.described import described_argument
from hotbed.training.run_state import machine


def settings_of_parts(
    optimizers: Mapping[str, torch.optim.Optimizer | None], others: Sequence[Any]
) -> dict[str, Any]:
    """Return the settings of the dense optimizers, and the types of the other objects."""
    described = {name: described_argument(optimizer) for name, optimizer in optimizers.items()}
    fields = meaning({}, None, {"optimizers": described})
    return {**fields, "objects": [type(each).__name__ for each in others]}


def settings_of_data(owner: Framework, data: Any) -> dict[str, Any]:
    """Return what decides the training data and what is learned of them.

    Args:
        owner: has the features, the tables and the hooks.
        data: the training data; None before they are read.
    """
    fields: dict[str, Any] = {}
    if isinstance(data, Dataset):
        fields |= meaning({}, data.schema.to_json(), None)
        fields["run.batch_size"] = data.batch_size
    inserts = [insert for insert in owner.inserts if insert.reader.is_training]
    fields["features"] = sorted(
        f"{spec.table}/{spec.key}" for insert in inserts for spec in insert.features
    )
    fields["timestamps"] = [insert.timestamp for insert in inserts]
    fields["run.evict_hooks"] = [hook.intervals for hook in owner.hooks]
    for name, table in owner.tables.items():
        fields[f"run.{name}.averages_gradients"] = table.averages
        fields[f"run.{name}.padding_keys"] = list(table.padding)
    return {**fields, **machine(torch.get_num_threads())}
