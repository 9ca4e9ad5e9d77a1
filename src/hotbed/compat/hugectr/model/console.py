# SPDX-License-Identifier: Apache-2.0
"""What HugeCTR prints: lines with a time, and headings. On several ranks, the first prints."""

from __future__ import annotations

from datetime import datetime

from hotbed.parallel.world import rank

WIDTH = 110


def say(text: str) -> None:
    """Print a line as HugeCTR's log does, on standard output."""
    now = datetime.now()
    show(f"[HCTR][{now:%H:%M:%S}.{now.microsecond // 1000:03}][INFO][RK0][main]: {text}")


def show(text: str) -> None:
    """Print a text as it is."""
    if not rank():
        print(text)


def say_heading(text: str) -> None:
    """Print a heading across the page."""
    show(f"{text:=^{WIDTH}}")
