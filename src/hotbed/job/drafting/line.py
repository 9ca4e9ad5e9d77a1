# SPDX-License-Identifier: Apache-2.0
"""A line of a drafted job: what a column is, and the reason for it, which a person reads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

import polars as pl

from hotbed.yaml_files import parse_value

_WORDS_OF_YAML = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")

Role = Literal["label", "time", "id", "dense", "left out"]


@dataclass(frozen=True)
class Line:
    """A column of a drafted job: its role, its text in YAML, and the reason."""

    role: Role
    text: str
    why: str


def left_out(name: str, why: str) -> Line:
    """Return the line of a column that the draft does not use."""
    return Line("left out", quoted(name), f"left out: {why}")


def plain_id(name: str) -> str:
    """Return the text of an id column without options."""
    return f"{{kind: id, name: {quoted(name)}}}"


def share_of(true: pl.Series) -> float:
    """Return the share of values that are true."""
    return float(true.sum()) / max(len(true), 1)


def quoted(text: str) -> str:
    """Return text as YAML reads it back: bare where that is safe."""
    is_word = re.fullmatch(r"[A-Za-z_./][\w./-]*", text)
    if is_word and parse_value(text) == text and text.lower() not in _WORDS_OF_YAML:
        return text
    return json.dumps(text, ensure_ascii=False)
