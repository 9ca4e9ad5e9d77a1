# SPDX-License-Identifier: Apache-2.0
"""The rank in every log line of Hotbed, and in every warning."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any


@functools.cache  # once a process
def name_rank_in_logs(rank: int) -> None:
    """Let each message of a logger of Hotbed begin with the rank, as in "rank 1: ".

    Warnings do, too: all ranks write to one terminal.
    """
    make = logging.getLogRecordFactory()

    def with_rank(name: str, *values: Any, **keywords: Any) -> logging.LogRecord:
        record = make(name, *values, **keywords)
        if name.partition(".")[0] == "hotbed":
            record.msg = f"rank {rank}: {record.msg}"
        return record

    logging.setLogRecordFactory(with_rank)
    plain = warnings.formatwarning

    def warning_with_rank(*values: Any, **keywords: Any) -> str:
        return f"rank {rank}: {plain(*values, **keywords)}"

    warnings.formatwarning = warning_with_rank
