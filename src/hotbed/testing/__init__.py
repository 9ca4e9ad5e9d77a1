# SPDX-License-Identifier: Apache-2.0
"""Parts for tests of code that is built on Hotbed, and of Hotbed itself.

`ReferenceTable` has the methods of `hb.Table` over one dict. `check_table` checks what every table
and tier promises; `TABLE_CHECKS` are the same checks one by one. `FakeStream` is an endless source
without a broker, `Broker` a real broker without an installation, `FakeStore` a parameter server
over dicts.
"""

from __future__ import annotations

from hotbed.serving.stores.fake import FakeStore
from hotbed.testing.broker import Broker
from hotbed.testing.reference import ReferenceTable
from hotbed.testing.stream import FakeStream
from hotbed.testing.tables import TABLE_CHECKS, MakeTable, check_table

__all__ = [
    "TABLE_CHECKS",
    "Broker",
    "FakeStore",
    "FakeStream",
    "MakeTable",
    "ReferenceTable",
    "check_table",
]


def __dir__() -> list[str]:
    return sorted(__all__)
