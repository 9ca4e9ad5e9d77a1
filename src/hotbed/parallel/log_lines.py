# SPDX-License-Identifier: Apache-2.0
"""The rank in every log line of Hotbed."""

from __future__ import annotations

import functools
import logging
from typing import Any


@functools.cache  # once a process
def name_rank_in_logs(rank: int) -> None:
    """Let each message that a logger of Hotbed takes begin with the rank, as in "rank 1: "."""
    make = logging.getLogRecordFactory()

    def with_rank(name: str, *values: Any, **keywords: Any) -> logging.LogRecord:
        record = make(name, *values, **keywords)
        if name.partition(".")[0] == "hotbed":
            record.msg = f"rank {rank}: {record.msg}"
        return record

    logging.setLogRecordFactory(with_rank)
