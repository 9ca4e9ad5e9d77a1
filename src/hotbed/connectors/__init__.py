# SPDX-License-Identifier: Apache-2.0
"""Sources of events: Arrow record batches, each with a position to resume from.

concat.py         Concat: the rows of several sources one after another
dead_letters.py   dead letters: rows that could not be read, each with its place
compression.py    what the first bytes of a file say: compression, and text that cannot be read
endings.py        which source reads a file, by the ending of its name
file_identity.py  the identity of a file
files.py          files: paths and globs, sections, and positions in a list of files
first_times.py    the first times of events that are read together: they tell a wrong unit
follow.py         Follow: a directory that files arrive in, as an endless source
generated.py      random rows, to try a model or to measure it without data
journal.py        the journal of an endless source's decisions
late_labels.py    labels from later events
live.py           what a run gives an endless source, and the rows that a join holds open
memory.py         rows in memory
merge.py          Merge: the events of several sources in the order of their times
messages.py       messages of a broker: decoders that turn them into rows
parquet.py        Parquet files
paths.py          paths and globs: which files they name, each once
position.py       positions in a source, places of rows
prepared.py       the output of `hotbed prepare`
read_ahead.py     make items ahead of their consumer on a thread
read_plan.py      what a reader asks of a source: columns, types, and how bad rows are treated
request_log.py    RequestLog: what a server was asked and answered
replay.py         Replay: recorded events of several sources in the order of their times
row_groups.py     RowGroups: parts of Parquet files that several readers need, decoded once
samples.py        columns of binary samples as Arrow arrays, and back: for `Norm` and `Raw`
source.py         the base of every source of events, and the sources that its methods return
status.py         what an endless source knows while it is read
times.py          times as int64 microseconds UTC, and what tells that their unit is wrong
types.py          how two Arrow types of one column meet: the rules that every source uses
hugectr/          the file formats of HugeCTR
join/             impressions that wait for their outcomes
kafka/            a topic of Kafka as an endless source
text/             files of text
"""

from hotbed.connectors.concat import Concat
from hotbed.connectors.dead_letters import DeadLetters
from hotbed.connectors.follow import Follow
from hotbed.connectors.generated import Distribution, Generated, Keys, PowerLaw, UniformKeys
from hotbed.connectors.hugectr.file_list import read_file_list, write_file_list
from hotbed.connectors.hugectr.norm import Norm
from hotbed.connectors.hugectr.raw import Raw
from hotbed.connectors.join.join import AsTheyCome, Join, Outcome, Spill, Wait
from hotbed.connectors.journal import Journal
from hotbed.connectors.kafka.kafka import Kafka
from hotbed.connectors.late_labels import LateLabels
from hotbed.connectors.live import Live
from hotbed.connectors.memory import Memory
from hotbed.connectors.messages import Arrow, Decoder, Json
from hotbed.connectors.parquet import Parquet
from hotbed.connectors.position import Position
from hotbed.connectors.prepared import Prepared
from hotbed.connectors.read_plan import ReadPlan, Skips
from hotbed.connectors.replay import Replay
from hotbed.connectors.request_log import RequestLog
from hotbed.connectors.source import Slice, Sort, Source, TableJoin
from hotbed.connectors.status import SourceReading, SourceStatus
from hotbed.connectors.text.delimited import Csv
from hotbed.connectors.text.jsonl import Jsonl
from hotbed.connectors.text.libsvm import Libsvm

__all__ = [
    "Arrow",
    "AsTheyCome",
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
    "Outcome",
    "Parquet",
    "Position",
    "PowerLaw",
    "Prepared",
    "Raw",
    "ReadPlan",
    "Replay",
    "RequestLog",
    "Skips",
    "Slice",
    "Sort",
    "Source",
    "SourceReading",
    "SourceStatus",
    "Spill",
    "TableJoin",
    "UniformKeys",
    "Wait",
    "read_file_list",
    "write_file_list",
]


def __dir__() -> list[str]:
    return sorted(__all__)
