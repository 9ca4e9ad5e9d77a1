# SPDX-License-Identifier: Apache-2.0
"""Make the learner that the arguments of RecModel ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.optim.combined import Parts
from hotbed.optim.dense import dense_optimizer
from hotbed.optim.precision import AmpPrecision, Compile
from hotbed.optim.sparse import SparseOptimizer, dense_parameters
from hotbed.training.arguments import tables_of
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.division import Division
from hotbed.training.step.learner import SelfUpdating, StepLearner
from hotbed.training.step.passes import parameters_of


def make_learner(
    network: nn.Module,
    criterion: Criterion | None,
    optimizer: Any,
    division: Division,
    precision: AmpPrecision,
    amp_level: str,
    compiles: Compile | None,
) -> StepLearner | SelfUpdating:
    """Return the learner that arguments of `RecModel` ask for.

    Args:
        network: the network.
        criterion: the loss; None for a network that returns its loss.
        optimizer: as `RecModel` takes it; None for a network that updates itself.
        division: of the batch of a step.
        precision: what `amp_level` stands for.
        amp_level: as the user gave it, for messages.
        compiles: how the step is compiled; None if it is not.

    Raises:
        ConfigError: the arguments do not go together; the message says which.
    """
    if division.grains > 1:
        _check_runs_by_grains(division.grains, optimizer, compiles)
    if optimizer is None:
        if compiles is not None:
            raise ConfigError(
                "compile: without an optimizer the network updates itself, got "
                f"{compiles}. Give an optimizer, or compile the network yourself."
            )
        if precision.compute is not None:
            raise ConfigError(
                "amp_level: without an optimizer the network updates itself, got "
                f"{amp_level!r}. Give an optimizer, or 'O0'."
            )
        return SelfUpdating(network, criterion)
    dense = list(dense_parameters(network))
    precision.apply(network, dense)
    dense_part, sparse, combined = _optimizers_of(network, optimizer, dense)
    way = division if division.grains > 1 else compiles
    return StepLearner(
        network, criterion, dense_part, sparse, combined=combined, precision=precision, way=way
    )


def keep_average(learner: StepLearner | SelfUpdating, decay: float) -> None:
    """Let the network of a learner have averages of its dense parameters between steps.

    Raises:
        ConfigError: `decay` is not between 0 and 1, or there is nothing that can be averaged.
    """
    if isinstance(learner, SelfUpdating):
        raise ConfigError(
            f"average: without an optimizer the network updates itself, got {decay}. Give an "
            "optimizer, or leave it out."
        )
    learner.keep_average(decay)


def _optimizers_of(
    network: nn.Module, optimizer: Any, dense: list[nn.Parameter]
) -> tuple[Any, SparseOptimizer | None, Sequence[Any]]:
    """Return the optimizer of dense parameters, that of rows, and those that the user combined."""
    tables = tables_of(network)
    parts = Parts.of(optimizer)
    if parts is not None:
        _check_steps_all(parts.sparse, tables)
        dense_part = parts.dense
        sparse: SparseOptimizer | None = parts.sparse
    else:
        dense_part = dense_optimizer(optimizer, dense)
        sparse = SparseOptimizer(network) if tables else None
    dense_ids = {id(parameter) for parameter in dense}
    if any(id(parameter) not in dense_ids for parameter in parameters_of(dense_part)):
        raise ConfigError(
            "optimizer: it holds more than the network's dense parameters, such as rows of "
            "tables, got a torch optimizer. Make it over hb.dense_parameters(network)."
        )
    return dense_part, sparse, () if parts is None else parts.optimizers


def _check_runs_by_grains(grains: int, optimizer: Any, compiles: Compile | None) -> None:
    """Raise ConfigError if a step cannot run the network once a grain, and then update it."""
    if optimizer is None or compiles is not None:
        what = "a network that updates itself" if optimizer is None else "a compiled network"
        raise ConfigError(
            f"grains: a step by grains runs the network and its update itself, got {grains} "
            f"grains and {what}. Leave grains out, or give an optimizer and no compile."
        )


def _check_steps_all(sparse: SparseOptimizer, tables: Mapping[str, Table]) -> None:
    """Raise ConfigError if `sparse` does not step one of the tables that learn."""
    stepped = {id(table) for table in sparse.tables()}
    others = []
    for name, table in tables.items():
        if id(table) not in stepped and not table.frozen:
            others.append(name)
    if others:
        raise ConfigError(
            f"optimizer: the tables {others} learn and need an optimizer, got one of others. "
            "Give every optimizer that hb.auto returned, as a list."
        )
