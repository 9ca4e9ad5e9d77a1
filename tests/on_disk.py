# SPDX-License-Identifier: Apache-2.0
"""Tables whose rows lie on a disk, with few of them in memory, for tests that hold them to Ram."""

from __future__ import annotations

import tempfile

import hotbed as hb


def on_disk(ram_rows: int, *, fetch: int = 0) -> hb.Ssd:
    return hb.Ssd(tempfile.gettempdir(), ram_rows, fetch=fetch)
