# SPDX-License-Identifier: Apache-2.0
"""What the loop and the callbacks know of the model that a run trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from hotbed.embedding.histories import HistoryStore
from hotbed.embedding.table import Table
from hotbed.persist.container.format import Reader
from hotbed.persist.publish.version import OnnxGraph
from hotbed.persist.state.checkpoint import State
from hotbed.training.step.learner import SelfUpdating, StepLearner


class TypedModel(Protocol):
    """The types of the raw columns that a model learned from; see `RecModel`."""

    schema: Any
    encoder: Any


class TrainedModel(TypedModel, Protocol):
    """A `RecModel`, as `Run.model` gives it."""

    network: nn.Module
    learner: StepLearner | SelfUpdating
    metrics: dict[str, Any]
    counters: dict[str, int]
    parent: str | None
    histories: HistoryStore | None

    @property
    def tables(self) -> Mapping[str, Table]: ...
    def evaluate(self, data: Iterable[Any], callbacks: Any = ()) -> dict[str, float]: ...
    def predict(self, data: Any) -> Any: ...
    def graph(self) -> OnnxGraph: ...
    def state(self) -> State: ...
    def restore(self, path: str | Path | Reader, allow: Sequence[str] = ()) -> Any: ...
