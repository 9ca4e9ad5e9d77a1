# SPDX-License-Identifier: Apache-2.0
"""Workflow: what a preparation fitted, read from its output folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hotbed.connectors.prepared import read_workflow
from hotbed.data.schema import Schema


@dataclass(frozen=True)
class Workflow:
    """The fitted workflow of a preparation.

    Args:
        path: the output folder of the preparation.

    Raises:
        DataError: the folder does not hold a whole preparation.

    Example: `hb.prepare.Workflow("prepared").sizes`
    """

    path: str | Path

    @property
    def schema(self) -> Schema:
        """The schema of the prepared files; its `raw` is that of raw rows."""
        return Schema.of_prepared(self.path)

    @property
    def raw(self) -> Schema:
        """The fitted schema over raw rows."""
        return Schema.of_prepared(self.path, "raw")

    @property
    def sizes(self) -> Mapping[str, int]:
        """For each id feature whose ids are 0 .. size - 1, the size."""
        sizes: Mapping[str, int] = self._values["sizes"]
        return sizes

    @property
    def counts(self) -> Mapping[str, Any]:
        """Rows by part, and rows that were left out by reason."""
        counts: Mapping[str, Any] = self._values["counts"]
        return counts

    @cached_property
    def _values(self) -> Mapping[str, Any]:
        return read_workflow(self.path)
