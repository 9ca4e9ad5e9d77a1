# SPDX-License-Identifier: Apache-2.0
"""The memory and the disk that rows on `hb.Ssd` take: the sums of docs/tiers.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .policy import Admission, Eviction, kept_columns
from .rule import Rule
from .tier import Ssd, Tier

INDEX_BYTES = 21.4
"""Of an id in the index, on average over its growth."""
PLACE_BYTES = 8
FRAME_BYTES = 32
"""Of a row in memory, beside its values and state: places, links, plans, marks."""
HEAD_BYTES = 8
"""Of a row on the disk: checksum and slot."""
SPACE = 1.5
"""Room on the disk for each byte of live rows, at most."""
_COLUMN_BYTES = {"last_seen": 8, "count": 4, "score": 8}


def row_bytes(dim: int, dtype: str, rule: Rule) -> int:
    """Return the bytes of values and optimizer state of a row, as the native core lays them out."""
    state_bytes = 4 * rule.state_width(dim)
    if dtype in ("float32", "int32"):
        return 4 * dim + state_bytes
    return (2 * dim + 3) // 4 * 4 + state_bytes + 8  # the id seeds its rounding


def ledger_bytes(rule: Rule, admit: Admission | None, evictions: Sequence[Eviction]) -> int:
    """Return the bytes that the rule and the policies keep in memory for each id."""
    last_step = 4 if rule.scope == "catch_up" else 0
    return last_step + sum(_COLUMN_BYTES[column] for column in kept_columns(admit, evictions))


@dataclass(frozen=True)
class Footprint:
    """What a table on `hb.Ssd` takes.

    Attributes:
        ids: in the table.
        memory_bytes: of index, places, policies and the rows in memory.
        disk_bytes: of all rows.
    """

    ids: int
    memory_bytes: float
    disk_bytes: float

    def __str__(self) -> str:
        ids = max(self.ids, 1)
        return (
            f"{self.memory_bytes / ids:,.1f} B of memory and {self.disk_bytes / ids:,.1f} B of "
            "disk an id"
        )


def predicted(config: dict[str, Any], ids: int) -> Footprint | None:
    """Return what a table of this config takes with `ids` ids; None unless it lies on a disk.

    Open extents and waiting ids are not in it: see docs/tiers.md.
    """
    tier = config.get("tier")
    if not isinstance(tier, Ssd):
        return None
    evict = config.get("evict") or ()
    evictions = [evict] if isinstance(evict, Eviction) else list(evict)
    rule = config["rule"]
    row = row_bytes(config["dim"], config["dtype"], rule)
    an_id = INDEX_BYTES + PLACE_BYTES + ledger_bytes(rule, config.get("admit"), evictions)
    memory = ids * an_id + min(ids, tier.ram_rows) * (row + FRAME_BYTES)
    return Footprint(ids, memory, ids * (row + HEAD_BYTES) * SPACE)


class Measured(Protocol):
    """What `measured` asks of a table."""

    tier: Tier
    dim: int
    dtype: Any
    rule: Rule

    @property
    def stats(self) -> dict[str, int]: ...

    @property
    def tier_stats(self) -> dict[str, Any]: ...


def measured(table: Measured) -> Footprint | None:
    """Return what a table takes now; None unless it lies on a disk.

    The disk of a folder is shared by its tables in proportion to their rows.
    """
    if not isinstance(table.tier, Ssd):
        return None
    stats = table.stats
    memory = sum(value for key, value in stats.items() if "bytes" in key)
    disk = table.tier_stats
    space = disk["file_bytes"] / disk["live_bytes"] if disk["live_bytes"] else 1.0
    record = row_bytes(table.dim, table.dtype, table.rule) + HEAD_BYTES
    return Footprint(stats["rows"], memory, stats["rows"] * record * space)
