# SPDX-License-Identifier: Apache-2.0
"""Parts for tests of code that is built on Hotbed, and of Hotbed itself.

`ReferenceTable` has the methods of `hb.Table` over one dict. `check_table` checks what every table
and tier promises; `TABLE_CHECKS` are the same checks one by one. `FakeStream` is an endless source
without a broker, `Broker` a real broker without an installation, `FakeStore` a parameter server
over dicts. `ReplayedHistory` and `ReplayedCount` say what rows see of `hb.History` and `hb.Count`.

    broker.py               a real broker of the Kafka protocol for tests and examples
    reference.py            a table that is easy to check
    reference_admission.py  the admission of `ReferenceTable`
    replayed.py             histories and counts over a dict
    stream.py               an endless source over rows in memory, whose clock follows a script
    tables.py               the promises of every table, as checks
    values.py               compare the rows of a server with those of the run that it follows
"""

from __future__ import annotations

from hotbed.serving.stores.fake import FakeStore
from hotbed.testing.broker import Broker
from hotbed.testing.reference import ReferenceTable
from hotbed.testing.replayed import ReplayedCount, ReplayedHistory
from hotbed.testing.stream import FakeStream
from hotbed.testing.tables import TABLE_CHECKS, MakeTable, check_table

__all__ = [
    "TABLE_CHECKS",
    "Broker",
    "FakeStore",
    "FakeStream",
    "MakeTable",
    "ReferenceTable",
    "ReplayedCount",
    "ReplayedHistory",
    "check_table",
]


def __dir__() -> list[str]:
    return sorted(__all__)
