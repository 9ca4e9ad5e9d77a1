# SPDX-License-Identifier: Apache-2.0
"""Values of grains that all ranks need: losses, gradients and buffers of the dense part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .halves import joined
from .placement import Placement
from .ranks import Ranks


def joined_over_ranks(
    ranks: Ranks,
    placement: Placement,
    values: Sequence[Sequence[Tensor | None]],
    like: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return values of the grains of all ranks, added by halves; None is left out.

    Each rank adds a part of the values and sends the sums to all. So the bits are those of one
    process, and a rank sends each number about twice.

    Args:
        ranks: of the job.
        placement: which rank computes which grains.
        values: of each grain, the values; those of other ranks are not read.
        like: tensors of the shapes and dtypes of the values.
    """
    blocks = []  # of this rank, the values
    for block in placement.blocks[ranks.rank]:
        grains = values[block.first : block.first + block.size]
        blocks.append([joined([of_grain[n] for of_grain in grains]) for n in range(len(like))])
    here = [any(of_block[n] is not None for of_block in blocks) for n in range(len(like))]
    exists = ranks.gather(torch.tensor(here, dtype=torch.uint8)).any(0).tolist()
    results: list[Tensor | None] = [None] * len(like)
    for dtype in dict.fromkeys(tensor.dtype for tensor in like):
        numbers = [n for n, tensor in enumerate(like) if tensor.dtype == dtype and exists[n]]
        if not numbers:
            continue
        shapes = [like[n] for n in numbers]
        flat = [_flat([of_block[n] for n in numbers], shapes) for of_block in blocks]
        sums = _sum(ranks, placement, flat).split([shape.numel() for shape in shapes])
        for number, total in zip(numbers, sums, strict=True):
            results[number] = total.view(like[number].shape).clone()
    return results


def _flat(values: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Return the values one after another, [n]; where one is absent, -0.0, which adds nothing."""
    parts = []
    for value, shape in zip(values, like, strict=True):
        if value is None:
            value = torch.full_like(shape, -0.0)
        parts.append(value.reshape(-1))
    return torch.cat(parts)


def _sum(ranks: Ranks, placement: Placement, blocks: Sequence[Tensor]) -> Tensor:
    """Return the sum of the blocks of all ranks, by halves, [n]; `blocks`: of this one, [n]."""
    num_values = blocks[0].numel()
    width = -(-num_values // ranks.size)
    sizes = [max(min(width, num_values - rank * width), 0) for rank in range(ranks.size)]
    share = sizes[ranks.rank]
    received = ranks.exchange(
        [block.split(sizes) for block in blocks],
        [share * len(of_rank) for of_rank in placement.blocks],
    )
    leaves: list[Tensor | None] = [None] * placement.leaves
    for leaf, part in zip(
        placement.every_leaf, received.view(len(placement.every_leaf), share), strict=True
    ):
        leaves[leaf] = part
    total = torch.zeros(width, dtype=received.dtype)
    if share:
        joined_part = joined(leaves)
        assert joined_part is not None, "each rank has a block"
        total[:share] = joined_part
    return ranks.gather(total).view(-1)[:num_values]
