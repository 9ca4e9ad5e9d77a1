# SPDX-License-Identifier: Apache-2.0
"""What reading a topic asks of the settings of `Kafka`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from hotbed.connectors.messages import Decoder


class KafkaSettings(Protocol):
    """The settings of a topic, as `Kafka` describes them."""

    @property
    def servers(self) -> str: ...

    @property
    def topic(self) -> str: ...

    @property
    def decoder(self) -> Decoder: ...

    @property
    def group(self) -> str | None: ...

    @property
    def start(self) -> Literal["earliest", "latest"]: ...

    @property
    def partitions(self) -> Sequence[int] | None: ...

    @property
    def block_rows(self) -> int: ...

    @property
    def linger_seconds(self) -> float: ...

    @property
    def tombstones(self) -> Literal["refuse", "skip"]: ...

    def reads(self, partition: int) -> bool:
        """Return whether a partition is one of those to read."""
        ...

    def client_options(self) -> dict[str, Any]:
        """Return the options for librdkafka, with the values of environment variables."""
        ...
