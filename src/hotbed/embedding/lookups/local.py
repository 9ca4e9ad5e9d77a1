# SPDX-License-Identifier: Apache-2.0
"""LocalLookup: the verbs of a batch over tables of this process, each a native call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.data.batch import CountedTimes, Ids, changed
from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.table import Answer, MapTask, Step, Table, read_ahead
from hotbed.errors import ConfigError

from .host_ids import HostIds, dense_rows
from .layout import FeatureLayout, Group
from .lookup import Lookup, Pooled, RowMemory, new_rows
from .mapped import MappedIds, Sums
from .plan import Asked, Plan, Statistics, WantedRows


@dataclass(frozen=True, eq=False)
class NativeIds(ABC):
    """The mapped ids of a native step.

    Attributes:
        tables: those of the step.
        step: the native plan.
        host: the ids of each feature, which the step has still to pool; None = there are none.
    """

    tables: Sequence[Table]
    step: Step
    host: HostIds | None = None

    def num_uniques(self) -> list[int]:
        return self.step.num_uniques()

    def unique_ids(self, number: int) -> NDArray[np.int64]:
        return self.step.unique_ids(number)

    def read(self, number: int, rows: Tensor, slots: Tensor) -> None:
        self.step.unique_rows(number, rows.data_ptr(), slots.data_ptr())

    def read_positions(self, feature: int, rows: Tensor) -> None:
        self.step.position_rows(feature, rows.data_ptr())

    def leave_out(self, number: int, places: NDArray[np.int64]) -> None:
        self.step.leave_out(number, places)

    def find_nonfinite(self, sums: Sums) -> tuple[int, int] | None:
        for number, address in enumerate(self.addresses(sums.groups, sums.grads)):
            id = None
            if address is not None:
                id = self.step.find_nonfinite(number, address)
            if id is not None:
                return number, id
        return None

    def has_value(self, grads: Sequence[Tensor]) -> bool:
        # the first row mostly tells
        return any(bool(grad[:1].any()) or bool(grad.any()) for grad in grads)

    def squares(self, sums: Sums) -> NDArray[np.float64]:
        squares = np.zeros(PARTITIONS)
        for number, address in enumerate(self.addresses(sums.groups, sums.grads)):
            if address is not None:
                self.step.add_squares(number, address, squares.ctypes.data)
        return squares

    def addresses(self, groups: Sequence[Group], grads: Sequence[Tensor]) -> list[int | None]:
        """Return the address of each table's first sum; None for a table in no group.

        `grads`: the tensor of each group.
        """
        return _sum_addresses(self.step, groups, grads)

    def let_go(self) -> None:
        self.step.let_go()

    @abstractmethod
    def without_ids(self) -> MappedIds:
        """Return the same tables without an id; see `MappedIds.without_ids`."""


@dataclass(frozen=True, eq=False)
class LocalIds(NativeIds):
    """The mapped ids of tables of this process."""

    def without_ids(self) -> LocalIds:
        return LocalIds(self.tables, step_without_ids(self.tables))


def step_without_ids(tables: Sequence[Table]) -> Step:
    """Return a native step that has mapped no id of these tables."""
    step = Step([table.native for table in tables], [])
    step.map([], 0, training=False)
    return step


@dataclass(frozen=True)
class LocalMap:
    """The map of a batch for one module.

    Attributes:
        layout: of the module.
        mapped: its ids; None = they were given away, and can no longer be taken back here.
        task: of the queue that maps the ids; None = they are mapped.
        undo: undoes what tables have noted of the batch; see `dates.take_times`.
    """

    layout: FeatureLayout
    mapped: LocalIds | None
    task: MapTask | None
    undo: Callable[[], None]

    @property
    def ids(self) -> LocalIds:
        """The mapped ids, which were not given away."""
        assert self.mapped is not None, "a batch is taken once"
        return self.mapped

    def wait(self) -> None:
        if self.task is not None:
            self.task.wait()

    def take_back(self) -> None:
        if self.mapped is not None and self.task is not None and self.task.take_back():
            self.undo()

    def statistics(self) -> Statistics:
        if self.task is None:
            return {}
        statistics = zip(self.layout.tables, self.task.statistics(), strict=True)
        return {table.name: table.completed(counters) for table, counters in statistics}


@dataclass
class LocalAsked:
    """The maps of a batch for each module.

    `is_divided`: whether the batch has grains.
    """

    maps: list[LocalMap]
    is_divided: bool

    def wait(self) -> None:
        for of_module in self.maps:
            of_module.wait()

    def take_back(self) -> None:
        for of_module in reversed(self.maps):
            of_module.take_back()

    def statistics(self) -> Statistics:
        return {
            name: counters
            for of_module in self.maps
            for name, counters in of_module.statistics().items()
        }

    def forget(self) -> None:
        """Let go of the ids, whose plans were taken."""
        self.maps = [changed(of_module, {"mapped": None}) for of_module in self.maps]


class NativeLookup(Lookup, ABC):
    """Performs the verbs that need no other place once rows are here: each is a native call."""

    def fetch(self, layout: FeatureLayout, inputs: Sequence[Ids]) -> None:
        host = HostIds(layout.features, inputs)
        natives = [table.native for table in layout.tables]
        try:
            read_ahead(natives, layout.columns, host.addresses)
        except ValueError:
            host.check_offsets(layout.features)
            raise

    def pool_plan(
        self, layout: FeatureLayout, inputs: Sequence[Ids], plan: Plan, memory: RowMemory = new_rows
    ) -> tuple[Pooled, MappedIds]:
        mapped = native_ids(plan.mapped)
        assert mapped.host is not None, "plans have features"
        if plan.is_weighted_anew(inputs):
            weights = HostIds(layout.features, inputs).weights
            mapped.step.set_weights([0 if w is None else w.data_ptr() for w in weights])
        results = _Results(layout, mapped.host, memory)
        mapped.step.pool(results.addresses)
        return (results.flat, results.sequences), changed(mapped, {"host": None})

    def sum_gradients(
        self,
        layout: FeatureLayout,
        mapped: MappedIds,
        flat: Tensor | None,
        sequences: Sequence[Tensor | None],
        groups: Sequence[Group],
    ) -> Sums:
        local = native_ids(mapped)
        uniques = local.num_uniques()
        grads = [group.empty(uniques) for group in groups]
        if flat is not None:
            flat = dense_rows(flat)
        # the tensors of these gradients must live until the native call has read them
        of_sequences = [None if grad is None else dense_rows(grad) for grad in sequences]
        rows = _gradient_rows(layout, flat, of_sequences)
        finite = local.step.sum_gradients(rows, local.addresses(groups, grads))
        return Sums(local, groups, grads, finite)

    def join(self, parts: Sequence[Sums]) -> Sums:
        mapped, arrays = _merged_sums(parts)
        groups = parts[0].groups
        grads = []
        for group in groups:
            sums = [torch.from_numpy(arrays[number]).view(-1, group.dim) for number in group.tables]
            num_uniques = sum(map(len, sums))
            num_zeros = group.num_rows(num_uniques) - num_uniques
            if num_zeros:
                sums.append(torch.zeros(num_zeros, group.dim, dtype=torch.float32, device="cpu"))
            if len(sums) > 1:
                sums = [torch.cat(sums)]
            grads.append(sums[0])
        # sums of finite sums may overflow: they must be checked again
        return Sums(mapped, groups, grads, finite=False)

    def update(self, parts: Sequence[Sums], rates: Sequence[Sequence[float]]) -> None:
        if len(parts) > 1 and _share_tables(parts):
            mapped, arrays = _merged_sums(parts)
            addresses = [array.__array_interface__["data"][0] for array in arrays]
            rate_of: dict[Table, float] = {}
            for part, group_rates in zip(parts, rates, strict=True):
                for group, rate in zip(part.groups, group_rates, strict=True):
                    rate_of.update((part.mapped.tables[number], rate) for number in group.tables)
            mapped.step.apply(addresses, [rate_of[table] for table in mapped.tables])
            return
        for part, group_rates in zip(parts, rates, strict=True):
            ids = native_ids(part.mapped)
            addresses = ids.addresses(part.groups, part.grads)
            ids.step.apply(addresses, _table_rates(part, group_rates))


@final
@dataclass(frozen=True)
class LocalLookup(NativeLookup):
    """Performs all verbs in the tables of this process; any two are equal."""

    def ask(self, wanted: WantedRows) -> LocalAsked:
        asked = LocalAsked([], bool(wanted.grain_ends))
        try:
            for layout, inputs in zip(wanted.layouts, wanted.inputs, strict=True):
                asked.maps.append(_map(layout, inputs, wanted))
        except Exception:
            asked.take_back()
            raise
        return asked

    def take(
        self, asked: Asked, grains: Sequence[Sequence[Sequence[Ids]] | None]
    ) -> list[list[Plan | None]]:
        assert isinstance(asked, LocalAsked), "this lookup was asked"
        plans: list[list[Plan | None]] = []
        for number, of_module in enumerate(asked.maps):
            inputs = [None if grain is None else grain[number] for grain in grains]
            if asked.is_divided:
                plans.append(_divided(of_module, inputs))
            else:
                plans.append([Plan(tuple(inputs[0] or ()), of_module.ids, of_module)])
        if not asked.is_divided:
            asked.forget()
        return plans

    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        memory: RowMemory = new_rows,
        *,
        training: bool,
        keep: bool,
    ) -> tuple[Pooled, MappedIds]:
        host, times, step = _begun(layout, inputs, time, training=training)
        results = _Results(layout, host, memory)
        places = (host.addresses, _address(times), results.addresses)
        try:
            with layout.mapping(times, training=training):
                step.lookup(*places, training=training, keeps=keep)
        except ValueError:
            host.check_offsets(layout.features)
            raise
        return (results.flat, results.sequences), LocalIds(layout.tables, step)

    def join_grains(
        self, asked: Asked, parts: Sequence[Sequence[Sums | None]]
    ) -> Callable[[], list[Sums | None]]:
        assert isinstance(asked, LocalAsked), "this lookup was asked"
        maps = asked.maps
        asked.forget()
        return lambda: [_joined(*of_module) for of_module in zip(maps, parts, strict=True)]


def _map(layout: FeatureLayout, inputs: Sequence[Ids], wanted: WantedRows) -> LocalMap:
    """Map the ids of a batch for one module, now or in the queue."""
    training = wanted.training
    host, times, step = _begun(
        layout, inputs, wanted.time, training=training, grain_ends=wanted.grain_ends
    )
    task = None
    places = (host.addresses, _address(times))
    try:
        with layout.mapping(times, training=training) as undo:
            if wanted.queue is None:
                step.map(*places, training=training)
            else:
                task = step.map_later(wanted.queue, *places, (host, times), training=training)
    except ValueError:
        host.check_offsets(layout.features)
        raise
    return LocalMap(layout, LocalIds(layout.tables, step, host), task, undo)


def _divided(of_batch: LocalMap, grains: Sequence[Sequence[Ids] | None]) -> list[Plan | None]:
    """Return the plans of the grains of a batch for one module."""
    plans: list[Plan | None] = []
    for inputs, step in zip(grains, of_batch.ids.step.divide(), strict=True):
        of_grain = None
        if inputs is not None:
            host = HostIds(of_batch.layout.features, inputs)
            of_grain = Plan(tuple(inputs), LocalIds(of_batch.layout.tables, step, host))
        plans.append(of_grain)
    return plans


def _joined(of_batch: LocalMap, parts: Sequence[Sums | None]) -> Sums | None:
    """Return the sums of the grains of a batch for one module."""
    if all(part is None for part in parts):
        return None
    num_tables = len(of_batch.layout.tables)
    every = [grain_sums(part, num_tables) for part in parts]
    return joined_sums(of_batch.layout, of_batch.ids.step, every)


GrainSums = tuple[list[int], list[int | None]]
"""Of each table, the distinct ids of a grain, and the address of their sums; None = it has none."""


def grain_sums(part: Sums | None, num_tables: int) -> GrainSums:
    """Return the sums of a grain, which must live on; `part`: None = it has none."""
    uniques = [] if part is None else part.mapped.num_uniques()
    if part is None or not any(uniques):  # also where somebody has set them to zero
        return [0] * num_tables, [None] * num_tables
    return uniques, native_ids(part.mapped).addresses(part.groups, part.grads)


def joined_sums(layout: FeatureLayout, step: Step | Answer, grains: Sequence[GrainSums]) -> Sums:
    """Return the sums of the grains of a batch, as `Lookup.join_grains`."""
    uniques = step.num_uniques()
    grads = [group.empty(uniques) for group in layout.groups]
    addresses = _sum_addresses(step, layout.groups, grads)
    finite = step.join(grains, addresses)
    ids = LocalIds(layout.tables, step.summed(addresses))
    return Sums(ids, layout.groups, grads, finite)


def _sum_addresses(
    step: Step | Answer, groups: Sequence[Group], grads: Sequence[Tensor]
) -> list[int | None]:
    places = [
        (grad.data_ptr(), group.dim, group.tables)
        for group, grad in zip(groups, grads, strict=True)
    ]
    return step.sum_addresses(places)


class _Results:
    """What a lookup writes: `flat` [n, output_dim], and the rows [m, dim] of each sequence.

    `addresses`: of each feature, the address of its first value and the floats between two rows.
    """

    def __init__(self, layout: FeatureLayout, host: HostIds, memory: RowMemory) -> None:
        width = layout.output_dim
        shapes = [(host.num_samples, width)]
        for number in layout.sequences:
            shapes.append((_num_rows(layout, host, number), layout.dims[number]))
        self.flat, *self.sequences = memory(shapes)
        self.addresses: list[tuple[int, int]] = []
        address = self.flat.data_ptr()
        sequences = iter(self.sequences)
        for dim, pooled, values in zip(layout.dims, layout.pooled, host.values, strict=True):
            if pooled:
                self.addresses.append((address, width))
                address += 4 * dim
            else:
                rows = next(sequences)
                rows[values.numel() :] = 0.0
                self.addresses.append((rows.data_ptr(), dim))


def _num_rows(layout: FeatureLayout, host: HostIds, number: int) -> int:
    """Return the rows of a sequence, those of its bucket included."""
    size = host.values[number].numel()
    if host.offsets[number] is None:
        return size
    feature = layout.features[number]
    rows_of = f"table {feature.table!r}: ids of feature {feature.name!r}"
    return layout.buckets.size_for(size, rows_of)


def _begun(
    layout: FeatureLayout,
    inputs: Sequence[Ids],
    time: Any,
    *,
    training: bool,
    grain_ends: Sequence[int] = (),
) -> tuple[HostIds, np.ndarray | None, Step]:
    """Return the ids and times as native code reads them, and a step that has mapped none."""
    host = HostIds(layout.features, inputs)
    times = None
    if training:
        if layout.of_samples is not None:
            time = layout.of_samples(time, host.num_samples)
        times = layout.times(time, host.num_samples)
    natives = [table.native for table in layout.tables]
    step = Step(natives, layout.columns, grain_ends)
    if training:
        mark(step, time, host)
    return host, times, step


def mark(step: Step, time: Any, host: HostIds) -> None:
    """Let policies of tables pass over the samples that times say are not counted."""
    if isinstance(time, CountedTimes):
        host.counted = np.ascontiguousarray(time.counted, np.bool_)
        step.mark(host.counted.ctypes.data)


def _address(times: np.ndarray | None) -> int:
    return 0 if times is None else times.ctypes.data


def native_ids(mapped: MappedIds) -> NativeIds:
    """Return ids of a native step, as which every `NativeLookup` maps them."""
    # an isinstance of an abstract class takes four times as long
    if not isinstance(getattr(mapped, "step", None), Step):
        raise ConfigError(
            f"LocalLookup: expected ids that it mapped itself, got {type(mapped).__name__}. Set "
            "module.lookup before ids are looked up, and not between a lookup and its update."
        )
    return cast(NativeIds, mapped)


def _gradient_rows(
    layout: FeatureLayout, flat: Tensor | None, sequences: Sequence[Tensor | None]
) -> list[tuple[int, int]]:
    """Return the address and the stride of each feature's gradient; (0, 0) if it has none."""
    address = 0
    stride = 0
    if flat is not None:
        address = flat.data_ptr()
        stride = flat.stride(0)
    frozen = [table.frozen for table in layout.tables]
    rest = iter(sequences)
    rows = []
    for number, dim, pooled in zip(layout.numbers, layout.dims, layout.pooled, strict=True):
        row = (0, 0)
        if not pooled:
            grad = next(rest)
            if grad is not None:
                row = (grad.data_ptr(), grad.stride(0))
        elif flat is not None:
            row = (address, stride)
            address += 4 * dim
        rows.append((0, 0) if frozen[number] else row)
    return rows


