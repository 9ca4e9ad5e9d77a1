# SPDX-License-Identifier: Apache-2.0
"""Lay out one HTML file: cards with numbers on top, then sections with charts and tables."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from hotbed.pictures.numbers import Language, number_text


@dataclass(frozen=True)
class LivePage:
    """What a page has besides where a server answers with it.

    Attributes:
        head: HTML of the head.
        notice: HTML above the cards.
        script: JavaScript that follows that of the page.
        nonce: of the script, for the server's Content-Security-Policy.
    """

    head: str
    notice: str
    script: str
    nonce: str


def page_of(
    title: str,
    subtitle: str,
    cards: Mapping[str, Any],
    sections: Sequence[str],
    *,
    live: LivePage | None = None,
    language: Language = "en",
) -> str:
    """Return a self-contained HTML page.

    Args:
        title: text of the head.
        subtitle: text below the title.
        cards: numbers by name, on top of the page.
        sections: HTML, such as `section` returns; empty ones are left out.
        live: what a page of a server has besides.
        language: of the numbers on the cards.
    """
    live = live or LivePage("", "", "", "")
    return Template(_text_of("page.html")).safe_substitute(
        head=live.head,
        notice=live.notice,
        title=html.escape(title),
        style=stylesheet(),
        subtitle=html.escape(subtitle),
        cards=cards_of(cards, language),
        sections="\n".join(part for part in sections if part),
        nonce=f' nonce="{live.nonce}"' if live.nonce else "",
        script=_text_of("page.js") + live.script,
    )


def stylesheet() -> str:
    """Return the stylesheet of all pages."""
    return _text_of("style.css")


@cache
def _text_of(name: str) -> str:
    return resources.files("hotbed.pictures").joinpath(name).read_text(encoding="utf-8")


def cards_of(cards: Mapping[str, Any], language: Language = "en") -> str:
    """Return numbers with their names, as HTML."""
    return "".join(
        f"<div class='card'><b>{html.escape(number_text(value, language))}</b>"
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
    return _table("text" if text else "", head, rows)


def log_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of events, as HTML; its last column holds sentences."""
    return _table("log", head, rows)


def _table(style: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = ""
    if any(head):
        top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    named = f" class={style}" if style else ""
    return box(f"<table{named}><tr>{top}</tr>{body}</table>")
