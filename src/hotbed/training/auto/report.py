# SPDX-License-Identifier: Apache-2.0
"""The report of a conversion: what became of every embedding of a model, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotbed.embedding.table import Table
from hotbed.files import new_file
from hotbed.training.described import brief

from .picture import draw_conversion
from .tracing.sources import IdSource

Outcome = Literal["moved", "kept"]

_WIDTH = 100  # of the printed report, in characters


@dataclass(frozen=True)
class ReportEntry:
    """What became of one embedding.

    Attributes:
        path: the module's path in the model.
        kind: "Embedding" or "EmbeddingBag".
        outcome: "moved" = a table holds its rows; "kept" = it stays as it was.
        reason: why it was kept; "" if it moved.
        table: the table that holds its rows; None if it was kept.
        others: paths of the modules that share its weight.
        num_rows: of its weight.
        dim: of a row.
        source: where its ids come from; None = the trace did not see its lookups.
        obstacle: on what its ids depend besides the batch; "" if they depend on the batch alone.
        is_unbounded: whether the last `% bins` of its ids was dropped.
    """

    path: str
    kind: str
    outcome: Outcome
    reason: str = ""
    table: Table | None = None
    others: tuple[str, ...] = ()
    num_rows: int = 0
    dim: int = 0
    source: IdSource | None = None
    obstacle: str = ""
    is_unbounded: bool = False

    @property
    def ids(self) -> str:
        """Return where its ids come from, in words."""
        if self.obstacle:
            return f"computed in the forward pass: they depend on {self.obstacle}"
        if self.source is None:
            return "not known before a trace"
        if self.is_unbounded:
            return f"{self.source.text}, without the last % {self.source.bins:,}"
        return self.source.text

    @property
    def offer(self) -> str:
        """Return how the table can grow beyond the bins of its ids; "" if there are none."""
        bins = None if self.source is None else self.source.bins
        if bins is None or self.obstacle or self.outcome == "kept" or self.is_unbounded:
            return ""
        return f"unbounded=[{self.path!r}] drops % {bins:,}: then the table grows with new ids"


@dataclass(frozen=True)
class Report:
    """What became of every embedding of `named_modules()`.

    `print(report)` shows it, `report.picture(path)` draws it.

    Attributes:
        entries: one an embedding, in the order of the model.
        notes: what a user should know about the whole model, a sentence each.
        model: the name of the model's class.
        num_dense: parameters, in numbers, that stay in the torch optimizer.
        inputs: names of the tensors that the model takes; empty before the first batch.
    """

    entries: tuple[ReportEntry, ...]
    notes: tuple[str, ...] = ()
    model: str = "model"
    num_dense: int = 0
    inputs: tuple[str, ...] = ()

    @property
    def moved(self) -> tuple[ReportEntry, ...]:
        """Return the entries of the embeddings that became tables."""
        return tuple(entry for entry in self.entries if entry.outcome == "moved")

    @property
    def kept(self) -> tuple[ReportEntry, ...]:
        """Return the entries of the embeddings that stayed as they were."""
        return tuple(entry for entry in self.entries if entry.outcome == "kept")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def picture(self, path: str | Path | None = None) -> str:
        """Draw the model before and after, as an SVG that follows the reader's light or dark mode.

        Args:
            path: of the file to write; None = none.

        Returns:
            The SVG.

        Example: `report.picture("model.svg")`
        """
        svg = draw_conversion(self)
        if path is not None:
            with new_file(Path(path)) as file:
                file.write(svg.encode())
        return svg

    def _lines(self) -> Iterator[str]:
        yield (
            f"hb.auto: {len(self.moved)} of {len(self.entries)} embeddings of {self.model} are "
            f"tables now; {self.num_dense:,} dense parameters stay as they are"
        )
        width = max([len(entry.path) for entry in self.entries], default=0)
        for entry in self.entries:
            yield ""
            size = f"{entry.num_rows:,} x {entry.dim}"
            yield f"{entry.outcome:6} {entry.path:{width}}  {entry.kind}, {size}"
            for words in _words(entry):
                yield from wrapped(words, 9 + width)
        for note in self.notes:
            yield ""
            yield from wrapped(note, 0)


def _words(entry: ReportEntry) -> Iterator[str]:
    """Yield what the report says of an embedding, a line each."""
    if entry.table is None:
        yield entry.reason
        return
    policies = [entry.table.admit, *entry.table.evictions]
    learns = "frozen" if entry.table.frozen else brief(entry.table.rule)
    described = [learns, *(brief(policy) for policy in policies if policy)]
    yield f"table {entry.table.name!r}: {', '.join(described)}"
    if entry.others:
        yield f"shares its rows with {', '.join(entry.others)}"
    yield f"ids: {entry.ids}"
    if entry.offer:
        yield entry.offer


def wrapped(text: str, indent: int) -> list[str]:
    """Return the lines of a text of a report, behind a margin."""
    margin = " " * indent
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
