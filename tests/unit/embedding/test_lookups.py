# SPDX-License-Identifier: Apache-2.0
"""The seam of lookups: who implements its four verbs can keep the rows elsewhere, with equal bits.

`Halves` keeps the partitions 0 to 127 of each table in one `Table` and the others in a second, as
two processes would. It knows no native step. Two things do not carry over, and each owner of rows
must ask the others for them. A batch that needs more rows than Lru or Lfu keep in the whole table
is refused: each half compares its share. A norm over `.grad` adds in the order of the ids, which
are those of the first half, then those of the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import pyarrow as pa
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
    Sums,
    statistics_after,
)
from hotbed.embedding.modules import RowTargets, update_targets
from hotbed.embedding.table import MapQueue, Table
from hotbed.errors import ConfigError, NonFiniteGradient

HALVES = range(2)
Parts = list[Any]  # one of each half


class HalfMaps:
    """The maps of both halves in a queue."""

    def __init__(self, tasks: Parts) -> None:
        self.tasks = tasks

    def wait(self) -> None:
        for task in self.tasks:
            task.wait()

    def take_back(self) -> bool:
        return all([task.take_back() for task in reversed(self.tasks)])

    def statistics(self) -> list[dict[str, int]]:
        low, high = (task.statistics() for task in self.tasks)
        return [{key: a[key] + b[key] for key in a} for a, b in zip(low, high, strict=True)]


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

    def map(
        self,
        layout: FeatureLayout,
        inputs: Sequence[hb.Ids],
        time: Any,
        *,
        training: bool,
        queue: MapQueue | None = None,
        grain_ends: Sequence[int] = (),
    ) -> Plan:
        owners, routed = route(inputs)
        plans = [
            self.local.map(half, ids, time, training=training, queue=queue, grain_ends=grain_ends)
            for half, ids in zip(self._layouts(layout), routed, strict=True)
        ]
        task = None if queue is None else HalfMaps([plan.task for plan in plans])
        return Plan(tuple(inputs), HalfIds(inputs, owners, [plan.mapped for plan in plans]), task)

    def fetch(self, layout: FeatureLayout, inputs: Sequence[hb.Ids]) -> None:
        for half, ids in zip(self._layouts(layout), route(inputs)[1], strict=True):
            self.local.fetch(half, ids)

    def divide(
        self, layout: FeatureLayout, plan: Plan, grains: Sequence[Sequence[hb.Ids] | None]
    ) -> list[Plan | None]:
        assert isinstance(plan.mapped, HalfIds)
        assert None not in grains, "no grain is empty here"
        routed = [route(inputs) for inputs in grains if inputs is not None]
        of_halves = []
        for half, half_layout in enumerate(self._layouts(layout)):
            whole = Plan((), plan.mapped.mapped[half])
            inputs = [of_part[half] for _, of_part in routed]
            of_halves.append(self.local.divide(half_layout, whole, inputs))
        plans = []
        for inputs, (owners, _), low, high in zip(grains, routed, *of_halves, strict=True):
            plans.append(Plan(tuple(inputs), HalfIds(inputs, owners, [low.mapped, high.mapped])))
        return plans

    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[hb.Ids],
        time: Any,
        plan: Plan | None,
        *,
        training: bool,
        keeps: bool,
    ) -> tuple[Pooled, MappedIds]:
        owners, routed = route(inputs)
        plans: Parts = [None, None]
        if plan is not None:
            assert isinstance(plan.mapped, HalfIds)
            plans = [
                Plan(tuple(ids), mapped)
                for ids, mapped in zip(routed, plan.mapped.mapped, strict=True)
            ]
        every_mapped = []
        rows = [torch.empty(len(of), dim) for of, dim in zip(owners, layout.dims, strict=True)]
        for half, half_layout in enumerate(self._layouts(layout)):
            (_, of_half), mapped = self.local.pool(
                half_layout, routed[half], time, plans[half], training=training, keeps=keeps
            )
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
        self, layout: FeatureLayout, mapped: MappedIds, parts: Sequence[Sums | None]
    ) -> Sums | None:
        assert isinstance(mapped, HalfIds)
        with_sums = [part for part in parts if part is not None]
        if not with_sums:
            return None
        every = [(None, None) if part is None else halves_of(part) for part in parts]
        halves = [
            self.local.join_grains(half_layout, mapped.mapped[half], [of[half] for of in every])
            for half, half_layout in enumerate(self._layouts(layout))
        ]
        return both(with_sums[0].groups, halves)

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
        offsets = np.arange(len(values) + 1) if ids.offsets is None else np.asarray(ids.offsets)
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


def bags_of(ids: hb.Ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first position and the length of each bag, and the weight of each position."""
    offsets = np.asarray(ids.offsets)
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


# --- a table for each rule and scope, policy and type of rows

