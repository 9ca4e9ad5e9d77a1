# SPDX-License-Identifier: Apache-2.0
"""`eval_indexes`: the positions of loss, prediction and label in what evaluation returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hotbed.errors import ConfigError
from hotbed.training.step.scorer import Parted


class Indexed(Parted):
    """An `eval_network` with `eval_indexes`."""

    def __init__(self, network: Callable[..., Any], indexes: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        self.indexes = tuple(indexes)

    def forward(self, *items: Any) -> Any:
        """Return what the network returns for the items of a batch."""
        return self.network(*items)

    def parts(self, outputs: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Return loss, prediction and label among the outputs."""
        for index in self.indexes:
            if not -len(outputs) <= index < len(outputs):
                raise ConfigError(
                    f"eval_indexes: no output {index}, got {len(outputs)} outputs of "
                    "eval_network. Give the positions of loss, prediction and label among them."
                )
        loss, prediction, label = (outputs[index] for index in self.indexes)
        return loss, prediction, label


def evaluated_by(network: Any, indexes: Any) -> Any:
    """Return the `eval_network` of the engine for an `eval_network` and its `eval_indexes`.

    Raises:
        ConfigError: the indexes are not three positions, or there is no network.
    """
    if indexes is None:
        return network
    if network is None:
        raise ConfigError(
            f"eval_indexes: positions in the outputs of eval_network, got {indexes!r} without "
            "eval_network. Give eval_network as well, or leave eval_indexes out."
        )
    is_three = isinstance(indexes, Sequence) and len(indexes) == 3
    if not is_three or not all(type(index) is int for index in indexes):  # True is an int, too
        raise ConfigError(
            f"eval_indexes: three positions needed, got {indexes!r:.60}. "
            "Give those of loss, prediction and label in eval_network's outputs."
        )
    is_class = isinstance(network, type)
    return Indexed(network, indexes) if callable(network) and not is_class else network
