# SPDX-License-Identifier: Apache-2.0
"""What every store of rows gives: versions of models that never change, and what differs between
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from hotbed.data.schema import Schema
from hotbed.errors import FormatError

_FIELDS = ("name", "version", "digest", "schema", "graph", "configs", "published", "learned")


@dataclass(frozen=True, eq=False)
class ModelVersion(ABC):
    """One version of a model; it never changes.

    `graph`: what the graph is fed with, as `hotbed.persist.export.Graph` describes it. `configs`:
    by table, the keywords of its constructor; what an id without a row reads as follows from them.
    `published`: unix seconds at which it was published; `learned`: unix seconds of the newest event
    that it learned; None where that is not known.
    """

    name: str
    version: int
    digest: str
    schema: Schema = field(repr=False)
    graph: Mapping[str, Any] = field(repr=False)
    configs: Mapping[str, Mapping[str, Any]] = field(repr=False)
    published: float | None
    learned: float | None

    @abstractmethod
    def graph_bytes(self) -> bytes:
        """The ONNX graph."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Parameters that the graph knows by name, with this version's values."""

    @abstractmethod
    def find(
        self, wanted: Mapping[str, NDArray[np.int64]], seconds: float | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """Rows by table: ids [n] -> float32 [n, dim]; an id without a row reads as in training.

        Raises ConfigError for an unknown table, StoreError where rows do not come within `seconds`
        (None: the store's own patience).
        """


class Store(ABC):
    """Where versions and their rows come from. Safe to call from several threads."""

    @abstractmethod
    def model(self, name: str) -> ModelVersion:
        """The newest version. Raises ConfigError where the model is not there, StoreError where the
        store cannot be asked.
        """

    @abstractmethod
    def changes(self, name: str, since: str, to: str) -> Mapping[str, NDArray[np.int64]] | None:
        """Ids by table whose row differs between two versions, given by digest, and maybe some
        more; None: it cannot be told.
        """

    @abstractmethod
    def hot(self, name: str, table: str, n: int) -> NDArray[np.int64]:
        """Up to `n` ids of the newest version, the most frequent first by what training counted;
        none where it did not count.
        """


def described(version: ModelVersion) -> dict[str, Any]:
    """What a version is but for its graph, weights and rows, as JSON values: what stores keep and
    hand on.
    """
    plain = {name: getattr(version, name) for name in _FIELDS if name != "schema"}
    return {**plain, "schema": version.schema.to_json()}


def undescribed(spec: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The fields of a ModelVersion of which `described` told. Raises FormatError naming `place` for
    anything else.
    """
    try:
        return {
            **{name: spec[name] for name in _FIELDS},
            "schema": Schema.from_json(spec["schema"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{place}: no description of a version — {error!r} — load the model again"
        ) from error


def read_weights(data: bytes | memoryview, place: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors of a safetensors file. Raises FormatError naming `place` for other bytes."""
    try:
        yield from load(bytes(data)).items()
    except (SafetensorError, KeyError, ValueError) as error:
        raise FormatError(f"{place}: no weights — {error} — load the model again") from error
