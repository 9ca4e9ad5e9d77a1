# SPDX-License-Identifier: Apache-2.0
"""Draw boxes that take from each other as an SVG, in layers from top to bottom.

The layout is that of Sugiyama et al., "Methods for Visual Understanding of Hierarchical System
Structures", 1981: ranks by longest paths, places on the way of long lines, orders with few
crossings, then positions near the neighbours.
"""

from __future__ import annotations

import bisect
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_LINE = 16.0  # height of a line of text
_COLUMNS = 34  # of a text in a box, in characters
_MOST_LINES = 3
_MARGIN = 10.0  # between the text and the border of a box
_WIDTHS = {"name": 8.4, "kind": 7.5, "text": 6.3, "shape": 6.7}  # of a character, by style
_LEAST_WIDTH = 96.0
_LANE = 14.0  # width of a line that passes a rank
_GAP = 26.0  # between neighbours of a rank
_RANK_GAP = 46.0
_TITLE = 40.0  # height of the title of a panel
_SWEEPS = 12
_STYLE = """
.graph { --page: #fff;
  --box: #fff; --edge: #98a2b3; --text: #1d2430; --faint: #667085; --rim: #cfd4dc;
  --input: #2f6fed; --layer: #0c9a6d; --plain: #98a2b3; --output: #e8590c;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
@media (prefers-color-scheme: dark) { .graph { --page: #10151d;
  --box: #181e28; --edge: #667085; --text: #e6e9ef;
  --faint: #98a2b3; --rim: #2c3442; --input: #6ea0ff; --layer: #3ecf9b; --output: #ff8f4d } }
.graph rect { fill: var(--box); stroke: var(--rim) }
.graph rect.page { fill: var(--page); stroke: none }
.graph rect.bar { stroke: none }
.graph rect.input { fill: var(--input) } .graph rect.layer { fill: var(--layer) }
.graph rect.plain { fill: var(--plain) } .graph rect.output { fill: var(--output) }
.graph path { fill: none; stroke: var(--edge); stroke-width: 1.4 }
.graph path.head { fill: var(--edge); stroke: none }
.graph text.title { fill: var(--text); font-size: 16px; font-weight: 600 }
.graph text.name { fill: var(--text); font-size: 13px; font-weight: 600 }
.graph text.kind { fill: var(--text); font-size: 12px }
.graph text.text { fill: var(--faint); font-size: 11px }
.graph text.shape { fill: var(--faint); font: 11px ui-monospace, Menlo, Consolas, monospace }
"""


@dataclass
class Box:
    """A box of the picture.

    Attributes:
        name: unique.
        kind: its colour: input, layer (with weights), plain (without) or output.
        lines: style (name, kind, text or shape) and text of each line.
        sources: names of the boxes that it takes from.
        title: shown at the pointer.
    """

    name: str
    kind: str
    lines: Sequence[tuple[str, str]]
    sources: Sequence[str]
    title: str = ""


def draw(boxes: Sequence[Box], label: str) -> str:
    """Return an SVG of the boxes; each source must be one of them, without cycles.

    Args:
        boxes: in an order that is kept where it does not matter.
        label: what the picture shows, for readers who cannot see it.
    """
    shapes, width, height = _shapes(boxes)
    return _svg(shapes, width, height, label)


def draw_panels(panels: Sequence[tuple[str, Sequence[Box]]], label: str) -> str:
    """Return an SVG of several pictures, each below its title, on a page of its own.

    Args:
        panels: titles and boxes, from top to bottom.
        label: what the pictures show, for readers who cannot see them.
    """
    parts = []
    width = 0.0
    height = 0.0
    for title, boxes in panels:
        shapes, own_width, own_height = _shapes(boxes)
        top = height + _TITLE
        parts.append(
            f"<text class='title' x='{_MARGIN}' y='{top - 10:.0f}'>{html.escape(title)}</text>"
            f"<g transform='translate(0 {top:.0f})'>{shapes}</g>"
        )
        width = max(width, own_width)
        height = top + own_height
    page = "<rect class='page' width='100%' height='100%'/>"
    return _svg(page + "".join(parts), width, height, label)


def _shapes(boxes: Sequence[Box]) -> tuple[str, float, float]:
    """Return the shapes of the boxes and their lines, and the width and height that they take."""
    places = placed(boxes)
    width = max(place.x + place.width / 2 for place in places) + _MARGIN
    height = max(place.y + place.height for place in places) + _MARGIN
    shapes = []
    for place in places:
        if place.box is not None:
            shapes += _lines_to(place)
    for place in places:
        if place.box is not None:
            shapes.append(_box(place, place.box))
    return "".join(shapes), width, height


