# SPDX-License-Identifier: Apache-2.0
"""The report of a model's lookups: which ids are mapped before the forward pass, which in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hotbed.config import kind_of
from hotbed.embedding.table import Table
from hotbed.pictures.boxes import Box, draw_panels, text_lines
from hotbed.training.auto.report import Report, ReportEntry
from hotbed.training.auto.report_boxes import add_ids, dense_box, input_box
from hotbed.training.auto.tracing.sources import IdSource
from hotbed.training.described import brief

Outcome = Literal["ahead", "step", "forward", "unused"]

WORDS = {
    "ahead": "computed and mapped while earlier batches train",
    "step": "computed and mapped in the step of the batch",
    "forward": "computed and mapped in the forward pass",
    "unused": "the forward pass looks up nothing in this table",
}


@dataclass(frozen=True)
class LookupEntry(ReportEntry):
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

    @property
    def is_moved(self) -> bool:
        return self.outcome in ("ahead", "step")

    @property
    def columns(self) -> tuple[str, str, str]:
        return f"{self.outcome:7}", self.name, WORDS[self.outcome]

    def details(self) -> Iterator[str]:
        if self.reason:
            yield f"why: {self.reason}"
        if self.source is not None:
            yield f"ids: {self.source.text}"
        if self.num_lookups > 1:
            yield f"{self.num_lookups} lookups, whose gradients are summed"
        if self.table is not None:
            described = [brief(self.table.rule)]
            for policy in (self.table.admit, *self.table.evictions):
                if getattr(policy, "is_on", False):
                    described.append(brief(policy))
            yield f"table: dim {self.table.dim}, {', '.join(described)}"


def lookup_report(
    title: str,
    model: str,
    entries: tuple[LookupEntry, ...],
    num_dense: int,
    inputs: tuple[str, ...],
    notes: tuple[str, ...],
) -> Report[LookupEntry]:
    """Return the report of the lookups of a model.

    Args:
        title: the name of what made the report.
        model: an attribute of `Report`, like the others.
        entries: one a table.
        num_dense: parameters, in numbers, that torch's optimizers learn.
        inputs: names of the tensors that the model takes.
        notes: what a user should know about the whole model, a sentence each.
    """
    num_moved = sum(entry.is_moved for entry in entries)
    headline = (
        f"{title}: the ids of {num_moved} of {len(entries)} tables leave the "
        f"forward pass of {model}; {num_dense:,} dense parameters stay"
    )
    return Report(headline, model, entries, _draw, num_dense, inputs, notes)


# --- picture --------------------------------------------------------------------------------------


def _draw(report: Report[LookupEntry]) -> str:
    """Return an SVG of the stages of a step: ahead of the forward pass, and the forward pass."""
    panels = []
    if report.moved:
        panels.append(("Before the forward pass", _stage(report.moved)))
    panels.append(("The forward pass", _forward(report)))
    return draw_panels(panels, f"the stages of a step of {report.model}")


def _stage(entries: tuple[LookupEntry, ...]) -> list[Box]:
    """Return the boxes of what is computed and mapped before the forward pass."""
    inputs: dict[str, Box] = {}
    ids: dict[str, Box] = {}
    tables = []
    for entry in entries:
        sources: list[str] = []
        if entry.source is not None:
            inputs.update({name: input_box(name) for name in entry.source.leaves})
            sources = add_ids(ids, entry.source, entry.source.text)
        tables.append(_table(entry, sources))
    return [*inputs.values(), *ids.values(), *tables]


def _forward(report: Report[LookupEntry]) -> list[Box]:
    """Return the boxes of the forward pass: rows, lookups that stay in it, and the dense part."""
    used = {name for entry in report.moved if entry.source for name in entry.source.leaves}
    boxes = [input_box(name) for name in report.inputs if name not in used]
    for entry in report.entries:
        if entry.outcome == "forward":
            boxes.append(_table(entry, []))
        elif entry.is_moved:
            boxes.append(_rows(entry))
    sources = [box.name for box in boxes]
    return [*boxes, dense_box(report.model, report.num_dense, sources)]


def _rows(entry: LookupEntry) -> Box:
    lines = [("name", entry.name), ("kind", "rows of the batch")]
    return Box(f"rows {entry.name}", "plain", lines, [])


def _table(entry: LookupEntry, sources: list[str]) -> Box:
    lines = [("name", entry.name), ("kind", "table")]
    if entry.table is not None:
        rule = kind_of(type(entry.table.rule))
        lines.append(("text", f"{rule}, dim {entry.table.dim}"))
    lines += text_lines("text", entry.reason)
    return Box(f"table {entry.name}", "layer", lines, sources, entry.reason)
