# SPDX-License-Identifier: Apache-2.0
"""Define stores of rows: they return versions of models, which never change, and their changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError
from safetensors.numpy import load

from hotbed.data.schema import Schema
from hotbed.errors import FormatError, StoreError
from hotbed.frozen import IdArray, RowArray

Weight: TypeAlias = tuple[str, RowArray]
"""Name and values of a parameter of the graph, float32 of any shape."""
_FIELDS = ("name", "version", "digest", "schema", "graph", "configs", "published", "learned")
_LATER_FIELDS = {"mended": 0}
"""Fields that files of earlier releases lack, with what they mean there."""


@dataclass(frozen=True, eq=False)
class ModelVersion(ABC):
    """One version of a model; it never changes.

    Attributes:
        name: name of the model.
        version: number of the version.
        digest: digest of the state, which identifies the version.
        schema: the columns of the model.
        graph: the inputs of the graph, see
            `hotbed.persist.publish.version.OnnxGraph`.
        configs: by table, the keywords of its constructor. They determine the row that is read
            for an id without one.
        published: Unix seconds of the publication; None where unknown.
        learned: Unix seconds of the newest learned event; None where unknown.
        mended: how often files of this version that were damaged have been written anew. Rows that
            were read before may be wrong.
    """

    name: str
    version: int
    digest: str
    schema: Schema = field(repr=False)
    graph: Mapping[str, Any] = field(repr=False)
    configs: Mapping[str, Mapping[str, Any]] = field(repr=False)
    published: float | None
    learned: float | None
    mended: int

    def is_same(self, other: ModelVersion) -> bool:
        """Return whether both have the same rows."""
        return (self.digest, self.mended) == (other.digest, other.mended)

    def to_json(self) -> dict[str, Any]:
        """Return the version without graph, weights and rows, for files and messages."""
        spec = {name: getattr(self, name) for name in (*_FIELDS, *_LATER_FIELDS)}
        names = {fitted.digest: Path(fitted.path.name) for fitted in self.schema.maps}
        spec["schema"] = self.schema.with_maps(names).to_json()
        return spec

    @abstractmethod
    def graph_bytes(self) -> bytes:
        """Return the ONNX graph."""

    def ids_bytes(self) -> bytes:
        """Return the ONNX graph that computes ids; empty where ids are features of requests."""
        return b""

    @abstractmethod
    def weights(self) -> Iterator[Weight]:
        """Yield the parameters of the graph by name, with the values of this version."""

    @abstractmethod
    def find(
        self, wanted: Mapping[str, IdArray], seconds: float | None = None
    ) -> dict[str, RowArray]:
        """Return rows by table: ids [n] -> float32 [n, dim].

        An id without a row reads as in training.

        Raises ConfigError for an unknown table, StoreError where rows do not arrive within
        `seconds` (None: the store's own limit).
        """


@dataclass(frozen=True)
class RoutesInForce:
    """The rule of a model that is in force.

    Attributes:
        revision: of the file that it is from.
        rule: its plain values.
        keys: the keys of the versions of roles that do not follow the newest one.
    """

    revision: int
    rule: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, spec: Mapping[str, Any]) -> RoutesInForce:
        """Return the rule with these plain values; KeyError, TypeError or ValueError for others."""
        return cls(int(spec["revision"]), dict(spec["rule"]), dict(spec["keys"]))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for files and messages."""
        return asdict(self)


class RowStore(ABC):
    """A source of versions and their rows. Safe to call from several threads."""

    @abstractmethod
    def model(self, name: str) -> ModelVersion:
        """Return the newest version, or the one that the rule of the store pins.

        Raises ConfigError where the model is missing, StoreError where the store does not answer.
        """

    def routed(self, name: str) -> tuple[ModelVersion, RoutesInForce | None]:
        """Return the newest version, and the rule of the model; None = the store has no rules.

        Raises what `model` raises.
        """
        return self.model(name), None

    def version_of(self, name: str, key: str) -> ModelVersion:
        """Return the version with a key of the rule. Raises StoreError where there is none."""
        raise StoreError(
            f"model {name!r}: the store has no versions of rules, got {key[:12]!r}. Use the newest."
        )

    @abstractmethod
    def changes(self, name: str, since: str, to: str) -> Mapping[str, IdArray] | None:
        """Return by table the ids whose row differs between two versions, and maybe some more.

        The versions are named by digest. None means that the changes are unknown.
        """

    @abstractmethod
    def hot(self, name: str, table: str, n: int) -> IdArray:
        """Return up to `n` ids of the newest version, the most frequent in training first.

        The result is empty where training did not count.
        """

    def close(self) -> None:  # noqa: B027 - most stores hold nothing open
        """Close what the store holds open; later calls of a closed connection raise StoreError."""


def version_fields(
    spec: Mapping[str, Any], place: str, folder: Path | None = None
) -> dict[str, Any]:
    """Return the fields of a ModelVersion from the result of its `to_json`.

    `folder`: where the fitted maps of the schema lie. Raises FormatError, which names `place`, for
    anything else.
    """
    try:
        fields = {name: spec[name] for name in _FIELDS}
        for name, absent in _LATER_FIELDS.items():
            fields[name] = spec.get(name, absent)
        fields["schema"] = Schema.from_json(spec["schema"], folder)
        return fields
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{place}: expected the description of a version, got {error!r}. Load the model again."
        ) from error


def read_weights(data: bytes | memoryview, place: str) -> Iterator[Weight]:
    """Yield the tensors of a safetensors file; FormatError, with `place`, for other bytes."""
    try:
        weights = load(bytes(data))
        yield from weights.items()
    except (SafetensorError, KeyError, ValueError) as error:
        raise FormatError(
            f"{place}: the weights cannot be read, got {str(error)!r}. Load the model again."
        ) from error
