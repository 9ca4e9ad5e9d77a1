# SPDX-License-Identifier: Apache-2.0
"""Tiers: where the rows of a table live.

`Ram` is built. `Ssd` and `Gpu` have their place in the configuration; constructing one says that it
is not built yet, so that a job never runs on a tier other than the one it names.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotbed.errors import ConfigError


@dataclass(frozen=True)
class Tier:
    """Base of the tiers; use `Ram`, `Ssd` or `Gpu`."""


@dataclass(frozen=True)
class Ram(Tier):
    """Rows in main memory, in chunks that never move.

    Example: `hb.Table("user", dim=16, tier=hb.Ram())`
    """


@dataclass(frozen=True)
class Ssd(Tier):
    """Rows on a disk behind a cache of `ram_rows` rows. Reserved: raises `ConfigError` until it is
    built.
    """

    path: str
    ram_rows: int

    def __post_init__(self) -> None:
        raise ConfigError(
            f"tier: Ssd is reserved, not built yet — received Ssd(path={self.path!r}, "
            f"ram_rows={self.ram_rows!r}) — "
            "use tier=Ram()"
        )


@dataclass(frozen=True)
class Gpu(Tier):
    """A fixed pool of `rows` rows in device memory. Reserved: raises `ConfigError` until it is
    built.
    """

    rows: int

    def __post_init__(self) -> None:
        raise ConfigError(
            f"tier: Gpu is reserved, not built yet — received Gpu(rows={self.rows!r}) — use "
            "tier=Ram(); the dense "
            "network may run on any torch device"
        )
