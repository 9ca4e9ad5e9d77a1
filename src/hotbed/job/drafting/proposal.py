# SPDX-License-Identifier: Apache-2.0
"""What a drafted model may keep itself: a history of each user, and counts of the items.

A draft has these columns as comments, since a model that keeps them learns each row once, and a
history needs another network. docs/histories.md says what they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from hotbed.job.drafting.line import Line, plain_id, quoted
from hotbed.job.drafting.moments import span_seconds
from hotbed.job.drafting.roles import find_item, find_user

HISTORY = 100
"""Newest items of a user that a history has."""

_WINDOWS = (600, 3600, 86_400, 7 * 86_400, 30 * 86_400)
_WINDOWS_IN_SPAN = 4
"""How often the times of a file hold a window that is proposed."""

_TILES = 24
"""Tiles of a window, at least."""


@dataclass(frozen=True)
class Proposal:
    """The columns that are proposed, and the lines that a job then has instead of its own.

    Attributes:
        lines: of the columns.
        model: the line `model`; empty: the network stays as it is.
    """

    lines: Sequence[Line]
    model: str

    def columns_text(self) -> str:
        """Return the columns as comments of the schema, with how to use them."""
        width = 2 + max(len(line.text) for line in self.lines)
        columns = [f"    #kept - {line.text:<{width}}# {line.why}" for line in self.lines]
        old = "the lines `model` and `fit`" if self.model else "the line `fit`"
        head = (
            "    # A model can keep these columns itself, for training and for servers, if it\n"
            "    # learns each row once, in the order of time: docs/histories.md. To use them,\n"
            f'    # remove {old} below, and the mark "#kept " wherever it stands.\n'
            "    # `valid` adds nothing to them, so its late rows see little: rows that come as a\n"
            "    # `stream` are scored as a server would, each batch before it is learned."
        )
        return "\n".join([head, *columns])

    def model_text(self) -> str:
        """Return the model that reads them as a comment, with the end of the line before it."""
        return f"\n#kept model: {self.model}" if self.model else ""


def propose(
    frame: pl.DataFrame, lines: Sequence[Line], label: str, time: str | None
) -> Proposal | None:
    """Return what a model may keep of a file; None if it has no item or no time of events.

    Args:
        frame: the first rows of the file.
        lines: of its columns.
        label: the column to predict.
        time: the time of events.
    """
    ids = {line.text for line in lines if line.role == "id"}
    plain = frame.select(name for name in frame.columns if plain_id(name) in ids)
    item = find_item(plain)
    user = find_user(plain)
    if item is None or time is None:
        return None
    where = f"where: {{{quoted(label)}: 1}}"
    history = f"earlier_{item}"
    counts = f"{item}_counts"
    columns: list[Line] = []
    model = ""
    if user is not None and history not in frame.columns:
        text = f"of: [{quoted(item)}], by: {quoted(user)}, {where}, length: {HISTORY}"
        why = f"the newest {item} of each {user} with the label 1"
        columns.append(Line("id", f"{{kind: history, name: {quoted(history)}, {text}}}", why))
        targets = f"{{{quoted(history)}: {quoted(item)}}}"
        settings = f"histories: {targets}, attention: dot, hidden: [128, 64], dropout: 0.1"
        model = f"{{kind: din, {settings}}}"
    windows = _windows(span_seconds(frame[time]))
    if windows and counts not in frame.columns:
        times = f"windows: {windows}, every: {math.gcd(*windows) // _TILES}"
        text = f"by: {quoted(item)}, {where}, {times}"
        why = f"of each {item}: positives, rows and their rate, by windows in seconds"
        columns.append(Line("dense", f"{{kind: count, name: {quoted(counts)}, {text}}}", why))
    return Proposal(columns, model) if columns else None


def _windows(span: float) -> list[int]:
    """Return the two longest windows that the times of a file hold a few times, in seconds."""
    return [window for window in _WINDOWS if _WINDOWS_IN_SPAN * window <= span][-2:]
