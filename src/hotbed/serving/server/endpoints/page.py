# SPDX-License-Identifier: Apache-2.0
"""The page for people: which versions answer, by which rule, without JavaScript."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotbed.pictures.page import stylesheet

_PAGE = Path(__file__).with_name("page.html")
_HEADS = (
    "role",
    "version",
    "published",
    "share",
    "requests",
    "of all",
    "candidates",
    "errors",
    "mean latency",
    "mean score",
)


def page(server: Mapping[str, Any], status: Mapping[str, Any], nonce: str) -> bytes:
    """Return the page.

    Args:
        server: name and version of the server.
        status: what `/status` returns.
        nonce: of the script of the page.
    """
    models = status["models"]
    plural = "" if len(models) == 1 else "s"
    state = f"{server['name']} {server['version']} · {len(models)} model{plural}"
    sections = "".join(map(_section, models))
    text = _PAGE.read_text(encoding="utf-8")
    parts = {
        "$style": stylesheet(),
        "$nonce": nonce,
        "$state": html.escape(state),
        "$routes": sections,
    }
    for name, value in parts.items():
        text = text.replace(name, value)
    return text.encode()


def _section(model: Mapping[str, Any]) -> str:
    """Return the versions of a model as a table, and what is to be said of them."""
    routes = model["routes"]
    revision = routes["revision"]
    rule = "no rule: the newest version answers"
    if revision is not None:
        rule = f"revision {revision}: {json.dumps(routes['rule']) if routes['rule'] else 'follow'}"
    notes = [("", rule), ("bad", routes["problem"])]
    if routes["unsplit"]:
        notes.append(("", f"{routes['unsplit']:,} requests name no user of the canary"))
    shadow = routes["shadow"]
    if shadow["requests"] or shadow["dropped"]:
        mean = shadow["difference_sum"] / max(1, shadow["rows"])
        notes.append(
            (
                "",
                f"shadow: {shadow['requests']:,} requests compared, {shadow['dropped']:,} dropped, "
                f"{shadow['errors']:,} errors; {shadow['different']:,} of {shadow['rows']:,} "
                f"candidates differ, by {mean:.2g} in the mean and {shadow['difference_most']:.2g} "
                "at most",
            )
        )
    if model.get("log"):
        log = model["log"]
        notes.append(("", f"log: {log['logged']:,} requests, {log['dropped']:,} dropped"))
    heads = _row(_HEADS, "th")
    rows = "".join(_row(cells, "td") for cells in _versions(model))
    paragraphs = "".join(
        f'<p class="{kind}">{html.escape(text)}</p>' for kind, text in notes if text
    )
    caption = f"<caption>{html.escape(model['name'])}</caption>"
    table = f"<div class=box><table class=text>{caption}{heads}{rows}</table></div>"
    return f"<section>{table}{paragraphs}</section>"


def _versions(model: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """Yield the cells of each version of a role, and of each other one that has answered.

    A shadow and the newest version have no counts: requests are answered by `stable` or `canary`.
    """
    routes = model["routes"]
    traffic = {(entry["version"], entry["route"]): entry for entry in routes["traffic"]}
    total = sum(entry["requests"] for entry in traffic.values())
    canary = routes["rule"].get("canary")
    for role, entry in routes["roles"].items():
        share = ""
        is_answering = role in ("stable", "canary")
        if canary is not None and is_answering:
            part = canary["share"] if role == "canary" else 1 - canary["share"]
            share = f"{part:.4g} by {canary['by']}"
        counts = traffic.pop((entry["version"], role), None)
        yield [
            role,
            str(entry["version"]),
            _age(entry["published"]),
            share,
            *(_counts(counts, total) if is_answering else [""] * 6),
        ]
    for (version, role), counts in traffic.items():
        yield [role, str(version), "", "", *_counts(counts, total)]


def _counts(counts: Mapping[str, Any] | None, total: int) -> list[str]:
    if counts is None:
        return ["0", *[""] * 5]
    requests = counts["requests"]
    return [
        f"{requests:,}",
        f"{requests / max(1, total):.2%}",
        f"{counts['rows']:,}",
        f"{counts['errors']:,}",
        f"{1000 * counts['seconds'] / max(1, requests):.2f} ms",
        f"{counts['score_sum'] / counts['scores']:.4f}" if counts["scores"] else "",
    ]


def _age(published: float | None) -> str:
    if published is None:
        return ""
    seconds = max(0.0, time.time() - published)
    for length, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _row(cells: Sequence[str], kind: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"
