# SPDX-License-Identifier: Apache-2.0
"""The identity of a topic: its id, and the last message that was read of each partition."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mark:
    """The identity of a message. `timestamp` is in milliseconds, `checksum` a CRC-32."""

    offset: int
    timestamp: int
    checksum: int

    @classmethod
    def of(cls, message: Sequence[Any]) -> Mark:
        """Return the mark of a message (timestamp, offset, payload)."""
        timestamp, offset, payload = message
        return cls(offset, timestamp, zlib.crc32(payload or b""))

    def __str__(self) -> str:
        return f"timestamp {self.timestamp}, checksum {self.checksum:08x}"


@dataclass
class TopicIdentity:
    """The topic that a position was written for; empty in positions of older versions.

    Args:
        id: The broker's id of the topic; None if it gives no id.
        last: The last message that was read, by partition.
    """

    id: str | None = None
    last: dict[int, Mark] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the identity as JSON for a position."""
        last: dict[str, list[int]] = {}
        for partition, mark in sorted(self.last.items()):
            last[str(partition)] = [mark.offset, mark.timestamp, mark.checksum]
        return {"id": self.id, "last": last}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TopicIdentity:
        """Return the identity that `to_json` wrote; an empty mapping gives an empty one."""
        last: dict[int, Mark] = {}
        for partition, mark in value.get("last", {}).items():
            last[int(partition)] = Mark(*mark)
        return cls(value.get("id"), last)
