# SPDX-License-Identifier: Apache-2.0
"""The picture of a conversion: where ids go, before and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hotbed.config import kind_of
from hotbed.pictures.boxes import Box, draw_panels, text_lines

if TYPE_CHECKING:
    from .report import Report, ReportEntry


def draw_conversion(report: Report) -> str:
    """Return an SVG of the model of a report before and after its conversion."""
    panels = [
        ("Before hb.auto", _boxes(report, _embedding)),
        ("After hb.auto", _boxes(report, _table)),
    ]
    return draw_panels(panels, f"{report.model} before and after its conversion")


def _boxes(report: Report, holder: Callable[[ReportEntry], Box]) -> list[Box]:
    """Return the boxes of inputs, what computes ids, what holds rows, and the dense part."""
    ids: dict[str, Box] = {}
    holders: dict[str, Box] = {}
    used: dict[str, None] = {}
    for entry in report.entries:
        box = holders.setdefault(holder(entry).name, holder(entry))
        sources: Iterable[str] = ()
        if entry.source is not None and not entry.obstacle:
            used.update(dict.fromkeys(entry.source.leaves))
            text = entry.ids if holder is _table else entry.source.text
            sources = id_boxes(text, entry.source.leaves, ids)
        box.sources = [*box.sources, *(name for name in sources if name not in box.sources)]
    others = [name for name in report.inputs if name not in used]
    inputs = [input_box(name) for name in dict.fromkeys([*report.inputs, *used])]
    dense = Box(
        "dense",
        "output",
        [
            ("name", report.model),
            ("kind", "dense part"),
            ("shape", f"{report.num_dense:,} parameters"),
        ],
        [*holders, *(input_box(name).name for name in others)],
    )
    return [*inputs, *ids.values(), *holders.values(), dense]


def input_box(name: str) -> Box:
    """Return the box of an argument of a model."""
    return Box(f"input {name}", "input", [("name", name), ("kind", "input")], [])


def id_boxes(text: str, leaves: Sequence[str], ids: dict[str, Box]) -> list[str]:
    """Return the boxes that ids come from; add one for what computes them, if there is any."""
    inputs = [input_box(name).name for name in leaves]
    if text in [repr(name) for name in leaves]:
        return inputs
    name = f"ids {text}"
    lines = [("kind", "ids")]
    lines += text_lines("shape", text)
    ids[name] = Box(name, "plain", lines, inputs, text)
    return [name]


def _embedding(entry: ReportEntry) -> Box:
    lines = [
        ("name", entry.path),
        ("kind", f"nn.{entry.kind}"),
        ("shape", f"{entry.num_rows:,} x {entry.dim}"),
    ]
    return Box(f"holder {entry.path}", "layer", lines, [])


def _table(entry: ReportEntry) -> Box:
    if entry.table is None:
        lines = [("name", entry.path), ("kind", f"nn.{entry.kind}, kept")]
        lines += text_lines("text", entry.reason)
        return Box(f"holder {entry.path}", "plain", lines, [], entry.reason)
    rule = entry.table.rule
    lines = [("name", entry.table.name)]
    if entry.table.frozen:
        lines += [("kind", "table, frozen"), ("shape", f"{entry.num_rows:,} x {entry.dim}")]
    else:
        lines += [
            ("kind", "table"),
            ("text", f"{kind_of(type(rule))}, scope {rule.scope}"),
            ("shape", f"{entry.num_rows:,} x {entry.dim}, grows"),
        ]
    return Box(f"table {entry.table.name}", "layer", lines, [])
