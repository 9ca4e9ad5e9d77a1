# SPDX-License-Identifier: Apache-2.0
"""The report of a model's lookups: which ids are mapped before the forward pass, which in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotbed.embedding.table import Table
from hotbed.files import new_file
from hotbed.training.auto.report import wrapped
from hotbed.training.auto.tracing.sources import IdSource
from hotbed.training.described import brief

from .picture import draw_stages

Outcome = Literal["ahead", "step", "forward", "unused"]

WORDS = {
    "ahead": "computed and mapped while earlier batches train",
    "step": "computed and mapped in the step of the batch",
    "forward": "computed and mapped in the forward pass",
    "unused": "the forward pass looks up nothing in this table",
}


@dataclass(frozen=True)
class LookupEntry:
    """What became of the lookups of one table.

    Attributes:
        name: of the table.
        outcome: when its ids are computed and mapped to rows: "ahead" = while earlier batches
            train; "step" = right before the forward pass; "forward" = in the forward pass;
            "unused" = never.
        reason: why not ahead; "" if ahead.
        table: holds the rows.
        num_lookups: lookups of one forward pass, as far as a trace shows them.
        source: where the ids come from; None = the trace did not see its lookups.
    """

    name: str
    outcome: Outcome
    reason: str = ""
    table: Table | None = None
    num_lookups: int = 0
    source: IdSource | None = None


@dataclass(frozen=True)
class LookupReport:
    """What became of the lookups of a model.

    `print(report)` shows it, `report.picture(path)` draws it.

    Attributes:
        title: the name of what made the report.
        model: the name of the model's class.
        entries: one a table.
        num_dense: parameters, in numbers, that torch's optimizers learn.
        inputs: names of the tensors that the model takes.
        notes: what a user should know about the whole model, a sentence each.
    """

    title: str
    model: str
    entries: tuple[LookupEntry, ...]
    num_dense: int = 0
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def moved(self) -> tuple[LookupEntry, ...]:
        """Return the entries whose ids are computed before the forward pass."""
        return tuple(entry for entry in self.entries if entry.outcome in ("ahead", "step"))

    @property
    def kept(self) -> tuple[LookupEntry, ...]:
        """Return the entries whose ids are computed in the forward pass, or never."""
        return tuple(entry for entry in self.entries if entry.outcome in ("forward", "unused"))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def picture(self, path: str | Path | None = None) -> str:
        """Draw the stages of a step, as an SVG that follows the reader's light or dark mode.

        Args:
            path: of the file to write; None = none.

        Returns:
            The SVG.

        Example: `report.picture("model.svg")`
        """
        svg = draw_stages(self)
        if path is not None:
            with new_file(Path(path)) as file:
                file.write(svg.encode())
        return svg

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.title}: the ids of {len(self.moved)} of {len(self.entries)} tables leave the "
            f"forward pass of {self.model}; {self.num_dense:,} dense parameters stay"
        )
        width = max([len(entry.name) for entry in self.entries], default=0)
        for entry in self.entries:
            yield ""
            yield f"{entry.outcome:8} {entry.name:{width}}  {WORDS[entry.outcome]}"
            for words in _words(entry):
                yield from wrapped(words, 11 + width)
        for note in self.notes:
            yield ""
            yield from wrapped(note, 0)


def _words(entry: LookupEntry) -> Iterator[str]:
    """Yield what the report says of a table, a line each."""
    if entry.reason:
        yield f"why: {entry.reason}"
    if entry.source is not None:
        yield f"ids: {entry.source.text}"
    if entry.num_lookups > 1:
        yield f"{entry.num_lookups} lookups, whose gradients are summed"
    if entry.table is not None:
        described = [brief(entry.table.rule)]
        for policy in (entry.table.admit, *entry.table.evictions):
            if getattr(policy, "is_on", False):
                described.append(brief(policy))
        yield f"table: dim {entry.table.dim}, {', '.join(described)}"
