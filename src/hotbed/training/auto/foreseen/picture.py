# SPDX-License-Identifier: Apache-2.0
"""The picture of a step: what happens before the forward pass, and what in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotbed.config import kind_of
from hotbed.pictures.boxes import Box, draw_panels, text_lines
from hotbed.training.auto.picture import id_boxes, input_box

if TYPE_CHECKING:
    from .report import LookupEntry, LookupReport


def draw_stages(report: LookupReport) -> str:
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
            sources = id_boxes(entry.source.text, entry.source.leaves, ids)
        tables.append(_table(entry, sources))
    return [*inputs.values(), *ids.values(), *tables]


def _forward(report: LookupReport) -> list[Box]:
    """Return the boxes of the forward pass: rows, lookups that stay in it, and the dense part."""
    used = {name for entry in report.moved if entry.source for name in entry.source.leaves}
    boxes = [input_box(name) for name in report.inputs if name not in used]
    sources = [box.name for box in boxes]
    for entry in report.entries:
        if entry.outcome == "unused":
            continue
        box = _rows(entry)
        if entry.outcome == "forward":
            box = _table(entry, [])
        boxes.append(box)
        sources.append(box.name)
    lines = [
        ("name", report.model),
        ("kind", "dense part"),
        ("shape", f"{report.num_dense:,} parameters"),
    ]
    return [*boxes, Box("dense", "output", lines, sources)]


def _rows(entry: LookupEntry) -> Box:
    lines = [("name", entry.name), ("kind", "rows of the batch")]
    return Box(f"rows {entry.name}", "plain", lines, [])


def _table(entry: LookupEntry, sources: list[str]) -> Box:
    lines = [("name", entry.name), ("kind", "table")]
    if entry.table is not None:
        rule = kind_of(type(entry.table.rule))
        lines += [("text", f"{rule}, dim {entry.table.dim}")]
    lines += text_lines("text", entry.reason)
    return Box(f"table {entry.name}", "layer", lines, sources, entry.reason)
