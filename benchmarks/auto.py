# SPDX-License-Identifier: Apache-2.0
"""A step of a plain PyTorch DLRM before and after `hb.auto`, in turn in one process.

The original has nn.EmbeddingBag(sparse=True) with SparseAdam, and Adam for its layers. Both learn
the same batches, one id a bag, as Criteo's fields have. Prints one JSON line: the medians, and the
ratio of original to converted with its spread over the rounds.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import workload
from torch import Tensor, nn

import hotbed as hb

WARM_UP = 8


class DLRM(nn.Module):
    """Naumov et al. 2019: 26 bags, 13 dense features, and the products of all pairs."""

    def __init__(self, num_tables: int, num_ids: int, dim: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(num_ids, dim, mode="sum", sparse=True) for _ in range(num_tables)
        )
        self.bottom = mlp(13, 64, dim)
        num_vectors = num_tables + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = mlp(dim + num_pairs, 64, 1)
        self.register_buffer("pairs", torch.tril_indices(num_vectors, num_vectors, -1))

    def forward(self, dense: Tensor, ids: Sequence[Tensor], offsets: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = [bag(own, offsets) for bag, own in zip(self.bags, ids, strict=True)]
        stacked = torch.stack([bottom, *rows], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, crossed], dim=1)).squeeze(1)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def optimizers_of(model: DLRM) -> list[torch.optim.Optimizer]:
    layers = [*model.bottom.parameters(), *model.top.parameters()]
    return [
        torch.optim.SparseAdam(list(model.bags.parameters()), lr=1e-3),
        torch.optim.Adam(layers, lr=1e-3),
    ]


def learn(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Any) -> float:
    """Learn a batch; return its loss."""
    *inputs, label = batch
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(*inputs), label)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def main() -> None:
    p = workload.arguments(__doc__ or "")
    p.set_defaults(ids=100_000, batch=2048)
    p.add_argument("--rounds", type=int, default=7, help="of --steps steps of each, in turn")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    hb.set_num_threads(a.threads)
    torch.manual_seed(0)
    original = DLRM(a.tables, a.ids, a.dim)
    converted = copy.deepcopy(original)
    sides = {"torch": (original, optimizers_of(original))}
    model, optimizers, _ = hb.auto(converted, optimizers_of(converted))
    sides["hotbed"] = (model, optimizers)
    batches = [
        (
            torch.randn(a.batch, 13),
            list(torch.from_numpy(np.ascontiguousarray(ids))),
            torch.arange(a.batch),
            torch.randint(0, 2, (a.batch,)).float(),
        )
        for ids in workload.draw(a, 16)
    ]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for number in range(a.rounds + 1):
        for name, (side, own) in sides.items():
            times = []
            for step in range(WARM_UP if number == 0 else a.steps):
                start = time.perf_counter()
                losses[name] = learn(side, own, batches[step % len(batches)])
                times.append(time.perf_counter() - start)
            if number:
                seconds[name].append(float(np.median(times)))
    ratios = np.array(seconds["torch"]) / np.array(seconds["hotbed"])
    line: dict[str, Any] = {
        "ratio": round(float(np.median(ratios)), 2),
        "from": round(float(ratios.min()), 2),
        "to": round(float(ratios.max()), 2),
    }
    for name, own_seconds in seconds.items():
        line[f"{name}_ms"] = round(float(np.median(own_seconds)) * 1e3, 2)
        line[f"{name}_loss"] = round(losses[name], 5)
    settings = ("tables", "ids", "batch", "dim", "alpha", "threads")
    print(json.dumps(line | {name: getattr(a, name) for name in settings}), flush=True)


if __name__ == "__main__":
    main()
