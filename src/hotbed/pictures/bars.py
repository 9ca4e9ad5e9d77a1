# SPDX-License-Identifier: Apache-2.0
"""Draw named values as bars, for one HTML page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 0.01
"""Share of the width that a value above 0 has at least, so that it is seen."""


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its length from 0 on, the text behind it, and a colour from 0 to 7."""

    name: str
    value: float
    text: str
    color: int = 0


def bars_figure(
    title: str, bars: Sequence[Bar], *, end: float | None = None, logarithmic: bool = False
) -> str:
    """Return bars below each other as a `figure` element.

    Args:
        title: text above the bars.
        bars: from top to bottom.
        end: the value that fills the width; None = the largest.
        logarithmic: lengths are those of log(1 + value).
    """
    longest = end or max((bar.value for bar in bars), default=0.0)
    lines: list[str] = []
    for bar in bars:
        name = html.escape(bar.name)
        share = _share(bar.value, longest, logarithmic)
        lines.append(
            f"<span title='{name}'>{name}</span>"
            f"<i><i style='width:{100 * share:.2f}%;background:var(--c{bar.color})'></i></i>"
            f"<b>{html.escape(bar.text)}</b>"
        )
    body = "".join(lines)
    caption = html.escape(title)
    return f"<figure><figcaption>{caption}</figcaption><div class='bars'>{body}</div></figure>"


def _share(value: float, longest: float, logarithmic: bool) -> float:
    if longest <= 0:
        return 0.0
    share = value / longest
    if logarithmic:
        share = math.log1p(value) / math.log1p(longest)
    if 0 < share < LEAST:
        return LEAST
    return min(share, 1.0)
