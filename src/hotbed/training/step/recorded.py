# SPDX-License-Identifier: Apache-2.0
"""RecordedLookups: the ids of a network that computes them, for a step that maps them before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, CountedTimes, Ids, times_of
from hotbed.embedding.lookups import Plan, Pooled
from hotbed.embedding.lookups.host_ids import int64
from hotbed.embedding.modules import Embedding
from hotbed.embedding.modules.flow import Flow, FlowModule, with_flow
from hotbed.errors import ConfigError

from .example import CPU, Example
from .turns import LookupsInTurn, Turns, bags_of_samples


class RecordedLookups(LookupsInTurn):
    """The lookups of a network over `hb.Embedding`: its forward pass says their ids.

    Each grain of a batch runs once more, without gradients and with zeros for rows, and its lookups
    are recorded. From the second batch on it ends at the last lookup. Buffers and random numbers
    are then as they were. A network whose ids depend on rows is found out: each lookup compares
    its ids with those that were recorded.

    Args:
        network: whose table modules are `hb.Embedding`.
        call: calls it with an example.
    """

    def __init__(self, network: nn.Module, call: Callable[[Example], Any]) -> None:
        modules = {
            path or "network": module
            for path, module in network.named_modules()
            if isinstance(module, Embedding)
        }
        super().__init__(type(network).__name__, modules)
        self._buffers = [buffer for buffer in network.buffers() if buffer.numel()]
        self._call = call
        self._path_of: dict[FlowModule, str] = {module: path for path, module in modules.items()}

    def obstacle(self) -> str:
        return "the ids of its lookups are those of a forward pass"

    def of(self, example: Example) -> Batch:
        """Return the ids of each lookup, as the forward pass of each grain computes them.

        Raises:
            ConfigError: the lookups of grains or batches differ, or have times or weights.
        """
        batch = example.batch
        assert batch is not None, "the loop divides batches"
        parts: dict[str, list[Ids]] = {name: [] for name in self._paths}
        with self._undisturbed():
            for grain in example.grains:
                if grain is None:
                    continue
                recorded = self._record(grain)
                if not self._paths:
                    self._take_paths(path for path, _ in recorded)
                    parts = {name: [] for name in self._paths}
                self._check_same(recorded)
                for of_grains, (_, ids) in zip(parts.values(), recorded, strict=True):
                    of_grains.append(bags_of_samples(ids, grain.num_samples, None))
        self._follow_mode()
        times = times_of(batch)
        if isinstance(times, CountedTimes):
            times = times.time
        return self._looked_up(parts, batch, times)

    @contextmanager
    def in_turn(self, grain: Example) -> Iterator[None]:
        """Let the lookups of a grain's forward pass take the rows that were mapped for them."""
        assert grain.plans is not None, "its ids are mapped"
        turns = self.rows_of(grain.plans)
        training = [module for module in self._by_path.values() if module.training]
        with with_flow(_InTurn(turns, self._path_of), training):
            yield
        turns.check_taken(may_skip=False)

    def _record(self, grain: Example) -> list[tuple[str, Ids]]:
        """Return the lookups of a forward pass: their paths and ids."""
        recording = _LookupRecorder(self._path_of, grain, len(self._paths))
        with with_flow(recording, self._by_path.values()), suppress(_AllRecorded):
            self._call(grain)
        return recording.lookups

    def _check_same(self, recorded: Sequence[tuple[str, Ids]]) -> None:
        paths = [path for path, _ in recorded]
        if paths != list(self._paths.values()):
            raise ConfigError(
                f"grains: {self._network} looks up {paths} for one grain, and "
                f"{list(self._paths.values())} for another. Look up the same for all samples, or "
                "leave grains out and start one process."
            )

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Run without gradients; buffers and random numbers are as before at the end."""
        before = [buffer.clone() for buffer in self._buffers]
        device = next(iter(self._by_path.values())).device
        devices = [] if device == CPU else [device]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
                yield
        finally:
            if before:
                torch._foreach_copy_(self._buffers, before)


class _AllRecorded(BaseException):
    """Ends a forward pass at its last lookup; code that catches errors lets it through."""


class _LookupRecorder(Flow):
    """Records lookups, which return zeros.

    Args:
        path_of: the path of each module.
        grain: which the network is called with.
        most: of lookups, after which the forward pass ends; 0 = it runs to its end.
    """

    def __init__(self, path_of: Mapping[FlowModule, str], grain: Example, most: int) -> None:
        self.lookups: list[tuple[str, Ids]] = []
        self._path_of = path_of
        self._grain = grain
        self._most = most

    def pool(
        self, module: FlowModule, inputs: Sequence[Ids], time: Any, plan: Plan | None
    ) -> Pooled:
        path = self._path_of[module]
        (ids,) = inputs
        if (time is not None and time is not self._grain.time) or ids.weights is not None:
            raise ConfigError(
                f"grains: a lookup of {path!r} has the times of its batch and no weights, got "
                "others. Use a hb.EmbeddingCollection, or leave grains out."
            )
        offsets = None if ids.offsets is None else int64(ids.offsets, path)
        values = int64(ids.values, path)
        self.lookups.append((path, Ids(values.clone(), offsets)))
        if len(self.lookups) == self._most:
            raise _AllRecorded
        return _pooled(torch.zeros(len(values), module.layout.dims[0], device=module.device))


class _InTurn(Flow):
    """Lets each lookup take the rows that were mapped for it."""

    def __init__(self, turns: Turns[Tensor], path_of: Mapping[FlowModule, str]) -> None:
        self._turns = turns
        self._path_of = path_of

    def pool(
        self, module: FlowModule, inputs: Sequence[Ids], time: Any, plan: Plan | None
    ) -> Pooled:
        path = self._path_of[module]
        return _pooled(self._turns.take(path, Ids(int64(inputs[0].values, path))))


def _pooled(rows: Tensor) -> Pooled:
    """Return the results of a module without pooled features."""
    return rows.new_empty(0, 0), [rows]
