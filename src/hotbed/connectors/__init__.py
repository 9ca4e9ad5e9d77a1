# SPDX-License-Identifier: Apache-2.0
"""Sources of events: Arrow record batches, each with a position to resume from."""

from hotbed.connectors.base import Memory, Position, ReadPlan, Skips, Source
from hotbed.connectors.delimited import Csv, Libsvm
from hotbed.connectors.derive import Join, LateLabels, Slice, Sort
from hotbed.connectors.files import Parquet
from hotbed.connectors.follow import Follow
from hotbed.connectors.journal import DeadLetters, Journal, Live
from hotbed.connectors.kafka import Kafka
from hotbed.connectors.lines import Arrow, Decoder, Json, Jsonl
from hotbed.connectors.times import Replay

__all__ = [
    "Arrow",
    "Csv",
    "DeadLetters",
    "Decoder",
    "Follow",
    "Join",
    "Journal",
    "Json",
    "Jsonl",
    "Kafka",
    "LateLabels",
    "Libsvm",
    "Live",
    "Memory",
    "Parquet",
    "Position",
    "ReadPlan",
    "Replay",
    "Skips",
    "Slice",
    "Sort",
    "Source",
]


def __dir__() -> list[str]:
    return sorted(__all__)
