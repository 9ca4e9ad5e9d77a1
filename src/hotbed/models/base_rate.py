# SPDX-License-Identifier: Apache-2.0
"""The share of positives that a model predicts before it has learned anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError
from hotbed.models.esmm import ESMM
from hotbed.models.layers import LinearTerm, LogitHead


def set_base_rate(network: nn.Module, rate: float | Mapping[str, float]) -> None:
    """Set the bias of the output so that first predictions lie around the share of positives.

    Without it they lie around one half. Where positives are rare and data few, the first pass
    learns little more than their share.

    Args:
        network: a model of `hb.models`, or one with a `LogitHead` or `LinearTerm` named `head` or
            `linear`; `heads` of labels by name.
        rate: the share, between 0 and 1; of several labels, by label.

    Raises:
        ConfigError: a rate is not between 0 and 1, or the network has no such output.

    Example: `hb.models.set_base_rate(network, 0.02)`. Source: Lin et al., "Focal Loss for Dense
    Object Detection", ICCV 2017, section 3.3.
    """
    rates: Mapping[Any, float] = rate if isinstance(rate, Mapping) else {None: rate}
    for share in rates.values():
        if not 0 < share < 1:
            raise ConfigError(
                f"base_rate: a share of positives is above 0 and below 1, got {share!r}. Give the "
                "mean of the labels."
            )
    if isinstance(network, ESMM) and isinstance(rate, Mapping):
        rates = network.head_rates(rate)
    for label, share in rates.items():
        with torch.no_grad():
            _bias_of(network, label).fill_(math.log(share / (1 - share)))


def _bias_of(network: nn.Module, label: str | None) -> Tensor:
    """Return the bias of the output of a label; None: of the only one."""
    if label is None:
        head = getattr(network, "head", None) or getattr(network, "linear", None)
    else:
        head = dict(getattr(network, "heads", {})).get(label)
    if isinstance(head, LogitHead):
        return head.linear.bias
    if isinstance(head, LinearTerm):
        return head.bias
    output = "an output" if label is None else f"an output {label!r}"
    raise ConfigError(
        f"base_rate: the network needs {output} whose bias is known, got "
        f"{type(network).__name__}. Leave it out, or give a number for one label and a mapping of "
        "labels for several."
    )
