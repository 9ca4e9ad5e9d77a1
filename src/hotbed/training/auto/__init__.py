# SPDX-License-Identifier: Apache-2.0
"""Ordinary torch models whose embeddings become tables: `hb.auto`."""

from .binding import bind
from .convert import auto
from .network import Converted, converted
from .plain import plain_state_dict
from .report import Report, ReportEntry
from .signature import Leaf, Signature
from .trace import Call, Findings, IdGraph, inspect
from .tracing.sources import IdSource

__all__ = [
    "Call",
    "Converted",
    "ReportEntry",
    "Findings",
    "IdGraph",
    "Leaf",
    "Report",
    "Signature",
    "IdSource",
    "auto",
    "bind",
    "converted",
    "inspect",
    "plain_state_dict",
]
