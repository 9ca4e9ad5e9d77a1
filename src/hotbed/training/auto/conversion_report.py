# SPDX-License-Identifier: Apache-2.0
"""The report of `hb.auto`: what became of every embedding, and where ids go before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hotbed.config import kind_of
from hotbed.embedding.table import Table
from hotbed.pictures.boxes import Box, draw_panels, text_lines
from hotbed.training.described import brief

from .report import Report, ReportEntry
from .report_boxes import add_ids, dense_box, input_box
from .tracing.sources import IdSource

Outcome = Literal["moved", "kept"]


@dataclass(frozen=True)
class EmbeddingEntry(ReportEntry):
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
    def is_moved(self) -> bool:
        return self.outcome == "moved"

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

    @property
    def columns(self) -> tuple[str, str, str]:
        return f"{self.outcome:5}", self.path, f"{self.kind}, {self.num_rows:,} x {self.dim}"

    def details(self) -> Iterator[str]:
        if self.table is None:
            yield self.reason
            return
        policies = [self.table.admit, *self.table.evictions]
        learns = "frozen" if self.table.frozen else brief(self.table.rule)
        described = [learns, *(brief(policy) for policy in policies if policy)]
        yield f"table {self.table.name!r}: {', '.join(described)}"
        if self.others:
            yield f"shares its rows with {', '.join(self.others)}"
        yield f"ids: {self.ids}"
        if self.offer:
            yield self.offer


def conversion_report(
    model: str,
    entries: tuple[EmbeddingEntry, ...],
    num_dense: int,
    inputs: tuple[str, ...],
    notes: tuple[str, ...],
) -> Report[EmbeddingEntry]:
    """Return the report of a conversion; the arguments are attributes of `Report`."""
    num_moved = sum(entry.is_moved for entry in entries)
    headline = (
        f"hb.auto: {num_moved} of {len(entries)} embeddings of {model} are "
        f"tables now; {num_dense:,} dense parameters stay as they are"
    )
    return Report(headline, model, entries, _draw, num_dense, inputs, notes)


# --- picture --------------------------------------------------------------------------------------


class _Holder(NamedTuple):
    """What holds the rows of an embedding, and the text of the ids that it gets."""

    box: Box
    ids: str


def _draw(report: Report[EmbeddingEntry]) -> str:
    """Return an SVG of the model before and after its conversion."""
    panels = [
        ("Before hb.auto", _boxes(report, _before)),
        ("After hb.auto", _boxes(report, _after)),
    ]
    return draw_panels(panels, f"{report.model} before and after its conversion")


def _boxes(
    report: Report[EmbeddingEntry], holder_of: Callable[[EmbeddingEntry], _Holder]
) -> list[Box]:
    """Return the boxes of inputs, what computes ids, what holds rows, and the dense part."""
    ids: dict[str, Box] = {}
    holders: dict[str, Box] = {}
    used: dict[str, None] = {}
    for entry in report.entries:
        holder = holder_of(entry)
        box = holders.setdefault(holder.box.name, holder.box)
        if entry.source is not None and not entry.obstacle:
            used.update(dict.fromkeys(entry.source.leaves))
            sources = add_ids(ids, entry.source, holder.ids)
            box.sources = list(dict.fromkeys([*box.sources, *sources]))
    others = [input_box(name).name for name in report.inputs if name not in used]
    inputs = [input_box(name) for name in dict.fromkeys([*report.inputs, *used])]
    dense = dense_box(report.model, report.num_dense, [*holders, *others])
    return [*inputs, *ids.values(), *holders.values(), dense]


def _before(entry: EmbeddingEntry) -> _Holder:
    shape = f"{entry.num_rows:,} x {entry.dim}"
    lines = [("name", entry.path), ("kind", f"nn.{entry.kind}"), ("shape", shape)]
    ids = "" if entry.source is None else entry.source.text
    return _Holder(Box(f"holder {entry.path}", "layer", lines, []), ids)


def _after(entry: EmbeddingEntry) -> _Holder:
    if entry.table is None:
        lines = [("name", entry.path), ("kind", f"nn.{entry.kind}, kept")]
        lines += text_lines("text", entry.reason)
        return _Holder(Box(f"holder {entry.path}", "plain", lines, [], entry.reason), entry.ids)
    shape = f"{entry.num_rows:,} x {entry.dim}"
    lines = [("name", entry.table.name)]
    if entry.table.frozen:
        lines += [("kind", "table, frozen"), ("shape", shape)]
    else:
        rule = entry.table.rule
        rule_text = f"{kind_of(type(rule))}, scope {rule.scope}"
        lines += [("kind", "table"), ("text", rule_text), ("shape", f"{shape}, grows")]
    return _Holder(Box(f"table {entry.table.name}", "layer", lines, []), entry.ids)
