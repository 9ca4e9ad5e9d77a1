# SPDX-License-Identifier: Apache-2.0
"""FeatureSpec: a feature of a data set, its table and its thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from hotbed import checks
from hotbed.compat.mx_rec.checks import MOST_INT
from hotbed.compat.mx_rec.no_effect import ARGUMENTS
from hotbed.errors import ConfigError

__all__ = ["FeatureSpec", "Thresholds"]


@dataclass(frozen=True)
class Thresholds:
    """When ids of a table get a row, and when they lose it.

    Args:
        access_threshold: the least count that gets a row; None or -1 = every id gets one, 0 = every
            id gets one and is counted.
        eviction_threshold: seconds after which a row is stale; None or -1 = never.
        faae_coefficient: added to the count for each occurrence of an id.
    """

    access_threshold: int | None = None
    eviction_threshold: int | None = None
    faae_coefficient: int = 1

    def check(self, where: str) -> None:
        """Raise ConfigError for a wrong value. `where`: for the message."""
        for name in ("access_threshold", "eviction_threshold"):
            value = getattr(self, name)
            if value is not None:
                checks.whole_number(f"{where}: {name}", value, -1, MOST_INT)
        checks.whole_number(f"{where}: faae_coefficient", self.faae_coefficient, 1, MOST_INT)
        if self.evicts and not self.admits:
            raise ConfigError(
                f"{where}: access_threshold should be configured before eviction_threshold, got "
                f"access_threshold={self.access_threshold} and "
                f"eviction_threshold={self.eviction_threshold}. Give access_threshold=0 to let in "
                "every id."
            )

    @property
    def values(self) -> tuple[int, int, int]:
        """The three values; None is -1."""
        access = -1 if self.access_threshold is None else self.access_threshold
        eviction = -1 if self.eviction_threshold is None else self.eviction_threshold
        return access, eviction, self.faae_coefficient

    @property
    def admits(self) -> bool:
        """Whether ids are counted before they get a row, or beside it."""
        return self.access_threshold not in (None, -1)

    @property
    def evicts(self) -> bool:
        return self.eviction_threshold not in (None, -1)


@dataclass(frozen=True, eq=False)
class FeatureSpec:
    """A feature of the data set: step 3.

    Thresholds below -1 are errors. Features of one table must have the same ones.

    Args:
        name: of the feature.
        table_name: the table of its ids; None = `name`.
        index_key: where its ids lie in a batch, a name or a number; None = `name`.
        access_threshold: the least count of an id that gets a row; None or -1 = off, 0 = counts.
        eviction_threshold: seconds after which a row is stale; None or -1 = off.
        is_timestamp: whether it holds the times of the batch instead of ids.
        batch_size: not needed: batches have their own.
        faae_coefficient: added to the count for each occurrence of an id.
        feat_count: not needed: a sample has any number of ids.

    Raises:
        ConfigError: a value is wrong.
    """

    name: str
    table_name: str | None = None
    index_key: str | int | None = None
    access_threshold: int | None = None
    eviction_threshold: int | None = None
    is_timestamp: bool | None = None
    batch_size: int | None = None
    faae_coefficient: int = 1
    feat_count: int | None = None

    def __post_init__(self) -> None:
        where = f"FeatureSpec {self.name!r}"
        _check_name("FeatureSpec: name", self.name)
        if self.table_name is not None:
            _check_name(f"{where}: table_name", self.table_name)
        if isinstance(self.index_key, str):
            _check_name(f"{where}: index_key", self.index_key)
        elif self.index_key is not None:
            checks.whole_number(f"{where}: index_key", self.index_key, 0, 255)
        if self.is_timestamp not in (None, True, False):
            raise ConfigError(
                f"{where}: is_timestamp is True, False or None, got {self.is_timestamp!r}. "
                "Correct it."
            )
        if self.batch_size is not None:
            checks.whole_number(f"{where}: batch_size", self.batch_size, 1, MOST_INT)
            ARGUMENTS.log_no_effect("feature_spec.batch_size")
        if self.feat_count is not None:
            checks.whole_number(f"{where}: feat_count", self.feat_count, 1, MOST_INT)
            ARGUMENTS.log_no_effect("feature_spec.feat_count")
        self.thresholds.check(where)

    @property
    def table(self) -> str:
        """The name of its table."""
        return self.name if self.table_name is None else self.table_name

    @property
    def key(self) -> str | int:
        """Where its values lie in a batch."""
        return self.name if self.index_key is None else self.index_key

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.access_threshold, self.eviction_threshold, self.faae_coefficient)


def _check_name(where: str, name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 255:
        raise ConfigError(f"{where}: a text of 1 to 255 characters is needed, got {name!r}.")
