# SPDX-License-Identifier: Apache-2.0
"""HashOptimizer, and how the factories of `optimizers` make it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.optimizers.rules import NamedRule, rate_of
from hotbed.embedding.rule import Rule
from hotbed.errors import ConfigError
from hotbed.parallel import at

Arguments = ParamSpec("Arguments")


class HashOptimizer:
    """Updates the rows of sparse tables by the rule of one algorithm: step 2.

    It serves all tables. Where there are several, each table names its own, in `optimizer_list` of
    `create_table`.

    Attributes:
        name: of the optimizer.
        rule: how a step changes a row.
        learning_rate: of the next updates, 0 to 10; a schedule may set it.
        by_address: whether it is for dynamic expansion.
    """

    def __init__(self, name: str, rule: Rule, *, by_address: bool) -> None:
        owner = framework.current()
        owner.check_not_started(f"optimizer {name!r}")
        if not isinstance(name, str) or not 1 <= len(name) <= 200:
            raise ConfigError(
                f"optimizer: name is a text of 1 to 200 characters, got {name!r}. Shorten it."
            )
        if by_address is not owner.options.use_dynamic_expansion:
            raise ConfigError(
                f"optimizer {name!r}: the dynamic expansion mode is not compatible with the "
                "optimizer, please config dynamic expansion mode and optimizer correctly, got "
                f"use_dynamic_expansion={owner.options.use_dynamic_expansion}. With dynamic "
                "expansion use the factories by address, without it the others."
            )
        self.name = name
        self.rule = rule
        self.learning_rate = rule.lr
        self.by_address = by_address
        self._owner = owner
        owner.optimizers.append(self)

    def __repr__(self) -> str:
        return f"{self.name}({self.rule})"

    @property
    def learning_rate(self) -> float:
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self._learning_rate = rate_of(self.name, learning_rate)

    @at("apply_gradients")
    def apply_gradients(self, gradients: Sequence[Any]) -> None:
        """Update rows with their gradients, and forget the lookups that these belong to.

        Gradients of several lookups of a row are summed. Rows with address -1 take no update.

        Args:
            gradients: pairs of a gradient and addresses, or a pair of a list of gradients and a
                list of addresses. The addresses are the tensors that `get_collection` returned.
                A gradient of None leaves its table alone.

        Raises:
            NonFiniteGradient: a gradient is not finite; nothing was updated.
            ConfigError: addresses are not those of a lookup that waits, or another optimizer
                updates the table.
        """
        pipeline = self._owner.started(f"{self.name}.apply_gradients")
        pipeline.apply_gradients(self, _pairs(self.name, gradients))

    @at("apply_gradients")
    def step(self) -> None:
        """Update rows with the gradients that `loss.backward()` left in their collection."""
        self._owner.started(f"{self.name}.step").step_rows(self)

    def zero_grad(self) -> None:
        """Forget the lookups that wait for an update."""
        self._owner.started(f"{self.name}.zero_grad").drop(self)


def factory(
    describe: Callable[Arguments, NamedRule], *, by_address: bool
) -> Callable[Arguments, HashOptimizer]:
    """Return a factory of optimizers with the arguments of `describe`.

    Args:
        describe: returns the name and the rule.
        by_address: whether they are for dynamic expansion.
    """

    @functools.wraps(describe)
    def create(*args: Arguments.args, **keywords: Arguments.kwargs) -> HashOptimizer:
        name, rule = describe(*args, **keywords)
        return HashOptimizer(name, rule, by_address=by_address)

    return create


def _pairs(name: str, gradients: Sequence[Any]) -> list[tuple[Tensor | None, Tensor]]:
    """Return gradients with their addresses, of both forms that the chapter and its code use."""
    if not isinstance(gradients, Iterable):
        raise ConfigError(
            f"{name}.apply_gradients: pairs of a gradient and addresses are needed, got "
            f"{gradients!r}. Give list(zip(grads, addresses))."
        )
    every = list(gradients)
    if len(every) == 2 and not _is_pair(every[0]):
        grads, addresses = every
        if isinstance(grads, Tensor):
            grads = [grads]
            addresses = [addresses]
        if len(grads) != len(addresses):
            raise ConfigError(
                f"{name}.apply_gradients: each gradient has its addresses, got {len(grads)} "
                f"gradients and {len(addresses)} addresses. Give as many."
            )
        every = list(zip(grads, addresses, strict=True))
    for pair in every:
        if not _is_pair(pair):
            raise ConfigError(
                f"{name}.apply_gradients: pairs of a gradient and addresses are needed, got "
                f"{type(pair).__name__}. Give list(zip(grads, addresses))."
            )
    return [(grad, address) for grad, address in every]


def _is_pair(value: Any) -> bool:
    """Return whether a value is a gradient or None, with addresses."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    grad, address = value
    is_gradient = grad is None or isinstance(grad, Tensor)
    return is_gradient and isinstance(address, Tensor) and address.dtype == torch.int64
