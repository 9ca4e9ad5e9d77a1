# SPDX-License-Identifier: Apache-2.0
"""ShardedLoop: the backward pass of a plain PyTorch loop, by grains that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.data.batch import Batch
from hotbed.embedding.modules import TableRows, table_modules
from hotbed.errors import ConfigError
from hotbed.optim.combined import Parts
from hotbed.optim.sparse import SparseOptimizer
from hotbed.parallel import Shard, at
from hotbed.parallel.world import check_not_wrapped
from hotbed.training.arguments import check_names, tables_of
from hotbed.training.step.compared import compared
from hotbed.training.step.division import Division, connect_ranks
from hotbed.training.step.example import CPU, prepare
from hotbed.training.step.grains import Grains
from hotbed.training.step.learner import StepLearner
from hotbed.training.step.passes import parameters_of

LossOf = Callable[[Batch], Tensor]


@at("shard")
def shard(
    network: nn.Module,
    dense: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    sparse: SparseOptimizer | None = None,
    *,
    grains: int = 8,
    whole_tables: Sequence[str] = (),
) -> ShardedLoop:
    """Let a plain PyTorch loop compute its batches by grains, which several ranks share.

    The rows of each table are spread over the ranks. The loop keeps its optimizers and schedulers.
    `loop.backward(batch, loss_of)` takes the place of `loss.backward()`: it leaves the gradients of
    the whole batch. All ranks get the same batches, and each computes its grains. The bits are
    those of one process with the same grains; see docs/ranks.md.

    Args:
        network: to train, on the CPU; it looks up the ids of a `Batch` as they are, once each.
        dense: the optimizer of its dense parameters; None if there are none. For a model
            of `hb.auto`, the optimizer that `hb.auto` returned.
        sparse: the optimizer of its tables; None if there are none, or `dense` has them.
        grains: runs of samples that each batch is computed in, a power of two; see docs/grains.md.
        whole_tables: as of `RecModel`.

    Raises:
        ConfigError: the network cannot be computed by grains, an optimizer is missing or of another
            kind, or a table holds rows that another rank owns.

    Example:
        >>> loop = hb.shard(network, dense, sparse, grains=8)
        >>> for batch in train:
        ...     loss = loop.backward(batch, lambda part: loss_fn(network(part), part.labels["y"]))
        ...     loop.clip_gradients(10.0)
        ...     for optimizer in (dense, sparse):
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    connect_ranks(grains)
    checks.power_of_two("grains", grains, "Grains are joined by halves: give such as 8.")
    if grains == 1:
        raise ConfigError("shard.grains: a batch is divided in 2 or more, got 1. Give such as 8.")
    check_not_wrapped(network, grains)
    parts = None if sparse is not None else Parts.of(dense)
    if parts is not None:
        dense = parts.dense
        sparse = parts.sparse
    _check_optimizers(network, dense, sparse)
    assert dense is None or isinstance(dense, torch.optim.Optimizer), "they were checked"
    check_names("whole_tables", whole_tables, tables_of(network))
    division = Division.of_job(grains, whole_tables)
    return ShardedLoop(StepLearner(network, None, dense, sparse, way=division))