RULES = (
    hb.Sgd,
    hb.Momentum,
    hb.Nesterov,
    hb.Adagrad,
    hb.RowwiseAdagrad,
    hb.RmsProp,
    hb.Adam,
    hb.Ftrl,
)
POLICIES: dict[str, dict[str, Any]] = {
    "count": {"admit": hb.MinCount(3)},
    "count of batches": {"admit": hb.MinCount(2, once_a_batch=True)},
    "counts in a sketch": {"admit": hb.MinCount(3, sketch_bytes=65_536)},
    "few counts": {"admit": hb.MinCount(3, max_candidates=1024)},
    "counts in little memory": {"admit": hb.MinCount(3, admission_bytes=65_536)},
    "counts that expire": {"admit": hb.MinCount(3, expire_seconds=7)},
    "counts that expire by step": {"admit": hb.MinCount(3, expire_steps=7)},
    "probability": {"admit": hb.Probability(0.3)},
    "age": {"evict": hb.Ttl(seconds=7)},
    "age in steps": {"evict": hb.Ttl(steps=7)},
    "recency": {"evict": hb.Lru(1024)},
    "frequency": {"evict": hb.Lfu(1024)},
    "frequency that ages": {"evict": hb.Lfu(1024, half_life_seconds=9)},
    "all together": {"admit": hb.MinCount(2), "evict": [hb.Ttl(seconds=20), hb.Lru(1024)]},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16", "evict": hb.Lru(1024)},
}
POOLINGS = ("sum", "mean", "max", "none")


def tables() -> list[Table]:
    settings = dict(POLICIES)
    for rule in RULES:
        for scope in ("touched", "catch_up", "all"):
            settings[f"{rule.__name__} {scope}"] = {"rule": rule(lr=0.1, l2=0.01, scope=scope)}
    return [Table(name, dim=3, **settings[name]) for name in settings]


def modules(every: list[Table]) -> torch.nn.ModuleList:
    """Return a collection of all tables, and one with four poolings that shares three of them."""
    features = [
        Feature(table.name, table.name, POOLINGS[number % 4]) for number, table in enumerate(every)
    ]
    few = [table for table in every if table.name in ("count", "age", "frequency that ages")]
    shared = [Feature(f"{few[0].name} again", few[0].name, "max")]
    shared += [Feature(table.name, table.name, "mean") for table in few]
    return torch.nn.ModuleList(
        [hb.EmbeddingCollection(features, every), hb.EmbeddingCollection(shared, few)]
    )


def batches(num_batches: int) -> list[hb.Batch]:
    random = np.random.default_rng(0)
    names = [feature.name for module in modules(tables()) for feature in module.features]
    every = []
    for number in range(num_batches):
        ids = {}
        for name in names:
            offsets = torch.from_numpy(np.concatenate([[0], random.integers(0, 4, 12).cumsum()]))
            size = int(offsets[-1])
            values = np.where(
                random.random(size) < 0.5,
                random.integers(0, 40, size),
                random.integers(-(2**63), 2**63 - 1, size),
            )
            weights = None
            if name in ("age", "probability"):
                weights = torch.from_numpy(random.random(size, dtype=np.float32))
            ids[name] = hb.Ids(torch.from_numpy(values), offsets, weights)
        time = torch.from_numpy(number * 1_000_000 + random.integers(0, 1_000_000, 12))
        every.append(hb.Batch(ids=ids, time=time, num_samples=12))
    return every


