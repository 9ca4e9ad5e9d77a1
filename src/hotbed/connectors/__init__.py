# SPDX-License-Identifier: Apache-2.0
"""Sources of events: Arrow record batches, each with a position to resume from."""

from hotbed.connectors.concat import Concat
from hotbed.connectors.dead_letters import DeadLetters
from hotbed.connectors.follow import Follow
from hotbed.connectors.generated import Distribution, Generated, Keys, PowerLaw, UniformKeys
from hotbed.connectors.hugectr.file_list import read_file_list, write_file_list
from hotbed.connectors.hugectr.norm import Norm
from hotbed.connectors.hugectr.raw import Raw
from hotbed.connectors.journal import Journal
from hotbed.connectors.kafka.kafka import Kafka
from hotbed.connectors.late_labels import LateLabels
from hotbed.connectors.live import Live
from hotbed.connectors.memory import Memory
from hotbed.connectors.messages import Arrow, Decoder, Json
from hotbed.connectors.parquet import Parquet
from hotbed.connectors.plan import ReadPlan, Skips
from hotbed.connectors.position import Position
from hotbed.connectors.prepared import Prepared
from hotbed.connectors.replay import Replay
from hotbed.connectors.source import Join, Slice, Sort, Source
from hotbed.connectors.text.delimited import Csv
from hotbed.connectors.text.jsonl import Jsonl
from hotbed.connectors.text.libsvm import Libsvm

__all__ = [
    "Arrow",
    "Concat",
    "Csv",
    "DeadLetters",
    "Decoder",
    "Distribution",
    "Follow",
    "Generated",
    "Join",
    "Journal",
    "Json",
    "Jsonl",
    "Kafka",
    "Keys",
    "LateLabels",
    "Libsvm",
    "Live",
    "Memory",
    "Norm",
    "Parquet",
    "Position",
    "PowerLaw",
    "Prepared",
    "Raw",
    "ReadPlan",
    "Replay",
    "Skips",
    "Slice",
    "Sort",
    "Source",
    "UniformKeys",
    "read_file_list",
    "write_file_list",
]


def __dir__() -> list[str]:
    return sorted(__all__)
