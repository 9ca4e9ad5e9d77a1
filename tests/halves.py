# SPDX-License-Identifier: Apache-2.0
"""A second place for rows, for tests that hold a place to the bits of memory.

`Halves` keeps the partitions 0 to 127 of each table in one `Table` and the others in a second, as
two processes would. It knows no native step. Two things do not carry over, and each owner of rows
must ask the others for them. A batch that needs more rows than Lru or Lfu keep in the whole table
is refused: each half compares its share. A norm over `.grad` adds in the order of the ids, which
are those of the first half, then those of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hotbed as hb
from hotbed._core import hash_ids
from hotbed.embedding.lookups import (
    Buckets,
    Feature,
    FeatureLayout,
    Group,
    LocalLookup,
    Lookup,
    MappedIds,
    Plan,
    Pooled,
    RowMemory,
    Sums,
    WantedRows,
    new_rows,
)
from hotbed.embedding.table import Table
from hotbed.parallel import sum_counters

HALVES = range(2)
Parts = list[Any]  # one of each half


class HalfAsked:
    """What both halves were asked for."""

    def __init__(self, halves: Parts, layouts: Sequence[FeatureLayout]) -> None:
        self.halves = halves
        self.layouts = layouts

    def wait(self) -> None:
        for half in self.halves:
            half.wait()

    def take_back(self) -> None:
        for half in reversed(self.halves):
            half.take_back()

    def statistics(self) -> dict[str, dict[str, int]]:
        return sum_counters([[half.statistics()] for half in self.halves])[0]


class HalfIds:
    """The mapped ids of both halves; those of the first come first."""

    def __init__(self, inputs: Sequence[hb.Ids], owners: list[np.ndarray], mapped: Parts) -> None:
        self.inputs = inputs
        self.owners = owners  # of each feature, the half of each position
        self.mapped = mapped
        self.tables = mapped[0].tables
        self.rows: list[Tensor] = []  # of each feature, the row of each position, as pooled

    def num_uniques(self) -> list[int]:
        low, high = (half.num_uniques() for half in self.mapped)
        return [a + b for a, b in zip(low, high, strict=True)]

    def unique_ids(self, number: int) -> np.ndarray:
        return np.concatenate([half.unique_ids(number) for half in self.mapped])

    def read(self, number: int, rows: Tensor, slots: Tensor) -> None:
        start = 0
        for half in self.mapped:
            half.read(number, rows[start:], slots[start:])
            start += half.num_uniques()[number]

    def let_go(self) -> None:
        for half in self.mapped:
            half.let_go()

    def leave_out(self, number: int, places: np.ndarray) -> None:
        start = 0
        for half in self.mapped:
            end = start + half.num_uniques()[number]
            half.leave_out(number, places[(places >= start) & (places < end)] - start)
            start = end

    def find_nonfinite(self, sums: Sums) -> tuple[int, int] | None:
        places = [part.mapped.find_nonfinite(part) for part in halves_of(sums)]
        return min((place for place in places if place is not None), default=None)

    def has_value(self, grads: Sequence[Tensor]) -> bool:
        return any(bool(grad.any()) for grad in grads)

    def squares(self, sums: Sums) -> np.ndarray:
        low, high = (part.mapped.squares(part) for part in halves_of(sums))
        return np.concatenate([low[:128], high[128:]])

    def without_ids(self) -> HalfIds:
        return HalfIds([], [], [half.without_ids() for half in self.mapped])


def halves_of(sums: Sums) -> Parts:
    """Return the sums of each half, from those of both."""
    assert isinstance(sums.mapped, HalfIds)
    uniques = [half.num_uniques() for half in sums.mapped.mapped]
    parts: Parts = [[], []]
    for group, grad in zip(sums.groups, sums.grads, strict=True):
        pieces: Parts = [[], []]
        start = 0
        for number, half in [(number, half) for number in group.tables for half in HALVES]:
            end = start + uniques[half][number]
            pieces[half].append(grad[start:end])
            start = end
        for half in HALVES:
            parts[half].append(torch.cat(pieces[half]))
    groups = [Group(group.dim, group.tables, group.names, Buckets(())) for group in sums.groups]
    return [Sums(sums.mapped.mapped[half], groups, parts[half]) for half in HALVES]


class Halves(Lookup):
    """Looks up in two tables for each table: in that of the layout, and in that of `high`."""

    def __init__(self, high: Mapping[str, Table]) -> None:
        self.high = high
        self.local = LocalLookup()
        self.layouts: dict[int, Parts] = {}  # of the halves, by the layout of both

    def ask(self, wanted: WantedRows) -> HalfAsked:
        routed = [route(of_module)[1] for of_module in wanted.inputs]
        halves = []
        for half in HALVES:
            layouts = tuple(self._layouts(layout)[half] for layout in wanted.layouts)
            inputs = [of_module[half] for of_module in routed]
            halves.append(self.local.ask(replace(wanted, layouts=layouts, inputs=inputs)))
        return HalfAsked(halves, wanted.layouts)

    def fetch(self, layout: FeatureLayout, inputs: Sequence[hb.Ids]) -> None:
        for half, ids in zip(self._layouts(layout), route(inputs)[1], strict=True):
            self.local.fetch(half, ids)

    def take(
        self, asked: Any, grains: Sequence[Sequence[Sequence[hb.Ids]] | None]
    ) -> list[list[Plan | None]]:
        routed = [None if grain is None else [route(ids) for ids in grain] for grain in grains]
        halves = []
        for half in HALVES:
            inputs = [
                None if grain is None else [parts[half] for _, parts in grain] for grain in routed
            ]
            halves.append(self.local.take(asked.halves[half], inputs))
        plans: list[list[Plan | None]] = []
        for number, of_halves in enumerate(zip(*halves, strict=True)):
            of_module: list[Plan | None] = []
            for grain, parts, low, high in zip(grains, routed, *of_halves, strict=True):
                plan = None
                if grain is not None:
                    mapped = HalfIds(grain[number], parts[number][0], [low.mapped, high.mapped])
                    plan = Plan(tuple(grain[number]), mapped, asked)
                of_module.append(plan)
            plans.append(of_module)
        return plans

    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[hb.Ids],
        time: Any,
        memory: RowMemory = new_rows,
        **how: bool,
    ) -> tuple[Pooled, MappedIds]:
        def of_half(half: int, layout: FeatureLayout, ids: Any) -> tuple[Pooled, MappedIds]:
            return self.local.pool(layout, ids, time, **how)

        return self._pooled(layout, inputs, of_half)

    def pool_plan(
        self,
        layout: FeatureLayout,
        inputs: Sequence[hb.Ids],
        plan: Plan,
        memory: RowMemory = new_rows,
    ) -> tuple[Pooled, MappedIds]:
        assert isinstance(plan.mapped, HalfIds)
        parts = plan.mapped.mapped

        def of_half(half: int, layout: FeatureLayout, ids: Any) -> tuple[Pooled, MappedIds]:
            return self.local.pool_plan(layout, ids, Plan(tuple(ids), parts[half]))

        return self._pooled(layout, inputs, of_half)

    def _pooled(
        self, layout: FeatureLayout, inputs: Sequence[hb.Ids], pool: Callable[..., Any]
    ) -> tuple[Pooled, MappedIds]:
        """Return the results of both halves; `pool`: returns those of one."""
        owners, routed = route(inputs)
        every_mapped = []
        rows = [torch.empty(len(of), dim) for of, dim in zip(owners, layout.dims, strict=True)]
        for half, half_layout in enumerate(self._layouts(layout)):
            (_, of_half), mapped = pool(half, half_layout, routed[half])
            every_mapped.append(mapped)
            for part, out, of in zip(of_half, rows, owners, strict=True):
                out[torch.from_numpy(of == half)] = part
        mapped = HalfIds(inputs, owners, every_mapped)
        mapped.rows = rows
        flat = [torch.empty(len(inputs[0]), 0)]
        sequences = []
        for feature, ids, out in zip(layout.features, inputs, rows, strict=True):
            if feature.pooling == "none":
                weights = torch.from_numpy(bags_of(ids)[2])
                sequences.append(out if ids.weights is None else 0.0 + out * weights[:, None])
            else:
                flat.append(pooled(feature.pooling, ids, out))
        return (torch.cat(flat, 1), sequences), mapped

    def sum_gradients(
        self,
        layout: FeatureLayout,
        mapped: MappedIds,
        flat: Tensor | None,
        sequences: Sequence[Tensor | None],
        groups: Sequence[Group],
    ) -> Sums:
        assert isinstance(mapped, HalfIds)
        grads = []
        for number, grad in enumerate(layout.split(flat, sequences)):
            if grad is not None:
                pooling = layout.features[number].pooling
                grad = spread(pooling, mapped.inputs[number], mapped.rows[number], grad)
            grads.append(grad)
        plain = [Group(group.dim, group.tables, group.names, Buckets(())) for group in groups]
        parts = []
        for half, half_layout in enumerate(self._layouts(layout)):
            masks = [torch.from_numpy(of == half) for of in mapped.owners]
            of_half = [
                None if grad is None else grad[mask]
                for grad, mask in zip(grads, masks, strict=True)
            ]
            parts.append(
                self.local.sum_gradients(half_layout, mapped.mapped[half], None, of_half, plain)
            )
        return both(groups, parts)

    def join(self, parts: Sequence[Sums]) -> Sums:
        every = [halves_of(part) for part in parts]
        halves = [self.local.join([part[half] for part in every]) for half in HALVES]
        return both(parts[0].groups, halves)

    def join_grains(
        self, asked: Any, parts: Sequence[Sequence[Sums | None]]
    ) -> Callable[[], list[Sums | None]]:
        every = [
            [(None, None) if part is None else halves_of(part) for part in of_module]
            for of_module in parts
        ]
        joins = [
            self.local.join_grains(
                asked.halves[half], [[part[half] for part in of_module] for of_module in every]
            )
            for half in HALVES
        ]

        def joined() -> list[Sums | None]:
            halves = [join() for join in joins]
            return [
                None if None in of_module else both(layout.groups, of_module)
                for layout, *of_module in zip(asked.layouts, *halves, strict=True)
            ]

        return joined

    def update(self, parts: Sequence[Sums], rates: Sequence[Sequence[float]]) -> None:
        every = [halves_of(part) for part in parts]
        for half in HALVES:
            self.local.update([part[half] for part in every], rates)

    def _layouts(self, layout: FeatureLayout) -> Parts:
        """Return the features of a layout in the tables of each half, a row for each position."""
        if id(layout) not in self.layouts:
            features = [Feature(feature.name, feature.table, "none") for feature in layout.features]
            high = [self.high[table.name] for table in layout.tables]
            halves = [FeatureLayout(tables, features) for tables in (layout.tables, high)]
            self.layouts[id(layout)] = halves
        return self.layouts[id(layout)]


def route(inputs: Sequence[hb.Ids]) -> tuple[list[np.ndarray], Parts]:
    """Return the half of each id, and the ids of each half, in the bags in which they were."""
    owners = []
    routed: Parts = [[], []]
    for ids in inputs:
        values = np.asarray(ids.values)
        owner = (hash_ids(values) >> 63).astype(np.int64)
        offsets = offsets_of(ids)
        owners.append(owner)
        for half in HALVES:
            before = np.concatenate([[0], np.cumsum(owner == half)])
            routed[half].append(hb.Ids(values[owner == half], before[offsets]))
    return owners, routed


def both(groups: Sequence[Group], halves: Parts) -> Sums:
    """Return the sums of both halves, from those of each."""
    mapped = HalfIds([], [], [half.mapped for half in halves])
    grads = [joined_sums(group, number, halves) for number, group in enumerate(groups)]
    return Sums(mapped, groups, grads, all(half.finite for half in halves))


def joined_sums(group: Group, number: int, parts: Parts) -> Tensor:
    """Return the sums of a group: of each table, those of the first half, then of the second."""
    uniques = [part.mapped.num_uniques() for part in parts]
    pieces = []
    starts = [0, 0]
    for table, half in [(table, half) for table in group.tables for half in HALVES]:
        end = starts[half] + uniques[half][table]
        pieces.append(parts[half].grads[number][starts[half] : end])
        starts[half] = end
    num_rows = sum(map(len, pieces))
    return torch.cat([*pieces, torch.zeros(group.num_rows(num_rows) - num_rows, group.dim)])


def offsets_of(ids: hb.Ids) -> np.ndarray:
    """Return where the bags of ids begin and end; without offsets each id is one."""
    return np.arange(len(ids.values) + 1) if ids.offsets is None else np.asarray(ids.offsets)


def bags_of(ids: hb.Ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first position and the length of each bag, and the weight of each position."""
    offsets = offsets_of(ids)
    weights = np.ones(len(ids.values), np.float32)
    if ids.weights is not None:
        weights = np.asarray(ids.weights)
    return offsets[:-1], np.diff(offsets), weights


