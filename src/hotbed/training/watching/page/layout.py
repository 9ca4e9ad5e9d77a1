# SPDX-License-Identifier: Apache-2.0
"""Lay out a page: cards with numbers on top, then sections with charts and tables."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from hotbed.files import Where, resolve
from hotbed.persist.store import write_text
from hotbed.training.watching.page.chart import number_text


def write_page(
    path: Where, title: str, subtitle: str, cards: Mapping[str, Any], sections: Sequence[str]
) -> Where:
    """Write a self-contained HTML page, and return its path.

    Args:
        path: file to write, or its URL.
        title: text of the head.
        subtitle: text below the title.
        cards: numbers by name, on top of the page.
        sections: HTML, such as `section` and `grid` return.
    """
    folder = resources.files("hotbed.training.watching.page")
    template = Template(folder.joinpath("page.html").read_text(encoding="utf-8"))
    page = template.safe_substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        cards=cards_of(cards),
        sections="\n".join(sections),
    )
    write_text(path, page)
    return resolve(path)


def cards_of(cards: Mapping[str, Any]) -> str:
    """Return numbers with their names, as HTML."""
    return "".join(
        f"<div class='card'><b>{html.escape(number_text(value))}</b>"
        f"<span>{html.escape(name)}</span></div>"
        for name, value in cards.items()
    )


def section(name: str, text: str, figures: Sequence[str], *, small: bool = False) -> str:
    """Return figures side by side below a heading and a text, as HTML."""
    style = "grid small" if small else "grid"
    body = "\n".join(figures)
    return f"<h2>{name}</h2><p>{text}</p><div class='{style}'>{body}</div>"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: bool = False) -> str:
    """Return a table, as HTML; its cells hold numbers, or `text`."""
    top = ""
    if any(head):
        top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    style = " class=text" if text else ""
    return f"<div class='box'><table{style}><tr>{top}</tr>{body}</table></div>"
