# SPDX-License-Identifier: Apache-2.0
"""Find out how many of the newest entries of its histories a network reads.

A server cuts longer histories before it reads their rows, and before it repeats them for each
candidate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from hotbed.models.layers import DecayedMean, DotAttentionPooling, PadSequence
from hotbed.models.layers.inputs import columns_together
from hotbed.persist.publish.independence import Half

_READERS = (PadSequence, DotAttentionPooling, DecayedMean)
_OLD_ENTRIES = 3  # of each made-up history, before those that are read
_NUM_DRAWS = 3


def read_lengths(half: Half, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how many of the newest entries of each history the network reads, where it is known.

    That is the length of the layer that reads most, if entries before these change no output. A
    layer without a length reads all.

    Args:
        half: the network.
        inputs: made-up inputs by name.
    """
    modules = half.network.modules()
    readers = [module for module in modules if isinstance(module, _READERS)]
    longest = max((reader.length or 0 for reader in readers), default=0)
    lengths = {}
    columns = {name: [name] for name in sorted(start.partition("/")[2] for start in half.starts)}
    for together in columns_together(half.network):
        columns.update({name: together for name in together if name in columns})
    for feature, together in columns.items():
        if longest and _reads_newest(half, together, longest, inputs):
            lengths[feature] = longest
    return lengths


def _reads_newest(
    half: Half, history: Collection[str], length: int, inputs: Mapping[str, Tensor]
) -> bool:
    """Return whether entries before the newest `length` ones of a history change no output.

    `history`: its columns.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(_NUM_DRAWS):
        whole = {name: _drawn(values, generator) for name, values in inputs.items()}
        newest = dict(whole)
        for start in (f"offsets/{feature}" for feature in history):
            num_rows = len(inputs[start]) - 1
            whole[start] = torch.arange(num_rows + 1) * (length + _OLD_ENTRIES)
            newest[start] = torch.arange(num_rows + 1) * length
        for name, values in inputs.items():
            kind, *names = name.split("/", 2)
            is_row = len(names) == 2 and names[1] in history
            if is_row or (kind in ("ids", "weights") and "/".join(names) in history):
                entries = values.new_zeros(num_rows, length + _OLD_ENTRIES, *values.shape[1:])
                entries = _drawn(entries, generator)
                whole[name] = entries.flatten(0, 1)
                newest[name] = entries[:, _OLD_ENTRIES:].flatten(0, 1)
        if not _equal(half.raw(*whole.values()), half.raw(*newest.values())):
            return False
    return True


def _drawn(values: Tensor, generator: torch.Generator) -> Tensor:
    if values.is_floating_point():
        return torch.randn(values.shape, generator=generator)
    return values


def _equal(ours: Any, theirs: Any) -> bool:
    """Return whether outputs, or mappings of outputs by name, have equal bits."""
    if isinstance(ours, Mapping):
        return all(_equal(ours[name], theirs[name]) for name in ours)
    return torch.equal(ours.nan_to_num(), theirs.nan_to_num())