def _svg(shapes: str, width: float, height: float, label: str) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' class='graph' role='img' "
        f"aria-label='{html.escape(label, quote=True)}' viewBox='0 0 {width:.0f} {height:.0f}' "
        f"style='width: 100%; max-width: {width:.0f}px; height: auto'>"
        f"<style>{_STYLE}</style>{shapes}</svg>\n"
    )


@dataclass(eq=False)
class _Spot:
    """A box in the layout, or a point where a long line passes a rank (`box` is None)."""

    box: Box | None
    rank: int
    width: float
    height: float
    above: list[_Spot] = field(default_factory=list)
    below: list[_Spot] = field(default_factory=list)
    x: float = 0.0  # of the centre
    y: float = 0.0  # of the upper edge


# --- layout ---------------------------------------------------------------------------------------


def placed(boxes: Sequence[Box]) -> list[_Spot]:
    """Return all boxes and points of lines with their positions."""
    ranks = _ranks(boxes)
    places = {box.name: _place(box, ranks[box.name]) for box in boxes}
    rows: list[list[_Spot]] = [[] for _ in range(max(ranks.values()) + 1)]
    for place in places.values():
        rows[place.rank].append(place)
    lanes: dict[tuple[str, int], _Spot] = {}  # one line for all that take from a box
    for box in boxes:
        for name in dict.fromkeys(box.sources):
            end = places[box.name]
            upper = places[name]
            for rank in range(upper.rank + 1, end.rank):
                lane = lanes.get((name, rank))
                if lane is None:
                    lane = _Spot(None, rank, _LANE, 0.0)
                    lanes[name, rank] = lane
                    rows[rank].append(lane)
                    _connect(upper, lane)
                upper = lane
            _connect(upper, end)
    _order(rows)
    _set_x(rows)
    _set_y(rows)
    return [place for row in rows for place in row]


def _place(box: Box, rank: int) -> _Spot:
    widths = [_WIDTHS[style] * len(text) for style, text in box.lines]
    width = max(_LEAST_WIDTH, *widths) + 2 * _MARGIN
    height = _LINE * len(box.lines) + 1.4 * _MARGIN
    return _Spot(box, rank, width, height)


def _connect(upper: _Spot, lower: _Spot) -> None:
    upper.below.append(lower)
    lower.above.append(upper)


def _ranks(boxes: Sequence[Box]) -> dict[str, int]:
    """Return the rank of each box: below all its sources; boxes without sources as low as fits."""
    by_name = {box.name: box for box in boxes}
    ranks: dict[str, int] = {}
    waiting = list(by_name)
    while waiting:
        name = waiting.pop()
        sources = by_name[name].sources
        missing = [source for source in sources if source not in ranks]
        if missing:
            waiting += [name, *missing]
        else:
            ranks[name] = 1 + max((ranks[source] for source in sources), default=-1)
    takers: dict[str, list[int]] = {}
    for box in boxes:
        for source in box.sources:
            takers.setdefault(source, []).append(ranks[box.name])
    for box in boxes:
        if not box.sources and box.name in takers:
            ranks[box.name] = min(takers[box.name]) - 1
    return ranks


def _order(rows: list[list[_Spot]]) -> None:
    """Order each row by the mean place of its neighbours; keep the order with least crossings."""
    best = [list(row) for row in rows]
    fewest = _crossings(rows)
    for sweep in range(_SWEEPS):
        downward = sweep % 2 == 0
        for row, fixed in _pairs(rows, downward=downward):
            numbers = {id(place): float(number) for number, place in enumerate(fixed)}
            means: dict[int, float] = {}
            for number, place in enumerate(row):
                near = place.above if downward else place.below
                near_numbers = [numbers[id(other)] for other in near]
                means[id(place)] = _mean(near_numbers, number)
            row.sort(key=lambda place: means[id(place)])
        crossings = _crossings(rows)
        if crossings < fewest:
            fewest = crossings
            best = [list(row) for row in rows]
    rows[:] = best


def _pairs(rows: Sequence[list[_Spot]], *, downward: bool) -> list[tuple[list[_Spot], list[_Spot]]]:
    """Return each row with its neighbour, in the order of a sweep."""
    if downward:
        return [(row, above) for above, row in pairwise(rows)]
    return [(row, below) for row, below in reversed(list(pairwise(rows)))]


def _mean(values: Sequence[float], default: float) -> float:
    if not values:
        return default
    return sum(values) / len(values)


def _crossings(rows: Sequence[Sequence[_Spot]]) -> int:
    """Return how many pairs of lines cross."""
    count = 0
    for upper, lower in pairwise(rows):
        numbers = {id(place): number for number, place in enumerate(lower)}
        lines = []
        for number, place in enumerate(upper):
            lines += [(number, numbers[id(other)]) for other in place.below]
        ends: list[int] = []  # of the lines that start further left, sorted
        for _, end in sorted(lines):
            count += len(ends) - bisect.bisect_right(ends, end)
            bisect.insort(ends, end)
    return count


