# SPDX-License-Identifier: Apache-2.0
"""The size of answers with messages, and the messages that are larger than the client takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hotbed.connectors.kafka.client import ClientError
from hotbed.errors import DataError

LIMIT = "receive.message.max.bytes"
USUAL_BYTES = 100_000_000
MOST_BYTES = (1 << 31) - 1
"""The default and the largest value of this option in librdkafka."""
_SIZE = re.compile(r"response size (\d+)")


class AnswerSizes:
    """Lets answers grow as far as a broker makes them, and messages as far as the user allows.

    A broker may put many messages into one answer, the last one too large. librdkafka then gives
    none of them. A client that takes the answer gives those before it.
    """

    def __init__(self, topic: str, options: Mapping[str, Any]) -> None:
        self._topic = topic
        limit = str(options.get(LIMIT, USUAL_BYTES))
        self._allowed = int(limit) if limit.isdigit() else USUAL_BYTES  # the client refuses others
        self._bytes = self._allowed
        self._reason = ""  # what the client says of an answer that it does not take
        self._last_reason = ""
        self._too_large: dict[int, str] = {}  # what the first such message is, by partition

    def note(self, error: ClientError) -> None:
        """Note an error of the client as a whole."""
        if _SIZE.search(error.text):
            self._reason = error.text
            self._last_reason = error.text

    def options(self) -> dict[str, int]:
        """Return options of a client that accepts the last answer; empty if the present one does.

        Raises:
            DataError: the answer is too large for any client.
        """
        match = _SIZE.search(self._reason)
        if match is None:
            return {}
        num_bytes = int(match[1])
        if num_bytes > MOST_BYTES:
            raise self._error("an answer is too large", self._reason)
        self._reason = ""
        if num_bytes <= self._bytes:  # a client before this one said so
            return {}
        self._bytes = num_bytes
        return {LIMIT: num_bytes}

    @property
    def takes_all(self) -> bool:
        """Whether the client refuses what is too large, so that no message has to be looked at."""
        return self._bytes == self._allowed

    def takes(self, partition: int, offset: int, value: bytes | None) -> bool:
        """Return whether a message is taken: neither it nor one before it is too large."""
        if len(value or b"") > self._allowed:
            size = f"{len(value or b'')} bytes at offset {offset} of partition {partition}"
            self._too_large.setdefault(partition, f"{size} ({self._last_reason})")
        return partition not in self._too_large

    def check(self, pending: Mapping[int, Sequence[Any]]) -> None:
        """Raise DataError once the messages before a too large one are in blocks."""
        for partition, size in self._too_large.items():
            if not pending[partition]:
                raise self._error("a message is too large for the client", size)

    def _error(self, what: str, received: str) -> DataError:
        return DataError(
            f"kafka topic {self._topic!r}: {what}, got {received}. Raise {LIMIT}, and "
            "fetch.message.max.bytes with it, in `options`."
        )
