# SPDX-License-Identifier: Apache-2.0
"""Bytes in: sources of events as Arrow record batches with a resumable position."""

from hotbed.connectors.base import Memory, Position, ReadPlan, Skips, Source
from hotbed.connectors.delimited import Csv
from hotbed.connectors.derive import Join, Slice, Sort
from hotbed.connectors.files import Parquet
from hotbed.connectors.journal import DeadLetters, Journal, Live
from hotbed.connectors.lines import Jsonl, Libsvm

__all__ = [
    "Csv",
    "DeadLetters",
    "Join",
    "Journal",
    "Jsonl",
    "Libsvm",
    "Live",
    "Memory",
    "Parquet",
    "Position",
    "ReadPlan",
    "Skips",
    "Slice",
    "Sort",
    "Source",
]
