# SPDX-License-Identifier: Apache-2.0
"""Preparation: what `hotbed prepare` does, as one value, in Python or as a file of the same keys.

job = Preparation.read("prepare.yaml", {"output": "prepared"})
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hotbed import checks, config
from hotbed.connectors.source import Source, not_endless
from hotbed.data.schema import Dense, Id, Schema
from hotbed.data.transforms import TargetEncode
from hotbed.errors import ConfigError
from hotbed.job.file import read_values
from hotbed.prepare.keyed.derive import Derivation
from hotbed.prepare.keyed.kept import with_kept_as_columns
from hotbed.prepare.sampling.down_sample import DownSample
from hotbed.prepare.sampling.negatives import Negatives, label_of
from hotbed.prepare.sampling.split import Holdout

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Preparation:
    """One preparation: raw rows, their columns, and which of them are written.

    Args:
        source: the raw rows; it must end.
        schema: the columns and their roles; its transforms learn from the training rows. Histories
            and counts become plain columns, with the values that a model would keep.
        derive: columns that depend on other rows of the same key, in this order.
        negatives: rows that are added to implicit feedback.
        split: the parts `train` and `valid`; None = all rows train.
        down_sample: which negatives of the training rows are left out.
        on_error: `"skip"` leaves out bad rows, counts them, and writes them to dead letters.
        memory: the most that all tasks together may take, such as "4GB".
        output: the folder to write; it must not exist.
        seed: of folds and samples.

    Raises:
        ConfigError: a key is wrong; the message starts with its dotted path.

    Example: `hotbed prepare prepare.yaml`, `Preparation.read("prepare.yaml")`.
    """

    source: Source
    schema: Schema
    derive: Sequence[Derivation] = ()
    negatives: Negatives | None = None
    split: Holdout | None = None
    down_sample: DownSample | None = None
    on_error: Literal["raise", "skip"] = "raise"
    memory: str | int = "4GB"
    output: str = "prepared"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "derive", tuple(self.derive))
        not_endless(self.source, "a preparation")
        advice = "Write a size such as 4GB."
        checks.at_least("memory", self.memory_bytes, 1, advice)
        self._check_derived()
        self._check_split()
        self._check_negatives()
        self._check_down_sample()
        self._check_target_encodings()
        if self.schema.kept:
            self.with_kept_as_columns()

    def with_kept_as_columns(self) -> Preparation:
        """Return the preparation in which histories and counts are derived columns.

        Raises:
            ConfigError: a history or count cannot be derived from raw columns.
        """
        schema, derived = with_kept_as_columns(self.schema)
        return replace(self, schema=schema, derive=[*self.derive, *derived])

    def _check_derived(self) -> None:
        names = [derivation.name for derivation in self.derive]
        for number, derivation in enumerate(self.derive):
            is_repeated = derivation.name in names[:number]
            if is_repeated or set(derivation.inputs()) & set(names[number:]):
                raise ConfigError(
                    f"derive: {derivation.name!r} is derived twice, or reads a column that is not "
                    f"derived yet, got {names}. Rename it, or change the order."
                )

    def _check_split(self) -> None:
        if self.split is None or not self.split.reads_time or self.schema.time is not None:
            return
        names = [column.name for column in self.schema.columns]
        raise ConfigError(
            f"split: by_time needs the time of each row, got a schema of {names}. Add {{kind: "
            "time, name: …} to it."
        )

    def _check_negatives(self) -> None:
        if self.negatives is None:
            return
        label_of(self.schema)
        for derivation in self.derive:
            if derivation.by in self.negatives.of_item:
                raise ConfigError(
                    f"derive: {derivation.name!r} belongs to the rows of an item, got by="
                    f"{derivation.by!r} together with negatives. A sampled item has no such rows: "
                    "derive by another column."
                )

    def _check_down_sample(self) -> None:
        if self.down_sample is None:
            return
        labels = [label.name for label in self.schema.labels]
        if self.down_sample.label not in labels:
            raise ConfigError(
                f"down_sample.label: the schema has no such label, got {self.down_sample.label!r}. "
                f"{config.did_you_mean(self.down_sample.label, labels)}"
            )
        name = self.down_sample.weight
        weight = self.schema.weight
        if name is None:
            return
        if weight is not None and name != weight.name:
            raise ConfigError(
                f"down_sample.weight: the schema has the weight {weight.name!r}, got {name!r}. "
                "Give its name: both weights are multiplied."
            )
        names = [column.name for column in self.schema.columns if column is not weight]
        if name in names:
            raise ConfigError(
                f"down_sample.weight: the schema has a column of this name, got {name!r}. "
                "Give another one."
            )

    def _check_target_encodings(self) -> None:
        labels = [label.name for label in self.schema.labels]
        columns: list[Dense | Id] = [*self.schema.dense, *self.schema.ids]
        for column in columns:
            for transform in column.transforms:
                if isinstance(transform, TargetEncode) and transform.label not in labels:
                    raise ConfigError(
                        f"schema: target_encode of {column.name!r} names a label that the schema "
                        f"does not have, got {transform.label!r}. "
                        f"{config.did_you_mean(transform.label, labels)}"
                    )

    @staticmethod
    def read(path: str | Path, assignments: Mapping[str, object] | None = None) -> Preparation:
        """Return the preparation of a YAML or JSON file, with values set by dotted path."""
        return read_values(path, assignments or {}, Preparation.from_json)

    @staticmethod
    def from_json(spec: Mapping[str, Any]) -> Preparation:
        """Return the preparation of plain values.

        Raises:
            ConfigError: a key is wrong; the message starts with its dotted path.
        """
        return typing.cast(Preparation, config.build(spec, Preparation, "prepare"))

    def to_json(self) -> dict[str, Any]:
        """Return plain values without defaults; `from_json` is the inverse."""
        plain: dict[str, Any] = config.describe(self)
        del plain["kind"]
        for name in ("schema", "negatives", "down_sample"):
            plain.get(name, {}).pop("kind", None)  # only one class fits there
        return plain

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        pattern = r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?B)?"
        match = re.fullmatch(pattern, str(self.memory), re.IGNORECASE)
        if match is None:
            raise ConfigError(
                f"memory: not a size, got {self.memory!r}. Write a number of bytes, or one with "
                "KB, MB, GB or TB, such as 4GB."
            )
        number, unit = match.groups(default="")
        scale = _UNITS.get(unit.upper(), 1)
        return int(float(number) * scale)
