# SPDX-License-Identifier: Apache-2.0
"""The signature of a model: names, types and shapes of the tensors in its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hotbed.data.batch import Batch
from hotbed.data.schema import Schema


@dataclass(frozen=True)
class Signature:
    """The tensor leaves of a model's arguments, in a fixed order.

    Attributes:
        names: of each leaf: the parameter, dict key or field that holds it.
    """

    names: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """Return the signature of a call `model(*args, **kwargs)`."""
        raise NotImplementedError

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of the arguments, in the order of `names`."""
        raise NotImplementedError

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with these leaves."""
        raise NotImplementedError

    def schema(self) -> Schema:
        """Return the schema of a request: integers are Id columns, floats Dense ones."""
        raise NotImplementedError


def bind(model: nn.Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `model` that hold the columns of `batch`, by name."""
    raise NotImplementedError
