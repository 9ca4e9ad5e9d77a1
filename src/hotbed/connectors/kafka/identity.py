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
        id: the broker's id of the topic; None if it gives no id.
        last: the last message that was read, by partition.
        block: the last message of the block that the position lies in, by partition.
    """

    id: str | None = None
    last: dict[int, Mark] = field(default_factory=dict)
    block: dict[int, Mark] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the identity as JSON for a position."""
        value: dict[str, Any] = {"id": self.id, "last": _marks_to_json(self.last)}
        if self.block:
            value["block"] = _marks_to_json(self.block)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TopicIdentity:
        """Return the identity that `to_json` wrote; an empty mapping gives an empty one."""
        last = _marks_from_json(value.get("last", {}))
        block = _marks_from_json(value.get("block", {}))
        return cls(value.get("id"), last, block)


def _marks_to_json(marks: Mapping[int, Mark]) -> dict[str, list[int]]:
    values: dict[str, list[int]] = {}
    for partition, mark in sorted(marks.items()):
        values[str(partition)] = [mark.offset, mark.timestamp, mark.checksum]
    return values


def _marks_from_json(values: Mapping[str, Sequence[int]]) -> dict[int, Mark]:
    return {int(partition): Mark(*mark) for partition, mark in values.items()}
