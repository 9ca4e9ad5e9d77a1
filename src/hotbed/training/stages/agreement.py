# SPDX-License-Identifier: Apache-2.0
"""What ranks compare: before the first step all that decides its bits, at each step its batch."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch
from hotbed.embedding.table import Table
from hotbed.parallel import Placement, digest_of, digest_of_files

CHECKED_WEIGHTS = 16
"""The first weights of each dense parameter, which the ranks compare at each step."""


def settings_of(
    network: nn.Module, tables: Sequence[Table], weights: Sequence[Tensor], placement: Placement
) -> dict[str, Any]:
    """Return what all ranks must have alike before the first step, by the words for it.

    `weights`: the parameters and buffers of the dense part.
    """
    settings = {
        "code of the network with the digest": digest_of_files(_files_of(network)),
        "the threads of torch": torch.get_num_threads(),
        "grains": placement.grains,
        "whole_tables": sorted(placement.whole_tables),
        "the tables": [table.name for table in tables],
    }
    for table in tables:
        settings[f"table {table.name!r}"] = f"{table.config}, frozen={table.frozen}"
    settings["weights with the digest"] = digest_of(weights)
    return settings


def digest_of_step(batch: Batch, weights: Sequence[Tensor]) -> int:
    """Return a digest of a batch, of the state of torch's generator, and of some weights."""
    arrays = [*batch.dense.values(), *batch.labels.values(), batch.weight, batch.time]
    for ids in batch.ids.values():
        arrays += [ids.values, ids.offsets, ids.weights]
    digest = zlib.crc32(torch.get_rng_state().numpy().data, batch.num_samples)
    for array in arrays:
        if torch.is_tensor(array):  # weights of ids may learn, on all ranks or on none
            digest = zlib.crc32(bytes([array.requires_grad]), digest)
            array = array.detach()
        if array is not None:
            digest = zlib.crc32(np.ascontiguousarray(array).data, digest)
    for weight in weights:
        first = weight.detach().reshape(-1)[:CHECKED_WEIGHTS]
        digest = zlib.crc32(first.view(torch.uint8).numpy().data, digest)
    return digest


def _files_of(network: nn.Module) -> list[Path]:
    """Return the files that define the modules of a network, but for those of torch and Hotbed."""
    names = sorted({type(module).__module__ for module in network.modules()})
    defining = [name for name in names if name.partition(".")[0] not in ("torch", "hotbed")]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in defining]
    return [Path(file) for file in files if file is not None]
