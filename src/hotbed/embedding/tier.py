# SPDX-License-Identifier: Apache-2.0
"""Tiers: where the rows of a table live.

`Ram` is built. `Ssd` is a reserved name in the configuration: its constructor raises `ConfigError`,
so that a job never runs on a tier other than the one it names.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotbed.errors import ConfigError


@dataclass(frozen=True)
class Tier:
    """Base of the tiers; use `Ram` or `Ssd`."""


@dataclass(frozen=True)
class Ram(Tier):
    """Rows in main memory, in chunks that never move.

    Example: `hb.Table("user", dim=16, tier=hb.Ram())`
    """


@dataclass(frozen=True)
class Ssd(Tier):
    """Rows on a disk behind a cache of `ram_rows` rows.

    Reserved: the constructor raises `ConfigError` until the tier is built.
    """

    path: str
    ram_rows: int

    def __post_init__(self) -> None:
        raise ConfigError(
            f"tier: Ssd is reserved, not built yet, got Ssd(path={self.path!r}, "
            f"ram_rows={self.ram_rows!r}). Use tier=Ram()."
        )
