# SPDX-License-Identifier: Apache-2.0
"""Log what a training leaves as it is although it could be learned: parameters without optimizer.

The rule: all that requires a gradient is in the optimizer of RecModel. Without an optimizer the
network updates itself, so that something of it changes. Each case is logged once, by name.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hotbed.embedding.modules import TableRows, table_modules

log = logging.getLogger("hotbed")
SHOWN = 5
"""Names in one message."""
PATIENCE = 100
"""Steps after which a network that updates itself has changed, or a line is logged."""


class LeftOut:
    """Logs the dense parameters that require a gradient and are in no optimizer.

    Args:
        network: whose parameters are learned.
        stepped: the parameters of the optimizer.
    """

    def __init__(self, network: nn.Module, stepped: list[nn.Parameter]) -> None:
        self._network = network
        self._stepped = stepped
        self._logged: set[str] = set()

    def look(self) -> None:
        """Log those that were not logged yet; parameters may be unfrozen between two trainings."""
        names = []
        stepped = {id(parameter) for parameter in self._stepped}
        for name, parameter in _trained(self._network):
            if id(parameter) not in stepped and name not in self._logged:
                names.append(name)
        if not names:
            return
        self._logged.update(names)
        log.warning(
            "optimizer: it does not hold the parameters %s, which stay as they are; make it over "
            "hb.dense_parameters(network) when all of them require a gradient, or freeze them with "
            "requires_grad_(False)",
            _listed(names),
        )


class Unchanged:
    """Logs that a network which has no optimizer does not update itself.

    Args:
        network: may run backward and update itself.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._before: dict[str, Any] | None = None
        self._steps = 0
        self._is_settled = False

    def begin(self) -> None:
        """Remember the network as it is before its first step."""
        if self._before is None:
            self._before = _marks(self._network)
            self._is_settled = not self._before

    def count(self) -> None:
        """Count a step, and look after `PATIENCE` of them."""
        self._steps += 1
        if self._steps == PATIENCE:
            self.look()

    def look(self) -> None:
        """Log once if no parameter and no table has changed since the first step."""
        if self._is_settled or not self._steps:
            return
        before = self._before
        self._is_settled = True
        if _marks(self._network) != before:
            return
        log.warning(
            "network: %s did not change in %d steps, because RecModel has no optimizer and the "
            "network does not update itself; give RecModel an optimizer such as 'adam'",
            _listed(list(before or ())),
            self._steps,
        )


def _trained(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the dense parameters that require a gradient, by name."""
    trained = []
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, TableRows):
            trained.append((name, parameter))
    return trained


def _marks(network: nn.Module) -> dict[str, Any]:
    """Return a mark of each parameter and table that can learn; an update changes it."""
    marks: dict[str, Any] = {}
    for module in table_modules(network):
        for table in module.tables:
            if not table.frozen:
                marks[f"table {table.name!r}"] = table.step
    for name, parameter in _trained(network):
        marks[name] = _mark(parameter.detach())
    return marks


def _mark(values: torch.Tensor) -> Any:
    if is_lazy(values) or values.is_meta:
        return None
    version = 0 if values.is_inference() else values._version
    # an update by `.data` counts no version
    total = values.sum(dtype=torch.float64).item() if values.is_floating_point() else 0.0
    return values.data_ptr(), version, total


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
