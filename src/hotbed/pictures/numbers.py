# SPDX-License-Identifier: Apache-2.0
"""Write numbers as people read them, in English or in Chinese."""

from __future__ import annotations

import math
from typing import Any, Literal

Language = Literal["en", "zh"]

_SCALES: dict[Language, tuple[tuple[float, str], ...]] = {
    "en": ((1e6, "M"),),
    "zh": ((1e8, "亿"), (1e4, "万")),
}
_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SECONDS = ((86_400, "d"), (3600, "h"), (60, "min"))


def number_text(value: Any, language: Language = "en") -> str:
    """Return a number as people write it: 1.2 M (120 万), 1,234, 0.5; other values as text."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if not math.isfinite(value):
        return "–"
    for unit, name in _SCALES[language]:
        if abs(value) >= unit:
            count = value / unit
            return f"{count:,.0f} {name}" if abs(count) >= 9999.5 else f"{count:,.4g} {name}"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4f}".rstrip("0").rstrip(".")


def bytes_text(num_bytes: float | None) -> str:
    """Return bytes with a binary unit, such as 1.5 GiB; – for None."""
    if num_bytes is None:
        return "–"
    for unit, name in _BYTES:
        if num_bytes >= unit:
            count = num_bytes / unit
            return f"{count:,.0f} {name}" if count >= 100 else f"{count:.3g} {name}"
    return f"{num_bytes:,.0f} B"


def seconds_text(seconds: float | None) -> str:
    """Return a duration with the unit that fits, such as 12 ms, 3.4 s, 5 min; – for None."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    for unit, name in _SECONDS:
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.0f} {name}"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.3g} ms"


def share_text(share: float | None) -> str:
    """Return a share in percent, such as 3.4 %; – for None."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.3g} %"
