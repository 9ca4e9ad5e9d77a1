# SPDX-License-Identifier: Apache-2.0
"""What ranks compare: before the first step all that decides its bits, at each step its batch."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch
from hotbed.embedding.table import Table
from hotbed.parallel import Requirement, Shard, digest_of, digest_of_files, edits_of
from hotbed.training.step.compared import compared
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.example import CPU, Example
from hotbed.training.step.reading import host_later

CHECKED_WEIGHTS = 16
"""The first weights of each dense parameter, which the ranks compare at each step."""

SCORED = Requirement(
    "evaluate and predict the same batches",
    "Give each rank the same data, order and seed: every rank scores all rows.",
)


def settings_of_network(network: nn.Module, weights: Sequence[Tensor]) -> dict[str, Any]:
    """Return what all ranks must have alike before the first step: code, settings and weights.

    `weights`: the parameters and buffers of the dense part.
    """
    return {
        "code of the network with the digest": digest_of_files(_files_of(network)),
        "network": compared(network, weights=False),
        "parameters that learn": [weight.requires_grad for weight in weights],
        "weights with the digest": digest_of(weights),
    }


def settings_of_tables(tables: Sequence[Table]) -> dict[str, Any]:
    """Return how all ranks must hold and update rows."""
    settings: dict[str, Any] = {
        "the threads of torch": torch.get_num_threads(),
        "the tables": [table.name for table in tables],
    }
    for table in tables:
        settings[f"table {table.name!r}"] = f"{table.config}, frozen={table.frozen}"
    return {**settings, **edits_of(tables)}


def settings_of_learning(
    criterion: Criterion | None, precision: Any, optimizers: Iterable[torch.optim.Optimizer | None]
) -> dict[str, Any]:
    """Return the loss, the number format of `amp_level`, and what the optimizers do."""
    loss = None if criterion is None else compared(criterion.loss_fn)
    settings = {"loss_fn": loss, "amp_level": str(precision)}
    for optimizer in optimizers:
        if optimizer is not None:
            name = f"optimizer {type(optimizer).__name__}"
            settings[name] = [_of_group(group) for group in optimizer.param_groups]
    return settings


def values_of_step(batch: Batch, weights: Sequence[Tensor], tables: Sequence[Table]) -> Any:
    """Return digests of a batch, of the state of torch's generator, and of some weights, by name.

    With them come the settings of tables that may change between steps.
    """
    digest = 0
    firsts = tuple(weight.detach().reshape(-1)[:CHECKED_WEIGHTS] for weight in weights)
    device = weights[0].device if weights else CPU
    for weight, first in zip(weights, host_later(firsts, device)(), strict=True):
        digest = zlib.crc32(first.data, digest)
        digest = zlib.crc32(bytes([weight.requires_grad]), digest)
    return {
        **values_of_batch(batch),
        **edits_of(tables),
        "torch's generator with the digest": zlib.crc32(torch.get_rng_state().numpy().data),
        "tables that are frozen": {table.name: table.frozen for table in tables if table.frozen},
        "defaults and min_count of tables": [
            (table.default, table.always_default, table.min_count) for table in tables
        ],
        "weights with the digest": digest,
    }


def values_of_batch(batch: Batch) -> dict[str, Any]:
    """Return the number of samples of a batch, and the digest of each column, by name.

    Of a batch that ranks share out, ids and dense columns have no digest: each has some of them.
    """
    whole = batch if batch.whole is None else batch.whole
    columns = {
        **{f"column {name!r}": [values] for name, values in whole.dense.items()},
        **{f"label {name!r}": [values] for name, values in whole.labels.items()},
        **{
            f"ids of {name!r}": [ids.values, ids.offsets, ids.weights]
            for name, ids in whole.ids.items()
        },
        "weights of samples": [whole.weight],
        "times": [whole.time],
    }
    values: dict[str, Any] = {"a batch with this number of samples:": whole.num_samples}
    if batch.whole is not None:
        values["the ends of the grains of a batch"] = whole.grain_ends
    for name, arrays in columns.items():
        values[f"{name} of a batch with the digest"] = _digest_of_arrays(arrays)
    return values


def check_scored(shard: Shard, examples: Sequence[Example]) -> None:
    """Raise ConfigError, on every rank, if they score other batches next; none: at the end."""

    def values() -> dict[str, Any]:
        every: dict[str, Any] = {"batches to score next:": len(examples)}
        for number, example in enumerate(examples, 1):
            if example.batch is not None:
                values_of_one = values_of_batch(example.batch)
                every |= (
                    values_of_one if number == 1 else {f"batch {number} of them": values_of_one}
                )
        return every

    shard.check_equal(values, SCORED)


def values_of_rates(optimizers: Iterable[torch.optim.Optimizer | None]) -> dict[str, Any]:
    """Return the learning rates of dense parameters and of tables."""
    return {
        "learning rates": [
            (group.get("tables"), float(group["lr"]))
            for optimizer in optimizers
            if optimizer is not None
            for group in optimizer.param_groups
        ]
    }


def _digest_of_arrays(arrays: Sequence[Any]) -> int:
    digest = 0
    for array in arrays:
        if torch.is_tensor(array):  # weights of ids may learn, on all ranks or on none
            digest = zlib.crc32(bytes([array.requires_grad]), digest)
            array = array.detach().cpu()
        if array is not None:
            digest = zlib.crc32(np.ascontiguousarray(array).data, digest)
    return digest


def _of_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of parameters."""
    return {name: compared(value) for name, value in group.items() if name != "params"}


def _files_of(network: nn.Module) -> list[Path]:
    """Return the files that define the modules of a network, but for those of torch and Hotbed."""
    names = sorted({type(module).__module__ for module in network.modules()})
    defining = [name for name in names if name.partition(".")[0] not in ("torch", "hotbed")]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in defining]
    return [Path(file) for file in files if file is not None]