def pooled(pooling: str, ids: hb.Ids, rows: Tensor) -> Tensor:
    """Return the result of each bag: its rows one after another, as the native core adds them."""
    starts, lengths, weights = bags_of(ids)
    out = np.zeros((len(starts), rows.shape[1]), np.float32)
    for number in range(lengths.max(initial=0)):
        bags = np.flatnonzero(lengths > number)
        positions = starts[bags] + number
        each = rows.numpy()[positions]
        if pooling == "max":
            out[bags] = np.maximum(out[bags], each) if number else each
        else:
            out[bags] += each * weights[positions][:, None]
    if pooling == "mean":
        out *= (np.float32(1) / np.maximum(lengths, 1).astype(np.float32))[:, None]
    return torch.from_numpy(out)


def spread(pooling: str, ids: hb.Ids, rows: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the row of each position."""
    starts, lengths, weights = bags_of(ids)
    if pooling == "max":
        out = torch.zeros_like(rows)
        lanes = np.arange(rows.shape[1])
        for start, length, bag in zip(starts.tolist(), lengths.tolist(), grad, strict=True):
            if length:
                out[start + rows[start : start + length].numpy().argmax(0), lanes] = bag
        return out
    bags = np.arange(len(rows))
    if pooling != "none":
        bags = np.repeat(np.arange(len(starts)), lengths)
    if pooling == "mean":
        weights = weights * (np.float32(1) / lengths[bags].astype(np.float32))
    return torch.from_numpy(grad.numpy()[bags] * weights[:, None])
