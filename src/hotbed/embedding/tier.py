# SPDX-License-Identifier: Apache-2.0
"""Tiers: where the rows of a table live.

A tier changes no bit of a result: tables of all tiers learn the same, write the same checkpoints
and read each other's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from hotbed import checks
from hotbed.files import Where, local_path

Engine = Literal["best", "io_uring", "threads"]
ENGINES: tuple[Engine, ...] = ("best", "io_uring", "threads")
MAX_ROW_BYTES = 61_433
"""Most bytes of values and optimizer state of a row on a disk: it is read at once."""


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
    """Rows on a local disk behind a cache of `ram_rows` rows, with the bits of `Ram`.

    The disk is scratch: its file has no name and goes with the process, and a checkpoint holds all
    rows as ever.

    Memory of an id: 29.4 bytes (21.4 of its index, 8 of its place) and what policies keep (`Ttl`
    and `Lru` 8, `Lfu` 4 to 12, scope "catch_up" 4). Of each of `ram_rows` rows: its values, its
    optimizer state and 32 bytes. docs/tiers.md has the sums, and how to choose `ram_rows`.

    A rule of scope "all" is refused: it would read and write the whole table at every step. Scope
    "catch_up" has its bits.

    Args:
        path: a folder on a local disk, which exists. Tables of one folder share a file.
        ram_rows: rows of this table in memory. All rows that the batches in flight use must fit,
            else `TableFull`.
        fetch: batches whose rows are read ahead of training; 0 = none.
        engine: what reads the disk: "io_uring", "threads", or the "best" that is allowed here.

    Raises:
        ConfigError: a value is wrong. Whether the folder can be used is checked when a table is
            made.

    Example: `hb.Table("user", dim=16, tier=hb.Ssd("/fast/disk", ram_rows=10_000_000))`
    """

    rows_name: ClassVar[str] = "ram_rows"
    """What messages call `ram_rows`; a front door has another name for it, see `named`."""

    path: Where
    ram_rows: int
    fetch: int = field(default=8, kw_only=True)
    engine: Engine = field(default="best", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(local_path(self.path, "Ssd.path")))
        advice = "Give the rows of the table that stay in memory."
        checks.whole_number("Ssd.ram_rows", self.ram_rows, 1, 2**32 - 2, advice)
        checks.whole_number("Ssd.fetch", self.fetch, 0, advice="Give a number of batches.")
        checks.one_of("Ssd.engine", self.engine, ENGINES)

    def named(self, rows_name: str) -> Ssd:
        """Return this tier, whose messages call `ram_rows` by another name."""
        tier = replace(self)
        object.__setattr__(tier, "rows_name", rows_name)
        return tier
