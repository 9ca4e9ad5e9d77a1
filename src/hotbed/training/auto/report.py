# SPDX-License-Identifier: Apache-2.0
"""The report of a conversion: what became of every embedding of a model, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotbed.embedding.table import Table

Outcome = Literal["moved", "kept"]


@dataclass(frozen=True)
class Entry:
    """What became of one embedding.

    Attributes:
        path: the module's path in the model.
        kind: "Embedding" or "EmbeddingBag".
        outcome: "moved" = a table holds its rows; "kept" = it stays as it was.
        reason: why it was kept; "" if it moved.
        table: the table that holds its rows; None if it was kept.
        others: paths of the modules that share its weight.
    """

    path: str
    kind: str
    outcome: Outcome
    reason: str = ""
    table: Table | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What became of every embedding of `named_modules()`.

    Attributes:
        entries: one an embedding, in the order of the model.
        notes: what a user should know about the whole model, a sentence each.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    @property
    def moved(self) -> tuple[Entry, ...]:
        """Return the entries of the embeddings that became tables."""
        return tuple(entry for entry in self.entries if entry.outcome == "moved")

    @property
    def kept(self) -> tuple[Entry, ...]:
        """Return the entries of the embeddings that stayed as they were."""
        return tuple(entry for entry in self.entries if entry.outcome == "kept")
