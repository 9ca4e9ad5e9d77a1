# SPDX-License-Identifier: Apache-2.0
"""Which topic a position speaks of: its id, and the last message of each partition."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mark:
    """A message as it can be known again. `timestamp`: in milliseconds; `checksum`: CRC-32."""

    offset: int
    timestamp: int
    checksum: int

    @classmethod
    def of(cls, message: Sequence[Any]) -> Mark:
        """The mark of (timestamp, offset, payload)."""
        timestamp, offset, payload = message
        return cls(offset, timestamp, zlib.crc32(payload or b""))

    def __str__(self) -> str:
        return f"timestamp {self.timestamp}, checksum {self.checksum:08x}"


@dataclass
class TopicIdentity:
    """A topic as a position knows it; of older versions nothing is known.

    `id`: what the broker calls it, None where it gives no id. `last`: the last message that was
    read, by partition.
    """

    id: str | None = None
    last: dict[int, Mark] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it stands in a position."""
        last = {
            str(partition): [mark.offset, mark.timestamp, mark.checksum]
            for partition, mark in sorted(self.last.items())
        }
        return {"id": self.id, "last": last}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TopicIdentity:
        """Inverse of `to_json`; nothing is known of an empty mapping."""
        last = {int(partition): Mark(*mark) for partition, mark in value.get("last", {}).items()}
        return cls(value.get("id"), last)
