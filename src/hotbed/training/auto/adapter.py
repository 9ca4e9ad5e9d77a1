# SPDX-License-Identifier: Apache-2.0
"""What the loop asks of a converted model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotbed.data.schema import Schema
from hotbed.persist.publish.plain import PlainModel
from hotbed.training.step.network import Arguments, NetworkLookups

from .foreseen.called import CalledLookups
from .foreseen.moved import MovedLookups
from .network import Converted, arguments_of
from .served import plain_model


@dataclass(frozen=True)
class ConvertedAdapter:
    """A `NetworkAdapter`. `state`: of the converted model."""

    state: Converted

    @property
    def was_called(self) -> bool:
        return self.state.signature is not None

    def arguments_of(self, data: Any) -> Arguments:
        return arguments_of(self.state.model, data)

    def times_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.state.times_of(args, kwargs)

    def lookups(self, *, by_grains: bool) -> NetworkLookups:
        return MovedLookups(self.state) if by_grains else CalledLookups(self.state)

    def plain_model(self, schema: Schema | None) -> PlainModel:
        return plain_model(self.state, schema)
