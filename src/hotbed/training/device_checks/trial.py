# SPDX-License-Identifier: Apache-2.0
"""A small training with drawn data, which checks of a device compare with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from hotbed.connectors import Memory
from hotbed.data.batch import Batch, Ids
from hotbed.data.dataset import Dataset
from hotbed.data.schema import Dense, Id, Label, Schema
from hotbed.embedding.lookups import Plan, Pooled
from hotbed.embedding.modules import Flow, FlowModule, table_modules, with_flow
from hotbed.embedding.modules.autograd import TableFlow
from hotbed.embedding.rule import Sgd
from hotbed.embedding.tables import make_tables
from hotbed.models.din import DIN
from hotbed.optim.sparse import SparseOptimizer, dense_parameters
from hotbed.persist.state.digest import content_digest
from hotbed.training.model import RecModel

SEED = 0
SCHEMA = Schema(
    [
        Label("click"),
        Id("user"),
        Id("item"),
        Id("tags", pooling="mean"),
        Id("seen", table="item", pooling="none", max_length=4),
        Dense("price"),
    ]
)
HISTORIES = {"seen": "item"}


@dataclass(frozen=True)
class LookupRecord:
    """A lookup in a training step.

    Attributes:
        inputs: the ids of each feature.
        gradients: of its results by number, as the device computed them; the first result is that
            of the pooled features.
    """

    inputs: Sequence[Ids]
    gradients: dict[int, Tensor]


@dataclass(frozen=True)
class Trained:
    """What a training leaves, on the host.

    Attributes:
        losses: of each step.
        weights: of the dense part.
        digest: of the tables.
        lookups: of each step.
    """

    losses: list[float]
    weights: list[Tensor]
    digest: str
    lookups: list[LookupRecord]


class DeviceTrial:
    """A job of drawn clicks: two ids, a bag, a history and a number for each sample.

    Args:
        steps: of a training.
        samples: of a batch.
    """

    def __init__(self, steps: int, samples: int) -> None:
        self.steps = steps
        self._samples = samples
        draw = np.random.default_rng(SEED)
        num_rows = steps * samples
        lists = {}
        for name, most in {"tags": 3, "seen": 6}.items():
            lengths = draw.integers(1, most + 1, num_rows)
            offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
            values = draw.integers(0, 500, offsets[-1])
            lists[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        self._rows = pa.table(
            {
                "user": draw.integers(0, 2_000, num_rows),
                "item": draw.integers(0, 500, num_rows),
                **lists,
                "price": draw.normal(size=num_rows).astype(np.float32),
                "click": (draw.random(num_rows) < 0.3).astype(np.float32),
            }
        )

    def data(self) -> Dataset:
        return Dataset(Memory(self._rows), SCHEMA, batch_size=self._samples)

    def network(self) -> nn.Module:
        """Return the network as it is before training, on the CPU."""
        torch.manual_seed(SEED)
        tables = make_tables(SCHEMA, dim=8, seed=SEED)
        return DIN(SCHEMA, tables, histories=HISTORIES, attention_hidden=[8], hidden=[16])

    def model(self, device: torch.device) -> RecModel:
        return RecModel(self.network(), "bce", Sgd(lr=0.1), device=device)

    def train(self, device: torch.device, before_step: Callable[[], Any] = nullcontext) -> Trained:
        """Train a model on a device, and record the gradients of its lookups.

        `before_step`: called before each step, to keep the device busy.
        """
        model = self.model(device)
        recorder = _Recorder()
        losses = []
        with with_flow(recorder, table_modules(model.network)):
            for batch in self.data():
                before_step()
                losses.append(model.step(batch))
        return Trained(
            losses,
            [weight.detach().cpu() for weight in dense_parameters(model.network)],
            content_digest(model.tables),
            recorder.lookups,
        )

    def digest_of(self, lookups: Sequence[LookupRecord]) -> str:
        """Return the digest of tables whose rows learned recorded gradients on the CPU."""
        network = self.network()
        (module,) = table_modules(network)
        sparse = SparseOptimizer(network)
        for lookup in lookups:
            flat, sequences = module.pool(lookup.inputs)
            results = dict(enumerate([flat, *sequences]))
            learned = list(lookup.gradients)
            gradients = [lookup.gradients[number].cpu() for number in learned]
            torch.autograd.backward([results[number] for number in learned], gradients)
            sparse.step()
            sparse.zero_grad()
        return content_digest({table.name: table for table in module.tables})

    def scaled(self, device: torch.device, scale: float | None) -> tuple[list[Tensor], float]:
        """Return weights and rows after a plain loop on a device, and its scale at the end.

        Args:
            device: to compute on.
            scale: of the loss, at first; one of its steps overflows. None: there is no scaler, and
                that step is left out.
        """
        network = self.network().to(device)
        dense = torch.optim.SGD(dense_parameters(network), lr=0.1)
        optimizers = [dense, SparseOptimizer(network)]
        scaler = torch.amp.GradScaler(device.type, init_scale=scale or 1.0, enabled=bool(scale))
        for number, arrays in enumerate(self.data()):
            overflows = number == self.steps // 2
            if overflows and scale is None:
                continue
            loss = _loss(network, arrays, device)
            scaler.scale(loss * torch.inf if overflows else loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        rows = [torch.from_numpy(table.lookup(np.arange(500))) for table in _tables(network)]
        weights = [weight.detach().cpu() for weight in dense_parameters(network)]
        return [*weights, *rows], scaler.get_scale()


class _Recorder(Flow):
    """Records the ids of lookups, and the gradients of their results where they are computed."""

    def __init__(self) -> None:
        self.lookups: list[LookupRecord] = []
        self._flow = TableFlow()

    def pool(
        self, module: FlowModule, inputs: Sequence[Ids], time: Any, plan: Plan | None
    ) -> Pooled:
        flat, sequences = self._flow.pool(module, inputs, time, plan)
        lookup = LookupRecord(inputs, {})
        for number, result in enumerate([flat, *sequences]):
            if result.requires_grad:
                result.register_hook(_keeper(lookup.gradients, number))
        self.lookups.append(lookup)
        return flat, sequences


def _keeper(gradients: dict[int, Tensor], number: int) -> Callable[[Tensor], None]:
    """Return a hook that keeps a copy of a gradient."""

    def keep(gradient: Tensor) -> None:
        gradients[number] = gradient.detach().clone()

    return keep


def _loss(network: nn.Module, arrays: Batch, device: torch.device) -> Tensor:
    batch = arrays.map_arrays(torch.from_numpy)
    labels: Mapping[str, Tensor] = batch.labels
    logits = network(batch)
    return nn.functional.binary_cross_entropy_with_logits(logits, labels["click"].to(device))


def _tables(network: nn.Module) -> list[Any]:
    return [table for module in table_modules(network) for table in module.tables]
