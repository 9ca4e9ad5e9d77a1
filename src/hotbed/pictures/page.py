# SPDX-License-Identifier: Apache-2.0
"""Lay out one HTML file: cards with numbers on top, then sections with charts and tables."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from hotbed.pictures.charts import number_text


def page_of(title: str, subtitle: str, cards: Mapping[str, Any], sections: Sequence[str]) -> str:
    """Return a self-contained HTML page.

    Args:
        title: text of the head.
        subtitle: text below the title.
        cards: numbers by name, on top of the page.
        sections: HTML, such as `section` returns; empty ones are left out.
    """
    template = resources.files("hotbed.pictures").joinpath("page.html")
    return Template(template.read_text(encoding="utf-8")).safe_substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        cards=cards_of(cards),
        sections="\n".join(part for part in sections if part),
    )


def cards_of(cards: Mapping[str, Any]) -> str:
    """Return numbers with their names, as HTML."""
    return "".join(
        f"<div class='card'><b>{html.escape(number_text(value))}</b>"
        f"<span>{html.escape(name)}</span></div>"
        for name, value in cards.items()
    )


def section(name: str, body: str, text: str = "") -> str:
    """Return HTML below a heading and a text."""
    paragraph = f"<p>{html.escape(text, quote=False)}</p>" if text else ""
    return f"<h2>{html.escape(name, quote=False)}</h2>{paragraph}{body}"


def box(body: str) -> str:
    """Return HTML in a frame that scrolls where it is too wide."""
    return f"<div class='box'>{body}</div>"


def side_by_side(figures: Sequence[str], *, small: bool = False) -> str:
    """Return figures in as many columns as fit, as HTML."""
    style = "grid small" if small else "grid"
    body = "\n".join(figures)
    return f"<div class='{style}'>{body}</div>"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: bool = False) -> str:
    """Return a table, as HTML; its cells hold numbers, or `text`."""
    top = ""
    if any(head):
        top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    style = " class=text" if text else ""
    return box(f"<table{style}><tr>{top}</tr>{body}</table>")