def _share_tables(parts: Sequence[Sums]) -> bool:
    tables = [table for part in parts for table in _updated_tables(part)]
    return len(set(tables)) < len(tables)


def _updated_tables(part: Sums) -> list[Table]:
    """Return the tables that have sums, in the order of their numbers."""
    numbers = sorted(number for group in part.groups for number in group.tables)
    return [part.mapped.tables[number] for number in numbers]


def _merged_sums(parts: Sequence[Sums]) -> tuple[LocalIds, list[Any]]:
    """Return the ids of all parts, each table once, and the sums of each table as an array."""
    every_ids = [native_ids(part.mapped) for part in parts]
    dense = [[dense_rows(grad) for grad in part.grads] for part in parts]  # as a caller left them
    addresses = [
        ids.addresses(part.groups, grads)
        for part, grads, ids in zip(parts, dense, every_ids, strict=True)
    ]
    step, arrays = Step.merge([ids.step for ids in every_ids], addresses)
    # in the order of merge: as the tables come first
    tables = dict.fromkeys(table for part in parts for table in _updated_tables(part))
    return LocalIds(list(tables), step), arrays


def _table_rates(part: Sums, group_rates: Sequence[float]) -> list[float]:
    """Return the rate of each table; 0 for a table in no group."""
    rates = [0.0] * len(part.mapped.tables)
    for group, rate in zip(part.groups, group_rates, strict=True):
        for number in group.tables:
            rates[number] = rate
    return rates
