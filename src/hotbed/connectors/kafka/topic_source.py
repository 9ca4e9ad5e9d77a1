# SPDX-License-Identifier: Apache-2.0
"""What reading a topic asks of `Kafka`, and how long it waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hotbed.connectors.kafka.client import HANG_SECONDS
from hotbed.connectors.messages import Decoder


@dataclass(frozen=True)
class Timings:
    """How long reading a topic waits, in seconds.

    Attributes:
        look: between two checks of the topic: its partitions, and the bounds of one of them.
        retry: before the next check after one that failed.
        patience: how long a topic may contradict the position before DataError is raised. A missing
            topic, missing partitions or too few messages may come from a broker that is starting.
        proof: the same for a topic with another id: it is a copy if it has the last messages that
            were read.
        hang: how long an answer of the client's process may be overdue before it is killed.
    """

    look: float = 3.0
    retry: float = 0.5
    patience: float = 10.0
    proof: float = 4.0
    hang: float = HANG_SECONDS


USUAL_TIMINGS = Timings()


class TopicSource(Protocol):
    """The settings of a topic, as `Kafka` describes them."""

    @property
    def servers(self) -> str: ...

    @property
    def topic(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

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
