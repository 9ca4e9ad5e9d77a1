# SPDX-License-Identifier: Apache-2.0
"""A place for rows is one class: everything that trains and evaluates runs over it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from halves import HALVES, HalfIds, Halves
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.lookups import LocalLookup, Lookup
from hotbed.embedding.modules import table_modules
from hotbed.parallel.shards import WholeShard
from hotbed.persist.container.row_files import owned_rows
from hotbed.persist.state.spread import keep_own_rows
from hotbed.persist.state.tables import joined_scalars

LATE_SECONDS = 0.0005


class HalfShard(WholeShard):
    """The rows of one half of the partitions; the first half has the counts of rows."""

    def __init__(self, half: int) -> None:
        self.rank = half

    def owned(self, table: str) -> np.ndarray:
        return np.arange(256) // 128 == self.rank


class StreamIds(HalfIds):
    """Mapped ids whose rows go after the updates that were begun before."""

    def __init__(self, mapped: HalfIds, stream: ThreadPoolExecutor) -> None:
        vars(self).update(vars(mapped))
        self.stream = stream

    def let_go(self) -> None:
        self.stream.submit(super().let_go)


class Device(Halves):
    """Half of the rows of each table lie in another one; verbs run on a stream, each late.

    As for kernels of a device, nobody waits for an update. The rows come home for a save.
    """

    def __init__(self, tables: Sequence[hb.Table]) -> None:
        super().__init__({table.name: copy.deepcopy(table) for table in tables})
        self.low = {table.name: table for table in tables}
        for half, of_half in zip(HALVES, (self.low, self.high), strict=True):
            keep_own_rows(of_half, HalfShard(half))
        self.stream = ThreadPoolExecutor(1)
        self.num_updates = 0

    def late(self, verb: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future[Any]:
        """Let a verb run on the stream, after all others."""

        def run() -> Any:
            time.sleep(LATE_SECONDS)
            return verb(*arguments, **keywords)

        return self.stream.submit(run)

    def ask(self, *arguments: Any) -> Any:
        return self.late(super().ask, *arguments).result()

    def take(self, *arguments: Any) -> Any:
        return self.late(super().take, *arguments).result()

    def pool(self, *arguments: Any, **keywords: Any) -> Any:
        results, mapped = self.late(super().pool, *arguments, **keywords).result()
        return results, StreamIds(mapped, self.stream)

    def pool_plan(self, *arguments: Any) -> Any:
        results, mapped = self.late(super().pool_plan, *arguments).result()
        return results, StreamIds(mapped, self.stream)

    def sum_gradients(self, *arguments: Any) -> Any:
        return self.late(super().sum_gradients, *arguments).result()

    def join_grains(self, *arguments: Any) -> Any:
        return self.late(super().join_grains(*arguments)).result

    def update(self, *arguments: Any) -> None:
        self.num_updates += 1
        self.last = self.late(super().update, *arguments)

    def bring_home(self) -> None:
        """Let the tables hold all rows, as if they had never been elsewhere."""
        self.last.result()
        for name, low in self.low.items():
            parts = list(zip((low, self.high[name]), map(HalfShard, HALVES), strict=True))
            rows = [batch for table, _ in parts for batch in table.export()]
            waiting = [b for t, half in parts for b in owned_rows(t.candidates(), half.owned(name))]
            sketch = [b for t, half in parts for b in owned_rows(t.sketch(), half.owned(name))]
            scalars = joined_scalars(name, [table.scalars() for table, _ in parts], ["", ""])
            low.clear()
            low.load(rows)
            low.load_scalars(scalars)
            low.load_candidates(waiting)
            low.load_sketch(sketch)

    def close(self) -> None:
        self.stream.shutdown()


class Plain(nn.Module):
    """A model of plain PyTorch, whose ids are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(50, 4)
        self.item = nn.Embedding(80, 4)
        self.head = nn.Linear(13, 1)

    def forward(self, user: Tensor, item: Tensor, x: Tensor) -> Tensor:
        parts = [self.user(user % 50), self.item(item), self.item((item + 1) % 80), x[:, None]]
        return self.head(torch.cat(parts, 1)).squeeze(1)


def by_hotbed(network: Callable[..., nn.Module]) -> tuple[nn.Module, Any]:
    return network(admit=hb.MinCount(2)), "adam"


def by_auto(network: Callable[..., nn.Module]) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = Plain()
    model, optimizer, _ = hb.auto(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
    return model, optimizer


def whole(data: hb.Dataset, grains: int) -> Iterable[Any]:
    return data


def ahead(data: hb.Dataset, grains: int) -> Iterable[Any]:
    return hb.Ahead(data, torch_threads=1 if grains == 1 else None)


@pytest.mark.parametrize(
    ("make", "grains", "data_of", "first"),
    [
        (by_hotbed, 1, whole, 0),
        (by_hotbed, 1, ahead, 0),
        (by_hotbed, 4, ahead, 0),
        (by_auto, 1, ahead, 0),
        (by_auto, 1, whole, 1),  # the rows of the first module stay in memory
        (by_auto, 4, ahead, 1),
    ],
)
def test_a_place_for_rows_of_its_own_has_the_bits_of_memory(
    make: Any,
    grains: int,
    data_of: Any,
    first: int,
    dataset: Any,
    network: Any,
    world: Any,
    tmp_path: Path,
) -> None:
    def learned(place_of: Callable[[list[hb.Table]], Lookup], folder: Path) -> tuple[Any, ...]:
        net, optimizer = make(network)
        modules = table_modules(net)[first:]
        place = place_of([table for module in modules for table in module.tables])
        for module in modules:
            module.lookup = place
        torch.manual_seed(1)
        model = hb.RecModel(net, "bce", optimizer, {"auc"}, grains=grains)
        model.fit(data_of(dataset(320), grains), progress=False)
        results = model.evaluate(dataset(128, seed=1))
        if isinstance(place, Device):
            place.bring_home()
            assert place.num_updates == 5
            assert all(map(len, place.high.values())), "a half without rows proves nothing"
            place.close()
        model.save(folder)
        return world.snapshot(model), results

    expected = learned(lambda tables: LocalLookup(), tmp_path / "memory")
    late = learned(Device, tmp_path / "late")
    assert world.same(late[0], expected[0])
    assert late[1] == expected[1]
    assert hb.checkpoints.diff(tmp_path / "memory", tmp_path / "late")["same"]
