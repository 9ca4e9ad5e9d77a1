# SPDX-License-Identifier: Apache-2.0
"""Together: batches that ranks score together, so that they wait for each other once for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from hotbed.data.batch import BatchSlice, changed, joined
from hotbed.training.step.example import Example, from_array
from hotbed.training.step.planner import asked_together


def runs_of(examples: Iterable[Example], most: int) -> Iterator[list[Example]]:
    """Yield runs of examples whose samples can be joined, each as soon as it has `most` samples."""
    run: list[Example] = []
    kind = None
    for example in examples:
        before = kind
        kind = _kind_of(example)
        if run and kind != before:
            yield run
            run = []
        run.append(example)
        if not example.num_samples or sum(other.num_samples for other in run) >= most:
            yield run
            run = []
    if run:
        yield run


class Together:
    """The grains of some batches of one kind that have samples, one batch after the other.

    Args:
        examples: that are divided.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples
        self._runs: list[tuple[int, int, int]] = []  # number of the example, first and last sample
        for number, example in enumerate(examples):
            ends = (0, *_divided_at(example))
            runs = [run for run in pairwise(ends) if run[0] < run[1]]
            self._runs += [(number, *run) for run in runs or [(0, 0)]]

    def __len__(self) -> int:
        return len(self._runs)

    def grains(self, numbers: range) -> list[Example]:
        """Return the grains of these numbers."""
        if not numbers:
            return []
        return [grain for grain in self._part(numbers).grains if grain is not None]

    def asked(self, network: Any, numbers: range) -> list[Example]:
        """Return the grains of these numbers, with the rows that a network in eval mode looks up.

        Other processes ask at the same time.
        """
        return asked_together(network, self._part(numbers))

    def of_each(self, values: Sequence[Any]) -> list[list[Any]]:
        """Return values of all grains, one list for each example."""
        each: list[list[Any]] = [[] for _ in self._examples]
        for (number, _, _), value in zip(self._runs, values, strict=True):
            each[number].append(value)
        return each

    def _part(self, numbers: range) -> Example:
        """Return the samples of some grains as one example, which these grains divide."""
        runs = [self._runs[number] for number in numbers]
        ends = tuple(accumulate(last - first for _, first, last in runs))
        slices = []
        for number in dict.fromkeys(number for number, _, _ in runs):
            of_example = [run for run in runs if run[0] == number]
            batch = self._examples[number].batch
            assert batch is not None, "the loop divides batches"
            slices.append(BatchSlice(batch, slice(of_example[0][1], of_example[-1][2])))
        batch = joined(slices)
        if len(slices) > 1:
            batch = batch.map_arrays(from_array)
        batch = changed(batch, {"grain_ends": ends, "encoder": slices[0].batch.encoder})
        return changed(self._examples[runs[0][0]], {"num_samples": ends[-1]}).of(batch)


def _divided_at(example: Example) -> tuple[int, ...]:
    """Return the samples before which the grains of an example end."""
    ends = () if example.batch is None else example.batch.grain_ends
    return ends or (example.num_samples,)


def _kind_of(example: Example) -> Any:
    """Return what examples have in common whose samples can be joined."""
    batch = example.batch
    if batch is None:
        return None
    ids = {name: (ids.offsets is None, ids.weights is None) for name, ids in batch.ids.items()}
    arrays = {"weight": batch.weight, "time": batch.time, "counted": batch.counted}
    columns = {**{f"dense {name}": values for name, values in batch.dense.items()}, **arrays}
    columns |= {f"label {name}": values for name, values in batch.labels.items()}
    arrays_of_all = [*columns.values(), *(ids.weights for ids in batch.ids.values())]
    if not all(map(_can_be_joined, arrays_of_all)):
        return object()  # equal to no other kind
    kinds = {
        name: None if values is None else (values.dtype, tuple(values.shape[1:]))
        for name, values in columns.items()
    }
    return ids, kinds, list(batch.segments), example.structure


def _can_be_joined(values: Any) -> bool:
    """Return whether NumPy has the values of an array or tensor, and no gradient is lost."""
    if not torch.is_tensor(values):
        return True
    return values.dtype is not torch.bfloat16 and not values.requires_grad