class ShardedLoop:
    """The backward passes of a plain PyTorch loop; `hb.shard` returns it.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, learner: StepLearner) -> None:
        self._learner = learner
        self._has_begun = False

    @property
    def shard(self) -> Shard:
        """The rows that this rank owns: give it to `hb.checkpoints.State`, to save and restore."""
        return self._learner.shard

    @at("backward")
    def backward(self, batch: Batch, loss_of: LossOf) -> Tensor:
        """Compute the loss of a batch and its gradients, and return the loss, float32 [].

        The gradients are in `.grad` of all parameters, added to those that wait there.

        Args:
            batch: of a Dataset, arrays or tensors; the same on all ranks.
            loss_of: calls the network, in train mode, with a part of the batch, whose columns are
                tensors, and returns the mean loss of its samples. It is called once a grain.

        Raises:
            ConfigError: `loss_of` returns no loss, or ranks have other batches or weights.
        """
        learner = self._learner
        if not isinstance(batch, Batch):
            raise ConfigError(
                f"backward: a Batch is needed, got {type(batch).__name__}. Give the batches of a "
                "hb.Dataset, or hb.Batch objects."
            )
        if not self._has_begun:
            learner.begin()
            learner.shard.check_equal({"loss_of": compared(loss_of)})
            self._has_begun = True
        learner.network_pass.call = lambda part: _checked(loss_of(part))
        grains = learner.passes
        assert isinstance(grains, Grains), "shard asks for two or more"
        earlier = grains.set_aside()
        example = prepare(batch, CPU, labelled=False).divided(learner.grains)
        loss = learner.forward(example)
        learner.backward(loss)
        grains.add(earlier)
        return loss

    def joined(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of all ranks as one for `backward`, where each rank reads its own.

        Its samples are those of the ranks, in their order. The last batch is that of the rank that
        has fewest.

        Args:
            batches: of this rank, of arrays or tensors; on all ranks with the same columns.

        Raises:
            ConfigError: on each rank, an item is not a Batch, or two ranks have other columns.

        Example:
            >>> for batch in loop.joined(own_batches):
            ...     loss = loop.backward(batch, loss_of)
        """
        items = iter(batches)
        while True:
            with self.shard.together():
                item = next(items, None)
                sent = None if item is None else _on_the_way(item)
            every = self.shard.gathered(sent)
            whole = [of_rank for of_rank in every if of_rank is not None]
            if len(whole) < len(every):
                return
            _check_columns(whole)
            yield Batch.concat(whole)

    @at("clip_gradients")
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

        It is the norm of the whole batch. That of `torch.nn.utils.clip_grad_norm_` would be another
        one on each rank, which has the gradients of its own rows.
        """
        checks.above("clip_gradients.max_norm", max_norm, 0, "Give 10.0, for example.")
        return self._learner.clip_gradients(max_norm)


def _on_the_way(item: Any) -> Batch:
    """Return a batch of NumPy arrays, as ranks send it."""
    if not isinstance(item, Batch):
        raise ConfigError(
            f"joined: batches are hb.Batch objects, got {type(item).__name__}. Make one of the "
            "columns: hb.Batch(ids, dense, labels)."
        )
    return item.map_arrays(np.asarray).at(None)


def _check_columns(batches: Sequence[Batch]) -> None:
    """Raise ConfigError unless the batches of all ranks have the same columns."""
    columns = []
    for batch in batches:
        ids = [(name, of_name.weights is not None) for name, of_name in batch.ids.items()]
        dense = [(name, values.shape[1:]) for name, values in batch.dense.items()]
        others = [batch.weight is not None, batch.time is not None]
        columns.append((ids, dense, list(batch.labels), others))
    if any(of_rank != columns[0] for of_rank in columns):
        raise ConfigError(
            f"joined: the batches of all ranks have the same columns, got {columns} on ranks 0 to "
            f"{len(columns) - 1}. Give all ranks batches of one kind."
        )


def _checked(loss: Any) -> Tensor:
    if torch.is_tensor(loss) and loss.numel() == 1:
        return loss
    kind = f"a tensor {list(loss.shape)}" if torch.is_tensor(loss) else type(loss).__name__
    raise ConfigError(
        f"backward: loss_of must return the loss of a part of the batch, one number, got {kind}. "
        "Return the mean over its samples."
    )


def _check_optimizers(network: nn.Module, dense: Any, sparse: Any) -> None:
    modules = table_modules(network)
    is_torch = dense is None or isinstance(dense, torch.optim.Optimizer)
    if not is_torch or any(isinstance(rows, TableRows) for rows in parameters_of(dense)):
        raise ConfigError(
            "shard.dense: one torch optimizer over hb.dense_parameters(network) is needed, got "
            f"{type(dense).__name__}. Give parameters of several rates as parameter groups."
        )
    if sparse is not None and not isinstance(sparse, SparseOptimizer):
        raise ConfigError(
            f"shard.sparse: hb.SparseOptimizer(network) is needed, got {type(sparse).__name__}."
        )
    stepped = set(parameters_of(sparse))
    for module in modules:
        if module.learns and not stepped.issuperset(module.rows):
            names = [table.name for table in module.tables]
            raise ConfigError(
                f"shard.sparse: the tables {names} learn and need an optimizer, got another one. "
                "Give hb.SparseOptimizer(network)."
            )