def learn(
    every: list[Table], lookup: Lookup, evicted: Sequence[Table], every_batch: list[hb.Batch]
) -> list[Tensor]:
    """Learn from the batches, and return the results of all lookups.

    Ids are mapped in the lookup, or ahead, or ahead in a queue and then looked up in two grains;
    every third update adds the gradients of two batches. The norm of gradients is a result, too.
    """
    network = modules(every)
    for module in network:
        module.lookup = lookup
    optimizer = hb.SparseOptimizer(network)
    queue = MapQueue()
    results = []
    for number, batch in enumerate(every_batch):
        loss = torch.zeros(())
        for module in network:
            inputs = module.inputs_of(batch)
            runs: list[tuple[list[hb.Ids], Plan | None]] = [(inputs, None)]
            if number % 3:
                ends = (5, len(batch)) if number % 3 == 2 else ()
                plan = module.map(
                    inputs, batch.time, queue=queue if ends else None, grain_ends=ends
                )
                plan.wait()
                runs = [(inputs, plan)]
            if number % 3 == 2:
                grains = [[ids[:5] for ids in inputs], [ids[5:] for ids in inputs]]
                runs = list(zip(grains, lookup.divide(module.layout, plan, grains), strict=True))
            for of_run, of_plan in runs:
                flat, sequences = module.pool(of_run, batch.time, of_plan)
                results += [flat.detach(), *(rows.detach() for rows in sequences)]
                loss = loss + ((flat - 1) ** 2).sum() + sum((rows**3).sum() for rows in sequences)
        loss.backward()
        for module in network:
            sums = module.gradients.take(keeps=True)
            assert sums is not None
            results.append(torch.from_numpy(sums.mapped.squares(sums)))
        if number % 3 == 1:
            continue
        torch.nn.utils.clip_grad_value_(network.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 9:
            for table in evicted:
                table.evict(None if table.clock == "steps" else (number - 1) * 1_000_000)
    queue.close()
    return results


def state(parts: Sequence[Table]) -> dict[str, Any]:
    """Return the contents of a table that consists of `parts`."""
    scalars = [table.scalars() for table in parts]
    of_half = 256 // len(parts)  # partitions
    total = {
        name: sum(each[name] for each in scalars) for name in ("admitted", "refused", "evicted")
    }
    shared = {name: [each[name] for each in scalars] for name in ("step", "calls", "watermark")}
    return {
        "rows": pa.Table.from_batches([batch for table in parts for batch in table.export()]),
        "candidates": [
            batch
            for number, table in enumerate(parts)
            for batch in table.candidates()
            if batch["partition"][0].as_py() // of_half == number
        ],
        "sketch": [batch for table in parts for batch in table.sketch()],
        **total,
        **{name: set(values) for name, values in shared.items()},
    }


def test_a_lookup_over_two_halves_has_the_bits_of_one_table_for_every_rule_and_policy() -> None:
    whole = tables()
    every_batch = batches(100)
    expected = learn(whole, LocalLookup(), whole, every_batch)
    low = tables()
    high = tables()
    results = learn(low, Halves({table.name: table for table in high}), [*low, *high], every_batch)
    for number, (result, other) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(result, other), f"result {number}"
    for table, *halves in zip(whole, low, high, strict=True):
        assert state(halves) == state([table]), table.name
        assert all(map(len, halves)), f"{table.name}: a half without rows proves nothing"
    stats = {table.name: table.stats for table in whole}
    assert all(stats[name]["evicted"] for name in ("age", "age in steps", "recency", "frequency"))
    assert stats["count"]["refused"]


def small(lookup: Lookup | None = None) -> tuple[hb.EmbeddingCollection, list[Table]]:
    """Return a collection of two tables, over halves or `lookup`, and all its tables."""
    layout = [hb.Table("user", dim=2), hb.Table("item", dim=2, rule=hb.Adam(lr=0.1))]
    high = {table.name: table.like(table.name, 2) for table in layout}
    module = hb.EmbeddingCollection(
        [Feature("user", "user", "none"), Feature("item", "item", "none")], layout
    )
    module.lookup = lookup or Halves(high)
    return module, layout if lookup else [layout[0], high["user"], layout[1], high["item"]]


def ids_of(*values: int) -> dict[str, hb.Ids]:
    """Return these ids for both features, a bag each."""
    offsets = torch.arange(len(values) + 1)
    return {name: hb.Ids(torch.tensor(values), offsets) for name in ("user", "item")}


def test_a_gradient_that_is_not_finite_is_named_and_no_half_is_updated() -> None:
    module, parts = small()
    rows = module(ids_of(*range(40)))
    scale = torch.ones(40, 2)
    scale[7, 1] = torch.inf
    (rows["item"] * scale).sum().backward()
    before = [(list(table.export()), table.step) for table in parts]
    with pytest.raises(NonFiniteGradient, match="table 'item': the gradient of id 7"):
        hb.SparseOptimizer(module).step()
    assert [(list(table.export()), table.step) for table in parts] == before


def test_row_targets_work_over_any_lookup() -> None:
    states = []
    for lookup in (None, LocalLookup()):
        module, parts = small(lookup)
        module.flow = targets = RowTargets({"user": 50})
        targets.fixed["item"] = [3, 39]
        for _ in range(3):
            rows = module(ids_of(*range(40), 7))
            ((rows["user"] ** 2).sum() + (rows["item"] ** 3).sum()).backward()
            waiting = [(target, target.rows.grad) for target in targets.waiting]
            update_targets(waiting, {"user": 0.5, "item": 0.25})
            targets.waiting.clear()
        size = len(parts) // 2
        states.append([state(parts[start : start + size]) for start in (0, size)])
    assert states[0] == states[1]


def test_a_map_of_a_queue_can_be_waited_for_counted_and_taken_back() -> None:
    module, parts = small()
    queue = MapQueue()
    inputs = module.inputs_of(ids_of(*range(40)))
    plan = module.map(inputs, queue=queue)
    plan.wait()
    assert statistics_after([(module.tables, plan.task)])["user"]["rows"] == 40
    assert plan.fits(inputs)
    plan.take_back()
    queue.close()
    assert [len(table) for table in parts] == [0] * 4


def test_a_lookup_rejects_ids_that_another_one_mapped() -> None:
    module, _ = small()
    loss = module(ids_of(1, 2))["user"].sum()
    module.lookup = LocalLookup()
    with pytest.raises(ConfigError, match="expected ids that it mapped itself, got HalfIds"):
        loss.backward()