def _set_x(rows: Sequence[list[_Spot]]) -> None:
    """Move the places of each row as near to their neighbours as their order and widths let."""
    for row in rows:
        _spread(row, [0.0] * len(row))
    for sweep in range(_SWEEPS):
        downward = sweep % 2 == 0
        for row, _ in _pairs(rows, downward=downward):
            wanted = []
            for place in row:
                near = place.above if downward else place.below
                wanted.append(_mean([other.x for other in near], place.x))
            _spread(row, wanted)
    left = min(place.x - place.width / 2 for row in rows for place in row)
    for row in rows:
        for place in row:
            place.x += _MARGIN - left


def _spread(row: Sequence[_Spot], wanted: Sequence[float]) -> None:
    """Set the centres of a row by least squares to the wanted ones, without overlaps.

    With the distances taken off, centres must not descend: neighbours that would are pooled.
    """
    shifts = [0.0]
    for left, right in pairwise(row):
        shifts.append(shifts[-1] + (left.width + right.width) / 2 + _GAP)
    pools: list[tuple[float, int]] = []  # mean and size
    for centre, shift in zip(wanted, shifts, strict=True):
        mean = centre - shift
        size = 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean = (mean * size + before * count) / (size + count)
            size += count
        pools.append((mean, size))
    means = [mean for mean, size in pools for _ in range(size)]
    for place, mean, shift in zip(row, means, shifts, strict=True):
        place.x = mean + shift


def _set_y(rows: Sequence[Sequence[_Spot]]) -> None:
    y = _MARGIN
    for row in rows:
        height = max(place.height for place in row)
        for place in row:
            place.y = y
            if place.box is None:
                place.height = height
            else:
                place.y += (height - place.height) / 2
        y += height + _RANK_GAP


# --- shapes ---------------------------------------------------------------------------------------


def _lines_to(place: _Spot) -> list[str]:
    """Return the lines that end at a box, from their sources; they spread over its upper edge."""
    shapes = []
    ends = sorted(place.above, key=lambda other: other.x)
    for number, upper in enumerate(ends):
        share = (number + 1) / (len(ends) + 1) - 0.5
        x = place.x + share * min(place.width - 2 * _MARGIN, 40.0 * len(ends))
        points = [(x, place.y - 6)]
        while True:
            points.append((upper.x, upper.y + upper.height))
            if upper.box is not None:
                break
            points.append((upper.x, upper.y))
            upper = upper.above[0]
        shapes.append(_line(points[::-1]))
        shapes.append(f"<path class='head' d='M{x - 4:.1f} {place.y - 8:.1f}h8l-4 8z'/>")
    return shapes


def _line(points: Sequence[tuple[float, float]]) -> str:
    """Return a line through points: curves between ranks, straight on across them."""
    x, y = points[0]
    text = f"M{x:.1f} {y:.1f}"
    for number, (next_x, next_y) in enumerate(points[1:]):
        if number % 2:
            text += f"V{next_y:.1f}"
        else:
            middle = (y + next_y) / 2
            text += f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
        x = next_x
        y = next_y
    return f"<path d='{text}'/>"


def _box(place: _Spot, box: Box) -> str:
    left = place.x - place.width / 2
    shapes = [
        f"<g><title>{html.escape(box.title)}</title>",
        f"<rect x='{left:.1f}' y='{place.y:.1f}' width='{place.width:.1f}' "
        f"height='{place.height:.1f}' rx='6'/>",
        f"<rect class='bar {box.kind}' x='{left:.1f}' y='{place.y:.1f}' width='4' "
        f"height='{place.height:.1f}' rx='2'/>",
    ]
    for number, (style, text) in enumerate(box.lines):
        y = place.y + 0.7 * _MARGIN + _LINE * (number + 0.75)
        where = f"x='{left + _MARGIN + 2:.1f}' y='{y:.1f}'"
        shapes.append(f"<text class='{style}' {where}>{html.escape(text)}</text>")
    return "".join([*shapes, "</g>"])


def text_lines(style: str, text: str) -> list[tuple[str, str]]:
    """Return the lines of a text in a box: as many words as fit on a few lines."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= _COLUMNS:
            lines[-1] += f" {word}"
        else:
            lines.append(word[: _COLUMNS - 1] + "…" if len(word) > _COLUMNS else word)
    if len(lines) > _MOST_LINES:
        lines = lines[:_MOST_LINES]
        lines[-1] = lines[-1][: _COLUMNS - 2] + " …"
    return [(style, line) for line in lines]
