# SPDX-License-Identifier: Apache-2.0
"""Write the picture and the table of docs/architecture.md from the tree.

    python scripts/architecture.py

The order of the folders comes from tests/test_architecture.py, their words from the docstrings of
the packages, and the stations of an event from the table in the page.
"""

from __future__ import annotations

import ast
import html
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/hotbed"
PAGE = ROOT / "docs/architecture.md"
PICTURE = ROOT / "docs/architecture.svg"
RULES = ROOT / "tests/test_architecture.py"

WIDTH = 1080
MARGIN = 16
FLOOR_WIDTH = 500
STATIONS = MARGIN + FLOOR_WIDTH + 40  # where the circles of the stations lie
TOP = 44
LINE = 17
COLUMNS = 74  # of the words of a folder
STATION = 38  # height of one
GAP = 6  # between floors
STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
.page { fill: #fff } .floor { fill: #f6f8fa; stroke: #d0d7de }
.head, .name { fill: #1d2430; font-weight: 600; font-size: 14px }
.words { fill: #1d2430; font-size: 12px } .small { fill: #57606a; font-size: 11px }
.file { fill: #57606a; font: 11px ui-monospace, Menlo, Consolas, monospace }
.path { stroke: #2f6fed; stroke-width: 2 } .circle { fill: #2f6fed }
.number { fill: #fff; font-size: 11px; font-weight: 600; text-anchor: middle }
.beside { fill: #fff; stroke: #98a2b3; stroke-width: 1.5 }
"""


@dataclass(frozen=True)
class Floor:
    """A folder of the package, what it is, and the folders in it."""

    name: str
    words: str
    folders: tuple[str, ...]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Style and text of each line."""
        lines = [("name", self.name)]
        lines += [("words", line) for line in textwrap.wrap(self.words, COLUMNS)]
        if self.folders:
            lines.append(("file", "  ".join(f"{name}/" for name in self.folders)))
        return lines


@dataclass(frozen=True)
class Station:
    """A step of an event on its way; `number` is empty beside the way."""

    number: str
    floor: str
    words: str
    files: tuple[str, ...]


def listed(name: str) -> list[str]:
    """Return the names in a list or a set of the house rules."""
    for node in ast.parse(RULES.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            names = ast.literal_eval(node.value)
            return sorted(names) if isinstance(names, set) else names
    raise SystemExit(f"{RULES}: expected an assignment to {name}, got none. Correct this script.")


def floors() -> Iterator[Floor]:
    """Yield the folders in the order of imports."""
    for name in listed("FOLDERS"):
        folder = SOURCE / name
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        folders = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
        yield Floor(name, docstring.split("\n")[0], tuple(folders))


def stations(page: str) -> list[Station]:
    """Return the rows of the table in the page: number, folder, what happens, files."""
    rows = re.findall(r"^\| (\d*) \| `(\w+)` \| (.+?) \| (`.+`) \|$", page, re.M)
    return [
        Station(number, floor, words, tuple(re.findall(r"`([^`]+)`", files)))
        for number, floor, words, files in rows
    ]


def table() -> str:
    """Return the folders as a table."""
    lines = ["| folder | what it is | in it |", "|---|---|---|"]
    for floor in floors():
        inside = ", ".join(f"`{name}/`" for name in floor.folders)
        lines.append(f"| `{floor.name}/` | {floor.words} | {inside} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the table of today's folders."""
    before, begin, rest = text.partition("<!-- scripts/architecture.py writes this table -->\n")
    _, end, after = rest.partition("<!-- end of it -->\n")
    return f"{before}{begin}{table()}\n{end}{after}"


def picture(text: str) -> str:
    """Return an SVG of the folders, beside the stations in the page."""
    shapes: list[str] = []
    circles: list[tuple[str, float]] = []
    y = float(TOP)
    for floor in floors():
        here = [station for station in stations(text) if station.floor == floor.name]
        height = max(LINE * len(floor.lines), STATION * len(here)) + 10
        shapes += drawn_floor(floor, y, height)
        for row, station in enumerate(here):
            middle = y + 4 + STATION * (row + 0.5)
            circles.append((station.number, middle))
            shapes += drawn_words(station, middle)
        y += height + GAP
    base = ", ".join(listed("BASE"))
    shapes.append(written("small", MARGIN, y + 12, f"On the ground, imported by all: {base}."))
    numbered = [middle for number, middle in circles if number]
    line = f"<path class='path' d='M{STATIONS} {numbered[0]:.0f}V{numbered[-1]:.0f}'/>"
    dots = "".join(drawn_circle(number, middle) for number, middle in circles)
    heads = written("head", MARGIN, 28, "Folders: each imports only those above it")
    heads += written("head", STATIONS - 12, 28, "The path of one event, from a source to a score")
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {y + 28:.0f}' role='img' "
        f"aria-label='The folders of Hotbed, and the path of one event'><style>{STYLE}</style>"
        f"<rect class='page' width='100%' height='100%'/>{heads}{''.join(shapes)}{line}{dots}"
        "</svg>\n"
    )


def drawn_floor(floor: Floor, y: float, height: float) -> list[str]:
    box = (
        f"<rect class='floor' x='{MARGIN}' y='{y:.0f}' width='{WIDTH - 2 * MARGIN}' "
        f"height='{height:.0f}' rx='6'/>"
    )
    texts = [
        written(style, MARGIN + 12, y + 20 + LINE * row, text)
        for row, (style, text) in enumerate(floor.lines)
    ]
    return [box, *texts]


def drawn_words(station: Station, middle: float) -> list[str]:
    files = "  ".join(name.removeprefix("src/hotbed/") for name in station.files)
    left = STATIONS + 20
    return [
        written("words", left, middle - 3, station.words),
        written("file", left, middle + 12, files),
    ]


def drawn_circle(number: str, middle: float) -> str:
    if not number:
        return f"<circle class='beside' cx='{STATIONS}' cy='{middle:.0f}' r='5'/>"
    return f"<circle class='circle' cx='{STATIONS}' cy='{middle:.0f}' r='11'/>" + written(
        "number", STATIONS, middle + 4, number
    )


def written(style: str, x: float, y: float, text: str) -> str:
    return f"<text class='{style}' x='{x:.0f}' y='{y:.0f}'>{html.escape(text)}</text>"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    PICTURE.write_text(picture(PAGE.read_text()))
